//! `null`: a volume that stores nothing and completes everything at once.

use crate::spec::{NullSpec, VolumeSpec};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Incarnation, Limits,
    LossMarks, Op, QueueContext, Readiness, Request, SECTOR, Status,
};
use std::os::fd::BorrowedFd;

/// A volume without a medium: it has the cost of the path to it, and nothing else.
///
/// Reads fill the buffers with zeros, so that stale memory isn't seen, unless `notouch` was given. Writes are
/// dropped.
#[derive(Debug)]
pub struct NullVolume {
    spec: NullSpec,
    events: EventHub,
}

impl NullVolume {
    /// Makes one. Fails if the spec is not valid.
    pub fn open(spec: &NullSpec) -> Result<NullVolume, Error> {
        VolumeSpec::Null(spec.clone()).validate()?;
        Ok(NullVolume {
            spec: spec.clone(),
            events: EventHub::default(),
        })
    }
}

impl BlockDevice for NullVolume {
    fn describe(&self) -> String {
        VolumeSpec::Null(self.spec.clone()).to_string()
    }

    fn limits(&self) -> Limits {
        Limits {
            exclusive: true,
            ..Limits::default()
        }
    }

    fn capacity_sectors(&self) -> u64 {
        self.spec.size_bytes / SECTOR
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(NullQueue {
            touch: self.spec.touch,
            done: Vec::with_capacity(context.depth as usize),
            tracer: context
                .tracing
                .tracer(&self.floor(), context.index, context.submitter),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            incarnation: Some(self),
            ..Capabilities::none()
        }
    }
}

impl LossMarks for NullVolume {
    fn incarnation(&self) -> Incarnation {
        // It holds nothing that could be lost.
        Incarnation {
            cache: Some(0),
            contents: None,
        }
    }
}

struct NullQueue {
    touch: bool,
    done: Vec<Completion>,
    tracer: Tracer,
}

impl DeviceQueue for NullQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.tracer
            .requests(Phase::Issue, batch.iter().map(|r| &**r));
        for request in batch.drain(..) {
            if self.touch && request.op == Op::Read {
                request.buffers.iter().for_each(|segment| segment.zero());
            }
            self.done.push(Completion {
                request,
                status: Status::Ok,
            });
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        ready_if(!self.done.is_empty())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The result of `arm` for a queue that completes requests in `submit`.
pub(crate) fn ready_if(something_done: bool) -> Readiness {
    if something_done {
        Readiness::Ready
    } else {
        Readiness::Wait(None)
    }
}
