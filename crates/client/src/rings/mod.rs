//! blkfront in user space: a block device over blkif rings.
//!
//! ```text
//! submitter ─ software queue ─ plug: merge ─┐           ┌─ ring ─▶ back end
//! submitter ─ software queue ─ plug: merge ─┴▶ hw queue ┤
//!                    ▲                        tags, shadow └─ ring ◀─ answers
//!                    └──────── completions, in bounded batches
//! ```
//!
//! Each opened queue is a software queue; it is mapped to one of the negotiated rings, its hardware
//! queue. A batch is merged when it is unplugged (`plug`), then issued at once as far as tags go
//! round; nothing waits for merging and nothing is merged because the ring is full, so the shape of
//! the requests doesn't depend on the ring's size (seed 000's anomalies come from that; see
//! docs/decisions/0004-merge-in-the-plug.md). A request that finds no tag waits in the hardware queue in order.
//!
//! The event channel's handler only marks: whoever polls drains the ring, a bounded batch at a time,
//! under the hardware queue's lock, and leaves completions of other submitters in their completion queues (seed 001).
//!
//! Every request in flight has a private shadow: what the back end writes to the ring is checked
//! against it, and it is what a reconnect replays (docs/decisions/0006-reconnect.md).

mod connection;
mod device;
mod durability;
mod frames;
mod handshake;
mod hardware_queue;
mod owners;
mod parts;
mod plug;
mod segments;
mod software_queue;
mod statistics;

pub use device::Frontend;
pub use handshake::{
    FrontEvent, FrontPersonality, FrontResources, FrontWishes, FrontendNegotiation,
};
pub use parts::{FrontParts, FrontQueueParts, Granter};
pub use plug::{InBatch, MergeLimits, MergePolicy, Merged};
pub use statistics::Statistics;
