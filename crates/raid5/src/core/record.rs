//! [`Stripe`]: the record of a stripe's word, which goes with the word's token.

use super::fits::Misfit;
use super::membership::Seen;
use super::run::{Of, RunAtLog};
use super::{Action, BatchPiece, Piece, Record, SharedRequest, bit};
use crate::core::plan::{Calculation, Plan, View};
use crate::head_pages::{HeadPages, bits};
use crate::words::{self, Arrived, Owner, Place, StripePages};
use crate::{Geometry, STRIPE_SECTORS};
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Op, RequestFlags};
use std::ops::Range;
use std::sync::Arc;

/// Work that waits for one stripe.
pub struct Part {
    pub(super) of: PartOf,
    /// The queue that has taken the request, or that syncs.
    pub(super) from: Owner,
    pub(super) stripe: u64,
}

/// The cause of a part.
pub enum PartOf {
    /// The part of a request that lies in the stripe.
    Request {
        request: SharedRequest,
        /// Number of the request in its queue.
        id: usize,
        /// Sectors of the array. Those that lie in other stripes aren't this part's.
        sectors: Range<u64>,
        /// It comes from the stripe queue, which has this number for its stripe.
        way: Option<usize>,
    },
    /// The stripe's turn in a rebuild, resync or check.
    Sync(Action),
}

/// The kind of a batch: all of its parts have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Sync(Action),
    /// None has: a block that couldn't be read is calculated and written before anything else.
    Fix,
}

impl Kind {
    /// True if such a batch may write to members. A rebuild writes to the incoming device only, so an array that nobody has written to stays clean.
    pub fn writes(self) -> bool {
        !matches!(
            self,
            Kind::Read | Kind::Sync(Action::Check | Action::Recover | Action::Checksum)
        )
    }
}

/// A part that its word's owner has taken out of the list.
pub struct Waiting {
    pub(super) place: Place,
    pub(super) part: Part,
    /// Data blocks of it that no batch has done yet, as a mask.
    left: u64,
    /// One of its blocks couldn't be had.
    failed: bool,
    /// Its turn in an action found that parity was wrong.
    pub(super) mismatch: bool,
}

/// A batch that is calculated.
pub struct Batch {
    pub(super) plan: Plan,
    pub(super) pieces: Vec<BatchPiece>,
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
    /// The run that waits for the log with this word, its first.
    pub(super) run: Option<Box<RunAtLog>>,
    /// The array as the open batch sees it.
    pub(super) seen: Seen,
    /// Data was in its pages when the last batch began.
    pub(super) was_useful: bool,
    /// The last block that was read and didn't fit its sum. None: the bad one couldn't be read.
    pub(super) misfit: Option<Misfit>,
    /// The role of a block that doesn't fit its sum either, and that is taken for right: the member with the bad block has that sum.
    pub(super) trusted: Option<usize>,
}

impl words::Record for Stripe {
    type Pages = StripePages;

    fn has_pages(&self) -> bool {
        self.pages.is_some()
    }

    fn was_useful(&self) -> bool {
        self.was_useful
    }

    fn take_pages(&mut self) -> Option<StripePages> {
        if !has(Plant::GivenBackIsValid) {
            self.known.valid = 0;
        }
        self.pages.take()
    }
}

impl Part {
    /// Its first sector in the stripe, if traces follow its request.
    fn followed(&self, geometry: &Geometry) -> Option<u64> {
        let PartOf::Request {
            request, sectors, ..
        } = &self.of
        else {
            return None;
        };
        let blocks = (0..geometry.data_members()).filter(|_| request.followed);
        let mut in_blocks = blocks.map(|index| in_block(geometry, self.stripe, index, sectors));
        Some(in_blocks.find(|sectors| !sectors.is_empty())?.start)
    }

    /// True if it is the stripe's turn in a rebuild.
    pub fn is_rebuild(&self) -> bool {
        matches!(self.of, PartOf::Sync(Action::Recover))
    }

    /// Sectors of the array, some of which are its own; `None`: it is no request's.
    pub(super) fn sectors(&self) -> Option<&Range<u64>> {
        match &self.of {
            PartOf::Request { sectors, .. } => Some(sectors),
            PartOf::Sync(_) => None,
        }
    }

    /// True if it is of a write with FUA.
    pub(super) fn has_fua(&self) -> bool {
        match &self.of {
            PartOf::Request { request, .. } => request.flags.contains(RequestFlags::FUA),
            PartOf::Sync(_) => false,
        }
    }

    /// Its number among those under way from the stripe queue of `queue`, if it came from there.
    pub(super) fn way_of(&self, queue: Owner) -> Option<usize> {
        match self.of {
            PartOf::Request { way, .. } => way.filter(|_| self.from == queue),
            PartOf::Sync(_) => None,
        }
    }

    /// The stripe queue sends it to its word.
    pub(super) fn set_way(&mut self, number: usize) {
        if let PartOf::Request { way, .. } = &mut self.of {
            *way = Some(number);
        }
    }

    fn kind(&self) -> Kind {
        match &self.of {
            PartOf::Request { request, .. } if request.op == Op::Read => Kind::Read,
            PartOf::Request { .. } => Kind::Write,
            PartOf::Sync(action) => Kind::Sync(*action),
        }
    }

    /// Its data blocks, as a mask; 0: it isn't in the stripe, or is no request's.
    fn blocks(&self, geometry: &Geometry) -> u64 {
        match &self.of {
            PartOf::Request { sectors, .. } => geometry.stripe_blocks(self.stripe, sectors),
            PartOf::Sync(_) => 0,
        }
    }

    /// As a write of a run, if it covers its blocks whole.
    pub(super) fn whole(&self, geometry: &Geometry) -> Option<Of> {
        let PartOf::Request {
            request,
            id,
            sectors,
            ..
        } = &self.of
        else {
            return None;
        };
        let blocks = geometry.whole_blocks(self.stripe, sectors)?;
        Some(Of {
            request: Arc::clone(request),
            id: *id,
            sectors: sectors.clone(),
            blocks,
        })
    }

    /// True if it is of this write, and covers the same blocks.
    pub(super) fn is_of(&self, of: &Of, geometry: &Geometry) -> bool {
        match &self.of {
            PartOf::Request { id, sectors, .. } => {
                *id == of.id && geometry.whole_blocks(self.stripe, sectors) == Some(of.blocks)
            }
            PartOf::Sync(_) => false,
        }
    }

    /// Appends pieces of some of its blocks, which say that their request is number `at`.
    fn add_pieces(&self, geometry: &Geometry, at: usize, blocks: u64, pieces: &mut Vec<Piece>) {
        let PartOf::Request {
            request, sectors, ..
        } = &self.of
        else {
            return;
        };
        for index in bits(blocks) {
            let sectors = in_block(geometry, self.stripe, index, sectors);
            pieces.push(Piece {
                request: at,
                write: request.op != Op::Read,
                stripe: self.stripe,
                index,
                offset: sectors.start % STRIPE_SECTORS,
                sectors: sectors.end - sectors.start,
                skip: ((sectors.start - request.sector) * 512) as usize,
            });
        }
    }
}

/// The sectors of a range that lie in a data block of a stripe.
pub(super) fn in_block(
    geometry: &Geometry,
    stripe: u64,
    index: usize,
    sectors: &Range<u64>,
) -> Range<u64> {
    let block = geometry.stripe_array_sector(stripe, index);
    sectors.start.max(block)..sectors.end.min(block + STRIPE_SECTORS)
}

impl Waiting {
    pub(super) fn new(place: Place, part: Part, geometry: &Geometry) -> Waiting {
        Waiting {
            left: part.blocks(geometry),
            place,
            part,
            failed: false,
            mismatch: false,
        }
    }

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
        let waiting =
            |Arrived { place, piece }: Arrived<Part>| Waiting::new(place, piece, geometry);
        self.waiting.extend(arrived.into_iter().map(waiting));
    }

    /// The kind of the next batch, for which somebody waits.
    pub fn kind(&self) -> Kind {
        match self.known.bad {
            0 => self.waiting[0].part.kind(),
            _ => Kind::Fix,
        }
    }

    /// The plan for the next batch, for the first `count` parts, whose pieces become `pieces`, which stays as it is if the batch is no
    /// request's. `None`: the members that are there need nothing.
    pub(super) fn next_plan(
        &self,
        view: &View<'_>,
        count: usize,
        pieces: &mut Vec<Piece>,
    ) -> Option<Plan> {
        match self.kind() {
            Kind::Fix => view.fix(&self.known),
            Kind::Sync(Action::Recover) => view.rebuild(&self.known),
            Kind::Sync(_) => view.check(&self.known),
            Kind::Read | Kind::Write => {
                self.pieces(view.geometry, count, pieces);
                Some(self.plan_of(view, pieces))
            }
        }
    }

    /// The queue that owns the next batch: that of the part which has waited longest.
    pub fn next_owner(&self) -> Option<Owner> {
        self.waiting.first().map(|waiting| waiting.part.from)
    }

    /// The next batch is for the first part's stripe; pages of another one aren't valid.
    pub fn turn_to_first(&mut self) {
        if let Some(stripe) = self.waiting.first().map(|waiting| waiting.part.stripe) {
            self.turn_to(stripe);
        }
    }

    /// The next batch is for this stripe.
    pub(super) fn turn_to(&mut self, stripe: u64) {
        if stripe != self.known.stripe {
            let valid = match has(Plant::StalePages) {
                true => self.known.valid,
                false => 0,
            };
            self.known = Record {
                stripe,
                valid,
                bad: 0,
            };
            self.settle();
        }
    }

    /// Pieces of the first `count` parts, as far as they are of the first one's stripe and kind: so reads can't keep a write waiting.
    fn pieces(&self, geometry: &Geometry, count: usize, pieces: &mut Vec<Piece>) {
        pieces.clear();
        let Some(first) = self.waiting.first() else {
            return;
        };
        let is_alike =
            |part: &Part| part.stripe == first.part.stripe && part.kind() == first.part.kind();
        for (at, waiting) in self.waiting[..count].iter().enumerate() {
            if is_alike(&waiting.part) {
                let part = &waiting.part;
                part.add_pieces(geometry, at, waiting.left, pieces);
            }
        }
    }

    /// A plan for pieces of the first parts. It has at least one block of the first.
    fn plan_of(&self, view: &View<'_>, pieces: &[Piece]) -> Plan {
        let plan = view.serve(&self.known, pieces);
        let firsts = || pieces.iter().filter(|piece| piece.request == 0);
        if firsts().any(|piece| plan.takes(piece)) {
            return plan;
        }
        let firsts: Vec<Piece> = firsts().copied().collect();
        view.serve(&self.known, &firsts)
    }

    /// The plan of the batch that can be calculated from what was read: that of the first `count` parts, and of as many others as need nothing
    /// more. Their pieces become `pieces`, which has those of `planned`: a plan for the first ones that reads nothing, if there is one already.
    pub(super) fn ready(
        &self,
        view: &View<'_>,
        count: usize,
        planned: Option<Plan>,
        pieces: &mut Vec<Piece>,
    ) -> Plan {
        // If others have arrived since, they may need nothing more either.
        if let Some(plan) = planned.filter(|_| self.waiting.len() == count) {
            debug_assert_eq!(plan.reads, 0, "something is to be read first");
            return plan;
        }
        let mut plans = (count..=self.waiting.len()).rev().map(|count| {
            self.pieces(view.geometry, count, pieces);
            self.plan_of(view, pieces)
        });
        let found = plans.find(|plan| plan.reads == 0);
        found.expect("all that the first plan needs was read")
    }

    /// Appends those pieces that are in a plan, with their requests.
    #[inline]
    pub(super) fn take_pieces(
        &self,
        view: &View<'_>,
        plan: &Plan,
        pieces: &[Piece],
        taken: &mut Vec<BatchPiece>,
    ) {
        for piece in pieces {
            if plan.takes(piece)
                && let PartOf::Request { request, .. } = &self.waiting[piece.request].part.of
            {
                taken.push(BatchPiece {
                    request: Arc::clone(request),
                    member: view.geometry.stripe_data(piece.stripe, piece.index),
                    piece: *piece,
                });
            }
        }
    }

    /// A batch for the first parts, so many, which write the whole stripe, that is calculated and written. `None`: nobody waits.
    #[cold]
    pub(super) fn written_whole(&self, view: &View<'_>, parts: usize) -> Option<Batch> {
        let (mut list, mut pieces) = (Vec::new(), Vec::new());
        let plan = self.next_plan(view, parts, &mut list)?;
        self.take_pieces(view, &plan, &list, &mut pieces);
        let calculation = view.calculation(&self.known, &plan, &pieces, false);
        Some(Batch {
            plan,
            pieces,
            calculation,
        })
    }

    /// Pieces of the first `count` parts that are in a plan are lost: takes out the parts that have no others.
    pub(super) fn lose(&mut self, view: &View<'_>, plan: &Plan, count: usize) -> Vec<Waiting> {
        let (mut pieces, mut taken, mut over) = (Vec::new(), Vec::new(), Vec::new());
        self.pieces(view.geometry, count, &mut pieces);
        self.take_pieces(view, plan, &pieces, &mut taken);
        self.done(&mut taken, false, &mut over);
        over
    }

    /// A sector of the array that the batch is for, of a request that traces follow.
    pub(super) fn followed(&self, geometry: &Geometry) -> Option<u64> {
        let stripe = self.known.stripe;
        if let Some(run) = &self.run {
            return run.followed();
        }
        let mut parts = self.waiting.iter().map(|waiting| &waiting.part);
        match &self.batch {
            Some(batch) => batch.pieces.iter().find_map(|piece| {
                let part = &self.waiting[piece.piece.request].part;
                part.followed(geometry)
            }),
            None => {
                parts.find_map(|part| part.followed(geometry).filter(|_| part.stripe == stripe))
            }
        }
    }

    /// The batch is planned anew, from nothing that was read.
    pub fn forget(&mut self) {
        self.batch = None;
        self.known.valid = 0;
        if self.known.bad == 0 {
            self.settle();
        }
    }

    /// No block of the stripe is bad any more.
    pub(super) fn settle(&mut self) {
        self.known.bad = 0;
        (self.misfit, self.trusted) = (None, None);
    }

    /// All parts of the stripe fail. A check, and its like, passes over it.
    pub fn fail_stripe(&mut self) -> Vec<Waiting> {
        let stripe = self.known.stripe;
        let is_its = |waiting: &mut Waiting| waiting.part.stripe == stripe;
        let mut all: Vec<Waiting> = self.waiting.extract_if(.., is_its).collect();
        for waiting in &mut all {
            let part = &waiting.part;
            let passes = matches!(part.of, PartOf::Sync(_)) && !part.is_rebuild();
            waiting.failed |= !passes;
        }
        all
    }

    /// All parts fail.
    pub fn fail(&mut self) -> Vec<Waiting> {
        self.forget();
        self.settle();
        let mut all = std::mem::take(&mut self.waiting);
        all.iter_mut().for_each(|waiting| waiting.failed = true);
        all
    }

    /// Pieces of a batch are done, or failed: moves the parts that have no others to `over`.
    pub(super) fn done(&mut self, pieces: &mut Vec<BatchPiece>, ok: bool, over: &mut Vec<Waiting>) {
        // Each piece gives its share of the request back before the parts end: a request that ends has to be its queue's alone.
        for BatchPiece { piece, .. } in pieces.drain(..) {
            let waiting = &mut self.waiting[piece.request];
            waiting.left &= !bit(piece.index);
            waiting.failed |= !ok;
        }
        let is_over = |waiting: &mut Waiting| {
            waiting.left == 0 && matches!(waiting.part.of, PartOf::Request { .. })
        };
        over.extend(self.waiting.extract_if(.., is_over));
    }

    /// Pieces of a batch that are of this member fail, when they are done.
    pub(super) fn fail_pieces(&mut self, pieces: &[BatchPiece], member: usize) {
        let its = pieces.iter().filter(|piece| piece.member == member);
        its.for_each(|piece| self.waiting[piece.piece.request].failed = true);
        self.known.valid &= !bit(member);
    }

    /// The stripe's turn in an action is over: takes out its part, for which the batch was.
    pub(super) fn sync_done(&mut self, ok: bool) -> Waiting {
        let mut waiting = self.waiting.remove(0);
        waiting.failed |= !ok;
        waiting
    }
}
