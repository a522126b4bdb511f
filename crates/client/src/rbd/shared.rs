//! The state of an image, its lock, and what happens when the lock is in doubt. docs/decisions/0031-rbd.md has the states.

use super::clusters;
use super::objects::Objects;
use super::planted::{Plant, has};
use super::queue::Inbox;
use super::spec::{OnLostLock, RbdSpec, failed};
use parking_lot::Mutex;
use pvblk_block::stacked::CompletionQueue;
use pvblk_block::{Capacity, DeviceEvent, DiskThreads, Error, ErrorKind, EventHub, Limits, SECTOR};
use pvblk_sys::librbd::{Cluster, Image, features};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// The number of the error of a blocked client instance.
pub(super) const ESHUTDOWN: i32 = 108;
/// The number of the error of a request for which the lock is missing.
pub(super) const EROFS: i32 = 30;
const ETIMEDOUT: i32 = 110;
const EPERM: i32 = 1;
const EACCES: i32 = 13;

/// Interval of looks at the lock while requests come, in milliseconds.
const LOOK_MILLISECONDS: u64 = 1000;
/// Pause before the next attempt to connect.
const AGAIN: Duration = Duration::from_secs(1);
/// Pause before requests are sent again that the cluster refused although the lock is ours.
const SOON: Duration = Duration::from_millis(50);
/// Longest time from the block of an owner to the break of its lock. An image of a connection that was blocked for no image's lock waits so long.
const THIEF: Duration = Duration::from_secs(5);
/// Longest time of closing the image.
const CLOSE: Duration = Duration::from_secs(10);
/// Connections that are tried one after another while each is blocked at once: then the whole machine is.
const MOST_BLOCKED: u32 = 5;

/// The open image, as queues use it.
#[derive(Clone)]
pub(super) struct Live {
    pub image: Arc<Image>,
    /// Another one after each doubt.
    pub number: u64,
}

/// The open image as an idle queue has it: closing doesn't wait for queues that nobody polls.
#[derive(Clone)]
pub(super) struct Idle {
    image: Weak<Image>,
    pub number: u64,
}

impl Idle {
    /// `None` once the image is being closed; the queue's mode changed before that.
    #[inline]
    pub fn live(&self) -> Option<Live> {
        let (image, number) = (self.image.upgrade()?, self.number);
        Some(Live { image, number })
    }
}

/// Permission of a queue to send requests.
#[derive(Clone)]
pub(super) enum Mode {
    Send(Idle),
    /// Requests wait for the next mode.
    Park,
    /// The lock is lost, and requests wait until the disk ends.
    ParkForEver,
    Fail,
}

enum State {
    Held(Held),
    /// A thread finds out what became of the lock.
    InDoubt,
    Lost(String),
    Closed,
}

#[derive(Clone)]
struct Held {
    live: Live,
    /// Address of the client instance, if it has the lock.
    owner: Option<String>,
}

/// The part of a move that is done, for the case that the next connection is blocked as well.
struct Move {
    /// Address of the blocked instance that has the lock.
    owner: String,
    /// That lock is broken, so nobody has it.
    is_broken: bool,
}

/// The outcome of a look at a lock in doubt.
enum Verdict {
    Held(Held),
    Lost(String),
}

pub(super) struct Shared {
    pub spec: RbdSpec,
    pub name: String,
    pub events: EventHub,
    pub capacity: Capacity,
    pub limits: OnceLock<Limits>,
    /// Completed writes stay when the process ends.
    pub writes_stay: AtomicBool,
    /// The parts that hold data, once somebody asked.
    pub objects: OnceLock<Objects>,
    state: Mutex<State>,
    /// Counts changes of `state`.
    changes: AtomicU64,
    queues: Mutex<Vec<Weak<CompletionQueue<Inbox>>>>,
    threads: DiskThreads,
    began: Instant,
    next_look: AtomicU64,
    looking: AtomicBool,
}

impl Shared {
    /// Opens the image and takes its lock. Waits for the cluster.
    pub fn open(spec: RbdSpec) -> Result<Arc<Shared>, Error> {
        let shared = Arc::new(Shared {
            name: spec.to_string(),
            spec,
            events: EventHub::default(),
            capacity: Capacity::default(),
            limits: OnceLock::new(),
            writes_stay: AtomicBool::new(false),
            objects: OnceLock::new(),
            state: Mutex::new(State::InDoubt),
            changes: AtomicU64::new(0),
            queues: Mutex::default(),
            threads: DiskThreads::new("pvblk-rbd", 2),
            began: Instant::now(),
            next_look: AtomicU64::new(LOOK_MILLISECONDS),
            looking: AtomicBool::new(false),
        });
        let image = shared.open_image()?;
        let owner = shared.first_lock(&image)?;
        shared.learn(&image)?;
        let live = Live {
            image: Arc::new(image),
            number: 0,
        };
        shared.set(State::Held(Held { live, owner }));
        Ok(shared)
    }

    /// Opens the image, and watches its header. A connection that turns out to be blocked is left, once.
    fn open_image(self: &Arc<Shared>) -> Result<Image, Error> {
        let cluster = clusters::connection(&self.spec)?;
        match self.open_on(&cluster) {
            Err(e) if e.raw_os_error() == Some(ESHUTDOWN) => {
                clusters::forget(&self.spec, &cluster);
                self.open_on(&clusters::connection(&self.spec)?)
            }
            done => done,
        }
    }

    fn open_on(self: &Arc<Shared>, cluster: &Arc<Cluster>) -> Result<Image, Error> {
        let spec = &self.spec;
        let open = |read_only| {
            let place = (spec.pool.as_str(), spec.namespace.as_str());
            let snapshot = spec.snapshot.as_deref();
            Image::open(cluster, place, &spec.image, snapshot, read_only)
        };
        let mut read_only = spec.snapshot.is_some();
        let mut opened = open(read_only);
        if let Err((_, e)) = &opened
            && spec.read_only
            && matches!(e.raw_os_error(), Some(EPERM | EACCES))
        {
            // A watch is a write, which this user may not make.
            read_only = true;
            opened = open(read_only);
        }
        let mut image = opened.map_err(|(step, e)| failed(spec, step, e))?;
        if !read_only {
            let shared = Arc::downgrade(self);
            let on_update = move || {
                if let Some(shared) = shared.upgrade().filter(|_| !has(Plant::WatchMissed)) {
                    let me = Arc::clone(&shared);
                    // Without a thread the next change, or SIGHUP, finds the size.
                    let _ = shared.threads.run(Box::new(move || me.look_at_size()));
                }
            };
            image
                .watch(on_update)
                .map_err(|e| failed(spec, "watching the image", e))?;
        }
        Ok(image)
    }

    /// Takes the lock of an image that is opened for the first time, and returns its own address.
    fn first_lock(&self, image: &Image) -> Result<Option<String>, Error> {
        let spec = &self.spec;
        let os = |what: &'static str| move |e| failed(spec, what, e);
        if !spec.is_locked() {
            return Ok(None);
        }
        let has = image.features().map_err(os("asking for its features"))?;
        if has & features::EXCLUSIVE_LOCK == 0 {
            return Err(Error::config(format!(
                "{spec}: the image has no exclusive lock, which keeps a second writer out: `rbd feature enable {}/{} exclusive-lock`, or serve it \
                 without one with nolock",
                spec.pool, spec.image
            )));
        }
        if let Ok(Some(owner)) = image.lock_owner() {
            tracing::info!(
                "{spec}: {owner} has the lock; if it is dead, the cluster gives the lock up within half a minute"
            );
        }
        image.acquire_lock().map_err(|e| self.refused(image, e))?;
        let owner = image
            .lock_owner()
            .map_err(os("asking for the lock's owner"))?;
        owner.map(Some).ok_or_else(|| {
            Error::new(
                ErrorKind::Disconnected,
                format!("{spec}: the lock was taken away"),
            )
        })
    }

    fn refused(&self, image: &Image, e: std::io::Error) -> Error {
        match (e.raw_os_error(), image.lock_owner()) {
            (Some(EROFS), Ok(Some(owner))) => Error::config(format!(
                "{}: another client, {owner}, has the image open for writing: end it there, or open it here with ro",
                self.spec
            )),
            _ => failed(&self.spec, "taking the exclusive lock", e),
        }
    }

    /// Learns size and limits.
    fn learn(&self, image: &Image) -> Result<(), Error> {
        let os = |e| failed(&self.spec, "asking for the image's properties", e);
        self.capacity.set(image.size().map_err(os)? / SECTOR);
        let own = |name: &str| image.metadata(name).ok().flatten();
        let caches = own("conf_rbd_cache").is_some_and(|v| v != "false" && v != "0");
        if caches {
            tracing::warn!(
                "{}: the image's own setting turns librbd's cache on: writes that no flush covers are lost when this server is killed; \
                 `rbd config image remove {}/{} rbd_cache` turns it off",
                self.spec,
                self.spec.pool,
                self.spec.image
            );
        }
        self.writes_stay.store(!caches, Ordering::Relaxed);
        let name = "rbd_discard_granularity_bytes";
        let granularity = own(&format!("conf_{name}")).or_else(|| image.cluster().value(name).ok());
        let granularity = granularity.and_then(|v| v.parse().ok()).unwrap_or(65536);
        let _ = self.limits.set(Limits {
            discard_granularity_bytes: u32::clamp(granularity, 512, 1 << 30),
            write_zeroes: true,
            read_only: self.spec.is_read_only(),
            volatile_cache: true,
            exclusive: self.spec.is_locked(),
            ..Limits::default()
        });
        Ok(())
    }

    fn set(&self, state: State) {
        let old = std::mem::replace(&mut *self.state.lock(), state);
        self.tell_queues();
        drop(old);
    }

    fn tell_queues(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        for queue in self.queues.lock().iter().filter_map(Weak::upgrade) {
            queue.wait().wake();
        }
    }

    /// Counts changes of what queues may do.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub fn mode(&self) -> Mode {
        match (&*self.state.lock(), self.spec.on_lost_lock) {
            (State::Held(held), _) => Mode::Send(Idle {
                image: Arc::downgrade(&held.live.image),
                number: held.live.number,
            }),
            (State::InDoubt, _) => Mode::Park,
            (State::Lost(_), OnLostLock::Wait) => Mode::ParkForEver,
            (State::Lost(_) | State::Closed, _) => Mode::Fail,
        }
    }

    /// Wakes this queue when the mode changes.
    pub fn add_queue(&self, queue: &Arc<CompletionQueue<Inbox>>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    /// The reason why the image was given up, if it was.
    pub fn failure(&self) -> Option<String> {
        match &*self.state.lock() {
            State::Lost(why) => Some(why.clone()),
            _ => None,
        }
    }

    fn held(&self) -> Option<Held> {
        match &*self.state.lock() {
            State::Held(held) => Some(held.clone()),
            _ => None,
        }
    }

    /// The open image, if it may be used.
    pub fn image(&self) -> Option<Arc<Image>> {
        self.held().map(|held| held.live.image)
    }

    /// Requests come: looks at the lock if the last look is a second ago.
    #[inline]
    pub fn look_if_due(self: &Arc<Shared>) {
        if !self.spec.is_locked() || has(Plant::LockUnchecked) {
            return;
        }
        let now = self.began.elapsed().as_millis() as u64;
        if now < self.next_look.load(Ordering::Relaxed) {
            return;
        }
        self.next_look
            .store(now + LOOK_MILLISECONDS, Ordering::Relaxed);
        if !self.looking.swap(true, Ordering::AcqRel) {
            let me = Arc::clone(self);
            if self.threads.run(Box::new(move || me.look())).is_err() {
                self.looking.store(false, Ordering::Release);
            }
        }
    }

    /// Time of the next look, if the image has a lock.
    pub fn look_time(&self) -> Option<Instant> {
        let at = Duration::from_millis(self.next_look.load(Ordering::Relaxed));
        self.spec.is_locked().then(|| self.began + at)
    }

    fn look(self: &Arc<Shared>) {
        if let Some(held) = self.held() {
            match held.live.image.owns_lock() {
                Ok(true) => {}
                Ok(false) => self.doubt(held.live.number),
                Err(e) if e.raw_os_error() == Some(ESHUTDOWN) => self.doubt(held.live.number),
                Err(e) => tracing::debug!("{}: looking at the lock: {e}", self.name),
            }
        }
        self.looking.store(false, Ordering::Release);
    }

    /// An answer of the open image of this number says that the lock may be lost: nothing is sent until a thread knows.
    #[cold]
    pub fn doubt(self: &Arc<Shared>, number: u64) {
        let mut state = self.state.lock();
        let held = match &*state {
            State::Held(held) if held.live.number == number => held.clone(),
            _ => return,
        };
        *state = State::InDoubt;
        drop(state);
        self.tell_queues();
        let me = Arc::clone(self);
        if self
            .threads
            .run(Box::new(move || me.settle(&held)))
            .is_err()
        {
            self.lost("no thread could be started to look at the lock".into());
        }
    }

    /// Finds out what became of the lock. Waits for the cluster, however long.
    fn settle(self: &Arc<Shared>, held: &Held) {
        let (mut said, mut blocked) = (false, 0);
        let mut moving = held.owner.as_ref().map(|owner| Move {
            owner: owner.clone(),
            is_broken: false,
        });
        loop {
            match self.judge(held, &mut moving) {
                Ok(Verdict::Held(held)) => {
                    if !matches!(&*self.state.lock(), State::InDoubt) {
                        return;
                    }
                    return self.set(State::Held(held));
                }
                Ok(Verdict::Lost(why)) => return self.lost(why),
                // The monitors can't be reached: nobody knows.
                Err(e) if e.raw_os_error() == Some(ETIMEDOUT) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!("{e}; its requests wait");
                    }
                    std::thread::sleep(AGAIN);
                }
                Err(e) if e.raw_os_error() == Some(ESHUTDOWN) && blocked < MOST_BLOCKED => {
                    blocked += 1;
                }
                Err(e) => return self.lost(e.to_string()),
            }
            if matches!(&*self.state.lock(), State::Closed) {
                return;
            }
        }
    }

    fn judge(self: &Arc<Shared>, held: &Held, moving: &mut Option<Move>) -> Result<Verdict, Error> {
        let Live { image, number } = &held.live;
        let number = number + 1;
        let Some(moving) = moving else {
            if !self.spec.is_read_only() {
                let why = "the cluster has blocked this client";
                return Ok(Verdict::Lost(why.into()));
            }
            clusters::forget(&self.spec, image.cluster());
            let image = Arc::new(self.open_image()?);
            return Ok(Verdict::Held(Held {
                live: Live { image, number },
                owner: None,
            }));
        };
        match image.owns_lock() {
            Ok(true) => {
                std::thread::sleep(SOON);
                return Ok(Verdict::Held(held.clone()));
            }
            Ok(false) => {
                let by = image.lock_owner().ok().flatten();
                return Ok(Verdict::Lost(taken(by.as_deref(), "")));
            }
            Err(e) if e.raw_os_error() == Some(ESHUTDOWN) => {}
            Err(e) => return Err(failed(&self.spec, "looking at the lock", e)),
        }
        clusters::forget(&self.spec, image.cluster());
        let image = self.open_image()?;
        let blocked = held.live.image.cluster();
        let waited = self.wait_for_thief(&image, blocked, moving);
        let moved = waited.and_then(|()| self.move_lock(&image, moving));
        if let Err(e) = &moved
            && e.raw_os_error() == Some(ESHUTDOWN)
        {
            clusters::forget(&self.spec, image.cluster());
        }
        let Some(owner) = moved? else {
            clusters::note_robbed(blocked);
            let by = image.lock_owner().ok().flatten();
            let also = ", and this client was blocked";
            return Ok(Verdict::Lost(taken(by.as_deref(), also)));
        };
        tracing::info!(
            "{}: its connection was blocked because of another image; it has a new one",
            self.name
        );
        self.take_size(&image);
        let image = Arc::new(image);
        Ok(Verdict::Held(Held {
            live: Live { image, number },
            owner: Some(owner),
        }))
    }

    /// A client that breaks a lock blocks the owner first. So the lock of a blocked connection may be about to be broken: waits until it is, or until another image
    /// of the connection turns out to be meant, but not for ever.
    fn wait_for_thief(
        &self,
        image: &Image,
        blocked: &Arc<Cluster>,
        moving: &Move,
    ) -> Result<(), Error> {
        let end = Instant::now() + THIEF;
        while !moving.is_broken && !clusters::is_robbed(blocked) && Instant::now() < end {
            let owner = image.lock_owner();
            let owner = owner.map_err(|e| failed(&self.spec, "looking at the lock", e))?;
            if owner.as_ref() != Some(&moving.owner) {
                break;
            }
            std::thread::sleep(SOON);
        }
        Ok(())
    }

    /// The old connection is blocked. If its lock is still there, the block was meant for another image, and the lock is taken for this connection:
    /// returns its address. `None`: another client has taken it.
    fn move_lock(&self, image: &Image, moving: &mut Move) -> Result<Option<String>, Error> {
        let os = |e| failed(&self.spec, "moving the lock to a new connection", e);
        match image.lock_owner().map_err(os)? {
            Some(owner) if owner == moving.owner => {
                // This fails if the lock has passed to another client meanwhile.
                image.break_lock(&owner).map_err(os)?;
                moving.is_broken = true;
            }
            None if moving.is_broken => {}
            _ => return Ok(None),
        }
        image.acquire_lock().map_err(os)?;
        let owner = image.lock_owner().map_err(os)?;
        if let Some(owner) = &owner {
            (moving.owner, moving.is_broken) = (owner.clone(), false);
        }
        Ok(owner)
    }

    fn lost(&self, why: String) {
        let mut state = self.state.lock();
        if !matches!(&*state, State::InDoubt) {
            return;
        }
        *state = State::Lost(why.clone());
        drop(state);
        // Before the first request fails because of it.
        let why = format!("{why}; nothing is sent to it any more").into();
        self.events.raise(DeviceEvent::LockLost { why });
        self.tell_queues();
    }

    /// Looks at the size, and tells of a change. Waits for the cluster.
    pub fn look_at_size(&self) {
        if let Some(image) = self.image() {
            self.take_size(&image);
        }
    }

    fn take_size(&self, image: &Image) {
        match image.size() {
            Ok(bytes) => {
                let sectors = bytes / SECTOR;
                if self.capacity.set(sectors) {
                    if let Some(objects) = self.objects.get() {
                        objects.give_up();
                    }
                    self.events.raise(DeviceEvent::Resized { sectors });
                }
            }
            Err(e) => tracing::warn!("{}: asking for its size: {e}", self.name),
        }
    }

    /// Closes the image, which gives the lock back. Waits for looks at the lock that go on, and for the cluster, but not for ever.
    pub fn close(&self) -> Result<(), Error> {
        let old = std::mem::replace(&mut *self.state.lock(), State::Closed);
        self.tell_queues();
        match old {
            State::Held(held) => {
                let Live { image, .. } = held.live;
                let closed = image.close(CLOSE);
                closed.map_err(|e| failed(&self.spec, "closing the image", e))
            }
            State::Lost(why) => Err(Error::new(
                ErrorKind::Disconnected,
                format!("{}: {why}", self.name),
            )),
            State::InDoubt | State::Closed => Ok(()),
        }
    }
}

fn taken(by: Option<&str>, also: &str) -> String {
    match by {
        Some(by) => format!("its lock was taken away by {by}{also}"),
        None => format!("its lock was taken away{also}"),
    }
}
