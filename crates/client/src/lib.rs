//! Other people's disks as [`BlockDevice`](pvblk_block::BlockDevice)s.
//!
//! | module | disk of |
//! |---|---|
//! | [`rings`] | a blkif back end, whatever brought the rings about |
//! | [`local`] | `pvblk serve` on the same host, over rings |
//! | [`nbd`] | an NBD server |
//! | [`rbd`] | a Ceph cluster |
//! | [`vhost_user`] | a vhost-user-blk server |
//!
//! A client trusts its server as little as a server trusts its clients: all that it says is checked.

pub mod dial;
pub mod local;
pub mod nbd;
pub mod rbd;
pub mod rings;
pub mod vhost_user;
