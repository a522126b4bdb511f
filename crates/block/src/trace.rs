//! Trace hooks: events in the life of requests, with their time and submitter.
//!
//! The letters are blktrace's (blkparse(1)). Every layer of the stack records its own events under a device
//! number of its own; the `trace` crate collects them. A queue owns its sink, so recording takes no lock.
//! While no recording runs in the process, a hook costs one look at [`is_on`], for a whole batch where there
//! is one.
//!
//! A recording can follow one request in N, whole. The choice is made where requests enter the process, at the uppermost traced queue,
//! and is a mark of the request ([`Request::followed`]) for all hooks below. See docs/decisions/0034-sampling.md.

use crate::{Completion, Op, Request, RequestFlags, Status};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// A step of a request's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// Q: the request reached this layer.
    Queue,
    /// G: the request got a tag (or a request structure).
    Get,
    /// M: the request was merged behind another one.
    BackMerge,
    /// F: the request was merged in front of another one.
    FrontMerge,
    /// I: the request was inserted in a queue to wait.
    Insert,
    /// D: the request was issued to the layer below.
    Issue,
    /// C: the request completed.
    Complete,
    /// A: the request was remapped to another device.
    Remap,
    /// P: the queue was plugged.
    Plug,
    /// U: the queue was unplugged.
    Unplug,
    /// S: the submitter waits for a tag.
    Sleep,
    /// X: the request was split.
    Split,
}

/// A layer's device number in traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TraceDevice(pub u32);

/// One event, without the data that is the same for all events of its queue. The sink knows the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// First sector (512 B).
    pub sector: u64,
    /// For a remap, the sector on the layer above; for a split, the first sector of the second part; for an
    /// unplug, the number of requests that waited; for a plug and a sleep 0. For all others the request's
    /// identity: requests of one layer that are in flight at the same time have different ones.
    pub other: u64,
    /// Length in sectors (512 B); greater lengths count as the greatest value.
    pub sectors: u32,
    pub phase: Phase,
    pub op: Op,
    pub flags: RequestFlags,
    /// For a completion, its status.
    pub status: Option<Status>,
}

// An event is half a cache line with its time: events go through the caches of the measured CPU.
const _: () = assert!(size_of::<TraceEvent>() == 24);

/// The origin of a queue's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceOrigin {
    /// Number of the layer.
    pub device: TraceDevice,
    /// Number of the layer that the requests come from, if there is one.
    pub above: Option<TraceDevice>,
    /// Number of the queue in its layer.
    pub queue: u32,
    /// Number of the submitter.
    pub submitter: u32,
}

/// Takes events of one queue.
pub trait TraceSink: Send {
    /// The current time in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Records an event that happened at `time_ns`; never blocks, never allocates: an event that doesn't fit
    /// is counted as dropped. False if events aren't wanted any more: the sink is then dropped.
    fn record(&mut self, time_ns: u64, event: TraceEvent) -> bool;
}

/// Makes a sink for each queue.
pub trait TraceHub: Send + Sync {
    /// The number of the layer of this name; the same number for each call.
    fn device(&self, name: &str) -> TraceDevice;

    /// One request of so many is followed; 0 while events aren't wanted. Always the same place.
    fn every(&self) -> Arc<AtomicU32>;

    /// A sink for one queue of a layer; `None` while events aren't wanted. Called with the first event.
    fn open(&self, origin: &TraceOrigin) -> Option<Box<dyn TraceSink>>;
}

/// Number of recordings in this process. It is a process-wide switch, because reading it takes two
/// instructions, and a queue would take more to reach any state of its own.
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);

/// An odd number by which addresses are multiplied, so that a trace doesn't show them as they are.
static KEY: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0) | 1);

/// The identity of a request while it is in flight: made of its address, which a boxed request keeps.
fn identity(request: &Request) -> u64 {
    (std::ptr::from_ref(request).addr() as u64).wrapping_mul(*KEY)
}

/// True while there is a recording in this process.
#[inline]
pub fn is_on() -> bool {
    !cfg!(feature = "untraced") && RECORDINGS.load(Ordering::Relaxed) != 0
}

/// While a value of this type lives, all hooks of the process look for a hub that wants their
/// events.
#[derive(Debug)]
pub struct Recording(());

impl Recording {
    /// Switches the hooks on.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Recording {
        RECORDINGS.fetch_add(1, Ordering::Relaxed);
        Recording(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The hub for a queue's events, if they are traced; handed down from layer to layer.
#[derive(Clone, Default)]
pub struct Tracing(Option<Branch>);

/// A place in the tree of layers.
#[derive(Clone)]
struct Branch {
    hub: Arc<dyn TraceHub>,
    /// The disk's name, which is put in front of the names of layers.
    scope: Arc<str>,
    /// The layer that the requests come from.
    above: Option<TraceDevice>,
    /// The layer whose name is the scope: see [`Tracing::inside`].
    own: Option<Arc<str>>,
    /// Requests enter the process here: no other layer is above.
    is_entry: bool,
}

impl Tracing {
    /// Requests aren't traced.
    pub fn off() -> Tracing {
        Tracing(None)
    }

    /// Tracing to `hub`; `scope` is the disk's name, which is put in front of the names of its
    /// layers.
    pub fn to(hub: Arc<dyn TraceHub>, scope: &str) -> Tracing {
        Tracing(Some(Branch {
            hub,
            scope: scope.into(),
            above: None,
            own: None,
            is_entry: true,
        }))
    }

    /// The same tracing for a layer below `upper`, so that events show where requests come from.
    #[must_use]
    pub fn below(&self, upper: &Tracer) -> Tracing {
        let mut branch = self.0.clone();
        if let (Some(branch), Some(upper)) = (&mut branch, &upper.0) {
            branch.above = Some(upper.origin.device);
            branch.is_entry = false;
        }
        Tracing(branch)
    }

    /// Tracing of a device that is one of several below a layer: its layers are called `DISK/[NAME]/LAYER`, and the one called `layer`, which is its
    /// uppermost, `DISK/[NAME]`.
    #[must_use]
    pub fn inside(&self, name: &str, layer: &str) -> Tracing {
        let branch = self.0.as_ref().map(|branch| Branch {
            scope: format!("{}/[{name}]", branch.scope).into(),
            own: Some(layer.into()),
            is_entry: false,
            ..branch.clone()
        });
        Tracing(branch)
    }

    /// A tracer for one queue of a layer.
    pub fn tracer(&self, layer: &str, queue: u32, submitter: u32) -> Tracer {
        Tracer(self.0.as_ref().map(|branch| {
            let name = match branch.own.as_deref() == Some(layer) {
                true => branch.scope.to_string(),
                false => format!("{}/{layer}", branch.scope),
            };
            Box::new(Tap {
                origin: TraceOrigin {
                    device: branch.hub.device(&name),
                    above: branch.above,
                    queue,
                    submitter,
                },
                every: branch.hub.every(),
                choice: branch.is_entry.then(Choice::new),
                hub: Arc::clone(&branch.hub),
                sink: None,
            })
        }))
    }
}

/// The choice of requests that are followed: of one batch in N, at random, so that it doesn't keep step with a regular load.
struct Choice {
    /// Batches until the next one that is followed.
    left: u32,
    /// Of xorshift32; never 0.
    random: u32,
}

/// Most requests of which one is followed.
pub const MOST_EVERY: u32 = 1 << 20;

impl Choice {
    fn new() -> Choice {
        Choice {
            left: u32::MAX,
            random: RandomState::new().hash_one(0) as u32 | 1,
        }
    }

    /// True if the next batch is followed, of `every`: more than 1.
    fn next(&mut self, every: u32) -> bool {
        // The distance is 1 to 2 N - 1, each as likely: N on average.
        let span = 2 * every.min(MOST_EVERY) - 1;
        if self.left >= span {
            // The first one, or N was greater before.
            self.left = self.draw(span);
        }
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        self.left = self.draw(span);
        true
    }

    /// A number below `span`.
    fn draw(&mut self, span: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        ((u64::from(self.random) * u64::from(span)) >> 32) as u32
    }
}

struct Tap {
    hub: Arc<dyn TraceHub>,
    /// See [`TraceHub::every`].
    every: Arc<AtomicU32>,
    /// Where requests enter the process.
    choice: Option<Choice>,
    origin: TraceOrigin,
    /// `Some` from the first event that is wanted to the first that isn't.
    sink: Option<Box<dyn TraceSink>>,
}

impl Tap {
    /// Marks the requests of a batch that has just come.
    fn mark(&mut self, batch: &mut [Box<Request>]) {
        let every = self.every.load(Ordering::Relaxed);
        if every == 0 {
            self.sink = None;
        }
        let follows = match (every, &mut self.choice) {
            (0 | 1, _) => every == 1,
            (_, Some(choice)) => choice.next(every),
            // Marked above.
            (_, None) => return,
        };
        for request in batch {
            request.followed = follows;
        }
    }

    /// The sink and the time, if events are wanted.
    fn sink(&mut self) -> Option<(&mut dyn TraceSink, u64)> {
        if self.sink.is_none() {
            self.sink = self.hub.open(&self.origin);
        }
        let sink = self.sink.as_deref_mut()?;
        let now_ns = sink.now_ns();
        Some((sink, now_ns))
    }
}

/// The trace hooks of one queue of a layer.
#[derive(Default)]
pub struct Tracer(Option<Box<Tap>>);

impl Tracer {
    /// Records that `request` reached `phase`, if it is followed. So do all hooks.
    #[inline]
    pub fn request(&mut self, phase: Phase, request: &Request) {
        if is_on() && request.followed {
            self.record(phase, request, 0);
        }
    }

    /// Records that those of them that are followed reached `phase` now.
    #[inline]
    pub fn requests<'a>(&mut self, phase: Phase, all: impl IntoIterator<Item = &'a Request>) {
        if is_on() {
            let all = all.into_iter().filter(|request| request.followed);
            self.record_all(all.map(|request| event(phase, request, 0)));
        }
    }

    /// Records that all these reached this layer now: Q, and before it A where they come from another layer. Marks those that are followed.
    #[inline]
    pub fn arrived(&mut self, batch: &mut [Box<Request>]) {
        if is_on() {
            self.record_arrivals(batch);
        }
    }

    /// Records that a request for this layer was made of one at `sector` of the layer above: A.
    #[inline]
    pub fn remapped(&mut self, request: &Request, sector: u64) {
        if is_on() && request.followed {
            self.record(Phase::Remap, request, sector);
        }
    }

    /// Records that all these completed now.
    #[inline]
    pub fn completed(&mut self, done: &[Completion]) {
        if is_on() {
            self.record_completions(done);
        }
    }

    /// Records that `request` was split before `sector`, and its second part goes its own way.
    #[inline]
    pub fn split(&mut self, request: &Request, sector: u64) {
        if is_on() && request.followed {
            self.record(Phase::Split, request, sector);
        }
    }

    /// Records that requests are held back from now on, so that they can be merged; `first` is the first of
    /// them.
    #[inline]
    pub fn plugged(&mut self, first: &Request) {
        if is_on() && first.followed {
            self.record(Phase::Plug, first, 0);
        }
    }

    /// Records that the requests that were held back go on: `waiting` requests, of which `first` is
    /// the first.
    #[inline]
    pub fn unplugged(&mut self, first: &Request, waiting: u64) {
        if is_on() && first.followed {
            self.record(Phase::Unplug, first, waiting);
        }
    }

    #[cold]
    #[inline(never)]
    fn record(&mut self, phase: Phase, request: &Request, other: u64) {
        self.record_all(std::iter::once(event(phase, request, other)));
    }

    #[cold]
    #[inline(never)]
    fn record_arrivals(&mut self, batch: &mut [Box<Request>]) {
        let Some(tap) = &mut self.0 else { return };
        tap.mark(batch);
        let above = tap.origin.above;
        let followed = batch.iter().filter(|request| request.followed);
        self.record_all(followed.flat_map(|request| {
            let remap = above.map(|_| event(Phase::Remap, request, request.sector));
            let queue = event(Phase::Queue, request, 0);
            remap.into_iter().chain(std::iter::once(queue))
        }));
    }

    #[cold]
    #[inline(never)]
    fn record_completions(&mut self, done: &[Completion]) {
        let followed = done.iter().filter(|c| c.request.followed);
        self.record_all(followed.map(|c| TraceEvent {
            status: Some(c.status),
            ..event(Phase::Complete, &c.request, 0)
        }));
    }

    /// Records events of one moment.
    #[cold]
    #[inline(never)]
    fn record_all(&mut self, events: impl Iterator<Item = TraceEvent>) {
        let Some(tap) = &mut self.0 else { return };
        let mut events = events.peekable();
        if events.peek().is_none() {
            return;
        }
        let Some((sink, now_ns)) = tap.sink() else {
            return;
        };
        for event in events {
            if !sink.record(now_ns, event) {
                tap.sink = None;
                return;
            }
        }
    }
}

fn event(phase: Phase, request: &Request, other: u64) -> TraceEvent {
    let other = match phase {
        Phase::Remap | Phase::Split | Phase::Plug | Phase::Unplug | Phase::Sleep => other,
        _ => identity(request),
    };
    TraceEvent {
        sector: request.sector,
        other,
        sectors: u32::try_from(request.sectors).unwrap_or(u32::MAX),
        phase,
        op: request.op,
        flags: request.flags,
        status: None,
    }
}
