//! Requests that the core has: those that aren't plain hits.

use super::memory::Allocation;
use super::reads::Filling;
use super::writeback::Throttle;
use crate::readahead::Hint;
use pvblk_block::{Completion, Request, Status};
use slab::Slab;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write {
        /// The request is done when the device has its data.
        sync: bool,
    },
    Flush,
    /// A discard or a write-zeroes.
    Range {
        /// Its number among [`super::ranges::Ranges`].
        number: u64,
    },
}

/// The place at which a read's pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// In the core, under its lock: also if the pages are on their way out again.
    Inside,
    /// By the queue that asked, without the lock, once all pages are there.
    Outside,
}

/// A request that the core has done.
pub struct Done {
    /// The queue that it came from.
    pub owner: usize,
    pub completion: Completion,
    /// It is a read whose pages its owner is to copy; if one has gone meanwhile, it is to be submitted again, with this.
    pub to_copy: Option<Hint>,
}

/// A request and how far it has got.
pub struct Ongoing {
    /// The queue that it came from.
    pub owner: usize,
    pub request: Box<Request>,
    pub hint: Hint,
    pub kind: Kind,
    pub copies: Copies,
    /// The next page, and the first page behind the last.
    pub at: u64,
    pub end: u64,
    /// Pages before `at` that it waits for.
    pub pending: u32,
    pub status: Status,
    pub allocation: Allocation,
    /// It is a write and too much is dirty.
    pub throttle: Option<Throttle>,
    /// Pages to be read, and the frames for them.
    pub filling: Option<Filling>,
    is_parked: bool,
}

impl Ongoing {
    /// Pages `at..end` of a request, of which none has been looked at.
    pub fn new(
        owner: usize,
        request: Box<Request>,
        hint: Hint,
        kind: Kind,
        (at, end): (u64, u64),
    ) -> Box<Ongoing> {
        Box::new(Ongoing {
            owner,
            request,
            hint,
            kind,
            copies: Copies::Inside,
            at,
            end,
            pending: 0,
            status: Status::Ok,
            allocation: Allocation::default(),
            throttle: None,
            filling: None,
            is_parked: false,
        })
    }

    /// True if it goes on in a later turn of its owner.
    pub fn is_parked(&self) -> bool {
        self.is_parked
    }
}

/// The requests by number, those that are parked until a later turn of their queue, and what is to be told to the queues.
///
/// **States** of a request: in its place; taken, while the core goes on with it; gone. In its place it may be parked as well. **Events:** insert, take,
/// put back, park, complete.
///
/// **Invariants.** Each request is completed once, with the status that it has then. A parked request is on the list of its owner once, and only there; its
/// owner is woken when it is parked, because that may be in the step of another queue. Requests are bounded by the depth of the queues.
pub struct Requests {
    all: Slab<Option<Box<Ongoing>>>,
    /// Parked requests of each owner.
    parked: Vec<Vec<u32>>,
    wake: Vec<usize>,
    done: Vec<Done>,
}

impl Requests {
    pub fn new() -> Requests {
        Requests {
            all: Slab::new(),
            parked: vec![Vec::new()],
            wake: Vec::new(),
            done: Vec::new(),
        }
    }

    /// A queue is opened that has this number.
    pub fn open(&mut self, owner: usize) {
        if self.parked.len() <= owner {
            self.parked.resize_with(owner + 1, Vec::new);
        }
        self.parked[owner] = Vec::new();
    }

    /// All requests, whether they are in their place or not.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Adds a request. Returns its number.
    pub fn insert(&mut self, request: Box<Ongoing>) -> u32 {
        self.all.insert(Some(request)) as u32
    }

    /// Takes a request out of its place; `None` if it isn't there.
    pub fn take(&mut self, number: u32) -> Option<Box<Ongoing>> {
        self.all.get_mut(number as usize)?.take()
    }

    /// Puts a request back into its place.
    pub fn put(&mut self, number: u32, request: Box<Ongoing>) {
        self.all[number as usize] = Some(request);
    }

    /// The request if it is in its place.
    pub fn get(&self, number: u32) -> Option<&Ongoing> {
        self.all.get(number as usize)?.as_deref()
    }

    /// As [`Requests::get`], to be changed.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Ongoing> {
        self.all.get_mut(number as usize)?.as_deref_mut()
    }

    /// Completes a request that was taken out of its place, with the status that it has.
    #[allow(clippy::boxed_local)] // It comes out of its place so.
    pub fn complete(&mut self, number: u32, ongoing: Box<Ongoing>) {
        self.all.remove(number as usize);
        let Ongoing {
            owner,
            request,
            status,
            hint,
            copies,
            is_parked,
            ..
        } = *ongoing;
        let to_copy = (copies == Copies::Outside && status == Status::Ok).then_some(hint);
        if is_parked {
            // Something else that it waited for has ended. Its number is soon another request's.
            self.parked[owner].retain(|&n| n != number);
        }
        self.done.push(Done {
            owner,
            completion: Completion { request, status },
            to_copy,
        });
    }

    /// The request, which is out of its place, goes on in its owner's next turn.
    pub fn park(&mut self, number: u32, request: &mut Ongoing) {
        if !std::mem::replace(&mut request.is_parked, true) {
            self.parked[request.owner].push(number);
            self.wake(request.owner);
        }
    }

    /// Takes the parked requests of an owner, each of which has to be given back to [`Requests::park_again`] or unparked.
    pub fn take_parked(&mut self, owner: usize) -> Vec<u32> {
        std::mem::take(&mut self.parked[owner])
    }

    /// The time of a parked request has come.
    pub fn unpark(&mut self, number: u32) {
        if let Some(request) = self.get_mut(number) {
            request.is_parked = false;
        }
    }

    /// The time of a parked request hasn't come.
    pub fn park_again(&mut self, owner: usize, number: u32) {
        self.parked[owner].push(number);
    }

    /// Parked requests of an owner.
    pub fn parked(&self, owner: usize) -> impl Iterator<Item = &Ongoing> {
        self.parked[owner].iter().filter_map(|&n| self.get(n))
    }

    /// Numbers of owners are below this one.
    pub fn owners(&self) -> usize {
        self.parked.len()
    }

    /// True if an owner has parked requests and isn't going to be woken.
    pub fn sleeps(&self, owner: usize) -> bool {
        !self.parked[owner].is_empty() && !self.wake.contains(&owner)
    }

    /// An owner has something to do.
    pub fn wake(&mut self, owner: usize) {
        if !self.wake.contains(&owner) {
            self.wake.push(owner);
        }
    }

    /// Moves completions and owners to be woken to empty lists.
    pub fn take_news(&mut self, done: &mut Vec<Done>, wake: &mut Vec<usize>) {
        debug_assert!(done.is_empty() && wake.is_empty());
        if !self.done.is_empty() {
            std::mem::swap(&mut self.done, done);
        }
        if !self.wake.is_empty() {
            std::mem::swap(&mut self.wake, wake);
        }
    }

    /// Frames that requests hold for reads that they have not started.
    pub fn held_frames(&self) -> usize {
        let all = self.all.iter().filter_map(|(_, r)| r.as_ref());
        all.filter_map(|r| r.filling.as_ref())
            .map(Filling::held)
            .sum()
    }

    /// True if there is a request with this number.
    pub fn exists(&self, number: u32) -> bool {
        self.all.contains(number as usize)
    }

    /// Unfinished requests, for people who look for a hang.
    pub fn describe(&self) -> impl Iterator<Item = String> {
        let all = self.all.iter().filter_map(|(number, request)| {
            let r = request.as_ref()?;
            Some(format!(
                "request {number} of {}: {:?}, pages {}..{}, waits for {}, {:?}, {:?}{}{}",
                r.owner,
                r.kind,
                r.at,
                r.end,
                r.pending,
                r.allocation,
                r.throttle,
                if r.is_parked { ", parked" } else { "" },
                if r.filling.is_some() { ", fills" } else { "" },
            ))
        });
        let parked = (0..).zip(&self.parked);
        all.chain(parked.map(|(owner, parked)| format!("{owner} has parked {parked:?}")))
    }

    /// Errors if an invariant doesn't hold, while no request is taken; slow.
    pub fn check(&self) -> Result<(), String> {
        for (number, request) in &self.all {
            let Some(request) = request else {
                return Err(format!("request {number} was taken and not put back"));
            };
            for (owner, parked) in (0..).zip(&self.parked) {
                let listed = parked.iter().filter(|&&n| n as usize == number).count();
                let right = usize::from(request.is_parked && request.owner == owner);
                if listed != right {
                    return Err(format!(
                        "request {number} is {listed} times among those that {owner} has parked"
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::Op;

    fn write(owner: usize) -> Box<Ongoing> {
        let hint = Hint {
            stream: 0,
            sequential: false,
        };
        let request = Request::new(Op::Write, 0, 8, 0);
        let kind = Kind::Write { sync: false };
        Ongoing::new(owner, request, hint, kind, (0, 1))
    }

    /// A write that is parked may go on because a page was read, and be done. The number is then another request's.
    #[test]
    fn a_request_that_is_done_is_not_parked_any_more() {
        let mut r = Requests::new();
        (1..3).for_each(|owner| r.open(owner));
        let number = r.insert(write(1));
        let mut parked = r.take(number).unwrap();
        r.park(number, &mut parked);
        r.put(number, parked);
        r.check().unwrap();
        let done = r.take(number).unwrap();
        r.complete(number, done);
        let other = r.insert(write(2));
        assert_eq!(other, number);
        assert!(r.take_parked(1).is_empty());
        r.check().unwrap();
    }

    #[test]
    fn owners_of_parked_requests_are_woken_once() {
        let mut r = Requests::new();
        r.open(1);
        for _ in 0..2 {
            let number = r.insert(write(1));
            let mut request = r.take(number).unwrap();
            r.park(number, &mut request);
            r.park(number, &mut request);
            r.put(number, request);
        }
        assert!(r.parked(1).count() == 2 && !r.sleeps(1));
        let (mut done, mut wake) = (Vec::new(), Vec::new());
        r.take_news(&mut done, &mut wake);
        assert!(wake == [1] && done.is_empty() && r.sleeps(1));
        for number in r.take_parked(1) {
            r.unpark(number);
        }
        assert!(r.check().is_ok() && !r.sleeps(1));
    }
}
