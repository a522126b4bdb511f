//! The submitters of one ring: whose requests are whose, who sleeps, and which of them the ring wakes.
//!
//! A ring has one doorbell. If it woke all who sleep, 64 threads would wake for each answer. So one of the sleepers is the
//! *listener*: its poller has the doorbell. It takes what is there for everybody, and rings the bell of those that
//! got something. When it has answers of its own to look after while others sleep, it passes the role on first.
//!
//! Invariants, under the queue's lock: whenever a submitter with work sleeps, there is a listener with work; who is not asleep
//! looks at its completion queue before it sleeps; who is asleep is woken when completions come or the role does, once.

use super::plug::Merged;
use pvblk_block::stacked::CompletionQueue;
use pvblk_block::{Completion, Op, RequestFlags, Status};
use std::sync::Arc;

/// Completions and requests that others leave for a submitter.
#[derive(Debug, Default)]
pub struct Letters {
    /// Completions that somebody else took off the ring.
    pub done: Vec<Completion>,
    /// Requests of a connection that is over, to be submitted to the next one.
    pub parked: Vec<Merged>,
}

/// A submitter's completion queue. The ring's lock tells whether the submitter sleeps, so nobody is woken through it but by a notification.
pub type Completions = CompletionQueue<Letters>;

/// The last request of a submitter that another one may continue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    op: Option<Op>,
    /// Sector behind it.
    end: u64,
    /// Others of its submitter waited or were in flight when it came.
    deep: bool,
}

impl Stream {
    /// True if `next` continues a stream of more than one request at a time; from now on it is the last one. `others` of its submitter wait or
    /// are in flight.
    #[inline]
    pub fn passes(&mut self, next: &Merged, others: usize) -> bool {
        let first = &next.first;
        let follows = first.op.has_data() && !first.flags.contains(RequestFlags::FUA);
        let op = follows.then_some(first.op);
        // All requests of a deep stream may come back at once, so that the next one is alone for a moment.
        let deep = others > 0;
        let continues = follows && self.op == op && self.end == next.sector && (deep || self.deep);
        *self = Stream {
            op,
            end: next.sector + next.sectors,
            deep,
        };
        continues
    }
}

struct Owner {
    completions: Arc<Completions>,
    /// Ring requests, waiting or in flight.
    work: usize,
    stream: Stream,
    /// It has left: what is still answered goes nowhere, and its number is free once there is no more.
    left: bool,
    /// It was told to sleep, and hasn't been heard of since.
    asleep: bool,
}

/// All submitters of a ring, by number.
#[derive(Default)]
pub struct Owners {
    all: Vec<Option<Owner>>,
    listener: Option<u32>,
    /// Bells to ring once the lock is released.
    to_ring: Vec<Arc<Completions>>,
}

impl Owners {
    /// Adds a submitter; returns its number.
    pub fn join(&mut self, completions: Arc<Completions>) -> u32 {
        let free = self.all.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.all[at] = Some(Owner {
            completions,
            work: 0,
            stream: Stream::default(),
            left: false,
            asleep: false,
        });
        at as u32
    }

    /// Takes a submitter out, `dropped` of whose requests waited. Its number stays taken until the others are answered,
    /// so that a successor doesn't get its answers.
    pub fn leave(&mut self, number: u32, dropped: usize) {
        if let Some(owner) = self.get(number) {
            owner.left = true;
            owner.asleep = false;
            owner.work -= dropped;
        }
        if self.listener == Some(number) {
            self.appoint(number);
        }
        self.forget_if_gone(number);
    }

    fn get(&mut self, number: u32) -> Option<&mut Owner> {
        self.all.get_mut(number as usize)?.as_mut()
    }

    fn forget_if_gone(&mut self, number: u32) {
        let slot = &mut self.all[number as usize];
        if slot.as_ref().is_some_and(|o| o.left && o.work == 0) {
            *slot = None;
        }
    }

    /// `number` has this many more ring requests.
    #[inline]
    pub fn add_work(&mut self, number: u32, more: usize) {
        if let Some(owner) = self.get(number) {
            owner.work += more;
        }
    }

    /// The stream of `number`, and its ring requests, waiting or in flight.
    #[inline]
    pub fn stream(&mut self, number: u32) -> (Stream, usize) {
        self.get(number)
            .map_or_else(Default::default, |owner| (owner.stream, owner.work))
    }

    /// `number` has this many more ring requests, and its stream is there now.
    #[inline]
    pub fn add_streamed(&mut self, number: u32, more: usize, stream: Stream) {
        if let Some(owner) = self.get(number) {
            owner.work += more;
            owner.stream = stream;
        }
    }

    /// A ring request is done: its completions go to `done` if they are `me`'s, else to their owner's queue.
    #[inline]
    pub fn finish(&mut self, merged: Merged, status: Status, me: u32, done: &mut Vec<Completion>) {
        let number = merged.owner;
        let Some(owner) = &mut self.all[number as usize] else {
            return;
        };
        owner.work -= 1;
        if owner.left {
            self.forget_if_gone(number);
        } else if number == me {
            merged.deliver(status, done);
        } else {
            owner
                .completions
                .leave(|letters| merged.deliver(status, &mut letters.done));
            if owner.asleep {
                owner.asleep = false;
                self.to_ring.push(Arc::clone(&owner.completions));
            }
        }
    }

    /// A ring request goes back to its owner, for the next connection.
    pub fn park(&mut self, merged: Merged) {
        let Some(owner) = self.get(merged.owner) else {
            return;
        };
        owner.work -= 1;
        if !owner.left {
            owner.completions.entries().parked.push(merged);
        }
    }

    /// `number`'s request can't go out, and no answer will make room: it has to try again.
    #[cold]
    pub fn nudge(&mut self, number: u32) {
        if let Some(owner) = self.get(number) {
            owner.asleep = false;
            let completions = Arc::clone(&owner.completions);
            self.to_ring.push(completions);
        }
    }

    /// `me` does something.
    #[inline]
    pub fn awake(&mut self, me: u32) {
        if let Some(owner) = self.get(me) {
            owner.asleep = false;
        }
    }

    /// `me` wants to sleep. False if it has completions and must not.
    pub fn sleep(&mut self, me: u32) -> bool {
        let Some(owner) = self.get(me) else {
            return true;
        };
        if owner.completions.wait().is_pending() {
            return false;
        }
        owner.asleep = true;
        let works = |o: &Owner| o.work > 0 && !o.left;
        let listens = self.listener.filter(|&l| {
            let owner = self.all[l as usize].as_ref();
            owner.is_some_and(works)
        });
        self.listener = Some(listens.unwrap_or(me));
        true
    }

    /// True if the ring's doorbell is to wake `me`.
    #[inline]
    pub fn is_listener(&self, me: u32) -> bool {
        self.listener == Some(me)
    }

    /// `me` goes to look after what it got (`busy`), or has nothing more to wait for: then another sleeper listens.
    #[inline]
    pub fn pass_on(&mut self, me: u32, busy: bool) {
        if self.listener == Some(me)
            && (busy || self.get(me).is_none_or(|o| o.work == 0))
            && self.all.len() > 1
        {
            self.appoint(me);
        }
    }

    /// Makes a sleeper the listener instead of `me`, and wakes it for that. Stays as it is if there is none.
    fn appoint(&mut self, me: u32) {
        let mut sleepers = self.all.iter_mut().enumerate();
        let next = sleepers.find_map(|(i, slot)| match slot {
            Some(o) if i != me as usize && o.asleep && o.work > 0 => Some((i, o)),
            _ => None,
        });
        if let Some((number, owner)) = next {
            owner.asleep = false;
            self.listener = Some(number as u32);
            self.to_ring.push(Arc::clone(&owner.completions));
        }
    }

    /// True if another submitter than `number` has requests waiting or in flight.
    pub fn others_wait(&self, number: u32) -> bool {
        let mut others = self.all.iter().enumerate();
        others.any(|(i, o)| i != number as usize && o.as_ref().is_some_and(|o| o.work > 0))
    }

    /// Moves the bells to ring into `out`. To be rung without the lock: whoever wakes wants it.
    #[inline]
    pub fn bells(&mut self, out: &mut Vec<Arc<Completions>>) {
        if !self.to_ring.is_empty() {
            out.append(&mut self.to_ring);
        }
    }
}

#[inline]
pub fn ring(bells: &mut Vec<Arc<Completions>>) {
    while let Some(completions) = bells.pop() {
        completions.wait().notify();
    }
}
