//! The vocabulary of pvblk: requests, devices, queues, limits, trace hooks. No I/O happens here.
//!
//! Everything that stores or forwards blocks is a [`BlockDevice`]: a volume, a cache over a device, a front
//! end over rings. Optional abilities are [`Capabilities`]. Users of a device call the [`Queue`] handle,
//! never the device's own queue. The handle guarantees to the device that
//! - every request is valid for the device's [`Limits`] and capacity at the time of submission, and
//! - data buffers add up to exactly the request's length,
//!
//! and to the user that
//! - every submitted request comes back exactly once, as a [`Completion`], also when a device drops it.
//!
//! The core is step-driven: [`Queue::submit`] a batch, [`Queue::poll`] completions. Before sleeping a
//! user calls [`Queue::arm`] and then waits for [`Queue::wait_fd`] or the deadline. There is no async
//! runtime and no hidden thread.
//!
//! Durability has one meaning: a completed FLUSH, or a write with FUA, is on stable storage of the
//! backing, and a FLUSH covers every write that completed before it was submitted, on any queue.
//!
//! Units: `sector` is a 512-byte sector, whatever the device's logical sector size is; a name that ends
//! in `bytes` or `len` counts bytes.

mod capability;
mod clock;
mod decorator;
mod device;
mod error;
mod event;
mod incarnation;
mod limits;
pub mod memory;
mod merges;
pub mod planted;
mod queue;
mod request;
mod spare_threads;
pub mod stacked;
mod threads;
pub mod time_steps;
pub mod trace;
mod trials;
pub mod units;

pub use capability::{
    BufferSource, Buffers, CacheState, Cached, Capabilities, Close, Extent, ExtentKind, Extents,
    Forwards, LossMarks, Questions, Reclaim, Refresh,
};
pub use clock::{Clock, ManualClock, SystemClock};
pub use decorator::Decorator;
pub use device::{BlockDevice, DeviceQueue, QueueContext, Readiness};
pub use error::{Cause, Error, ErrorKind, error_line};
pub use event::{Condition, DeviceEvent, EventHub, MemberChange, Subscription};
pub use incarnation::Incarnation;
pub use limits::{Capacity, Limits};
pub use merges::MergeCounts;
pub use pvblk_sys::{Buffer, Region};
pub use queue::Queue;
pub use request::{Completion, Op, Request, RequestFlags, SECTOR, SECTOR_SHIFT, Status};
pub use spare_threads::spawn;
pub use threads::{DiskThreads, Job};
pub use trials::{TrialRules, Trials, Work};
