//! The back end's process: one disk, and the lanes of one connection.

use super::channel::{EventPair, SimChannel};
use super::memory::{FrontMemory, SimGranter, SimMapper};
use super::profile::Offers;
use crate::disk::CrashDisk;
use crate::fuse::{Fuse, Side};
use pvblk_backend::{BlkifQueueParts, BlkifSource, Disk, Lane, RequestSource, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Error, ErrorKind, LossMarks, Readiness};
use pvblk_client::rings::{FrontEvent, FrontResources, FrontWishes, FrontendNegotiation};
use pvblk_client::rings::{FrontParts, FrontQueueParts};
use pvblk_export::xenbus::{BackendNegotiation, Connector};
use pvblk_protocol::blkif::{BackRing, FrontRing, RingSize};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::{Change, FrontKeys, KeyMap, QueueKeys, Store};
use std::sync::Arc;

/// The state in which a worker leaves a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    Active,
    /// The lane sleeps until the disk, a timer, or, if it wants to read, the ring wakes it.
    Asleep {
        timer: bool,
        reads: bool,
    },
}

/// Requests that the lanes of a server take at a time, in turn.
const PULLS: [u32; 4] = [8, 1, 32, 3];

/// One lane and its wake-ups.
struct ServedLane {
    /// `None` once the lane has ended.
    lane: Option<Lane>,
    events: Arc<EventPair>,
    disk_queue: usize,
    rest: Rest,
}

/// The back end's process.
pub struct Server {
    disk: Disk,
    crash_disk: Arc<CrashDisk>,
    lanes: Vec<ServedLane>,
    /// The connection has ended: lanes finish their requests.
    pub ending: bool,
}

impl Server {
    /// A process that serves the disk and has no connection yet.
    pub fn new(crash_disk: &Arc<CrashDisk>) -> Server {
        let device: Arc<dyn BlockDevice> = Arc::clone(crash_disk) as _;
        Server {
            disk: Disk::new("sim", device, Tracing::off()),
            crash_disk: Arc::clone(crash_disk),
            lanes: Vec::new(),
            ending: false,
        }
    }

    /// Number of lanes, including those that have ended.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Ends the connection: no request is pulled any more.
    pub fn stop(&mut self) {
        self.ending = !self.lanes.is_empty();
        for served in &mut self.lanes {
            if let Some(lane) = &mut served.lane {
                lane.stop();
                served.rest = Rest::Active;
            }
        }
    }

    /// True if every lane has ended. Then the connection is forgotten.
    pub fn has_ended(&mut self) -> bool {
        let over = self.ending && self.lanes.iter().all(|b| b.lane.is_none());
        if over {
            self.lanes.clear();
            self.ending = false;
        }
        over
    }

    /// Drops lanes that have no requests in flight.
    pub fn hang_up(&mut self) {
        self.lanes.clear();
        self.ending = false;
    }

    /// Notifies a lane, as a confused peer does.
    pub fn ring(&self, lane: usize) {
        self.lanes[lane].events.notify_back();
    }

    /// Takes the next step of the lane's worker; false if it would sleep on. An error is the reason why the
    /// lane's ring broke.
    pub fn step(&mut self, index: usize, spurious: bool) -> Result<bool, String> {
        let served = &mut self.lanes[index];
        let Some(lane) = &mut served.lane else {
            return Ok(false);
        };
        if let Rest::Asleep { timer, reads } = served.rest {
            let by_disk = self.crash_disk.is_notified(served.disk_queue);
            let by_ring = reads && served.events.back_is_notified();
            if !by_disk && !by_ring && !timer && !spurious {
                return Ok(false);
            }
            served.rest = Rest::Active;
            if by_ring {
                lane.source_woken();
            }
            if by_disk {
                lane.device_woken();
            }
            return Ok(true);
        }
        if !lane.step() {
            // A worker waits for what the lane wants after it was armed.
            if let Readiness::Wait(deadline) = lane.arm() {
                served.rest = Rest::Asleep {
                    timer: deadline.is_some(),
                    reads: lane.wants_read(),
                };
            }
        }
        match lane.finished() {
            None => Ok(true),
            Some(end) => {
                served.lane = None;
                match end {
                    SourceEnd::Closed => Ok(true),
                    SourceEnd::Broken(why) => Err(why.to_string()),
                }
            }
        }
    }
}

/// One end's view of the directories of both.
struct View<'a> {
    own: &'a mut KeyMap,
    peer: &'a KeyMap,
}

impl Store for View<'_> {
    fn read(&self, key: &str) -> Option<String> {
        self.peer.get(key).map(str::to_owned)
    }
    fn write(&mut self, changes: &[Change]) -> Result<(), Error> {
        self.own.apply(changes.to_vec())
    }
}

/// The resources that both ends of a handshake share, by descriptor or by port.
pub struct Wires {
    /// The front end's memory.
    pub memory: Arc<FrontMemory>,
    /// Writes the grant table.
    pub granter: Arc<SimGranter>,
    /// The event channel of port `i + 1`.
    pub events: Vec<Arc<EventPair>>,
    /// The back end has to unmap grants.
    pub counted: bool,
    /// Counter of calls, at one of which a process may die.
    pub fuse: Arc<Fuse>,
    /// Frames of all rings.
    pub ring_frames: usize,
}

/// The front end's half of the handshake.
struct Resources<'a> {
    wires: &'a mut Wires,
    queues: Vec<FrontQueueParts>,
}

impl FrontResources for Resources<'_> {
    fn allocate(&mut self, queues: usize, ring: RingSize) -> Result<Vec<QueueKeys>, Error> {
        let os = |e| Error::os("making a ring", e);
        let mut keys = Vec::new();
        for queue in 0..queues {
            let frame = self.wires.memory.ring_frame(queue, ring.pages());
            let pages = self
                .wires
                .memory
                .map_ring(frame, ring.pages())
                .map_err(os)?;
            let events = EventPair::new().map_err(os)?;
            self.queues.push(FrontQueueParts {
                ring: FrontRing::new(pages).ok_or_else(|| Error::config("not a ring"))?,
                channel: Box::new(SimChannel {
                    events: Arc::clone(&events),
                    side: Side::Front,
                    fuse: Arc::clone(&self.wires.fuse),
                }),
            });
            self.wires.events.push(events);
            self.wires.ring_frames += ring.pages();
            keys.push(QueueKeys {
                ring_refs: self.wires.granter.grant_ring(frame, ring.pages()),
                event_channel: queue as u32 + 1,
            });
        }
        Ok(keys)
    }
}

/// The back end's half of the handshake.
struct Binding<'a> {
    server: &'a mut Server,
    wires: &'a Wires,
    offers: Offers,
}

impl Binding<'_> {
    fn lane(&mut self, keys: &QueueKeys, ring: RingSize) -> Result<ServedLane, Error> {
        let Wires {
            memory,
            fuse,
            counted,
            ..
        } = self.wires;
        let mapper = SimMapper::new(memory, *counted, fuse);
        let mut frames = Vec::new();
        for &gref in &keys.ring_refs {
            fuse.tick(Side::Back);
            let frame = mapper.resolve(gref, true);
            frames.push(frame.map_err(|e| Error::caused(ErrorKind::Protocol, "", e))?);
        }
        let first = frames.first().copied().unwrap_or_default();
        let in_a_row = frames.iter().zip(first..).all(|(&a, b)| a == b);
        let pages = memory.map_ring(first, ring.pages());
        let pages = pages.map_err(|e| Error::os("mapping a ring", e))?;
        let ring = BackRing::new(pages).filter(|_| in_a_row);
        let port = keys.event_channel as usize;
        let Some(events) = self.wires.events.get(port - 1) else {
            return Err(Error::protocol(format!("there is no port {port}")));
        };
        let parts = BlkifQueueParts {
            name: format!("sim queue {}", self.server.lanes.len()),
            ring: ring.ok_or_else(|| Error::protocol("not a ring"))?,
            channel: Box::new(SimChannel {
                events: Arc::clone(events),
                side: Side::Back,
                fuse: Arc::clone(fuse),
            }),
            mapper: Box::new(mapper),
            max_indirect_segments: self.offers.keys.indirect_limit(),
        };
        let source = BlkifSource::new(parts);
        source.fix_pull(PULLS[self.server.lanes.len() % PULLS.len()]);
        let lane = Lane::open(&self.server.disk, Box::new(source))?;
        Ok(ServedLane {
            lane: Some(lane),
            events: Arc::clone(events),
            disk_queue: self.server.crash_disk.last_queue(),
            rest: Rest::Active,
        })
    }
}

impl Connector for Binding<'_> {
    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error> {
        for keys in &front.queues {
            let served = self.lane(keys, front.ring)?;
            self.server.lanes.push(served);
        }
        let device = &self.server.crash_disk;
        let limits = device.limits();
        let incarnation = device.incarnation();
        Ok(DiskProperties {
            sectors: device.capacity_sectors(),
            sector_size: limits.logical_sector_bytes,
            physical_sector_size: limits.physical_sector_bytes,
            read_only: limits.read_only,
            flush: self.offers.flush,
            barrier: self.offers.keys.barrier,
            discard: limits.discard_granularity_bytes > 0,
            discard_secure: false,
            discard_granularity: limits.discard_granularity_bytes,
            persistent: self.offers.keys.persistent,
            max_indirect_segments: self.offers.keys.indirect_limit(),
            cache_mark: incarnation.cache,
            contents_mark: incarnation.contents,
        })
    }

    fn disconnect(&mut self) -> bool {
        self.server.lanes.clear();
        true
    }
}

/// Runs the handshake, both halves in turn. The back end's lanes are open when it returns.
pub fn handshake(
    server: &mut Server,
    wires: &mut Wires,
    wishes: FrontWishes,
    offers: Offers,
    name: &str,
) -> Result<FrontParts, Error> {
    let (mut back_keys, mut front_keys) = (KeyMap::new(), KeyMap::new());
    let mut back = BackendNegotiation::new(offers.keys, true);
    let mut front = FrontendNegotiation::new(wishes);
    let mut queues = Vec::new();
    let mut connected = None;
    back.start(&mut View {
        own: &mut back_keys,
        peer: &front_keys,
    })?;
    front.start(&mut View {
        own: &mut front_keys,
        peer: &back_keys,
    })?;
    for _ in 0..4 {
        let mut view = View {
            own: &mut front_keys,
            peer: &back_keys,
        };
        let mut resources = Resources { wires, queues };
        let event = front.peer_changed(&mut view, &mut resources)?;
        queues = resources.queues;
        if let Some(FrontEvent::Connected(properties)) = event {
            connected = Some(properties);
            break;
        }
        let mut view = View {
            own: &mut back_keys,
            peer: &front_keys,
        };
        let mut binding = Binding {
            server,
            wires,
            offers,
        };
        back.peer_changed(&mut view, &mut binding)?;
    }
    Ok(FrontParts {
        name: name.to_owned(),
        properties: connected.ok_or_else(|| Error::protocol("the handshake doesn't end"))?,
        queues,
        granter: Arc::clone(&wires.granter) as _,
    })
}
