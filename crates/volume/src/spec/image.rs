//! Images of Ceph clusters, opened in this process or in another one.

use super::Need;
use pvblk_block::{BlockDevice, Error};
use pvblk_client::rbd::{RbdDisk, RbdSpec};
use std::fmt;
use std::sync::Arc;

/// Opens images. Ceph's library starts threads, reads files and connects, so a server without the rights to do so has another process open them.
pub trait ImageOpener: fmt::Debug + Send + Sync {
    fn open(&self, spec: &RbdSpec, need: &Need) -> Result<Arc<dyn BlockDevice>, Error>;
}

/// Opens them in this process.
#[derive(Debug)]
pub(super) struct InProcess;

impl ImageOpener for InProcess {
    fn open(&self, spec: &RbdSpec, _: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        Ok(Arc::new(RbdDisk::open(spec)?))
    }
}
