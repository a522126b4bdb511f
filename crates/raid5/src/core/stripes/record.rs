//! [`Stripe`]: the record of a stripe's word, which goes with the word's token.

use super::{Piece, Record, RoundPiece, Shared, bit};
use crate::core::plan::{Calculation, Plan, View};
use crate::head_pages::{HeadPages, bits};
use crate::words::{self, Arrived, Owner, Place, StripePages};
use crate::{Geometry, STRIPE_SECTORS};
use pvblk_block::Op;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The part of a request that lies in one stripe.
pub struct Part {
    pub(super) request: Shared,
    /// Number of the request in its queue.
    pub(super) id: usize,
    /// The queue that has taken the request.
    pub(super) from: Owner,
    pub(super) stripe: u64,
    /// Sectors of the array. Those that lie in other stripes aren't this part's.
    pub(super) sectors: Range<u64>,
}

/// A part that its word's owner has taken out of the list.
pub struct Waiting {
    pub(super) place: Place,
    pub(super) part: Part,
    /// Data blocks of it that no batch has done yet, as a mask.
    left: u64,
    /// One of its blocks couldn't be had.
    failed: bool,
}

/// A batch that is calculated.
pub struct Batch {
    pub(super) plan: Plan,
    pub(super) pieces: Vec<RoundPiece>,
    pub(super) calculation: Calculation,
}

/// See the module's documentation. A free word's record keeps pages and what is known of them.
#[derive(Default)]
pub struct Stripe {
    pub(super) known: Record,
    pub(super) pages: Option<StripePages>,
    /// Parts in the order of their arrival, also those of other stripes that have the same word. A batch is for the first one's stripe.
    pub(super) waiting: Vec<Waiting>,
    pub(super) batch: Option<Batch>,
}

impl words::Record for Stripe {
    type Pages = StripePages;

    fn has_pages(&self) -> bool {
        self.pages.is_some()
    }

    fn take_pages(&mut self) -> Option<StripePages> {
        self.known.valid = 0;
        self.pages.take()
    }
}

impl Part {
    fn is_write(&self) -> bool {
        self.request.op != Op::Read
    }

    /// The part of a data block that is this part's.
    fn in_block(&self, geometry: &Geometry, index: usize) -> Range<u64> {
        let block = geometry.stripe_array_sector(self.stripe, index);
        self.sectors.start.max(block)..self.sectors.end.min(block + STRIPE_SECTORS)
    }

    /// Its data blocks, as a mask; 0: it isn't in the stripe.
    pub fn blocks(&self, geometry: &Geometry) -> u64 {
        let all = 0..geometry.data_members();
        let some = all.filter(|index| !self.in_block(geometry, *index).is_empty());
        some.fold(0, |mask, index| mask | bit(index))
    }

    /// Pieces of some of its blocks, which say that their request is number `at`.
    fn pieces(&self, geometry: &Geometry, at: usize, blocks: u64) -> impl Iterator<Item = Piece> {
        let first = self.request.sector;
        bits(blocks).map(move |index| {
            let sectors = self.in_block(geometry, index);
            Piece {
                request: at,
                write: self.is_write(),
                stripe: self.stripe,
                index,
                offset: sectors.start % STRIPE_SECTORS,
                sectors: sectors.end - sectors.start,
                skip: ((sectors.start - first) * 512) as usize,
            }
        })
    }
}

impl Waiting {
    pub fn has_failed(&self) -> bool {
        self.failed
    }
}

impl Stripe {
    /// Its pages for I/O and calculations, if it has a set. The set's memory is in use from then on.
    pub fn head_pages(&mut self) -> Option<HeadPages> {
        self.pages.as_mut().map(|set| set.pages().clone())
    }

    /// Puts arrivals behind those that wait.
    pub fn add(&mut self, arrived: impl IntoIterator<Item = Arrived<Part>>, geometry: &Geometry) {
        self.waiting
            .extend(arrived.into_iter().map(|arrived| Waiting {
                left: arrived.piece.blocks(geometry),
                place: arrived.place,
                part: arrived.piece,
                failed: false,
            }));
    }

    /// True if the next batch writes.
    pub fn is_write(&self) -> bool {
        self.waiting
            .first()
            .is_some_and(|first| first.part.is_write())
    }

    /// The queue that owns the next batch: that of the part which has waited longest.
    pub fn next_owner(&self) -> Option<Owner> {
        self.waiting.first().map(|waiting| waiting.part.from)
    }

    /// The next batch is for the first part's stripe; pages of another one aren't valid.
    pub fn turn_to_first(&mut self) {
        let stripe = self.waiting.first().map(|waiting| waiting.part.stripe);
        if let Some(stripe) = stripe.filter(|stripe| *stripe != self.known.stripe) {
            self.known = Record {
                stripe,
                ..Record::default()
            };
        }
    }

    /// Pieces of the first `count` parts, as far as they are of the first one's stripe and kind: so reads can't keep a write waiting.
    fn pieces(&self, geometry: &Geometry, count: usize) -> VecDeque<Piece> {
        let Some(first) = self.waiting.first() else {
            return VecDeque::new();
        };
        let is_alike = |part: &Part| {
            part.stripe == first.part.stripe && part.is_write() == first.part.is_write()
        };
        let some = self.waiting[..count].iter().enumerate();
        let some = some.filter(|(_, waiting)| is_alike(&waiting.part));
        some.flat_map(|(at, waiting)| waiting.part.pieces(geometry, at, waiting.left))
            .collect()
    }

    /// A plan for the first `count` parts. It has at least one block of the first.
    pub(super) fn plan(&self, view: &View<'_>, count: usize) -> Plan {
        let mut pieces = self.pieces(view.geometry, count);
        let plan = view.serve(&self.known, &pieces);
        let serves_first = |piece: &Piece| piece.request == 0 && plan.takes(piece);
        if pieces.iter().any(serves_first) {
            return plan;
        }
        pieces.retain(|piece| piece.request == 0);
        view.serve(&self.known, &pieces)
    }

    /// The batch that can be calculated from what was read: that of the first `count` parts, and of as many others as need nothing more.
    pub(super) fn ready(&self, view: &View<'_>, count: usize) -> (Plan, Vec<RoundPiece>) {
        let counts = (count..=self.waiting.len()).rev();
        let mut plans = counts.map(|count| (count, self.plan(view, count)));
        let found = plans.find(|(_, plan)| plan.reads == 0);
        let (count, plan) = found.expect("all that the first plan needs was read");
        let pieces = self.pieces(view.geometry, count).into_iter();
        let taken = pieces.filter(|piece| plan.takes(piece));
        let taken = taken.map(|piece| RoundPiece {
            request: Arc::clone(&self.waiting[piece.request].part.request),
            member: view.geometry.stripe_data(piece.stripe, piece.index),
            piece,
        });
        (plan, taken.collect())
    }

    /// The batch is planned anew, from nothing that was read.
    pub fn forget(&mut self) {
        self.batch = None;
        self.known.valid = 0;
    }

    /// All parts fail.
    pub fn fail(&mut self) -> Vec<Waiting> {
        self.forget();
        let mut all = std::mem::take(&mut self.waiting);
        all.iter_mut().for_each(|waiting| waiting.failed = true);
        all
    }

    /// Pieces of a batch are done, or failed: takes out the parts that have no others.
    pub(super) fn done(&mut self, pieces: Vec<RoundPiece>, ok: bool) -> Vec<Waiting> {
        for RoundPiece { piece, .. } in &pieces {
            let waiting = &mut self.waiting[piece.request];
            waiting.left &= !bit(piece.index);
            waiting.failed |= !ok;
        }
        // Before the parts' requests end.
        drop(pieces);
        let is_over = |waiting: &mut Waiting| waiting.left == 0;
        self.waiting.extract_if(.., is_over).collect()
    }
}
