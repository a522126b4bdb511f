//! blkif: the shared-memory ring of Xen's block protocol, both ends of it.
//!
//! [`wire`] is the bytes (xen/include/public/io/blkif.h), [`index`] the index and notification algebra
//! (xen/include/public/io/ring.h), [`FrontRing`] and [`BackRing`] put both on shared pages.
//!
//! What each side guarantees: neither trusts the other. Producer indices are loaded once per batch and
//! checked for distance; an entry is copied out once and only the private copy is used; an end that finds
//! the indices impossible reports [`RingBroken`] and is not to be used again.

mod back;
mod channel;
mod front;
pub mod grant;
pub mod index;
mod layout;
pub mod wire;

pub use back::BackRing;
pub use channel::{EventChannel, EventFdChannel};
pub use front::FrontRing;
pub use index::RingBroken;
pub use layout::{Abi, MAX_RING_PAGES, RingSize};
