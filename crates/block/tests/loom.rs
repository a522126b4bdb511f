//! Model checks of stacked devices: every interleaving, up to a bound on preemptions, and every value that a weak memory may show. A lost
//! wake-up is a deadlock, and a completion that is taken twice or not at all fails a check.
//!
//! The queues here take the same steps in the same order as those of the page cache and of RAID-5. The
//! negative controls break one rule each and must be found, otherwise the models prove nothing.

mod loom_model;

use loom_model::explore::explore;
use loom_model::primitives::{Loom, LoomEvent, epoll};
use loom_model::{Device, NoBarrier, OwnedCompletion, StoreOnly};
use pvblk_block::stacked::{
    CompletionQueue, LowerQueue, Neighbour, Primitives, QueueTable, SharedLowerQueue,
};
use pvblk_block::{BlockDevice, Completion, QueueContext, Readiness};
// This isn't loom's: its counter panics again while a model that failed unwinds.
use std::sync::Arc;

/// The last steps of an owner before it sleeps.
#[derive(Clone, Copy, PartialEq)]
enum Sleep {
    PrepareAndLook,
    PrepareOnly,
    LookOnly,
}

/// `posters` leave one completion each, and the owner sleeps until it has all.
fn post_and_sleep<P: Primitives<Event = LoomEvent>>(posters: u32, sleep: Sleep) {
    let queue = Arc::new(CompletionQueue::<Vec<u32>, P>::new().expect("an event"));
    let threads: Vec<_> = (0..posters)
        .map(|poster| {
            let queue = Arc::clone(&queue);
            loom::thread::spawn(move || queue.post(|all| all.push(poster)))
        })
        .collect();
    let mut got = Vec::new();
    loop {
        queue.wait().finish_wait();
        queue.collect(|all| got.append(all));
        if got.len() as u32 == posters {
            break;
        }
        if sleep != Sleep::LookOnly {
            queue.wait().prepare_to_wait();
        }
        if sleep != Sleep::PrepareOnly && queue.wait().is_pending() {
            continue;
        }
        epoll(&[queue.wait().event()]);
        queue.wait().event().take();
    }
    for thread in threads {
        thread.join().expect("a poster ends");
    }
    got.sort_unstable();
    let all: Vec<u32> = (0..posters).collect();
    assert_eq!(got, all, "each exactly once");
    queue.collect(|all| assert!(all.is_empty(), "nothing is there twice"));
}

#[test]
fn no_completion_is_lost_or_taken_twice() {
    explore(4, || post_and_sleep::<Loom>(1, Sleep::PrepareAndLook));
    explore(3, || post_and_sleep::<Loom>(2, Sleep::PrepareAndLook));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_full_barrier_a_wake_up_is_lost() {
    explore(3, || post_and_sleep::<NoBarrier>(1, Sleep::PrepareAndLook));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_sleeping_without_a_last_look_loses_a_wake_up() {
    explore(3, || post_and_sleep::<Loom>(1, Sleep::PrepareOnly));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_sleeping_without_preparing_loses_a_wake_up() {
    explore(3, || post_and_sleep::<Loom>(1, Sleep::LookOnly));
}

/// A queue of a stacked device, with a completion queue for its user's completions, and a lower queue.
struct StackedQueue<P: Primitives> {
    completions: CompletionQueue<Vec<OwnedCompletion>, P>,
    lower: SharedLowerQueue<P>,
    device: Arc<Device<P>>,
}

impl<P: Primitives> Neighbour<P> for StackedQueue<P> {
    type Entries = Vec<OwnedCompletion>;
    fn completions(&self) -> &CompletionQueue<Vec<OwnedCompletion>, P> {
        &self.completions
    }
    fn lower(&self) -> Option<&SharedLowerQueue<P>> {
        Some(&self.lower)
    }
}

type Table<P> = Arc<QueueTable<StackedQueue<P>, P>>;

fn open<P: Primitives<Event = LoomEvent>>(table: &Table<P>) -> (usize, Arc<StackedQueue<P>>) {
    let device = Device::<P>::new();
    let shared: Arc<dyn BlockDevice> = device.clone();
    let lower = LowerQueue::open(&shared, &QueueContext::new(4)).expect("a queue");
    let place = Arc::new(StackedQueue {
        completions: CompletionQueue::new().expect("an event"),
        lower: SharedLowerQueue::new(lower),
        device,
    });
    (table.open(&place), place)
}

/// Takes ends of I/O, for which the core says to which queue the completions belong. Returns those
/// of `me`, and posts the others.
fn step<P: Primitives>(
    table: &Table<P>,
    me: usize,
    ended: &mut Vec<Completion>,
) -> Vec<OwnedCompletion> {
    let answers: Vec<OwnedCompletion> = ended.drain(..).map(|c| OwnedCompletion::of(&c)).collect();
    let (mine, others): (Vec<OwnedCompletion>, Vec<OwnedCompletion>) =
        answers.into_iter().partition(|a| a.owner == me);
    let mut owners = others.iter().map(|a| a.owner).collect();
    table.post(&mut owners, |number, _, entries| {
        entries.extend(others.iter().filter(|a| a.owner == number));
    });
    mine
}

/// A queue whose user waits for completions, some of which come from other queues' I/O.
struct Sleeper<P: Primitives> {
    table: Table<P>,
    number: usize,
    place: Arc<StackedQueue<P>>,
    got: Vec<OwnedCompletion>,
    /// Lower queues that the user waited for, and that have to be polled since their events were
    /// cleared.
    look: Vec<Arc<StackedQueue<P>>>,
    /// The queue polls unattended lower queues.
    polls_unattended: bool,
}

impl<P: Primitives<Event = LoomEvent>> Sleeper<P> {
    fn new(table: &Table<P>) -> Sleeper<P> {
        let (number, place) = open(table);
        place.lower.attend();
        Sleeper {
            table: Arc::clone(table),
            number,
            place,
            got: Vec::new(),
            look: Vec::new(),
            polls_unattended: true,
        }
    }

    /// Polls and sleeps until the user has `until` completions.
    fn run(&mut self, until: usize) {
        loop {
            let handed = self.poll();
            if self.got.len() >= until {
                self.table.leave(self.number, &self.place.lower, handed);
                return;
            }
            if let Some(others) = self.arm() {
                let own = self.place.completions.wait().event();
                let mut all = vec![own];
                all.extend(others.iter().map(|p| p.device.wait.event()));
                epoll(&all);
                own.take();
                for place in &others {
                    place.lower.woken();
                }
                self.look = others;
            }
        }
    }

    /// True if it leaves lower queues whose completions would wake no queue.
    fn poll(&mut self) -> bool {
        self.table.finish_wait(self.place.completions.wait());
        let (got, mut ended) = (&mut self.got, Vec::new());
        self.place.completions.collect(|all| got.append(all));
        let mut armed = true;
        for place in self.look.drain(..) {
            armed &= place.lower.poll_unattended(&mut ended);
        }
        if ended.is_empty() && self.polls_unattended {
            for place in self.table.unattended(self.number) {
                armed &= place.lower.poll_unattended(&mut ended);
            }
        }
        let mine = step(&self.table, self.number, &mut ended);
        self.got.extend(mine);
        !armed
    }

    /// The lower queues to wait for besides the queue's own event; `None` if it may not sleep.
    fn arm(&mut self) -> Option<Vec<Arc<StackedQueue<P>>>> {
        let entry = self.place.completions.wait();
        self.table.prepare_to_wait(entry);
        let others = match self.polls_unattended {
            true => self.table.unattended(self.number),
            false => Vec::new(),
        };
        let is_ready = |p: &Arc<StackedQueue<P>>| p.lower.arm() == Readiness::Ready;
        let ready = others.iter().any(is_ready) || entry.is_pending();
        (!ready).then_some(others)
    }
}

/// Ways in which a queue stops being polled.
#[derive(Clone, Copy, PartialEq)]
enum Leave {
    InOrder,
    /// The queue is closed.
    Closing,
    /// The queue gave I/O to an unattended lower queue, and doesn't say so.
    NotTellingOfOthers,
}

/// A queue begins I/O that another one waits for, gets its own completion and isn't polled any more, while
/// the device works. `background`: the I/O goes to a lower queue that has no owner.
fn hand_over<P: Primitives<Event = LoomEvent>>(
    leave: Leave,
    background: bool,
    polls_unattended: bool,
) {
    let table = Table::<P>::default();
    let (_, no_owner) = open(&table);
    let mut sleeper = Sleeper::new(&table);
    sleeper.polls_unattended = polls_unattended;
    let (number, place) = open(&table);
    place.lower.attend();
    let lower = match background {
        true => Arc::clone(&no_owner),
        false => Arc::clone(&place),
    };
    let device = Arc::clone(&lower.device);
    let waits = sleeper.number;
    let leaver = {
        let table = Arc::clone(&table);
        loom::thread::spawn(move || {
            let handed = lower
                .lower
                .submit([OwnedCompletion::request(waits, 7)].into_iter());
            match leave {
                Leave::InOrder => table.leave(number, &place.lower, background && handed),
                Leave::Closing => table.close(number),
                Leave::NotTellingOfOthers => table.leave(number, &place.lower, false),
            }
        })
    };
    let medium = loom::thread::spawn(move || device.complete(1));
    sleeper.run(1);
    assert_eq!(
        sleeper.got,
        [OwnedCompletion {
            owner: waits,
            which: 7
        }]
    );
    leaver.join().expect("it ends");
    medium.join().expect("it ends");
}

#[test]
fn who_sleeps_takes_over_from_who_leaves() {
    explore(2, || hand_over::<Loom>(Leave::InOrder, false, true));
}

#[test]
fn who_sleeps_takes_over_from_a_queue_that_is_closed() {
    explore(2, || hand_over::<Loom>(Leave::Closing, false, true));
}

#[test]
fn who_sleeps_takes_over_what_has_no_owner() {
    explore(2, || hand_over::<Loom>(Leave::InOrder, true, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_io_that_is_handed_over_silently_is_lost() {
    explore(2, || {
        hand_over::<Loom>(Leave::NotTellingOfOthers, true, true)
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_sleeper_that_adopts_nothing_waits_for_ever() {
    explore(2, || hand_over::<Loom>(Leave::InOrder, false, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_full_barrier_nobody_takes_over() {
    explore(2, || hand_over::<NoBarrier>(Leave::InOrder, false, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_flag_that_is_only_stored_to_hides_an_earlier_wake_up() {
    explore(2, || hand_over::<StoreOnly>(Leave::InOrder, false, true));
}

/// Two queues sleep while I/O of a lower queue without an owner ends, one request after another.
fn shared(answers: &'static [usize]) {
    let table = Table::<Loom>::default();
    let (_, no_owner) = open(&table);
    let mut one = Sleeper::new(&table);
    let mut two = Sleeper::new(&table);
    let (first, second) = (one.number, two.number);
    let requests = answers.iter().enumerate().map(|(i, &whose)| {
        let owner = if whose == 0 { first } else { second };
        OwnedCompletion::request(owner, i as u64)
    });
    no_owner.lower.submit(requests);
    let count = |whose| answers.iter().filter(|&&a| a == whose).count();
    let (some, rest) = (count(0), count(1));
    let medium = {
        let device = Arc::clone(&no_owner.device);
        loom::thread::spawn(move || {
            for _ in answers {
                device.complete(1);
            }
        })
    };
    let other = loom::thread::spawn(move || {
        two.run(rest);
        two.got.len()
    });
    one.run(some);
    assert_eq!(one.got.len(), some);
    assert_eq!(other.join().expect("it ends"), rest);
    medium.join().expect("it ends");
}

#[test]
fn two_sleepers_share_a_lower_queue() {
    explore(2, || shared(&[0, 1]));
}
