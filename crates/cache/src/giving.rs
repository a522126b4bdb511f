//! Memory of frames that nobody needs goes back to the system.

use crate::alloc::FreeBlock;
use crate::config::PAGE_BYTES;
use crate::core::{Next, Out};
use crate::device::Shared;
use crate::planted::{CacheBug, has};
use std::sync::Arc;

/// Blocks that are out at a time: 16 MiB of large pages.
const BATCH: usize = 8;

/// Gives back what nobody needs, and returns bytes. The core's lock is free while memory goes.
pub(crate) fn give_way(shared: &Arc<Shared>) -> u64 {
    // Somebody does it already.
    let Some(_giving) = shared.giving.try_lock() else {
        return 0;
    };
    let mut pass = None;
    let mut out = Out::default();
    let mut blocks = Vec::new();
    let (mut bytes, mut more) = (0, true);
    while more {
        let mut core = shared.core.lock();
        core.at_time(shared.clock.now());
        let pass = pass.get_or_insert_with(|| core.give_way());
        while blocks.len() < BATCH {
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
            bytes += if gone {
                block.frames().len() * PAGE_BYTES
            } else {
                0
            };
            core.gone(block, gone);
        }
        if more {
            continue;
        }
        core.end_of_giving();
        core.take_out(&mut out);
        let is_clean = core.is_clean();
        drop(core);
        shared.dispatch(&mut out, None);
        shared.wake_keeper(is_clean);
    }
    bytes as u64
}

/// One call for each run of neighbours. False if the system refuses, which costs nothing but the memory.
fn release(shared: &Shared, blocks: &[FreeBlock]) -> bool {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for frames in blocks.iter().map(FreeBlock::frames) {
        match runs.last_mut() {
            Some(run) if run.end == frames.start => run.end = frames.end,
            _ => runs.push(frames),
        }
    }
    let all = shared.region.len() / PAGE_BYTES;
    runs.into_iter().all(|mut run| {
        if has(CacheBug::NeighbourGivenBack) && run.end < all {
            run = run.start + 1..run.end + 1;
        }
        let released = shared
            .region
            .release(run.start * PAGE_BYTES, run.len() * PAGE_BYTES);
        released.is_ok()
    })
}
