//! Write-zeroes and discard: writes of zeros that carry no data, some stripes at a time, however long the
//! requests are.
//!
//! They go the way of every other write, with its log, bitmap and superblocks, so a power cut at any moment
//! has the same effects as for a write. Only the last step differs: a stripe that is zeros on all members,
//! its parity too, is written by the members' own write-zeroes, which may give the space back. A discard is
//! done for whole rows of chunks and ignored for the rest; without one of the members it is ignored
//! altogether.

use super::work::BatchPiece;
use crate::STRIPE_BYTES;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Limits, Op, Request, RequestFlags};

/// The members' support for write-zeroes.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Ability {
    /// A completed write needs a flush.
    pub volatile: bool,
    /// It writes zeros by itself.
    pub zeroes: bool,
}

impl From<Limits> for Ability {
    fn from(limits: Limits) -> Ability {
        Ability {
            volatile: limits.volatile_cache,
            zeroes: limits.write_zeroes,
        }
    }
}

/// True if a batch leaves only zeros in its stripe, which may be holes.
pub(super) fn is_hole(pieces: &[BatchPiece], blocks: usize) -> bool {
    let whole = |p: &BatchPiece| p.piece.len() == STRIPE_BYTES || has(Plant::HolesTooLarge);
    pieces.len() == blocks && pieces.iter().all(|p| whole(p) && may_unmap(&p.request))
}

fn may_unmap(request: &Request) -> bool {
    match request.op {
        Op::Discard => true,
        Op::WriteZeroes => !request.flags.contains(RequestFlags::NO_UNMAP),
        _ => false,
    }
}
