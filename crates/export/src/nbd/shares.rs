//! State that connections share: the memory, the connections and the questions of one disk, and the connections of all disks.

use parking_lot::Mutex;
use pvblk_backend::{Budget, Disk};
use pvblk_block::{DiskThreads, Job};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Connections to one disk, unless told otherwise.
const MAX_OF_DISK: usize = 128;
/// Connections to all disks, unless told otherwise.
const MAX_OF_ALL: usize = 1024;

/// The share of every disk with connections, by name; one for all listeners of a process.
#[derive(Debug)]
pub struct Shares {
    max_of_disk: usize,
    max_of_all: usize,
    of_all: AtomicUsize,
    disks: Mutex<HashMap<String, Weak<DiskShare>>>,
}

impl Default for Shares {
    /// 128 connections to a disk, 1024 to all.
    fn default() -> Shares {
        Shares::new(MAX_OF_DISK, MAX_OF_ALL)
    }
}

impl Shares {
    /// Bounds for the connections of one disk and for those of all.
    pub fn new(max_of_disk: usize, max_of_all: usize) -> Shares {
        Shares {
            max_of_disk,
            max_of_all,
            of_all: AtomicUsize::new(0),
            disks: Mutex::default(),
        }
    }

    /// The share of a disk: that of the connections which it has, or a new one.
    pub(super) fn of(&self, disk: &Disk) -> Arc<DiskShare> {
        let mut disks = self.disks.lock();
        let share = disks.get(disk.name()).and_then(Weak::upgrade);
        // Another disk of the same name may have taken its place.
        if let Some(share) = share.filter(|s| Arc::ptr_eq(&s.memory, disk.memory())) {
            return share;
        }
        let share = Arc::new(DiskShare {
            memory: Arc::clone(disk.memory()),
            questions: Some(Arc::new(Questions::new(disk.aside()))),
            connections: AtomicUsize::new(0),
        });
        disks.retain(|_, share| share.strong_count() > 0);
        disks.insert(disk.name().to_owned(), Arc::downgrade(&share));
        share
    }

    /// Lets one more connection to a disk in, or says why not.
    pub(super) fn enter(
        self: &Arc<Shares>,
        name: &str,
        share: &Arc<DiskShare>,
    ) -> Result<Ticket, String> {
        let below = |n: &AtomicUsize, most: usize| {
            let one_more = |n| (n < most).then_some(n + 1);
            n.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more)
                .is_ok()
        };
        if !below(&share.connections, self.max_of_disk) {
            return Err(format!(
                "disk {name} has {} NBD connections, the most it may have: close some",
                self.max_of_disk
            ));
        }
        if !below(&self.of_all, self.max_of_all) {
            share.connections.fetch_sub(1, Ordering::AcqRel);
            return Err(format!(
                "the server has {} NBD connections, the most it may have: close some",
                self.max_of_all
            ));
        }
        Ok(Ticket {
            shares: Arc::clone(self),
            share: Arc::clone(share),
        })
    }
}

/// A place among the connections of a disk; given back when dropped.
pub(super) struct Ticket {
    shares: Arc<Shares>,
    pub(super) share: Arc<DiskShare>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.share.connections.fetch_sub(1, Ordering::AcqRel);
        self.shares.of_all.fetch_sub(1, Ordering::AcqRel);
    }
}

/// State that the connections to one disk share.
#[derive(Debug)]
pub(super) struct DiskShare {
    pub memory: Arc<Budget>,
    /// `None` where nobody knows the disk's threads: questions are asked at once then.
    pub questions: Option<Arc<Questions>>,
    connections: AtomicUsize,
}

impl DiskShare {
    /// Without bounds and without threads.
    pub(super) fn alone() -> Arc<DiskShare> {
        DiskShare::with_memory(Budget::unlimited())
    }

    /// The same with a bound for the memory.
    pub(super) fn with_memory(memory: Arc<Budget>) -> Arc<DiskShare> {
        Arc::new(DiskShare {
            memory,
            questions: None,
            connections: AtomicUsize::new(0),
        })
    }
}

/// Calls about a disk's extents, which its medium may hold up. One at a time is with the disk's threads, so that one that hangs leaves
/// the others to other calls; each connection has at most one here.
pub(super) struct Questions {
    aside: Arc<DiskThreads>,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    asking: bool,
    waiting: VecDeque<Job>,
}

impl Questions {
    fn new(aside: &Arc<DiskThreads>) -> Questions {
        Questions {
            aside: Arc::clone(aside),
            line: Mutex::default(),
        }
    }

    /// Runs `job` when it is its turn; false if there is no thread to be had.
    pub(super) fn ask(self: &Arc<Questions>, job: Job) -> bool {
        {
            let mut line = self.line.lock();
            if line.asking {
                line.waiting.push_back(job);
                return true;
            }
            line.asking = true;
        }
        let this = Arc::clone(self);
        let asked = self.aside.run(Box::new(move || this.work(job)));
        if asked.is_err() {
            // Those who came meanwhile wait for the next one.
            self.line.lock().asking = false;
        }
        asked.is_ok()
    }

    fn work(&self, mut job: Job) {
        loop {
            // One that panics has told about it; the others have their turn all the same.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            let mut line = self.line.lock();
            match line.waiting.pop_front() {
                Some(next) => job = next,
                None => {
                    line.asking = false;
                    return;
                }
            }
        }
    }

    /// Runs something that takes long but needs no medium.
    pub(super) fn leave(&self, job: Job) -> Result<(), Job> {
        self.aside.run(job)
    }
}

impl std::fmt::Debug for Questions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Questions").finish_non_exhaustive()
    }
}
