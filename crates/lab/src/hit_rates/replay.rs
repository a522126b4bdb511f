//! A trace through a cache as it is served, one read of a page at a time.

use super::shapes::Trace;
use crate::page_order::disks::{ModelledDisks, ServiceCost};
use anyhow::{Context, Result, bail, ensure};
use pvblk_block::{
    BlockDevice, Buffer, Clock, ManualClock, Op, Queue, QueueContext, Readiness, Request,
    RequestFlags, Status,
};
use pvblk_cache::{CacheConfig, PAGE_BYTES, PAGE_SECTORS, PageCache, Policy};
use std::sync::Arc;

/// Most steps of one read; one with more hangs.
const MOST_STEPS: u32 = 100_000;

/// Shares of the counted reads and of all reads that hit a cache of `pages` pages.
pub fn rates<P: Policy>(policy: P, pages: u64, trace: &Trace) -> Result<(f64, f64)> {
    let clock = Arc::new(ManualClock::default());
    let disk = ModelledDisks::new(ServiceCost::PLAIN, trace.end() * PAGE_SECTORS, &clock);
    let disk = Arc::new(disk);
    let mut config = CacheConfig::new(pages * PAGE_BYTES as u64);
    config.lists = 1;
    // Pages that are read in advance aren't the policy's merit.
    config.readahead_bytes = Some(0);
    let below: Arc<dyn BlockDevice> = disk.clone();
    let cache = PageCache::with_policy(&config, policy, below, clock.clone())?;
    let cache: Arc<dyn BlockDevice> = Arc::new(cache);
    let mut queue = Queue::open(&cache, &QueueContext::new(1))?;
    let buffer = Buffer::anonymous(PAGE_BYTES)?;
    let mut next = Some(Request::with_buffers(Op::Read, 0, vec![buffer], 0));
    let mut done = Vec::new();
    super::shares(trace, |page| {
        let mut request = next.take().context("one read at a time")?;
        let sector = page * PAGE_SECTORS;
        request.reset(Op::Read, RequestFlags::empty(), sector, PAGE_SECTORS, 0);
        let begin = clock.now();
        queue.submit(&mut vec![request]);
        for _ in 0..MOST_STEPS {
            if queue.poll(&mut done) > 0 {
                let done = done.pop().context("a completion")?;
                ensure!(done.status == Status::Ok, "a read failed");
                next = Some(done.request);
                // Only the disk takes time.
                return Ok(clock.now() == begin);
            }
            if let Readiness::Wait(until) = queue.arm() {
                let until = until.into_iter().chain(disk.next_due()).min();
                clock.advance_to(until.context("the read waits for ever")?);
            }
        }
        bail!("the read of page {page} doesn't end")
    })
}
