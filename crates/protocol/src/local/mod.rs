//! The local protocol on its socket and in the front end's memory.
//!
//! [`socket`] and [`SocketStore`] are the only ones of this crate that do I/O: they send and receive one message at a time on a
//! socket that an end has opened, as both ends do it.
//!
//! # Messages, version 1
//!
//! One message is one packet of at most [`MAX_FRAME`] bytes; integers are little-endian;
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

mod frame;
pub mod socket;
mod store;

pub use frame::{Frame, FrameError, MAX_FRAME, MAX_NAME, VERSION};
pub use store::SocketStore;

/// Largest memory of one front end in bytes: 64 GiB.
pub const MAX_MEMORY: u64 = 64 << 30;
/// Domain number in grants of local front ends: the back end is domain 0.
pub const BACKEND_DOMID: u16 = 0;
