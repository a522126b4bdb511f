//! NBD: the handshake, and one connection as a request source.
//!
//! Fixed newstyle only, with simple and structured replies and the `base:allocation` context; TLS and
//! extended headers are refused. The reference is the NBD protocol document (proto.md of the
//! NetworkBlockDevice project); names in capitals are its names.
//!
//! [`NbdServer`] listens and negotiates on short-lived threads, then hands each connection over as a
//! [`NbdSource`]. What touches bytes from a client is free of I/O and can be driven alone:
//! [`Handshake`], [`proto::parse_request`], [`check::check`].
//!
//! [`NbdClient`] is the other side: an export of any server as a block device.
//!
//! Requests must be multiples of the export's minimum block size (its logical sector), which is always
//! advertised with `NBD_OPT_GO`; others are answered with EINVAL, as is everything that was not negotiated.

mod block_status;
pub mod check;
mod client;
mod config;
mod handshake;
mod listener;
mod options;
pub mod proto;
mod receive;
mod reply;
mod server;
mod slots;
mod source;
#[cfg(test)]
mod testing;
mod window;

pub use client::{NbdClient, NbdClientConfig, NbdUri};
pub use config::NbdConfig;
pub use handshake::{ExportInfo, ExportTable, Handshake, Negotiated, Step};
pub use listener::NbdAddr;
pub use server::{Deliver, NbdServer};
pub use source::NbdSource;
