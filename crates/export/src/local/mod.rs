//! The local protocol: blkif between two processes of one host, without a hypervisor, with the same handshake and the
//! same rings as for Xen guests.
//!
//! The front end creates one sealed memory file, its "guest memory", and passes it over a `SOCK_SEQPACKET` Unix
//! socket (mode 0600). Grant references index a grant table inside that memory, event channels are pairs of eventfds,
//! and the two xenstore directories travel as messages. Neither side trusts the other: every message, reference and
//! index of the peer is checked.
//!
//! # Messages, version 1
//!
//! One message is one packet of at most [`frame::MAX_FRAME`] bytes; integers are little-endian;
//! `text` is a `u16` length and that many bytes of UTF-8. Nothing may follow the last field.
//!
//! | byte 0 | name    | from  | fields                                                        | descriptors |
//! |--------|---------|-------|---------------------------------------------------------------|-------------|
//! | 1      | HELLO   | front | `pvblkif` (7 bytes), version `u16`, disk text, front end's name text | – |
//! | 2      | ERROR   | back  | reason text; the sender then closes                           | –           |
//! | 3      | WRITE   | both  | count `u16`, then for each change: key text, value text; a length of 0xffff for the value removes the key | – |
//! | 4      | MEMORY  | front | first frame `u32` and frames `u32` of the grant table         | 1: the memory |
//! | 5      | CHANNEL | front | port `u32`                                                    | 2: eventfd that the
//! front end signals, eventfd that the back end signals |
//!
//! HELLO is first and comes once. One WRITE is one transaction on the sender's directory. MEMORY and
//! CHANNELs come before the WRITE that names their references and ports, once per connection of the rings.
//! A closed socket is a dead peer: the back end lets requests in flight end and frees everything.
//!
//! # Guest memory
//!
//! ```text
//! frame 0            grant table: version 1 entries, 512 per frame (xen/include/public/grant_table.h)
//! ...                ring pages, queue after queue
//! first_data_frame   data and indirect pages, the front end's to use
//! ```
//!
//! The back end accepts any layout: it only uses the table's position, and checks every frame number that it reads
//! there.

mod connection;
mod connector;
pub mod frame;
mod front;
mod front_memory;
mod granter;
mod keeper;
mod link;
mod mapper;
mod memory;
mod server;
mod socket;
mod store;

pub use front::{ConnectOptions, connect};
pub use granter::LocalGranter;
pub use keeper::{Keeper, KeeperEvent};
pub use link::{FrontLink, LinkEvent};
pub use mapper::LocalMapper;
pub use memory::{GuestMemory, MAX_MEMORY, MappingBudget, MappingShare};
pub use server::LocalServer;

/// Domain number in grants of local front ends: the back end is domain 0.
const BACKEND_DOMID: u16 = 0;
