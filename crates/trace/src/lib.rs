//! Traces requests: collects the events of the stack's trace hooks, reads and writes blktrace files, and computes
//! latencies from the times between events.
//!
//! - [`Recorder`] gives every traced queue a ring of its own; [`Collector`] takes the events out; a [`Feed`] passes
//!   them to subscribers in order of time; [`Merge`] does so with those of several servers.
//! - [`blktrace`] reads and writes the files of `blktrace`, `blkparse` and `btt`.
//! - [`guest`] aligns the clock of a guest's own blktrace, so that its hops appear above ours.
//! - [`latency`] pairs the events of a request and computes its hops; [`slow`] keeps the slowest requests.
//! - [`live`] does the same second by second, in bounded memory.
//! - [`perfetto`] writes a timeline of requests.
//!
//! See docs/decisions/0008-trace.md.

pub mod blktrace;
mod event;
mod feed;
pub mod guest;
pub mod latency;
pub mod live;
mod merge;
pub mod perfetto;
mod recorder;
pub mod slow;

pub use event::{Action, Device, Event, Extra, op_name};
pub use feed::{Feed, Next, Sorter, Subscription};
pub use merge::Merge;
pub use recorder::{Collector, DEFAULT_CAPACITY, Drops, GivenClock, MAX_QUEUES, Recorder};
