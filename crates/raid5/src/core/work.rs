//! Calculations on pages, and copies to and from them.
//!
//! The pages of a stripe belong to its batch, and a batch has one calculation at a time, so no other thread touches them.

use super::fits::sum_read;
use super::plan::{Calculation, Mode, bit};
use super::{Piece, SharedRequest};
use crate::head_pages::{HeadPages, segments};
use crate::words::Partial;
use crate::{STRIPE_BYTES, STRIPE_SECTORS};
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
pub(in super::super) enum Work {
    Stripe(StripeWork),
    Run(RunWork),
}

impl Work {
    /// Does the computation.
    pub fn run(&mut self) {
        match self {
            Work::Stripe(work) => work.run(),
            Work::Run(work) => work.run(),
        }
    }

    /// Bytes that users write with it.
    pub fn written_bytes(&self) -> usize {
        match self {
            Work::Stripe(work) => work.written_bytes(),
            Work::Run(work) => work.written_bytes(),
        }
    }
}

/// The calculation of a batch.
pub(in super::super) struct StripeWork {
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

impl StripeWork {
    pub(super) fn run(&mut self) {
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

/// The calculation of a run: parity of stripes that a request writes whole.
pub(in super::super) struct RunWork {
    /// Its run among those under way.
    pub(super) flying: usize,
    pub(super) blocks: Vec<RunBlock>,
    /// Those of each stripe.
    pub(super) pages: Vec<HeadPages>,
    pub(super) parity: usize,
    /// The data goes to the members from where it is.
    pub(super) borrows: bool,
}

/// The data blocks of a role in a run.
pub(super) struct RunBlock {
    pub role: usize,
    /// The write that has their data.
    pub request: SharedRequest,
    /// Bytes of it before the block of the first stripe. Those of the other stripes follow that one.
    pub skip: usize,
}

impl RunWork {
    fn run(&mut self) {
        let roles = self.blocks.iter().map(|block| block.role);
        let others = roles.fold(0, |all, role| all | bit(role));
        for (pages, skip) in self.pages.iter().zip((0..).step_by(STRIPE_BYTES)) {
            if self.borrows {
                let blocks = self.blocks.iter().map(|block| {
                    let found = lent_at(&block.request, block.skip + skip);
                    let (buffer, at) = found.expect("a block in one buffer");
                    (&**buffer.region(), buffer.offset() + at)
                });
                pages.sum_of(self.parity, self.blocks.len(), blocks);
                continue;
            }
            for block in &self.blocks {
                let (request, skip) = (&block.request, block.skip + skip);
                pages.take(block.role, 0, request, skip, STRIPE_BYTES);
            }
            pages.sum(self.parity, others);
        }
    }

    /// Buffers with the data of a role, stripe by stripe.
    pub(super) fn data(&self, role: usize) -> Vec<Buffer> {
        let mut buffers = Vec::with_capacity(self.pages.len());
        let block = self.blocks.iter().find(|block| block.role == role);
        match block.filter(|_| self.borrows) {
            Some(RunBlock { request, skip, .. }) => {
                let bytes = self.pages.len() * STRIPE_BYTES;
                segments(request, *skip, bytes, |buffer, at, len| {
                    buffers.extend(buffer.slice(at, len));
                });
            }
            None => buffers.extend(self.pages.iter().filter_map(|pages| pages.buffer(role))),
        }
        buffers
    }

    /// Bytes of the stripes.
    pub(super) fn written_bytes(&self) -> usize {
        self.pages.len() * self.blocks.len() * STRIPE_BYTES
    }

    /// Bytes that a run has loaded or stored: a copy does both with each byte, and a XOR loads all its sources.
    pub(super) fn moved_bytes(&self) -> usize {
        let copied = if self.borrows {
            0
        } else {
            2 * self.written_bytes()
        };
        copied + self.written_bytes() + self.pages.len() * STRIPE_BYTES
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

fn lent(p: &BatchPiece) -> Option<(&Buffer, usize)> {
    lent_at(&p.request, p.piece.skip)
}

/// The buffer, and the place in it, that has the data of a whole block, which begins behind `skip` bytes of a request. `None`: it lies in several
/// buffers, or in none.
fn lent_at(request: &Request, skip: usize) -> Option<(&Buffer, usize)> {
    let mut found = None;
    segments(request, skip, STRIPE_BYTES, |buffer, at, len| {
        found = Some((buffer, at)).filter(|_| len == STRIPE_BYTES);
    });
    found
}

/// True if no block of the array lies in two buffers of a request.
pub(super) fn lies_in_blocks(request: &Request) -> bool {
    let begin = (request.sector % STRIPE_SECTORS * 512) as usize;
    let ends = request.buffers.iter().scan(begin, |end, buffer| {
        *end += buffer.len();
        Some(*end)
    });
    let inner = request.buffers.len().saturating_sub(1);
    ends.take(inner).all(|end| end % STRIPE_BYTES == 0)
}
