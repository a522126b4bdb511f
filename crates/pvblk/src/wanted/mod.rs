//! What is wanted of a server: the disks that its configuration and its users name. Decision 27.

mod disk;

pub use disk::{DiskWanted, ParsedDisk, check_name};
