//! blkif for Xen guests: the same handshake and the same rings as [`crate::local`], over xenstore, grants and event channels.
//!
//! The server runs in dom0 or in a driver domain. Whoever attaches a disk (`pvblk xen attach`, [`toolstack`]) makes two
//! directories, as Xen's toolstack does for its own disks:
//!
//! ```text
//! /local/domain/<ours>/backend/pvblk/<guest>/<device>     frontend, frontend-id, online, disk, state = 1
//! /local/domain/<guest>/device/vbd/<device>               backend, backend-id, virtual-device, state = 1
//! ```
//!
//! The kind `pvblk` is ours alone, so that no driver of the kernel takes the directories for its own; a guest's blkfront follows
//! its `backend` key, whatever the kind. `disk` names a disk of a server; several servers may share the kind.
//!
//! What each side guarantees: nothing that a guest writes is trusted (see [`crate::xenbus`]); one that writes or rings without end is
//! looked at once a turn; its pages are mapped or copied by the hypervisor, which checks each grant. A guest that is gone, with
//! or without a word, has its queues drained and everything unmapped; then its directory goes, too.

mod attached;
mod connector;
mod hypervisor;
mod mapper;
pub mod node;
mod server;
mod standing;
mod store;
pub mod toolstack;
pub mod wire;
mod xenstore;

pub use hypervisor::{ForeignPages, Hypervisor, LinuxXen};
pub use mapper::{CutOff, MAX_MAPPINGS, MAX_PERSISTENT, XenMapper};
pub use server::XenServer;
pub use standing::StandingOrder;
pub use xenstore::{Events, Transaction, WatchEvent, Xenstore};
