//! Calculations on pages, and copies to and from them.
//!
//! The pages of a stripe belong to its batch, and a batch has one calculation at a time, so no other thread touches them.

use super::fits::sum_read;
use super::plan::{Calculation, Mode, bit};
use super::{Piece, SharedRequest};
use crate::STRIPE_BYTES;
use crate::head_pages::{HeadPages, segments};
use crate::words::Partial;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Buffer, Request, RequestFlags};

/// A piece and the request that it is of.
pub(super) struct BatchPiece {
    pub piece: Piece,
    pub request: SharedRequest,
    /// Member of its block.
    pub member: usize,
}

/// See the module's documentation.
pub(in super::super) struct Work {
    /// Its batch among those under way.
    pub(super) flying: usize,
    pub(super) pages: HeadPages,
    pub(super) pieces: Vec<BatchPiece>,
    pub(super) calculation: Calculation,
    /// Partial parity for a log, where it is wanted.
    pub(super) partial: Option<Partial>,
    /// Parity was wrong.
    pub(super) mismatch: bool,
    /// The stripe, if the sum of the page that is calculated from all others is wanted.
    pub(super) sums: Option<u64>,
    /// That sum, before anything else is copied to the page.
    pub(super) computed: Option<u32>,
}

impl Work {
    /// Does the computation.
    pub fn run(&mut self) {
        let Calculation { all, mode, .. } = self.calculation;
        if let Some(member) = self.calculation.compute {
            self.pages.sum(member, all & !bit(member));
            let sum = |stripe| sum_read(member, stripe, |block| self.pages.read(member, block));
            self.computed = self.sums.map(sum);
        }
        match mode {
            Mode::Read => self.copy(HeadPages::give),
            Mode::Fix | Mode::Rebuild => {}
            Mode::Check => self.check(),
            // From here on the submitter's data may change.
            Mode::NoParity => self.copy(HeadPages::take),
            Mode::Modify | Mode::Reconstruct => self.make_parity(),
        }
    }

    /// Bytes of its pieces.
    pub(super) fn written_bytes(&self) -> usize {
        self.pieces.iter().map(|batch| batch.piece.len()).sum()
    }

    /// Bytes that a batch of writes has loaded or stored, sums apart. A copy loads and stores each byte, and a XOR loads all its sources.
    pub(super) fn moved_bytes(&self) -> usize {
        let Calculation {
            all,
            touched,
            mode,
            compute,
            borrows,
            ..
        } = self.calculation;
        let xor = |sources: u32| (sources as usize + 1) * STRIPE_BYTES;
        let members = all.count_ones();
        let computed = compute.map_or(0, |_| xor(members - 1));
        let copied = if borrows { 0 } else { 2 * self.written_bytes() };
        let changed = touched.count_ones() + 1;
        let summed = match (mode, &self.partial) {
            (Mode::Modify | Mode::Reconstruct, Some(Partial::Page(_))) => xor(changed),
            (Mode::Modify | Mode::Reconstruct, Some(_)) => {
                xor(self.calculation.unchanged().count_ones()) + xor(changed)
            }
            (Mode::Modify, None) => xor(changed) + xor(changed),
            (Mode::Reconstruct, None) => xor(members - 1),
            _ => 0,
        };
        computed + copied + summed
    }

    /// Copies each piece between its request and its page.
    fn copy(&self, copy: impl Fn(&HeadPages, usize, usize, &Request, usize, usize)) {
        for BatchPiece {
            piece,
            request,
            member,
        } in &self.pieces
        {
            let offset = (piece.offset * 512) as usize;
            copy(
                &self.pages,
                *member,
                offset,
                request,
                piece.skip,
                piece.len(),
            );
        }
    }

    /// Makes the parity page the difference to the right parity, and then the right parity.
    fn check(&mut self) {
        let Calculation { all, parity, .. } = self.calculation;
        self.pages.sum(parity, all);
        self.mismatch = !self.pages.is_zero(parity);
        self.pages.sum(parity, all & !bit(parity));
    }

    fn make_parity(&mut self) {
        let Calculation {
            all,
            touched,
            parity,
            ..
        } = self.calculation;
        if self.calculation.borrows {
            self.sum_borrowed();
            return;
        }
        if let Some(partial) = &self.partial {
            self.copy(HeadPages::take);
            partial.make_parity(&self.pages, parity, touched);
            if has(Plant::WrongPartialParity) {
                self.partial = self.pages.buffer(parity).map(Partial::Page);
            }
            return;
        }
        if self.calculation.mode == Mode::Modify {
            self.pages.sum(parity, self.calculation.unchanged());
            self.copy(HeadPages::take);
            self.pages.sum(parity, touched | bit(parity));
        } else {
            self.copy(HeadPages::take);
            self.pages.sum(parity, all & !bit(parity));
        }
    }

    fn sum_borrowed(&self) {
        let blocks = self.pieces.iter().map(|piece| {
            let (buffer, at) = lent(piece).expect("a batch borrows blocks that can be lent");
            (&**buffer.region(), buffer.offset() + at)
        });
        self.pages
            .sum_of(self.calculation.parity, self.pieces.len(), blocks);
    }
}

/// True if a stripe is written whole by pieces that are whole blocks each, in one buffer each that stays as
/// it is until the end.
pub(super) fn can_borrow(pieces: &[BatchPiece], blocks: usize) -> bool {
    let stable = |p: &BatchPiece| p.request.flags.contains(RequestFlags::STABLE_BUFFERS);
    let whole = |p: &BatchPiece| p.piece.len() == STRIPE_BYTES && lent(p).is_some();
    pieces.len() == blocks && pieces.iter().all(|p| stable(p) && whole(p))
}

/// The data of a member's block where its submitter has it, for pieces that can be borrowed.
pub(super) fn borrowed(pieces: &[BatchPiece], member: usize) -> Option<Buffer> {
    let (buffer, at) = lent(pieces.iter().find(|p| p.member == member)?)?;
    buffer.slice(at, STRIPE_BYTES)
}

/// The buffer, and the place in it, that has the data of a whole block. `None`: it lies in several buffers, or in none.
fn lent(p: &BatchPiece) -> Option<(&Buffer, usize)> {
    let mut found = None;
    segments(&p.request, p.piece.skip, STRIPE_BYTES, |buffer, at, len| {
        found = Some((buffer, at)).filter(|_| len == STRIPE_BYTES);
    });
    found
}
