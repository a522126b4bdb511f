//! The front end of the local protocol ([`pvblk_protocol::local`]): it makes the memory, the rings and the event channels, and connects to
//! a disk of a server of this host.

mod disk;
mod front;
mod front_memory;
mod granter;
mod keeper;
mod link;

pub use disk::LocalDisk;
pub use front::{ConnectOptions, connect};
pub use granter::LocalGranter;
pub use keeper::{Keeper, KeeperEvent};
pub use link::{FrontLink, LinkEvent};
