//! What a vhost-user server needs from the process that it is in.

use pvblk_backend::{OnEnd, RequestSource};
use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;

/// Stops a source: what it has in flight ends, then its `on_end` is called, from any thread. Doesn't wait.
pub type Detach = Box<dyn FnOnce() + Send>;

/// The disks that a server serves. Called on its control thread.
pub trait VhostHost: Send + Sync {
    /// The device behind a disk's name.
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>>;

    /// Most queues that a front end may have, at least 1.
    fn queues(&self) -> u16;

    /// Bytes that guests' memories may have altogether that nobody has allocated yet; `None`: no limit. Asked once.
    fn most_unallocated(&self) -> Option<u64> {
        None
    }

    /// Starts to serve one queue of a disk. `on_end` is called once when all of it is gone; after an error never.
    fn attach(
        &self,
        disk: &str,
        source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<Detach, Error>;
}
