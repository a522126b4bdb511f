//! The back end: workers own queues, take requests from any [`RequestSource`], and give them to a disk.
//!
//! A [`Backend`] is a fixed set of worker threads. Each source becomes a lane (`lane`) on one worker:
//! source → device queue → source. [`BlkifSource`] is the source for a blkif ring; others live in `export`.
//!
//! What it guarantees: a broken or hostile source ends alone; every request that was taken is answered
//! or its source is gone; barriers and flushes hold across all queues of a disk (`gate`).

mod backend;
mod blkif;
mod budget;
mod disks;
mod gate;
mod grants;
mod lane;
mod losses;
pub mod parse;
mod parts;
mod pool;
mod pressure;
mod questions;
mod seldom;
mod service;
mod source;
mod sources;
mod spare;
mod stall;
mod stopping;
mod users;
mod worker;

pub use backend::{Backend, BackendOptions, Disk, SourceId};
pub use blkif::{BlkifQueueParts, BlkifSource};
pub use budget::{Budget, Claim, Waiter};
pub use disks::Disks;
pub use gate::Pass;
pub use grants::{Access, GrantError, GrantMapper, PageUse};
pub use lane::Lane;
pub use losses::{Losses, Seat, Submitted};
pub use pool::{BufferPool, PoolCounters};
pub use pressure::{
    DiskMemory, FLOOR_PAGES_PER_WORKER, MAX_BUFFER_PAGES, Pressure, PressureReport,
    SQUEEZE_DURATION, Squeezed,
};
pub use seldom::{Seldom, Times};
pub use service::{Attachment, DiskEnd, Key, Service};
pub use source::{PullBatch, Pulled, RequestSource, SourceEnd};
pub use sources::{SourceState, Sources, Watch, group_limit, memory_limit};
pub use spare::SpareRequests;
pub use stall::Stall;
pub use stopping::{StopTimes, Stopping, Turn};
pub use users::{FenceOpened, User, Users};
pub use worker::{LaneWaker, OnEnd};
