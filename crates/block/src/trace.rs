//! Trace hooks: who did what, when, in which phase of a request's life.
//!
//! The letters are blktrace's (blkparse(1)). Every floor of the stack records its own events under a
//! device number of its own; collecting them is the `trace` crate's work. A queue owns its sink, so
//! recording takes no lock. While nobody in the process records, a hook costs one look at [`is_on`], for a whole batch
//! where there is one.

use crate::{Completion, Op, Request, RequestFlags, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A step of a request's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// Q: the request reached this floor.
    Queue,
    /// G: it got a tag (or a request structure).
    Get,
    /// M: it was merged behind another request.
    BackMerge,
    /// F: it was merged in front of another request.
    FrontMerge,
    /// I: it was inserted in a queue to wait.
    Insert,
    /// D: it was issued to what is below.
    Issue,
    /// C: it completed.
    Complete,
    /// A: it was remapped to another device.
    Remap,
    /// P: the queue was plugged.
    Plug,
    /// U: the queue was unplugged.
    Unplug,
    /// S: the submitter waits for a tag.
    Sleep,
    /// X: it was split.
    Split,
}

/// A floor's number in traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TraceDevice(pub u32);

/// One event, without what is the same for all of its queue. The sink knows the time: clocks stay at the edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// First sector (512 B).
    pub sector: u64,
    /// For a remap, the sector on the floor above; for a split, the first one of the second part; for an unplug, how many
    /// requests waited; else 0.
    pub other: u64,
    /// Length in sectors (512 B); what is longer counts as the most.
    pub sectors: u32,
    /// Which step.
    pub phase: Phase,
    /// The request's operation.
    pub op: Op,
    /// Its flags.
    pub flags: RequestFlags,
    /// For a completion, how it ended.
    pub status: Option<Status>,
}

// Half a cache line, with its time: what is recorded goes through the caches of what is measured.
const _: () = assert!(size_of::<TraceEvent>() == 24);

/// Where a queue's events come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceOrigin {
    /// The floor.
    pub device: TraceDevice,
    /// The floor that its requests come from, if there is one.
    pub above: Option<TraceDevice>,
    /// Which of the floor's queues.
    pub queue: u32,
    /// Who submits.
    pub submitter: u32,
}

/// Takes events of one queue.
pub trait TraceSink: Send {
    /// Now, in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Records what happened at `time_ns`; never blocks, never allocates: what doesn't fit is counted as dropped. False if
    /// nobody wants events any more: the sink is then dropped.
    fn record(&mut self, time_ns: u64, event: TraceEvent) -> bool;
}

/// Makes a sink for each queue.
pub trait TraceHub: Send + Sync {
    /// The number of the floor of this name; the same whenever it is asked for.
    fn device(&self, name: &str) -> TraceDevice;

    /// A sink for one queue of a floor; `None` while nobody wants events. Called with the first event.
    fn open(&self, origin: &TraceOrigin) -> Option<Box<dyn TraceSink>>;
}

/// How many record in this process. A process-wide switch, because a look at it is two instructions, and at anything
/// that a queue would have to reach first is more.
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);

/// True while anybody in this process records.
#[inline]
pub fn is_on() -> bool {
    !cfg!(feature = "untraced") && RECORDINGS.load(Ordering::Relaxed) != 0
}

/// While one of these lives, all hooks of the process look for a hub that wants their events.
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

/// Whether and where a queue traces; handed down from floor to floor.
#[derive(Clone, Default)]
pub struct Tracing(Option<Branch>);

/// Where in the tree of floors we are.
#[derive(Clone)]
struct Branch {
    hub: Arc<dyn TraceHub>,
    /// In front of the names of floors: whose they are.
    scope: Arc<str>,
    /// The floor that the requests come from.
    above: Option<TraceDevice>,
}

impl Tracing {
    /// No tracing.
    pub fn off() -> Tracing {
        Tracing(None)
    }

    /// Tracing to `hub`; `scope` is the disk's name, which goes in front of the names of its floors.
    pub fn to(hub: Arc<dyn TraceHub>, scope: &str) -> Tracing {
        Tracing(Some(Branch {
            hub,
            scope: scope.into(),
            above: None,
        }))
    }

    /// The same for a floor below `upper`, so that its events tell where its requests come from.
    #[must_use]
    pub fn below(&self, upper: &Tracer) -> Tracing {
        let mut branch = self.0.clone();
        if let (Some(branch), Some(upper)) = (&mut branch, &upper.0) {
            branch.above = Some(upper.origin.device);
        }
        Tracing(branch)
    }

    /// A tracer for one queue of a floor.
    pub fn tracer(&self, floor: &str, queue: u32, submitter: u32) -> Tracer {
        Tracer(self.0.as_ref().map(|branch| {
            let name = format!("{}/{floor}", branch.scope);
            Box::new(Tap {
                origin: TraceOrigin {
                    device: branch.hub.device(&name),
                    above: branch.above,
                    queue,
                    submitter,
                },
                hub: Arc::clone(&branch.hub),
                sink: None,
            })
        }))
    }
}

struct Tap {
    hub: Arc<dyn TraceHub>,
    origin: TraceOrigin,
    /// From the first event that is wanted to the first that isn't.
    sink: Option<Box<dyn TraceSink>>,
}

impl Tap {
    /// The sink and the time, if anybody wants events.
    fn sink(&mut self) -> Option<(&mut dyn TraceSink, u64)> {
        if self.sink.is_none() {
            self.sink = self.hub.open(&self.origin);
        }
        let sink = self.sink.as_deref_mut()?;
        let now_ns = sink.now_ns();
        Some((sink, now_ns))
    }
}

/// One queue's trace point on one floor.
#[derive(Default)]
pub struct Tracer(Option<Box<Tap>>);

impl Tracer {
    /// Records that `request` reached `phase`.
    #[inline]
    pub fn request(&mut self, phase: Phase, request: &Request) {
        if is_on() {
            self.record(phase, request, 0);
        }
    }

    /// Records that all these reached `phase` now.
    #[inline]
    pub fn requests<'a>(&mut self, phase: Phase, all: impl IntoIterator<Item = &'a Request>) {
        if is_on() {
            self.record_all(all.into_iter().map(|request| event(phase, request, 0)));
        }
    }

    /// Records that all these reached this floor now: Q, and before it A where they come from another one.
    #[inline]
    pub fn arrived(&mut self, batch: &[Box<Request>]) {
        if is_on() {
            self.record_arrivals(batch);
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
        if is_on() {
            self.record(Phase::Split, request, sector);
        }
    }

    /// Records that requests are held back from now on, so that they can be merged; `first` is the first of them.
    #[inline]
    pub fn plugged(&mut self, first: &Request) {
        if is_on() {
            self.record(Phase::Plug, first, 0);
        }
    }

    /// Records that what was held back goes on: so many requests, of which `first` is the first.
    #[inline]
    pub fn unplugged(&mut self, first: &Request, waiting: u64) {
        if is_on() {
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
    fn record_arrivals(&mut self, batch: &[Box<Request>]) {
        let above = self.0.as_ref().and_then(|tap| tap.origin.above);
        self.record_all(batch.iter().flat_map(|request| {
            let remap = above.map(|_| event(Phase::Remap, request, request.sector));
            let queue = event(Phase::Queue, request, 0);
            remap.into_iter().chain(std::iter::once(queue))
        }));
    }

    #[cold]
    #[inline(never)]
    fn record_completions(&mut self, done: &[Completion]) {
        self.record_all(done.iter().map(|c| TraceEvent {
            status: Some(c.status),
            ..event(Phase::Complete, &c.request, 0)
        }));
    }

    /// Records events of one moment.
    #[cold]
    #[inline(never)]
    fn record_all(&mut self, events: impl Iterator<Item = TraceEvent>) {
        let Some(tap) = &mut self.0 else { return };
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
