//! Model checks of [`pvblk_protocol::blkif::index`]: every interleaving (up to a bound on preemptions) and every value that a
//! weak memory may show. A lost wake-up appears as a deadlock, a missing barrier as a stale payload.
//!
//! The negative controls at the end break one rule each. The models must detect that; otherwise they prove nothing.

#[path = "../../block/tests/loom_model/explore.rs"]
mod explore;

use explore::explore;
use loom::sync::Notify;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use pvblk_protocol::blkif::index::{Consumer, Producer, SharedIndex};
// Not loom's type: its counter panics again while a failed model unwinds.
use std::sync::Arc;

/// An index on shared pages. `RELEASE`: it is published after the entries before it. `BARRIER`: a store is ordered before
/// the look at the other side's word.
struct Word<const RELEASE: bool, const BARRIER: bool>(AtomicU32);

/// The index as it is.
type Sound = Word<true, true>;
/// Without the barrier between a store and the look at the other side's word.
type NoBarrier = Word<true, false>;
/// Published without an order after the entries.
type RelaxedStore = Word<false, true>;

impl<const RELEASE: bool, const BARRIER: bool> SharedIndex for Word<RELEASE, BARRIER> {
    fn load_acquire(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
    fn load_relaxed(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
    fn store_release(&self, value: u32) {
        let order = match RELEASE {
            true => Ordering::Release,
            false => Ordering::Relaxed,
        };
        self.0.store(value, order);
    }
    fn full_barrier() {
        if BARRIER {
            fence(Ordering::SeqCst);
        }
    }
}

trait Index: SharedIndex + Send + Sync + 'static {
    fn new(value: u32) -> Self;
}

impl<const RELEASE: bool, const BARRIER: bool> Index for Word<RELEASE, BARRIER> {
    fn new(value: u32) -> Self {
        Word(AtomicU32::new(value))
    }
}

/// One direction with its event channel.
struct SharedDirection<I> {
    prod: I,
    event: I,
    channel: Notify,
}

impl<I: Index> SharedDirection<I> {
    /// `SHARED_RING_INIT` from any start index: the first entry will notify.
    fn new(start: u32) -> SharedDirection<I> {
        SharedDirection {
            prod: I::new(start),
            event: I::new(start.wrapping_add(1)),
            channel: Notify::new(),
        }
    }
}

fn zeroed_entries(n: u32) -> Vec<AtomicU32> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

/// Steps of the consumer before it sleeps.
#[derive(Clone, Copy, PartialEq)]
enum Sleep {
    ArmAndCheck,
    ArmOnly,
    Neither,
}

/// One direction: a producer that publishes `batches`, and a consumer that takes them all.
fn one_way<I: Index>(start: u32, batches: &'static [u32], sleep: Sleep) {
    let total: u32 = batches.iter().sum();
    let direction = Arc::new(SharedDirection::<I>::new(start));
    let payload = Arc::new(zeroed_entries(total));
    let producer = {
        let (direction, payload) = (direction.clone(), payload.clone());
        loom::thread::spawn(move || {
            let mut p = Producer::starting_at(start);
            for &n in batches {
                for _ in 0..n {
                    let k = p.next().wrapping_sub(start);
                    payload[k as usize].store(100 + k, Ordering::Relaxed);
                    p.advance();
                }
                if p.publish(&direction.prod, &direction.event) {
                    direction.channel.notify();
                }
            }
        })
    };
    let mut c = Consumer::starting_at(start);
    let mut taken = 0;
    while taken < total {
        let known = c
            .refresh(&direction.prod, total - taken)
            .expect("an honest producer");
        for _ in 0..known {
            let got = payload[taken as usize].load(Ordering::Relaxed);
            assert_eq!(got, 100 + taken, "stale payload");
            c.advance();
            taken += 1;
        }
        if known > 0 {
            continue;
        }
        match sleep {
            Sleep::ArmAndCheck if c.arm(&direction.prod, &direction.event) => continue,
            Sleep::ArmOnly => drop(c.arm(&direction.prod, &direction.event)),
            _ => {}
        }
        direction.channel.wait();
    }
    producer.join().expect("the producer ends");
}

#[test]
fn no_wake_up_is_lost_with_two_publishes() {
    explore(6, || one_way::<Sound>(0, &[1, 1], Sleep::ArmAndCheck));
}

#[test]
fn no_wake_up_is_lost_with_batches() {
    explore(4, || one_way::<Sound>(0, &[2, 1], Sleep::ArmAndCheck));
}

#[test]
fn no_wake_up_is_lost_across_the_wrap_of_the_indices() {
    explore(4, || {
        one_way::<Sound>(u32::MAX, &[1, 2], Sleep::ArmAndCheck)
    });
}

/// Both directions over one ring of `size` entries that requests and responses share, as on the real pages. The front
/// end keeps up to `size` requests outstanding; the back end responds to each with its number plus 1000.
fn round_trip<I: Index>(size: u32, total: u32) {
    let requests = Arc::new(SharedDirection::<I>::new(0));
    let responses = Arc::new(SharedDirection::<I>::new(0));
    let ring = Arc::new(zeroed_entries(size));
    let back = {
        let (requests, responses, ring) = (requests.clone(), responses.clone(), ring.clone());
        loom::thread::spawn(move || {
            let mut c = Consumer::starting_at(0);
            let mut p = Producer::starting_at(0);
            while c.next() < total {
                let limit = size - (c.next() - p.next());
                let known = c
                    .refresh(&requests.prod, limit)
                    .expect("an honest front end");
                for _ in 0..known {
                    let got = ring[(c.next() % size) as usize].load(Ordering::Relaxed);
                    assert_eq!(got, 100 + c.next(), "stale payload");
                    c.advance();
                    let answer = 1100 + p.next();
                    ring[(p.next() % size) as usize].store(answer, Ordering::Relaxed);
                    p.advance();
                }
                if known > 0 {
                    if p.publish(&responses.prod, &responses.event) {
                        responses.channel.notify();
                    }
                } else if !c.arm(&requests.prod, &requests.event) {
                    requests.channel.wait();
                }
            }
        })
    };
    let mut p = Producer::starting_at(0);
    let mut c = Consumer::starting_at(0);
    while c.next() < total {
        while p.next() < total && p.next() - c.next() < size {
            ring[(p.next() % size) as usize].store(100 + p.next(), Ordering::Relaxed);
            p.advance();
        }
        if p.publish(&requests.prod, &requests.event) {
            requests.channel.notify();
        }
        let outstanding = p.next() - c.next();
        let known = c
            .refresh(&responses.prod, outstanding)
            .expect("an honest back end");
        for _ in 0..known {
            let got = ring[(c.next() % size) as usize].load(Ordering::Relaxed);
            assert_eq!(got, 1100 + c.next(), "stale payload");
            c.advance();
        }
        if known == 0 && !c.arm(&responses.prod, &responses.event) {
            responses.channel.wait();
        }
    }
    back.join().expect("the back end ends");
}

#[test]
fn one_entry_is_used_twice() {
    explore(3, || round_trip::<Sound>(1, 2));
}

#[test]
fn two_entries_are_in_flight_at_once() {
    explore(3, || round_trip::<Sound>(2, 2));
}

// Negative controls.

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_full_barrier_a_wake_up_is_lost() {
    explore(3, || one_way::<NoBarrier>(0, &[1, 1], Sleep::ArmAndCheck));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_full_barrier_a_round_trip_hangs() {
    explore(3, || round_trip::<NoBarrier>(1, 2));
}

#[test]
#[should_panic(expected = "stale payload")]
fn control_a_relaxed_publish_shows_a_stale_payload() {
    explore(3, || {
        one_way::<RelaxedStore>(0, &[1, 1], Sleep::ArmAndCheck)
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_sleeping_without_arming_loses_a_wake_up() {
    explore(3, || one_way::<Sound>(0, &[1, 1], Sleep::Neither));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_sleeping_without_the_final_check_loses_a_wake_up() {
    explore(3, || one_way::<Sound>(0, &[1, 1], Sleep::ArmOnly));
}
