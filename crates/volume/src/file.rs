//! `file`: a volume on a regular file or a block device.

mod blocking;
mod layout;
mod log;
mod ring;
mod task;

use crate::extents::file_extents;
use crate::spec::{Engine, FileSpec, VolumeSpec};
use layout::{Alignment, Layout, capacity_sectors};
use log::ErrorLog;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Buffer, Capacity, Completion, DeviceEvent, DeviceQueue, Error, EventHub, Extent,
    Incarnation, Limits, QueueContext, Readiness, Request, Status,
};
use ring::RingEngine;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

/// Bytes of zeros that write-zeroes writes at a time where the kernel can't do better.
const ZEROS_BYTES: usize = 256 << 10;

/// Most segments of a request: the kernel's `UIO_MAXIOV`.
const MAX_SEGMENTS: u32 = 1024;

/// A volume on a regular file or a block device. The options are those of [`FileSpec`].
///
/// Durability: FLUSH is `fdatasync`, a write with FUA is one with `RWF_DSYNC`. The kernel reports a failed
/// write-back only once and then forgets the data, so after a failed `fdatasync` through the page cache every
/// later FLUSH fails too, until the volume is opened anew.
///
/// A read past the end of the file gives zeros. Discard punches holes and is refused (as unsupported)
/// with [`pvblk_block::RequestFlags::SECURE`].
///
/// With `direct`, segments in memory that the medium wouldn't take as they are go through a buffer of the queue's,
/// one after another.
pub struct FileVolume {
    spec: FileSpec,
    limits: Limits,
    capacity: Capacity,
    engine: Engine,
    most_entries: Option<u32>,
    events: EventHub,
    shared: Arc<Shared>,
}

/// What the volume's queues share; not touched by more than a load on the hot path.
struct Shared {
    name: String,
    file: Arc<OwnedFd>,
    is_block_device: bool,
    read_only: bool,
    direct: Option<Alignment>,
    /// Never written to, so the system backs it with its one page of zeros.
    zeros: Buffer,
    /// A write-back failed: flushes can't be believed any more.
    data_lost: AtomicBool,
    log: ErrorLog,
}

impl FileVolume {
    /// Opens the file. Fails with one line that says what to do if it is missing, locked, read-only,
    /// no file, or its size is not whole sectors.
    pub fn open(spec: &FileSpec) -> Result<FileVolume, Error> {
        let name = VolumeSpec::File(spec.clone());
        name.validate()?;
        spec.check_format()?;
        let layout = Layout::open(spec)?;
        let capacity = capacity_sectors(
            layout.file.as_fd(),
            layout.is_block_device,
            layout.sector_bytes,
            spec.read_only,
        )
        .map_err(|e| {
            Error::os(
                format!("{name}: can't ask for its size"),
                io::Error::from(e),
            )
        })?;
        let zeros = Buffer::anonymous(ZEROS_BYTES)
            .map_err(|e| Error::os(format!("{name}: no memory"), e))?;
        let usual = if layout.in_memory {
            Engine::Sync
        } else {
            Engine::Uring
        };
        Ok(FileVolume {
            spec: spec.clone(),
            limits: Limits {
                logical_sector_bytes: layout.sector_bytes,
                physical_sector_bytes: layout.physical_bytes,
                max_segments: MAX_SEGMENTS,
                discard_granularity_bytes: layout.discard_bytes,
                write_zeroes: !spec.read_only,
                read_only: spec.read_only,
                volatile_cache: true,
                non_rotational: layout.non_rotational,
                readahead_bytes: layout.readahead_bytes,
                ..Limits::default()
            },
            capacity: Capacity::new(capacity),
            engine: spec.engine.unwrap_or(usual),
            most_entries: None,
            events: EventHub::default(),
            shared: Arc::new(Shared {
                name: name.to_string(),
                file: Arc::new(layout.file),
                is_block_device: layout.is_block_device,
                read_only: spec.read_only,
                direct: layout.direct,
                zeros,
                data_lost: AtomicBool::new(false),
                log: ErrorLog::default(),
            }),
        })
    }

    /// Lets each queue have at most `entries` operations in the kernel (at least 1) and keeps the rest
    /// in its backlog; for tests and for tuning. Queues that are open keep theirs.
    pub fn with_ring_entries(mut self, entries: u32) -> FileVolume {
        self.most_entries = Some(entries.max(1));
        self
    }

    /// The engine that its queues use, unless io_uring turns out not to be available.
    pub fn engine(&self) -> Engine {
        self.engine
    }
}

impl BlockDevice for FileVolume {
    fn describe(&self) -> String {
        self.shared.name.clone()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(FileQueue {
            shared: Arc::clone(&self.shared),
            wanted: self.engine,
            most_entries: self.most_entries,
            depth: context.depth,
            medium: Medium::Idle,
            bounce: None,
            done: Vec::new(),
            tracer: context
                .tracing
                .tracer(&self.shared.name, context.index, context.submitter),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn refresh(&self) -> Result<(), Error> {
        let sectors = capacity_sectors(
            self.shared.file.as_fd(),
            self.shared.is_block_device,
            self.limits.logical_sector_bytes,
            self.spec.read_only,
        )
        .map_err(|e| {
            Error::os(
                format!("{}: can't ask for its size", self.shared.name),
                io::Error::from(e),
            )
        })?;
        if self.capacity.set(sectors) {
            self.events.raise(DeviceEvent::Resized { sectors });
        }
        Ok(())
    }

    fn incarnation(&self) -> Incarnation {
        Incarnation {
            // The page cache outlives this process, but not the kernel.
            cache: pvblk_sys::boot_mark(),
            contents: None,
        }
    }

    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        file_extents(self.shared.file.as_fd(), sector, sectors, out)
            .map_err(|e| Error::os(format!("{}: looking for holes", self.shared.name), e))
    }
}

impl Shared {
    /// The file, opened once more. Linux reports a failed write-back once for each open file: with its own,
    /// every queue's flush hears of it. Falls back to the shared one, say without /proc.
    ///
    /// A block device is opened once: only the opening that holds it exclusively can discard what is in its
    /// page cache. There, a flush that runs on another queue at the very time a failure is reported may miss it.
    fn own_file(&self) -> Arc<OwnedFd> {
        if self.is_block_device {
            return Arc::clone(&self.file);
        }
        let mut flags = OFlags::CLOEXEC | OFlags::RDWR;
        if self.read_only {
            flags = OFlags::CLOEXEC | OFlags::RDONLY;
        }
        flags.set(OFlags::DIRECT, self.direct.is_some());
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::open(path, flags, Mode::empty())
            .map_or_else(|_| Arc::clone(&self.file), Arc::new)
    }

    fn log(&self, request: &Request, e: &io::Error) {
        self.log.warn(&self.name, &describe(request), e);
    }

    fn log_text(&self, what: &str, e: &io::Error) {
        self.log.warn(&self.name, what, e);
    }

    fn lose_data(&self) {
        // Without a page cache nothing was forgotten, and a later flush tells the truth again.
        if self.direct.is_none() && !self.data_lost.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "{}: writing data back failed; every flush fails until the volume is opened anew",
                self.name
            );
        }
    }
}

fn describe(request: &Request) -> String {
    format!(
        "{:?} of {} sectors at {}",
        request.op, request.sectors, request.sector
    )
}

/// How a queue reaches its file; made at the first request, so that idle disks cost nothing.
enum Medium {
    Idle,
    Blocking(Arc<OwnedFd>),
    Ring(Box<RingEngine>, Arc<OwnedFd>),
}

struct FileQueue {
    shared: Arc<Shared>,
    wanted: Engine,
    most_entries: Option<u32>,
    depth: u32,
    medium: Medium,
    /// For unaligned segments with O_DIRECT, made when first needed.
    bounce: Option<(Buffer, Gauge)>,
    done: Vec<Completion>,
    tracer: Tracer,
}

impl FileQueue {
    #[cold]
    fn start(&mut self) {
        let file = self.shared.own_file();
        self.done.reserve(self.depth as usize);
        if self.wanted == Engine::Uring {
            let made = RingEngine::new(
                Arc::clone(&file),
                self.depth,
                self.most_entries,
                &self.shared,
            );
            match made {
                Ok(engine) => {
                    self.medium = Medium::Ring(Box::new(engine), file);
                    return;
                }
                Err(e) => {
                    static TOLD: Once = Once::new();
                    TOLD.call_once(|| {
                        tracing::warn!(
                            "{}: io_uring is not available ({e}); using the sync engine",
                            self.shared.name
                        );
                    });
                }
            }
        }
        self.medium = Medium::Blocking(file);
    }

    /// Does a request whose segments O_DIRECT wouldn't take.
    #[cold]
    fn execute_bounced(&mut self, request: &Request, file: BorrowedFd<'_>) -> Status {
        if self.bounce.is_none() {
            match Buffer::anonymous(blocking::BOUNCE_BYTES) {
                Ok(buffer) => {
                    let owner = format!("{}: bounce buffer", self.shared.name);
                    let gauge = Gauge::fixed(owner, MemoryKind::Anonymous, buffer.len() as u64);
                    self.bounce = Some((buffer, gauge));
                }
                Err(e) => {
                    self.shared
                        .log_text("no memory for a bounce buffer", &io::Error::other(e));
                    return Status::IoError;
                }
            }
        }
        let bounce = self.bounce.as_ref().map(|(buffer, _)| buffer);
        blocking::execute(request, file, &self.shared, bounce)
    }
}

impl DeviceQueue for FileQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        if matches!(self.medium, Medium::Idle) {
            self.start();
        }
        for request in batch.drain(..) {
            self.tracer.request(Phase::Issue, &request);
            let unaligned = self
                .shared
                .direct
                .is_some_and(|alignment| !blocking::is_aligned(&request.buffers, alignment));
            if unaligned {
                let file = match &self.medium {
                    Medium::Blocking(file) | Medium::Ring(_, file) => Arc::clone(file),
                    Medium::Idle => Arc::clone(&self.shared.file),
                };
                let status = self.execute_bounced(&request, file.as_fd());
                self.done.push(Completion { request, status });
                continue;
            }
            match &mut self.medium {
                Medium::Ring(engine, _) => engine.push(request, &self.shared, &mut self.done),
                Medium::Blocking(file) => {
                    let status = blocking::execute(&request, file.as_fd(), &self.shared, None);
                    self.done.push(Completion { request, status });
                }
                Medium::Idle => self.done.push(Completion {
                    request,
                    status: Status::IoError,
                }),
            }
        }
        if let Medium::Ring(engine, _) = &mut self.medium {
            engine.submit(&self.shared);
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        if let Medium::Ring(engine, _) = &mut self.medium {
            engine.collect(&self.shared, &mut self.done);
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        if !self.done.is_empty() {
            return Readiness::Ready;
        }
        match &mut self.medium {
            Medium::Ring(engine, _) => engine.arm(&self.shared),
            _ => Readiness::Wait(None),
        }
    }

    /// Before the first request there is none, and nothing to wait for.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.medium {
            Medium::Ring(engine, _) => Some(engine.wait_fd()),
            _ => None,
        }
    }
}
