//! The blkif handshake, both halves of it, over any store (xen/include/public/io/{xenbus,blkif}.h).
//!
//! Each end owns a directory of short text keys and reads the other's. [`BackendNegotiation`] and
//! [`FrontendNegotiation`] are step machines: their owner calls them when the peer's directory changed. They read it
//! through a [`Store`](pvblk_protocol::xenbus::Store), and ask a [`Connector`] or [`FrontResources`] for rings, event channels and memory. No I/O
//! happens here, so the same code runs over a local socket ([`crate::local`]), over xenstore, and under a fuzzer.
//!
//! Neither end trusts the peer's directory. Every number is parsed strictly and bounded before it is used, and every
//! refusal names the key. A refusal ends this connection only.

mod backend;
mod frontend;
mod host;
mod inbox;
pub(crate) mod serving;

#[cfg(test)]
mod negotiation_tests;

pub use backend::{BackendNegotiation, Connector};
pub use frontend::{
    FrontEvent, FrontPersonality, FrontResources, FrontWishes, FrontendNegotiation,
};
pub use host::{Attachment, DiskHost, Ended, attach_queues};
pub(crate) use inbox::{ConnectionEvent, Inbox};
