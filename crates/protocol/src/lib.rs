//! Bytes on the wire, for both ends of each protocol: messages, keys, entries of rings, and the rules by which they are checked. There is
//! no I/O here, but for sending and receiving one message of the local protocol.
//!
//! | module | protocol | reference |
//! |---|---|---|
//! | [`blkif`] | the ring of Xen's block protocol | xen/include/public/io/{ring,blkif}.h |
//! | [`xenbus`] | the keys of its handshake | xen/include/public/io/{xenbus,blkif}.h |
//! | [`xenstore`] | messages to the daemon that holds such keys | xen/include/public/io/xs_wire.h |
//! | [`local`] | the same handshake over a Unix socket, without a hypervisor | here |
//! | [`nbd`] | the network block device | proto.md of the NetworkBlockDevice project |
//! | [`vhost_user`] | messages of a machine monitor | docs/interop/vhost-user.rst of QEMU |
//! | [`tls`] | TLS 1.3 around any of them, by rustls | RFC 8446 |
//! | [`virtio`] | virtio-blk: offers, and the driver's side of a queue | VIRTIO 1.2 |

pub mod blkif;
pub mod local;
pub mod nbd;
pub mod tls;
pub mod vhost_user;
pub mod virtio;
pub mod xenbus;
pub mod xenstore;
