//! A member of tests whose requests wait, fail or pass as the test says at each poll, and a common list of them in order.

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, EventHub, Forwards,
    Limits, Op, QueueContext, Readiness, Request, Status,
};
use pvblk_raid5::{SUPER_BYTES, SUPER_SECTOR};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The part of a member that a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Flush,
    Superblock,
    /// A log or a bitmap.
    Log,
    Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Passes,
    Waits,
    Fails,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Begun(usize, Kind),
    Ended(usize, Kind),
    /// The array's request of this number is done.
    Done(u64),
}

/// A rule for requests: member, part, first sector.
type Rule = Box<dyn Fn(usize, Kind, u64) -> Fate + Send>;

/// The script of all members.
pub struct Script {
    pub rule: Rule,
    pub events: Vec<Event>,
    /// First sector of the members' data.
    pub data: u64,
}

impl Default for Script {
    fn default() -> Script {
        Script {
            rule: Box::new(|_, _, _| Fate::Passes),
            events: Vec::new(),
            data: u64::MAX,
        }
    }
}

impl Script {
    fn kind(&self, request: &Request) -> Kind {
        let superblock = SUPER_SECTOR..SUPER_SECTOR + SUPER_BYTES as u64 / 512;
        match request.op {
            Op::Flush => Kind::Flush,
            Op::Read => Kind::Read,
            _ if superblock.contains(&request.sector) => Kind::Superblock,
            _ if request.sector < self.data => Kind::Log,
            _ => Kind::Data,
        }
    }
}

pub struct Scripted {
    inner: Arc<dyn BlockDevice>,
    number: usize,
    script: Arc<Mutex<Script>>,
    events: EventHub,
}

impl Scripted {
    pub fn over(
        inner: &Arc<dyn BlockDevice>,
        number: usize,
        script: &Arc<Mutex<Script>>,
    ) -> Arc<dyn BlockDevice> {
        Arc::new(Scripted {
            inner: Arc::clone(inner),
            number,
            script: Arc::clone(script),
            events: EventHub::default(),
        })
    }
}

impl Decorator for Scripted {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        "scripted".into()
    }

    fn limits(&self) -> Limits {
        Limits {
            volatile_cache: true,
            ..self.inner.limits()
        }
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(ScriptedQueue {
            inner: self.inner.open_device_queue(context)?,
            number: self.number,
            script: Arc::clone(&self.script),
            waiting: Vec::new(),
            failed: Vec::new(),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

struct ScriptedQueue {
    inner: Box<dyn DeviceQueue>,
    number: usize,
    script: Arc<Mutex<Script>>,
    waiting: Vec<Box<Request>>,
    failed: Vec<Completion>,
}

impl ScriptedQueue {
    fn pass(&mut self) {
        let script = self.script.lock();
        let fate = |r: &Request| (script.rule)(self.number, script.kind(r), r.sector);
        let mut passed: Vec<_> = self
            .waiting
            .extract_if(.., |r| fate(r) == Fate::Passes)
            .collect();
        let failed = self.waiting.extract_if(.., |r| fate(r) == Fate::Fails);
        self.failed.extend(failed.map(|request| Completion {
            request,
            status: Status::IoError,
        }));
        drop(script);
        self.inner.submit(&mut passed);
    }
}

impl DeviceQueue for ScriptedQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut script = self.script.lock();
        for request in batch.iter() {
            let kind = script.kind(request);
            script.events.push(Event::Begun(self.number, kind));
        }
        drop(script);
        self.waiting.append(batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.pass();
        let before = out.len();
        out.append(&mut self.failed);
        self.inner.poll(out);
        let mut script = self.script.lock();
        for completion in &out[before..] {
            let kind = script.kind(&completion.request);
            script.events.push(Event::Ended(self.number, kind));
        }
    }

    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
