//! What a server of blkif front ends needs from the process that it is in.

use super::BackendOffers;
use pvblk_backend::{BlkifQueueParts, Pressure};
use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;

/// Tells the server that a connection's queue ended by itself (a broken ring), with a reason for people.
/// From any thread, any number of times; only marks and wakes.
pub type Ended = Arc<dyn Fn(String) + Send + Sync>;

/// The disks that a server serves. Called on its control thread: a slow call delays other handshakes, never I/O.
pub trait DiskHost: Send + Sync {
    /// The device behind a disk's name.
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>>;

    /// What to offer to front ends.
    fn offers(&self) -> BackendOffers;

    /// What buffers that a server needs for its front ends' data give way to.
    fn pressure(&self) -> Arc<Pressure>;

    /// Starts to serve a connection's queues. An error refuses the connection, with its text for the front end.
    fn attach(
        &self,
        disk: &str,
        front: &str,
        queues: Vec<BlkifQueueParts>,
        ended: Ended,
    ) -> Result<Box<dyn Attachment>, Error>;
}

/// A connection's queues at work. Dropped after its detach is done.
pub trait Attachment: Send {
    /// Stops taking requests, lets those in flight end, unmaps everything, then calls `done`, from any thread.
    /// Must not wait. Called once.
    fn detach(&mut self, done: Box<dyn FnOnce() + Send>);
}
