//! [`Raid5`]: the array as a device.

use super::background::{BackgroundWork, Chores, seen};
use super::control::Control;
use super::devices::{Devices, SLOTS};
use super::disk::OnDisk;
use super::patience::Patience;
use super::patient::Ticks;
use super::queue::ArrayQueue;
use super::shared::{FLOOR, Shared};
use super::{ArrayOptions, MemberDevice, WritePath, check_stripes};
use crate::blocking::{Idle, sleepy};
use crate::core::{Arriving, Common, Counts, Errand, Marks, Unknown};
use crate::{Assembly, Geometry, Member, STRIPE_SECTORS};
use parking_lot::Mutex;
use pvblk_block::stacked::{BackgroundThread, QueueTable, finish_within};
use pvblk_block::{
    BlockDevice, Capabilities, Close, DeviceEvent, DeviceQueue, Error, EventHub, Extent, Extents,
    Forwards, Incarnation, Limits, LossMarks, Questions, QueueContext, Reclaim, SystemClock,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait of an array that is closed for queues that were closed with work.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// A RAID-5 array that serves. [`Raid5::keep`] or a [`BackgroundWork`] has to run beside it.
pub struct Raid5 {
    pub(super) shared: Arc<Shared>,
    thread: Mutex<Option<BackgroundThread>>,
    /// Data may be wrong, because the array was started by force.
    guessed: bool,
}

impl Raid5 {
    /// Serves an array that was assembled and prepared. Errors if the options are out of range, or there is no memory.
    pub fn start(mut assembly: Assembly, options: &ArrayOptions) -> Result<Arc<Raid5>, Error> {
        check_stripes(options.stripes)?;
        if assembly.by_slot().len() > SLOTS {
            return Err(Error::config(format!(
                "raid5 of {SLOTS} members, one of which is being replaced: there is no room for one device more; fail that device"
            )));
        }
        let control = Control::new(&mut assembly, options)?;
        let device = |m: &mut Member| MemberDevice {
            device: Arc::clone(&m.device),
            name: m.name.clone(),
        };
        let devices = assembly.by_slot().into_iter();
        let devices = devices.map(|member| member.map(device)).collect();
        let incoming = assembly.incoming.as_ref();
        let members = assembly.members.iter();
        let members = members.map(|m| m.as_ref().map(|m| (&m.superblock, m.device.limits())));
        let incoming = incoming.zip(assembly.incoming_slot());
        let incoming = incoming.map(|(i, slot)| Arriving {
            slot,
            role: i.place,
            held: i.recovered_sectors / STRIPE_SECTORS,
            member: (&i.member.superblock, i.member.device.limits()),
        });
        let stripes = |r: &Range<u64>| r.start / STRIPE_SECTORS..r.end / STRIPE_SECTORS;
        let common = Common::of(
            assembly.geometry,
            members.collect(),
            incoming,
            Unknown {
                parity: assembly.unsynced.iter().map(stripes).collect(),
                sums: assembly.unsummed.iter().map(stripes).collect(),
            },
            match &assembly.bitmap {
                Some(bitmap) => Marks::Bitmap(bitmap),
                None => Marks::InMemory {
                    settled: !assembly.dirty && assembly.unsynced.is_empty(),
                },
            },
            options.stripes,
            options.member_timeout.is_some(),
        )?;
        common.set_stripe_queues(options.path == WritePath::StripeQueue);
        let guessed = assembly.guessed;
        let ticks = options.member_timeout.map(|_| Arc::new(Ticks::default()));
        let devices = Devices::new(devices, &common.devices().0, ticks);
        for (member, device) in assembly.by_slot().into_iter().zip(devices.all()) {
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
        Ok(Arc::new(Raid5 {
            guessed,
            shared: Arc::new(shared),
            thread: Mutex::new(None),
        }))
    }

    /// From now on a thread does the background work, until the array is closed.
    pub fn keep(&self) -> Result<(), Error> {
        let work = BackgroundWork::new(self);
        let wait = &self.shared.control.wait;
        let thread = BackgroundThread::start("pvblk-raid5", wait, Arc::new(SystemClock), work);
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
        let ends = !common.is_broken() && (disk.assembly.dirty || !is_settled);
        match common.sums() {
            Some(sums) if ends => disk.write_last_sums(sums, idle)?,
            // No superblock counts on them.
            Some(sums) if !common.is_broken() => {
                disk.write_sums(sums, &sums.dirty(), idle)?;
            }
            _ => {}
        }
        if !ends {
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

impl BlockDevice for Raid5 {
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
        Ok(Box::new(ArrayQueue::open(&self.shared, context)?))
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
        self.shared.find_extents(sector, sectors, out)
    }
}

impl Questions for Raid5 {
    fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        self.shared.answer_text(question)
    }
}

impl LossMarks for Raid5 {
    /// As the present device's: a missing member doesn't count.
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
        let mut background = BackgroundWork::last(self);
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

impl Drop for Raid5 {
    fn drop(&mut self) {
        let thread = self.thread.lock().take();
        drop(thread);
        // They have the array.
        self.shared.chores.abandon();
    }
}

impl Reclaim for Raid5 {
    fn give_way(&self) -> u64 {
        let (bytes, mut mail) = self.shared.common.give_way();
        self.shared.post(&mut mail);
        if let Some(sums) = self.shared.common.sums() {
            sums.squeeze();
            self.shared.chores.wake();
        }
        let members = self.shared.devices();
        bytes + members.iter().map(|m| m.give_way()).sum::<u64>()
    }

    fn spare_bytes(&self) -> u64 {
        let members = self.shared.devices();
        let below: u64 = members.iter().map(|m| m.spare_bytes()).sum();
        self.shared.common.live_bytes() + below
    }
}
