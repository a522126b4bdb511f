//! [`Common`]: the parts of an array that all its queues share.

use super::arms::Arms;
use super::fits::Misfit;
use super::membership::{Device, Membership, Progress, Seen};
use super::queue::Mail;
use super::record::{Part, Stripe};
use crate::core::Action;
use crate::core::members::{Incoming, Members};
use crate::core::plan::{Record, View, bit};
use crate::core::slots::{MOST_READ_ERRORS, Unsynced};
use crate::core::sums::Sums;
use crate::core::{Counts, State};
use crate::words::{
    Chunks, Epoch, Errands, LogFormat, Logs, Owner, PageMemory, Places, Room, Stock, StripePages,
    Table,
};
use crate::{Geometry, Policy, STRIPE_SECTORS, Superblock, WriteIntent, ppl_signature};
use parking_lot::Mutex;
use pvblk_block::{Error, Limits};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Parameters of an array.
pub(super) struct Setup {
    pub(super) geometry: Geometry,
    pub(super) policy: Policy,
    /// Devices by slot: members, and one that is rebuilt.
    pub(super) devices: Vec<Device>,
    pub(super) members: Members,
    /// Stripes whose parity isn't known to be right.
    pub(super) unsynced: Unsynced,
    /// Superblocks say that parity may be wrong.
    pub(super) dirty: bool,
    /// Those of the write-intent bitmap.
    pub(super) chunks: Option<Chunks>,
    /// There is none, and no private map: bits are in memory only, so that a member which comes back needn't be rebuilt whole.
    pub(super) in_memory: bool,
    /// Its blocks have sums.
    pub(super) has_sums: bool,
    /// Devices may be given up with I/O in flight.
    pub(super) limited: bool,
    /// Members have arms: it takes long to go from one place to another.
    pub(super) rotational: bool,
    /// Stripes whose sums aren't known, since the server before didn't end in order.
    pub(super) unsummed: Vec<Range<u64>>,
    /// Blocks of a device that may be calculated before it is kicked.
    pub(super) most_read_errors: u32,
    /// Number of words. Stripes share them if there are more.
    pub(super) words: usize,
    /// Number of stripes that may have pages.
    pub(super) sets: usize,
    /// Most queues, and the parts of requests that each may have at words.
    pub(super) queues: usize,
    pub(super) parts: usize,
    /// [`crate::ppl_signature`] of the array.
    pub(super) signature: u32,
}

/// Most queues of an array: 64 of a disk, the background's, and others that were closed with work. Each may have so many parts of requests at words.
const QUEUES: usize = 96;
const PARTS: usize = 256;
/// Words for each stripe that may have pages: so that few stripes share one.
const WORDS: usize = 4;

/// The chunks in which members may differ at the start.
pub enum Marks<'a> {
    /// Those that the write-intent bitmap, or the private map, marks.
    Bitmap(&'a WriteIntent),
    /// The array has no bitmap and no private map. `settled`: all that was written is on stable storage, with its parity.
    InMemory { settled: bool },
}

/// Least sectors of a chunk whose bit is in memory only, as a power of two; and most chunks.
const LEAST_SHIFT: u32 = 7;
const MOST_CHUNKS: u64 = 1 << 15;

impl Marks<'_> {
    fn are_on_disk(&self) -> bool {
        matches!(self, Marks::Bitmap(_))
    }

    fn have_sums(&self) -> bool {
        matches!(self, Marks::Bitmap(bitmap) if bitmap.header().has_sums())
    }

    /// True if the device with this superblock lacks only what they mark.
    fn guide(&self, superblock: &Superblock) -> bool {
        let Marks::Bitmap(bitmap) = self else {
            return false;
        };
        bitmap.header().guides(superblock)
    }

    fn chunks(&self, geometry: &Geometry) -> Chunks {
        match self {
            Marks::Bitmap(bitmap) => Chunks::new(bitmap.chunk_shift(), bitmap.marks()),
            Marks::InMemory { settled } => {
                let sectors = geometry.member_sectors();
                let mut shift = LEAST_SHIFT;
                while sectors >> shift > MOST_CHUNKS {
                    shift += 1;
                }
                let count = sectors.div_ceil(1 << shift);
                Chunks::new(shift, (0..count).map(|_| !settled))
            }
        }
    }
}

/// A device that becomes the member of `role`: `held` stripes, from the first on, are rebuilt. `slot` is the role's own or comes after the members'.
pub(crate) struct Arriving<'a> {
    pub slot: usize,
    pub role: usize,
    pub held: u64,
    pub member: (&'a Superblock, Limits),
}

/// Stripes of which something isn't known, as ranges in order.
pub struct Unknown {
    /// Parity may be wrong.
    pub parity: Vec<Range<u64>>,
    /// Of an array that has sums: theirs may be missing.
    pub sums: Vec<Range<u64>>,
}

impl Setup {
    /// As [`Common::of`]. Superblocks are written before the first write, since they may be clean, or not name a member that is missing.
    fn of(
        geometry: Geometry,
        members: Vec<Option<(&Superblock, Limits)>>,
        incoming: Option<Arriving<'_>>,
        marks: Marks<'_>,
        stripes: usize,
    ) -> Setup {
        let arriving = incoming.as_ref();
        let present = || members.iter().flatten().chain(arriving.map(|a| &a.member));
        let device = |(superblock, limits): &(&Superblock, Limits)| Device::of(superblock, limits);
        let by_role = members.iter().map(|member| {
            // The slot of a missing member is nobody's.
            let member = member.as_ref().or_else(|| present().next());
            member.map(device)
        });
        let mut devices: Vec<Device> = by_role.flatten().collect();
        if let Some(arriving) = arriving {
            match devices.get_mut(arriving.slot) {
                Some(place) => *place = device(&arriving.member),
                None => devices.push(device(&arriving.member)),
            }
        }
        let roles = members.iter().enumerate();
        let roles = roles.map(|(role, member)| member.as_ref().map(|_| role));
        let any = present().map(|(superblock, _)| *superblock).next();
        Setup {
            geometry,
            policy: any.map_or(Policy::Resync, Superblock::policy),
            members: Members::new(
                roles.collect(),
                arriving.map(|arriving| {
                    let (superblock, _) = arriving.member;
                    let by_bitmap = marks.guide(superblock);
                    Incoming::new(arriving.slot, arriving.role, arriving.held, by_bitmap)
                }),
            ),
            unsynced: Unsynced::default(),
            dirty: false,
            chunks: Some(marks.chunks(&geometry)),
            in_memory: !marks.are_on_disk(),
            has_sums: marks.have_sums(),
            limited: false,
            rotational: present().any(|(_, limits)| !limits.non_rotational),
            unsummed: Vec::new(),
            most_read_errors: MOST_READ_ERRORS,
            words: stripes * WORDS,
            sets: stripes,
            queues: QUEUES,
            parts: PARTS,
            signature: any.map_or(0, |superblock| ppl_signature(&superblock.set_uuid)),
            devices,
        }
    }
}

/// Counters of a queue. Only the queue writes them, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Tallies {
    requests: AtomicU64,
    rounds: AtomicU64,
    whole: AtomicU64,
    prereads: AtomicU64,
    written_bytes: AtomicU64,
    moved_bytes: AtomicU64,
}

fn add(to: &AtomicU64, count: u64) {
    to.store(to.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

impl Tallies {
    /// The queue has taken a request.
    pub(super) fn note_request(&self) {
        add(&self.requests, 1);
    }

    /// Blocks are read for a batch of writes.
    pub(super) fn note_prereads(&self, blocks: u32) {
        add(&self.prereads, blocks.into());
    }

    /// So many batches of writes are calculated.
    pub(super) fn note_batches(&self, count: usize, whole: bool) {
        add(&self.rounds, count as u64);
        add(&self.whole, if whole { count as u64 } else { 0 });
    }

    /// The calculation of a batch of writes is done.
    pub(super) fn note_calculation(&self, written_bytes: usize, moved_bytes: usize) {
        add(&self.written_bytes, written_bytes as u64);
        add(&self.moved_bytes, moved_bytes as u64);
    }

    fn counts(&self) -> Counts {
        Counts {
            rounds: self.rounds.load(Ordering::Relaxed),
            whole: self.whole.load(Ordering::Relaxed),
            prereads: self.prereads.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
            moved_bytes: self.moved_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Open queues, and counts of those that were closed.
#[derive(Default)]
struct OpenQueues {
    all: Vec<(Owner, Arc<Tallies>)>,
    closed: Counts,
}

/// See the module's documentation. Queues have an [`Arc`] of it.
pub struct Common {
    pub(super) geometry: Geometry,
    pub(super) policy: Policy,
    /// The words of stripes: a stripe's is its number, modulo their count.
    pub(super) words: Table<Stripe, Part>,
    pub(super) epoch: Epoch,
    /// Only an array with a log has them.
    pub(super) logs: Option<Logs<Stripe>>,
    /// Those of the write-intent bitmap, if there is one.
    pub(super) chunks: Option<Chunks>,
    /// See [`Setup`].
    pub(super) in_memory: bool,
    /// Only an array whose blocks have sums has them.
    pub(super) sums: Option<Sums>,
    /// See [`Setup`]. Empty when they were made anew.
    unsummed: Mutex<Vec<Range<u64>>>,
    /// Locked while bits are set, or a rebuild passes over stripes whose bits aren't.
    pub(super) passing: Mutex<()>,
    /// Devices may be given up with I/O in flight: no memory of requests is written.
    pub(super) limited: bool,
    pub(super) stock: Arc<Stock<StripePages>>,
    memory: PageMemory,
    /// Places at words, and at logs.
    pub(super) places: Places,
    pub(super) log_places: Places,
    pub(super) parts: usize,
    /// Replaced in a stop. Queues take a copy when the epoch has another number than at their last look.
    membership: Mutex<Arc<Membership>>,
    /// No stripes: parity of all is right.
    synced: Unsynced,
    most_read_errors: u32,
    /// Slots that failed some I/O other than reads, or too many reads, as a mask.
    failed: AtomicU64,
    /// An action is under way.
    syncs: AtomicBool,
    /// Writes wait for more writes to their stripes.
    gathers: AtomicBool,
    /// Only an array whose members have arms has them.
    pub(super) arms: Option<Arms>,
    /// Stripes that may have pages, as they were set last.
    stripes: AtomicUsize,
    /// Open queues, which are told when words go on, with their counters.
    queues: Mutex<OpenQueues>,
}

impl Common {
    /// An array of these members, by role, with pages for so many stripes.
    /// `marks`: the chunks in which members may differ. `limited`: devices may be given up with I/O in flight, so writes of requests are copied.
    pub fn of(
        geometry: Geometry,
        members: Vec<Option<(&Superblock, Limits)>>,
        incoming: Option<Arriving<'_>>,
        unknown: Unknown,
        marks: Marks<'_>,
        stripes: usize,
        limited: bool,
    ) -> Result<Arc<Common>, Error> {
        let mut setup = Setup::of(geometry, members, incoming, marks, stripes);
        setup.unsynced = Unsynced(unknown.parity);
        setup.unsummed = unknown.sums;
        setup.limited = limited;
        Common::new(setup)
    }

    pub(super) fn new(setup: Setup) -> Result<Arc<Common>, Error> {
        let all = (setup.queues * setup.parts) as u32;
        let (words, places) = Table::new(setup.words, all, Stripe::default);
        let format = LogFormat {
            geometry: setup.geometry,
            signature: setup.signature,
        };
        // A batch has a place at logs for each of its queue's parts: one that waited for a place would hold up a stop, which
        // those in logs wait for.
        let (logs, log_places) = match setup.policy {
            Policy::Ppl(_) => {
                let (logs, places) = Logs::new(format, all)?;
                (Some(logs), places)
            }
            _ => (None, Vec::new()),
        };
        let geometry = &setup.geometry;
        let sums = || Sums::new(geometry.members(), geometry.member_sectors());
        let sums = setup.has_sums.then(sums).transpose()?;
        let devices: Vec<_> = setup.devices.into_iter().map(Arc::new).collect();
        let rooms = devices.iter().map(|device| device.room());
        let memory = PageMemory::new(setup.geometry.members());
        let sets = memory.make(setup.sets)?;
        Ok(Arc::new(Common {
            geometry: setup.geometry,
            policy: setup.policy,
            words,
            epoch: Epoch::default(),
            logs,
            chunks: setup.chunks,
            in_memory: setup.in_memory,
            sums,
            unsummed: Mutex::new(setup.unsummed),
            passing: Mutex::new(()),
            limited: setup.limited,
            stock: Stock::new(sets),
            memory,
            places: Places::new(places),
            log_places: Places::new(log_places),
            parts: setup.parts,
            membership: Mutex::new(Arc::new(Membership {
                progress: Progress::of(setup.members.incoming().map_or(0, |i| i.done), 0),
                members: setup.members,
                number: 0,
                room: rooms.reduce(Room::least).unwrap_or(Room {
                    bytes: 0,
                    segments: 1,
                }),
                devices: devices.into(),
                unsynced: Arc::new(setup.unsynced),
                dirty: setup.dirty,
                broken: false,
                takeovers: 0,
            })),
            synced: Unsynced::default(),
            most_read_errors: setup.most_read_errors,
            failed: AtomicU64::new(0),
            syncs: AtomicBool::new(false),
            gathers: AtomicBool::new(false),
            arms: setup.rotational.then(Arms::default),
            stripes: setup.sets.into(),
            queues: Mutex::default(),
        }))
    }

    /// The word of a stripe.
    pub fn word_of(&self, stripe: u64) -> usize {
        (stripe % self.words.count() as u64) as usize
    }

    /// The array as the plans of a batch see it.
    pub(super) fn view<'a>(&'a self, now: &'a Membership, seen: &'a Seen) -> View<'a> {
        View {
            geometry: &self.geometry,
            policy: self.policy,
            members: seen.members.as_ref().unwrap_or(&now.members),
            unsynced: match seen.is_synced {
                true => &self.synced,
                false => &now.unsynced,
            },
        }
    }

    pub(super) fn membership(&self) -> Arc<Membership> {
        Arc::clone(&self.membership.lock())
    }

    /// A device failed I/O of a queue, which hasn't left the I/O's word yet: so a kick that waits for the word sees it.
    pub fn note_failure(&self, slot: usize) {
        self.failed.fetch_or(bit(slot), Ordering::Relaxed);
    }

    /// A device doesn't answer in time; false if another one of `members` (a mask of slots) has failed, so that the array can't do without it.
    pub fn note_late(&self, slot: usize, members: u64) -> bool {
        let others = members & !bit(slot);
        let noted = |failed: u64| (failed & others == 0).then_some(failed | bit(slot));
        let (order, relaxed) = (Ordering::Relaxed, Ordering::Relaxed);
        self.failed.fetch_update(order, relaxed, noted).is_ok()
    }

    /// A device couldn't read a block; false if that were too many, and it is to be kicked.
    pub(super) fn note_read_error(&self, now: &Membership, slot: usize) -> bool {
        now.device(slot).note_read_error() < self.most_read_errors
    }

    /// The block of a record that couldn't be read, or didn't fit its sum, was calculated and written.
    pub(super) fn note_fixed(&self, now: &Membership, known: &Record, misfit: Option<Misfit>) {
        let role = known.bad.trailing_zeros() as usize;
        let sector = self.geometry.stripe_member_sector(known.stripe);
        let Some(slot) = now.members.reads(role) else {
            return;
        };
        let device = now.device(slot);
        match misfit {
            // It was told already.
            Some(Misfit::Sum) => {}
            Some(Misfit::Block(_)) => {
                device.note_misfit();
                tracing::warn!(
                    "raid5: member {role} had other bytes at sector {sector} of its data than were written there: the block was calculated and written again"
                );
            }
            None => {
                device.note_corrected();
                tracing::warn!(
                    "raid5: member {role} could not read sector {sector} of its data: it was calculated and written again"
                );
            }
        }
    }

    /// Halves the counts of read errors, so that old errors count less.
    pub fn forgive_read_errors(&self) {
        let now = self.membership();
        now.devices.iter().for_each(|device| device.forgive());
    }

    /// Blocks of a device that were calculated and written again, ever.
    pub fn corrected(&self, slot: usize) -> u32 {
        let now = self.membership();
        now.devices.get(slot).map_or(0, |device| device.corrected())
    }

    /// Sums of the array's blocks, if it has them.
    pub fn sums(&self) -> Option<&Sums> {
        self.sums.as_ref()
    }

    /// A slot is another device's from now on, which hasn't failed anything yet.
    pub(super) fn forget_failure(&self, slot: usize) {
        self.failed.fetch_and(!bit(slot), Ordering::Relaxed);
    }

    /// Slots of these members that failed, as a mask.
    pub(super) fn failed(&self, now: &Membership) -> u64 {
        self.failed.load(Ordering::Relaxed) & now.live_mask()
    }

    /// For the queue that has stopped words.
    pub(super) fn set_membership(&self, mut next: Membership) {
        next.number += 1;
        *self.membership.lock() = Arc::new(next);
    }

    pub fn queues(&self) -> Vec<Owner> {
        let queues = self.queues.lock();
        queues.all.iter().map(|(owner, _)| *owner).collect()
    }

    pub fn add_queue(&self, queue: Owner) -> Arc<Tallies> {
        let tallies = Arc::<Tallies>::default();
        let all = &mut self.queues.lock().all;
        all.push((queue, Arc::clone(&tallies)));
        tallies
    }

    pub fn remove_queue(&self, queue: Owner) {
        let mut queues = self.queues.lock();
        let OpenQueues { all, closed } = &mut *queues;
        let gone = all.extract_if(.., |(owner, _)| *owner == queue);
        *closed = gone.fold(*closed, |sum, (_, tallies)| sum + tallies.counts());
    }

    /// Counters of writes, of all queues ever.
    pub fn counts(&self) -> Counts {
        let queues = self.queues.lock();
        let open = queues.all.iter().map(|(_, tallies)| tallies.counts());
        open.fold(queues.closed, |sum, counts| sum + counts)
    }

    /// True if writes wait for more writes to their stripes.
    pub fn has_stripe_queues(&self) -> bool {
        self.gathers.load(Ordering::Relaxed)
    }

    /// From now on writes wait for more writes to their stripes, or don't. Those that wait go on when their queue is stepped.
    pub fn set_stripe_queues(&self, gathers: bool) {
        self.gathers.store(gathers, Ordering::Relaxed);
    }

    /// Stripes that may have pages.
    pub(super) fn stripes(&self) -> usize {
        self.stripes.load(Ordering::Relaxed)
    }

    /// An action begins; false if one is under way.
    pub(super) fn begin_sync(&self) -> bool {
        !self.syncs.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end_sync(&self) {
        self.syncs.store(false, Ordering::Release);
    }

    /// Requests that the open queues have taken.
    pub fn requests(&self) -> u64 {
        let queues = self.queues.lock();
        let taken = queues
            .all
            .iter()
            .map(|(_, tallies)| tallies.requests.load(Ordering::Relaxed));
        taken.sum()
    }

    /// The action that has to be done, if none is under way.
    pub fn wanted(&self) -> Option<Action> {
        let now = self.membership();
        let resyncs = now.unsynced().first().is_some() && now.members.failed().is_none();
        match now.members.incoming() {
            _ if now.broken => None,
            // Superblocks are about to leave it out.
            Some(incoming) if self.failed(&now) & bit(incoming.slot) != 0 => None,
            Some(_) => Some(Action::Recover),
            None if resyncs => Some(Action::Resync),
            None => self.wants_sums().then_some(Action::Checksum),
        }
    }

    fn wants_sums(&self) -> bool {
        let is_whole = self.membership().members.failed().is_none();
        is_whole && self.sums.is_some() && !self.unsummed.lock().is_empty()
    }

    /// Stripes whose sums aren't known, since the server before didn't end in order.
    pub(super) fn unsummed(&self) -> Vec<Range<u64>> {
        self.unsummed.lock().clone()
    }

    /// An action has given them sums.
    pub(super) fn all_summed(&self) {
        self.unsummed.lock().clear();
    }

    /// True if a device can be taken in.
    pub fn takes_device(&self) -> bool {
        let now = self.membership();
        !now.broken && now.members.incoming().is_none()
    }

    /// The place that a device is rebuilt for, and the stripes that it holds from the first on.
    pub fn recovered(&self) -> Option<(usize, u64)> {
        let incoming = self.membership().incoming()?;
        Some((incoming.role, incoming.done))
    }

    /// The first stripe whose parity isn't known to be right.
    pub fn first_unsynced(&self) -> Option<u64> {
        self.membership().unsynced().first()
    }

    /// Members that have to be flushed.
    pub(super) fn volatile(&self, now: &Membership) -> Vec<usize> {
        now.live()
            .filter(|slot| now.device(*slot).slot.ability.volatile)
            .collect()
    }

    /// The array for users. Only the device knows superblocks, and the actions of its queues.
    pub fn state(&self) -> State {
        let now = self.membership();
        let unsynced = now.unsynced().first();
        State {
            members: now.members_now(),
            failed: now.members.failed(),
            broken: now.broken,
            dirty: now.dirty,
            in_sync_sectors: unsynced.map(|stripe| stripe * STRIPE_SECTORS),
            stripes: self.stripes(),
            active_stripes: self.words.busy(),
            requests: self.requests(),
            ..State::default()
        }
    }

    /// Devices by slot, and those that are members or become one, as a mask.
    pub fn devices(&self) -> (Arc<[Arc<Device>]>, u64) {
        self.membership().known()
    }

    /// The slot of each role's member.
    pub fn slots_by_role(&self) -> Vec<Option<usize>> {
        self.membership().members.slots().to_vec()
    }

    /// Where a place's data is: a slot, and the sector where it begins; `None`: on no member that is whole.
    pub fn homes(&self) -> Vec<Option<(usize, u64)>> {
        let now = self.membership();
        let home = |slot: usize| (slot, now.device(slot).slot.data_sectors);
        let slots = now.members.slots().iter();
        slots
            .map(|slot| slot.filter(|_| !now.broken).map(home))
            .collect()
    }

    /// Devices that became members while the array served.
    pub fn takeovers(&self) -> u64 {
        self.membership().takeovers
    }

    /// The place without a member.
    pub fn missing(&self) -> Option<usize> {
        self.membership().members.failed()
    }

    /// True if two members failed: nothing works any more.
    pub fn is_broken(&self) -> bool {
        self.membership().broken
    }

    /// Bytes of pages that have the system's memory.
    pub fn live_bytes(&self) -> u64 {
        self.memory.gauge().live_bytes()
    }

    /// From now on so many stripes may have pages; returns mail to be posted. Too many go as soon as no batch has them, or by
    /// [`Common::give_way`]. One thread at a time calls this.
    pub fn set_stripes(&self, count: usize) -> Result<Vec<(Owner, Mail)>, Error> {
        let mut wake = Vec::new();
        let make = |missing| self.memory.make(missing);
        self.stock.set_count(count, make, &mut wake)?;
        self.stripes.store(count, Ordering::Relaxed);
        Ok(wake.into_iter().map(|to| (to, Mail::Pages)).collect())
    }

    /// Gives memory of pages that no batch has to the system; returns bytes, and mail to be posted.
    pub fn give_way(&self) -> (u64, Vec<(Owner, Mail)>) {
        let nobody = Owner::new(Owner::MAX).expect("a number, which no queue has");
        let mut errands = Errands::default();
        let words = (&self.words, &self.epoch);
        let bytes = self.stock.give_way(words, nobody, &mut errands);
        let mut mail: Vec<_> = errands
            .wake
            .into_iter()
            .map(|to| (to, Mail::Pages))
            .collect();
        mail.extend(errands.tell.into_iter().map(|to| (to, Mail::Drained)));
        for mut token in errands.arrived {
            let mut arrived = Vec::new();
            self.words.take(&mut token, &mut arrived);
            token.record_mut().add(arrived, &self.geometry);
            let to = token.record().next_owner();
            let to = to.expect("somebody has arrived");
            let token = self.words.hand_over(token, to);
            mail.push((to, Mail::Stripe(token)));
        }
        (bytes, mail)
    }
}
