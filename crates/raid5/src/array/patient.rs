//! [`Patient`]: a member that has a limited time for an I/O, as its queues see it. docs/decisions/0033-members-that-stall.md has the rules.
//!
//! While it is a member it is the device below. Once it is given up, everything in flight ends as failed, at the queue's next poll, and so
//! does everything that is submitted later. The device below may still do its requests, so their memory is this device's: reads go to memory
//! of their own, and the owner of a write doesn't give its memory to anybody else who would mind.

use crate::array::bounce::{Bounced, Bounces};
use parking_lot::Mutex;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Op,
    QueueContext, Readiness, Request, Status,
};
use slab::Slab;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Most bytes of memory that a queue keeps for later reads.
const KEPT_BYTES: usize = 1 << 20;

/// In place of the oldest tick: nothing is in flight.
const NONE: u32 = u32::MAX;

/// Counts quarters of the time that members have.
#[derive(Default)]
pub(super) struct Ticks(AtomicU32);

impl Ticks {
    pub fn now(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// A quarter has passed. One thread calls this.
    pub fn pass(&self) {
        self.0.store(self.now() + 1, Ordering::Relaxed);
    }
}

/// Requests of one queue, for others to look at. Only the queue writes.
struct Waits {
    /// The tick in which the oldest of them began.
    oldest: AtomicU32,
    /// The tick of the queue's last poll.
    polled: AtomicU32,
    in_flight: AtomicUsize,
}

/// See the module's documentation.
pub(super) struct Patient {
    inner: Arc<dyn BlockDevice>,
    ticks: Arc<Ticks>,
    given_up: AtomicBool,
    queues: Mutex<Vec<Arc<Waits>>>,
    /// Queues that were closed with requests at the device below.
    left: Mutex<Vec<Below>>,
}

impl Patient {
    pub fn new(inner: &Arc<dyn BlockDevice>, ticks: &Arc<Ticks>) -> Arc<Patient> {
        Arc::new(Patient {
            inner: Arc::clone(inner),
            ticks: Arc::clone(ticks),
            given_up: AtomicBool::new(false),
            queues: Mutex::default(),
            left: Mutex::default(),
        })
    }

    /// The device below.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.inner
    }

    /// From now on nobody waits for it.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Ticks since its oldest I/O began, of queues that have looked for completions in this tick; 0: none. An I/O of another queue may have ended.
    pub fn waits(&self) -> u32 {
        let now = self.ticks.now();
        let queues = self.queues.lock();
        let has_looked = |waits: &&Arc<Waits>| waits.polled.load(Ordering::Acquire) == now;
        let counted = queues.iter().filter(has_looked);
        let oldest = counted.map(|waits| waits.oldest.load(Ordering::Relaxed));
        now.saturating_sub(oldest.min().unwrap_or(NONE))
    }

    /// True if the device below has requests of ours.
    pub fn is_left(&self) -> bool {
        let queues = self.queues.lock();
        let mut queues = queues.iter();
        queues.any(|waits| waits.in_flight.load(Ordering::Acquire) > 0)
    }

    /// True if a queue has it open, or was closed with requests that are still there.
    pub fn is_open(&self) -> bool {
        !self.queues.lock().is_empty()
    }

    /// Looks after requests of queues that were closed.
    pub fn poll_left(&self) {
        let over: Vec<Below> = {
            let mut left = self.left.lock();
            left.extract_if(.., |below| below.is_over()).collect()
        };
        // Closing a queue may take time.
        for below in over {
            self.forget(&below.waits);
        }
    }

    fn forget(&self, waits: &Arc<Waits>) {
        let mut queues = self.queues.lock();
        queues.retain(|other| !Arc::ptr_eq(other, waits));
    }
}

/// The device as a user of [`Blocking`](crate::Blocking) or a queue opens it.
pub(super) struct Opened(pub Arc<Patient>);

impl Decorator for Opened {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0.inner
    }

    fn describe(&self) -> String {
        self.0.inner.describe()
    }

    fn floor(&self) -> String {
        self.0.inner.floor()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        if self.0.is_given_up() {
            // Nothing may wait for it.
            return Ok(Box::new(PatientQueue {
                patient: Arc::clone(&self.0),
                below: None,
                batch: Vec::new(),
                done: Vec::new(),
                is_given_up: true,
            }));
        }
        let inner = self.0.inner.open_device_queue(context)?;
        let waits = Arc::new(Waits {
            oldest: AtomicU32::new(NONE),
            polled: AtomicU32::new(NONE),
            in_flight: AtomicUsize::new(0),
        });
        self.0.queues.lock().push(Arc::clone(&waits));
        Ok(Box::new(PatientQueue {
            patient: Arc::clone(&self.0),
            below: Some(Below {
                inner,
                flying: Slab::new(),
                ages: VecDeque::new(),
                bounces: Bounces::new(KEPT_BYTES),
                polled: Vec::new(),
                spare: Vec::new(),
                waits,
            }),
            batch: Vec::new(),
            done: Vec::new(),
            is_given_up: false,
        }))
    }

    /// The array asks the device below.
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: None,
            extents: None,
            cached: None,
            incarnation: None,
            close: None,
            questions: None,
            memory: None,
            buffers: None,
        }
    }
}

/// A request at the device below.
struct Flight {
    /// As it was submitted; `None`: it was given up.
    request: Option<Box<Request>>,
    bounced: Option<Bounced>,
    /// The tick in which it began.
    began: u32,
}

/// A queue of the device below, and its requests.
struct Below {
    inner: Box<dyn DeviceQueue>,
    flying: Slab<Flight>,
    /// Ticks in which some of them began, and their numbers, in order.
    ages: VecDeque<(u32, usize)>,
    bounces: Bounces,
    polled: Vec<Completion>,
    spare: Vec<Box<Request>>,
    waits: Arc<Waits>,
}

impl Below {
    /// A request for the device below in place of one that was submitted. An error gives that one back: there is no memory.
    fn begin(&mut self, request: Box<Request>, now: u32) -> Result<Box<Request>, Box<Request>> {
        let fresh = || Request::new(Op::Flush, 0, 0, 0);
        let mut own = self.spare.pop().unwrap_or_else(fresh);
        own.reset(
            request.op,
            request.flags,
            request.sector,
            request.sectors,
            0,
        );
        own.followed = request.followed;
        own.buffers.clear();
        own.buffers.extend(request.buffers.iter().cloned());
        let bounced = match own.op {
            Op::Read => match self.bounces.bounce(&mut own) {
                Ok(bounced) => Some(bounced),
                Err(error) => {
                    tracing::error!("{error}");
                    return Err(request);
                }
            },
            _ => None,
        };
        own.tag = self.flying.insert(Flight {
            request: Some(request),
            bounced,
            began: now,
        }) as u64;
        match self.ages.back_mut() {
            Some((tick, count)) if *tick == now => *count += 1,
            _ => self.ages.push_back((now, 1)),
        }
        Ok(own)
    }

    /// Tells others of the requests in flight.
    fn publish(&self) {
        let oldest = self.ages.front().map_or(NONE, |(tick, _)| *tick);
        self.waits.oldest.store(oldest, Ordering::Relaxed);
        let in_flight = self.flying.len();
        self.waits.in_flight.store(in_flight, Ordering::Release);
    }

    /// Takes completions of the device below; appends those that somebody waits for.
    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.inner.poll(&mut self.polled);
        if self.polled.is_empty() {
            return;
        }
        for mut completion in self.polled.drain(..) {
            let own = &mut completion.request;
            let Some(flight) = self.flying.try_remove(own.tag as usize) else {
                debug_assert!(false, "a request came back twice");
                continue;
            };
            let is_waited_for = flight.request.is_some();
            if let Some(bounced) = flight.bounced {
                let lands = is_waited_for || has(Plant::LateReadLands);
                let copy = lands && completion.status == Status::Ok;
                match lands {
                    true => self.bounces.restore(bounced, own, copy),
                    false => self.bounces.discard(bounced, own),
                }
            }
            own.buffers.clear();
            self.spare.push(completion.request);
            let Some(request) = flight.request else {
                continue;
            };
            out.push(Completion {
                request,
                status: completion.status,
            });
            let age = self.ages.iter_mut().find(|(tick, _)| *tick == flight.began);
            if let Some((_, count)) = age {
                *count -= 1;
            }
        }
        while self.ages.pop_front_if(|(_, count)| *count == 0).is_some() {}
        self.publish();
    }

    /// True if nothing is left, of a queue that was closed.
    fn is_over(&mut self) -> bool {
        self.inner.woken();
        self.poll(&mut Vec::new());
        self.flying.is_empty()
    }

    /// Everything in flight ends as failed.
    fn give_up(&mut self, out: &mut Vec<Completion>) {
        let all = self.flying.iter_mut();
        let all = all.filter_map(|(_, flight)| flight.request.take());
        out.extend(all.map(|request| Completion {
            request,
            status: Status::IoError,
        }));
        self.ages.clear();
        self.publish();
    }
}

struct PatientQueue {
    patient: Arc<Patient>,
    /// None once it is left behind.
    below: Option<Below>,
    batch: Vec<Box<Request>>,
    /// Ended without the device below.
    done: Vec<Completion>,
    /// Everything that was in flight when the device was given up has ended.
    is_given_up: bool,
}

impl DeviceQueue for PatientQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let failed = |request| Completion {
            request,
            status: Status::IoError,
        };
        let below = self.below.as_mut().filter(|_| !self.patient.is_given_up());
        let Some(below) = below else {
            self.done.extend(batch.drain(..).map(failed));
            return;
        };
        let now = self.patient.ticks.now();
        for request in batch.drain(..) {
            match below.begin(request, now) {
                Ok(own) => self.batch.push(own),
                Err(request) => self.done.push(failed(request)),
            }
        }
        below.publish();
        below.inner.submit(&mut self.batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let now = self.patient.ticks.now();
        if let Some(below) = &mut self.below {
            below.poll(out);
            // Publishes what is in flight after the look.
            below.waits.polled.store(now, Ordering::Release);
            if !self.is_given_up && self.patient.is_given_up() {
                self.is_given_up = true;
                below.give_up(out);
            }
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        if !self.done.is_empty() || self.is_given_up != self.patient.is_given_up() {
            return Readiness::Ready;
        }
        match &mut self.below {
            Some(below) if !self.is_given_up => below.inner.arm(),
            _ => Readiness::Wait(None),
        }
    }

    fn woken(&mut self) {
        let Some(below) = &mut self.below else {
            return;
        };
        below.inner.woken();
        if self.is_given_up {
            // Nobody polls it, and its descriptor would stay readable.
            below.poll(&mut Vec::new());
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.below.as_ref()?.inner.wait_fd()
    }
}

impl Drop for PatientQueue {
    fn drop(&mut self) {
        let Some(mut below) = self.below.take() else {
            return;
        };
        below.give_up(&mut Vec::new());
        match below.flying.is_empty() {
            true => self.patient.forget(&below.waits),
            false => self.patient.left.lock().push(below),
        }
    }
}
