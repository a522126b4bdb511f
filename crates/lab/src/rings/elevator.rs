//! Merging as Linux's elevator does it, which no front end of ours does
//! (docs/decisions/0004-merge-in-the-plug.md): the size of the ring then decides the size of the requests,
//! which explains the anomalies of the historical measurement (seed 000).

use pvblk_block::RequestFlags;
use pvblk_client::rings::{MergeLimits, MergePolicy, Merged};
use std::collections::VecDeque;

/// Number of waiting requests that a new one is compared with. Linux finds any request by its end.
const LOOK_BACK: usize = 256;

/// A policy that merges a request also with one that waits because the ring is full.
#[derive(Debug)]
pub enum WhileWaiting {}

impl MergePolicy for WhileWaiting {
    const JOINS_WAITING: bool = true;

    fn join(waiting: &mut VecDeque<Merged>, next: Merged, limits: &MergeLimits) -> Option<Merged> {
        let mut last = waiting.iter_mut().rev().take(LOOK_BACK);
        let Some(before) = last.find(|before| fits(before, &next, limits)) else {
            return Some(next);
        };
        before.sectors += next.sectors;
        before.segments += next.segments;
        before.rest.push(next.first);
        before.rest.extend(next.rest);
        None
    }
}

/// True if `next` is the same kind of request, begins at the end of `before`, and both are within the limits.
fn fits(before: &Merged, next: &Merged, limits: &MergeLimits) -> bool {
    before.owner == next.owner
        && before.first.op == next.first.op
        && before.first.op.has_data()
        && before.first.flags == next.first.flags
        && !before.first.flags.contains(RequestFlags::FUA)
        && before.sector + before.sectors == next.sector
        && before.sectors + next.sectors <= limits.sectors
        && before.segments + next.segments <= limits.segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::{Op, Request};

    const LIMITS: MergeLimits = MergeLimits {
        sectors: 32,
        segments: 4,
    };

    fn waits(owner: u32, op: Op, sector: u64) -> Merged {
        Merged {
            owner,
            sector,
            sectors: 8,
            segments: 1,
            first: Request::new(op, sector, 8, sector),
            rest: Vec::new(),
        }
    }

    /// First sector, sectors and number of requests of each merged request that waits after all of
    /// these.
    fn waiting(requests: impl IntoIterator<Item = Merged>) -> Vec<(u64, u64, usize)> {
        let mut waiting = VecDeque::new();
        for request in requests {
            let alone = WhileWaiting::join(&mut waiting, request, &LIMITS);
            waiting.extend(alone);
        }
        let shown = |m: &Merged| (m.sector, m.sectors, m.requests().count());
        waiting.iter().map(shown).collect()
    }

    #[test]
    fn a_stream_joins_up_to_the_limits() {
        let stream = (0..6).map(|n| waits(0, Op::Read, n * 8));
        assert_eq!(waiting(stream), [(0, 32, 4), (32, 16, 2)]);
    }

    #[test]
    fn what_differs_stays_alone() {
        for other in [
            waits(1, Op::Read, 8),
            waits(0, Op::Write, 8),
            waits(0, Op::Read, 9),
            waits(0, Op::Flush, 8),
        ] {
            assert_eq!(waiting([waits(0, Op::Read, 0), other]).len(), 2);
        }
    }
}
