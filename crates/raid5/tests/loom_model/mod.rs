//! Queues that own words, and a kick, each as the core is to have it, and the primitives and faults of negative controls.

pub mod chunks;
pub mod logs;
pub mod pages;

use crate::primitives::{Loom, LoomCount, LoomEvent, LoomFlag, LoomWord, epoll};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use pvblk_block::stacked::{CompletionQueue, Lock, Primitives};
use pvblk_raid5::words::{
    Arrival, Arrived, Claimed, Closed, Epoch, Looked, Open, Owner, Parked, Place, Record, Seen,
    Table, Token,
};
// Not loom's: their counters panic again while a model that failed unwinds.
use std::sync::{Arc, Mutex, MutexGuard};

/// Primitives without the orderings that `WEAK` names, and with or without the full barrier.
pub struct Words<const WEAK: u8, const BARRIER: bool>;

/// The real primitives, but for locks.
pub type Sound = Words<0, true>;

impl<const WEAK: u8, const BARRIER: bool> Primitives for Words<WEAK, BARRIER> {
    type Flag = LoomFlag;
    type Count = LoomCount;
    type Word = LoomWord<WEAK>;
    type Event = LoomEvent;
    type Lock<T: Send> = Unordered<T>;
    fn full_barrier() {
        if BARRIER {
            fence(Ordering::SeqCst);
        }
    }
}

/// A lock that orders nothing, so that all order is the words', and that nobody may have to wait for.
pub struct Unordered<T> {
    value: Mutex<T>,
    /// Lets other threads run between an exchange and an access.
    visits: AtomicU32,
}

impl<T: Send> Lock<T> for Unordered<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;
    fn new(value: T) -> Unordered<T> {
        Unordered {
            value: Mutex::new(value),
            visits: AtomicU32::new(0),
        }
    }
    fn lock(&self) -> MutexGuard<'_, T> {
        self.visits.fetch_add(1, Ordering::Relaxed);
        self.try_lock().expect("two threads at one piece or record")
    }
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.value.try_lock().ok()
    }
}

/// A rule that the queues break.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// The owner doesn't look at the epoch after its claim.
    NoLook,
    /// The owner of a word that is drained tells nobody.
    NotTold,
    /// The kick doesn't wait for words in flight.
    NotDrained,
    /// The kick changes members after it has made the epoch even.
    ChangedLate,
    /// The kick tells nobody to go on.
    NotGoneOn,
    /// The owner doesn't post the word that it hands over.
    NotPosted,
}

/// A part of a write: the queue that it is from, and its data.
pub struct Piece {
    queue: usize,
    data: Arc<AtomicU32>,
    done: Arc<AtomicU32>,
}

const DATA: u32 = 7;
/// Most writes of a run.
const WRITES: u32 = 4;

/// Things that only the owner of a word touches.
pub struct Batches {
    batches: AtomicU32,
    /// Pieces that were taken, and are for the next batch.
    left: Vec<Arrived<Piece>>,
}

impl Record for Batches {
    type Pages = ();
}

/// A message for a queue.
pub enum Post {
    /// The word is that queue's.
    Yours(Token<Claimed, Batches>),
    /// A word is drained.
    Drained,
    GoOn,
    /// Its piece is done, and its place is its own again.
    Done(#[expect(dead_code, reason = "kept by its queue until the next piece")] Place),
}

type Queue<T> = CompletionQueue<Vec<T>, Loom>;

/// An array of one stripe.
pub struct Array<P: Primitives> {
    pub stripes: Table<Batches, Piece, P>,
    epoch: Epoch<P>,
    /// An epoch that is never odd, for a fault.
    no_epoch: Epoch<P>,
    queues: Vec<Queue<Post>>,
    places: Mutex<Vec<Place>>,
    /// The stripe's word, if a batch was open before the run.
    open: Mutex<Option<Token<Open, Batches>>>,
    /// Counts changes of members.
    members: AtomicU32,
    /// 1: the stripe has I/O in flight.
    in_flight: AtomicU32,
    fault: Fault,
}

/// Sleeps until something has come for a queue.
fn next<T: Send>(me: &Queue<T>, inbox: &mut Vec<T>) -> T {
    loop {
        me.wait().finish_wait();
        me.collect(|all| inbox.append(all));
        if !inbox.is_empty() {
            return inbox.remove(0);
        }
        me.wait().prepare_to_wait();
        if !me.wait().is_pending() {
            epoll(&[me.wait().event()]);
            me.wait().event().take();
        }
    }
}

fn owner(queue: usize) -> Owner {
    Owner::new(queue as u16 + 1).expect("a number")
}

impl<P: Primitives> Array<P> {
    pub fn new(queues: usize, fault: Fault) -> Arc<Array<P>> {
        let record = || Batches {
            batches: AtomicU32::new(0),
            left: Vec::new(),
        };
        let (stripes, places) = Table::new(1, WRITES, record);
        let queue = |_| Queue::new().expect("an event");
        Arc::new(Array {
            stripes,
            epoch: Epoch::default(),
            no_epoch: Epoch::default(),
            queues: (0..queues).map(queue).collect(),
            places: Mutex::new(places),
            open: Mutex::new(None),
            members: AtomicU32::new(0),
            in_flight: AtomicU32::new(0),
            fault,
        })
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn post(&self, to: usize, post: Post) {
        self.queues[to].post(|all| all.push(post));
    }

    fn next(&self, queue: usize, inbox: &mut Vec<Post>) -> Post {
        next(&self.queues[queue], inbox)
    }

    fn tell(&self, kicker: Option<Owner>) {
        if let Some(kicker) = kicker
            && !self.has(Fault::NotTold)
        {
            self.post(kicker.number() as usize - 1, Post::Drained);
        }
    }

    /// Checks that a batch that has I/O in flight was planned for the members that there are.
    fn check_members(&self, epoch: u32) {
        let members = self.members.load(Ordering::Relaxed);
        assert_eq!(members, epoch / 2, "planned for other members");
    }

    /// A write, until it is done.
    pub fn write(&self, queue: usize) {
        let data = Arc::new(AtomicU32::new(0));
        let done = Arc::new(AtomicU32::new(0));
        let piece = Piece {
            queue,
            data: Arc::clone(&data),
            done: Arc::clone(&done),
        };
        data.store(DATA, Ordering::Relaxed);
        let place = self.place();
        let mut inbox = Vec::new();
        match self.stripes.arrive(0, owner(queue), place, piece) {
            Arrival::Claimed(token, piece) => self.own(queue, token, vec![piece], &mut inbox),
            Arrival::Joined => loop {
                match self.next(queue, &mut inbox) {
                    Post::Yours(mut token) => {
                        let pieces = std::mem::take(&mut token.record_mut().left);
                        self.own(queue, token, pieces, &mut inbox);
                        break;
                    }
                    Post::Done(_) => break,
                    Post::GoOn | Post::Drained => {}
                }
            },
        }
        assert_eq!(done.load(Ordering::Relaxed), 1, "done once");
    }

    /// Opens a batch without pieces, before others run.
    pub fn begin(&self, queue: usize) {
        let piece = Piece {
            queue,
            data: Arc::new(AtomicU32::new(DATA)),
            done: Arc::new(AtomicU32::new(0)),
        };
        let place = self.place();
        let Arrival::Claimed(token, _) = self.stripes.arrive(0, owner(queue), place, piece) else {
            panic!("nobody else runs");
        };
        let Looked::Open(open) = self.stripes.look(token, &self.epoch) else {
            panic!("nobody kicks");
        };
        self.begin_io(open.epoch());
        *self.open.lock().expect("no panic") = Some(open);
    }

    /// Ends the batch that [`Array::begin`] opened, and others that follow it.
    pub fn finish(&self, queue: usize) {
        let open = self.open.lock().expect("no panic").take();
        let open = open.expect("it was opened");
        let (planned, mut pieces) = (open.epoch(), Vec::new());
        let closed = self.stripes.close(open, &mut pieces);
        self.end_io(planned);
        self.complete(queue, &closed, &mut pieces);
        if let Some(again) = self.leave(queue, closed, &mut pieces) {
            self.own(queue, again, pieces, &mut Vec::new());
        }
    }

    /// Claims the stripe without a piece, if it is free, for a batch of its own.
    pub fn claim_idle(&self, queue: usize) {
        let batch = self.stripes.peek(0).batch();
        if let Some(token) = self.stripes.claim_idle(0, owner(queue), batch) {
            self.own(queue, token, Vec::new(), &mut Vec::new());
        }
    }

    fn place(&self) -> Place {
        let place = self.places.lock().expect("no panic").pop();
        place.expect("a place for each write")
    }

    /// Owns the stripe until it is free or another's.
    fn own(
        &self,
        queue: usize,
        mut token: Token<Claimed, Batches>,
        mut pieces: Vec<Arrived<Piece>>,
        inbox: &mut Vec<Post>,
    ) {
        loop {
            let epoch = match self.fault {
                Fault::NoLook => &self.no_epoch,
                _ => &self.epoch,
            };
            let open = match self.stripes.look(token, epoch) {
                Looked::Open(open) => open,
                Looked::Parked(parked, tell) => {
                    self.tell(tell);
                    token = self.parked(queue, parked, inbox);
                    continue;
                }
            };
            let planned = open.epoch();
            self.begin_io(planned);
            let closed = self.stripes.close(open, &mut pieces);
            self.end_io(planned);
            self.complete(queue, &closed, &mut pieces);
            match self.leave(queue, closed, &mut pieces) {
                Some(again) => token = again,
                None => return,
            }
        }
    }

    fn parked(
        &self,
        queue: usize,
        parked: Token<Parked, Batches>,
        inbox: &mut Vec<Post>,
    ) -> Token<Claimed, Batches> {
        self.wait_to_go_on(queue, inbox);
        self.stripes.go_on(parked)
    }

    fn wait_to_go_on(&self, queue: usize, inbox: &mut Vec<Post>) {
        while !matches!(self.next(queue, inbox), Post::GoOn) {}
    }

    fn begin_io(&self, planned: u32) {
        self.in_flight.store(1, Ordering::Relaxed);
        self.check_members(planned);
    }

    fn end_io(&self, planned: u32) {
        self.check_members(planned);
        self.in_flight.store(0, Ordering::Relaxed);
    }

    /// A batch is done: counts it in the record, and ends its pieces.
    fn complete(
        &self,
        queue: usize,
        closed: &Token<Closed, Batches>,
        pieces: &mut Vec<Arrived<Piece>>,
    ) {
        let batches = &closed.record().batches;
        let before = batches.load(Ordering::Relaxed);
        let number = u32::from(self.stripes.peek(0).batch());
        assert_eq!(before + 1, number, "stale record");
        batches.store(number, Ordering::Relaxed);
        for Arrived { place, piece } in pieces.drain(..) {
            assert_eq!(piece.data.load(Ordering::Relaxed), DATA, "stale piece");
            piece.done.fetch_add(1, Ordering::Relaxed);
            match piece.queue == queue {
                true => drop(place),
                false => self.post(piece.queue, Post::Done(place)),
            }
        }
    }

    /// Frees the stripe, or hands it over to the queue whose piece came first. Returns the token if that is its own.
    fn leave(
        &self,
        queue: usize,
        closed: Token<Closed, Batches>,
        pieces: &mut Vec<Arrived<Piece>>,
    ) -> Option<Token<Claimed, Batches>> {
        let mut closed = match self.stripes.release(closed, &self.epoch) {
            Ok(tell) => {
                self.tell(tell);
                return None;
            }
            Err(closed) => closed,
        };
        self.stripes.take(&mut closed, pieces);
        let to = pieces.first().expect("somebody has arrived").piece.queue;
        if to == queue {
            return Some(self.stripes.hand_over(closed, owner(queue)));
        }
        closed.record_mut().left.append(pieces);
        let token = self.stripes.hand_over(closed, owner(to));
        if !self.has(Fault::NotPosted) {
            self.post(to, Post::Yours(token));
        }
        None
    }

    /// A member has failed: a kick from its begin to its end, unless another queue does one.
    pub fn kick(&self, queue: usize) {
        let Ok(stop) = self.epoch.stop(owner(queue)) else {
            return;
        };
        let mut inbox = Vec::new();
        let mut stripes = self.stripes.in_flight(&stop);
        let waits = !self.has(Fault::NotDrained);
        while waits && self.stripes.is_in_flight(&mut stripes) {
            self.next(queue, &mut inbox);
        }
        let flying = self.in_flight.load(Ordering::Relaxed);
        assert_eq!(flying, 0, "members are changed under I/O");
        let members = self.members.load(Ordering::Relaxed);
        let change = || self.members.store(members + 1, Ordering::Relaxed);
        if !self.has(Fault::ChangedLate) {
            change();
        }
        self.epoch.go_on(stop);
        if self.has(Fault::ChangedLate) {
            change();
        }
        for to in (0..self.queues.len()).filter(|_| !self.has(Fault::NotGoneOn)) {
            self.post(to, Post::GoOn);
        }
    }

    /// Checks the end of a run: nobody owns the word, and each kick has changed members.
    pub fn check_end(&self) {
        let word = self.stripes.peek(0);
        assert_eq!((word.newest(), word.owner()), (None, None), "the end");
        let Seen::Going(epoch) = self.epoch.look() else {
            panic!("a stop is left");
        };
        assert_eq!(self.members.load(Ordering::Relaxed), epoch / 2, "members");
    }
}
