//! A software queue: one submitter's way to a ring.

use super::connection::{Connection, Found, Link};
use super::hardware_queue::{HardwareQueue, SharedQueue, immediate};
use super::owners::{self, Completions};
use super::plug::{MergePolicy, Merged, Plug};
use parking_lot::MutexGuard;
use pvblk_block::trace::{self, Phase, Tracer};
use pvblk_block::{
    Completion, DeviceQueue, MergeCounts, Op, QueueContext, Readiness, Request, Status,
};
use pvblk_sys::Poller;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// See the module's documentation.
pub struct SoftwareQueue<M: MergePolicy> {
    link: Arc<Link<M>>,
    /// Of the link, when it was last looked at.
    epoch: u64,
    connection: Arc<Connection<M>>,
    hardware: Arc<SharedQueue<M>>,
    owner: u32,
    /// Number of the queue among its user's.
    index: u32,
    completions: Arc<Completions>,
    plug: Plug,
    merges: Arc<MergeCounts>,
    /// Requests that wait for the next connection, oldest first.
    waiting: Vec<Merged>,
    /// Losses of the link that our user was told.
    told_losses: u64,
    done: Vec<Completion>,
    /// Wakes for completions, and for the ring's doorbell while we are the listener.
    poller: Poller,
    /// The poller has the doorbell.
    listens: bool,
    bells: Vec<Arc<Completions>>,
    tracer: Tracer,
}

const CHANNEL: u64 = 0;
const COMPLETIONS: u64 = 1;

impl<M: MergePolicy> SoftwareQueue<M> {
    pub fn new(
        link: &Arc<Link<M>>,
        context: &QueueContext,
        tracer: Tracer,
    ) -> std::io::Result<SoftwareQueue<M>> {
        let completions = Arc::new(Completions::new()?);
        let poller = Poller::new()?;
        let event = completions.wait().event();
        poller.add(event.as_fd(), COMPLETIONS, false)?;
        link.enter(&completions);
        // Before the connection, so that a change after it is seen.
        let epoch = link.epoch();
        let connection = link.last();
        let index = context.index;
        let hardware = ring_of(&connection, index);
        add_silently(&poller, &hardware)?;
        let owner = hardware.state.lock().owners.join(Arc::clone(&completions));
        Ok(SoftwareQueue {
            told_losses: link.losses(),
            link: Arc::clone(link),
            epoch,
            connection,
            hardware,
            owner,
            index,
            completions,
            plug: Plug::counting(&context.merges),
            merges: Arc::clone(&context.merges),
            waiting: Vec::new(),
            done: Vec::new(),
            poller,
            listens: false,
            bells: Vec::new(),
            tracer,
        })
    }

    /// Our ring was stopped: goes to the one of the next connection, with all that waits, if there is one.
    #[cold]
    fn follow(&mut self) {
        self.epoch = self.link.epoch();
        // Parked when the ring was stopped, so before what was submitted since.
        let mut parked = std::mem::take(&mut self.completions.entries().parked);
        parked.append(&mut self.waiting);
        self.waiting = parked;
        match self.link.find() {
            Found::Down => {}
            Found::Gone => {
                for merged in self.waiting.drain(..) {
                    merged.deliver(Status::IoError, &mut self.done);
                }
            }
            Found::Up(connection) if Arc::ptr_eq(&connection, &self.connection) => {}
            Found::Up(connection) => self.join(connection),
        }
    }

    fn join(&mut self, connection: Arc<Connection<M>>) {
        let hardware = ring_of(&connection, self.index);
        let moved = self
            .poller
            .remove(self.hardware.channel.fd())
            .and_then(|()| add_silently(&self.poller, &hardware));
        if let Err(e) = moved {
            // Out of kernel memory: without the event this queue would sleep for ever.
            tracing::error!("waiting for another ring: {e}");
            for merged in self.waiting.drain(..) {
                merged.deliver(Status::IoError, &mut self.done);
            }
            return;
        }
        self.listens = false;
        self.hardware.state.lock().leave(self.owner);
        self.owner = hardware
            .state
            .lock()
            .owners
            .join(Arc::clone(&self.completions));
        self.hardware = hardware;
        self.connection = connection;
        for merged in &mut self.waiting {
            merged.owner = self.owner;
        }
        let mut state = self.hardware.state.lock();
        if state.is_stopped() {
            return; // over already; the epoch has changed, so we come back
        }
        let waiting = self.waiting.drain(..);
        state.insert(self.owner, waiting, &self.merges, &mut self.tracer);
        let notify = state.dispatch(&mut self.tracer, self.owner, &mut self.done);
        unlock(&self.hardware, &mut self.bells, state, notify);
    }

    /// Lets the ring's doorbell wake us, or not.
    fn listen(&mut self, listen: bool) -> std::io::Result<()> {
        if self.listens != listen {
            let fd = self.hardware.channel.fd();
            self.poller.set(fd, CHANNEL, listen, false)?;
            self.listens = listen;
        }
        Ok(())
    }

    /// A flush can't say that writes are safe which a lost cache took with it: all fail that our user submitted
    /// before the first of them told it.
    #[cold]
    fn tell_losses(&mut self, losses: u64) {
        for c in &mut self.done {
            if c.request.op == Op::Flush && c.status == Status::Ok && c.request.scratch != losses {
                c.status = Status::IoError;
                self.told_losses = losses;
            }
        }
    }

    /// A request is plugged.
    #[cold]
    #[inline(never)]
    fn trace_plug(&mut self, request: &Request, plugs: bool) {
        if plugs && self.plug.is_empty() {
            self.tracer.plugged(request);
        }
        self.tracer.request(Phase::Get, request);
    }

    /// Plugged requests go on to the ring.
    #[cold]
    #[inline(never)]
    fn trace_unplug(&mut self, plugs: bool) {
        if let Some(first) = self.plug.iter().next().filter(|_| plugs) {
            let waiting = self.plug.len() as u64;
            self.tracer.unplugged(&first.first, waiting);
        }
        let requests = self.plug.iter().map(|merged| &*merged.first);
        self.tracer.requests(Phase::Insert, requests);
    }

    /// Takes the completions that others took off the ring for this queue.
    fn collect(&mut self) {
        let done = &mut self.done;
        self.completions
            .collect(|letters| done.append(&mut letters.done));
    }
}

impl<M: MergePolicy> DeviceQueue for SoftwareQueue<M> {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        // A single request isn't held back for others.
        let plugs = batch.len() > 1;
        for mut request in batch.drain(..) {
            // A flush remembers what its user had been told.
            request.scratch = self.told_losses;
            if let Some(status) = immediate(&request, &self.connection.properties) {
                self.done.push(Completion { request, status });
                continue;
            }
            if trace::is_on() {
                self.trace_plug(&request, plugs);
            }
            self.plug.add(
                request,
                self.owner,
                &self.connection.merge,
                &mut self.tracer,
            );
        }
        if trace::is_on() {
            self.trace_unplug(plugs);
        }
        let mut state = self.hardware.state.lock();
        if state.is_stopped() {
            drop(state);
            self.waiting.extend(self.plug.pull());
            self.follow();
            return;
        }
        state.owners.awake(self.owner);
        let pulled = self.plug.pull();
        let count = state.insert(self.owner, pulled, &self.merges, &mut self.tracer);
        let notify = state.dispatch(&mut self.tracer, self.owner, &mut self.done);
        if trace::is_on() {
            state.trace_waiting(&mut self.tracer, count);
        }
        unlock(&self.hardware, &mut self.bells, state, notify);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let mut state = self.hardware.state.lock();
        let stopped = state.is_stopped();
        state.owners.awake(self.owner);
        state.unplug(self.owner);
        state.drain(self.owner, &mut self.done);
        let notify = !stopped && state.dispatch(&mut self.tracer, self.owner, &mut self.done);
        let busy = !self.done.is_empty() || self.completions.wait().is_pending();
        state.owners.pass_on(self.owner, busy);
        unlock(&self.hardware, &mut self.bells, state, notify);
        if stopped {
            self.follow();
        }
        self.collect();
        let losses = self.link.losses();
        if losses != 0 {
            self.tell_losses(losses);
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        if !self.done.is_empty() {
            return Readiness::Ready;
        }
        let mut state = self.hardware.state.lock();
        if state.is_stopped() {
            let moved = self.epoch != self.link.epoch();
            let ready = moved || self.completions.wait().is_pending();
            return if ready {
                Readiness::Ready
            } else {
                Readiness::Wait(None)
            };
        }
        state.unplug(self.owner);
        if state.arm() || state.can_dispatch() || !state.owners.sleep(self.owner) {
            return Readiness::Ready;
        }
        let listen = state.owners.is_listener(self.owner);
        let until = state.held_until();
        drop(state);
        if let Err(e) = self.listen(listen) {
            // Out of kernel memory: rather a busy queue than one that sleeps for ever.
            tracing::error!("waiting for a ring: {e}");
            return Readiness::Ready;
        }
        Readiness::Wait(until)
    }

    fn woken(&mut self) {
        self.completions.wait().event().drain();
        if self.listens {
            // Before the ring is looked at, so that an event for what comes later stays.
            self.hardware.channel.clear();
        }
        let mut state = self.hardware.state.lock();
        state.owners.awake(self.owner);
        state.unplug(self.owner);
        if state.is_stopped() {
            return;
        }
        // What is there is taken for everybody, and what that makes room for is sent, as are flushes behind FUA
        // writes: a poll that has nothing in flight wouldn't.
        let mut notify = false;
        loop {
            state.drain(self.owner, &mut self.done);
            notify |= state.dispatch(&mut self.tracer, self.owner, &mut self.done);
            // The role was taken from us while we had nothing to wait for, and this event with it: the next one
            // is asked for in the listener's name.
            let stolen = self.listens && !state.owners.is_listener(self.owner);
            if !stolen || !state.owners.others_wait(self.owner) || !state.arm() {
                break;
            }
        }
        let busy = !self.done.is_empty() || self.completions.wait().is_pending();
        state.owners.pass_on(self.owner, busy);
        let listen = state.owners.is_listener(self.owner);
        unlock(&self.hardware, &mut self.bells, state, notify);
        if !listen && let Err(e) = self.listen(false) {
            tracing::debug!("looking away from a ring: {e}");
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }
}

impl<M: MergePolicy> Drop for SoftwareQueue<M> {
    fn drop(&mut self) {
        let mut state = self.hardware.state.lock();
        state.leave(self.owner);
        unlock(&self.hardware, &mut self.bells, state, false);
        self.completions.entries().parked.clear();
    }
}

/// Leaves the queue's lock, and tells those who have to know. Nobody wakes into a lock that is held.
#[inline]
fn unlock<M: MergePolicy>(
    hardware: &SharedQueue<M>,
    bells: &mut Vec<Arc<Completions>>,
    mut state: MutexGuard<'_, HardwareQueue<M>>,
    notify: bool,
) {
    state.owners.bells(bells);
    drop(state);
    if notify {
        hardware.channel.notify();
    }
    owners::ring(bells);
}

/// Puts a ring's doorbell into a poller, to be looked at by the listener only.
fn add_silently<M>(poller: &Poller, hardware: &SharedQueue<M>) -> std::io::Result<()> {
    poller.add(hardware.channel.fd(), CHANNEL, false)?;
    poller.set(hardware.channel.fd(), CHANNEL, false, false)
}

fn ring_of<M>(connection: &Connection<M>, index: u32) -> Arc<SharedQueue<M>> {
    Arc::clone(&connection.hardware[index as usize % connection.hardware.len()])
}
