//! One queue of an array.

use super::away::LeftBehind;
use super::bounce::{Bounced, Bounces};
use super::lower::{arm_members, below, open_entries, open_member, remaps_to};
use super::requests::{MemberRequest, MemberRequests};
use super::{ArrayShared, MemberDevice, QueueEntries};
use crate::core::{Core, MemberIo, Token, Work};
use pvblk_block::planted::{Plant, has};
use pvblk_block::stacked::{CompletionQueue, LowerQueue, finish_within};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, DeviceQueue, Error, Op, QueueContext, Readiness, Request, Status};
use pvblk_sys::Poller;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait of a queue that is closed for its I/O at the members.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Most bytes of memory that a queue keeps for later reads.
const KEPT_BYTES: usize = 4 << 20;

pub(super) struct ArrayQueue {
    shared: Arc<ArrayShared>,
    owner: usize,
    completions: Arc<CompletionQueue<QueueEntries>>,
    /// Queues to the members, by slot.
    members: Vec<Option<LowerQueue>>,
    /// Where their requests come from, by slot.
    remaps: Vec<Tracer>,
    /// For queues at devices that come later.
    below: QueueContext,
    /// Changes of the devices that were seen.
    changes: u64,
    /// A device went, and has requests in flight.
    closing: bool,
    requests: MemberRequests,
    /// Memory of reads, if members have a time limit.
    bounces: Option<Bounces>,
    /// Reads in flight that go there, with their slots, by tag.
    bounced: Vec<Option<(usize, Bounced)>>,
    ios: Vec<MemberIo>,
    /// Requests that were just made of them.
    made: Vec<MemberRequest>,
    done: Vec<Completion>,
    ended: Vec<(Token, bool)>,
    /// Empty lists to hand to the core for those that it filled.
    told_ios: Vec<MemberIo>,
    told_done: Vec<(usize, Completion)>,
    /// Owners that have something to look at.
    others: Vec<usize>,
    /// Completions of members that were just polled.
    polled: Vec<Completion>,
    /// Computations to do.
    works: Vec<Work>,
    poller: Poller,
    tracer: Tracer,
}

impl ArrayQueue {
    pub(super) fn open(
        shared: &Arc<ArrayShared>,
        context: &QueueContext,
        floor: String,
    ) -> Result<ArrayQueue, Error> {
        let tracer = context
            .tracing
            .tracer(&floor, context.index, context.submitter);
        // Members don't know where their requests come from: `remaps` has that.
        let below = below(context);
        let (completions, poller) = open_entries()?;
        let owner = shared.queues.open(&completions);
        let mut queue = ArrayQueue {
            shared: Arc::clone(shared),
            owner,
            completions,
            members: Vec::new(),
            remaps: Vec::new(),
            below,
            changes: u64::MAX,
            closing: false,
            requests: MemberRequests::default(),
            bounces: shared.control.limit.map(|_| Bounces::new(KEPT_BYTES)),
            bounced: Vec::new(),
            ios: Vec::new(),
            made: Vec::new(),
            done: Vec::new(),
            ended: Vec::new(),
            told_ios: Vec::new(),
            told_done: Vec::new(),
            others: Vec::new(),
            polled: Vec::new(),
            works: Vec::new(),
            poller,
            tracer,
        };
        // On an error it says good-bye in order.
        queue.follow_devices()?;
        Ok(queue)
    }

    /// Opens queues of devices that came, and closes those of devices that went.
    fn follow_devices(&mut self) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let changes = shared.changes.load(Ordering::Acquire);
        if changes == self.changes && !self.closing {
            return Ok(());
        }
        let devices = shared.devices.lock().clone();
        self.closing = false;
        let mut opened = Ok(());
        for (slot, device) in devices.iter().enumerate() {
            if self.members.len() <= slot {
                self.members.push(None);
            }
            if let Some(lower) = &self.members[slot] {
                let same = |d: &MemberDevice| Arc::ptr_eq(&d.device, lower.device());
                if device.as_ref().is_some_and(same) {
                    continue;
                }
                // A slot gets another device only when nothing of the old one is in flight.
                match lower.is_idle() || self.leave_behind(slot) {
                    true => self.members[slot] = None,
                    false => self.closing = true,
                }
            }
            if let (None, Some(device)) = (&self.members[slot], device) {
                self.remaps.resize_with(devices.len(), Tracer::default);
                self.remaps[slot] = remaps_to(device, &self.below, &self.tracer);
                match open_member(device, &self.below) {
                    Ok(lower) => self.members[slot] = Some(lower),
                    Err(e) => opened = Err(e),
                }
            }
        }
        opened?;
        self.changes = changes;
        Ok(())
    }

    /// Leaves a device that was kicked to the background thread, with its abandoned I/O; this queue may not be polled again. False if something at the
    /// device is waited for.
    fn leave_behind(&mut self, slot: usize) -> bool {
        let core = self.shared.core.lock();
        let mut parts = HashMap::new();
        for tag in 0..self.requests.tags() {
            let Some(first) = self.requests.tokens(tag).next() else {
                continue;
            };
            match core.place_of(first) {
                (at, _) if at != slot => {}
                (_, false) => return false,
                (_, true) => {
                    parts.insert(tag as u64, self.requests.tokens(tag).collect());
                }
            }
        }
        drop(core);
        let Some(lower) = self.members[slot].take() else {
            return true;
        };
        for tag in parts.keys().map(|tag| *tag as usize) {
            self.requests.leave(tag);
            if let Some(bounced) = self.bounced.get_mut(tag) {
                *bounced = None;
            }
        }
        let left = LeftBehind::new(lower, parts);
        self.shared.left_behind.lock().push(left);
        true
    }

    /// Steps the core, and passes its results on.
    pub(super) fn step<T>(&mut self, f: impl FnOnce(&mut Core, usize) -> T) -> T {
        let value = self.step_once(f);
        self.settle();
        value
    }

    /// Does the computations that aren't delayed. Those for other queues never are: a queue without
    /// requests in flight isn't polled.
    fn settle(&mut self) {
        let lazy =
            |q: &ArrayQueue| q.shared.lazy && q.works.iter().all(|work| work.runner == q.owner);
        while !self.works.is_empty() && !lazy(self) {
            self.do_works();
        }
    }

    /// Does computations without the core's lock, and gives the results to the core.
    fn do_works(&mut self) {
        let mut works = std::mem::take(&mut self.works);
        works.iter_mut().for_each(Work::run);
        self.step_once(|core, _| works.drain(..).for_each(|w| core.worked(w)));
        if self.works.is_empty() {
            self.works = works;
        }
    }

    fn step_once<T>(&mut self, f: impl FnOnce(&mut Core, usize) -> T) -> T {
        let shared = Arc::clone(&self.shared);
        let mut core = shared.core.lock();
        let value = f(&mut core, self.owner);
        core.unplug();
        // Swapped, so that all of them keep their memory.
        let mut ios = std::mem::replace(&mut core.ios, std::mem::take(&mut self.told_ios));
        let mut done = std::mem::replace(&mut core.done, std::mem::take(&mut self.told_done));
        self.works.append(&mut core.works);
        let (gone, kicked) = (core.take_gone(), core.take_kicked());
        let waiters = core.waits_for();
        shared.waiting.store(!waiters.is_empty(), Ordering::Relaxed);
        // The core is locked meanwhile: another queue may give the slot to another device.
        let gone = shared.forget(gone, kicked);
        drop(core);
        if !gone.is_empty() {
            // Idle queues are woken too: as long as one has a device open, no other program can
            // have it.
            shared.queues.for_each(|_, queue| queue.wait().notify());
            drop(gone);
        }
        let me = self.owner;
        // They may sleep, since something was being written when they looked.
        self.others.extend(waiters);
        self.others.extend(ios.iter().map(|io| io.runner));
        self.others.extend(done.iter().map(|d| d.0));
        self.others.extend(self.works.iter().map(|w| w.runner));
        self.others.retain(|other| *other != me);
        let works = &mut self.works;
        shared
            .queues
            .post(&mut self.others, |other, queue, entries| {
                entries
                    .ios
                    .extend(ios.extract_if(.., |io| io.runner == other));
                let theirs = done.extract_if(.., |d| d.0 == other);
                entries.done.extend(theirs.map(|d| d.1));
                // A calculation is sooner done here if the other queue sleeps.
                if !queue.wait().is_sleeping() {
                    let theirs = works.extract_if(.., |w| w.runner == other);
                    entries.works.extend(theirs);
                }
            });
        // I/O for a queue that is gone goes here too: only an array that has failed has such I/O.
        self.ios.extend(ios.drain(..).filter(|io| io.runner == me));
        self.done
            .extend(done.drain(..).filter(|d| d.0 == me).map(|d| d.1));
        self.told_ios = ios;
        self.told_done = done;
        self.issue();
        value
    }

    /// Gives member I/O to the members; adjacent I/O goes as one request.
    fn issue(&mut self) {
        if self.ios.is_empty() {
            return;
        }
        if let Err(e) = self.follow_devices() {
            // Its I/O fails, and so it is kicked.
            tracing::error!("raid5: {e}");
        }
        let mut made = std::mem::take(&mut self.made);
        let members = &self.members;
        let limits = |slot: usize| Some(*members.get(slot)?.as_ref()?.limits());
        self.requests.make(&mut self.ios, limits, &mut made);
        for MemberRequest {
            slot,
            request,
            cause,
        } in made.drain(..)
        {
            self.trace(slot, &request, cause);
            self.send(slot, request);
        }
        self.made = made;
        for lower in self.members.iter_mut().flatten() {
            lower.submit();
        }
    }

    /// Says for which sector of the array a member's request is.
    fn trace(&mut self, member: usize, request: &Request, cause: Option<u64>) {
        if let (Some(cause), Some(remaps)) = (cause, self.remaps.get_mut(member)) {
            remaps.remapped(request, cause);
        }
    }

    fn send(&mut self, member: usize, mut request: Box<Request>) {
        if request.op == Op::Read
            && !has(Plant::LateReadLands)
            && let Some(bounces) = &mut self.bounces
        {
            let tag = request.tag as usize;
            match bounces.bounce(&mut request) {
                Ok(bounced) => {
                    let tags = self.requests.tags();
                    self.bounced.resize_with(tags, || None);
                    self.bounced[tag] = Some((member, bounced));
                }
                Err(e) => {
                    tracing::error!("{e}");
                    self.release(member, request, false);
                    return;
                }
            }
        }
        match self.members.get_mut(member).and_then(Option::as_mut) {
            Some(lower) => lower.push(request),
            None => {
                self.unbounce(&mut request, false);
                self.release(member, request, false);
            }
        }
    }

    /// Gives a read its own memory back.
    fn unbounce(&mut self, request: &mut Request, copy: bool) {
        let bounced = self.bounced.get_mut(request.tag as usize);
        if let (Some(bounces), Some((_, bounced))) =
            (&mut self.bounces, bounced.and_then(Option::take))
        {
            bounces.restore(bounced, request, copy);
        }
    }

    /// Takes over what a member has read, if the array still waits for it.
    fn take_over(&mut self, polled: &mut [Completion]) {
        let waits = |tag: u64| self.bounced.get(tag as usize).is_some_and(Option::is_some);
        if !polled.iter().any(|c| waits(c.request.tag)) {
            return;
        }
        let mut live = Vec::with_capacity(polled.len());
        {
            let mut core = self.shared.core.lock();
            for completion in polled.iter() {
                let mut tokens = self.requests.tokens(completion.request.tag as usize);
                // Those of one request are abandoned together.
                live.push(match completion.status {
                    Status::Ok => tokens.all(|token| core.claim(token)),
                    _ => !tokens.any(|token| core.is_abandoned(token)),
                });
            }
        }
        for (completion, live) in polled.iter_mut().zip(live) {
            let request = &mut completion.request;
            if live {
                self.unbounce(request, completion.status == Status::Ok);
            } else if let Some(bounces) = &mut self.bounces
                && let Some(bounced) = self.bounced.get_mut(request.tag as usize)
                && let Some((_, bounced)) = bounced.take()
            {
                bounces.discard(bounced, request);
                let abandoned = self.requests.take_tokens(request.tag as usize);
                self.ended.extend(abandoned.map(|token| (token, false)));
            }
        }
    }

    /// A member's request has ended.
    fn release(&mut self, member: usize, request: Box<Request>, ok: bool) {
        let again = self.requests.end(request, ok, &mut self.ended);
        if again.is_empty() {
            return;
        }
        again.into_iter().for_each(|one| self.send(member, one));
        if let Some(Some(lower)) = self.members.get_mut(member) {
            lower.submit();
        }
    }

    /// Takes the completions, I/O and work that others left for this queue.
    fn collect(&mut self) {
        let (done, ios, works) = (&mut self.done, &mut self.ios, &mut self.works);
        let any = self.completions.collect(|entries| {
            done.append(&mut entries.done);
            ios.append(&mut entries.ios);
            works.append(&mut entries.works);
        });
        if any {
            self.issue();
        }
    }

    /// Takes completions of the members, and goes on with them; false if there were none.
    pub(super) fn progress(&mut self) -> bool {
        self.collect();
        if self.bounces.is_some() && self.shared.changes.load(Ordering::Acquire) != self.changes {
            // A device may have been kicked with I/O in flight. I/O to one that can't be opened returns the error.
            let _ = self.follow_devices();
        }
        let mut polled = std::mem::take(&mut self.polled);
        for at in 0..self.members.len() {
            let Some(lower) = &mut self.members[at] else {
                continue;
            };
            if lower.poll(&mut polled) == 0 {
                continue;
            }
            if self.bounces.is_some() {
                self.take_over(&mut polled);
            }
            for completion in polled.drain(..) {
                let ok = completion.status == Status::Ok;
                self.release(at, completion.request, ok);
            }
        }
        self.polled = polled;
        if self.closing {
            let _ = self.follow_devices();
        }
        if !self.works.is_empty() {
            self.do_works();
            self.settle();
            return true;
        }
        if self.ended.is_empty() {
            return false;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.step(|core, owner| {
            for (token, ok) in ended.drain(..) {
                core.ended(owner, token, ok);
            }
        });
        // I/O that could not be given to a member has ended meanwhile.
        ended.append(&mut self.ended);
        self.ended = ended;
        true
    }

    /// Its user waits: writes that wait for more from it do so in vain.
    fn wait_no_longer(&mut self) {
        // A change after this look wakes the queues that sleep.
        if self.shared.waiting.load(Ordering::Relaxed) {
            self.step(|core, owner| core.expect_nothing(owner));
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        if !self.works.is_empty() {
            return true;
        }
        let idle = self.members.iter().flatten().all(LowerQueue::is_idle);
        let core = self.shared.core.lock();
        // I/O that was abandoned is no work of anybody.
        let mut tokens = (0..self.requests.tags()).flat_map(|tag| self.requests.tokens(tag));
        let waits =
            !idle && (!self.ended.is_empty() || tokens.any(|token| !core.is_abandoned(token)));
        waits || core.has_active(self.owner)
    }
}

impl DeviceQueue for ArrayQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.tracer
            .requests(Phase::Issue, batch.iter().map(|r| &**r));
        self.step(|core, owner| {
            for request in batch.drain(..) {
                core.submit(owner, request);
            }
        });
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.completions.wait().finish_wait();
        if !self.progress() && self.done.is_empty() {
            self.wait_no_longer();
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        let ready = |q: &ArrayQueue| {
            !q.done.is_empty()
                || !q.ended.is_empty()
                || !q.works.is_empty()
                || q.completions.wait().is_pending()
        };
        self.completions.wait().prepare_to_wait();
        if ready(self) {
            return Readiness::Ready;
        }
        self.wait_no_longer();
        if ready(self) {
            return Readiness::Ready;
        }
        let readiness = arm_members(&mut self.members, &self.poller);
        match ready(self) {
            true => Readiness::Ready,
            false => readiness,
        }
    }

    fn woken(&mut self) {
        self.completions.wait().event().drain();
        for lower in self.members.iter_mut().flatten() {
            lower.woken();
        }
        if self.shared.changes.load(Ordering::Acquire) != self.changes
            && let Err(e) = self.follow_devices()
        {
            // Later I/O to the device returns the error.
            tracing::debug!("raid5: {e}");
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }
}

impl Drop for ArrayQueue {
    /// Others may wait for stripes that this queue runs: it lets them end.
    fn drop(&mut self) {
        let finished = finish_within(LAST_WAIT, || {
            if !self.is_busy() {
                return None;
            }
            let any = self.progress();
            if !any {
                self.wait_no_longer();
            }
            Some(any)
        });
        if !finished {
            tracing::error!(
                "{}: a queue went away with work at its members: the array stops",
                self.shared.control.name
            );
            self.step(|core, _| core.give_up());
        }
        self.shared.queues.close(self.owner);
    }
}
