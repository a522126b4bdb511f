//! Blocks and their sums: those that are read have to fit, and those that are written get new ones.
//!
//! A block that doesn't fit its sum is as one that can't be read: it is calculated from the others of its stripe, each of which has to fit. The
//! sum then tells whether the block was wrong or the sum was. Nothing is written that fits neither.

use super::common::Common;
use super::membership::Membership;
use super::plan::Mode;
use super::record::{Batch, Stripe};
use super::sums::Sums;
use super::work::borrowed;
use crate::head_pages::{Block, bits, segments};
use crate::sums::{UNKNOWN, holder, sum_of, sum_of_zeros};
use crate::{STRIPE_BYTES, STRIPE_SECTORS};
use pvblk_block::{Buffer, Request};
use std::ops::Range;

/// What was wrong about a block and its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The block, whose own sum is this; or that isn't known yet.
    Block(u32),
    /// The sum.
    Sum,
}

/// The block in the page of a role.
fn page(record: &mut Stripe, role: usize) -> Option<Block> {
    let mut block = [0; STRIPE_BYTES];
    record.head_pages()?.read(role, &mut block);
    Some(block)
}

impl Common {
    /// True if the page of a role, which was just read, fits its sum.
    pub(super) fn page_fits(&self, record: &mut Stripe, role: usize) -> bool {
        let (Some(sums), stripe) = (&self.sums, record.known.stripe) else {
            return true;
        };
        // Most blocks of an array that was just made have none.
        if sums.get(role, stripe) == UNKNOWN {
            return true;
        }
        let Some(block) = page(record, role) else {
            return true;
        };
        match sums.fits(&block, role, stripe) {
            Ok(()) => true,
            Err(found) => {
                record.misfit = Some(Misfit::Block(found));
                false
            }
        }
    }

    /// A block that couldn't be read, or didn't fit its sum, was calculated: true if it may be written. If it is the block that was read, the sum
    /// was wrong, and is made right.
    pub(super) fn fixed_fits(&self, now: &Membership, record: &mut Stripe) -> bool {
        let Some(sums) = &self.sums else { return true };
        let (stripe, role) = (
            record.known.stripe,
            record.known.bad.trailing_zeros() as usize,
        );
        let Some(block) = page(record, role) else {
            return false;
        };
        let Err(calculated) = sums.fits(&block, role, stripe) else {
            return true;
        };
        let sector = self.geometry.stripe_member_sector(stripe);
        let place = holder(role, self.geometry.members());
        if record.misfit == Some(Misfit::Block(calculated)) {
            sums.set(role, stripe, calculated);
            record.misfit = Some(Misfit::Sum);
            if let Some(slot) = now.members.reads(place) {
                now.device(slot).note_misfit();
            }
            tracing::warn!(
                "raid5: member {place} had another checksum for sector {sector} of member {role} than the block's: it was made right"
            );
            return true;
        }
        tracing::error!(
            "raid5: sector {sector} of member {role} isn't what was written, nor is the block that is calculated from the others: it is lost"
        );
        false
    }

    /// The blocks that a batch is about to write get their sums; those that it would write to a member that is missing, too.
    pub(super) fn note_sums(&self, record: &mut Stripe) {
        let Some(sums) = &self.sums else { return };
        let stripe = record.known.stripe;
        let Some(Batch {
            plan,
            pieces,
            calculation,
        }) = &record.batch
        else {
            return;
        };
        let parity = super::bit(calculation.parity);
        let written = match plan.mode {
            Mode::Read => 0,
            Mode::Fix | Mode::Rebuild => plan.target.map_or(0, super::bit),
            Mode::Check => parity,
            Mode::NoParity | Mode::Modify | Mode::Reconstruct => calculation.touched | parity,
        };
        let Some(pages) = record.pages.as_mut().map(|set| set.pages().clone()) else {
            return;
        };
        for role in bits(written) {
            let lent = match calculation.borrows {
                true => borrowed(pieces, role),
                false => None,
            };
            let sum = match lent {
                _ if calculation.hole => sum_of_zeros(role, stripe),
                // Nobody calculates it.
                _ if plan.mode == Mode::NoParity && role == calculation.parity => UNKNOWN,
                Some(buffer) => {
                    let mut block = [0; STRIPE_BYTES];
                    buffer.read(0, &mut block);
                    sum_of(&block, role, stripe)
                }
                None => {
                    let mut block = [0; STRIPE_BYTES];
                    pages.read(role, &mut block);
                    sum_of(&block, role, stripe)
                }
            };
            sums.set(role, stripe, sum);
        }
    }

    /// Blocks of a stripe whose data and parity fit, and that were read, get sums where they have none.
    pub(super) fn learn_sums(&self, record: &mut Stripe) {
        let Some(sums) = &self.sums else { return };
        let stripe = record.known.stripe;
        for role in bits(record.known.valid) {
            if sums.get(role, stripe) != UNKNOWN {
                continue;
            }
            if let Some(block) = page(record, role) {
                sums.set(role, stripe, sum_of(&block, role, stripe));
            }
        }
    }

    /// True if blocks of a request that were read without a word, those of these sectors, fit their sums. False also if that isn't known: then
    /// their owners read them again.
    pub(super) fn request_fits(&self, request: &Request, sectors: &Range<u64>) -> bool {
        let Some(sums) = &self.sums else { return true };
        let mut blocks = sectors.clone().step_by(STRIPE_SECTORS as usize);
        blocks.all(|sector| self.block_fits(sums, request, sector))
    }

    fn block_fits(&self, sums: &Sums, request: &Request, sector: u64) -> bool {
        let place = self.geometry.locate(sector);
        let stripe = place.member_sector / STRIPE_SECTORS;
        let Some(seen) = sums.peek(stripe) else {
            return false;
        };
        let fits = sums.get(place.member, stripe) == UNKNOWN || {
            let mut block = [0; STRIPE_BYTES];
            let mut at = 0;
            let skip = ((sector - request.sector) * 512) as usize;
            segments(request, skip, STRIPE_BYTES, |part: Buffer| {
                let to = &mut block[at..at + part.len()];
                part.read(0, to);
                at += part.len();
            });
            sums.fits(&block, place.member, stripe).is_ok()
        };
        fits && sums.is_as_seen(&seen)
    }

    /// True if a piece of a read may go to its member as it is: it is of whole blocks, or no sums have to be compared.
    pub(super) fn may_read_directly(&self, sectors: &Range<u64>) -> bool {
        let is_whole = |sector: u64| sector.is_multiple_of(STRIPE_SECTORS);
        let Some(sums) = &self.sums else { return true };
        let first = self.geometry.locate(sectors.start).member_sector / STRIPE_SECTORS;
        is_whole(sectors.start) && is_whole(sectors.end) && sums.peek(first).is_some()
    }
}
