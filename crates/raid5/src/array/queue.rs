//! One queue of an array.

use super::at_once::AtOnce;
use super::devices::AtSlot;
use super::shared::{FLOOR, Shared, number, owner};
use crate::array::lower::{Mailbox, arm_members, below, open_mail, open_member, remaps_to};
use crate::array::requests::{MemberRequest, MemberRequests};
use crate::core::{QueueCore, SyncEnd, SyncNow, Token, Work};
use crate::words::Owner;
use pvblk_block::stacked::{LowerQueue, finish_within};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, DeviceQueue, Error, QueueContext, Readiness, Request, Status};
use pvblk_sys::Poller;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Longest wait of a queue that is closed for its I/O at the members. The background goes on with what is left.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// A queue whose user is there.
pub(super) struct ArrayQueue {
    /// None once it is closed.
    state: Option<QueueState>,
}

/// All of a queue. If it is dropped with work, others may have its words, and it theirs: so only [`QueueState::close`] gives its number away.
pub(super) struct QueueState {
    shared: Arc<Shared>,
    me: Owner,
    core: QueueCore,
    mail: Arc<Mailbox>,
    /// Queues to the members, by slot, and those for whom they are.
    members: Vec<Option<LowerQueue>>,
    at_slots: Vec<Option<Arc<AtSlot>>>,
    /// Where their requests come from, by slot.
    remaps: Vec<Tracer>,
    /// For queues at devices that come later.
    below: QueueContext,
    /// The members that `members` follows, by their number. A device that went has I/O in flight, or one that came couldn't be opened: they are
    /// looked at again.
    followed: Option<u64>,
    is_settled: bool,
    requests: MemberRequests,
    made: Vec<MemberRequest>,
    ended: Vec<(Token, bool)>,
    polled: Vec<Completion>,
    /// Calculations that are being done.
    works: Vec<Work>,
    at_once: AtOnce,
    poller: Poller,
    tracer: Tracer,
}

impl ArrayQueue {
    pub(super) fn open(shared: &Arc<Shared>, context: &QueueContext) -> Result<ArrayQueue, Error> {
        let mut state = QueueState::open(shared, context)?;
        match state.follow_members() {
            Ok(()) => Ok(ArrayQueue { state: Some(state) }),
            Err(error) => {
                state.close();
                Err(error)
            }
        }
    }

    fn state(&mut self) -> &mut QueueState {
        self.state
            .as_mut()
            .expect("it has its state until it is dropped")
    }
}

impl QueueState {
    /// Queues at the members are opened later: where that isn't possible, I/O fails.
    pub(super) fn open(shared: &Arc<Shared>, context: &QueueContext) -> Result<QueueState, Error> {
        let tracing = &context.tracing;
        let tracer = tracing.tracer(FLOOR, context.index, context.submitter);
        // Members don't know where their requests come from: `remaps` has that.
        let below = below(context);
        let (mail, poller) = open_mail()?;
        let number = shared.queues.open(&mail);
        let too_many = || Error::config("raid5: more queues than there is room for");
        let core = owner(number).ok_or_else(too_many);
        let core = core.and_then(|me| Ok((me, QueueCore::open(&shared.common, me)?)));
        let (me, core) = core.inspect_err(|_| shared.queues.close(number))?;
        Ok(QueueState {
            shared: Arc::clone(shared),
            me,
            core,
            mail,
            members: Vec::new(),
            at_slots: Vec::new(),
            remaps: Vec::new(),
            below,
            followed: None,
            is_settled: false,
            requests: MemberRequests::default(),
            made: Vec::new(),
            ended: Vec::new(),
            polled: Vec::new(),
            works: Vec::new(),
            at_once: AtOnce::default(),
            poller,
            tracer,
        })
    }

    /// Opens queues at devices that came, and closes those at devices that went and at which nothing is left.
    pub(super) fn follow_members(&mut self) -> Result<(), Error> {
        let number = self.core.members_number();
        let is_new = self.followed != Some(number);
        if !is_new && self.is_settled {
            return Ok(());
        }
        self.followed = Some(number);
        if is_new {
            // Devices that went are to be forgotten, and a spare may take a place.
            self.shared.chores.wake();
        }
        let (known, live) = self.core.devices();
        let mut is_settled = true;
        let slots = self.members.len().max(known.len());
        self.members.resize_with(slots, || None);
        self.at_slots.resize_with(slots, || None);
        self.remaps.resize_with(slots, Tracer::default);
        let mut opened = Ok(());
        for (slot, known) in known.iter().enumerate() {
            if self.at_slots[slot].is_some() && !self.core.uses(slot) {
                if let Some(mut lower) = self.members[slot].take() {
                    // Its descriptor may stay open, if requests are left there.
                    lower.leave_poller(&self.poller);
                }
                self.at_slots[slot] = None;
            }
            let is_live = live & 1 << slot != 0;
            is_settled &= is_live || self.at_slots[slot].is_none();
            if !is_live || self.members[slot].is_some() {
                continue;
            }
            // None: it has failed meanwhile, and the core will learn of that.
            let Some(device) = self.shared.devices.get(slot, known) else {
                continue;
            };
            let opened_device = device.opened();
            match open_member(&opened_device, &self.below) {
                Ok(lower) => {
                    self.members[slot] = Some(lower);
                    self.remaps[slot] = remaps_to(&opened_device, &self.below, &self.tracer);
                }
                Err(error) => (opened, is_settled) = (Err(error), false),
            }
            // Also without a queue there: this queue counts on the slot.
            self.at_slots[slot] = Some(device);
        }
        self.is_settled = is_settled;
        opened
    }

    /// Closes a queue that is idle.
    pub(super) fn close(self) {
        self.shared.post(&mut self.core.close());
        self.shared.queues.close(number(self.me));
    }

    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let issued = batch.iter().map(|request| &**request);
        self.tracer.requests(Phase::Issue, issued);
        let core = &mut self.core;
        batch.drain(..).for_each(|request| core.submit(request));
        self.run();
    }

    /// Takes mail and completions of the members, and goes on with them; false if there were none.
    pub(super) fn progress(&mut self) -> bool {
        self.mail.wait().finish_wait();
        let core = &mut self.core;
        let mut any = self
            .mail
            .collect(|mail| mail.drain(..).for_each(|mail| core.receive(mail)));
        self.poll_members();
        any |= !self.ended.is_empty();
        if any {
            self.run();
        }
        any
    }

    /// Takes completions of the members.
    fn poll_members(&mut self) {
        for lower in self.members.iter_mut().flatten() {
            if lower.poll(&mut self.polled) == 0 {
                continue;
            }
            for completion in self.polled.drain(..) {
                let ok = completion.status == Status::Ok;
                let again = self.requests.end(completion.request, ok, &mut self.ended);
                again.into_iter().for_each(|one| lower.push(one));
            }
            lower.submit();
        }
    }

    /// Goes on as far as possible without the queue's user; false if nothing was done.
    pub(super) fn go_on(&mut self) -> bool {
        self.progress() || self.expect_nothing()
    }

    /// The queue's user waits: writes that wait for more from it do so in vain, and go on. False if there are none.
    fn expect_nothing(&mut self) -> bool {
        let waits = self.core.waits_in_vain();
        if waits {
            self.step(QueueCore::expect_nothing);
        }
        waits
    }

    /// Steps the core until it waits, and passes its results on.
    fn run(&mut self) {
        loop {
            for (token, ok) in self.ended.drain(..) {
                self.core.ended(token, ok);
            }
            let is_part = self.calculate();
            self.make_requests();
            if is_part {
                // Others don't wait until all that this queue has is done.
                self.shared.post(&mut self.core.mail);
                self.submit_to_members();
                self.poll_members();
                let mut members = self.members.iter().flatten();
                self.at_once.went(members.all(LowerQueue::is_idle));
            } else if self.ended.is_empty() {
                break;
            }
        }
        self.submit_to_members();
        let core = &mut self.core;
        for errand in core.errands.drain(..) {
            self.shared.chores.write_superblocks(self.me, errand);
        }
        self.shared.chores.open(self.me, &mut core.intends);
        if std::mem::take(&mut core.marked) {
            self.shared.chores.wake();
        }
        self.shared.post(&mut core.mail);
    }

    /// Steps the core until it waits, and does its calculations. True: what there is goes to the members first.
    fn calculate(&mut self) -> bool {
        let core = &mut self.core;
        loop {
            let mut is_part = false;
            self.at_once.begin();
            while !is_part && core.step() {
                is_part = self.at_once.goes(&core.works);
            }
            if core.works.is_empty() {
                return false;
            }
            // Swapped, so that both keep their memory.
            std::mem::swap(&mut core.works, &mut self.works);
            for work in &mut self.works {
                work.run();
                core.worked(work);
            }
            self.works.clear();
            if is_part {
                return true;
            }
        }
    }

    /// Makes requests of the core's I/O, and gives them to the members' queues.
    fn make_requests(&mut self) {
        if let Err(error) = self.follow_members() {
            // Its I/O fails, and so it is kicked.
            tracing::error!("{}: {error}", self.shared.control.name);
        }
        let (core, members) = (&mut self.core, &self.members);
        let limits = |slot: usize| Some(*members.get(slot)?.as_ref()?.limits());
        self.requests.make(&mut core.ios, limits, &mut self.made);
        for MemberRequest {
            slot,
            request,
            cause,
        } in self.made.drain(..)
        {
            if let (Some(cause), Some(remaps)) = (cause, self.remaps.get_mut(slot)) {
                remaps.remapped(&request, cause);
            }
            match &mut self.members[slot] {
                Some(lower) => lower.push(request),
                None => {
                    self.requests.end(request, false, &mut self.ended);
                }
            }
        }
    }

    fn submit_to_members(&mut self) {
        for lower in self.members.iter_mut().flatten() {
            lower.submit();
        }
    }

    /// True if there are requests to tell of. A queue without requests isn't polled, so none is told of while others wait for this queue.
    fn has_done(&self) -> bool {
        !self.core.done.is_empty() && !self.core.is_stopping()
    }

    /// Live slots at which it has no queue, as a mask.
    pub(super) fn unopened(&self) -> u64 {
        let (_, live) = self.core.devices();
        let opened = self.members.iter().enumerate();
        let opened = opened.filter_map(|(slot, lower)| lower.as_ref().map(|_| slot));
        live & !opened.fold(0, |mask, slot| mask | 1 << slot)
    }

    /// True if nobody counts on it any more.
    pub(super) fn is_idle(&self) -> bool {
        self.core.is_idle()
    }

    /// Calls for the core, which is stepped then.
    pub(super) fn step<T>(&mut self, call: impl FnOnce(&mut QueueCore) -> T) -> T {
        let result = call(&mut self.core);
        self.run();
        result
    }

    /// Groups of sums for which its sweep waits, as [`QueueCore::swept_sums`].
    pub(super) fn swept_sums(&self) -> Option<Vec<usize>> {
        self.core.swept_sums()
    }

    /// True while a sweep of the bitmap goes on.
    pub(super) fn is_sweeping(&self) -> bool {
        self.core.is_sweeping()
    }

    /// The action of this queue that is under way.
    pub(super) fn sync_now(&self) -> Option<SyncNow> {
        self.core.sync_now()
    }

    pub(super) fn take_synced(&mut self) -> Option<SyncEnd> {
        self.core.take_synced()
    }

    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    pub(super) fn woken(&mut self) {
        self.mail.wait().event().drain();
        for lower in self.members.iter_mut().flatten() {
            lower.woken();
        }
    }

    pub(super) fn arm(&mut self) -> Readiness {
        let wait = self.mail.wait();
        wait.prepare_to_wait();
        if self.has_done() || wait.is_pending() || self.expect_nothing() {
            return Readiness::Ready;
        }
        let readiness = arm_members(&mut self.members, &self.poller);
        match self.mail.wait().is_pending() {
            true => Readiness::Ready,
            false => readiness,
        }
    }
}

impl DeviceQueue for ArrayQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.state().submit(batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let state = self.state();
        if !state.progress() && state.core.done.is_empty() {
            state.expect_nothing();
        }
        if state.has_done() {
            out.append(&mut state.core.done);
        }
    }

    fn arm(&mut self) -> Readiness {
        self.state().arm()
    }

    fn woken(&mut self) {
        let state = self.state();
        state.woken();
        if state.is_idle() {
            // Nobody polls it, and a device that went is to be closed.
            state.progress();
            // The mail that tells of it may not be there yet.
            state.step(QueueCore::look_again);
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.state.as_ref()?.wait_fd())
    }
}

impl Drop for ArrayQueue {
    /// Others may wait for stripes that this queue owns: they are finished here, or by the background.
    fn drop(&mut self) {
        let Some(mut state) = self.state.take() else {
            return;
        };
        let is_over = finish_within(LAST_WAIT, || (!state.is_idle()).then(|| state.go_on()));
        if !is_over {
            let shared = Arc::clone(&state.shared);
            shared.chores.finish(state);
        } else if state.is_idle() {
            state.close();
        }
    }
}
