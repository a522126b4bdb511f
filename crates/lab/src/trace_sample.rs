//! A capture of a small mixed load through the whole ring path in one process: for tests of what reads captures.

use crate::loopback::Loopback;
use anyhow::{Context, Result, ensure};
use pvblk_backend::{BlkifSource, Disk, Lane, RequestSource};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Completion, Op, Queue, QueueContext, Request, RequestFlags};
use pvblk_client::rings::Frontend;
use pvblk_trace::blktrace::write_capture;
use pvblk_trace::{DEFAULT_CAPACITY, Recorder};
use std::path::Path;
use std::sync::Arc;

/// Size of the disk in blocks of 4 KiB.
const BLOCKS: u64 = 1024;
/// Most requests of one batch.
const MOST: usize = 8;

/// Runs `requests` requests, by `seed`, and writes the capture `prefix`. Returns how many events it has.
pub fn run(prefix: &Path, requests: usize, seed: u64) -> Result<usize> {
    let recorder = Arc::new(Recorder::new(DEFAULT_CAPACITY));
    let collector = recorder.collector();
    let tracing = Tracing::to(recorder, "sample");
    let device = pvblk_volume::open("mem:4M")?;
    let (front, mut back) = Loopback::default().wire(device.as_ref())?;
    let disk = Disk::new("sample", device, tracing.clone());
    let parts = back.pop().context("no queue")?;
    let source = BlkifSource::new(parts);
    source.fix_pull(8);
    let mut lane = Lane::open(&disk, Box::new(source))?;
    let front: Arc<dyn BlockDevice> = Frontend::new(front)?;
    let source = front.buffer_source().context("no memory")?;
    let context = QueueContext {
        tracing,
        submitter: 1000,
        ..QueueContext::new(MOST as u32)
    };
    let mut queue = Queue::open(&front, &context)?;
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut batch, mut done, mut events) = (Vec::new(), Vec::<Completion>::new(), Vec::new());
    let mut left = requests;
    while left > 0 {
        let count = rng.usize(1..=MOST.min(left));
        left -= count;
        // Neighbours, which merge, or anywhere; no two of a batch at the same place.
        let step = if rng.bool() { 1 } else { 32 };
        let first = rng.u64(..BLOCKS - MOST as u64 * step);
        let op = [Op::Read, Op::Write, Op::Read, Op::Write, Op::Discard][rng.usize(..5)];
        for n in 0..count as u64 {
            let buffer = source.allocate(4096).context("out of memory")?;
            let sector = (first + n * step) * 8;
            let mut request = match op {
                Op::Discard => Request::new(op, sector, 8, n),
                _ => Request::with_buffers(op, sector, vec![buffer], n),
            };
            if op == Op::Write && rng.u8(..8) == 0 {
                request.flags = RequestFlags::FUA;
            }
            batch.push(request);
        }
        if rng.u8(..8) == 0 {
            batch.pop();
            batch.push(Request::new(Op::Flush, 0, 0, MOST as u64));
        }
        queue.submit(&mut batch);
        while queue.in_flight() > 0 {
            lane.step();
            queue.poll(&mut done);
        }
        ensure!(
            done.drain(..).all(|c| c.status == pvblk_block::Status::Ok),
            "a request failed"
        );
        collector.drain(&mut events);
    }
    write_capture(prefix, &collector, &mut events)
        .with_context(|| format!("writing {}", prefix.display()))?;
    ensure!(collector.drops().is_empty(), "events were dropped");
    Ok(events.len())
}
