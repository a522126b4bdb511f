//! Blocking calls on a device that has fewer queues than there are threads.

use crate::shared::Shared;
use crate::{Disk, ErrorKind};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, ErrorKind as Kind,
    Forwards, QueueContext, Readiness, Request,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A device with one queue, as that of an NBD server without CAN_MULTI_CONN.
struct OneQueue {
    inner: Arc<dyn BlockDevice>,
    taken: Arc<AtomicBool>,
}

struct TheQueue {
    inner: Box<dyn DeviceQueue>,
    taken: Arc<AtomicBool>,
}

impl Decorator for OneQueue {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        "one".into()
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        if self.taken.swap(true, Ordering::AcqRel) {
            return Err(Error::new(Kind::Exhausted, "one: the queue is in use"));
        }
        Ok(Box::new(TheQueue {
            inner: self.inner.open_device_queue(context)?,
            taken: Arc::clone(&self.taken),
        }))
    }
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

impl DeviceQueue for TheQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.inner.submit(batch);
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.inner.poll(out);
    }
    fn arm(&mut self) -> Readiness {
        self.inner.arm()
    }
    fn woken(&mut self) {
        self.inner.woken();
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

impl Drop for TheQueue {
    fn drop(&mut self) {
        self.taken.store(false, Ordering::Release);
    }
}

fn disk() -> Disk {
    let device = OneQueue {
        inner: pvblk_volume::open("delay:100us:mem:1M").expect("a volume"),
        taken: Arc::default(),
    };
    Disk::new(Shared::new(Arc::new(device), Arc::default(), 4), 4)
}

#[test]
fn threads_wait_for_the_only_queue() {
    let disk = disk();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let disk = &disk;
            scope.spawn(move || {
                for _ in 0..20 {
                    disk.write_at(&[thread as u8; 512], thread * 512)
                        .unwrap_or_else(|e| panic!("{e}"));
                }
            });
        }
    });
    disk.close().unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_user_gets_the_queue_that_no_call_uses() {
    let disk = disk();
    disk.flush().unwrap_or_else(|e| panic!("{e}"));
    let queue = disk.queue(1).unwrap_or_else(|e| panic!("{e}"));
    let error = disk.flush().expect_err("the queue is taken");
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    let line =
        "one: the queue is in use; a blocking call needs a queue, too: close one of the disk's";
    assert_eq!(error.to_string(), line);
    assert!(disk.queue(1).is_err());
    drop(queue);
    disk.flush().unwrap_or_else(|e| panic!("{e}"));
}
