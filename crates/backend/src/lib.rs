//! The back end: workers own queues, take requests from any [`RequestSource`], and give them to a disk.
//!
//! A [`Backend`] is a fixed set of worker threads. Each source becomes a lane (`lane`) on one worker:
//! source → device queue → source. [`BlkifSource`] is the source for a blkif ring; others live in `export`.
//!
//! It guarantees that a broken or hostile source ends alone, that every request that was taken gets its
//! response unless its source is gone, and that barriers and flushes hold across all queues of a disk
//! (`gate`).

mod active;
mod backend;
mod blkif;
mod budget;
mod counters;
mod disks;
pub mod events;
mod gate;
mod grants;
mod lane;
mod lost_writes;
pub mod parse;
mod pool;
mod pressure;
mod progress;
mod pull_batch;
mod questions;
mod ratelimit;
mod service;
mod source;
mod spare;
mod stall;
mod stopping;
mod throttle;
mod users;
mod worker;

pub use backend::{Backend, BackendOptions, Disk, FixedChoices, SourceId};
pub use blkif::{BlkifQueueParts, BlkifSource};
pub use budget::{Budget, Claim, Waiter};
pub use counters::{DiskCounters, Histogram, LaneNow, OPERATIONS, OperationTotals, Totals};
pub use disks::Disks;
pub use gate::Pass;
pub use grants::{Access, GrantError, GrantMapper, PageUse};
pub use lane::Lane;
pub use lost_writes::{LostWrites, LostWritesQueue, Submitted};
pub use pool::{BufferPool, PoolCounters};
pub use pressure::{
    DiskMemory, FLOOR_PAGES_PER_WORKER, MAX_BUFFER_PAGES, Pressure, PressureReport,
    PressureSourceState, PressureSources, PressureWatch, SQUEEZE_DURATION, Squeezed, group_limit,
    memory_limit,
};
pub use progress::{Progress, Pulse};
pub use pull_batch::{PullBatch, PullChoice};
pub use ratelimit::{RateLimit, Times};
pub use service::{Attachment, DiskEnd, Key, Service};
pub use source::{Pulled, RequestSource, SourceEnd};
pub use spare::SpareRequests;
pub use stall::Stall;
pub use stopping::{StopTimes, Stopping, Turn};
pub use throttle::{Connection, HeldBack, Throttle, ThrottleLimits};
pub use users::{FenceOpened, User, Users};
pub use worker::{LaneWaker, OnEnd, Polled};
