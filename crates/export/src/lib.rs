//! Where disks leave the process: handshakes, and one source of requests each.

pub mod local;
pub mod nbd;
pub mod xenbus;
