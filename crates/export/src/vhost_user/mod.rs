//! vhost-user-blk: disks for virtual machines whose monitor speaks vhost-user (QEMU, Cloud Hypervisor, crosvm).
//!
//! ```text
//!  guest ── virtqueues in its memory ──▶ source (one lane each, on a worker)
//!  monitor ── Unix socket ──▶ session ── starts and stops ──┘        all sessions: one control thread
//! ```
//!
//! The monitor passes the guest's memory, where each ring is, and two events a ring; from then on requests go past it. A
//! request's data are [`Buffer`](pvblk_block::Buffer)s in the guest's own pages. States, invariants and what happens when
//! something goes wrong: decision 13.
//!
//! The bytes of the socket are in [`pvblk_protocol::vhost_user`], those of the rings in [`virtqueue`], those of requests in [`request`]; no other
//! module interprets what a peer wrote.

mod areas;
mod bucket;
mod descriptors;
pub mod inflight;
pub mod memory;
mod ports;
pub mod request;
mod ring;
mod server;
mod session;
pub mod shares;
mod source;
mod stream;
pub mod unflushed;
pub mod virtqueue;

pub use server::{Listen, VhostLimits, VhostServer};
pub use source::{Shared, VhostQueueParts, VhostSource};
