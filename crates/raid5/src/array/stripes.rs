//! [`StripeArray`]: the array as a device around the core without a lock. Lab and tests use it; volumes have [`super::Raid5`] until this one has
//! all of its parts (docs/decisions/0048-stripes-own-themselves.md, step 6).
//!
//! | file | has |
//! |---|---|
//! | `queue` | a queue: the core's part of it, and queues to all members |
//! | `sync` | the queue that rebuilds a member or makes parity right |
//! | `disk` | superblocks as on disk |
//! | `background` | superblocks that a stop writes, and queues that were closed with work |

mod background;
mod disk;
mod queue;
mod sync;

pub use background::StripeBackground;

use super::manage::SyncAction;
use super::{ArrayOptions, WritePath, check_stripes, limits_of, name_of, write_clean};
use crate::blocking::sleepy;
pub use crate::core::stripes::SyncEnd;
use crate::core::stripes::{Common, Errand, Mail};
use crate::words::Owner;
use crate::{Assembly, Geometry, Policy, STRIPE_SECTORS};
use background::Orders;
use disk::OnDisk;
use parking_lot::Mutex;
use pvblk_block::stacked::{BackgroundThread, CompletionQueue, QueueTable, finish_within};
use pvblk_block::{
    BlockDevice, Capabilities, Close, DeviceQueue, Error, EventHub, Forwards, Incarnation, Limits,
    LossMarks, QueueContext, Reclaim, SystemClock,
};
use queue::StripeQueue;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait of an array that is closed for queues that were closed with work.
const LAST_WAIT: Duration = Duration::from_secs(10);

struct Shared {
    name: String,
    geometry: Geometry,
    limits: Limits,
    common: Arc<Common>,
    /// By slot: members by their place at the start, and a device that was being rebuilt then. A member that failed keeps its device until the array is dropped.
    devices: Vec<Option<Arc<dyn BlockDevice>>>,
    /// Queues by number; a queue's owner number is one more.
    queues: QueueTable<CompletionQueue<Vec<Mail>>>,
    orders: Orders,
    /// Locked while superblocks are written.
    disk: Mutex<OnDisk>,
    events: EventHub,
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

/// A RAID-5 array that serves, by the core without a lock. [`StripeArray::keep`] or a [`StripeBackground`] has to run beside it.
pub struct StripeArray {
    shared: Arc<Shared>,
    thread: Mutex<Option<BackgroundThread>>,
    /// Held while the number of stripes is set.
    setting: Mutex<()>,
    /// Data may be wrong, because the array was started by force.
    guessed: bool,
}

impl StripeArray {
    /// Serves an array that was assembled and prepared. Errors by name if it needs a part that this core hasn't yet.
    pub fn start(assembly: Assembly, options: &ArrayOptions) -> Result<Arc<StripeArray>, Error> {
        check_stripes(options.stripes)?;
        let has_bitmap = matches!(assembly.policy(), Policy::Bitmap { .. });
        let missing = [
            (has_bitmap, "a write-intent bitmap"),
            (options.member_timeout.is_some(), "a time limit of members"),
            (options.path != WritePath::Direct, "a stripe queue"),
        ];
        if let Some((_, part)) = missing.iter().find(|(has, _)| *has) {
            return Err(Error::config(format!(
                "raid5: the core without a lock doesn't take an array with {part}"
            )));
        }
        let incoming = assembly.incoming.as_ref();
        let devices = assembly.members.iter().map(Option::as_ref);
        let devices = devices.chain(incoming.map(|i| Some(&i.member)));
        let devices: Vec<_> = devices.map(|m| m.map(|m| Arc::clone(&m.device))).collect();
        let all: Vec<Limits> = devices.iter().flatten().map(|d| d.limits()).collect();
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
            options.stripes,
        )?;
        Ok(Arc::new(StripeArray {
            guessed: assembly.guessed,
            shared: Arc::new(Shared {
                name: name_of(&assembly),
                geometry: assembly.geometry,
                limits: limits_of(&all, &assembly.geometry),
                common,
                devices,
                queues: QueueTable::default(),
                orders: Orders::new()?,
                disk: Mutex::new(OnDisk::new(assembly)),
                events: EventHub::default(),
            }),
            thread: Mutex::new(None),
            setting: Mutex::new(()),
        }))
    }

    /// From now on a thread does the background work, until the array is closed.
    pub fn keep(&self) -> Result<(), Error> {
        let work = StripeBackground::new(self);
        let wait = self.shared.orders.wait();
        let thread = BackgroundThread::start("pvblk-stripes", wait, Arc::new(SystemClock), work);
        let thread = thread.map_err(|e| Error::os("raid5: starting a thread", e))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// The place without a member.
    pub fn failed(&self) -> Option<usize> {
        self.shared.common.missing()
    }

    /// Checks or repairs parity of all stripes, as soon as no rebuild or resync is under way. [`StripeArray::synced`] has its end.
    pub fn sync(&self, action: SyncAction) -> Result<(), Error> {
        if !matches!(action, SyncAction::Check | SyncAction::Repair) {
            return Err(Error::config(format!("{action}: it begins by itself")));
        }
        if self.failed().is_some() {
            return Err(Error::config(format!(
                "{action}: a member is missing, so there is no parity to compare"
            )));
        }
        self.shared.orders.sync(action);
        Ok(())
    }

    /// The end of the last rebuild, resync or check.
    pub fn synced(&self) -> Option<SyncEnd> {
        self.shared.orders.synced()
    }

    pub fn geometry(&self) -> Geometry {
        self.shared.geometry
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

    /// From now on so many stripes may have pages; those that are too many go as soon as nobody works on them.
    pub fn set_stripes(&self, stripes: usize) -> Result<(), Error> {
        check_stripes(stripes)?;
        let _one = self.setting.lock();
        let mut mail = self.shared.common.set_stripes(stripes)?;
        self.shared.post(&mut mail);
        Ok(())
    }

    /// Ends in order, when all queues are closed: everything is on stable storage, and superblocks say clean.
    fn stop(&self) -> Result<(), Error> {
        let mut disk = self.shared.disk.lock();
        let common = &self.shared.common;
        let (recovered, unsynced) = (common.recovered(), common.first_unsynced());
        let is_settled = recovered.is_none() && unsynced.is_none();
        if common.is_broken() || !disk.assembly.dirty && is_settled {
            return Ok(());
        }
        // All is flushed before superblocks say so.
        if let Some((_, stripes)) = recovered {
            disk.apply(Errand::Recovered(stripes));
        }
        let first = unsynced.unwrap_or(u64::MAX / STRIPE_SECTORS);
        disk.apply(Errand::Resynced(first));
        disk.set_corrected(|slot| common.corrected(slot));
        write_clean(&mut disk.assembly, &mut sleepy())
    }
}

impl BlockDevice for StripeArray {
    fn describe(&self) -> String {
        self.shared.name.clone()
    }

    fn floor(&self) -> String {
        "raid5".into()
    }

    fn limits(&self) -> Limits {
        self.shared.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.shared.geometry.capacity_sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(StripeQueue::open(&self.shared, context)?))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let own = Forwards {
            // The superblocks say how large it is, whatever becomes of the members' backings.
            refresh: None,
            extents: None,
            // A member's cache holds parts of members, and parity.
            cached: None,
            incarnation: Some(self),
            close: Some(self),
            questions: None,
            memory: Some(self),
            // Each member has its own, and parity needs a copy anyway.
            buffers: None,
        };
        own.into()
    }
}

impl LossMarks for StripeArray {
    fn incarnation(&self) -> Incarnation {
        match self.guessed {
            true => Incarnation::default(),
            false => {
                let devices = self.shared.devices.iter().flatten();
                Incarnation::of_members(devices.map(|d| d.incarnation()))
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
            background.work(Duration::ZERO);
            self.shared.orders.has_queues().then_some(false)
        });
        if !is_over {
            self.shared.orders.abandon();
            let name = &self.shared.name;
            return Err(Error::config(format!(
                "{name}: I/O at its members doesn't end, so it isn't clean"
            )));
        }
        self.stop()
    }
}

impl Drop for StripeArray {
    fn drop(&mut self) {
        let thread = self.thread.lock().take();
        drop(thread);
        // They have the array.
        self.shared.orders.abandon();
    }
}

impl Reclaim for StripeArray {
    fn give_way(&self) -> u64 {
        let (bytes, mut mail) = self.shared.common.give_way();
        self.shared.post(&mut mail);
        let members = self.shared.devices.iter().flatten();
        bytes + members.map(|m| m.give_way()).sum::<u64>()
    }

    fn spare_bytes(&self) -> u64 {
        let members = self.shared.devices.iter().flatten();
        self.shared.common.live_bytes() + members.map(|m| m.spare_bytes()).sum::<u64>()
    }
}
