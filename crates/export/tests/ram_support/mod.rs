//! A disk in memory, and waiting.
#![allow(dead_code, reason = "every test file uses another part of it")]

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Capacity, Completion, DeviceEvent, DeviceQueue, Error, ErrorKind,
    EventHub, Incarnation, Limits, LossMarks, Op, QueueContext, Readiness, Request, Status,
};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const WAIT: Duration = Duration::from_secs(60);

/// A disk in memory that can be made to keep its requests.
#[derive(Default)]
pub struct Ram {
    pub limits: Limits,
    pub capacity: Capacity,
    events: EventHub,
    data: Mutex<HashMap<u64, [u8; 512]>>,
    /// Requests stay at the device.
    pub hold: AtomicBool,
    pub held: AtomicUsize,
    /// Queues that were opened, and closed.
    pub opened: AtomicUsize,
    pub closed: AtomicUsize,
    /// Queues that may still be opened, if there is a bound.
    pub room: Mutex<Option<usize>>,
    pub flushes: AtomicUsize,
    /// The mark of its cache.
    pub cache: AtomicU64,
}

impl Ram {
    pub fn new(sectors: u64) -> Arc<Ram> {
        let ram = Ram {
            limits: Limits {
                volatile_cache: true,
                ..Limits::default()
            },
            ..Ram::default()
        };
        ram.capacity.set(sectors);
        Arc::new(ram)
    }

    pub fn resize(&self, sectors: u64) {
        self.capacity.set(sectors);
        self.events.raise(DeviceEvent::Resized { sectors });
    }

    /// The device is gone.
    pub fn vanish(&self) {
        self.events.raise(DeviceEvent::Gone);
    }

    fn run(&self, request: &Request) {
        let mut data = self.data.lock();
        let mut sector = request.sector;
        for buffer in &request.buffers {
            for at in (0..buffer.len()).step_by(512) {
                let entry = data.entry(sector).or_insert([0; 512]);
                match request.op {
                    Op::Read => buffer.write(at, entry),
                    _ => buffer.read(at, entry),
                }
                sector += 1;
            }
        }
        match request.op {
            Op::Discard | Op::WriteZeroes => {
                data.retain(|s, _| !(request.sector..request.end()).contains(s));
            }
            Op::Flush => drop(self.flushes.fetch_add(1, Ordering::Relaxed)),
            _ => {}
        }
    }
}

pub struct RamDevice(pub Arc<Ram>);

impl BlockDevice for RamDevice {
    fn describe(&self) -> String {
        "ram".into()
    }
    fn limits(&self) -> Limits {
        self.0.limits
    }
    fn capacity_sectors(&self) -> u64 {
        self.0.capacity.sectors()
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        if let Some(room) = &mut *self.0.room.lock() {
            let none = || Error::new(ErrorKind::Exhausted, "no room for a queue");
            *room = room.checked_sub(1).ok_or_else(none)?;
        }
        self.0.opened.fetch_add(1, Ordering::AcqRel);
        Ok(Box::new(RamQueue {
            ram: Arc::clone(&self.0),
            kept: Vec::new(),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.0.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            incarnation: Some(self),
            ..Capabilities::none()
        }
    }
}

impl LossMarks for RamDevice {
    fn incarnation(&self) -> Incarnation {
        Incarnation {
            cache: Some(self.0.cache.load(Ordering::Relaxed)),
            contents: None,
        }
    }
}

struct RamQueue {
    ram: Arc<Ram>,
    kept: Vec<Box<Request>>,
}

impl Drop for RamQueue {
    fn drop(&mut self) {
        self.ram.closed.fetch_add(1, Ordering::AcqRel);
    }
}

impl DeviceQueue for RamQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.ram.held.fetch_add(batch.len(), Ordering::AcqRel);
        self.kept.append(batch);
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        if self.ram.hold.load(Ordering::Acquire) {
            return;
        }
        for request in self.kept.drain(..) {
            self.ram.run(&request);
            self.ram.held.fetch_sub(1, Ordering::AcqRel);
            out.push(Completion {
                request,
                status: Status::Ok,
            });
        }
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Wait(Some(Instant::now() + Duration::from_millis(1)))
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
