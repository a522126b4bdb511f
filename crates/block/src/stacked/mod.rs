//! Parts for stacked devices: devices over devices, such as the page cache and RAID-5 (the kernel's "stacking drivers").
//!
//! ```text
//!  user ──submit, poll, arm──▶ queue 0        queue 1 ◀── user
//!                               │ step          │ step
//!                               ▼               ▼
//!                         ┌─── core: one lock, a state machine without I/O ───┐
//!                         │   told: requests, ends of I/O   says: I/O, done   │
//!                         └───────────────────────────────────────────────────┘
//!     I/O and completions for another queue ──▶ its CompletionQueue, and wake its WaitEntry
//!     I/O for this queue                    ──▶ its LowerQueue ──▶ the device below
//! ```
//!
//! | part | is |
//! |---|---|
//! | [`WaitEntry`] | whether a queue sleeps, and whether it has something to look at; the kernel's wait queue entry |
//! | [`CompletionQueue`] | completions and I/O that other queues leave for a queue |
//! | [`QueueTable`] | a device's queues by number, and the count of those that sleep |
//! | [`LowerQueue`] | a queue of the device below, with a backlog for requests that find no room there |
//! | [`SharedLowerQueue`] | a lower queue that other queues poll while its owner has no request in flight |
//! | [`BackgroundThread`] | a thread that steps a [`Background`] and sleeps in between |
//! | [`finish_within`] | the bounded wait of a queue that is closed |
//!
//! A step takes the core's lock once, takes the results out, and releases the lock before it submits, posts
//! or wakes.
//!
//! docs/decisions/0020-stacked-devices.md has the invariants and their reasons; crates/block/tests/loom.rs checks them over all interleavings.

mod background;
mod completion_queue;
mod finish;
mod lower_queue;
mod primitives;
mod queue_table;
mod shared_lower_queue;
mod wait_entry;

#[cfg(test)]
mod tests;

pub use background::{Background, BackgroundThread, Due};
pub use completion_queue::CompletionQueue;
pub use finish::finish_within;
pub use lower_queue::LowerQueue;
pub use primitives::{Count, Event, Flag, Lock, Native, Primitives, Word};
pub use queue_table::{Neighbour, QueueTable};
pub use shared_lower_queue::SharedLowerQueue;
pub use wait_entry::WaitEntry;
