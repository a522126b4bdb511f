//! Both sides of the path in one thread, step by step, so that an instruction counter (callgrind) sees
//! only work and no waiting. Collect in `front_side` or in `back_side`.

use crate::loopback::Loopback;
use anyhow::{Context, Result, ensure};
use pvblk_backend::{BlkifSource, Disk, Lane, RequestSource};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Request, RequestFlags, Status,
};
use pvblk_client::rings::Frontend;
use pvblk_trace::Recorder;
use std::sync::Arc;

const BLOCK: usize = 4096;

struct Front {
    queue: Queue,
    buffers: Vec<Buffer>,
    spare: Vec<Box<Request>>,
    free: Vec<u64>,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
}

/// Submits as many requests as are free: 4 KiB random reads.
#[inline(never)]
fn front_side(f: &mut Front, blocks: &[u64], at: &mut usize) {
    f.queue.poll(&mut f.done);
    for c in f.done.drain(..) {
        let mut request = c.request;
        assert!(c.status == Status::Ok);
        request.buffers.clear();
        f.free.push(request.tag);
        f.spare.push(request);
    }
    while let (Some(id), Some(mut request)) = (f.free.pop(), f.spare.pop()) {
        let Some(block) = blocks.get(*at) else {
            f.spare.push(request);
            f.free.push(id);
            break;
        };
        *at += 1;
        request.reset(Op::Read, RequestFlags::empty(), block * 8, 8, id);
        request.buffers.push(f.buffers[id as usize].clone());
        f.batch.push(request);
    }
    f.queue.submit(&mut f.batch);
}

/// One step of the back end's lane.
#[inline(never)]
fn back_side(lane: &mut Lane) {
    lane.step();
}

/// Both ends of a disk in memory, in one thread.
pub struct BothEnds {
    front: Front,
    lane: Lane,
    rng: fastrand::Rng,
}

impl BothEnds {
    /// Both ends of a disk with `depth` requests in flight, whose layers trace through `tracing`.
    pub fn new(depth: u32, tracing: &Tracing) -> Result<BothEnds> {
        let device = pvblk_volume::open("mem:4M")?;
        let loopback = Loopback {
            ring_pages: 16,
            ..Loopback::default()
        };
        let (front, mut back) = loopback.wire(device.as_ref())?;
        let disk = Disk::new("d", device, tracing.clone());
        let parts = back.pop().context("no queue")?;
        let source = BlkifSource::new(parts);
        source.fix_pull(8);
        let lane = Lane::open(&disk, Box::new(source))?;
        let front: Arc<dyn BlockDevice> = Frontend::new(front)?;
        let source = front.buffer_source().context("no memory")?;
        let context = QueueContext {
            tracing: tracing.clone(),
            ..QueueContext::new(depth)
        };
        let buffers: Vec<_> = (0..depth).filter_map(|_| source.allocate(BLOCK)).collect();
        ensure!(buffers.len() == depth as usize, "too deep");
        Ok(BothEnds {
            front: Front {
                queue: Queue::open(&front, &context)?,
                buffers,
                spare: (0..depth)
                    .map(|i| Request::new(Op::Flush, 0, 0, u64::from(i)))
                    .collect(),
                free: (0..u64::from(depth)).collect(),
                batch: Vec::new(),
                done: Vec::new(),
            },
            lane,
            rng: fastrand::Rng::with_seed(1),
        })
    }

    /// Reads `requests` blocks anywhere.
    pub fn run(&mut self, requests: usize) {
        let blocks: Vec<u64> = (0..requests).map(|_| self.rng.u64(0..1024)).collect();
        let mut at = 0;
        while at < blocks.len() || self.front.queue.in_flight() > 0 {
            front_side(&mut self.front, &blocks, &mut at);
            back_side(&mut self.lane);
        }
    }
}

/// Requests after which the rings of a recorder are emptied.
const BETWEEN: usize = 500;

/// Runs `requests` reads at `depth`. The layers have a recorder that doesn't record, as those of a server
/// have; or one that records one request in `every`.
pub fn run(requests: usize, depth: u32, every: Option<u32>) -> Result<()> {
    let recorder = Recorder::idle(0);
    let tracing = Tracing::to(Arc::new(recorder.clone()), "d");
    let mut ends = BothEnds::new(depth, &tracing)?;
    let Some(every) = every else {
        ends.run(requests);
        return Ok(());
    };
    recorder.start_every(every);
    let (collector, mut events) = (recorder.collector(), Vec::new());
    for _ in 0..requests.div_ceil(BETWEEN) {
        ends.run(BETWEEN);
        // Outside of both sides, so that it isn't counted.
        events.clear();
        collector.drain(&mut events);
    }
    let lost: u64 = events.iter().map(pvblk_trace::Event::lost).sum();
    ensure!(lost == 0, "events were lost");
    Ok(())
}
