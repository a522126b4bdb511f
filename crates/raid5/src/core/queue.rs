//! [`QueueCore`]: the part of the core that is one queue's own.

use super::batch::Lists;
use super::common::{Common, Tallies};
use super::flying::Flying;
use super::gather::Gather;
use super::intent::Intents;
use super::io::Purpose;
use super::kick::{Change, Kick};
use super::log::Unit;
use super::membership::{Device, Membership};
use super::orders::Orders;
use super::record::Stripe;
use super::request::{Active, HeldFlush, Span};
use super::sync::{Sync, SyncEnd};
use super::{MemberIo, SharedRequest, Work};
use crate::words::{
    Answer, Claimed, LogBlocks, LogToken, OwnPlaces, Owner, Parked, Place, Reserve, Seen,
    StripePages, Token,
};
use pvblk_block::{Completion, Error};
use slab::Slab;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Something that one queue tells another. Mail between two queues arrives in its order.
pub enum Mail {
    /// A word was handed over.
    Stripe(Token<Claimed, Stripe>),
    /// A log was handed over.
    Log(LogToken<Claimed, Stripe>),
    /// The end of a batch's wait for its log.
    Answer(Answer<Stripe>),
    /// A part of a request is done.
    Ended(Ended),
    /// A word that the kick may wait for is drained.
    Drained,
    /// A stop is over.
    GoOn,
    /// There is a set of pages for a batch that waits.
    Pages,
    /// No stripe reads: those of the stripe queue may.
    MayRead,
    /// Superblocks are written; these slots (a mask) failed that. The others' superblocks name them too, unless there are too many.
    Named(u64),
    /// An [`Opening`] is done: bits of the stripe are on all members but these slots (a mask), which failed that, and its sums are in memory.
    Intended { stripe: u64, failed: u64 },
    /// Superblocks say how far an action is, but for those of these slots (a mask), whose devices failed that.
    Told(u64),
}

/// The end of a part, and all that comes back with it.
pub struct Ended {
    pub place: Place,
    pub of: EndedOf,
    pub ok: bool,
}

/// The cause of a part that has ended.
pub enum EndedOf {
    Request {
        request: SharedRequest,
        /// Number of the request in its queue.
        id: usize,
        /// That of the part's stripe in the stripe queue.
        way: Option<usize>,
    },
    Sync {
        stripe: u64,
        /// Parity was wrong.
        mismatch: bool,
    },
}

/// A stripe that a parked batch waits to begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub stripe: u64,
    /// It writes: its bits are set on all members. Its sums, if the array has them, come into memory either way.
    pub writes: bool,
}

/// Something that whoever drives a queue does for it: it writes superblocks of the members. Words are stopped, and members flushed, for a
/// name only; so only then may others' superblocks leave a member out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// They name these slots (a mask) as failed, whose superblocks aren't written. The answer is [`Mail::Named`].
    Name {
        /// They say dirty; else what they said last.
        dirty: bool,
        failed: u64,
        /// They say this, too.
        change: Option<Change>,
    },
    /// The device of this slot, if it is the incoming one, holds all stripes before this. The answer is [`Mail::Told`].
    Recovered { slot: usize, stripes: u64 },
    /// Parity of stripes before this is right. The answer is [`Mail::Told`].
    Resynced(u64),
}

/// See the module's documentation.
///
/// Inputs are only taken note of; [`QueueCore::step`] follows until there is nothing left to do.
pub struct QueueCore {
    pub(super) me: Owner,
    pub(super) common: Arc<Common>,
    pub(super) tallies: Arc<Tallies>,
    /// The epoch's number at the last look, and the members then.
    epoch: u32,
    pub(super) now: Arc<Membership>,
    pub(super) reserve: Reserve<StripePages>,
    pub(super) places: OwnPlaces,
    pub(super) log_places: OwnPlaces,
    pub(super) blocks: LogBlocks,
    pub(super) active: Slab<Active>,
    /// Ranges of requests whose parts haven't all arrived at their words.
    pub(super) spans: VecDeque<Span>,
    pub(super) gather: Gather,
    /// Numbers in `gather` of the parts of a batch.
    pub(super) ways: Vec<usize>,
    pub(super) purposes: Slab<(Purpose, usize)>,
    pub(super) flying: Slab<Flying>,
    pub(super) lists: Lists,
    pub(super) units: Slab<Unit>,
    /// Batches and logs that wait for the end of a stop.
    pub(super) parked: Vec<Token<Parked, Stripe>>,
    pub(super) held_logs: Vec<LogToken<Parked, Stripe>>,
    pub(super) unnamed: Vec<super::batch::Unnamed>,
    pub(super) held_flushes: Vec<HeldFlush>,
    /// Batches that wait for pages.
    pub(super) pageless: Vec<Token<Parked, Stripe>>,
    pub(super) intents: Intents,
    pub(super) kick: Option<Kick>,
    pub(super) orders: Orders,
    pub(super) sync: Option<Sync>,
    /// The end of the last action of this queue.
    pub(super) synced: Option<SyncEnd>,
    pub(super) todo: VecDeque<Mail>,
    /// I/O to start.
    pub ios: Vec<MemberIo>,
    /// Calculations to do.
    pub works: Vec<Work>,
    /// Requests that are done.
    pub done: Vec<Completion>,
    /// To be posted.
    pub mail: Vec<(Owner, Mail)>,
    pub errands: Vec<Errand>,
    /// Stripes for which batches wait. The answer is [`Mail::Intended`], after [`Common::bits_are_set`] and [`super::Sums::load`].
    pub intends: Vec<Opening>,
    /// Bits that are in memory only were set: a sweep will be due.
    pub marked: bool,
}

impl QueueCore {
    /// Opens a queue. Its number is no other open queue's.
    pub fn open(common: &Arc<Common>, me: Owner) -> Result<QueueCore, Error> {
        let too_many = || Error::config("raid5: more queues than there is room for");
        let places = common.places.open(common.parts).ok_or_else(too_many)?;
        let log_parts = if common.logs.is_some() {
            common.parts
        } else {
            0
        };
        let Some(log_places) = common.log_places.open(log_parts) else {
            common.places.close(places);
            return Err(too_many());
        };
        // Before the first look at the epoch: the end of a stop that it shows is told to this queue, too.
        let tallies = common.add_queue(me);
        Ok(QueueCore {
            me,
            common: Arc::clone(common),
            tallies,
            // No number of an epoch that goes on.
            epoch: u32::MAX,
            now: common.membership(),
            reserve: common.stock.open(me),
            places,
            log_places,
            blocks: LogBlocks::default(),
            active: Slab::new(),
            spans: VecDeque::new(),
            gather: Gather::default(),
            ways: Vec::new(),
            purposes: Slab::new(),
            flying: Slab::new(),
            lists: Lists::default(),
            units: Slab::new(),
            parked: Vec::new(),
            held_logs: Vec::new(),
            unnamed: Vec::new(),
            held_flushes: Vec::new(),
            pageless: Vec::new(),
            intents: Intents::default(),
            kick: None,
            orders: Orders::default(),
            sync: None,
            synced: None,
            todo: VecDeque::new(),
            ios: Vec::new(),
            works: Vec::new(),
            done: Vec::new(),
            mail: Vec::new(),
            errands: Vec::new(),
            intends: Vec::new(),
            marked: false,
        })
    }

    /// True if the queue has nothing to do, and nobody counts on it: it may be closed.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
            && self.todo.is_empty()
            && self.purposes.is_empty()
            && self.flying.is_empty()
            && self.units.is_empty()
            && self.held_logs.is_empty()
            && self.kick.is_none()
            && self.orders.is_empty()
            && self.sync.is_none()
            && self.intents.is_empty()
            && self.places.in_use() + self.log_places.in_use() == 0
    }

    /// Closes an idle queue. Its mail is posted then, and mail that it gets is of no interest.
    pub fn close(mut self) -> Vec<(Owner, Mail)> {
        debug_assert!(self.is_idle(), "a queue with work is closed");
        let mut wake = Vec::new();
        self.common.remove_queue(self.me);
        if let Some(arms) = &self.common.arms {
            arms.forget(self.me);
        }
        self.common.stock.close(self.reserve, &mut wake);
        self.common.places.close(self.places);
        self.common.log_places.close(self.log_places);
        self.mail
            .extend(wake.into_iter().map(|to| (to, Mail::Pages)));
        self.mail
    }

    /// True while this queue has stopped words: others wait for its next steps.
    pub fn is_stopping(&self) -> bool {
        self.kick.is_some()
    }

    /// Takes the members of this moment.
    pub fn look_again(&mut self) {
        self.look();
    }

    pub fn receive(&mut self, mail: Mail) {
        self.todo.push_back(mail);
    }

    /// Does one step, as long as there is one. All parts arrive first, or wait in the
    /// stripe queue: those of one stripe are then one batch, which may need no reads.
    pub fn step(&mut self) -> bool {
        self.next_part() || self.next_gathered() || self.next_mail() || self.next_synced()
    }

    /// Does what the next mail asks for, if there is any.
    pub(super) fn next_mail(&mut self) -> bool {
        let mail = self.todo.pop_front();
        mail.map(|mail| self.take(mail)).is_some()
    }

    fn take(&mut self, mail: Mail) {
        match mail {
            Mail::Stripe(token) => self.claimed(token),
            Mail::Log(token) => self.log_claimed(token),
            Mail::Answer(answer) => self.answered(answer),
            Mail::Ended(ended) => self.part_ended(ended),
            Mail::Drained => self.go_on_kicking(),
            Mail::GoOn => self.go_on(),
            Mail::Pages => self.wake_pageless(),
            Mail::MayRead => self.may_read(),
            Mail::Named(failed) => self.named(failed),
            Mail::Told(failed) => self.sync_told(failed),
            Mail::Intended { stripe, failed } => self.intended(stripe, failed),
        }
    }

    /// Mail to a queue, which may be this one.
    pub(super) fn send(&mut self, to: Owner, mail: Mail) {
        match to == self.me {
            true => self.todo.push_back(mail),
            false => self.mail.push((to, mail)),
        }
    }

    pub(super) fn tell(&mut self, kickers: impl IntoIterator<Item = Owner>) {
        for kicker in kickers {
            self.send(kicker, Mail::Drained);
        }
    }

    /// A look at the epoch. Members are those of it if it goes on, and those of this moment in a stop: direct reads and flushes go on, and an
    /// earlier stop that this queue hasn't seen may have left a member out.
    pub(super) fn look(&mut self) -> Seen {
        let seen = self.common.epoch.look();
        match seen {
            Seen::Going(number) => self.has_seen(number),
            _ => self.now = self.common.membership(),
        }
        seen
    }

    /// Devices by slot, and those that are members or become one, as a mask, as far as this queue knows.
    pub fn devices(&self) -> (Arc<[Arc<Device>]>, u64) {
        self.now.known()
    }

    /// The number of the members that this queue knows: another one for each change.
    pub fn members_number(&self) -> u64 {
        self.now.number
    }

    /// The epoch goes on with this number.
    pub(super) fn has_seen(&mut self, number: u32) {
        if self.epoch != number {
            self.now = self.common.membership();
            self.epoch = number;
        }
    }

    /// True if members are those of this epoch.
    pub(super) fn is_current(&self, epoch: u32) -> bool {
        self.epoch == epoch
    }

    /// A stop is over: all that wait for that go on. Another one may have begun.
    fn go_on(&mut self) {
        self.look();
        for token in std::mem::take(&mut self.parked) {
            self.claim_again(token);
        }
        for token in std::mem::take(&mut self.held_logs) {
            self.log_goes_on(token);
        }
        for unnamed in std::mem::take(&mut self.unnamed) {
            self.name_or_wait(unnamed);
        }
        for flush in std::mem::take(&mut self.held_flushes) {
            self.flush_failed(flush);
        }
        self.sync_goes_on();
        self.follow_orders();
        if self.now.broken {
            // Nobody gives pages away any more.
            self.wake_pageless();
        }
    }
}

impl fmt::Debug for QueueCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueCore")
            .field("me", &self.me)
            .field("requests", &self.active.len())
            .field("spans", &self.spans.len())
            .field("gathered", &self.gather.waiting())
            .field("todo", &self.todo.len())
            .field("ios", &self.purposes.len())
            .field("flying", &self.flying.len())
            .field("units", &self.units.len())
            .field("parked", &self.parked.len())
            .field("held_logs", &self.held_logs.len())
            .field("unnamed", &self.unnamed.len())
            .field("held_flushes", &self.held_flushes.len())
            .field("pageless", &self.pageless.len())
            .field("waiting_for_bits", &self.intents.waiting())
            .field("sweeps", &self.is_sweeping())
            .field("places", &(self.places.in_use(), self.log_places.in_use()))
            .field("kicks", &self.kick.is_some())
            .field("sync", &self.sync)
            .finish_non_exhaustive()
    }
}
