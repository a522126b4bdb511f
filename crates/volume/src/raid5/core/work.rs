//! What is calculated from pages, and copied to and from them: done without the core's lock, by whoever steps it.
//!
//! The pages of a head belong to its round, and a round has one piece of work at a time, so nobody else touches them.

use super::super::planted::{Raid5Bug, has};
use super::pages::{Block, HeadPages, bits, segments};
use super::{Piece, Shared};
use crate::raid5::STRIPE_BYTES;
use pvblk_block::RequestFlags;

/// A piece and the request that it is of.
pub(super) struct RoundPiece {
    pub piece: Piece,
    pub request: Shared,
    /// Member of its block.
    pub member: usize,
}

/// How a round makes parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Nothing is written.
    Read,
    /// The parity member is missing.
    NoParity,
    /// Read-modify-write: old parity, without the old contents of what is written, with the new ones.
    Modify,
    /// Reconstruct-write: from all data.
    Reconstruct,
    /// A block that couldn't be read is calculated and written.
    Fix,
    /// Parity is compared with the data, and calculated where it is wrong.
    Check,
    /// A block is calculated or copied, for a member that is rebuilt.
    Rebuild,
}

/// See the module's documentation.
pub(in super::super) struct Work {
    pub(super) head: usize,
    /// The queue whose request it is for.
    pub runner: usize,
    pub(super) pages: HeadPages,
    pub(super) mode: Mode,
    pub(super) pieces: Vec<RoundPiece>,
    /// All members, those whose data is written, and the parity's; as masks, but for the last.
    pub(super) all: u64,
    pub(super) touched: u64,
    pub(super) parity: usize,
    /// This page is to be calculated from all others first.
    pub(super) compute: Option<usize>,
    /// Room for partial parity, where it is wanted.
    pub(super) partial_parity: Option<Box<Block>>,
    /// The data goes to the members from where it is: nothing is copied.
    pub(super) borrows: bool,
    /// Parity was wrong.
    pub(super) mismatch: bool,
}

impl Work {
    /// Does it. `sum` is memory to calculate in.
    pub fn run(&mut self, sum: &mut Block) {
        if let Some(member) = self.compute {
            self.pages.xor_of(self.all & !(1 << member), sum);
            self.pages.write(member, sum);
        }
        match self.mode {
            Mode::Read => {
                for RoundPiece {
                    piece,
                    request,
                    member,
                } in &self.pieces
                {
                    let offset = (piece.offset * 512) as usize;
                    self.pages
                        .give(*member, offset, request, piece.skip, piece.len());
                }
            }
            Mode::Fix | Mode::Rebuild => {}
            Mode::Check => self.check(sum),
            Mode::NoParity => self.take(),
            Mode::Modify | Mode::Reconstruct => self.make_parity(sum),
        }
    }

    fn check(&mut self, sum: &mut Block) {
        self.pages.xor_of(self.all, sum);
        self.mismatch = sum.iter().any(|b| *b != 0);
        if self.mismatch {
            self.pages.xor(self.parity, sum);
            self.pages.write(self.parity, sum);
        }
    }

    /// Takes a copy of the data: from here on the submitter's may change.
    fn take(&self) {
        for RoundPiece {
            piece,
            request,
            member,
        } in &self.pieces
        {
            let offset = (piece.offset * 512) as usize;
            self.pages
                .take(*member, offset, request, piece.skip, piece.len());
        }
    }

    fn make_parity(&mut self, sum: &mut Block) {
        let data = self.all & !(1 << self.parity);
        let whole = self.touched == data;
        if self.borrows {
            self.parity_of_borrowed(sum);
            return;
        }
        if !whole {
            // What parity is without the blocks that are written.
            let rest = match self.mode {
                Mode::Modify => self.touched | 1 << self.parity,
                _ => data & !self.touched,
            };
            self.pages.xor_of(rest, sum);
            if let Some(partial) = &mut self.partial_parity {
                **partial = *sum;
            }
        }
        self.take();
        match whole {
            true => self.pages.xor_of(self.touched, sum),
            false => bits(self.touched).for_each(|member| self.pages.xor(member, sum)),
        }
        self.pages.write(self.parity, sum);
        if has(Raid5Bug::WrongPartialParity)
            && let Some(partial) = &mut self.partial_parity
        {
            **partial = *sum;
        }
    }

    fn parity_of_borrowed(&self, sum: &mut Block) {
        for (n, RoundPiece { piece, request, .. }) in self.pieces.iter().enumerate() {
            let mut at = 0;
            segments(request, piece.skip, STRIPE_BYTES, |part| {
                let to = &mut sum[at..at + part.len()];
                at += part.len();
                match n {
                    0 => part.read(0, to),
                    _ => part.region().xor_to(part.offset(), to),
                }
            });
        }
        self.pages.write(self.parity, sum);
    }
}

/// Whether a stripe is written whole by pieces that are whole blocks each, whose buffers stay as they are until the end.
pub(super) fn can_borrow(pieces: &[RoundPiece], blocks: usize) -> bool {
    pieces.len() == blocks
        && pieces.iter().all(|p| {
            p.piece.len() == STRIPE_BYTES && p.request.flags.contains(RequestFlags::STABLE_BUFFERS)
        })
}
