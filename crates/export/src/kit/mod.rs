//! The kit of which the servers of all exports are made. A server is what its protocol needs, and nothing else.
//!
//! ```text
//!  the command ── bind, stop ──▶ ControlThread ─┐
//!                                               │ pvblk-local, pvblk-vhost, pvblk-xen, one pvblk-nbd for each listener
//!                                               ▼
//!  peers ── sockets, xenstore ──▶ Control: waits, and calls its Server ── enter, serve, leave ──▶ FrontEnd ──▶ Service (back end)
//!                                               ▲                                                                  │
//!                                               └────── Inbox: queue ended, left, fence open, resized, gone ◀──────┘ workers, disks' threads
//! ```
//!
//! | piece | is | called on |
//! |---|---|---|
//! | [`ControlThread`] | the handle of a server: ends it when dropped | any thread |
//! | [`Control`] | the one loop: descriptors, events, times, an orderly stop | the control thread |
//! | [`Server`] | the part that a protocol implements; none of its methods may wait | the control thread |
//! | [`Orders`] | what the server's owner has it do while it runs, each with an answer | given on any thread, taken on the control thread |
//! | [`Inbox`] | events from other threads, bounded by what there is to tell | put on any thread, taken on the control thread |
//! | [`Listener`] | a listening socket with its pauses | the control thread |
//! | [`FrontEnd`] | a front end's use of a disk: the fence, its queues, its end | the control thread |
//! | [`MappingBudget`] | the address space that all front ends of a server's process may have mapped | any thread |
//! | [`UnixListen`] | a socket's address as its user wrote it, with its options | any thread |
//!
//! Everything a server needs of its process is a [`Service`](pvblk_backend::Service): it finds disks there by name whenever a peer names one, so a disk
//! that is added is served from then on. A server is added by binding it and removed by dropping its handle; neither concerns another one.
//!
//! Calls that block on a peer or a medium have no place on a control thread: NBD's negotiations have threads of their own, and a disk's last
//! requests are waited for by an event ([`FrontEnd::leave`]).

mod address;
mod control;
mod front_end;
mod inbox;
mod listener;
mod mappings;
mod orders;
#[cfg(test)]
mod tests;

pub use address::{AccessOptions, UnixListen, plain_address, same_address};
#[cfg(test)]
pub(crate) use control::Control;
pub(crate) use control::{ControlThread, Io, Server, Stopping};
pub(crate) use front_end::{FrontEnd, whole_sectors};
pub(crate) use inbox::{Event, Inbox};
pub(crate) use listener::Listener;
pub use mappings::{MappingBudget, MappingShare};
pub(crate) use orders::Orders;
