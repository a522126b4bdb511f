//! [`ActiveList`]: the disks that are to be looked at once a second, since requests of theirs are in flight or hang, or a lane is blocked. A disk without any
//! of that costs nothing, so ten thousand may be served; and while the list is empty nobody needs to look at all.
//!
//! A lane puts its disk on the list, and a look takes it off. Each first stores what it did, the lane a count and the look a flag, and then reads what the
//! other has stored, with a full fence between the two, as at the [gate](crate::gate). So one of them sees the other, and no disk with a request in flight is
//! off the list for long.

use crate::counters::DiskCounters;
use crate::events::Health;
use crate::throttle::Throttle;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The parts of a disk that a look needs. They don't keep its device open.
pub(crate) struct Looked {
    pub place: Arc<Place>,
    pub counters: Arc<DiskCounters>,
    pub health: Arc<Health>,
    pub throttle: Arc<Throttle>,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct ActiveList {
    /// Each at most once.
    disks: Mutex<Vec<Weak<Looked>>>,
    /// Called when a disk comes to an empty list.
    filled: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A disk's place on the list.
#[derive(Debug, Default)]
pub(crate) struct Place {
    /// The disk has a list and isn't on it.
    is_off: AtomicBool,
    list: OnceLock<(Weak<ActiveList>, Weak<Looked>)>,
}

impl std::fmt::Debug for ActiveList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ActiveList").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Looked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Looked").finish_non_exhaustive()
    }
}

impl Place {
    /// Gives the disk a list, which it isn't on. Once.
    pub fn link(&self, list: &Arc<ActiveList>, disk: &Arc<Looked>) {
        let link = (Arc::downgrade(list), Arc::downgrade(disk));
        if self.list.set(link).is_ok() {
            self.is_off.store(true, Ordering::SeqCst);
        }
    }

    /// Puts the disk on its list, if it isn't there. The reason for a look is stored, and a full fence has followed.
    #[inline]
    pub fn join(&self) {
        if self.is_off.load(Ordering::Relaxed) {
            self.enter();
        }
    }

    #[cold]
    fn enter(&self) {
        let Some((list, disk)) = self.list.get() else {
            return;
        };
        if self.is_off.swap(false, Ordering::SeqCst)
            && let Some(list) = list.upgrade()
        {
            list.push(Weak::clone(disk));
        }
    }

    /// The disk leaves the list if it isn't active. False if it stays there; true also if a lane has put it back.
    fn leave(&self, is_active: impl Fn() -> bool) -> bool {
        if is_active() {
            return false;
        }
        self.is_off.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        !(is_active() && self.is_off.swap(false, Ordering::SeqCst))
    }
}

impl ActiveList {
    /// From now on `call` is called when a disk comes to the list while it is empty, on the thread that serves the disk. Once.
    pub fn when_filled(&self, call: impl Fn() + Send + Sync + 'static) {
        let is_first = self.filled.set(Box::new(call)).is_ok();
        debug_assert!(is_first, "somebody is told already");
    }

    fn push(&self, disk: Weak<Looked>) {
        let mut disks = self.disks.lock();
        let was_empty = disks.is_empty();
        disks.push(disk);
        drop(disks);
        if was_empty && let Some(call) = self.filled.get() {
            call();
        }
    }

    /// Looks for requests that are older than `limit`, and for disks whose limits hold requests back. True if disks are on the list then.
    pub fn look(&self, limit: Duration) -> bool {
        let mut listed = std::mem::take(&mut *self.disks.lock());
        listed.retain(|disk| disk.upgrade().is_some_and(|disk| disk.look(limit)));
        let mut now = self.disks.lock();
        if now.is_empty() {
            *now = listed;
        } else {
            now.append(&mut listed);
        }
        !now.is_empty()
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.disks.lock().len()
    }
}

impl Looked {
    /// True if the disk stays on the list.
    fn look(&self, limit: Duration) -> bool {
        let limited = self.throttle.is_on();
        let age = self.counters.look(limited);
        self.health.oldest(age.filter(|&age| age >= limit), limit);
        if limited {
            let held = self.throttle.held_back();
            if let Some(since) = held.since {
                self.health.held_back(held.requests, since);
            }
        }
        let is_active = || self.counters.is_busy() || self.health.may_hang();
        !self.place.leave(is_active)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counting;
    use crate::stall::Stall;
    use crate::throttle::Connection;
    use pvblk_block::{Completion, Condition, Op, Request, Status, SystemClock};
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    const LIMIT: Duration = Duration::from_secs(3600);

    fn disk(list: &Arc<ActiveList>) -> (Arc<Looked>, Arc<Stall>) {
        let place = Arc::<Place>::default();
        let stall = Arc::new(Stall::at(&place));
        let health = Health::new("a", Condition::Whole, &stall, Arc::new(SystemClock));
        let looked = Arc::new(Looked {
            counters: Arc::new(DiskCounters::at(&place)),
            health: Arc::new(health),
            throttle: Arc::default(),
            place,
        });
        looked.place.link(list, &looked);
        (looked, stall)
    }

    fn take(lane: &Counting) -> Vec<Box<Request>> {
        let mut batch = vec![Request::new(Op::Flush, 0, 0, 0)];
        lane.taken(&mut batch, lane.now(), true);
        lane.fence_and_join();
        batch
    }

    fn end(lane: &Counting, batch: Vec<Box<Request>>) {
        let status = Status::Ok;
        let done = batch.into_iter();
        let done: Vec<_> = done.map(|request| Completion { request, status }).collect();
        lane.ended(&done, lane.now(), 0);
    }

    #[test]
    fn a_disk_is_on_the_list_while_a_request_is_in_flight() {
        let list = Arc::<ActiveList>::default();
        let ((a, _), (b, stall)) = (disk(&list), disk(&list));
        let lane = a.counters.open(&Connection::new("c".into()), "q".into());
        assert_eq!(list.len(), 0);
        for _ in 0..3 {
            let batch = take(&lane);
            lane.fence_and_join();
            for _ in 0..2 {
                assert_eq!(list.len(), 1);
                list.look(LIMIT);
            }
            end(&lane, batch);
            assert_eq!(list.len(), 1);
            list.look(LIMIT);
            assert_eq!(list.len(), 0);
        }
        // A lane that is blocked has no request, perhaps.
        for _ in 0..2 {
            let blocked = stall.begin("b, queue 0", Instant::now());
            list.look(LIMIT);
            assert_eq!(list.len(), 1);
            blocked.end(Instant::now());
            list.look(LIMIT);
            assert_eq!(list.len(), 0);
        }
        let _batch = take(&lane);
        let _blocked = stall.begin("b, queue 0", Instant::now());
        assert_eq!(list.len(), 2);
        drop(b);
        list.look(LIMIT);
        assert_eq!(list.len(), 1, "the disk is gone");
    }

    #[test]
    fn a_list_tells_when_it_is_empty_no_more() {
        let list = Arc::<ActiveList>::default();
        let ((disk, _), (other, _)) = (disk(&list), disk(&list));
        let told = Arc::<AtomicU64>::default();
        let tells = Arc::clone(&told);
        list.when_filled(move || {
            tells.fetch_add(1, Ordering::SeqCst);
        });
        let told = || told.load(Ordering::SeqCst);
        let open = |disk: &Looked| {
            let counters = &disk.counters;
            counters.open(&Connection::new("c".into()), "q".into())
        };
        let (lane, others) = (open(&disk), open(&other));
        for round in 1..3 {
            assert!(!list.look(LIMIT), "nothing is listed");
            let batch = take(&lane);
            lane.fence_and_join();
            assert_eq!(told(), round);
            let second = take(&others);
            others.fence_and_join();
            assert!(list.look(LIMIT));
            end(&lane, batch);
            end(&others, second);
            assert_eq!(told(), round, "it wasn't empty");
        }
    }

    #[test]
    fn a_request_that_is_taken_during_a_look_is_not_missed() {
        let list = Arc::<ActiveList>::default();
        let (disk, _) = disk(&list);
        let lane = disk.counters.open(&Connection::new("c".into()), "q".into());
        let looks = AtomicU64::new(0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    list.look(LIMIT);
                    looks.fetch_add(1, Ordering::SeqCst);
                }
            });
            // On a loaded machine each round takes long.
            let begin = Instant::now();
            for _ in 0..3_000 {
                if begin.elapsed() > Duration::from_secs(2) {
                    break;
                }
                let batch = take(&lane);
                let seen = looks.load(Ordering::SeqCst);
                while looks.load(Ordering::SeqCst) < seen + 2 {
                    std::thread::yield_now();
                }
                let is_off = disk.place.is_off.load(Ordering::SeqCst);
                assert!(!is_off, "a request is in flight");
                end(&lane, batch);
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
