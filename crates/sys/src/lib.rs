//! The only crate of pvblk with `unsafe`: memory that somebody else may change, and the kernel's edges.
//!
//! Everything here is a safe interface. What each side guarantees:
//! - [`Region`] is a mapping that a peer process (a guest) may change at any moment. No Rust
//!   reference into its data is ever handed out: bytes are copied in or out, indices are atomics.
//! - [`Buffer`] is a checked piece of a region that keeps the region mapped. A kernel operation
//!   ([`uring`], [`fileio`], [`socket`]) only takes buffers, so memory in flight can't be unmapped.
//! - [`PeerEvent`] and [`PeerFd`] are descriptors that a peer shares: none of their calls waits for it.
//! - [`Idle`] is private memory that nobody uses, by its type; nothing else that was lent for I/O goes back to the system.
//! - [`alloc::Counting`] counts the heap for the memory bill.
//! - [`Region::guarded`] maps a file that may shrink: the fault becomes a mark on the region.
//! - [`xen`] maps, copies and frees pages that guests granted, and their event channels, by Linux's drivers for it.
//! - [`xor`] uses the CPU's widest registers, on private memory and on regions.
//!
//! No policy lives here: no retry, no log, no protocol.

#![allow(unsafe_code)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod alloc;
mod asan;
mod baton;
mod buffer;
pub mod cpu;
mod eventfd;
pub mod fdpass;
pub mod fileio;
mod idle;
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
pub mod uring;
pub mod xen;
pub mod xor;

pub use baton::{Baton, Holder};
pub use buffer::{Buffer, gather, scatter, total_len};
pub use eventfd::EventFd;
pub use idle::{Idle, POISON, poison_released_memory};
pub use memfd::{MemoryFile, check_sealed, create_sealed, guarded_file, is_memory};
pub use peer_event::PeerEvent;
pub use peer_fd::{Closer, PeerFd};
pub use poller::{PollEvent, Poller};
pub use proc_status::boot_mark;
pub use region::{PAGE_SIZE, Region, RegionError};
pub use sigbus::MAX_GUARDED;
