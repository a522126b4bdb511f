//! Resources that a local front end makes for its back end: memory, rings, event channels.

use super::granter::LocalGranter;
use crate::rings::FrontResources;
use crate::rings::{FrontQueueParts, Granter};
use pvblk_block::Error;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_protocol::blkif::{EventFdChannel, FrontRing, RingSize};
use pvblk_protocol::local::Frame;
use pvblk_protocol::local::MAX_MEMORY;
use pvblk_protocol::local::socket;
use pvblk_protocol::xenbus::QueueKeys;
use pvblk_sys::{PAGE_SIZE, PeerEvent, Region, create_sealed};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// A front end's memory. It is kept when the front end reconnects: waiting requests have their data in it.
#[derive(Debug)]
pub(super) struct FrontMemory {
    file: OwnedFd,
    region: Arc<Region>,
    /// Frames of the grant table, which is at the start.
    table: u32,
    /// Queues of the first connection; the memory has ring frames for this many.
    pub queues: usize,
    /// Size of each ring.
    pub ring: RingSize,
    _bill: Gauge,
}

impl FrontMemory {
    /// Allocates a memory with `data_bytes` for data. Errors if that isn't 4 KiB to 63 GiB, or the system has no
    /// room.
    fn new(
        data_bytes: u64,
        queues: usize,
        ring: RingSize,
        name: &str,
    ) -> Result<FrontMemory, Error> {
        let data = data_bytes.div_ceil(PAGE_SIZE as u64);
        let rings = (queues * ring.pages()) as u32;
        // 2^24 frames are 64 GiB; the sum checks tables and rings too.
        let frames = u32::try_from(data)
            .ok()
            .filter(|&d| d > 0 && d <= 1 << 24)
            .ok_or_else(|| too_large(data_bytes))?;
        let table = LocalGranter::table_frames(rings + frames);
        let bytes = u64::from(table + rings + frames) * PAGE_SIZE as u64;
        if bytes > MAX_MEMORY {
            return Err(too_large(data_bytes));
        }
        let os = |e| Error::os(format!("making {bytes} bytes of guest memory"), e);
        let file = create_sealed("pvblk-guest-memory", bytes).map_err(os)?;
        let region = Region::shared(file.as_fd(), 0, bytes as usize, true)
            .map_err(|e| Error::os("mapping the guest memory", e))?;
        let owner = format!("{name}: guest memory");
        Ok(FrontMemory {
            file,
            region: Arc::new(region),
            table,
            queues,
            ring,
            _bill: Gauge::fixed(owner, MemoryKind::Shared, bytes),
        })
    }

    fn first_data_frame(&self) -> u32 {
        self.table + (self.queues * self.ring.pages()) as u32
    }

    /// Makes a ring on the frames from `first` on, and grants them.
    fn ring(
        &self,
        granter: &LocalGranter,
        first: u32,
        size: RingSize,
    ) -> Result<(FrontRing, Vec<u32>), Error> {
        let frames = first..first + size.pages() as u32;
        let pages: Vec<u64> = frames.clone().map(u64::from).collect();
        let region = Region::from_frames(self.file.as_fd(), &pages, true)
            .map_err(|e| Error::os("mapping a ring", e))?;
        // The ring is initialised before the back end can see a reference to it.
        let ring = FrontRing::new(region)
            .ok_or_else(|| Error::config("a ring has 1, 2, 4, 8 or 16 pages"))?;
        let grants = frames.map(|f| granter.grant(f, false)).collect();
        let refs: Option<Vec<u32>> = grants;
        let refs = refs.ok_or_else(|| Error::config("the grant table is too small"))?;
        Ok((ring, refs))
    }
}

/// Allocates resources when the back end's offers are known, and passes them over the socket.
pub(super) struct LocalResources {
    pub socket: Arc<OwnedFd>,
    pub deadline: Instant,
    pub data_bytes: u64,
    pub name: String,
    /// Memory of an earlier connection, or of this one once it is made.
    pub memory: Option<Arc<FrontMemory>>,
    /// Queues and granter, once they are made.
    pub made: Option<(Vec<FrontQueueParts>, Arc<LocalGranter>)>,
}

impl LocalResources {
    fn send(&self, frame: &Frame, fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Error> {
        socket::send(self.socket.as_fd(), frame, fds, Some(self.deadline))
    }

    fn memory(&mut self, queues: usize, ring: RingSize) -> Result<Arc<FrontMemory>, Error> {
        if let Some(memory) = &self.memory {
            if queues > memory.queues || ring > memory.ring {
                return Err(Error::protocol(
                    "the handshake asked for more queues or pages than the front end wished",
                ));
            }
            // Grants and rings of the last connection: its back end doesn't use them any more.
            let end = memory.first_data_frame() as usize * PAGE_SIZE;
            memory.region.zero(0, end);
            return Ok(Arc::clone(memory));
        }
        let memory = FrontMemory::new(self.data_bytes, queues, ring, &self.name)?;
        Ok(Arc::clone(self.memory.insert(Arc::new(memory))))
    }
}

impl FrontResources for LocalResources {
    fn allocate(&mut self, queues: usize, ring: RingSize) -> Result<Vec<QueueKeys>, Error> {
        let memory = self.memory(queues, ring)?;
        let granter = LocalGranter::new(
            Arc::clone(&memory.region),
            memory.table,
            memory.first_data_frame(),
            &self.name,
        );
        let frame = Frame::Memory {
            table_first: 0,
            table_frames: memory.table,
        };
        self.send(&frame, &[memory.file.as_fd()])?;
        let (mut parts, mut keys) = (Vec::new(), Vec::new());
        for q in 0..queues as u32 {
            let first = memory.table + q * ring.pages() as u32;
            let (front_ring, ring_refs) = memory.ring(&granter, first, ring)?;
            let event = || PeerEvent::new().map_err(|e| Error::os("making an event channel", e));
            let channel = EventFdChannel {
                to_peer: event()?,
                from_peer: event()?,
            };
            let port = q + 1;
            let fds = [channel.to_peer.as_fd(), channel.from_peer.as_fd()];
            self.send(&Frame::Channel { port }, &fds)?;
            parts.push(FrontQueueParts {
                ring: front_ring,
                channel: Box::new(channel),
            });
            keys.push(QueueKeys {
                ring_refs,
                event_channel: port,
            });
        }
        self.made = Some((parts, Arc::new(granter)));
        Ok(keys)
    }
}

fn too_large(bytes: u64) -> Error {
    Error::config(format!(
        "guest memory of {bytes} bytes; ask for 4 KiB to 63 GiB"
    ))
}
