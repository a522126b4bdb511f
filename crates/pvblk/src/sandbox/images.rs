//! Images of Ceph clusters in the child: disks of the third process over rings.

use super::child::Link;
use super::library::served_at;
use pvblk_block::{
    BlockDevice, Capabilities, Decorator, DeviceQueue, Error, Forwards, QueueContext,
};
use pvblk_volume::{ImageOpener, Need, RbdSpec};
use std::sync::Arc;

/// Has the third process open images.
#[derive(Debug)]
pub struct Images(pub Arc<Link>);

impl ImageOpener for Images {
    fn open(&self, spec: &RbdSpec, need: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        let text = spec.to_string();
        let (name, rings) = self
            .0
            .open_image(&text)
            .map_err(|e| Error::os(text.clone(), e))?;
        let held = Held {
            link: Arc::clone(&self.0),
            name,
        };
        let disk = served_at(&rings, &held.name).open_for(need);
        let disk = disk.map_err(|e| e.context(text.clone()))?;
        Ok(Arc::new(Image {
            disk,
            text,
            _held: held,
        }))
    }
}

/// An open image.
struct Image {
    // Dropped before the image is closed.
    disk: Arc<dyn BlockDevice>,
    /// As users write it.
    text: String,
    _held: Held,
}

/// An image that the third process has open, until this is dropped.
struct Held {
    link: Arc<Link>,
    name: String,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.link.close_image(&self.name);
    }
}

impl Decorator for Image {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.disk
    }

    fn describe(&self) -> String {
        self.text.clone()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        self.disk.open_device_queue(context)
    }

    fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: inner.refresh,
            extents: inner.extents,
            cached: inner.cached,
            incarnation: inner.incarnation,
            close: inner.close,
            questions: inner.questions,
            memory: inner.memory,
            buffers: inner.buffers,
        }
    }
}
