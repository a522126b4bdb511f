//! NBD: the handshake, and one connection as a request source.
//!
//! Fixed newstyle only, with simple and structured replies, extended headers and the `base:allocation` context; TLS 1.3
//! by `NBD_OPT_STARTTLS` where a listener has it. The reference is the NBD protocol document (proto.md of the
//! NetworkBlockDevice project); names in capitals are its names.
//!
//! [`NbdServer`] listens and negotiates on short-lived threads, then hands each connection over as a
//! [`NbdSource`]. Code that touches bytes from a client is free of I/O and can be driven alone:
//! [`Handshake`], [`pvblk_protocol::nbd::parse_request`], [`check::check`].
//!
//! Requests may begin and end anywhere: a block that is written in part is read, changed and written while no other request of the
//! disk, of whatever export, is under way. A command or flag that was not negotiated is answered with EINVAL.
//!
//! Memory that a client can make the server hold counts to the disk's [`pvblk_backend::Budget`], and a client that holds it without going
//! on is let go. One step of a connection moves a bounded number of bytes, so that others on the same worker have their turn.

mod access;
mod block_status;
pub mod check;
#[cfg(test)]
mod client_tests;
mod config;
mod handshake;
mod listener;
mod negotiate;
mod options;
mod receive;
mod reply;
mod server;
mod shares;
mod slots;
mod source;
mod stream;
#[cfg(test)]
mod testing;
mod tls;
mod window;

pub use access::{Identity, Rights, Rule, Rules, Who};
pub use config::NbdConfig;
pub use handshake::{Door, Handshake, Negotiated, Step, TlsUse};
pub use listener::bind_tcp;
pub use server::{NbdServer, NbdSocket};
pub use shares::Shares;
pub use source::NbdSource;
pub use tls::{Clients, Credentials, ReadCredentials, Tls};
