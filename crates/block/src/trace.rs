//! Trace hooks: who did what, when, in which phase of a request's life.
//!
//! The letters are blktrace's (blkparse(1)). Every floor of the stack records its own events under a
//! device number of its own; collecting them is the `trace` crate's work. A queue owns its sink, so
//! recording takes no lock. When tracing is off, a hook costs one branch.

use crate::{Op, Request, RequestFlags, Status};
use std::sync::Arc;

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

/// One event. The sink adds the time: clocks stay at the edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Which step.
    pub phase: Phase,
    /// On which floor.
    pub device: TraceDevice,
    /// Who submitted.
    pub submitter: u32,
    /// The request's operation.
    pub op: Op,
    /// Its flags.
    pub flags: RequestFlags,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors (512 B).
    pub sectors: u64,
    /// The submitter's mark.
    pub tag: u64,
    /// For a completion, how it ended.
    pub status: Option<Status>,
}

/// Takes events of one queue.
pub trait TraceSink: Send {
    /// Records one event; never blocks, never allocates: what doesn't fit is counted as dropped.
    fn record(&mut self, event: TraceEvent);
}

/// Makes a sink for each queue.
pub trait TraceHub: Send + Sync {
    /// A sink for one queue of one floor.
    fn open(&self, device: &str, queue: u32) -> (TraceDevice, Box<dyn TraceSink>);
}

/// Whether and where a queue traces; handed down from floor to floor.
#[derive(Clone, Default)]
pub struct Tracing(Option<Arc<dyn TraceHub>>);

impl Tracing {
    /// No tracing.
    pub fn off() -> Tracing {
        Tracing(None)
    }

    /// Tracing to `hub`.
    pub fn to(hub: Arc<dyn TraceHub>) -> Tracing {
        Tracing(Some(hub))
    }

    /// A tracer for one queue of the floor named `device`.
    pub fn tracer(&self, device: &str, queue: u32, submitter: u32) -> Tracer {
        Tracer(self.0.as_ref().map(|hub| {
            let (device, sink) = hub.open(device, queue);
            TracerOn {
                device,
                submitter,
                sink,
            }
        }))
    }
}

struct TracerOn {
    device: TraceDevice,
    submitter: u32,
    sink: Box<dyn TraceSink>,
}

/// One queue's trace point on one floor.
#[derive(Default)]
pub struct Tracer(Option<TracerOn>);

impl Tracer {
    /// Records that `request` reached `phase`.
    #[inline]
    pub fn request(&mut self, phase: Phase, request: &Request) {
        if self.0.is_some() {
            self.record(phase, request, None);
        }
    }

    /// Records that `request` completed with `status`.
    #[inline]
    pub fn complete(&mut self, request: &Request, status: Status) {
        if self.0.is_some() {
            self.record(Phase::Complete, request, Some(status));
        }
    }

    #[cold]
    #[inline(never)]
    fn record(&mut self, phase: Phase, request: &Request, status: Option<Status>) {
        let Some(on) = &mut self.0 else { return };
        on.sink.record(TraceEvent {
            phase,
            device: on.device,
            submitter: on.submitter,
            op: request.op,
            flags: request.flags,
            sector: request.sector,
            sectors: request.sectors,
            tag: request.tag,
            status,
        });
    }
}
