//! The only crate of pvblk with `unsafe`: it wraps system calls, and memory that a peer may change, in safe
//! interfaces.
//!
//! Every public function is safe to call. The guarantees of each part:
//! - [`Region`] is a mapping that a peer process (a guest) may change at any moment. No Rust reference into its data
//!   is ever handed out: bytes are copied in or out, indices are atomics.
//! - [`Buffer`] is a checked range of a region and keeps the region mapped. Kernel operations ([`uring`], [`fileio`],
//!   [`socket`]) only take buffers, so memory in flight can't be unmapped.
//! - [`PeerEvent`] and [`PeerFd`] are descriptors shared with a peer: none of their calls waits for the peer.
//! - [`Idle`] is private memory that has no users; other memory that was lent for I/O is never given back to the
//!   system.
//! - [`alloc::Counting`] counts the heap for the report on memory use.
//! - [`Region::guarded`] maps a file that may shrink: a fault marks the region as lost instead of ending the process.
//! - [`librbd`] calls Ceph's libraries, which are loaded at run time; an operation owns its buffers and its image until it is done.
//! - [`xen`] maps and copies pages that guests granted, and handles event channels, through Linux's drivers.
//! - [`xor`] uses the CPU's widest registers, on private memory and on regions.
//!
//! This crate has no policy: no retries, no log, no protocol.

#![allow(unsafe_code)]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod alloc;
mod asan;
mod buffer;
pub mod cpu;
mod eventfd;
pub mod fdpass;
pub mod fileio;
mod idle;
mod lease;
pub mod librbd;
pub mod limits;
pub mod locks;
pub mod loops;
mod memfd;
mod peer_event;
mod peer_fd;
mod poller;
pub mod proc_status;
mod region;
mod sigbus;
pub mod socket;
pub mod ticks;
pub mod uring;
pub mod xen;
pub mod xor;

pub use buffer::{Buffer, gather, scatter, total_len};
pub use eventfd::EventFd;
pub use idle::{Idle, POISON, poison_released_memory};
pub use lease::{Holder, Lease};
pub use memfd::{MemoryFile, check_sealed, create_sealed, guarded_file, is_memory};
pub use peer_event::PeerEvent;
pub use peer_fd::{Closer, PeerFd};
pub use poller::{PollEvent, Poller};
pub use proc_status::boot_mark;
pub use region::{PAGE_SIZE, Region, RegionError};
pub use sigbus::MAX_GUARDED;
