//! Both ends of a disk's rings in one process, without a handshake: for tests and in-process benchmarks.
//!
//! The wiring is the local transport's (one memory file mapped by each side, eventfds), with a fixed
//! grant table: reference = frame + 8.

use pvblk_backend::{Access, BlkifQueueParts, GrantError, GrantMapper};
use pvblk_block::{BlockDevice, Buffer, Error, Region};
use pvblk_client::rings::{FrontParts, FrontQueueParts, Granter};
use pvblk_protocol::blkif::grant::RESERVED_GRANTS;
use pvblk_protocol::blkif::{BackRing, EventFdChannel, FrontRing, RingSize};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_sys::{PAGE_SIZE, PeerEvent, create_sealed};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Options of the two ends.
#[derive(Clone, Copy, Debug)]
pub struct Loopback {
    /// Number of rings.
    pub queues: usize,
    /// Pages of each ring.
    pub ring_pages: usize,
    /// Pages of memory for data.
    pub data_pages: usize,
    /// Most indirect segments; 0: none.
    pub indirect: u16,
    /// Grants stay for the lifetime of the connection.
    pub persistent: bool,
    /// True to offer flush; otherwise only barriers are offered.
    pub flush: bool,
}

impl Default for Loopback {
    /// One ring of one page, 32 MiB of data.
    fn default() -> Loopback {
        Loopback {
            queues: 1,
            ring_pages: 1,
            data_pages: 8192,
            indirect: 256,
            persistent: true,
            flush: true,
        }
    }
}

struct FixedGrants {
    memory: Arc<Region>,
    first_data_frame: u32,
}

impl Granter for FixedGrants {
    fn memory(&self) -> &Arc<Region> {
        &self.memory
    }
    fn first_data_frame(&self) -> u32 {
        self.first_data_frame
    }
    fn grant(&self, frame: u32, _read_only: bool) -> Option<u32> {
        Some(frame + RESERVED_GRANTS)
    }
    fn end(&self, _gref: u32) {}
}

struct FixedMapper(Arc<Region>);

impl GrantMapper for FixedMapper {
    fn map(
        &mut self,
        gref: u32,
        at: usize,
        len: usize,
        _: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        let frame = gref
            .checked_sub(RESERVED_GRANTS)
            .ok_or(GrantError::Bad(gref))?;
        let buffer = Buffer::new(&self.0, frame as usize * PAGE_SIZE + at, len);
        Ok((buffer.ok_or(GrantError::Frame(gref))?, Access::Direct))
    }
}

/// The memory of a loopback's front end, which may be kept over connections.
pub struct LoopbackMemory {
    fd: OwnedFd,
    region: Arc<Region>,
    ring_frames: usize,
}

impl Loopback {
    /// Makes both ends of a disk with `device`'s size and limits.
    pub fn wire(
        &self,
        device: &dyn BlockDevice,
    ) -> Result<(FrontParts, Vec<BlkifQueueParts>), Error> {
        self.wire_on(&self.memory()?, device)
    }

    /// Memory for this many rings of this size, or fewer and smaller ones.
    pub fn memory(&self) -> Result<LoopbackMemory, Error> {
        let ring_frames = self.queues * self.ring_pages;
        let bytes = (ring_frames + self.data_pages) * PAGE_SIZE;
        let fd = create_sealed("pvblk-loopback", bytes as u64)
            .map_err(|e| Error::os("making a loopback's memory", e))?;
        let region = Region::shared(fd.as_fd(), 0, bytes, true)
            .map_err(|e| Error::os("mapping a loopback's memory", e))?;
        Ok(LoopbackMemory {
            fd,
            region: Arc::new(region),
            ring_frames,
        })
    }

    /// As [`Loopback::wire`], on memory that nobody else uses any more.
    pub fn wire_on(
        &self,
        on: &LoopbackMemory,
        device: &dyn BlockDevice,
    ) -> Result<(FrontParts, Vec<BlkifQueueParts>), Error> {
        let os = |e| Error::os("wiring a loopback", e);
        let mem = |e| Error::os("wiring a loopback", e);
        let size = RingSize::from_pages(self.ring_pages)
            .filter(|size| self.queues * size.pages() <= on.ring_frames)
            .ok_or_else(|| {
                Error::config("ring pages must be 1, 2, 4, 8 or 16, and fit the memory")
            })?;
        let (fd, memory, bytes) = (&on.fd, Arc::clone(&on.region), on.region.len());
        memory.zero(0, on.ring_frames * PAGE_SIZE);
        let mut front = Vec::new();
        let mut back = Vec::new();
        for q in 0..self.queues {
            let first = (q * size.pages()) as u64;
            let frames: Vec<u64> = (first..first + size.pages() as u64).collect();
            let ours = Region::from_frames(fd.as_fd(), &frames, true).map_err(mem)?;
            let theirs = Region::from_frames(fd.as_fd(), &frames, true).map_err(mem)?;
            let (kick, call) = (PeerEvent::new().map_err(os)?, PeerEvent::new().map_err(os)?);
            let not_a_ring = || Error::config("not a ring size");
            front.push(FrontQueueParts {
                ring: FrontRing::new(ours).ok_or_else(not_a_ring)?,
                channel: Box::new(EventFdChannel {
                    to_peer: kick.try_clone().map_err(os)?,
                    from_peer: call.try_clone().map_err(os)?,
                }),
            });
            back.push(BlkifQueueParts {
                name: format!("loopback queue {q}"),
                ring: BackRing::new(theirs).ok_or_else(not_a_ring)?,
                channel: Box::new(EventFdChannel {
                    to_peer: call,
                    from_peer: kick,
                }),
                mapper: Box::new(FixedMapper(Arc::new(
                    Region::shared(fd.as_fd(), 0, bytes, true).map_err(mem)?,
                ))),
                max_indirect_segments: self.indirect,
            });
        }
        let limits = device.limits();
        let properties = DiskProperties {
            sectors: device.capacity_sectors(),
            sector_size: limits.logical_sector_bytes,
            physical_sector_size: limits.physical_sector_bytes,
            read_only: limits.read_only,
            flush: self.flush,
            barrier: true,
            discard: limits.discard_granularity_bytes > 0,
            discard_secure: false,
            discard_granularity: limits.discard_granularity_bytes,
            persistent: self.persistent,
            max_indirect_segments: self.indirect,
            cache_mark: device.incarnation().cache,
            contents_mark: device.incarnation().contents,
        };
        let parts = FrontParts {
            name: "loopback".into(),
            properties,
            queues: front,
            granter: Arc::new(FixedGrants {
                memory,
                first_data_frame: on.ring_frames as u32,
            }),
        };
        Ok((parts, back))
    }
}
