//! `mem`: a volume in memory.

use crate::extents::file_extents;
use crate::null::ready_if;
use crate::spec::{MemSpec, VolumeSpec};
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Extent, Extents,
    Incarnation, Limits, LossMarks, Op, QueueContext, Readiness, Region, Request, RequestFlags,
    SECTOR, Status,
};
use pvblk_sys::{PAGE_SIZE, gather, scatter};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A volume in a memory file, mapped once: a read or write is one copy.
///
/// The file is sparse: memory is taken when a page is first written or read, and given back by discard and
/// write-zeroes. The size is not checked against the memory of the machine. FLUSH and FUA succeed and have no
/// effect: the data lives as long as the volume.
pub struct MemVolume {
    spec: MemSpec,
    file: OwnedFd,
    region: Arc<Region>,
    events: EventHub,
    /// The mark of the contents, different for each volume: the contents are lost with it.
    mark: u64,
    /// Keeps the volume on the memory bill.
    _gauge: Gauge,
}

impl MemVolume {
    /// Makes one of zeros. Fails if the spec is not valid or the system gives no address space.
    pub fn open(spec: &MemSpec) -> Result<MemVolume, Error> {
        let name = VolumeSpec::Mem(spec.clone());
        name.validate()?;
        let os = |e: io::Error| Error::os(format!("{name}: making memory"), e);
        let file = pvblk_sys::create_sealed("pvblk-mem", spec.size_bytes).map_err(os)?;
        let len = usize::try_from(spec.size_bytes)
            .map_err(|_| Error::config(format!("{name}: too large for this machine")))?;
        let region = Region::shared(file.as_fd(), 0, len, true)
            .map_err(|e| Error::os(format!("{name}: too large for this machine"), e))?;
        Ok(MemVolume {
            _gauge: Gauge::fixed(name.to_string(), MemoryKind::Shared, spec.size_bytes),
            spec: spec.clone(),
            file,
            region: Arc::new(region),
            events: EventHub::default(),
            mark: fastrand::u64(..),
        })
    }
}

impl BlockDevice for MemVolume {
    fn describe(&self) -> String {
        VolumeSpec::Mem(self.spec.clone()).to_string()
    }

    fn limits(&self) -> Limits {
        Limits {
            logical_sector_bytes: self.spec.sector_bytes,
            exclusive: true,
            ..Limits::default()
        }
    }

    fn capacity_sectors(&self) -> u64 {
        self.spec.size_bytes / SECTOR
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(MemQueue {
            region: Arc::clone(&self.region),
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
            extents: Some(self),
            incarnation: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Extents for MemVolume {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        file_extents(self.file.as_fd(), sector, sectors, out)
            .map_err(|e| Error::os(format!("{}: looking for holes", self.describe()), e))
    }
}

impl LossMarks for MemVolume {
    fn incarnation(&self) -> Incarnation {
        Incarnation {
            cache: Some(self.mark),
            contents: Some(self.mark),
        }
    }
}

struct MemQueue {
    region: Arc<Region>,
    done: Vec<Completion>,
    tracer: Tracer,
}

impl MemQueue {
    #[inline]
    fn execute(&self, request: &Request) -> Status {
        // The queue handle checked the request against the capacity, which is fixed; the region
        // checks each copy again.
        let at = (request.sector * SECTOR) as usize;
        match request.op {
            Op::Read => {
                scatter(&request.buffers, &self.region, at);
                Status::Ok
            }
            Op::Write => {
                gather(&request.buffers, &self.region, at);
                Status::Ok
            }
            Op::Flush => Status::Ok,
            Op::Discard | Op::WriteZeroes => self.clear(request),
        }
    }

    #[cold]
    fn clear(&self, request: &Request) -> Status {
        let start = (request.sector * SECTOR) as usize;
        let end = (request.end() * SECTOR) as usize;
        let first_page = start.next_multiple_of(PAGE_SIZE).min(end);
        let last_page = (end - end % PAGE_SIZE).max(first_page);
        let edges = match request.op {
            // Parts of pages may stay as they are, unless they must become unreadable.
            Op::Discard => request.flags.contains(RequestFlags::SECURE),
            _ => true,
        };
        if request.flags.contains(RequestFlags::NO_UNMAP) {
            self.region.zero(start, end - start);
            return Status::Ok;
        }
        if edges {
            self.region.zero(start, first_page - start);
            self.region.zero(last_page, end - last_page);
        }
        if first_page == last_page {
            return Status::Ok;
        }
        if let Err(e) = self.region.punch(first_page, last_page - first_page) {
            tracing::warn!("mem: giving pages back failed, writing zeros instead: {e}");
            self.region.zero(first_page, last_page - first_page);
        }
        Status::Ok
    }
}

impl DeviceQueue for MemQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut rest = batch.drain(..);
        while let Some(request) = rest.next() {
            if let Some(next) = rest.as_slice().first() {
                self.region.prefetch((next.sector * SECTOR) as usize);
            }
            self.tracer.request(Phase::Issue, &request);
            let status = self.execute(&request);
            self.done.push(Completion { request, status });
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
