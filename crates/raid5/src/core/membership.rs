//! [`Membership`]: devices and members between two stops, and the positions of a rebuild, which go on meanwhile.

use crate::core::MemberNow;
use crate::core::members::{Incoming, Members};
use crate::core::plan::bit;
use crate::core::slots::{Slot, Unsynced};
use crate::core::zero::Ability;
use crate::words::Room;
use crate::{PPL_HEADER_BYTES, STRIPE_SECTORS, Superblock, log_space_bytes};
use pvblk_block::{Limits, SECTOR};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most partial parity of one unit, in bytes.
const MOST_LOG_BYTES: u64 = 256 << 10;

/// A device of the array.
pub struct Device {
    pub(super) slot: Slot,
    /// Its number in the superblocks.
    number: u32,
    /// Its bounds of a log's unit.
    room: Room,
    /// Most blocks of a write, each in memory of its own.
    widest: usize,
    /// Blocks that it couldn't read and that were calculated and written again, ever.
    corrected: AtomicU32,
    /// Blocks that it couldn't read, not so long ago.
    recent: AtomicU32,
    /// Blocks of it, since the start, that were other than was written, or whose sums were; they were made right.
    misfits: AtomicU32,
}

impl Device {
    pub(super) fn new(slot: Slot, number: u32, room: Room, widest: usize) -> Device {
        Device {
            widest,
            number,
            corrected: slot.corrected.into(),
            recent: AtomicU32::new(0),
            misfits: AtomicU32::new(0),
            slot,
            room,
        }
    }

    /// A device with this superblock and these limits.
    pub fn of(superblock: &Superblock, limits: &Limits) -> Device {
        let slot = Slot::new(superblock, Ability::from(*limits));
        let write = u64::from(limits.max_sectors) * SECTOR - PPL_HEADER_BYTES as u64;
        let space = log_space_bytes(slot.log_sectors);
        let room = Room {
            bytes: space.min(write).min(MOST_LOG_BYTES),
            segments: limits.max_segments as usize,
        };
        let blocks = u64::from(limits.max_sectors) / STRIPE_SECTORS;
        let widest = blocks.min(limits.max_segments.into()) as usize;
        Device::new(slot, superblock.dev_number, room, widest)
    }

    pub(super) fn room(&self) -> Room {
        self.room
    }

    /// It couldn't read a block; returns the number of those before, not so long ago.
    pub(super) fn note_read_error(&self) -> u32 {
        self.recent.fetch_add(1, Ordering::Relaxed)
    }

    /// A block that it couldn't read was calculated and written.
    pub(super) fn note_corrected(&self) {
        self.corrected.fetch_add(1, Ordering::Relaxed);
    }

    /// A block of it, or a sum on it, was other than was written, and was made right.
    pub(super) fn note_misfit(&self) {
        self.misfits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn misfits(&self) -> u32 {
        self.misfits.load(Ordering::Relaxed)
    }

    pub(super) fn corrected(&self) -> u32 {
        self.corrected.load(Ordering::Relaxed)
    }

    /// Halves the count of read errors, so that old errors count less.
    pub(super) fn forgive(&self) {
        let halve = |count: u32| Some(count / 2);
        let _ = self
            .recent
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, halve);
    }
}

/// Positions of a rebuild and a resync, in stripes. Only the queue that syncs writes them.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// [`Incoming::begun`]. The owner of a stripe's word raises it over the stripe, so the word's next owner finds it so.
    begun: AtomicU64,
    /// [`Incoming::done`], which reads look at without a word.
    done: AtomicU64,
    /// [`Incoming::committed`]
    committed: AtomicU64,
    /// Parity of stripes before this is right.
    resynced: AtomicU64,
}

impl Progress {
    /// That of a device that holds all stripes before one, and of parity that is right before another.
    pub fn of(incoming: u64, resynced: u64) -> Arc<Progress> {
        Arc::new(Progress {
            begun: incoming.into(),
            done: incoming.into(),
            committed: incoming.into(),
            resynced: resynced.into(),
        })
    }

    pub fn begin(&self, stripe: u64) {
        self.begun.fetch_max(stripe + 1, Ordering::Relaxed);
    }

    /// Stripes before this one that the device holds already, by the bitmap, count as begun.
    pub fn begin_before(&self, stripe: u64) {
        self.begun.fetch_max(stripe, Ordering::Release);
    }

    pub fn done_before(&self, stripe: u64) {
        self.done.store(stripe, Ordering::Release);
    }

    pub fn committed_before(&self, stripe: u64) {
        self.committed.fetch_max(stripe, Ordering::Release);
    }

    pub fn resynced_before(&self, stripe: u64) {
        self.resynced.fetch_max(stripe, Ordering::Release);
    }
}

/// A batch's view of members and parity, from its opening to its end: positions of a rebuild go on meanwhile.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Members, if one of them is being rebuilt.
    pub members: Option<Members>,
    /// Its parity is right, though members have stripes where that isn't known.
    pub is_synced: bool,
}

/// Members, as they are while words go on. Only the queue that has stopped all words replaces it.
#[derive(Clone)]
pub(super) struct Membership {
    pub members: Members,
    /// No other that the array had before has it.
    pub number: u64,
    /// By slot. A slot that is nobody's has its last device.
    pub devices: Arc<[Arc<Device>]>,
    /// Bounds of a log's unit.
    pub room: Room,
    /// A new one for each incoming device: so a queue that doesn't know of the device yet doesn't take its positions for those of another one.
    pub progress: Arc<Progress>,
    pub unsynced: Arc<Unsynced>,
    /// Superblocks say that parity may be wrong, so stripes may be written.
    pub dirty: bool,
    /// Two members failed: nothing works any more.
    pub broken: bool,
    /// Devices that became members while the array served.
    pub takeovers: u64,
}

impl Membership {
    /// The incoming device, with its positions at this moment.
    pub fn incoming(&self) -> Option<Incoming> {
        self.members.incoming().map(|incoming| Incoming {
            begun: self.progress.begun.load(Ordering::Acquire),
            done: self.progress.done.load(Ordering::Acquire),
            committed: self.progress.committed.load(Ordering::Acquire),
            ..incoming
        })
    }

    /// The array at this moment, for a batch of a stripe, whose word is the caller's.
    pub fn see(&self, stripe: u64) -> Seen {
        Seen {
            members: self.incoming().map(|incoming| self.members.with(incoming)),
            is_synced: stripe < self.progress.resynced.load(Ordering::Acquire),
        }
    }

    /// Where a role's sectors are read without a word at this moment: those before `end_sector` of its data.
    pub fn reads_directly(&self, role: usize, end_sector: u64) -> Option<usize> {
        let incoming = || self.incoming().filter(|i| i.holds(role, end_sector));
        let slot = self.members.slot(role);
        slot.or_else(|| Some(incoming()?.slot))
    }

    /// Stripes whose parity isn't known to be right.
    pub fn unsynced(&self) -> Unsynced {
        let mut left = Unsynced::clone(&self.unsynced);
        left.done_before(self.progress.resynced.load(Ordering::Acquire));
        left
    }

    /// All devices that are written.
    pub fn live(&self) -> impl Iterator<Item = usize> + use<'_> {
        let incoming = self.members.incoming().map(|incoming| incoming.slot);
        self.members
            .slots()
            .iter()
            .flatten()
            .copied()
            .chain(incoming)
    }

    /// The same, as a mask of slots.
    pub fn live_mask(&self) -> u64 {
        self.live().fold(0, |mask, slot| mask | bit(slot))
    }

    /// True if every role has a member, and none is being replaced.
    pub fn is_whole(&self) -> bool {
        self.members.failed().is_none() && self.members.incoming().is_none()
    }

    /// Most blocks of a write, each in memory of its own, that all devices take.
    pub fn widest(&self) -> usize {
        let all = self.live().map(|slot| self.device(slot).widest);
        all.min().unwrap_or(0)
    }

    /// Devices by slot, and those that are members or become one, as a mask.
    pub fn known(&self) -> (Arc<[Arc<Device>]>, u64) {
        (Arc::clone(&self.devices), self.live_mask())
    }

    /// The devices, for users.
    pub fn members_now(&self) -> Vec<MemberNow> {
        let incoming = self.incoming();
        let member = |slot: usize| {
            let rebuilt = incoming.filter(|incoming| incoming.slot == slot);
            let place = rebuilt.map(|incoming| incoming.role);
            Some(MemberNow {
                slot,
                place: place.or_else(|| self.members.role(slot))?,
                number: self.device(slot).number,
                rebuilt_sectors: rebuilt.map(|incoming| incoming.done * STRIPE_SECTORS),
                corrected_reads: self.device(slot).corrected(),
                misfits: self.device(slot).misfits(),
            })
        };
        self.live().filter_map(member).collect()
    }

    /// The device of a slot.
    pub fn device(&self, slot: usize) -> &Device {
        &self.devices[slot]
    }

    /// A device begins to become the member of a role, as [`super::QueueCore::take_in`]. Its slot is nobody's.
    pub fn take_in(&mut self, slot: usize, role: usize, device: Arc<Device>, by_bitmap: bool) {
        let mut devices = self.devices.to_vec();
        devices.resize_with(devices.len().max(slot + 1), || Arc::clone(&device));
        self.room = self.room.least(device.room);
        devices[slot] = device;
        self.devices = devices.into();
        self.members
            .take_in(Incoming::new(slot, role, 0, by_bitmap));
        self.forget_progress();
    }

    /// Positions are another incoming device's from now on, or nobody's.
    pub fn forget_progress(&mut self) {
        self.progress = Progress::of(0, self.progress.resynced.load(Ordering::Acquire));
    }
}
