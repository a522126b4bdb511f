//! Write-zeroes and discard: writes of zeros that carry no data, some stripes at a time, however long the
//! requests are.
//!
//! They go the way of every other write, with its log, bitmap and superblocks, so a power cut at any moment
//! has the same effects as for a write. Only the last step differs: a stripe that is zeros on all members,
//! its parity too, is written by the members' own write-zeroes, which may give the space back. A discard is
//! done for whole rows of chunks and ignored for the rest; without one of the members it is ignored
//! altogether.

use super::work::RoundPiece;
use super::{Active, Core, Piece};
use crate::{STRIPE_BYTES, STRIPE_SECTORS};
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Completion, Limits, Op, Request, RequestFlags, Status};

/// Blocks of a request that wait at a time, as many as the longest write has.
const MOST_BLOCKS: u64 = 256;

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

impl Core {
    /// Begins a write-zeroes or discard.
    pub(super) fn zero(&mut self, id: usize) {
        let (sector, sectors) = self.range(id);
        let (row, end) = (self.geometry.row_sectors(), sector + sectors);
        let stripes_of = |rows| self.geometry.row_stripes(rows);
        let Some(active) = &mut self.active[id] else {
            return;
        };
        let stripes = match active.request.op {
            Op::Discard if self.members.failed().is_some() => return,
            Op::Discard => stripes_of(sector.div_ceil(row)..end / row),
            _ => stripes_of(sector / row..end.div_ceil(row)),
        };
        active.zeroes = stripes;
        self.zero_more(id);
    }

    /// Hands the next blocks to the heads of their stripes, stripe by stripe, so that each is written whole; false if there are no more.
    pub(super) fn zero_more(&mut self, id: usize) -> bool {
        let (first, sectors) = self.range(id);
        let end = first + sectors;
        let blocks = self.geometry.data_members();
        let mut count = 0;
        while count < MOST_BLOCKS
            && let Some(stripe) = self.next_stripe(id)
        {
            for index in 0..blocks {
                let block = self.geometry.stripe_array_sector(stripe, index);
                let begin = block.max(first);
                let Some(sectors) = (block + STRIPE_SECTORS).min(end).checked_sub(begin) else {
                    continue;
                };
                if sectors == 0 {
                    continue;
                }
                count += 1;
                self.add_pieces(id, 1);
                self.put_piece(Piece {
                    request: id,
                    write: true,
                    stripe,
                    index,
                    offset: begin - block,
                    sectors,
                    skip: 0,
                });
            }
        }
        count > 0
    }

    fn next_stripe(&mut self, id: usize) -> Option<u64> {
        let (broken, failed) = (self.broken, self.members.failed());
        let active = self.active[id].as_mut()?;
        let is_over = match active.request.op {
            Op::Discard => failed.is_some(),
            _ => false,
        };
        active.failed |= broken;
        match active.failed || is_over {
            true => None,
            false => active.zeroes.next(),
        }
    }
}

impl Core {
    /// The old data would stay on the members: nothing here can promise that it is gone.
    #[cold]
    pub(super) fn refuse(&mut self, id: usize) {
        let Some(active) = self.active[id].take() else {
            return;
        };
        self.free_active.push(id);
        if let Some(request) = std::sync::Arc::into_inner(active.request) {
            let status = Status::Unsupported;
            self.done
                .push((active.owner, Completion { request, status }));
        }
    }
}

impl Active {
    /// True if more stripes of the request follow those under way.
    pub fn goes_on(&self) -> bool {
        !self.zeroes.is_empty()
    }
}

/// True if a round leaves only zeros in its stripe, which may be holes.
pub(super) fn is_hole(pieces: &[RoundPiece], blocks: usize) -> bool {
    let whole = |p: &RoundPiece| p.piece.len() == STRIPE_BYTES || has(Plant::HolesTooLarge);
    pieces.len() == blocks && pieces.iter().all(|p| whole(p) && may_unmap(&p.request))
}

fn may_unmap(request: &Request) -> bool {
    match request.op {
        Op::Discard => true,
        Op::WriteZeroes => !request.flags.contains(RequestFlags::NO_UNMAP),
        _ => false,
    }
}
