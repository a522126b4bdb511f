//! State that the queues of a cache share: the core behind its lock, and the ways between queues.

use crate::core::{Core, Done, Io, Out};
use crate::counters::Counters;
use crate::policy::{Policy, Standard};
use crate::table::Table;
use parking_lot::{Mutex, MutexGuard};
use pvblk_block::memory::Gauge;
use pvblk_block::stacked::{
    CompletionQueue, LowerQueue, Neighbour, QueueTable, SharedLowerQueue, WaitEntry,
};
use pvblk_block::{
    BlockDevice, Capacity, Clock, DeviceEvent, Error, EventHub, QueueContext, Region,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A queue looks so often for the core's lock before its thread sleeps, and pauses in between: some 50 µs together on a CPU of 2023, as another queue's step with
/// many requests may take.
const LOOKS: u32 = 300;
const PAUSES: u32 = 4;
/// Most requests of one lower queue at the device.
const DEPTH: u32 = 128;

/// Pages that were found without a lock, and those of them that had been read in advance.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    pub all: AtomicU64,
    pub ahead: AtomicU64,
}

/// I/O and completions that queues leave for one another.
#[derive(Default)]
pub(crate) struct Letters {
    pub ios: Vec<Io>,
    pub done: Vec<Done>,
}

/// A queue as the others see it.
pub(crate) struct QueueEnd {
    pub completions: CompletionQueue<Letters>,
    pub lower: SharedLowerQueue,
}

impl Neighbour for QueueEnd {
    type Entries = Letters;

    fn completions(&self) -> &CompletionQueue<Letters> {
        &self.completions
    }

    fn lower(&self) -> Option<&SharedLowerQueue> {
        Some(&self.lower)
    }
}

impl QueueEnd {
    pub fn open(
        device: &Arc<dyn BlockDevice>,
        context: &QueueContext,
    ) -> Result<Arc<QueueEnd>, Error> {
        let context = QueueContext {
            depth: DEPTH,
            ..context.clone()
        };
        let completions =
            CompletionQueue::new().map_err(|e| Error::os("cache: opening a queue", e))?;
        Ok(Arc::new(QueueEnd {
            completions,
            lower: SharedLowerQueue::new(LowerQueue::open(device, &context)?),
        }))
    }

    /// Its state, for people who look for a hang.
    pub fn describe(&self) -> String {
        let wait = self.completions.wait();
        let said = |flag: bool, text: &'static str| if flag { text } else { "" };
        format!(
            "{} in flight, {} letters{}{}{}",
            self.lower.in_flight(),
            self.completions.entries().ios.len(),
            said(self.lower.is_attended(), ", attended"),
            said(wait.is_sleeping(), ", sleeping"),
            said(wait.is_pending(), ", woken"),
        )
    }
}

pub(crate) struct Shared<P = Standard> {
    pub inner: Arc<dyn BlockDevice>,
    pub core: Mutex<Core<P>>,
    pub table: Arc<Table>,
    pub region: Arc<Region>,
    pub clock: Arc<dyn Clock>,
    /// All queues by owner. Number 0 is the background's: its I/O is for no request.
    pub queues: QueueTable<QueueEnd>,
    /// Queue 0, the background's, which no user polls.
    pub background: Arc<QueueEnd>,
    /// The background thread, if there is one, sleeps here.
    pub background_wait: Arc<WaitEntry>,
    /// It sleeps without a deadline: a page that becomes dirty has to wake it. Changed before, and read after, the core's lock is taken.
    pub background_rests: AtomicBool,
    /// Of queues that are open.
    hits: Mutex<Vec<Arc<Hits>>>,
    /// Of queues that are gone.
    old_hits: Hits,
    /// Reclaim or write-back has something to do.
    has_background_work: AtomicBool,
    /// A [`crate::BackgroundWork`] does that, and no queue.
    pub kept: AtomicBool,
    /// The device has another size.
    pub resized: AtomicBool,
    /// The cache follows, and nobody was told yet.
    has_followed: AtomicBool,
    pub capacity: Capacity,
    pub events: EventHub,
    /// The frames' part of the system's memory, on the bill.
    pub memory: Gauge,
    /// Held while somebody gives memory back; when the next pass makes sense.
    pub giving: Mutex<Option<Instant>>,
}

impl<P: Policy> Shared<P> {
    pub fn new(
        inner: &Arc<dyn BlockDevice>,
        core: Core<P>,
        (table, region): (Arc<Table>, Arc<Region>),
        memory: Gauge,
        clock: Arc<dyn Clock>,
    ) -> Result<Shared<P>, Error> {
        let os = |e| Error::os("cache: opening a queue", e);
        let queues = QueueTable::default();
        let background = QueueEnd::open(inner, &QueueContext::new(1))?;
        let first = queues.open(&background);
        debug_assert_eq!(first, Core::BACKGROUND);
        Ok(Shared {
            core: Mutex::new(core),
            table,
            region,
            clock,
            queues,
            background,
            background_wait: Arc::new(WaitEntry::new().map_err(os)?),
            background_rests: AtomicBool::new(false),
            hits: Mutex::default(),
            old_hits: Hits::default(),
            has_background_work: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            resized: AtomicBool::new(false),
            has_followed: AtomicBool::new(false),
            capacity: Capacity::new(inner.capacity_sectors()),
            events: EventHub::default(),
            memory,
            giving: Mutex::new(None),
            inner: Arc::clone(inner),
        })
    }

    /// The core, for a queue. Another queue has it for microseconds, and a thread that slept meanwhile would be woken long after that.
    pub fn core(&self) -> MutexGuard<'_, Core<P>> {
        let mut looks = 0;
        loop {
            if let Some(core) = self.core.try_lock() {
                return core;
            }
            if looks == LOOKS {
                return self.core.lock();
            }
            looks += 1;
            for _ in 0..PAUSES {
                std::hint::spin_loop();
            }
        }
    }

    /// Sends I/O on its way and completions to their owners, wakes owners that have something to do, and tells a new size. `own`: the queue that calls, whose lower
    /// queue is used at once, and which has taken its own completions.
    ///
    /// True if the background's lower queue was idle and now isn't: queues that sleep don't wait for it.
    #[must_use]
    pub fn deliver(&self, out: &mut Out, own: Option<(usize, &QueueEnd)>) -> bool {
        self.tell_size();
        let Out { ios, done, wake } = out;
        if let Some((number, end)) = own {
            if ios.iter().any(|io| io.runner == number) {
                let mine = ios.extract_if(.., |io| io.runner == number);
                end.lower.submit(mine.map(|io| io.request));
            }
            wake.retain(|owner| *owner != number);
        }
        let others = ios.iter().map(|io| io.runner);
        wake.extend(others.filter(|runner| *runner != Core::BACKGROUND));
        wake.extend(done.iter().map(|done| done.owner));
        self.queues.post(wake, |number, _, letters| {
            letters
                .ios
                .extend(ios.extract_if(.., |io| io.runner == number));
            let theirs = done.extract_if(.., |done| done.owner == number);
            letters.done.extend(theirs);
        });
        // Of queues that were given up.
        done.clear();
        if ios.is_empty() {
            return false;
        }
        // Every queue that is polled polls it, too. A thread that sleeps may not wait for it yet.
        let rest = ios.drain(..).map(|io| io.request);
        let handed = self.background.lower.submit(rest);
        self.wake_background(false);
        handed
    }

    /// Reclaim and write-back by the queue that steps the core, unless a [`crate::BackgroundWork`] does it.
    pub fn background_work(&self, core: &mut Core<P>) {
        if !self.kept.load(Ordering::Relaxed) {
            core.background_reclaim();
            core.write_back();
        }
        let wants = core.wants_reclaim() || core.wants_write_back();
        self.has_background_work.store(wants, Ordering::Relaxed);
        if self.resized.load(Ordering::Relaxed) {
            self.follow_size(core);
        }
    }

    pub fn wants_background_work(&self) -> bool {
        self.has_background_work.load(Ordering::Relaxed) && !self.kept.load(Ordering::Relaxed)
    }

    /// The device has another size: pages behind its end go.
    pub fn follow_size(&self, core: &mut Core<P>) {
        // Before it is asked for: it may change again.
        self.resized.store(false, Ordering::SeqCst);
        let sectors = self.inner.capacity_sectors();
        match core.resize(sectors) {
            true if self.capacity.set(sectors) => self.has_followed.store(true, Ordering::Release),
            true => {}
            false => self.resized.store(true, Ordering::Relaxed),
        }
    }

    /// Tells that the cache has another size, if it has; without the core's lock, since listeners ask for the size.
    pub fn tell_size(&self) {
        if self.has_followed.load(Ordering::Relaxed)
            && self.has_followed.swap(false, Ordering::AcqRel)
        {
            let sectors = self.capacity.sectors();
            self.events.raise(DeviceEvent::Resized { sectors });
        }
    }

    /// There may be dirty pages that become old. After the core's lock was held.
    pub fn wake_background(&self, is_clean: bool) {
        if !is_clean && self.background_rests.load(Ordering::Relaxed) {
            self.background_rests.store(false, Ordering::Relaxed);
            self.background_wait.wake();
        }
    }

    /// The count of a queue that is opened.
    pub fn new_hits(&self) -> Arc<Hits> {
        let hits = Arc::new(Hits::default());
        self.hits.lock().push(Arc::clone(&hits));
        hits
    }

    /// Its queue is closed.
    pub fn keep_hits(&self, of: &Arc<Hits>) {
        let mut hits = self.hits.lock();
        hits.retain(|h| !Arc::ptr_eq(h, of));
        for (old, own) in [
            (&self.old_hits.all, &of.all),
            (&self.old_hits.ahead, &of.ahead),
        ] {
            old.fetch_add(own.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    pub fn counters(&self) -> Counters {
        let mut counters = self.core.lock().counters();
        let queues = self.hits.lock();
        for hits in queues.iter().map(|h| &**h).chain([&self.old_hits]) {
            counters.hits += hits.all.load(Ordering::Relaxed);
            counters.readahead_used += hits.ahead.load(Ordering::Relaxed);
        }
        counters
    }
}

const _: () = assert!(Core::BACKGROUND == 0);
