//! Queues that take pages from each other's words and reserves, and wait for some.

use super::{Queue, next, owner};
use crate::primitives::{LoomCount, LoomEvent, LoomFlag, LoomLock, LoomWord};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use pvblk_block::stacked::Primitives;
use pvblk_raid5::words::{
    Arrival, Arrived, Claimed, Epoch, Leaves, Looked, Open, Owner, PageSet, Place, Record, Reserve,
    Stock, Table, Token,
};
use std::sync::{Arc, Mutex};

/// Primitives with locks that threads wait for, and with or without the full barrier.
pub struct Locked<const BARRIER: bool>;

impl<const BARRIER: bool> Primitives for Locked<BARRIER> {
    type Flag = LoomFlag;
    type Count = LoomCount;
    type Word = LoomWord<0>;
    type Event = LoomEvent;
    type Lock<T: Send> = LoomLock<T>;
    fn full_barrier() {
        if BARRIER {
            fence(Ordering::SeqCst);
        }
    }
}

/// One step of a queue.
#[derive(Clone, Copy, PartialEq)]
pub enum Step {
    /// A write to the stripe of this word.
    Write(usize),
    /// The end of the batch that the queue has when the run begins, at the word of its number.
    Finish,
    /// The same; its stripe is written whole.
    FinishWhole,
    /// Memory is short.
    GiveWay,
    /// A stop of all words.
    Kick,
}

/// A rule that the queues break.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// Nobody wakes a queue that has waited.
    NotWoken,
    /// A batch ends and frees its word without a look at those who wait.
    NoLook,
    /// A word that pieces arrived for while it was claimed for its pages isn't posted.
    NotPosted,
    /// A stop isn't told of a word that was claimed for its pages.
    NotTold,
    /// A batch that waits for pages isn't parked.
    NotParked,
}

/// Pages as the count of batches that have used them.
pub struct Set(Arc<AtomicU32>);

impl PageSet for Set {
    fn give_back(sets: &mut [Set]) -> u64 {
        sets.len() as u64
    }
}

/// Things that only the owner of a word touches.
#[derive(Default)]
pub struct Stripe {
    set: Option<Set>,
    left: Vec<Arrived<usize>>,
}

impl Record for Stripe {
    type Pages = Set;
    fn has_pages(&self) -> bool {
        self.set.is_some()
    }
    fn take_pages(&mut self) -> Option<Set> {
        self.set.take()
    }
}

/// A message for a queue.
pub enum Post {
    /// The word is that queue's.
    Yours(Token<Claimed, Stripe>),
    /// It has pages.
    Wake,
    /// A word is drained.
    Drained,
    GoOn,
    /// Its piece is done.
    Done(#[expect(dead_code, reason = "kept by its queue until the next piece")] Place),
}

type Errands = pvblk_raid5::words::Errands<Stripe>;

/// An array whose queues are short of pages. A piece is the number of its queue.
pub struct Short<P: Primitives> {
    words: Table<Stripe, usize, P>,
    epoch: Epoch<P>,
    stock: Arc<Stock<Set, P>>,
    /// Uses of each set.
    uses: Vec<Arc<AtomicU32>>,
    batches: std::sync::atomic::AtomicU32,
    queues: Vec<Queue<Post>>,
    reserves: Vec<Mutex<Option<Reserve<Set, P>>>>,
    places: Mutex<Vec<Place>>,
    /// Batches that were open before the run, by queue.
    open: Mutex<Vec<Option<Token<Open, Stripe>>>>,
    fault: Fault,
}

impl<P: Primitives> Short<P> {
    /// The first `open` queues have an open batch each, with a set. Words of `kept` are free, and have sets that queue 0 has used.
    pub fn new(
        queues: usize,
        words: usize,
        open: usize,
        kept: &[usize],
        fault: Fault,
    ) -> Arc<Short<P>> {
        let sets = kept.len() + open;
        let uses: Vec<_> = (0..sets).map(|_| Arc::new(AtomicU32::new(0))).collect();
        let (words, places) = Table::new(words, 2 * queues as u32, Stripe::default);
        let stock = Stock::new(uses.iter().map(|uses| Set(Arc::clone(uses))).collect());
        let reserve = |queue| Mutex::new(Some(stock.open(owner(queue))));
        let short = Arc::new(Short {
            words,
            epoch: Epoch::default(),
            uses,
            batches: std::sync::atomic::AtomicU32::new(0),
            queues: (0..queues)
                .map(|_| Queue::new().expect("an event"))
                .collect(),
            reserves: (0..queues).map(reserve).collect(),
            stock,
            places: Mutex::new(places),
            open: Mutex::new((0..queues).map(|_| None).collect()),
            fault,
        });
        (0..open).for_each(|queue| short.begin(queue));
        for at in kept {
            short.step(0, Step::Write(*at));
        }
        short
    }

    /// Opens a batch, before others run.
    fn begin(&self, queue: usize) {
        let token = self.arrive(queue, queue).expect("nobody else runs").0;
        let Looked::Open(mut open) = self.words.look(token, &self.epoch) else {
            panic!("nobody kicks");
        };
        let mut reserve = self.reserve(queue);
        let set = reserve.take((&self.words, &self.epoch), &mut Errands::default());
        open.record_mut().set = set;
        *self.reserves[queue].lock().expect("no panic") = Some(reserve);
        self.open.lock().expect("no panic")[queue] = Some(open);
    }

    fn reserve(&self, queue: usize) -> Reserve<Set, P> {
        let reserve = self.reserves[queue].lock().expect("no panic").take();
        reserve.expect("one thread for each queue")
    }

    fn arrive(&self, queue: usize, at: usize) -> Option<(Token<Claimed, Stripe>, Arrived<usize>)> {
        let place = self.places.lock().expect("no panic").pop();
        let place = place.expect("a place for each write");
        match self.words.arrive(at, owner(queue), place, queue) {
            Arrival::Claimed(token, arrived) => Some((token, arrived)),
            Arrival::Joined => None,
        }
    }

    pub fn step(&self, queue: usize, step: Step) {
        let mut reserve = self.reserve(queue);
        let mut inbox = Vec::new();
        match step {
            Step::Write(at) => self.write(&mut reserve, &mut inbox, queue, at),
            Step::Finish | Step::FinishWhole => {
                let open = self.open.lock().expect("no panic")[queue].take();
                let open = open.expect("it was opened");
                let whole = step == Step::FinishWhole;
                self.end(&mut reserve, queue, open, Vec::new(), whole);
            }
            Step::GiveWay => {
                let mut errands = Errands::default();
                let words = (&self.words, &self.epoch);
                let nobody = owner(self.queues.len());
                self.stock.give_way(words, nobody, &mut errands);
                self.run_errands(errands);
            }
            Step::Kick => self.kick(&mut inbox, queue),
        }
        *self.reserves[queue].lock().expect("no panic") = Some(reserve);
    }

    fn write(&self, reserve: &mut Reserve<Set, P>, inbox: &mut Vec<Post>, queue: usize, at: usize) {
        if let Some((token, piece)) = self.arrive(queue, at) {
            return self.own(reserve, inbox, queue, token, vec![piece]);
        }
        loop {
            match next(&self.queues[queue], inbox) {
                Post::Yours(mut token) => {
                    let pieces = std::mem::take(&mut token.record_mut().left);
                    return self.own(reserve, inbox, queue, token, pieces);
                }
                Post::Done(_) => return,
                Post::Wake | Post::GoOn | Post::Drained => {}
            }
        }
    }

    /// Owns a word until its batch ends, which waits for pages.
    fn own(
        &self,
        reserve: &mut Reserve<Set, P>,
        inbox: &mut Vec<Post>,
        queue: usize,
        mut token: Token<Claimed, Stripe>,
        pieces: Vec<Arrived<usize>>,
    ) {
        let mut wait_for = |is: fn(&Post) -> bool| while !is(&next(&self.queues[queue], inbox)) {};
        let words = (&self.words, &self.epoch);
        let open = loop {
            let mut open = match self.words.look(token, &self.epoch) {
                Looked::Open(open) => open,
                Looked::Parked(parked, tell) => {
                    self.tell(tell);
                    wait_for(|post| matches!(post, Post::GoOn));
                    token = self.words.go_on(parked);
                    continue;
                }
            };
            while !open.record().has_pages() {
                let mut errands = Errands::default();
                open.record_mut().set = reserve.take(words, &mut errands);
                self.run_errands(errands);
                if self.fault != Fault::NotParked || open.record().has_pages() {
                    break;
                }
                wait_for(|post| matches!(post, Post::Wake));
            }
            if open.record().has_pages() {
                break open;
            }
            let (parked, tell) = self.words.park(open, &self.epoch);
            self.tell(tell);
            wait_for(|post| matches!(post, Post::Wake));
            token = self.words.go_on(parked);
        };
        self.end(reserve, queue, open, pieces, false);
    }

    fn end(
        &self,
        reserve: &mut Reserve<Set, P>,
        queue: usize,
        open: Token<Open, Stripe>,
        mut pieces: Vec<Arrived<usize>>,
        whole: bool,
    ) {
        let set = open.record().set.as_ref().expect("it has pages");
        let uses = set.0.load(Ordering::Relaxed);
        let mut closed = self.words.close(open, &mut pieces);
        let set = closed.record().set.as_ref().expect("it has pages");
        set.0.store(uses + 1, Ordering::Relaxed);
        let order = std::sync::atomic::Ordering::Relaxed;
        self.batches.fetch_add(1, order);
        for Arrived { place, piece } in pieces {
            if piece != queue {
                self.post(piece, Post::Done(place));
            }
        }
        let mut errands = Errands::default();
        let freed = if self.fault == Fault::NoLook {
            self.words.release(closed, &self.epoch).map(drop)
        } else {
            reserve.end_batch(closed.record_mut(), whole, &mut errands.wake);
            reserve.release((&self.words, &self.epoch), closed, &mut errands)
        };
        self.run_errands(errands);
        if let Err(closed) = freed {
            self.hand_over(closed);
        }
    }

    fn hand_over<S: Leaves>(&self, mut token: Token<S, Stripe>) {
        let mut pieces = Vec::new();
        self.words.take(&mut token, &mut pieces);
        let to = pieces.first().expect("somebody has arrived").piece;
        token.record_mut().left.append(&mut pieces);
        let token = self.words.hand_over(token, owner(to));
        self.post(to, Post::Yours(token));
    }

    fn run_errands(&self, errands: Errands) {
        for queue in errands.wake {
            if self.fault != Fault::NotWoken {
                self.post(queue.number() as usize - 1, Post::Wake);
            }
        }
        if self.fault != Fault::NotTold {
            self.tell(errands.tell);
        }
        for token in errands.arrived {
            if self.fault != Fault::NotPosted {
                self.hand_over(token);
            }
        }
    }

    fn tell(&self, kickers: impl IntoIterator<Item = Owner>) {
        for kicker in kickers {
            self.post(kicker.number() as usize - 1, Post::Drained);
        }
    }

    fn kick(&self, inbox: &mut Vec<Post>, queue: usize) {
        let stop = self.epoch.stop(owner(queue)).expect("one queue kicks");
        let mut left = self.words.in_flight(&stop);
        while self.words.is_in_flight(&mut left) {
            next(&self.queues[queue], inbox);
        }
        self.epoch.go_on(stop);
        (0..self.queues.len()).for_each(|to| self.post(to, Post::GoOn));
    }

    fn post(&self, to: usize, post: Post) {
        self.queues[to].post(|all| all.push(post));
    }

    /// Checks the end of a run: no set is lost, each batch has used one, and nobody waits.
    pub fn check_end(&self) {
        let free = (0..self.words.count()).filter(|at| self.words.peek(*at).has_pages());
        let (here, total) = self.stock.count();
        assert_eq!(here + free.count(), total, "the sum");
        assert!(!self.stock.is_wanted(), "somebody counts as waiting");
        let uses = self.uses.iter().map(|uses| uses.load(Ordering::Relaxed));
        let order = std::sync::atomic::Ordering::Relaxed;
        assert_eq!(uses.sum::<u32>(), self.batches.load(order), "uses");
        let waits = |queue: &Mutex<Option<Reserve<Set, P>>>| {
            let reserve = queue.lock().expect("no panic");
            reserve.as_ref().is_some_and(Reserve::waits)
        };
        assert!(!self.reserves.iter().any(waits), "somebody waits");
    }
}
