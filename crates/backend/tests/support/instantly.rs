//! A device that completes everything in the next poll.

use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, QueueContext,
    Readiness, Request, Status,
};
use std::os::fd::BorrowedFd;

#[derive(Default)]
pub struct Instantly(EventHub);

#[derive(Default)]
struct InstantQueue(Vec<Completion>);

impl BlockDevice for Instantly {
    fn describe(&self) -> String {
        "instantly".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        1 << 20
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::<InstantQueue>::default())
    }
    fn events(&self) -> &EventHub {
        &self.0
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

impl DeviceQueue for InstantQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.0.extend(batch.drain(..).map(|request| Completion {
            request,
            status: Status::Ok,
        }));
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.0);
    }
    fn arm(&mut self) -> Readiness {
        match self.0.is_empty() {
            true => Readiness::Wait(None),
            false => Readiness::Ready,
        }
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
