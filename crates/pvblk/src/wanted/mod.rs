//! The wanted state of a server: the disks and sockets that its configuration names, and what its users changed at run time. Decision 27.

mod changes;
pub mod command;
mod difference;
mod disk;
pub mod members;
mod merge;
#[cfg(test)]
mod model_folder;
pub mod plan;
mod reload;
mod state;
mod store;
pub mod takeovers;

pub use changes::{Changes, Configured, Listeners};
pub use difference::Difference;
pub use disk::{DiskWanted, ParsedDisk, check_name};
pub use reload::{Reload, Steps};
pub use state::{Seen, WantedState};
pub use store::{LOCK, RealFolder, Store};
