//! Servers: where disks leave the process. Each has a handshake and a source of requests; what they have in common is the [`kit`].

pub mod kit;
pub mod local;
pub mod nbd;
pub mod socket_file;
pub mod vhost_user;
pub mod xen;
pub mod xenbus;
