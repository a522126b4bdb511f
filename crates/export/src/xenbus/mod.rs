//! The back end's half of the blkif handshake, over any store (xen/include/public/io/{xenbus,blkif}.h).
//!
//! Each end owns a directory of short text keys and reads the other's. [`BackendNegotiation`] is a step machine: its
//! owner calls it when the peer's directory changed. It reads that through a
//! [`Store`](pvblk_protocol::xenbus::Store), and asks a [`Connector`] for rings, event channels and memory. It does no
//! I/O, so the same code runs over a local socket ([`crate::local`]), over xenstore, and under a fuzzer.
//!
//! Neither end trusts the peer's directory. Every number is parsed strictly and bounded before it is used, and every
//! refusal names the key. A refusal ends this connection only.

mod backend;
pub(crate) mod serving;

#[cfg(test)]
mod negotiation_tests;

pub use backend::{BackendNegotiation, Connector};
