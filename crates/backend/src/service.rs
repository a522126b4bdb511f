//! [`Service`]: the disks that a process serves, the sources attached to them, and their orderly end.

use crate::backend::{Backend, Disk, SourceId};
use crate::source::{RequestSource, SourceEnd};
use crate::stopping::{StopTimes, Stopping};
use crate::users::User;
use parking_lot::{Condvar, Mutex, RwLock};
use pvblk_block::{Completion, Error, ErrorKind, Op, Readiness, Request, Status};
use pvblk_sys::Poller;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A source's key in the service.
pub type Key = u64;

/// How a disk's end went.
#[derive(Debug)]
pub struct DiskEnd {
    /// Its name.
    pub disk: String,
    /// `Ok`: all requests were answered, and all data is on stable storage.
    pub result: Result<(), Error>,
}

/// Disks in the order given, and every live source.
pub struct Service {
    backend: Backend,
    disks: RwLock<Vec<Arc<Disk>>>,
    live: Arc<Live>,
    next: AtomicU64,
}

#[derive(Default)]
struct Live {
    state: Mutex<State>,
    /// A source ended, or a disk's end is told.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    sources: HashMap<Key, Source>,
    stopping: bool,
    /// Ends of disks that nobody has taken yet.
    ends: Vec<DiskEnd>,
}

struct Source {
    disk: Arc<Disk>,
    /// `None` until the back end has it.
    id: Option<SourceId>,
    _user: Arc<User>,
}

impl State {
    /// The disks that have sources, by address.
    fn in_use(&self) -> HashSet<*const Disk> {
        let sources = self.sources.values();
        sources.map(|s| Arc::as_ptr(&s.disk)).collect()
    }
}

impl Service {
    /// Serves `disks` on the workers of `backend`.
    pub fn new(backend: Backend, disks: Vec<Arc<Disk>>) -> Service {
        Service {
            backend,
            disks: RwLock::new(disks),
            live: Arc::default(),
            next: AtomicU64::new(1),
        }
    }

    /// The disks now.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        self.disks.read().clone()
    }

    /// The disk of this name.
    pub fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        let disks = self.disks.read();
        disks.iter().find(|d| d.name() == name).map(Arc::clone)
    }

    /// Serves `source` of `user`, one of the disk's [`Users`](crate::Users); `ended` is called on a worker when all of it is gone. After an error it is never called.
    pub fn attach(
        &self,
        disk: &Arc<Disk>,
        user: &Arc<User>,
        source: Box<dyn RequestSource>,
        ended: impl FnOnce(SourceEnd) + Send + 'static,
    ) -> Result<Key, Error> {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Source {
            disk: Arc::clone(disk),
            id: None,
            _user: Arc::clone(user),
        };
        {
            let mut state = self.live.state.lock();
            if state.stopping {
                let why = format!("disk {}: the server is stopping", disk.name());
                return Err(Error::new(ErrorKind::Disconnected, why));
            }
            // Before the worker knows it: it may end at once.
            state.sources.insert(key, entry);
        }
        let live = Arc::clone(&self.live);
        let on_end = move |end| {
            live.state.lock().sources.remove(&key);
            live.changed.notify_all();
            ended(end);
        };
        let attached = self.backend.attach(disk, source, Box::new(on_end));
        let mut state = self.live.state.lock();
        match attached {
            Ok(id) => {
                if let Some(entry) = state.sources.get_mut(&key) {
                    entry.id = Some(id);
                }
                if state.stopping {
                    // A stop that came in between couldn't name it yet.
                    self.backend.detach(id);
                }
                Ok(key)
            }
            Err(e) => {
                state.sources.remove(&key);
                Err(e)
            }
        }
    }

    /// Stops a source after what it has outstanding.
    pub fn detach(&self, key: Key) {
        let state = self.live.state.lock();
        if let Some(id) = state.sources.get(&key).and_then(|s| s.id) {
            self.backend.detach(id);
        }
    }

    /// Looks at all backings again, each on a thread of its own disk. Doesn't wait: a disk whose medium hangs learns of its size when
    /// it comes back.
    pub fn refresh(&self) {
        self.disks.read().iter().for_each(Disk::refresh);
    }

    /// Takes no more sources, lets what is in flight complete, then flushes and closes each disk, side by side: a disk
    /// that fails or hangs keeps nothing from the others. A disk whose requests don't end in time is flushed all the same.
    ///
    /// Returns within the sum of `times`, with an end for each disk. Disks that ended well have left the service, so that their
    /// descriptors and locks are free even if the process can't end.
    pub fn stop(&self, times: StopTimes) -> Vec<DiskEnd> {
        let begin = Instant::now();
        let mut state = self.live.state.lock();
        state.stopping = true;
        for id in state.sources.values().filter_map(|s| s.id) {
            self.backend.detach(id);
        }
        drop(state);
        let disks = self.disks();
        let mut stopping = Stopping::new(disks.len(), begin, times);
        let mut ends = Vec::new();
        loop {
            let mut state = self.live.state.lock();
            for end in state.ends.drain(..) {
                let number = disks.iter().position(|d| d.name() == end.disk);
                // One that was given up before has its end already.
                if number.is_some_and(|n| stopping.ended(n)) {
                    ends.push(end);
                }
            }
            let in_use = state.in_use();
            let turn = stopping.turn(Instant::now(), |n| in_use.contains(&Arc::as_ptr(&disks[n])));
            ends.extend(turn.stuck.into_iter().map(|n| DiskEnd {
                disk: disks[n].name().to_owned(),
                result: Err(stuck_error("flush", times.flush)),
            }));
            if stopping.is_over() {
                break;
            }
            if turn.flush.is_empty() {
                let wait = Duration::from_millis(100);
                self.live.changed.wait_for(&mut state, wait);
                continue;
            }
            drop(state);
            for (n, drained) in turn.flush {
                self.end_disk(Arc::clone(&disks[n]), drained, times);
            }
        }
        let ended = |name: &str| ends.iter().any(|e| e.disk == name && e.result.is_ok());
        self.disks.write().retain(|d| !ended(d.name()));
        ends
    }

    /// Flushes and closes `disk` on a thread of its own, and tells its end.
    fn end_disk(&self, disk: Arc<Disk>, drained: bool, times: StopTimes) {
        let live = Arc::clone(&self.live);
        let name = disk.name().to_owned();
        let aside = Arc::clone(disk.aside());
        let job = move || {
            let result = end_of(&disk, drained, times);
            let end = DiskEnd {
                disk: disk.name().to_owned(),
                result,
            };
            // Gone before it is told: the device's descriptors are closed with it.
            drop(disk);
            live.state.lock().ends.push(end);
            live.changed.notify_all();
        };
        if aside.run(Box::new(job)).is_err() {
            let why = "no thread for its last flush";
            self.live.state.lock().ends.push(DiskEnd {
                disk: name,
                result: Err(Error::new(ErrorKind::Exhausted, why)),
            });
        }
    }
}

fn stuck_error(what: &str, after: Duration) -> Error {
    let why = format!(
        "stuck: its last {what} didn't end within {} s; writes since its last completed flush may be lost",
        after.as_secs()
    );
    Error::new(ErrorKind::Os, why)
}

/// The end of one disk: what was written goes to stable storage, and the device tells its backing that all is well.
fn end_of(disk: &Disk, drained: bool, times: StopTimes) -> Result<(), Error> {
    let device = disk.device();
    if !disk.no_more_questions(times.flush) {
        return Err(stuck_error("question", times.flush));
    }
    let flushed = match device.limits().read_only {
        true => Ok(()),
        false => flush(disk, times.flush),
    };
    if !drained {
        let flushed = match flushed {
            Ok(()) => "what was answered is flushed".to_owned(),
            Err(e) => format!("and the flush failed: {e}"),
        };
        let why = format!(
            "stuck: requests were still in flight after {} s and are given up; {flushed}",
            times.drain.as_secs()
        );
        return Err(Error::new(ErrorKind::Os, why));
    }
    flushed?;
    device.close()
}

/// One FLUSH on a queue of its own.
fn flush(disk: &Disk, patience: Duration) -> Result<(), Error> {
    let deadline = Instant::now() + patience;
    let (mut queue, _) = disk.open_queue(1)?;
    queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
    let mut done: Vec<Completion> = Vec::new();
    let poller = Poller::new().map_err(|e| Error::os("waiting for the last flush", e))?;
    let mut waits = false;
    loop {
        if queue.poll(&mut done) > 0 {
            break;
        }
        let now = Instant::now();
        if now > deadline {
            return Err(stuck_error("flush", patience));
        }
        let Readiness::Wait(until) = queue.arm() else {
            continue;
        };
        if let (false, Some(fd)) = (waits, queue.wait_fd()) {
            waits = poller.add(fd, 0, false).is_ok();
        }
        // A device without a descriptor is asked again soon.
        let most = Duration::from_millis(if waits { 100 } else { 1 });
        let until = until.map_or(most, |t| t.saturating_duration_since(now).min(most));
        let _ = poller.wait(&mut Vec::new(), Some(until));
        queue.woken();
    }
    match done[0].status {
        Status::Ok => Ok(()),
        status => {
            let why = format!(
                "its last flush failed ({status:?}); writes since its last completed flush may be lost"
            );
            Err(Error::new(ErrorKind::Os, why))
        }
    }
}
