//! Where a request's time goes: collecting the events of the stack's trace hooks, blktrace files, and what the
//! times between the events add up to.
//!
//! - [`Recorder`] gives every traced queue a ring of its own; [`Collector`] takes the events out; a [`Feed`] hands them, in
//!   order, to all who want them now.
//! - [`blktrace`] reads and writes what `blktrace` writes and `blkparse` and `btt` read.
//! - [`guest`] sets the clock of a guest's own blktrace, so that its hops stand above ours.
//! - [`latency`] pairs the events of a request and splits its life into hops; [`slow`] keeps the requests that took long.
//!
//! See docs/decisions/0008-trace.md.

pub mod blktrace;
mod event;
mod feed;
pub mod guest;
pub mod latency;
mod recorder;
pub mod slow;

pub use event::{Action, Device, Event, Extra, op_name};
pub use feed::{Feed, Next, Sorter, Subscription};
pub use recorder::{Collector, DEFAULT_CAPACITY, Drops, GivenClock, MAX_QUEUES, Recorder};
