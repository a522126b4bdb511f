//! The local protocol: blkif between two processes of one host, without a hypervisor, with the same handshake and the
//! same rings as for Xen guests.
//!
//! The front end creates one sealed memory file, its "guest memory", and passes it over a `SOCK_SEQPACKET` Unix
//! socket (mode 0600). Grant references index a grant table inside that memory, event channels are pairs of eventfds,
//! and the two xenstore directories travel as messages. Neither side trusts the other: every message, reference and
//! index of the peer is checked.
//!
//! The messages, and the layout of the memory: [`pvblk_protocol::local`].

mod connection;
mod connector;
mod mapper;
mod memory;
mod server;

pub use mapper::LocalMapper;
pub use memory::GuestMemory;
pub use server::LocalServer;
