//! `file`: a volume on a regular file or a block device.

mod blocking;
mod completions;
mod layout;
mod lock;
mod log;
mod queue;
mod ring;
mod shared;
mod swap;
mod task;
mod work_queues;

use crate::extents::file_extents;
use crate::opener::{self, FileOpener};
use crate::spec::{Engine, FileSpec, VolumeSpec};
use layout::{Layout, capacity_sectors, file_len};
use log::ErrorLog;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Capacity, DeviceQueue, Error, EventHub, Extent, Extents,
    Incarnation, Limits, LossMarks, Op, QueueContext, Refresh,
};
use queue::FileQueue;
use rustix::fs::OFlags;
use rustix::io::Errno;
use shared::FileShared;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use swap::Swap;
use work_queues::WorkQueues;

/// Bytes of zeros that write-zeroes writes at a time where the kernel can't do better.
const ZEROS_BYTES: usize = 256 << 10;

/// Most segments of a request: the kernel's `UIO_MAXIOV`.
const MAX_SEGMENTS: u32 = 1024;

/// Longest wait of [`FileVolume::refresh`] for the medium.
const REFRESH_WAITS: Duration = Duration::from_secs(2);

/// A volume on a regular file or a block device. The options are those of [`FileSpec`].
///
/// Durability: FLUSH is `fdatasync`, a write with FUA is one with `RWF_DSYNC`. The kernel reports a failed
/// write-back only once and then forgets the data, and the data that a device lost with a failed flush isn't
/// known: after a failed `fdatasync` every later FLUSH of every queue fails too, until the volume is opened
/// anew.
///
/// No queue waits for the medium: I/O that can't be done at once is done by threads of the volume's own.
///
/// A read past the end of the file gives zeros. Discard punches holes and is refused (as unsupported) with
/// [`pvblk_block::RequestFlags::SECURE`].
///
/// With `direct`, segments in memory that the medium wouldn't take as they are go through a buffer of the
/// queue's, one after another.
pub struct FileVolume {
    limits: Limits,
    engine: Engine,
    most_entries: Option<u32>,
    /// The file is to be locked against other programs.
    locked: bool,
    opener: Arc<dyn FileOpener>,
    shared: Arc<FileShared>,
}

impl FileVolume {
    /// Opens the file, in this process. Fails with one line that says what to do if it is missing, locked,
    /// read-only, no file, or its size is not whole sectors.
    pub fn open(spec: &FileSpec) -> Result<FileVolume, Error> {
        FileVolume::open_by(spec, &opener::in_process())
    }

    /// As [`FileVolume::open`], by an opener.
    pub fn open_by(spec: &FileSpec, opener: &Arc<dyn FileOpener>) -> Result<FileVolume, Error> {
        let name = VolumeSpec::File(spec.clone());
        name.validate()?;
        spec.check_format(&**opener)?;
        let layout = Layout::open(spec, &**opener)?;
        let size = || -> Result<(u64, u64), Errno> {
            let file = layout.file.as_fd();
            let block_device = layout.is_block_device;
            let unit = layout.sector_bytes;
            let sectors = capacity_sectors(file, block_device, unit, spec.read_only)?;
            let bytes = if block_device { 0 } else { file_len(file)? };
            Ok((sectors, bytes))
        };
        let (capacity, known_bytes) = size().map_err(|e| {
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
        let file = Arc::new(layout.file);
        let sync_file = reopen(&**opener, &file, spec.read_only || layout.is_block_device);
        Ok(FileVolume {
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
                exclusive: spec.lock && !spec.read_only,
                ..Limits::default()
            },
            engine: spec.engine.unwrap_or(usual),
            most_entries: None,
            locked: spec.lock,
            opener: Arc::clone(opener),
            shared: Arc::new(FileShared {
                name: name.to_string(),
                syncs_apart: sync_file.is_some(),
                sync_file: sync_file.unwrap_or_else(|| Arc::clone(&file)),
                file,
                is_block_device: layout.is_block_device,
                read_only: spec.read_only,
                in_memory: layout.in_memory,
                swap: match layout.is_swappable {
                    true => Swap::MACHINE,
                    false => Swap::NEVER,
                },
                direct: layout.direct,
                sector_bytes: layout.sector_bytes,
                zeros,
                data_lost: AtomicBool::new(false),
                log: ErrorLog::default(),
                capacity: Capacity::new(capacity),
                events: EventHub::default(),
                known_bytes: AtomicU64::new(known_bytes),
                tries: [true, layout.direct.is_some() || layout.tells_of_writes]
                    .map(AtomicBool::new),
                work_queues: WorkQueues::new(),
                bounces: Mutex::default(),
            }),
        })
    }

    /// Lets the io_uring of each queue have at most `entries` operations (at least 1) and keeps the rest
    /// in its backlog; for tests and for tuning. Queues that are open keep theirs.
    pub fn with_ring_entries(mut self, entries: u32) -> FileVolume {
        self.most_entries = Some(entries.max(1));
        self
    }

    /// The engine that its queues use for direct I/O, unless io_uring isn't available.
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
        self.shared.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let shared = &self.shared;
        let tracing = &context.tracing;
        Ok(Box::new(FileQueue::new(
            Arc::clone(shared),
            context.depth,
            self.most_entries,
            self.engine == Engine::Uring && !shared.in_memory && shared.tries(Op::Write),
            tracing.tracer(&shared.name, context.index, context.submitter),
        )))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            refresh: Some(self),
            extents: Some(self),
            incarnation: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Refresh for FileVolume {
    /// Waits two seconds at most; a size that is found later counts from then on.
    fn refresh(&self) -> Result<(), Error> {
        let (tell, told) = mpsc::sync_channel(1);
        let shared = Arc::clone(&self.shared);
        let (locked, opener) = (self.locked, Arc::clone(&self.opener));
        let look = move || {
            let _ = tell.send(shared.look());
            if locked {
                let file = shared.file.as_fd();
                lock::warn_of_loops(&*opener, &shared.name, file, shared.read_only);
            }
        };
        let failed =
            |e: io::Error| Error::os(format!("{}: can't ask for its size", self.shared.name), e);
        if self
            .shared
            .work_queues
            .threads()
            .run(Box::new(look))
            .is_err()
        {
            return Err(failed(io::Error::other("no thread to be had")));
        }
        match told.recv_timeout(REFRESH_WAITS) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(failed(e.into())),
            Err(_) => Err(failed(io::Error::other(
                "the medium doesn't answer; the size is taken over when it does",
            ))),
        }
    }
}

impl Extents for FileVolume {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        file_extents(self.shared.file.as_fd(), sector, sectors, out)
            .map_err(|e| Error::os(format!("{}: looking for holes", self.shared.name), e))
    }
}

impl LossMarks for FileVolume {
    fn incarnation(&self) -> Incarnation {
        Incarnation {
            // The page cache outlives this process, but not the kernel.
            cache: pvblk_sys::boot_mark(),
            contents: None,
        }
    }
}

/// The file, opened once more for `fdatasync` alone. Linux reports a failed write-back once to each open file
/// description: a report to a write with FUA on the first one leaves the report to this one. `None` where
/// that can't be done, for example without /proc.
fn reopen(opener: &dyn FileOpener, file: &OwnedFd, read_only: bool) -> Option<Arc<OwnedFd>> {
    let flags = match read_only {
        true => OFlags::RDONLY,
        false => OFlags::RDWR,
    };
    opener.reopen(file.as_fd(), flags).ok().map(Arc::new)
}
