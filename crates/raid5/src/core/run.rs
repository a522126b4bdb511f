//! Runs: neighbouring stripes of a row that the same writes cover whole, as one batch.
//!
//! Such writes read nothing and have the same shape in each stripe. So their queue claims the stripes' words one after another, and does the rest
//! once for all of them: one calculation, one write to each member, one end.
//!
//! ```text
//!          look: all open      calculated        logged           ended
//! claimed ──────────────▶ closed ───────▶ at its log ──▶ writing ──────────▶ words are left
//!    │ a stop; superblocks or bits            │ the log fails       │ a member fails
//!    │ are to be written first                ▼                     ▼
//!    ▼                                    as on the left        a batch for each stripe, which waits for superblocks
//! a batch for each stripe, parked or open
//! ```
//!
//! Each word goes through the states that it has with a batch of its own, so nobody else sees a difference. A log has one entry for a run, which
//! waits there with its first word; an array without a log leaves this step out. Runs are for arrays without sums, whose members have no arms. A word
//! that isn't free, a block that is bad, and pages or places that are short end a run before their stripe.

use super::batch::Unnamed;
use super::common::Common;
use super::flying::{Flying, Ios};
use super::io::Purpose;
use super::membership::Seen;
use super::queue::QueueCore;
use super::record::{Part, PartOf, Stripe, Waiting};
use super::request::Span;
use super::work::{RunBlock, RunWork, lies_in_blocks};
use super::{Data, SharedRequest, Work};
use crate::STRIPE_SECTORS;
use crate::words;
use crate::words::{
    Claimed, Closed, Errands, LogEntry, Looked, Open, Parked, Part as LogPart, Place, StripePages,
    Token, Waiting as Waits,
};
use pvblk_block::{Buffer, Op, RequestFlags};
use std::ops::Range;

/// A write that has a part in each stripe of a run: the same blocks, whole.
#[derive(Clone)]
pub(super) struct Of {
    pub request: SharedRequest,
    /// Number of the request in its queue.
    pub id: usize,
    /// Sectors of the array that it writes.
    pub sectors: Range<u64>,
    /// Data blocks that are its own, as a mask.
    pub blocks: u64,
}

/// The parts of a run.
struct Parts {
    stripes: Range<u64>,
    /// Writes that cover each stripe whole, in the order of their arrival.
    of: Vec<Of>,
    /// Numbers of the stripes in the stripe queue; none if they haven't come from there.
    ways: Vec<usize>,
    /// A place for each part, if the run is taken apart.
    places: Vec<Place>,
}

/// See the module's documentation.
pub struct Run {
    parts: Parts,
    words: Vec<Token<Closed, Stripe>>,
}

/// A run that waits for its log. The record of its first word has it.
pub struct RunAtLog {
    parts: Parts,
    /// Its words but for the first.
    others: Vec<Token<Waits, Stripe>>,
    /// By role, the data that is to be written.
    data: Vec<Vec<Buffer>>,
}

impl Parts {
    /// A sector of the array that they are for, of a request that traces follow.
    fn followed(&self) -> Option<u64> {
        let mut followed = self.of.iter().filter(|of| of.request.followed);
        followed.next().map(|of| of.sectors.start)
    }
}

impl Run {
    pub(super) fn followed(&self) -> Option<u64> {
        self.parts.followed()
    }

    /// Number of its word, of a run of one stripe.
    #[cfg(test)]
    pub(super) fn only_word(&self) -> usize {
        assert_eq!(self.words.len(), 1, "a run of one stripe");
        self.words[0].at()
    }
}

impl RunAtLog {
    pub(super) fn followed(&self) -> Option<u64> {
        self.parts.followed()
    }
}

/// The outcome of a look for a run.
pub(super) enum Next {
    /// It has begun, or the batches of its stripes have.
    Begun,
    /// It begins when parts of this queue that are at words have given back pages or places.
    Waits,
    /// The next stripe isn't one of a run.
    Alone,
}

/// A queue with so many parts at words waits for their pages, and doesn't join the line for more.
const MANY: usize = 16;

/// Words that were claimed for a run, and a place for each of its parts.
struct Claims {
    words: Vec<Token<Claimed, Stripe>>,
    places: Vec<Place>,
    /// The next stripe has none of these.
    short_of: Option<ShortOf>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ShortOf {
    Places,
    Pages,
}

impl Common {
    /// True if writes that cover whole stripes go as runs.
    fn makes_runs(&self) -> bool {
        self.sums.is_none() && self.arms.is_none()
    }
}

impl QueueCore {
    /// The next stripes of the first span go as a run, if it covers them whole.
    #[inline]
    pub(super) fn next_run(&mut self) -> Next {
        let least = self.common.geometry.least_whole_sectors();
        let is_long = |span: &Span| span.sectors().end - span.sectors().start >= least;
        match self.spans.front().is_some_and(is_long) {
            true => self.next_long(),
            false => Next::Alone,
        }
    }

    #[inline(never)]
    fn next_long(&mut self) -> Next {
        let Some((stripes, of)) = self.whole_stripes() else {
            return Next::Alone;
        };
        let id = of.id;
        let claims = self.claim_run(&stripes, 1, self.places_beside());
        let count = claims.words.len();
        if count == 0 {
            return self.no_run(&claims);
        }
        self.active[id].add_parts(count);
        if let Some(span) = self.spans.front_mut() {
            span.went(count as u64);
        }
        self.open_run(stripes.start, vec![of], Vec::new(), claims);
        Next::Begun
    }

    /// Stripes that the stripe queue lets go next go as a run, if they are alike.
    #[inline]
    pub(super) fn next_gathered_run(&mut self) -> Next {
        match self.whole_goes() {
            true => self.next_alike(),
            false => Next::Alone,
        }
    }

    #[inline(never)]
    fn next_alike(&mut self) -> Next {
        if !self.common.makes_runs() || !self.may_run() {
            return Next::Alone;
        }
        let most = self.now.widest();
        let Some((stripes, of)) = self.alike_stripes(most) else {
            return Next::Alone;
        };
        let claims = self.claim_run(&stripes, of.len(), self.places.left());
        let count = claims.words.len();
        if count == 0 {
            return self.no_run(&claims);
        }
        let ways = self.gather.run_goes(count);
        self.open_run(stripes.start, of, ways, claims);
        Next::Begun
    }

    /// Nothing was claimed. A stripe that goes alone joins the line for pages: so a queue that has few gets more though others have many.
    fn no_run(&self, claims: &Claims) -> Next {
        let waits = match claims.short_of {
            Some(ShortOf::Places) => self.places.in_use() > 0,
            Some(ShortOf::Pages) => self.reserve.waits() || self.places.in_use() >= MANY,
            None => false,
        };
        if waits { Next::Waits } else { Next::Alone }
    }

    /// The next stripes of the first span that it covers whole, of one row, and its write; `None`: there are none.
    fn whole_stripes(&self) -> Option<(Range<u64>, Of)> {
        let span = self.spans.front()?;
        let geometry = &self.common.geometry;
        let sectors = span.sectors();
        let active = &self.active[span.request()];
        if active.op() != Op::Write
            || self.common.has_stripe_queues()
            || !self.common.makes_runs()
            || !self.may_run()
        {
            return None;
        }
        let whole = geometry.whole_stripes(span.left(), sectors);
        let most = whole.start + self.now.widest() as u64;
        let stripes = whole.start..whole.end.min(most);
        let of = Of {
            request: active.shared(),
            id: span.request(),
            sectors: sectors.clone(),
            blocks: geometry.all_blocks(),
        };
        (!stripes.is_empty()).then_some((stripes, of))
    }

    /// True if members are as a run needs them, and words go on: in a stop of its own the queue would be told of each word that it claims and
    /// leaves, and its steps would have no end.
    fn may_run(&self) -> bool {
        let goes_on = matches!(self.common.epoch.look(), words::Seen::Going(_));
        goes_on && !self.now.broken && self.now.dirty && self.now.is_whole()
    }

    /// Claims the words of the first of these stripes that are free and have pages. Each stripe has so many parts; so many places may be taken.
    fn claim_run(&mut self, stripes: &Range<u64>, parts: usize, places: usize) -> Claims {
        let wanted = (stripes.end - stripes.start) as usize;
        let count = wanted.min(places / parts);
        let mut claims = Claims {
            words: Vec::with_capacity(count),
            places: Vec::with_capacity(count * parts),
            short_of: (count < wanted).then_some(ShortOf::Places),
        };
        if self.reserve.is_short() {
            claims.short_of = Some(ShortOf::Pages);
            return claims;
        }
        for stripe in stripes.clone().take(count) {
            let at = self.common.word_of(stripe);
            let Some(mut token) = self.common.words.claim_free(at, self.me) else {
                claims.short_of = None;
                break;
            };
            let record = token.record_mut();
            let is_bad = record.known.bad != 0 && record.known.stripe == stripe;
            if !is_bad {
                record.turn_to(stripe);
                record.was_useful = record.known.valid != 0;
                record.seen = Seen::default();
                if record.pages.is_none() {
                    let pages = self.pages_now();
                    token.record_mut().pages = pages;
                }
            }
            if is_bad || token.record().pages.is_none() {
                claims.short_of = (!is_bad).then_some(ShortOf::Pages);
                self.leave(token);
                break;
            }
            claims.words.push(token);
            let places = (0..parts).filter_map(|_| self.places.take());
            claims.places.extend(places);
        }
        claims
    }

    fn pages_now(&mut self) -> Option<StripePages> {
        let mut errands = Errands::default();
        let words = (&self.common.words, &self.common.epoch);
        let pages = self.reserve.take_now(words, &mut errands);
        self.run_errands(errands);
        pages
    }

    /// The words of a run, which begins with a stripe, are this queue's.
    fn open_run(&mut self, first: u64, of: Vec<Of>, ways: Vec<usize>, claims: Claims) {
        let Claims { words, places, .. } = claims;
        let mut parts = Parts {
            stripes: first..first + words.len() as u64,
            of,
            ways,
            places,
        };
        let mut opened = Vec::with_capacity(words.len());
        let mut parked = Vec::new();
        for token in words {
            match self.common.words.look(token, &self.common.epoch) {
                Looked::Open(token) => {
                    self.has_seen(token.epoch());
                    opened.push(token);
                }
                Looked::Parked(token, tell) => {
                    self.tell(tell);
                    parked.push(token);
                }
            }
        }
        // Members may have changed since the stripes were counted.
        let fits = opened.len() <= self.now.widest();
        let goes = parked.is_empty() && fits && self.may_run();
        if goes && parts.stripes.clone().all(|stripe| self.has_bits(stripe)) {
            return self.close_run(parts, opened);
        }
        let is_stopped = !parked.is_empty();
        for mut token in opened {
            self.take_apart(&mut parts, token.record_mut());
            match is_stopped {
                true => self.park(token),
                false => self.open_batch(token),
            }
        }
        for mut token in parked {
            self.take_apart(&mut parts, token.record_mut());
            self.parked.push(token);
        }
    }

    /// The parts of a run in the stripe of a record come before those that wait there.
    fn take_apart(&self, parts: &mut Parts, record: &mut Stripe) {
        let stripe = record.known.stripe;
        let at = (stripe - parts.stripes.start) as usize;
        let way = parts.ways.get(at).copied();
        let Parts { of, places, .. } = parts;
        let mut waiting = Vec::with_capacity(of.len() + record.waiting.len());
        for of in of {
            let part = Part {
                of: PartOf::Request {
                    request: of.request.clone(),
                    id: of.id,
                    sectors: of.sectors.clone(),
                    way,
                },
                from: self.me,
                stripe,
            };
            let place = places.pop().expect("a place for each part");
            waiting.push(Waiting::new(place, part, &self.common.geometry));
        }
        waiting.append(&mut record.waiting);
        record.waiting = waiting;
    }

    /// All words of a run are open, and it may write.
    fn close_run(&mut self, parts: Parts, opened: Vec<Token<Open, Stripe>>) {
        let mut pages = Vec::with_capacity(opened.len());
        let mut words = Vec::with_capacity(opened.len());
        for token in opened {
            let mut token = self.close_word(token);
            pages.extend(token.record_mut().head_pages());
            words.push(token);
        }
        let (geometry, first) = (&self.common.geometry, parts.stripes.start);
        let block = |index: usize| {
            let sector = geometry.stripe_array_sector(first, index);
            let its = |of: &&Of| of.blocks & 1 << index != 0;
            let of = parts.of.iter().find(its).expect("a whole stripe");
            debug_assert!(of.sectors.contains(&(sector + STRIPE_SECTORS - 1)));
            RunBlock {
                role: geometry.stripe_data(first, index),
                request: of.request.clone(),
                skip: ((sector - of.request.sector) * 512) as usize,
            }
        };
        let is_lent = |of: &Of| {
            let stable = of.request.flags.contains(RequestFlags::STABLE_BUFFERS);
            stable && lies_in_blocks(&of.request)
        };
        let blocks = (0..geometry.data_members()).map(block).collect();
        let parity = geometry.stripe_parity(first);
        let borrows = !self.common.limited && parts.of.iter().all(is_lent);
        self.tallies.note_batches(words.len(), true);
        let flying = self.flying.insert(Flying::Run(Run { parts, words }));
        self.works.push(Work::Run(RunWork {
            flying,
            blocks,
            pages,
            parity,
            borrows,
        }));
    }

    /// A run's calculation is done: data and parity go to the members.
    #[inline(never)]
    pub(super) fn run_worked(&mut self, work: &mut RunWork) {
        self.tallies
            .note_calculation(work.written_bytes(), work.moved_bytes());
        let Flying::Run(run) = self.flying.remove(work.flying) else {
            debug_assert!(false, "a calculation of a run that has none");
            return;
        };
        match self.common.logs {
            None => self.write_run(run, None, |role| work.data(role)),
            Some(_) => self.run_waits(run, work),
        }
        work.blocks.clear();
    }

    /// A run that is calculated waits for its log.
    fn run_waits(&mut self, Run { parts, words }: Run, work: &RunWork) {
        let geometry = &self.common.geometry;
        let entry = LogEntry {
            stripe: parts.stripes.start,
            stripes: words.len(),
            first: 0,
            blocks: geometry.data_members(),
            partial: None,
        };
        let data = (0..geometry.members())
            .map(|role| work.data(role))
            .collect();
        let mut words = words.into_iter();
        let mut first = words.next().expect("a stripe");
        let mut others = Vec::with_capacity(words.len());
        for token in words {
            let (token, tell) = self.common.words.wait(token, &self.common.epoch);
            self.tell(tell);
            others.push(token);
        }
        first.record_mut().run = Some(Box::new(RunAtLog {
            parts,
            others,
            data,
        }));
        self.wait_for_log(first, entry);
    }

    /// The entry of a run is stable.
    pub(super) fn run_logged(
        &mut self,
        first: Token<Closed, Stripe>,
        at_log: RunAtLog,
        logged: LogPart,
    ) {
        let RunAtLog {
            parts,
            others,
            mut data,
        } = at_log;
        let mut words = Vec::with_capacity(1 + others.len());
        words.push(first);
        let others = others.into_iter();
        words.extend(others.map(|token| self.common.words.resume(token)));
        self.write_run(Run { parts, words }, Some(logged), |role| {
            std::mem::take(&mut data[role])
        });
    }

    /// The log of a run has failed, or members have changed: each stripe is a batch of its own, which is planned anew.
    #[cold]
    pub(super) fn run_again(&mut self, first: Token<Parked, Stripe>, at_log: RunAtLog) {
        let RunAtLog {
            mut parts, others, ..
        } = at_log;
        let others = others.into_iter().map(Token::give_up);
        for mut token in std::iter::once(first).chain(others) {
            let record = token.record_mut();
            self.take_apart(&mut parts, record);
            record.forget();
            self.claim_again(token);
        }
    }

    /// Data and parity of a run go to the members: by role, that which `data` gives.
    fn write_run(
        &mut self,
        run: Run,
        logged: Option<LogPart>,
        mut data: impl FnMut(usize) -> Vec<Buffer>,
    ) {
        debug_assert!(
            self.is_current(run.words[0].epoch()),
            "planned for other members"
        );
        let geometry = &self.common.geometry;
        let (first, members) = (run.parts.stripes.start, geometry.members());
        let sector = geometry.stripe_member_sector(first);
        let has_fua = |of: &Of| of.request.flags.contains(RequestFlags::FUA);
        let fua = run.parts.of.iter().any(has_fua);
        let ios = Ios::new(members);
        let flying = self.flying.insert(Flying::RunWriting { run, logged, ios });
        for role in 0..members {
            let slot = self.now.members.slot(role);
            let io = (slot.expect("a member that was looked at"), Op::Write, fua);
            self.start(
                Purpose::Write { flying },
                io,
                sector,
                Data::Some(data(role)),
            );
        }
    }

    /// A run is written, but for the data that the members of these slots (a mask) have failed.
    #[inline(never)]
    pub(super) fn run_written(&mut self, run: Run, logged: Option<LogPart>, failed: u64) {
        self.writes_ended(logged, failed);
        if failed != 0 {
            return self.run_unnamed(run, failed);
        }
        let Run { parts, words } = run;
        let count = words.len();
        for place in parts.places {
            self.places.put(place);
        }
        let mut wake = Vec::new();
        for mut token in words {
            self.reserve.end_batch(token.record_mut(), true, &mut wake);
            self.leave(token);
        }
        self.wake_for_pages(wake);
        for Of { request, id, .. } in parts.of {
            drop(request);
            parts.ways.iter().for_each(|way| self.gathered_ended(*way));
            self.parts_done(id, count, true);
        }
    }

    /// Members failed it: each stripe is a batch of its own from now on, which waits until superblocks name the members that failed.
    #[cold]
    fn run_unnamed(&mut self, Run { mut parts, words }: Run, failed: u64) {
        for mut token in words {
            let record = token.record_mut();
            self.take_apart(&mut parts, record);
            let view = self.common.view(&self.now, &record.seen);
            record.batch = record.written_whole(&view, parts.of.len());
            let (token, tell) = self.common.words.wait(token, &self.common.epoch);
            self.tell(tell);
            self.unnamed.push(Unnamed::new(token, failed));
        }
    }
}
