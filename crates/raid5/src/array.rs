//! The array as a device: each of its queues has queues of its own to all members, and steps the one [`Core`]
//! with their completions.

pub mod ask;
mod away;
mod background;
mod bounce;
mod control;
mod detail;
mod extents;
mod lower;
mod manage;
mod pace;
mod queue;
mod requests;
mod returns;
mod stripes;
mod told;

pub use super::core::Counts as WriteCounts;
pub use background::BackgroundWork;
pub use manage::{
    ArrayMember, ArrayState, ArraySync, ManagedArray, MemberState, Recovered, SyncAction,
};
pub use returns::ReAdded;
pub use stripes::{StripeArray, StripeBackground};

use super::Geometry;
use super::assemble::{Assembly, Incoming, Member};
use super::bitmap::BitmapHeader;
use super::blocking::{Blocking, Idle};
use super::core::{Ability, Core, Kicked, MemberIo, Setup, Work, WritePath};
use super::geometry::STRIPE_SECTORS;
use super::identity::now_secs;
use super::repair::write_superblocks;
use control::{Control, NoteQuiet, Parts, Snapshot, spares_now};
use parking_lot::Mutex;
use pvblk_block::memory::Gauge;
use pvblk_block::stacked::{BackgroundThread, CompletionQueue, QueueTable};
use pvblk_block::{
    BlockDevice, Capabilities, Close, Completion, DeviceEvent, DeviceQueue, Error, EventHub,
    Extent, Extents, Forwards, Incarnation, Limits, LossMarks, Questions, QueueContext, Reclaim,
};
use queue::ArrayQueue;
use returns::Gone;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Most stripe heads: as many as md takes.
const MOST_STRIPES: usize = 32768;
/// Fewest, so that any request makes progress.
const LEAST_STRIPES: usize = 8;
/// Most sectors of a request.
const MAX_SECTORS: u32 = 2048;

/// Finds the devices that questions name, by the grammar of the program that serves the array.
pub trait MemberNames: Send + Sync {
    /// Opens a device as a member. Errors are one line that says what is wrong with the name.
    fn open(&self, name: &str) -> Result<Arc<dyn BlockDevice>, Error>;
    /// The file or block device that a name leads to, whatever is over it: names of one file mean one device.
    fn file(&self, name: &str) -> Option<PathBuf>;
    /// True if two names mean the same device.
    fn same_device(&self, a: &str, b: &str) -> bool {
        a == b || self.file(a).is_some_and(|file| Some(file) == self.file(b))
    }
    /// The specification that starts the array; without a grammar its members in brackets.
    fn spec(&self, parts: &SpecParts) -> String {
        parts.list()
    }
}

/// The present state of an array that serves, as far as a specification of it needs it.
#[derive(Clone, Debug)]
pub struct SpecParts {
    pub set_uuid: [u8; 16],
    /// Names of the members by place; `None`: there is none that is whole.
    pub members: Vec<Option<String>>,
    /// Names of the device that is being rebuilt and of the spares.
    pub spares: Vec<String>,
    /// Names of all devices by which the array is to be found: these, and those that superblocks on disk may still call members.
    pub devices: Vec<String>,
    /// Patterns by which it was found: see [`Raid5::found_in`].
    pub patterns: Vec<String>,
    /// A place has no member, and superblocks on disk may still count on one.
    pub missing: bool,
    pub stripes: usize,
    pub write_path: WritePath,
    /// See [`ArrayOptions`].
    pub member_timeout: Option<Duration>,
    /// Members that were kicked for their time come back by themselves.
    pub re_add: bool,
    pub core: CoreKind,
}

impl SpecParts {
    /// `raid5:[a][missing][c]`: members by place, then spares, without options.
    pub fn list(&self) -> String {
        let members = self.members.iter().map(|m| match m {
            Some(name) => format!("[{name}]"),
            None => "[missing]".into(),
        });
        let spares = self.spares.iter().map(|s| format!("[{s}]"));
        format!("raid5:{}", members.chain(spares).collect::<String>())
    }
}

/// Of a program without a grammar: names are equal or not, and no device can be added by its name.
struct NoNames;

impl MemberNames for NoNames {
    fn open(&self, name: &str) -> Result<Arc<dyn BlockDevice>, Error> {
        Err(Error::config(format!(
            "{name}: this array can't open devices by their names"
        )))
    }
    fn file(&self, _: &str) -> Option<PathBuf> {
        None
    }
}

/// The code that decides what becomes of requests (docs/decisions/0048-stripes-own-themselves.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CoreKind {
    /// One lock for an array: [`Raid5`].
    Lock,
    /// A word for each stripe: [`StripeArray`].
    #[default]
    Words,
}

impl fmt::Display for CoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CoreKind::Lock => "lock",
            CoreKind::Words => "words",
        })
    }
}

impl FromStr for CoreKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<CoreKind, Error> {
        let all = [CoreKind::Lock, CoreKind::Words];
        let named = all.into_iter().find(|core| core.to_string() == text);
        named.ok_or_else(|| Error::config(format!("{text}: no such core; use lock or words")))
    }
}

/// Starts an array that was assembled and prepared, with a thread for its background work. `patterns`: see [`ManagedArray::found_in`].
pub fn serve(
    assembly: Assembly,
    options: &ArrayOptions,
    core: CoreKind,
    patterns: Vec<String>,
) -> Result<Arc<dyn BlockDevice>, Error> {
    Ok(match core {
        CoreKind::Lock => {
            let array = Raid5::start(assembly, options)?;
            array.found_in(patterns);
            array.keep()?;
            array
        }
        CoreKind::Words => {
            let array = StripeArray::start(assembly, options)?;
            array.found_in(patterns);
            array.keep()?;
            array
        }
    })
}

/// Options for serving an array.
#[derive(Clone)]
pub struct ArrayOptions {
    /// Stripe heads, 8 to 32768: each has a page of 4 KiB for every member.
    pub stripes: usize,
    /// Path by which writes go to stripe heads.
    pub path: WritePath,
    /// For simulations: computations wait until the queue is polled, so that others come in between.
    pub lazy: bool,
    /// The devices that questions name.
    pub names: Arc<dyn MemberNames>,
    /// A member that doesn't answer an I/O for so long is kicked; `None`: it is waited for. Needs [`BackgroundWork`].
    pub member_timeout: Option<Duration>,
    /// A member that was kicked for that is taken back when it answers again.
    pub re_add: bool,
}

impl Default for ArrayOptions {
    /// 256 heads, as md.
    fn default() -> ArrayOptions {
        ArrayOptions {
            stripes: 256,
            path: WritePath::default(),
            lazy: false,
            names: Arc::new(NoNames),
            member_timeout: None,
            re_add: false,
        }
    }
}

/// I/O, work and completions that queues leave for one another.
#[derive(Default)]
struct QueueEntries {
    done: Vec<Completion>,
    ios: Vec<MemberIo>,
    works: Vec<Work>,
}

/// A device of the array, as long as it is one.
#[derive(Clone)]
struct MemberDevice {
    device: Arc<dyn BlockDevice>,
    name: String,
}

struct ArrayShared {
    control: Control,
    core: Mutex<Core>,
    /// Partial writes wait for more, and nothing else is written.
    waiting: AtomicBool,
    /// Queues by owner.
    queues: QueueTable<CompletionQueue<QueueEntries>>,
    /// Devices by slot.
    devices: Mutex<Vec<Option<MemberDevice>>>,
    /// Counts changes of them.
    changes: AtomicU64,
    /// Abandoned I/O of queues.
    left_behind: Mutex<Vec<away::LeftBehind>>,
    lazy: bool,
}

/// The means by which the array is found the next time.
#[derive(Default)]
struct Origin {
    patterns: Vec<String>,
    /// Names of devices that superblocks on disk may call members.
    devices: Vec<String>,
    /// `devices` may name some that no superblock on disk names any more.
    stale: bool,
}

impl ArrayShared {
    /// Forgets the devices of these slots, of which some were kicked. Returns them, because closing them may take time.
    fn forget(&self, gone: Vec<usize>, kicked: Vec<Kicked>) -> Vec<Option<MemberDevice>> {
        if gone.is_empty() {
            return Vec::new();
        }
        let mut devices = self.devices.lock();
        let gone_members = kicked.into_iter().filter_map(|kicked| {
            Some(Gone {
                slot: kicked.slot,
                device: devices[kicked.slot].clone()?,
                superblock: kicked.superblock,
                stalled: kicked.stalled,
            })
        });
        let parts: &dyn Parts = self;
        parts.note_away(gone_members);
        let taken = gone.into_iter().map(|slot| devices[slot].take());
        let taken = taken.collect();
        self.changes.fetch_add(1, Ordering::AcqRel);
        taken
    }

    /// Gives a slot its device. The core is locked meanwhile: a queue that writes to the slot must find it.
    fn set_device(&self, slot: usize, device: MemberDevice) {
        let mut devices = self.devices.lock();
        let slots = devices.len().max(slot + 1);
        devices.resize(slots, None);
        devices[slot] = Some(device);
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

impl Parts for ArrayShared {
    fn control(&self) -> &Control {
        &self.control
    }

    fn snapshot(&self) -> Snapshot {
        let core = self.core.lock();
        let superblocks = core.superblocks().0;
        let newest = superblocks.iter().flatten().max_by_key(|s| s.events);
        let devices = self.devices.lock();
        let name = |device: &Option<MemberDevice>| Some(device.as_ref()?.name.clone());
        // Locked together, so that a spare that becomes a member is in one of the lists.
        let spares = self.control.spares.lock();
        Snapshot {
            state: core.state(),
            superblock: newest.cloned().expect("an array has members"),
            names: devices.iter().map(name).collect(),
            spares: spares_now(&spares),
            lag: core.superblocks_lag(),
        }
    }

    fn places(&self) -> Vec<Option<String>> {
        let core = self.core.lock();
        let devices = self.devices.lock();
        let name = |slot: &Option<usize>| Some(devices.get((*slot)?)?.as_ref()?.name.clone());
        core.slots_by_role().iter().map(name).collect()
    }

    fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        let devices = self.devices.lock();
        let devices = devices.iter().flatten();
        devices.map(|d| Arc::clone(&d.device)).collect()
    }

    fn device_at(&self, place: usize) -> Option<Arc<dyn BlockDevice>> {
        let slot = (*self.core.lock().slots_by_role().get(place)?)?;
        let devices = self.devices.lock();
        Some(Arc::clone(&devices.get(slot)?.as_ref()?.device))
    }

    fn homes(&self) -> Vec<Option<(Arc<dyn BlockDevice>, u64)>> {
        let core = self.core.lock();
        let devices = self.devices.lock();
        let device = |slot: usize| Some(Arc::clone(&devices.get(slot)?.as_ref()?.device));
        let home = |(slot, sector): (usize, u64)| Some((device(slot)?, sector));
        core.homes().map(|at| at.and_then(home)).collect()
    }

    fn bitmap_header(&self) -> Option<BitmapHeader> {
        self.core.lock().bitmap().map(|b| b.header().clone())
    }

    fn note_quiet(&self, note: NoteQuiet<'_>) {
        let core = self.core.lock();
        note(&|away| core.at_device(away.slot) > 0);
    }

    fn set_stripes(&self, stripes: usize) -> Result<(), Error> {
        self.core.lock().set_stripes(stripes)
    }

    fn set_write_path(&self, path: WritePath) -> Result<(), Error> {
        self.core.lock().set_write_path(path);
        Ok(())
    }
}

/// Limits of an array whose devices have these.
fn limits_of(all: &[Limits], geometry: &Geometry) -> Limits {
    let most = |f: fn(&Limits) -> u32| all.iter().map(f).max().unwrap_or(512);
    let row_bytes = u32::try_from(geometry.row_sectors() * 512).unwrap_or(0);
    let read_only = all.iter().any(|l| l.read_only);
    Limits {
        logical_sector_bytes: most(|l| l.logical_sector_bytes),
        physical_sector_bytes: most(|l| l.physical_sector_bytes),
        optimal_bytes: row_bytes,
        max_sectors: MAX_SECTORS,
        max_segments: MAX_SECTORS,
        discard_granularity_bytes: match all.iter().all(|l| l.write_zeroes) {
            true => row_bytes,
            false => 0,
        },
        readahead_bytes: most(|l| l.readahead_bytes),
        caches_reads: false,
        write_zeroes: !read_only,
        read_only,
        volatile_cache: all.iter().any(|l| l.volatile_cache),
        non_rotational: all.iter().all(|l| l.non_rotational),
        exclusive: all.iter().all(|l| l.exclusive),
    }
}

/// The user's names of its members.
fn name_of(assembly: &Assembly) -> String {
    let members = assembly.members.iter();
    let names = members.map(|m| m.as_ref().map_or("missing", |m| &m.name));
    format!("raid5 of {}", names.collect::<Vec<_>>().join(", "))
}

/// Errors unless an array takes so many stripe heads.
fn check_stripes(stripes: usize) -> Result<(), Error> {
    if (LEAST_STRIPES..=MOST_STRIPES).contains(&stripes) {
        return Ok(());
    }
    Err(Error::config(format!(
        "raid5 with {stripes} stripes: it takes {LEAST_STRIPES} to {MOST_STRIPES}"
    )))
}

/// The end in order of an array without queues: everything goes to stable storage, and then superblocks say clean.
fn write_clean(assembly: &mut Assembly, idle: &mut Idle<'_>) -> Result<(), Error> {
    let incoming = assembly.incoming.iter().map(|i| &i.member);
    for member in assembly.present().chain(incoming) {
        Blocking::open(&member.device)?.flush(idle)?;
    }
    write_superblocks(assembly, true, now_secs(), idle)
}

/// A RAID-5 array that serves.
pub struct Raid5 {
    shared: Arc<ArrayShared>,
    /// The background thread, if it was started.
    thread: Mutex<Option<BackgroundThread>>,
    /// Data may be wrong, because the array was started by force.
    guessed: bool,
    /// Of its stripes.
    memory: Gauge,
}

impl Raid5 {
    /// Serves an array that was assembled and prepared. Errors if the options are out of range, or there is no memory.
    pub fn start(mut assembly: Assembly, options: &ArrayOptions) -> Result<Arc<Raid5>, Error> {
        check_stripes(options.stripes)?;
        let control = Control::new(&mut assembly, options, CoreKind::Lock)?;
        let slot = |m: &Member| MemberDevice {
            device: Arc::clone(&m.device),
            name: m.name.clone(),
        };
        let mut devices: Vec<_> = assembly
            .members
            .iter()
            .map(|m| m.as_ref().map(slot))
            .collect();
        devices.extend(assembly.incoming.iter().map(|i| Some(slot(&i.member))));
        let ability = |m: &Member| Ability::from(m.device.limits());
        let member = |m: &Member| (m.superblock.clone(), ability(m));
        let incoming = assembly.incoming.as_ref();
        let stripes = |r: &std::ops::Range<u64>| r.start / STRIPE_SECTORS..r.end / STRIPE_SECTORS;
        let mut core = Core::new(Setup {
            geometry: assembly.geometry,
            members: assembly
                .members
                .iter()
                .map(|m| m.as_ref().map(member))
                .collect(),
            incoming: incoming.map(|i| {
                let mut superblock = i.member.superblock.clone();
                superblock.recovery_offset_sectors = i.recovered_sectors;
                (i.place, superblock, ability(&i.member))
            }),
            unsynced: assembly.unsynced.iter().map(stripes).collect(),
            bitmap: assembly.bitmap,
            heads: options.stripes,
            path: options.path,
            rotational: !control.limits.non_rotational,
            unit_bytes: control.limits.logical_sector_bytes as usize,
            dirty: assembly.dirty,
        })?;
        if options.member_timeout.is_some() {
            core.limit_members();
        }
        let memory = core.stripe_memory().clone();
        let condition = told::Seen::of(&core).condition();
        control.events.raise(DeviceEvent::Condition(condition));
        Ok(Arc::new(Raid5 {
            memory,
            guessed: assembly.guessed,
            shared: Arc::new(ArrayShared {
                control,
                core: Mutex::new(core),
                waiting: AtomicBool::new(false),
                queues: QueueTable::default(),
                devices: Mutex::new(devices),
                changes: AtomicU64::new(0),
                left_behind: Mutex::default(),
                lazy: options.lazy,
            }),
            thread: Mutex::new(None),
        }))
    }

    /// The member that failed or is missing, by role.
    pub fn failed(&self) -> Option<usize> {
        self.shared.core.lock().failed()
    }

    /// True if a device was kicked, and the superblocks don't say so yet.
    pub fn is_kicking(&self) -> bool {
        self.shared.core.lock().is_kicking()
    }

    /// Counters of writes.
    pub fn counts(&self) -> WriteCounts {
        self.shared.core.lock().counts()
    }

    /// Sets the path of writes from now on; waiting writes go on from where they are.
    pub fn set_write_path(&self, path: WritePath) {
        self.shared.core.lock().set_write_path(path);
    }

    /// For tests: whether the stripe queue is in order.
    pub fn check_queues(&self) -> Result<(), String> {
        self.shared.core.lock().check_queues()
    }

    /// The place that another device is being made the member of.
    pub fn rebuilding(&self) -> Option<usize> {
        let core = self.shared.core.lock();
        core.recovered_sectors().map(|(_, place, _)| place)
    }

    /// Sectors of each member, from the start, whose parity is known to be right; `None`: all.
    pub fn in_sync_sectors(&self) -> Option<u64> {
        let core = self.shared.core.lock();
        core.unsynced().first().map(|r| r.start * STRIPE_SECTORS)
    }

    /// Ends in order, when all queues are closed: everything is on stable storage, and the superblocks say clean.
    pub fn stop(&self, idle: &mut Idle<'_>) -> Result<(), Error> {
        let mut assembly = {
            let core = self.shared.core.lock();
            let (superblocks, dirty) = core.superblocks();
            let incoming = core.recovered_sectors();
            if core.is_broken() || (!dirty && incoming.is_none() && core.unsynced().is_empty()) {
                return Ok(());
            }
            let devices = self.shared.devices.lock();
            let member = |slot: usize| {
                let device = devices.get(slot)?.as_ref()?;
                Some(Member {
                    device: Arc::clone(&device.device),
                    name: device.name.clone(),
                    superblock: superblocks.get(slot)?.clone()?,
                })
            };
            let members = core.slots_by_role().iter().map(|slot| member((*slot)?));
            let mut assembly = Assembly::new(self.shared.control.geometry, members.collect(), true);
            assembly.incoming = incoming.and_then(|(slot, place, recovered_sectors)| {
                let mut member = member(slot)?;
                member.superblock.recovery_offset_sectors = recovered_sectors;
                Some(Incoming {
                    place,
                    member,
                    recovered_sectors,
                })
            });
            let sectors =
                |r: &std::ops::Range<u64>| r.start * STRIPE_SECTORS..r.end * STRIPE_SECTORS;
            assembly.unsynced = core.unsynced().iter().map(sectors).collect();
            assembly.bitmap = core.bitmap().cloned();
            assembly
        };
        write_clean(&mut assembly, idle)
    }
}

impl ManagedArray for Raid5 {
    fn parts(&self) -> &dyn Parts {
        &*self.shared
    }
}

impl BlockDevice for Raid5 {
    fn describe(&self) -> String {
        self.shared.control.name.clone()
    }

    fn floor(&self) -> String {
        "raid5".into()
    }

    fn limits(&self) -> Limits {
        self.shared.control.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.shared.control.geometry.capacity_sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(ArrayQueue::open(
            &self.shared,
            context,
            self.floor(),
        )?))
    }

    fn events(&self) -> &EventHub {
        &self.shared.control.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let own = Forwards {
            // The superblocks say how large it is, whatever becomes of the members' backings.
            refresh: None,
            extents: Some(self),
            // A member's cache holds parts of members, and parity.
            cached: None,
            incarnation: Some(self),
            close: Some(self),
            questions: Some(self),
            memory: Some(self),
            // Each member has its own, and parity needs a copy anyway.
            buffers: None,
        };
        own.into()
    }
}

impl Extents for Raid5 {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        self.parts().find_extents(sector, sectors, out)
    }
}

impl LossMarks for Raid5 {
    /// The members' marks together. Data that a member lost while it was missing or being recovered is on the
    /// others, so a missing member doesn't count.
    fn incarnation(&self) -> Incarnation {
        match self.guessed {
            true => Incarnation::default(),
            false => {
                let devices = self.shared.devices();
                Incarnation::of_members(devices.iter().map(|d| d.incarnation()))
            }
        }
    }
}

impl Close for Raid5 {
    fn close(&self) -> Result<(), Error> {
        let thread = self.thread.lock().take();
        drop(thread);
        self.stop(&mut super::blocking::sleepy())
    }
}

impl Questions for Raid5 {
    fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        self.parts().answer_text(question)
    }
}

impl Reclaim for Raid5 {
    fn give_way(&self) -> u64 {
        // The lock is let go between segments: they are some hundred KiB each.
        let next = |segment| self.shared.core.lock().give_way(segment);
        let stripes: u64 = (0..).map_while(next).sum();
        let below: u64 = self.shared.devices().iter().map(|m| m.give_way()).sum();
        stripes + below
    }

    fn spare_bytes(&self) -> u64 {
        let below: u64 = self.shared.devices().iter().map(|m| m.spare_bytes()).sum();
        self.memory.live_bytes() + below
    }
}
