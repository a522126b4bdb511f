//! Memory of frames that nobody needs goes back to the system.

use crate::alloc::FreeBlock;
use crate::config::PAGE_BYTES;
use crate::core::{Next, Out};
use crate::policy::Policy;
use crate::shared::Shared;
use pvblk_block::planted::{Plant, has};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After a pass that brought little, the next one is no sooner.
const PAUSE: Duration = Duration::from_millis(100);

/// Gives back what nobody needs, and returns bytes. The core's lock is free while memory goes.
pub(crate) fn give_way<P: Policy>(shared: &Arc<Shared<P>>) -> u64 {
    // Somebody does it already.
    let Some(mut not_before) = shared.giving.try_lock() else {
        return 0;
    };
    if is_paused(shared, *not_before) {
        return 0;
    }
    let before = shared.memory.live_bytes();
    let mut pass = None;
    let mut out = Out::default();
    let mut blocks = Vec::new();
    let (mut bytes, mut more) = (0, true);
    while more {
        let mut core = shared.core.lock();
        core.at_time(shared.clock.now());
        let pass = pass.get_or_insert_with(|| core.give_way());
        core.go_on_giving(pass);
        while blocks.len() < core.most_out(pass) {
            match core.next_to_go(pass) {
                Next::Block(block) => blocks.push(block),
                Next::More => break,
                Next::End => {
                    more = false;
                    break;
                }
            }
        }
        drop(core);
        let gone = release(shared, &blocks);
        let mut core = shared.core.lock();
        for block in blocks.drain(..) {
            bytes += (core.gone(block, gone) * PAGE_BYTES) as u64;
        }
        core.memory_came();
        if !more {
            core.end_of_giving();
            shared.background_work(&mut core);
        }
        core.take_out(&mut out);
        let is_clean = core.is_clean();
        drop(core);
        if shared.deliver(&mut out, None) {
            shared.queues.wake_sleepers(usize::MAX);
        }
        if !more && !is_clean {
            // Also one that sleeps until pages are old.
            shared.background_wait.wake();
        }
    }
    *not_before = (bytes < before / 8).then(|| shared.clock.now() + PAUSE);
    bytes
}

fn is_paused<P: Policy>(shared: &Shared<P>, not_before: Option<Instant>) -> bool {
    not_before.is_some_and(|at| shared.clock.now() < at)
}

/// Bytes that might go; none for a while after a pass that brought little.
pub(crate) fn spare_bytes<P: Policy>(shared: &Shared<P>) -> u64 {
    let giving = shared.giving.try_lock();
    match giving.is_some_and(|not_before| is_paused(shared, *not_before)) {
        true => 0,
        false => shared.memory.live_bytes(),
    }
}

/// One call for each run of neighbours. False if the system refuses, which costs nothing but the memory.
fn release<P: Policy>(shared: &Shared<P>, blocks: &[FreeBlock]) -> bool {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for frames in blocks.iter().map(FreeBlock::frames) {
        match runs.last_mut() {
            Some(run) if run.end == frames.start => run.end = frames.end,
            _ => runs.push(frames),
        }
    }
    let all = shared.region.len() / PAGE_BYTES;
    runs.into_iter().all(|mut run| {
        if has(Plant::NeighbourGivenBack) && run.end < all {
            run = run.start + 1..run.end + 1;
        }
        let released = shared
            .region
            .release(run.start * PAGE_BYTES, run.len() * PAGE_BYTES);
        released.is_ok()
    })
}
