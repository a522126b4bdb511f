//! blkif: the shared-memory ring of Xen's block protocol, both ends of it.
//!
//! [`wire`] has the messages (xen/include/public/io/blkif.h), [`index`] the indices and the rule for notifications
//! (xen/include/public/io/ring.h); [`FrontRing`] and [`BackRing`] put both on shared pages.
//!
//! Neither side trusts the other. Each loads a producer index once per batch and checks its distance. Each copies an
//! entry once and uses only the private copy. A side that sees an impossible index reports [`RingBroken`]; the ring
//! must not be used after that.

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
