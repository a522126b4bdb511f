//! [`StripeArray`]: the array as a device around the core without a lock. [`super::Raid5`] has the parts that this one hasn't yet
//! (docs/decisions/0048-stripes-own-themselves.md, step 6).
//!
//! | file | has |
//! |---|---|
//! | `queue` | a queue: the core's part of it, and queues to all members |
//! | `sync` | the queue that rebuilds a member or makes parity right, and takes devices in |
//! | `devices` | devices by slot |
//! | `disk` | superblocks and bitmap as on disk |
//! | `patient` | a member that has a limited time, as its queues see it |
//! | `patience` | members that don't answer in time, and devices that aren't members any more |
//! | `background` | superblocks that a stop writes, and queues that were closed with work |

mod background;
mod devices;
mod disk;
mod patience;
mod patient;
mod queue;
mod sync;

pub use background::StripeBackground;

use super::control::{Control, NoteQuiet, Parts, Snapshot, spares_now};
use super::{ArrayOptions, CoreKind, ManagedArray, MemberDevice, WritePath, check_stripes};
use crate::blocking::{Idle, sleepy};
use crate::core::stripes::{Common, Errand, Mail};
use crate::core::{Counts, State};
use crate::words::Owner;
use crate::{Assembly, BitmapHeader, Geometry, Member, STRIPE_SECTORS};
use background::{Chores, seen};
use devices::{Devices, SLOTS};
use disk::{OnDisk, Written};
use parking_lot::Mutex;
use patience::Patience;
use patient::Ticks;
use pvblk_block::stacked::{BackgroundThread, CompletionQueue, QueueTable, finish_within};
use pvblk_block::{
    BlockDevice, Capabilities, Close, DeviceEvent, DeviceQueue, Error, EventHub, Extent, Extents,
    Forwards, Incarnation, Limits, LossMarks, Questions, QueueContext, Reclaim, SystemClock,
};
use queue::StripeQueue;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sync::Syncs;

/// The array's own name in traces.
const FLOOR: &str = "raid5";
/// Most members: two slots more are for devices that come.
const MOST_MEMBERS: usize = SLOTS - 2;
/// Longest wait of an array that is closed for queues that were closed with work.
const LAST_WAIT: Duration = Duration::from_secs(10);

struct Shared {
    control: Control,
    common: Arc<Common>,
    /// Members have the slots of their places at the start, and a device that was being rebuilt then comes after them.
    devices: Devices,
    /// Queues by number; a queue's owner number is one more.
    queues: QueueTable<CompletionQueue<Vec<Mail>>>,
    chores: Chores,
    patience: Patience,
    /// Locked while superblocks are written.
    disk: Mutex<OnDisk>,
    written: Mutex<Written>,
    syncs: Mutex<Syncs>,
    /// Held while the number of stripes is set.
    setting: Mutex<()>,
    /// From here its thread counts time.
    begin: Instant,
}

/// The owner of a queue, by its number. `None`: there are no so many.
fn owner(queue: usize) -> Option<Owner> {
    Owner::new(u16::try_from(queue + 1).ok()?)
}

/// The number of an owner's queue.
fn number(owner: Owner) -> usize {
    usize::from(owner.number()) - 1
}

impl Shared {
    /// Posts mail, and empties the list. Mail to a queue that is closed is of no interest.
    fn post(&self, mail: &mut Vec<(Owner, Mail)>) {
        if mail.is_empty() {
            return;
        }
        let mut to: Vec<usize> = mail.iter().map(|(to, _)| number(*to)).collect();
        self.queues.post(&mut to, |queue, _, entries| {
            let theirs = mail.extract_if(.., |(to, _)| number(*to) == queue);
            entries.extend(theirs.map(|(_, mail)| mail));
        });
        mail.clear();
    }
}

impl Parts for Shared {
    fn control(&self) -> &Control {
        &self.control
    }

    fn snapshot(&self) -> Snapshot {
        // Before the members: a spare that becomes one in between is in both lists.
        let spares = spares_now(&self.control.spares.lock());
        let syncs = self.syncs.lock().clone();
        let written = self.written.lock();
        let recovered = syncs.recovered;
        // Before the devices: one arrives long before it is a member.
        let state = self.common.state();
        let devices = self.devices.all().into_iter();
        Snapshot {
            state: State {
                dirty: written.dirty,
                events: written.superblock.events,
                sync: syncs.now,
                syncs: syncs.begun,
                mismatch_sectors: syncs.mismatch_sectors,
                trouble: syncs.trouble,
                recovered,
                path: match self.common.has_stripe_queues() {
                    true => WritePath::StripeQueue,
                    false => WritePath::Direct,
                },
                ..state
            },
            superblock: written.superblock.clone(),
            names: devices
                .map(|device| Some(device?.member.name.clone()))
                .collect(),
            spares,
            lag: written.lag,
        }
    }

    fn places(&self) -> Vec<Option<String>> {
        let devices = self.devices.all();
        let name = |slot: usize| Some(devices.get(slot)?.as_ref()?.member.name.clone());
        let slots = self.common.slots_by_role().into_iter();
        slots.map(|slot| slot.and_then(name)).collect()
    }

    fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        let devices = self.devices.all().into_iter().flatten();
        devices.map(|d| Arc::clone(&d.member.device)).collect()
    }

    fn device_at(&self, place: usize) -> Option<Arc<dyn BlockDevice>> {
        let (device, _) = self.homes().into_iter().nth(place)??;
        Some(device)
    }

    fn homes(&self) -> Vec<Option<(Arc<dyn BlockDevice>, u64)>> {
        let devices = self.devices.all();
        let device = |slot: usize| Some(Arc::clone(&devices.get(slot)?.as_ref()?.member.device));
        let home = |(slot, sector): (usize, u64)| Some((device(slot)?, sector));
        let homes = self.common.homes().into_iter();
        homes.map(|at| at.and_then(home)).collect()
    }

    fn bitmap_header(&self) -> Option<BitmapHeader> {
        self.written.lock().bitmap.clone()
    }

    fn note_quiet(&self, note: NoteQuiet<'_>) {
        note(&|away| self.patience.is_left(away));
    }

    fn set_stripes(&self, stripes: usize) -> Result<(), Error> {
        let _one = self.setting.lock();
        let mut mail = self.common.set_stripes(stripes)?;
        // Those that are too many and that no batch has go now.
        mail.extend(self.common.give_way().1);
        self.post(&mut mail);
        Ok(())
    }

    fn set_write_path(&self, path: WritePath) -> Result<(), Error> {
        self.common
            .set_stripe_queues(path == WritePath::StripeQueue);
        Ok(())
    }
}

/// A RAID-5 array that serves, by the core without a lock. [`StripeArray::keep`] or a [`StripeBackground`] has to run beside it.
pub struct StripeArray {
    shared: Arc<Shared>,
    thread: Mutex<Option<BackgroundThread>>,
    /// Data may be wrong, because the array was started by force.
    guessed: bool,
}

impl StripeArray {
    /// Serves an array that was assembled and prepared. Errors by name if it needs a part that this core hasn't yet.
    pub fn start(
        mut assembly: Assembly,
        options: &ArrayOptions,
    ) -> Result<Arc<StripeArray>, Error> {
        check_stripes(options.stripes)?;
        if assembly.members.len() > MOST_MEMBERS {
            return Err(Error::config(format!(
                "the core `words` doesn't take an array with more than {MOST_MEMBERS} members yet: start it with core=lock"
            )));
        }
        let control = Control::new(&mut assembly, options, CoreKind::Words)?;
        let incoming = assembly.incoming.as_ref();
        let devices = assembly.members.iter().map(Option::as_ref);
        let devices = devices.chain(incoming.map(|i| Some(&i.member)));
        let device = |m: &Member| MemberDevice {
            device: Arc::clone(&m.device),
            name: m.name.clone(),
        };
        let devices = devices.map(|member| member.map(device)).collect();
        let members = assembly.members.iter();
        let members = members.map(|m| m.as_ref().map(|m| (&m.superblock, m.device.limits())));
        let incoming = incoming.map(|i| {
            let member = (&i.member.superblock, i.member.device.limits());
            (i.place, i.recovered_sectors / STRIPE_SECTORS, member)
        });
        let stripes = |r: &Range<u64>| r.start / STRIPE_SECTORS..r.end / STRIPE_SECTORS;
        let common = Common::of(
            assembly.geometry,
            members.collect(),
            incoming,
            assembly.unsynced.iter().map(stripes).collect(),
            assembly.bitmap.as_ref(),
            options.stripes,
            options.member_timeout.is_some(),
        )?;
        common.set_stripe_queues(options.path == WritePath::StripeQueue);
        let guessed = assembly.guessed;
        let ticks = options.member_timeout.map(|_| Arc::new(Ticks::default()));
        let devices = Devices::new(devices, &common.devices().0, ticks);
        for (slot, device) in devices.all().into_iter().enumerate() {
            let member = match assembly.members.get_mut(slot) {
                Some(member) => member.as_mut(),
                None => assembly
                    .incoming
                    .as_mut()
                    .map(|incoming| &mut incoming.member),
            };
            if let (Some(member), Some(device)) = (member, device) {
                member.device = device.opened().device;
            }
        }
        // The array has begun without them.
        assembly.thrown_out.clear();
        let disk = OnDisk::new(assembly)?;
        let shared = Shared {
            devices,
            common,
            queues: QueueTable::default(),
            chores: Chores::new(&control.wait),
            patience: Patience::default(),
            written: Mutex::new(disk.written()),
            disk: Mutex::new(disk),
            syncs: Mutex::default(),
            setting: Mutex::new(()),
            begin: Instant::now(),
            control,
        };
        let condition = seen(&shared).condition();
        let events = &shared.control.events;
        events.raise(DeviceEvent::Condition(condition));
        Ok(Arc::new(StripeArray {
            guessed,
            shared: Arc::new(shared),
            thread: Mutex::new(None),
        }))
    }

    /// From now on a thread does the background work, until the array is closed.
    pub fn keep(&self) -> Result<(), Error> {
        let work = StripeBackground::new(self);
        let wait = &self.shared.control.wait;
        let thread = BackgroundThread::start("pvblk-stripes", wait, Arc::new(SystemClock), work);
        let thread = thread.map_err(|e| Error::os("raid5: starting a thread", e))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// Counters of writes.
    pub fn counts(&self) -> Counts {
        self.shared.common.counts()
    }

    /// The place without a member.
    pub fn failed(&self) -> Option<usize> {
        self.shared.common.missing()
    }

    pub fn geometry(&self) -> Geometry {
        self.shared.control.geometry
    }

    /// The place that a device is rebuilt for.
    pub fn rebuilding(&self) -> Option<usize> {
        self.shared.common.recovered().map(|(place, _)| place)
    }

    /// Sectors of that device, from the start, that are rebuilt.
    pub fn rebuilt_sectors(&self) -> Option<u64> {
        let recovered = self.shared.common.recovered();
        recovered.map(|(_, stripes)| stripes * STRIPE_SECTORS)
    }

    /// Sectors of each member, from the start, whose parity is known to be right; `None`: all.
    pub fn in_sync_sectors(&self) -> Option<u64> {
        let first = self.shared.common.first_unsynced();
        first.map(|stripe| stripe * STRIPE_SECTORS)
    }

    /// True if superblocks leave a member out, and words don't know of that yet.
    pub fn is_kicking(&self) -> bool {
        self.shared.common.missing().is_none() && self.left_out().is_some()
    }

    /// The place without a member in superblocks that were written last, or are to be.
    pub fn left_out(&self) -> Option<usize> {
        self.shared.disk.lock().assembly.failed()
    }

    /// Ends in order, when all queues are closed: everything is on stable storage, and superblocks say clean.
    pub fn stop(&self, idle: &mut Idle<'_>) -> Result<(), Error> {
        let mut disk = self.shared.disk.lock();
        let common = &self.shared.common;
        let (recovered, unsynced) = (common.recovered(), common.first_unsynced());
        let is_settled = recovered.is_none() && unsynced.is_none();
        if common.is_broken() || !disk.assembly.dirty && is_settled {
            return Ok(());
        }
        // All is flushed before superblocks say so.
        if let Some((_, stripes)) = recovered {
            let slot = disk.incoming_slot();
            disk.apply(Errand::Recovered { slot, stripes });
        }
        let first = unsynced.unwrap_or(u64::MAX / STRIPE_SECTORS);
        disk.apply(Errand::Resynced(first));
        disk.set_corrected(|slot| common.corrected(slot));
        disk.end(idle)
    }
}

impl ManagedArray for StripeArray {
    fn parts(&self) -> &dyn Parts {
        &*self.shared
    }
}

impl BlockDevice for StripeArray {
    fn describe(&self) -> String {
        self.shared.control.name.clone()
    }

    fn floor(&self) -> String {
        FLOOR.into()
    }

    fn limits(&self) -> Limits {
        self.shared.control.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.shared.control.geometry.capacity_sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(StripeQueue::open(&self.shared, context)?))
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

impl Extents for StripeArray {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        self.parts().find_extents(sector, sectors, out)
    }
}

impl Questions for StripeArray {
    fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        self.parts().answer_text(question)
    }
}

impl LossMarks for StripeArray {
    /// As the present device's: a missing member doesn't count.
    fn incarnation(&self) -> Incarnation {
        match self.guessed {
            true => Incarnation::default(),
            false => {
                let devices = Parts::devices(&*self.shared);
                Incarnation::of_members(devices.iter().map(|d| d.incarnation()))
            }
        }
    }
}

impl Close for StripeArray {
    fn close(&self) -> Result<(), Error> {
        let thread = self.thread.lock().take();
        drop(thread);
        let mut background = StripeBackground::last(self);
        let is_over = finish_within(LAST_WAIT, || {
            background.work(self.shared.begin.elapsed());
            self.shared.chores.has_queues().then_some(false)
        });
        if !is_over {
            self.shared.chores.abandon();
            let name = &self.shared.control.name;
            return Err(Error::config(format!(
                "{name}: I/O at its members doesn't end, so it isn't clean"
            )));
        }
        let mut nap = sleepy();
        self.stop(&mut || {
            self.shared.tick(self.shared.begin.elapsed());
            nap()
        })
    }
}

impl Drop for StripeArray {
    fn drop(&mut self) {
        let thread = self.thread.lock().take();
        drop(thread);
        // They have the array.
        self.shared.chores.abandon();
    }
}

impl Reclaim for StripeArray {
    fn give_way(&self) -> u64 {
        let (bytes, mut mail) = self.shared.common.give_way();
        self.shared.post(&mut mail);
        let members = Parts::devices(&*self.shared);
        bytes + members.iter().map(|m| m.give_way()).sum::<u64>()
    }

    fn spare_bytes(&self) -> u64 {
        let members = Parts::devices(&*self.shared);
        let below: u64 = members.iter().map(|m| m.spare_bytes()).sum();
        self.shared.common.live_bytes() + below
    }
}
