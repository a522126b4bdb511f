//! Where disks leave the process: handshakes, and one source of requests each.

pub mod local;
pub mod nbd;
pub mod socket_file;
pub mod vhost_user;
pub mod xen;
pub mod xenbus;
