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
//! round (docs/decisions/0004-merge-in-the-plug.md). A request that finds no tag waits in the hardware queue in order.
//! Small requests of a stream that come one by one are held in `backlog`, and merged there, while the ring has as many in flight as
//! its device can use (`limit`; docs/decisions/0051-limit-in-flight.md): the shape of the requests depends on the device, and not on the
//! size of the ring, from which seed 000's anomalies come.
//!
//! The event channel's handler only marks: whoever polls drains the ring, a bounded batch at a time,
//! under the hardware queue's lock, and leaves completions of other submitters in their completion queues (seed 001).
//!
//! Every request in flight has a private shadow: what the back end writes to the ring is checked
//! against it, and it is what a reconnect replays (docs/decisions/0006-reconnect.md).

mod backlog;
mod connection;
mod device;
mod durability;
mod frames;
mod handshake;
mod hardware_queue;
mod limit;
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
pub use limit::LimitBounds;
pub use parts::{FrontParts, FrontQueueParts, Granter};
pub use plug::{InStream, MergePolicy};
pub use statistics::Statistics;
