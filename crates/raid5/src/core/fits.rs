//! Blocks and their sums: those that are read have to fit, and those that are written get new ones.
//!
//! A block that doesn't fit its sum is as one that can't be read: it is calculated from the others of its stripe, each of which has to fit. The
//! sum then tells whether the block was wrong or the sum was. Nothing is written that fits neither.

use super::common::Common;
use super::membership::Membership;
use super::plan::{Mode, bit};
use super::record::Stripe;
use super::sums::Sums;
use super::work::borrowed;
use crate::head_pages::{Block, bits, segments};
use crate::sums::{UNKNOWN, holder, sum_of, sum_of_xor, sum_of_zeros};
use crate::{STRIPE_BYTES, STRIPE_SECTORS};
use pvblk_block::Request;
use std::cell::RefCell;
use std::ops::Range;

/// The wrong one of a block and its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The block, whose own sum is this; or that isn't known yet.
    Block(u32),
    /// The sum on the next member.
    Sum,
}

thread_local! {
    /// The block whose sum is made: data lies in memory that others may change, so it is copied out, to where the copy stays in the nearest cache.
    static BLOCK: RefCell<Block> = const { RefCell::new([0; STRIPE_BYTES]) };
}

/// The sum of the block that `read` reads, at a place.
pub(super) fn sum_read(place: usize, stripe: u64, read: impl FnOnce(&mut Block)) -> u32 {
    BLOCK.with_borrow_mut(|block| {
        read(block);
        sum_of(block, place, stripe)
    })
}

/// The sum of the block in a page of a batch, which has pages.
fn sum_of_page(record: &mut Stripe, role: usize) -> u32 {
    let stripe = record.known.stripe;
    let pages = record.pages.as_mut().expect("a batch has pages").pages();
    sum_read(role, stripe, |block| pages.read(role, block))
}

impl Common {
    /// True if the page of a role, which was just read, fits its sum.
    pub(super) fn page_fits(&self, record: &mut Stripe, role: usize) -> bool {
        let (Some(sums), stripe) = (&self.sums, record.known.stripe) else {
            return true;
        };
        let wanted = sums.get(role, stripe);
        // Most blocks of an array that was just made have none. A trusted block may be read again, after a stop.
        if wanted == UNKNOWN || record.trusted == Some(role) {
            return true;
        }
        let found = sum_of_page(record, role);
        // That of the stripe's bad block stays.
        if found != wanted && record.known.bad == 0 {
            record.misfit = Some(Misfit::Block(found));
        }
        found == wanted
    }

    /// A block that couldn't be read, or didn't fit its sum, was calculated: true if it may be written. If it is the block that was read, the sum
    /// was wrong, and is made right.
    pub(super) fn fixed_fits(&self, now: &Membership, record: &mut Stripe) -> bool {
        let Some(sums) = &self.sums else { return true };
        let (stripe, role) = (
            record.known.stripe,
            record.known.bad.trailing_zeros() as usize,
        );
        let (calculated, wanted) = (sum_of_page(record, role), sums.get(role, stripe));
        if let Some(held) = record.trusted.filter(|_| calculated == wanted) {
            let sum = sum_of_page(record, held);
            self.right_sum(now, (held, stripe), sum);
            return true;
        }
        if record.trusted.is_none() && [calculated, UNKNOWN].contains(&wanted) {
            return true;
        }
        if record.trusted.is_none() && record.misfit == Some(Misfit::Block(calculated)) {
            self.right_sum(now, (role, stripe), calculated);
            record.misfit = Some(Misfit::Sum);
            return true;
        }
        let sector = self.geometry.stripe_member_sector(stripe);
        tracing::error!(
            "raid5: sector {sector} of member {role} isn't what was written, nor is the block that is calculated from the others: it is lost"
        );
        false
    }

    /// The sum of a block was wrong, and becomes this one. It counts for the member that has it.
    fn right_sum(&self, now: &Membership, (role, stripe): (usize, u64), sum: u32) {
        let Some(sums) = &self.sums else { return };
        sums.set(role, stripe, sum);
        let place = holder(role, self.geometry.members());
        if let Some(slot) = now.members.reads(place) {
            now.device(slot).note_misfit();
        }
        let sector = self.geometry.stripe_member_sector(stripe);
        tracing::warn!(
            "raid5: member {place} had another checksum for sector {sector} of member {role} than the block's: it was made right"
        );
    }

    /// Blocks of these roles (a mask) were read and don't fit their sums. A member that has lost all writes for a while has an old block, and old sums of
    /// the member before it. If there are such two with the stripe's bad block, the latter member's block is taken for right, and the other is
    /// calculated: the sum of that one, which is on a third member, tells whether it was so. False: it isn't so.
    pub(super) fn trust_held(&self, record: &mut Stripe, failed: u64) -> bool {
        let both = failed | record.known.bad;
        let was_unread = record.known.bad != 0 && record.misfit.is_none();
        if both.count_ones() != 2 || was_unread || record.trusted.is_some() {
            return false;
        }
        let members = self.geometry.members();
        let held = bits(both).find(|role| both & bit(holder(*role, members)) != 0);
        let Some(held) = held else { return false };
        record.trusted = Some(held);
        record.known.bad = both & !bit(held);
        record.known.valid |= bit(held);
        true
    }

    /// True if the block of a missing member, which was calculated and has this sum, fits its own.
    pub(super) fn computed_fits(&self, record: &Stripe, role: usize, sum: u32) -> bool {
        let (Some(sums), stripe) = (&self.sums, record.known.stripe) else {
            return true;
        };
        if [UNKNOWN, sum].contains(&sums.get(role, stripe)) {
            return true;
        }
        let sector = self.geometry.stripe_member_sector(stripe);
        tracing::error!(
            "raid5: sector {sector} of the missing member {role}: the block that is calculated from the others isn't what was written: it is lost"
        );
        false
    }

    /// The blocks that a batch is about to write get their sums; those that it would write to a member that is missing, too.
    pub(super) fn note_sums(&self, record: &mut Stripe) {
        let Some(sums) = &self.sums else { return };
        let stripe = record.known.stripe;
        let pages = record.pages.as_mut().map(|set| set.pages().clone());
        let (Some(batch), Some(pages)) = (&record.batch, pages) else {
            return;
        };
        let (plan, calculation) = (&batch.plan, &batch.calculation);
        let parity = calculation.parity;
        let data = match plan.mode {
            Mode::Read | Mode::Check => 0,
            Mode::Fix | Mode::Rebuild => plan.target.map_or(0, bit),
            Mode::NoParity | Mode::Modify | Mode::Reconstruct => calculation.touched,
        };
        // Before they get others: with the new ones' they make the new parity's.
        let old = |role: usize| (sums.get(role, stripe), role);
        let before: Vec<(u32, usize)> = match plan.mode {
            Mode::Modify => bits(data | bit(parity)).map(old).collect(),
            _ => Vec::new(),
        };
        for role in bits(data) {
            let lent = match calculation.borrows {
                true => borrowed(&batch.pieces, role),
                false => None,
            };
            let sum = match lent {
                _ if calculation.hole => sum_of_zeros(role, stripe),
                Some(buffer) => sum_read(role, stripe, |block| buffer.read(0, block)),
                None => sum_read(role, stripe, |block| pages.read(role, block)),
            };
            sums.set(role, stripe, sum);
        }
        let of_page = || sum_read(parity, stripe, |block| pages.read(parity, block));
        let others = calculation.all & !bit(parity);
        let is_whole = plan.missing.is_none() && plan.compute.is_none();
        let sum = match plan.mode {
            Mode::Read | Mode::Fix | Mode::Rebuild => return,
            // Nobody calculates it.
            Mode::NoParity => UNKNOWN,
            Mode::Check => of_page(),
            Mode::Modify | Mode::Reconstruct if calculation.hole => sum_of_zeros(parity, stripe),
            Mode::Modify if is_whole => {
                let all = before.into_iter().chain(bits(data).map(old));
                sum_of_xor(all, (parity, stripe)).unwrap_or_else(of_page)
            }
            Mode::Reconstruct if is_whole => {
                let all = bits(others).map(old);
                sum_of_xor(all, (parity, stripe)).unwrap_or_else(of_page)
            }
            Mode::Modify | Mode::Reconstruct => of_page(),
        };
        debug_assert!(plan.mode == Mode::NoParity || calculation.hole || sum == of_page());
        sums.set(parity, stripe, sum);
    }

    /// Blocks of a stripe whose data and parity fit, and that were read, get sums where they have none.
    pub(super) fn learn_sums(&self, record: &mut Stripe) {
        let Some(sums) = &self.sums else { return };
        let stripe = record.known.stripe;
        for role in bits(record.known.valid) {
            if sums.get(role, stripe) == UNKNOWN {
                sums.set(role, stripe, sum_of_page(record, role));
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
        let wanted = sums.get(place.member, stripe);
        let fits = wanted == UNKNOWN || {
            let skip = ((sector - request.sector) * 512) as usize;
            let found = sum_read(place.member, stripe, |block| {
                let mut at = 0;
                segments(request, skip, STRIPE_BYTES, |buffer, from, len| {
                    buffer.read(from, &mut block[at..at + len]);
                    at += len;
                });
            });
            found == wanted
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
