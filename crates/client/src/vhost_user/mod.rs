//! A vhost-user client: a disk of any vhost-user-blk server as a block device, without a virtual machine.
//!
//! It does what a guest's driver and its monitor do together: it shares memory with the server, puts rings into it and speaks to the server's
//! socket. Each opened queue takes one of the rings. Buffers come from the shared memory ([`BlockDevice::buffer_source`]); others are copied.
//!
//! Everything the server says is checked. An answer that makes no sense, or a lost connection, fails all queues: what is in flight and all that comes
//! later ends with an I/O error, and [`VhostClient::failure`] says why. With [`VhostClientConfig::patience`] a lost connection is
//! made anew, as QEMU does it: the next server finds the rings, and what was in flight, where the last one left them.

mod config;
mod front;
mod memory;
mod queue;
mod resume;
mod watch;

use crate::dial::{self, Dialer};
use config::{CONFIG_BYTES, Terms};
use front::Front;
use memory::Memory;
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{
    BlockDevice, BufferSource, Buffers, Capabilities, Capacity, Close, DeviceEvent, DeviceQueue,
    Error, ErrorKind, EventHub, Limits, QueueContext, Refresh, Region,
};
use pvblk_protocol::vhost_user::{
    Code, ConfigHead, MemoryRegion, SingleRegion, VringAddr, VringState, features,
};
use pvblk_protocol::virtio::Driver;
use pvblk_sys::{PAGE_SIZE, PeerEvent};
use queue::ClientQueue;
use resume::{Kept, Seat};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use watch::Watch;
use zerocopy::IntoBytes;

/// Where our memory begins for the server: above what a 32-bit device could reach, so that addresses are never taken for offsets.
const GUEST: u64 = 1 << 32;
/// Entries of a ring: a power of two, as many at most as a table of the server's may have.
const ENTRIES: std::ops::RangeInclusive<u16> = 4..=1024;

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct VhostClientConfig {
    /// Rings, 1 to 64; each is one queue.
    pub queues: u16,
    /// Entries of each, a power of two from 4 to 1024: requests in flight.
    pub entries: u16,
    /// Bytes for the buffers of all queues.
    pub memory_bytes: u64,
    /// Longest time of each answer of the server.
    pub timeout: Duration,
    /// If the server has fewer rings, those are enough.
    pub fewer: bool,
    /// Longest absence of the server. Meanwhile requests wait, and the next server does again what was in flight; this needs a server
    /// with in-flight tracking. `None`: a lost connection ends everything.
    pub patience: Option<Duration>,
    /// Makes all connections.
    pub dialer: Arc<dyn Dialer>,
}

impl Default for VhostClientConfig {
    /// One ring of 256 entries, 64 MiB, 10 seconds.
    fn default() -> VhostClientConfig {
        VhostClientConfig {
            queues: 1,
            entries: 256,
            memory_bytes: 64 << 20,
            timeout: Duration::from_secs(10),
            fewer: false,
            patience: None,
            dialer: dial::in_process(),
        }
    }
}

/// One ring, and how to ring.
struct Ring {
    driver: Driver,
    kick: Arc<PeerEvent>,
    call: Arc<PeerEvent>,
}

/// State that the device and its queues share.
struct Shared {
    name: String,
    terms: Terms,
    memory: Arc<Memory>,
    /// Rings that no queue has.
    rings: Mutex<Vec<Ring>>,
    /// Nothing works any more.
    dead: AtomicBool,
    failure: Mutex<Option<String>>,
    calls: Vec<Arc<PeerEvent>>,
    front: Mutex<Front>,
    /// The state that the next server is told, if there may be one.
    kept: Option<Kept>,
    /// Servers that it was handed to after the first, or was about to be.
    connections: AtomicU32,
    events: EventHub,
}

impl Shared {
    /// All queues end; whoever sleeps is woken to see it.
    fn fail(&self, why: &str) {
        self.failure
            .lock()
            .get_or_insert_with(|| format!("{}: {why}", self.name));
        self.events.set_gone();
        if !self.dead.swap(true, Ordering::AcqRel) {
            self.calls.iter().for_each(|call| call.notify());
            self.events.raise(DeviceEvent::Gone);
        }
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}

/// A disk of a vhost-user-blk server.
pub struct VhostClient {
    path: PathBuf,
    shared: Arc<Shared>,
    capacity: Capacity,
    _watch: Watch,
    _gauge: Gauge,
}

impl VhostClient {
    /// Connects to the server's socket, negotiates, and starts all rings. Errors name the step that failed.
    pub fn connect(path: &Path, config: &VhostClientConfig) -> Result<VhostClient, Error> {
        let name = format!("vhost-user:unix:{}", path.display());
        let named = |e: Error| e.context(name.as_str());
        check(config).map_err(named)?;
        let mut front = Front::connect(path, config).map_err(named)?;
        let (terms, queues) = negotiate(&mut front, config).map_err(named)?;
        let config = &VhostClientConfig {
            queues,
            fewer: false,
            ..config.clone()
        };
        let (file, memory, rings) = share(config, terms.has_event_index()).map_err(named)?;
        let inflight = match config.patience {
            Some(_) => Some(resume::area(&mut front, config).map_err(named)?),
            None => None,
        };
        tell_memory(&mut front, &file, memory.file_bytes()).map_err(named)?;
        let seats: Vec<Seat> = rings.iter().map(Seat::of).collect();
        for (index, seat) in (0u32..).zip(&seats) {
            start(&mut front, index, seat, config.entries, 0).map_err(named)?;
        }
        let kept = inflight.map(|inflight| Kept {
            path: path.to_owned(),
            config: config.clone(),
            file,
            inflight,
            seats,
        });
        let socket = front.copy_socket().map_err(named)?;
        let gauge = Gauge::fixed(name.clone(), MemoryKind::Shared, memory.file_bytes());
        let shared = Arc::new(Shared {
            connections: AtomicU32::new(0),
            calls: rings.iter().map(|r| Arc::clone(&r.call)).collect(),
            // The first queue takes the first one.
            rings: Mutex::new(rings.into_iter().rev().collect()),
            name,
            terms,
            memory: Arc::new(memory),
            dead: AtomicBool::new(false),
            failure: Mutex::default(),
            front: Mutex::new(front),
            kept,
            events: EventHub::default(),
        });
        Ok(VhostClient {
            path: path.to_owned(),
            capacity: Capacity::new(terms.sectors),
            _watch: Watch::start(socket, &shared)?,
            shared,
            _gauge: gauge,
        })
    }

    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }
}

fn check(config: &VhostClientConfig) -> Result<(), Error> {
    let fits = ENTRIES.contains(&config.entries) && config.entries.is_power_of_two();
    if !fits {
        return Err(Error::config(format!(
            "queue-size={}: a power of two from {} to {}",
            config.entries,
            ENTRIES.start(),
            ENTRIES.end()
        )));
    }
    if !(1..=64).contains(&config.queues) {
        let queues = config.queues;
        return Err(Error::config(format!("queues={queues}: 1 to 64")));
    }
    Ok(())
}

/// The terms, and how many rings there will be.
fn negotiate(front: &mut Front, config: &VhostClientConfig) -> Result<(Terms, u16), Error> {
    let mut queues = config.queues;
    let offered = front.number(Code::GetFeatures)?;
    let wanted = config::wanted(offered)?;
    let protocol = front.number(Code::GetProtocolFeatures)?;
    if protocol & features::CONFIG == 0 {
        return Err(Error::protocol(
            "the server doesn't tell a disk's size (CONFIG): is it for another kind of device?",
        ));
    }
    let mut ours =
        features::MQ | features::REPLY_ACK | features::CONFIG | features::CONFIGURE_MEM_SLOTS;
    if config.patience.is_some() {
        if protocol & features::INFLIGHT_SHMFD == 0 {
            return Err(Error::protocol(
                "the server doesn't keep what is in flight (INFLIGHT_SHMFD), so it can't be replaced",
            ));
        }
        ours |= features::INFLIGHT_SHMFD;
    }
    front.take(protocol & ours)?;
    let most = match protocol & features::MQ {
        0 => 1,
        _ => front.number(Code::GetQueueNum)?,
    };
    if u64::from(queues) > most {
        if !config.fewer || most == 0 {
            return Err(Error::config(format!(
                "queues={queues}: the server has {most}"
            )));
        }
        queues = most as u16;
    }
    front.tell(Code::SetOwner, &[], &[])?;
    let space = read_config(front)?;
    let terms = Terms::new(wanted, &space, config.entries)?;
    front.tell(Code::SetFeatures, &wanted.to_le_bytes(), &[])?;
    Ok((terms, queues))
}

fn read_config(front: &mut Front) -> Result<[u8; CONFIG_BYTES], Error> {
    let head = ConfigHead {
        offset: 0,
        size: CONFIG_BYTES as u32,
        flags: 0,
    };
    let asked = [head.as_bytes(), &[0; CONFIG_BYTES]].concat();
    let answer = front.ask(Code::GetConfig, &asked)?;
    let space = answer.get(size_of::<ConfigHead>()..).unwrap_or_default();
    space
        .try_into()
        .map_err(|_| Error::protocol("GET_CONFIG: the server tells no disk's configuration"))
}

/// One file for all: rings first, then the place for buffers.
fn share(
    config: &VhostClientConfig,
    event_index: bool,
) -> Result<(OwnedFd, Memory, Vec<Ring>), Error> {
    let os = |e| Error::os("sharing memory", e);
    let map = |e| Error::os("sharing memory", e);
    let each = Driver::bytes(config.entries);
    let data = each * usize::from(config.queues);
    let bytes = usize::try_from(config.memory_bytes)
        .ok()
        .and_then(|n| n.checked_next_multiple_of(PAGE_SIZE))
        .filter(|&n| n > 0)
        .ok_or_else(|| Error::config("memory=: more than nothing, and what fits here"))?;
    let file = pvblk_sys::create_sealed("pvblk-vhost", (data + bytes) as u64).map_err(os)?;
    let region = |at: usize, len| Region::shared(file.as_fd(), at as u64, len, true).map_err(map);
    let mut rings = Vec::new();
    for index in 0..usize::from(config.queues) {
        let at = index * each;
        let driver = Driver::new(
            Arc::new(region(at, each)?),
            GUEST + at as u64,
            config.entries,
            event_index,
        );
        rings.push(Ring {
            driver,
            kick: Arc::new(PeerEvent::new().map_err(os)?),
            call: Arc::new(PeerEvent::new().map_err(os)?),
        });
    }
    let memory = Memory::new(Arc::new(region(data, bytes)?), GUEST + data as u64);
    Ok((file, memory, rings))
}

fn tell_memory(front: &mut Front, file: &OwnedFd, bytes: u64) -> Result<(), Error> {
    let region = MemoryRegion {
        guest_address: GUEST,
        size: bytes,
        // What we call it ourselves: any name will do.
        user_address: GUEST,
        file_offset: 0,
    };
    if front.has(features::CONFIGURE_MEM_SLOTS) {
        let single = SingleRegion { padding: 0, region };
        return front.tell(Code::AddMemReg, single.as_bytes(), &[file.as_fd()]);
    }
    let table = [&1u32.to_le_bytes()[..], &[0; 4], region.as_bytes()].concat();
    front.tell(Code::SetMemTable, &table, &[file.as_fd()])
}

/// Starts ring `index`, whose used index is `base`.
fn start(front: &mut Front, index: u32, seat: &Seat, entries: u16, base: u16) -> Result<(), Error> {
    let state = |num: u32| VringState { index, num };
    let (descriptor, available, used) = seat.addresses;
    let place = VringAddr {
        index,
        flags: 0,
        descriptor,
        used,
        available,
        log: 0,
    };
    front.tell(Code::SetVringNum, state(entries.into()).as_bytes(), &[])?;
    front.tell(Code::SetVringBase, state(base.into()).as_bytes(), &[])?;
    front.tell(Code::SetVringAddr, place.as_bytes(), &[])?;
    let which = u64::from(index).to_le_bytes();
    front.tell(Code::SetVringKick, &which, &[seat.kick.as_fd()])?;
    front.tell(Code::SetVringCall, &which, &[seat.call.as_fd()])?;
    front.tell(Code::SetVringEnable, state(1).as_bytes(), &[])
}

impl BlockDevice for VhostClient {
    fn describe(&self) -> String {
        format!("vhost-user:unix:{}", self.path.display())
    }

    fn limits(&self) -> Limits {
        self.shared.terms.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let Some(ring) = self.shared.rings.lock().pop() else {
            return Err(Error::config(format!(
                "{}: all {} queues are in use: ask for more with queues=",
                self.shared.name,
                self.shared.calls.len()
            )));
        };
        let tracer = context
            .tracing
            .tracer(&self.describe(), context.index, context.submitter);
        Ok(Box::new(ClientQueue::new(&self.shared, ring, tracer)))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            refresh: Some(self),
            close: Some(self),
            buffers: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Refresh for VhostClient {
    fn refresh(&self) -> Result<(), Error> {
        let shared = &self.shared;
        let mut front = shared.front.lock();
        let space = read_config(&mut front).inspect_err(|e| {
            // What is answered later would be taken for the answer to the next question.
            match shared.kept {
                Some(_) => front.hang_up(),
                None => shared.fail(&e.to_string()),
            }
        })?;
        drop(front);
        let sectors = config::sectors(&space);
        if self.capacity.set(sectors) {
            self.shared.events.raise(DeviceEvent::Resized { sectors });
        }
        Ok(())
    }
}

impl Close for VhostClient {
    /// Errors if the server ended first, with the reason.
    fn close(&self) -> Result<(), Error> {
        match self.failure() {
            Some(why) => Err(Error::new(ErrorKind::Disconnected, why)),
            None => Ok(()),
        }
    }
}

impl Buffers for VhostClient {
    fn buffer_source(&self) -> Arc<dyn BufferSource> {
        Arc::clone(&self.shared.memory) as Arc<dyn BufferSource>
    }
}

#[cfg(test)]
mod tests;
