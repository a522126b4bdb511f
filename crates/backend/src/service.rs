//! [`Service`]: the disks that a process serves, their front ends and clients, and their orderly end. The servers of all exports
//! work on it, and on nothing else of their process.

use crate::active::ActiveList;
use crate::backend::{Backend, Disk, SourceId};
use crate::disks::Disks;
use crate::events::EventLog;
use crate::pressure::Pressure;
use crate::source::{RequestSource, SourceEnd};
use crate::stopping::{StopTimes, Stopping};
use crate::throttle::Connection;
use crate::users::{FenceOpened, Place, User};
use parking_lot::{Condvar, Mutex};
use pvblk_block::{Completion, DeviceEvent, Error, ErrorKind, Op, Readiness, Request, Status};
use pvblk_sys::Poller;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// A source's key in the service.
pub type Key = u64;

/// The end of a disk.
#[derive(Debug)]
pub struct DiskEnd {
    pub disk: String,
    /// `Ok`: all requests have completed, and all data is stable.
    pub result: Result<(), Error>,
}

/// Disks, and every live source of requests to them.
pub struct Service {
    backend: Backend,
    disks: Arc<Disks>,
    active: Arc<ActiveList>,
    pressure: Arc<Pressure>,
    events: Arc<EventLog>,
    live: Arc<LiveSources>,
    /// Of the next source, and of the next front end.
    next: AtomicU64,
    next_front: AtomicU64,
}

#[derive(Default)]
struct LiveSources {
    state: Mutex<ServiceState>,
    /// Signalled when a source ended, or a disk's end is known.
    changed: Condvar,
}

#[derive(Default)]
struct ServiceState {
    sources: HashMap<Key, Source>,
    stopping: bool,
    /// Ends of disks that were not returned yet, with the address of each.
    ends: Vec<(usize, DiskEnd)>,
    /// Disks that were taken out and haven't ended.
    retired: Vec<Retired>,
}

/// A disk that nobody finds any more, until it is flushed and closed.
struct Retired {
    disk: Arc<Disk>,
    times: StopTimes,
    /// Its last flush is under way.
    ending: bool,
    ended: Option<Box<dyn FnOnce(DiskEnd) + Send>>,
}

struct Source {
    disk: Arc<Disk>,
    /// `None` until the back end has the source.
    id: Option<SourceId>,
    /// Its user's; keeps the disk's fence closed if the user is gone.
    _place: Arc<Place>,
}

/// A front end's use of a disk, with its sources. A drop means that the front end is gone: its sources stop
/// after their outstanding requests have completed, and until then the disk's fence is closed.
pub struct Attachment {
    service: Arc<Service>,
    disk: Arc<Disk>,
    /// Set until it is dropped.
    user: Option<User>,
    /// The connection that its sources are for limits and counters; from the first source on.
    connection: Option<Arc<Connection>>,
    /// Its sources, and some that have ended.
    keys: Vec<Key>,
}

impl ServiceState {
    /// The disks that have sources, by address.
    fn in_use(&self) -> HashSet<*const Disk> {
        let sources = self.sources.values();
        sources.map(|s| Arc::as_ptr(&s.disk)).collect()
    }
}

impl Service {
    /// Serves `disks` on the workers of `backend`; their memory gives way to `pressure`.
    pub fn new(backend: Backend, disks: Disks, pressure: Arc<Pressure>) -> Arc<Service> {
        let events = Arc::<EventLog>::default();
        let active = Arc::<ActiveList>::default();
        pressure.tell(&events);
        for disk in disks.all() {
            pressure.add_device(disk.device());
            disk.health().link(&events);
            disk.enlist(&active);
        }
        Arc::new(Service {
            events,
            active,
            backend,
            disks: Arc::new(disks),
            pressure,
            live: Arc::default(),
            next: AtomicU64::new(1),
            next_front: AtomicU64::new(1),
        })
    }

    /// Serves one more disk: peers that name it from now on find it. Errors if there is one of its name, or if the service is stopping.
    pub fn add(&self, disk: Arc<Disk>) -> Result<(), Error> {
        // Under the lock, so that a stop sees it.
        let state = self.live.state.lock();
        if state.stopping {
            let why = format!("disk {}: the server is stopping", disk.name());
            return Err(Error::new(ErrorKind::Disconnected, why));
        }
        self.disks.add(Arc::clone(&disk))?;
        self.pressure.add_device(disk.device());
        disk.health().link(&self.events);
        disk.enlist(&self.active);
        Ok(())
    }

    /// Takes a disk out of service: nobody finds it any more, nobody is let in, and front ends and clients that are there lose it when their
    /// outstanding requests have completed. Its name is free on return. The device stays open and locked until then; at last it is flushed, closed and dropped on a thread of the
    /// disk, and `ended` is told. No limit of time holds for the requests; one of `patience` holds for the flush.
    ///
    /// Errors if the service is stopping: the stop flushes the disk. A stop that begins later waits for the disk as for all others, and drops `ended`.
    pub fn retire(
        &self,
        disk: &Arc<Disk>,
        patience: Duration,
        ended: impl FnOnce(DiskEnd) + Send + 'static,
    ) -> Result<(), Error> {
        let mut state = self.live.state.lock();
        if state.stopping || !self.disks.remove_this(disk) {
            let why = match state.stopping {
                true => format!("disk {}: the server is stopping", disk.name()),
                false => format!("there is no disk {}", disk.name()),
            };
            return Err(Error::new(ErrorKind::Disconnected, why));
        }
        // With `force` it can't fail.
        let _ = disk.users().close(true);
        state.retired.push(Retired {
            disk: Arc::clone(disk),
            times: StopTimes {
                drain: Duration::MAX,
                flush: patience,
            },
            ending: false,
            ended: Some(Box::new(ended)),
        });
        let of_disk = state
            .sources
            .values()
            .filter(|s| Arc::ptr_eq(&s.disk, disk));
        of_disk
            .filter_map(|s| s.id.as_ref())
            .for_each(|id| self.backend.detach(id));
        drop(state);
        disk.health().retire();
        disk.device().events().raise(DeviceEvent::Gone);
        self.live.end_if_drained(disk);
        Ok(())
    }

    /// Makes everything stable that was answered, on a thread of the disk; waits for it until `patience` is over.
    pub fn flush(&self, disk: &Arc<Disk>, patience: Duration) -> Result<(), Error> {
        if disk.device().limits().read_only {
            return Ok(());
        }
        let (tell, told) = sync_channel(1);
        let flushed = Arc::clone(disk);
        let job = move || {
            let result = flush(&flushed, patience);
            drop(flushed);
            let _ = tell.send(result);
        };
        let no_thread = |_| Error::new(ErrorKind::Exhausted, "no thread for its flush");
        disk.aside().run(Box::new(job)).map_err(no_thread)?;
        told.recv_timeout(patience + Duration::from_secs(1))
            .unwrap_or_else(|_| Err(stuck_error("flush", patience)))
    }

    /// Disks that were taken out of service and haven't ended, each with the number of its sources.
    pub fn retired(&self) -> Vec<(Arc<Disk>, usize)> {
        let state = self.live.state.lock();
        let sources = |disk: &Arc<Disk>| {
            let all = state.sources.values();
            all.filter(|s| Arc::ptr_eq(&s.disk, disk)).count()
        };
        let all = state.retired.iter();
        all.map(|r| (Arc::clone(&r.disk), sources(&r.disk)))
            .collect()
    }

    /// Its workers, and the lanes of its sources.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn disks(&self) -> &Arc<Disks> {
        &self.disks
    }

    /// The last events of the process.
    pub fn events(&self) -> &Arc<EventLog> {
        &self.events
    }

    /// To be called once a second or so: looks for requests that are older than `limit`, and tells events that were left out. False if there is
    /// nothing to look at for now: a call may wait until [`Service::when_active`] tells of something, or for some seconds.
    pub fn look(&self, limit: Duration) -> bool {
        let has_disks = self.active.look(limit);
        self.events.tick() || has_disks
    }

    /// From now on `call` is called when there is something to look at and there was nothing; on a worker, so it mustn't wait. Once.
    pub fn when_active(&self, call: impl Fn() + Send + Sync + 'static) {
        self.active.when_filled(call);
    }

    /// The pressure that the buffers for users' data give way to.
    pub fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    /// Lets a front end use a disk; `None` while the disk's fence is closed: `opened` is called when it opens. Errors if the disk is
    /// exclusive and has a user.
    pub fn enter(
        self: &Arc<Service>,
        disk: &Arc<Disk>,
        front: &str,
        opened: &FenceOpened,
    ) -> Result<Option<Attachment>, Error> {
        // Front ends choose their names, and two may choose the same.
        let number = self.next_front.fetch_add(1, Ordering::Relaxed);
        let name = format!("{front} (front end {number})");
        let user = disk.users().enter(&name, opened)?;
        Ok(user.map(|user| Attachment {
            service: Arc::clone(self),
            disk: Arc::clone(disk),
            user: Some(user),
            connection: None,
            keys: Vec::new(),
        }))
    }

    /// Serves the one source of a client, which ends by itself; clients of one name are one user. `ended` is called on a worker when all of
    /// the source is gone; after an error never.
    pub fn serve_client(
        &self,
        disk: &Arc<Disk>,
        name: &str,
        source: Box<dyn RequestSource>,
        ended: impl FnOnce(SourceEnd) + Send + 'static,
    ) -> Result<(), Error> {
        let place = disk.users().enter_client(name)?;
        self.attach(disk, place, None, source, ended).map(drop)
    }

    fn attach(
        &self,
        disk: &Arc<Disk>,
        place: Arc<Place>,
        connection: Option<Arc<Connection>>,
        source: Box<dyn RequestSource>,
        ended: impl FnOnce(SourceEnd) + Send + 'static,
    ) -> Result<Key, Error> {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Source {
            disk: Arc::clone(disk),
            id: None,
            _place: place,
        };
        {
            let mut state = self.live.state.lock();
            if state.stopping || disk.users().is_closed() {
                let why = match state.stopping {
                    true => format!("disk {}: the server is stopping", disk.name()),
                    false => format!("disk {} is being removed", disk.name()),
                };
                return Err(Error::new(ErrorKind::Disconnected, why));
            }
            // The entry comes before the worker knows the source, which may end at once.
            state.sources.insert(key, entry);
        }
        let live = Arc::clone(&self.live);
        let on_end = move |end| {
            let source = live.state.lock().sources.remove(&key);
            live.changed.notify_all();
            // Not under the lock: the last source of a front end that is gone opens the fence.
            let disk = source.as_ref().map(|s| Arc::clone(&s.disk));
            drop(source);
            ended(end);
            if let Some(disk) = disk {
                live.end_if_drained(&disk);
            }
        };
        let attached = self
            .backend
            .attach_as(disk, connection, source, Box::new(on_end));
        let mut state = self.live.state.lock();
        let (entry, result) = match attached {
            Ok(id) => {
                if state.stopping || disk.users().is_closed() {
                    // A stop or removal that came in between couldn't name the source yet.
                    self.backend.detach(&id);
                }
                if let Some(entry) = state.sources.get_mut(&key) {
                    entry.id = Some(id);
                }
                (None, Ok(key))
            }
            Err(e) => (state.sources.remove(&key), Err(e)),
        };
        drop(state);
        drop(entry);
        result
    }

    /// Stops sources after their outstanding requests have completed.
    fn detach(&self, keys: &[Key]) {
        let state = self.live.state.lock();
        let sources = keys.iter().filter_map(|key| state.sources.get(key));
        sources
            .filter_map(|s| s.id.as_ref())
            .for_each(|id| self.backend.detach(id));
    }

    /// Looks at all backings again, each on a thread of its own disk. Doesn't wait: the new size of a disk
    /// whose medium hangs is seen when the medium goes on.
    pub fn refresh(&self) {
        self.disks.all().iter().for_each(Disk::refresh);
    }

    /// Takes no more sources, lets requests in flight complete, then flushes and closes each disk, side by
    /// side: a disk that fails or hangs doesn't affect the others. A disk whose requests don't end in time is
    /// flushed all the same.
    ///
    /// Returns within the sum of `times`, and a second later for each 64 disks more whose flush hangs; with an end
    /// for each disk. Disks that ended well have left the service, so that their descriptors and locks are free even
    /// if the process can't end.
    pub fn stop(&self, times: StopTimes) -> Vec<DiskEnd> {
        let begin = Instant::now();
        let mut state = self.live.state.lock();
        state.stopping = true;
        for id in state.sources.values().filter_map(|s| s.id.as_ref()) {
            self.backend.detach(id);
        }
        let mut disks = self.disks.all();
        let mut begun = HashSet::new();
        for retired in &mut state.retired {
            if retired.ending {
                begun.insert(disks.len());
            }
            disks.push(Arc::clone(&retired.disk));
            retired.ended = None;
        }
        drop(state);
        let mut stopping = Stopping::new(disks.len(), begin, times);
        let mut ends = Vec::new();
        loop {
            let mut state = self.live.state.lock();
            for (address, end) in state.ends.drain(..) {
                let number = disks.iter().position(|d| address_of(d) == address);
                // A disk that was given up before has its end already.
                if let Some(n) = number.filter(|&n| stopping.ended(n)) {
                    ends.push((n, end));
                }
            }
            let in_use = state.in_use();
            let turn = stopping.turn(Instant::now(), |n| in_use.contains(&Arc::as_ptr(&disks[n])));
            ends.extend(turn.stuck.into_iter().map(|n| {
                let end = DiskEnd {
                    disk: disks[n].name().to_owned(),
                    result: Err(stuck_error("flush", times.flush)),
                };
                (n, end)
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
            // Those whose removal had come that far report by themselves.
            for (n, drained) in turn.flush.into_iter().filter(|(n, _)| !begun.contains(n)) {
                self.live.end_disk(Arc::clone(&disks[n]), drained, times);
            }
        }
        for (n, _) in ends.iter().filter(|(_, end)| end.result.is_ok()) {
            self.disks.remove_this(&disks[*n]);
        }
        ends.into_iter().map(|(_, end)| end).collect()
    }
}

fn address_of(disk: &Arc<Disk>) -> usize {
    Arc::as_ptr(disk) as usize
}

impl LiveSources {
    /// Begins the end of a disk that was taken out, if nothing of it is at work any more. A stop ends all disks itself.
    fn end_if_drained(self: &Arc<LiveSources>, disk: &Arc<Disk>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut used = state.sources.values();
        if state.stopping || used.any(|s| Arc::ptr_eq(&s.disk, disk)) {
            return;
        }
        let ours = |r: &&mut Retired| Arc::ptr_eq(&r.disk, disk) && !r.ending;
        if let Some(retired) = state.retired.iter_mut().find(ours) {
            // Without a thread it stays as it is, until the service stops.
            retired.ending = self.run_end(Arc::clone(disk), true, retired.times).is_ok();
        }
    }

    /// Flushes and closes `disk` on a thread of its own, and reports its end.
    fn end_disk(self: &Arc<LiveSources>, disk: Arc<Disk>, drained: bool, times: StopTimes) {
        let (name, address) = (disk.name().to_owned(), address_of(&disk));
        if let Err(e) = self.run_end(disk, drained, times) {
            let end = DiskEnd {
                disk: name,
                result: Err(e),
            };
            self.state.lock().ends.push((address, end));
        }
    }

    fn run_end(
        self: &Arc<LiveSources>,
        disk: Arc<Disk>,
        drained: bool,
        times: StopTimes,
    ) -> Result<(), Error> {
        let live = Arc::clone(self);
        let address = address_of(&disk);
        let aside = Arc::clone(disk.aside());
        let job = move || {
            let result = end_of(&disk, drained, times);
            let end = DiskEnd {
                disk: disk.name().to_owned(),
                result,
            };
            // The disk is dropped before the report: the device's descriptors are closed with it.
            let ours = |r: &Retired| Arc::ptr_eq(&r.disk, &disk);
            let retired = {
                let mut state = live.state.lock();
                let place = state.retired.iter().position(ours);
                place.map(|i| state.retired.swap_remove(i))
            };
            drop(disk);
            let told = retired.and_then(|r| r.ended);
            match told {
                Some(told) => told(end),
                None => live.state.lock().ends.push((address, end)),
            }
            live.changed.notify_all();
        };
        let no_thread = |_| Error::new(ErrorKind::Exhausted, "no thread for its last flush");
        aside.run(Box::new(job)).map_err(no_thread)
    }
}

impl Attachment {
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Serves one more source; `ended` is called on a worker when all of it is gone, after an error never.
    pub fn serve(
        &mut self,
        source: Box<dyn RequestSource>,
        ended: impl FnOnce(SourceEnd) + Send + 'static,
    ) -> Result<Key, Error> {
        let Some(user) = &self.user else {
            unreachable!("it has a user until it is dropped");
        };
        let place = Arc::clone(user.place());
        let connection = self
            .connection
            .get_or_insert_with(|| Connection::new(source.connection()));
        let connection = Some(Arc::clone(connection));
        let key = self
            .service
            .attach(&self.disk, place, connection, source, ended)?;
        let state = self.service.live.state.lock();
        self.keys.retain(|k| state.sources.contains_key(k));
        drop(state);
        self.keys.push(key);
        Ok(key)
    }

    /// Stops one source after its outstanding requests have completed.
    pub fn stop(&self, key: Key) {
        self.service.detach(&[key]);
    }

    /// The front end is gone: as dropping it. True if no source is left; otherwise `ended` is called when the last one has ended and the fence
    /// is open, as far as this front end goes.
    pub fn leave(self, ended: impl FnOnce() + Send + 'static) -> bool {
        match &self.user {
            Some(user) if !user.is_idle() => user.at_end(ended),
            _ => return true,
        }
        false
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // The fence closes first.
        self.user = None;
        self.service.detach(&self.keys);
    }
}

fn stuck_error(what: &str, after: Duration) -> Error {
    let why = format!(
        "stuck: its last {what} didn't end within {} s; writes since its last completed flush may be lost",
        after.as_secs()
    );
    Error::new(ErrorKind::Os, why)
}

/// Ends one disk: flushes the written data, and closes the device in order.
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
    let (mut queue, _) = disk.open_queue(1, Arc::default())?;
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
