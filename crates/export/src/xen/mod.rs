//! Disks for Xen guests: the same handshake and the same rings as [`crate::local`], over xenstore, grants and event
//! channels.
//!
//! The server runs in dom0 or in a driver domain. `pvblk xen attach` ([`toolstack`]) attaches a disk: it creates two
//! directories, as Xen's toolstack does for its own disks:
//!
//! ```text
//! /local/domain/<ours>/backend/pvblk/<guest>/<device>     frontend, frontend-id, online, disk, state = 1
//! /local/domain/<guest>/device/vbd/<device>               backend, backend-id, virtual-device, state = 1
//! ```
//!
//! Only pvblk uses the kind `pvblk`, so no driver of the kernel takes the directories for its own; a guest's blkfront
//! follows its `backend` key, whatever the kind. `disk` names a disk of a server; several servers may share the kind.
//!
//! The server trusts nothing that a guest writes (see [`crate::xenbus`]). A guest that writes to xenstore or notifies
//! without end is handled once in each turn. The hypervisor maps or copies the guest's pages and checks each grant.
//! When a guest is gone, its queues are drained, all its pages are unmapped, and its directory is removed.

mod connector;
mod guest_disk;
mod hypervisor;
mod mapper;
pub mod node;
mod server;
mod standing;
mod store;
pub mod toolstack;
mod xenstore;

pub use hypervisor::{ForeignPages, Hypervisor, LinuxXen};
pub use mapper::{CutOff, MAX_MAPPINGS, MAX_PERSISTENT, XenMapper};
pub use server::XenServer;
pub use standing::StandingOrder;
pub use xenstore::{Events, Transaction, WatchEvent, Xenstore};
