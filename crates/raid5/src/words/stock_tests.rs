//! Pages of queues by one thread: each way by which a queue comes to some, and random runs that check that none is lost and nobody starves.

use super::*;
use pvblk_testing::seeds;
use std::cell::Cell;

/// Pages as a number.
#[derive(Debug, PartialEq, Eq)]
struct Set(u32);

thread_local! {
    /// Sets whose memory was given back.
    static GIVEN: Cell<usize> = const { Cell::new(0) };
}

impl PageSet for Set {
    fn give_back(sets: &mut [Set]) -> u64 {
        GIVEN.set(GIVEN.get() + sets.len());
        sets.len() as u64
    }
}

#[derive(Default, Debug)]
struct Stripe {
    set: Option<Set>,
    was_useful: bool,
    /// Pieces for the next batch.
    left: Vec<Arrived<Piece>>,
}

impl Record for Stripe {
    type Pages = Set;
    fn has_pages(&self) -> bool {
        self.set.is_some()
    }
    fn was_useful(&self) -> bool {
        self.was_useful
    }
    fn take_pages(&mut self) -> Option<Set> {
        self.set.take()
    }
}

/// A piece: the queue that it is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece(usize);

type Words = Table<Stripe, Piece>;
type Sets = Errands<Stripe>;

/// A queue's number in words; the last one is nobody's.
fn owner(queue: usize) -> Owner {
    Owner::new(queue as u16 + 1).expect("a number")
}

const NOBODY: usize = 99;

/// Words, pages and queues for the tests that go step by step.
struct Small {
    words: Words,
    epoch: Epoch,
    stock: std::sync::Arc<Stock<Set>>,
    places: Vec<Place>,
    sets: Sets,
    /// Batches find that data of their pages is useful.
    useful: bool,
}

impl Small {
    fn new(words: usize, sets: u32) -> Small {
        let (words, places) = Table::new(words, 4, Stripe::default);
        Small {
            words,
            epoch: Epoch::default(),
            stock: Stock::new((1..=sets).map(Set).collect()),
            places,
            sets: Sets::default(),
            useful: false,
        }
    }

    fn take(&mut self, queue: &mut Reserve<Set>) -> Option<Set> {
        queue.take((&self.words, &self.epoch), &mut self.sets)
    }

    /// A batch of a free word with this set, until its end.
    fn batch(
        &mut self,
        queue: &mut Reserve<Set>,
        by: usize,
        at: usize,
        set: Option<Set>,
        whole: bool,
    ) {
        let place = self.places.pop().expect("a place");
        let Arrival::Claimed(token, arrived) = self.words.arrive(at, owner(by), place, Piece(by))
        else {
            panic!("word {at} has an owner");
        };
        self.places.push(arrived.place);
        let Looked::Open(mut open) = self.words.look(token, &self.epoch) else {
            panic!("nobody kicks");
        };
        open.record_mut().was_useful = self.useful;
        if let Some(set) = set {
            let old = open.record_mut().set.replace(set);
            assert_eq!(old, None, "word {at} has pages");
        }
        let mut closed = self.words.close(open, &mut Vec::new());
        queue.end_batch(closed.record_mut(), whole, &mut self.sets.wake);
        let words = (&self.words, &self.epoch);
        let freed = queue.release(words, closed, &mut self.sets);
        freed.expect("nobody came");
    }

    fn has_pages(&self) -> Vec<usize> {
        let all = 0..self.words.count();
        all.filter(|at| self.words.peek(*at).has_pages()).collect()
    }
}

#[test]
fn a_queue_takes_its_own_pages_first_and_others_last() {
    let mut small = Small::new(20, 14);
    let mut a = small.stock.open(owner(0));
    let mut b = small.stock.open(owner(1));
    let first = small.take(&mut a);
    assert_eq!(first, Some(Set(14)), "a dozen of the stock, the last first");
    assert_eq!(small.stock.inner_len(), 2);
    small.batch(&mut a, 0, 5, first, false);
    let second = small.take(&mut a);
    small.batch(&mut a, 0, 6, second, false);
    small.batch(&mut a, 0, 5, None, false);
    assert_eq!(small.has_pages(), [5, 6]);
    for n in 0..10 {
        let set = small.take(&mut a);
        assert!(set.is_some());
        small.batch(&mut a, 0, 7 + n, set, false);
    }
    // The reserve is empty: what is left in the stock, then the word that was freed longest ago. That of word 5 is younger.
    for _ in 0..3 {
        small.take(&mut a).expect("a set");
    }
    assert_eq!(small.has_pages()[..2], [5, 7]);
    // The other queue takes others' words.
    for _ in 0..3 {
        let before = small.has_pages().len();
        small.take(&mut b).expect("a set");
        assert_eq!(before - small.has_pages().len(), 1);
    }
    assert!(small.sets.wake.is_empty() && small.sets.arrived.is_empty());
}

#[test]
fn words_whose_data_was_useful_go_last() {
    let mut small = Small::new(20, 20);
    let mut a = small.stock.open(owner(0));
    let (first, second) = (small.take(&mut a), small.take(&mut a));
    small.useful = true;
    small.batch(&mut a, 0, 4, first, false);
    small.useful = false;
    small.batch(&mut a, 0, 5, second, false);
    // All of these but one were claimed since then.
    (0..40).for_each(|_| small.batch(&mut a, 0, 5, None, false));
    for left in [&[4, 5][..]; 18].into_iter().chain([&[4][..], &[]]) {
        small.take(&mut a).expect("a set");
        assert_eq!(small.has_pages(), left);
    }
}

#[test]
fn a_word_with_another_batch_since_is_left_alone() {
    let mut small = Small::new(2, 1);
    let mut a = small.stock.open(owner(0));
    let mut b = small.stock.open(owner(1));
    let set = small.take(&mut a);
    small.batch(&mut a, 0, 1, set, false);
    let word = small.words.peek(1);
    small.batch(&mut b, 1, 1, None, false);
    assert_eq!(small.words.peek(1).batch(), word.batch() + 1);
    let old = small.words.claim_idle(1, owner(0), word.batch());
    assert!(old.is_none());
    // The walk finds them all the same.
    assert_eq!(small.take(&mut a), Some(Set(1)));
    assert_eq!(small.take(&mut b), None);
}

#[test]
fn pages_of_a_stripe_that_was_written_whole_are_in_the_reserve() {
    let mut small = Small::new(2, 2);
    let mut a = small.stock.open(owner(0));
    let one = small.take(&mut a);
    assert_eq!(one, Some(Set(2)));
    small.batch(&mut a, 0, 0, one, true);
    assert!(small.has_pages().is_empty());
    assert_eq!(small.take(&mut a), Some(Set(2)), "the one used last");
    // Another queue takes them from there when it finds nothing else.
    let mut b = small.stock.open(owner(1));
    assert_eq!(small.take(&mut b), Some(Set(1)));
    assert_eq!(small.take(&mut b), None);
}

#[test]
fn a_reserve_gives_a_dozen_to_the_stock_when_it_has_too_many() {
    let mut small = Small::new(1, 40);
    let mut a = small.stock.open(owner(0));
    let all: Vec<Set> = std::iter::from_fn(|| small.take(&mut a)).collect();
    assert_eq!(all.len(), 40);
    let mut b = small.stock.open(owner(1));
    for (n, set) in all.into_iter().enumerate() {
        small.batch(&mut b, 1, 0, Some(set), true);
        // The first is a's, which waits for it.
        let kept = n;
        let rest = if kept > 24 { (kept - 13) / 12 * 12 } else { 0 };
        assert_eq!(small.stock.inner_len(), rest, "after {n}");
    }
    assert_eq!(small.sets.wake, [owner(0)]);
    assert_eq!(small.stock.count(), (40, 40));
}

#[test]
fn who_waits_longest_is_served_first() {
    let mut small = Small::new(4, 2);
    let mut queues: Vec<_> = (0..4).map(|n| small.stock.open(owner(n))).collect();
    let sets: Vec<_> = (0..2).map(|_| small.take(&mut queues[0])).collect();
    for n in [2, 1, 3] {
        assert_eq!(small.take(&mut queues[n]), None);
        assert!(queues[n].waits());
    }
    let mut order = Vec::new();
    for (at, set) in sets.into_iter().enumerate() {
        let mut first = queues.remove(0);
        small.batch(&mut first, 0, at, set, at == 1);
        queues.insert(0, first);
        order.append(&mut small.sets.wake);
    }
    assert_eq!(order, [owner(2), owner(1)]);
    assert!(
        small.has_pages().is_empty(),
        "they aren't kept while somebody waits"
    );
    let set = small.take(&mut queues[1]);
    assert!(set.is_some() && !queues[1].waits());
    assert_eq!(small.take(&mut queues[3]), None, "it isn't its turn");
    // A queue that is closed while it waits, or before it takes its own, leaves nothing behind.
    small.stock.close(queues.remove(2), &mut small.sets.wake);
    assert_eq!(small.sets.wake, [owner(3)]);
    let last = queues.remove(2);
    small.stock.close(last, &mut small.sets.wake);
    assert_eq!(small.stock.count(), (1, 2));
    small.batch(&mut queues[0], 0, 3, set, false);
    assert_eq!(small.has_pages(), [3], "nobody waits");
}

#[test]
fn a_word_that_pieces_arrive_for_is_handed_over_without_its_pages() {
    let small = Small::new(1, 0);
    let mut token = small.words.claim_idle(0, owner(0), 0).expect("free");
    token.record_mut().set = Some(Set(1));
    assert!(small.words.release(token, &small.epoch).is_ok());
    let token = small.words.claim_pages(0, owner(1)).expect("it has pages");
    assert!(token.record().set.is_some());
    assert!(small.words.claim_pages(0, owner(2)).is_none(), "not free");
}

#[test]
fn remembered_words_are_bounded() {
    let mut small = Small::new(3, 1);
    let mut a = small.stock.open(owner(0));
    let set = small.take(&mut a);
    small.batch(&mut a, 0, 2, set, false);
    for _ in 0..1000 {
        small.batch(&mut a, 0, 2, None, false);
        assert!(a.remembered() <= 64);
    }
    assert_eq!(small.take(&mut a), Some(Set(1)));
}

#[test]
fn the_number_of_sets_changes_while_they_are_in_use() {
    let mut small = Small::new(4, 4);
    let mut a = small.stock.open(owner(0));
    let mut taken: Vec<_> = (0..3).map(|_| small.take(&mut a)).collect();
    let none = |_| -> Result<Vec<Set>, ()> { panic!("none is missing") };
    let wake = &mut Vec::new();
    small.stock.set_count(2, none, wake).expect("fewer");
    assert_eq!(small.stock.count(), (1, 4), "in use");
    let words = (&small.words, &small.epoch);
    small.stock.give_way(words, owner(NOBODY), &mut small.sets);
    assert_eq!(small.stock.count(), (0, 3));
    let given = GIVEN.get();
    small.batch(&mut a, 0, 0, taken.pop().expect("three"), false);
    assert_eq!(small.stock.count(), (0, 2));
    assert_eq!(GIVEN.get(), given + 1, "also that of a set that is dropped");
    small.batch(&mut a, 0, 1, taken.pop().expect("three"), false);
    assert_eq!(small.has_pages(), [1], "enough were dropped");
    let more =
        |n: usize| -> Result<Vec<Set>, ()> { Ok((0..n as u32).map(|n| Set(100 + n)).collect()) };
    small.stock.set_count(1, none, wake).expect("fewer");
    small.stock.set_count(5, more, wake).expect("more");
    assert_eq!(small.stock.count(), (3, 5), "one that was to go stays");
    assert!(small.stock.set_count(6, |_| Err(()), wake).is_err());
    assert_eq!(small.stock.count(), (3, 5));
}

#[test]
fn memory_is_given_back_only_where_nobody_has_a_buffer() {
    const MEMBERS: usize = 3;
    const BYTES: u64 = 3 * 4096;
    let memory = PageMemory::new(MEMBERS);
    let mut sets = memory.make(10).expect("memory");
    let bill = |live: u64, cap: u64| {
        let gauge = memory.gauge();
        assert_eq!(
            (gauge.live_bytes(), gauge.cap_bytes()),
            (live * BYTES, cap * BYTES)
        );
    };
    bill(0, 10);
    let buffer = sets[9].pages().buffer(2).expect("a page");
    sets[3]
        .pages()
        .buffer(0)
        .expect("a page")
        .write(0, b"forgotten");
    buffer.write(0, b"kept");
    bill(2, 10);
    assert_eq!(StripePages::give_back(&mut sets), BYTES);
    bill(1, 10);
    let mut page = [1; 4096];
    sets[3].pages().read(0, &mut page);
    assert!(page == [0; 4096]);
    sets[9].pages().read(2, &mut page);
    assert_eq!(&page[..4], b"kept");
    drop(buffer);
    bill(2, 10);
    assert_eq!(StripePages::give_back(&mut sets), 2 * BYTES);
    assert_eq!(StripePages::give_back(&mut sets), 0);
    bill(0, 10);
    sets.truncate(4);
    sets[0].pages();
    bill(1, 4);
    drop(sets);
    bill(0, 0);
}

#[test]
fn places_come_back() {
    let (_words, places): (Table<(), ()>, _) = Table::new(1, 5, || ());
    let places: Places = Places::new(places);
    let mut a = places.open(3).expect("enough");
    assert!(places.open(3).is_none(), "too few are left");
    let out: Vec<_> = std::iter::from_fn(|| a.take()).collect();
    assert_eq!((out.len(), a.in_use()), (3, 3));
    let mut out = out.into_iter();
    a.put(out.next().expect("three"));
    assert_eq!(a.in_use(), 2);
    places.close(a);
    assert!(places.open(4).is_none());
    out.for_each(|place| places.put(place));
    assert!(places.open(5).is_some());
}

/// A batch of a queue.
#[derive(Debug)]
enum State {
    Claimed(Token<Claimed, Stripe>),
    Open(Token<Open, Stripe>),
    Parked(Token<Parked, Stripe>),
}

struct Queue {
    reserve: Reserve<Set>,
    places: OwnPlaces,
    batches: Vec<(State, Vec<Arrived<Piece>>)>,
    /// It waits for a set, and nobody has woken it.
    sleeps: bool,
    /// Batches with a set that have ended since it waits.
    passed: usize,
}

/// Queues that take random steps.
struct World {
    rng: fastrand::Rng,
    words: Words,
    epoch: Epoch,
    stock: std::sync::Arc<Stock<Set>>,
    places: Places,
    queues: Vec<Option<Queue>>,
    stop: Option<(Stop, InFlight)>,
    sets: Sets,
    next_set: u32,
    /// Pieces that have arrived, and that are done.
    pieces: (usize, usize),
    ways: Ways,
}

/// Counts things that a run is to have.
#[derive(Debug, Default, Clone, Copy)]
struct Ways {
    waits: usize,
    joined: usize,
    given_away: usize,
    whole: usize,
    parked: usize,
}

const EACH: usize = 4;

impl World {
    fn new(seed: u64) -> World {
        let mut rng = fastrand::Rng::with_seed(seed);
        let queues = rng.usize(2..=6);
        let (words, places) = Table::new(rng.usize(2..40), (queues * EACH) as u32, Stripe::default);
        let sets = rng.u32(1..=30);
        let mut world = World {
            rng,
            words,
            epoch: Epoch::default(),
            stock: Stock::new((1..=sets).map(Set).collect()),
            places: Places::new(places),
            queues: Vec::new(),
            stop: None,
            sets: Sets::default(),
            next_set: sets,
            pieces: (0, 0),
            ways: Ways::default(),
        };
        for queue in 0..queues {
            let opened = world.open(queue);
            world.queues.push(Some(opened));
        }
        world
    }

    fn open(&self, queue: usize) -> Queue {
        Queue {
            reserve: self.stock.open(owner(queue)),
            places: self.places.open(EACH).expect("places for all"),
            batches: Vec::new(),
            sleeps: false,
            passed: 0,
        }
    }

    fn step(&mut self) {
        let queue = self.rng.usize(..self.queues.len());
        match self.rng.u32(..100) {
            0..30 => self.arrive(queue),
            30..90 => self.go_on(queue),
            90..92 => self.give_way(),
            92..94 => self.close_or_open(queue),
            94..96 => self.set_count(),
            _ => self.kick(queue),
        }
        self.errands();
        self.check();
    }

    fn arrive(&mut self, queue: usize) {
        let at = self.rng.usize(..self.words.count());
        let Some(q) = &mut self.queues[queue] else {
            return;
        };
        let Some(place) = q.places.take() else {
            return;
        };
        self.pieces.0 += 1;
        match self.words.arrive(at, owner(queue), place, Piece(queue)) {
            Arrival::Claimed(token, arrived) => {
                q.batches.push((State::Claimed(token), vec![arrived]))
            }
            Arrival::Joined => self.ways.joined += 1,
        }
    }

    /// A step of one of a queue's batches.
    fn go_on(&mut self, queue: usize) {
        let Some(q) = &mut self.queues[queue] else {
            return;
        };
        if q.batches.is_empty() {
            return;
        }
        let (state, mut pieces) = q.batches.swap_remove(self.rng.usize(..q.batches.len()));
        let words = (&self.words, &self.epoch);
        let state = match state {
            State::Claimed(token) => match self.words.look(token, &self.epoch) {
                Looked::Open(token) => State::Open(token),
                Looked::Parked(token, _) => {
                    self.ways.parked += 1;
                    State::Parked(token)
                }
            },
            // It may be told to go on by a queue that has stopped words again since.
            State::Parked(token) if token.record().has_pages() || !q.sleeps => {
                State::Claimed(self.words.go_on(token))
            }
            State::Parked(token) => State::Parked(token),
            State::Open(mut token) if !token.record().has_pages() => {
                if !q.sleeps {
                    let waited = q.reserve.waits();
                    token.record_mut().set = q.reserve.take(words, &mut self.sets);
                    q.sleeps = !token.record().has_pages();
                    assert!(!waited || !q.sleeps, "it was woken for nothing");
                    q.passed = 0;
                    self.ways.waits += usize::from(q.sleeps);
                }
                match q.sleeps {
                    false => State::Open(token),
                    true => State::Parked(self.words.park(token, &self.epoch).0),
                }
            }
            State::Open(mut token) if self.rng.bool() => {
                self.words.take(&mut token, &mut pieces);
                State::Open(token)
            }
            State::Open(token) => {
                let closed = self.words.close(token, &mut pieces);
                return self.end(queue, closed, pieces);
            }
        };
        q.batches.push((state, pieces));
    }

    fn end(
        &mut self,
        queue: usize,
        mut closed: Token<Closed, Stripe>,
        pieces: Vec<Arrived<Piece>>,
    ) {
        for Arrived { place, piece } in pieces {
            self.pieces.1 += 1;
            let from = self.queues[piece.0].as_mut().expect("it has pieces");
            from.places.put(place);
        }
        let surplus = self.stock.surplus() > 0;
        let whole = self.rng.u32(..4) == 0;
        let q = self.queues[queue].as_mut().expect("it has a batch");
        q.reserve
            .end_batch(closed.record_mut(), whole, &mut self.sets.wake);
        let kept = closed.record().has_pages();
        self.ways.whole += usize::from(whole);
        self.ways.given_away += usize::from(!kept && !whole);
        let words = (&self.words, &self.epoch);
        let freed = q.reserve.release(words, closed, &mut self.sets);
        self.errands();
        for (n, other) in self.queues.iter_mut().enumerate() {
            let Some(other) = other.as_mut().filter(|q| q.sleeps && !surplus) else {
                continue;
            };
            assert!(!kept, "queue {n} waits");
            other.passed += 1;
            assert!(other.passed < 6, "queue {n} starves");
        }
        if let Err(closed) = freed {
            self.hand_over(closed);
        }
    }

    fn hand_over<S: Leaves>(&mut self, mut token: Token<S, Stripe>) {
        let mut pieces = std::mem::take(&mut token.record_mut().left);
        self.words.take(&mut token, &mut pieces);
        let to = pieces.first().expect("somebody has arrived").piece.0;
        let token = self.words.hand_over(token, owner(to));
        let q = self.queues[to].as_mut().expect("it has pieces");
        q.batches.push((State::Claimed(token), pieces));
    }

    fn errands(&mut self) {
        for woken in std::mem::take(&mut self.sets.wake) {
            if let Some(q) = &mut self.queues[woken.number() as usize - 1] {
                q.sleeps = false;
            }
        }
        for token in std::mem::take(&mut self.sets.arrived) {
            self.hand_over(token);
        }
        self.sets.tell.clear();
    }

    fn give_way(&mut self) {
        let words = (&self.words, &self.epoch);
        self.stock.give_way(words, owner(NOBODY), &mut self.sets);
        assert!((0..self.words.count()).all(|at| !self.words.peek(at).has_pages()));
    }

    fn close_or_open(&mut self, queue: usize) {
        let is_busy = |q: &Queue| !q.batches.is_empty() || q.places.in_use() > 0;
        if self.queues[queue].as_ref().is_some_and(is_busy) {
            return;
        }
        self.queues[queue] = match self.queues[queue].take() {
            Some(closed) => {
                self.stock.close(closed.reserve, &mut self.sets.wake);
                self.places.close(closed.places);
                None
            }
            None => Some(self.open(queue)),
        };
    }

    fn set_count(&mut self) {
        let count = self.rng.usize(1..=30);
        let next = &mut self.next_set;
        let make = |n: usize| -> Result<Vec<Set>, ()> {
            *next += n as u32;
            Ok((*next - n as u32..*next).map(Set).collect())
        };
        let done = self.stock.set_count(count, make, &mut self.sets.wake);
        done.expect("numbers");
        let (_, total) = self.stock.count();
        assert_eq!(total - self.stock.surplus(), count);
    }

    /// Begins a stop, or ends it if words are drained.
    fn kick(&mut self, queue: usize) {
        match self.stop.take() {
            None => {
                let stop = self.epoch.stop(owner(queue)).expect("nobody kicks");
                let words = self.words.in_flight(&stop);
                self.stop = Some((stop, words));
            }
            Some((stop, mut words)) => match self.words.is_in_flight(&mut words) {
                true => self.stop = Some((stop, words)),
                false => self.epoch.go_on(stop),
            },
        }
    }

    /// No set is lost or found twice, and each queue in the line knows it.
    fn check(&self) {
        let (here, total) = self.stock.count();
        let free = (0..self.words.count()).filter(|at| self.words.peek(*at).has_pages());
        let has_pages = |state: &State| match state {
            State::Claimed(token) => token.record().has_pages(),
            State::Open(token) => token.record().has_pages(),
            State::Parked(token) => token.record().has_pages(),
        };
        let batches = self.queues.iter().flatten().flat_map(|q| &q.batches);
        let busy = batches.filter(|(state, _)| has_pages(state)).count();
        assert_eq!(here + free.count() + busy, total, "the sum");
        let sleep = self.queues.iter().flatten().filter(|q| q.sleeps).count();
        assert_eq!(self.stock.in_line(), sleep, "the line");
    }

    /// Lets all pieces end, and closes all queues.
    fn finish(mut self) -> Ways {
        for _ in 0..10_000 {
            if self.pieces.0 == self.pieces.1 && self.stop.is_none() {
                break;
            }
            if self.stop.is_some() {
                self.kick(0);
            }
            (0..self.queues.len()).for_each(|queue| self.go_on(queue));
            self.errands();
            self.check();
        }
        assert_eq!(self.pieces.0, self.pieces.1, "pieces are done");
        for queue in 0..self.queues.len() {
            if self.queues[queue].is_some() {
                self.close_or_open(queue);
            }
            assert!(self.queues[queue].is_none(), "queue {queue} isn't done");
        }
        self.give_way();
        let (here, total) = self.stock.count();
        assert_eq!((here, self.stock.surplus()), (total, 0));
        assert!(self.places.open(self.queues.len() * EACH).is_some());
        self.ways
    }
}

#[test]
fn no_set_is_lost_and_nobody_starves() {
    let mut ways = Ways::default();
    for seed in seeds(48, 1000) {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.ways = ways;
        (0..2000).for_each(|_| world.step());
        ways = world.finish();
    }
    println!("{ways:?}");
    if pvblk_testing::given_seed().is_none() {
        let each = [
            ways.waits,
            ways.joined,
            ways.given_away,
            ways.whole,
            ways.parked,
        ];
        assert!(each.into_iter().all(|n| n > 100), "{ways:?}");
    }
}
