//! [`Common`]: the parts of an array that all its queues share.

use super::queue::Mail;
use super::record::{Part, Stripe};
use crate::core::log::MOST_BYTES as MOST_LOG_BYTES;
use crate::core::members::Incoming;
use crate::core::members::Members;
use crate::core::plan::{Record, View, bit};
use crate::core::slots::{MOST_READ_ERRORS, Slot, Unsynced};
use crate::core::sync::Action;
use crate::core::zero::Ability;
use crate::words::{
    Epoch, Errands, LogFormat, Logs, Owner, PageMemory, Places, Room, Stock, StripePages, Table,
};
use crate::{Geometry, PPL_HEADER_BYTES, Policy, Superblock, log_space_bytes, ppl_signature};
use parking_lot::Mutex;
use pvblk_block::{Error, Limits, SECTOR};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Parameters of an array.
pub(super) struct Setup {
    pub(super) geometry: Geometry,
    pub(super) policy: Policy,
    pub(super) slots: Vec<Slot>,
    pub(super) members: Members,
    /// Stripes whose parity isn't known to be right.
    pub(super) unsynced: Unsynced,
    /// Superblocks say that parity may be wrong.
    pub(super) dirty: bool,
    /// Blocks of a device that may be calculated before it is kicked.
    pub(super) most_read_errors: u32,
    /// Number of words. Stripes share them if there are more.
    pub(super) words: usize,
    /// Number of stripes that may have pages.
    pub(super) sets: usize,
    /// Most queues, and the parts of requests that each may have at words.
    pub(super) queues: usize,
    pub(super) parts: usize,
    /// Bounds of a log's unit.
    pub(super) room: Room,
    /// [`crate::ppl_signature`] of the array.
    pub(super) signature: u32,
}

/// Most queues of an array, and parts of requests of each that may wait at words.
const QUEUES: usize = 64;
const PARTS: usize = 256;
/// Words for each stripe that may have pages: so that few stripes share one.
const WORDS: usize = 4;

impl Setup {
    /// As [`Common::of`]. Superblocks are written before the first write, since they may be clean, or not name a member that is missing.
    fn of(
        geometry: Geometry,
        members: Vec<Option<(&Superblock, Limits)>>,
        incoming: Option<(usize, u64, (&Superblock, Limits))>,
        stripes: usize,
    ) -> Setup {
        let arriving = incoming.as_ref().map(|(_, _, member)| member);
        let present = || members.iter().flatten().chain(arriving);
        let slot = |(superblock, limits): &(&Superblock, Limits)| {
            Slot::new(superblock, Ability::from(*limits))
        };
        let slots = members.iter().map(|member| {
            // The slot of a missing member is nobody's.
            let member = member.as_ref().or_else(|| present().next());
            member.map(slot)
        });
        let mut slots: Vec<Slot> = slots.flatten().collect();
        slots.extend(arriving.map(slot));
        let roles = members.iter().enumerate();
        let roles = roles.map(|(role, member)| member.as_ref().map(|_| role));
        let space = slots.iter().map(|slot| log_space_bytes(slot.log_sectors));
        let write = present().map(|(_, limits)| u64::from(limits.max_sectors) * SECTOR);
        let segments = present().map(|(_, limits)| limits.max_segments as usize);
        let any = present().map(|(superblock, _)| *superblock).next();
        Setup {
            geometry,
            policy: any.map_or(Policy::Resync, Superblock::policy),
            members: Members::new(
                roles.collect(),
                incoming.map(|(role, held, _)| Incoming::new(members.len(), role, held, false)),
            ),
            unsynced: Unsynced::default(),
            dirty: false,
            most_read_errors: MOST_READ_ERRORS,
            words: stripes * WORDS,
            sets: stripes,
            queues: QUEUES,
            parts: PARTS,
            room: Room {
                bytes: space
                    .chain(write.map(|bytes| bytes - PPL_HEADER_BYTES as u64))
                    .chain([MOST_LOG_BYTES])
                    .min()
                    .unwrap_or(0),
                segments: segments.min().unwrap_or(1),
            },
            signature: any.map_or(0, |superblock| ppl_signature(&superblock.set_uuid)),
            slots,
        }
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
    fn of(incoming: u64, resynced: u64) -> Arc<Progress> {
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
    members: Option<Members>,
    /// Its parity is right, though members have stripes where that isn't known.
    is_synced: bool,
}

/// Members, as they are while words go on. Only the queue that has stopped all words replaces it.
#[derive(Clone)]
pub(super) struct Membership {
    pub(super) members: Members,
    /// A new one for each incoming device: so a queue that doesn't know of the device yet doesn't take its positions for those of another one.
    pub(super) progress: Arc<Progress>,
    pub(super) unsynced: Arc<Unsynced>,
    /// Superblocks say that parity may be wrong, so stripes may be written.
    pub(super) dirty: bool,
    /// Two members failed: nothing works any more.
    pub(super) broken: bool,
}

impl Membership {
    /// The incoming device, with its positions at this moment.
    pub(super) fn incoming(&self) -> Option<Incoming> {
        self.members.incoming().map(|incoming| Incoming {
            begun: self.progress.begun.load(Ordering::Relaxed),
            done: self.progress.done.load(Ordering::Acquire),
            committed: self.progress.committed.load(Ordering::Acquire),
            ..incoming
        })
    }

    /// The array at this moment, for a batch of a stripe, whose word is the caller's.
    pub(super) fn see(&self, stripe: u64) -> Seen {
        Seen {
            members: self.incoming().map(|incoming| self.members.with(incoming)),
            is_synced: stripe < self.progress.resynced.load(Ordering::Acquire),
        }
    }

    /// Where a role's sectors are read without a word at this moment: those before `end_sector` of its data.
    pub(super) fn reads_directly(&self, role: usize, end_sector: u64) -> Option<usize> {
        let incoming = || self.incoming().filter(|i| i.holds(role, end_sector));
        let slot = self.members.slot(role);
        slot.or_else(|| Some(incoming()?.slot))
    }

    /// Stripes whose parity isn't known to be right.
    pub(super) fn unsynced(&self) -> Unsynced {
        let mut left = Unsynced::clone(&self.unsynced);
        left.done_before(self.progress.resynced.load(Ordering::Acquire));
        left
    }

    /// All devices that are written.
    pub(super) fn live(&self) -> impl Iterator<Item = usize> + use<'_> {
        let incoming = self.members.incoming().map(|incoming| incoming.slot);
        self.members
            .slots()
            .iter()
            .flatten()
            .copied()
            .chain(incoming)
    }

    /// The incoming device isn't one any more: it is a member now, or has failed.
    pub(super) fn forget_progress(&mut self) {
        self.progress = Progress::of(0, self.progress.resynced.load(Ordering::Acquire));
    }
}

/// The number of requests that a queue has taken. Only the queue writes it, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Taken(AtomicU64);

impl Taken {
    pub(super) fn add_one(&self) {
        self.0
            .store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// Blocks that a device couldn't read.
#[derive(Debug, Default)]
struct ReadErrors {
    /// Those that were calculated and written again, ever.
    corrected: AtomicU32,
    /// Not so long ago.
    recent: AtomicU32,
}

/// See the module's documentation. Queues have an [`Arc`] of it.
pub struct Common {
    pub(super) geometry: Geometry,
    pub(super) policy: Policy,
    pub(super) slots: Box<[Slot]>,
    /// The words of stripes: a stripe's is its number, modulo their count.
    pub(super) words: Table<Stripe, Part>,
    pub(super) epoch: Epoch,
    /// Only an array with a log has them.
    pub(super) logs: Option<Logs<Stripe>>,
    pub(super) room: Room,
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
    read_errors: Box<[ReadErrors]>,
    most_read_errors: u32,
    /// Slots that failed some I/O other than reads, or too many reads, as a mask.
    failed: AtomicU64,
    /// An action is under way.
    syncs: AtomicBool,
    /// Open queues, which are told when words go on, and the number of requests that each has taken.
    queues: Mutex<Vec<(Owner, Arc<Taken>)>>,
}

impl Common {
    /// An array of these members, by role, with pages for so many stripes. `incoming`: a device that becomes the member of a role, with the
    /// stripes that it holds from the first on; its slot comes after the members'. `unsynced`: stripes whose parity isn't known to be right.
    pub fn of(
        geometry: Geometry,
        members: Vec<Option<(&Superblock, Limits)>>,
        incoming: Option<(usize, u64, (&Superblock, Limits))>,
        unsynced: Vec<Range<u64>>,
        stripes: usize,
    ) -> Result<Arc<Common>, Error> {
        let mut setup = Setup::of(geometry, members, incoming, stripes);
        setup.unsynced = Unsynced(unsynced);
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
        let read_errors = setup.slots.iter().map(|slot| ReadErrors {
            corrected: slot.corrected.into(),
            ..ReadErrors::default()
        });
        let read_errors = read_errors.collect();
        let memory = PageMemory::new(setup.geometry.members());
        let sets = memory.make(setup.sets)?;
        Ok(Arc::new(Common {
            geometry: setup.geometry,
            policy: setup.policy,
            slots: setup.slots.into(),
            words,
            epoch: Epoch::default(),
            logs,
            room: setup.room,
            stock: Stock::new(sets),
            memory,
            places: Places::new(places),
            log_places: Places::new(log_places),
            parts: setup.parts,
            membership: Mutex::new(Arc::new(Membership {
                progress: Progress::of(setup.members.incoming().map_or(0, |i| i.done), 0),
                members: setup.members,
                unsynced: Arc::new(setup.unsynced),
                dirty: setup.dirty,
                broken: false,
            })),
            synced: Unsynced::default(),
            read_errors,
            most_read_errors: setup.most_read_errors,
            failed: AtomicU64::new(0),
            syncs: AtomicBool::new(false),
            queues: Mutex::new(Vec::new()),
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

    /// A device couldn't read a block; false if that were too many, and it is to be kicked.
    pub(super) fn note_read_error(&self, slot: usize) -> bool {
        let recent = self.read_errors[slot]
            .recent
            .fetch_add(1, Ordering::Relaxed);
        recent < self.most_read_errors
    }

    /// The block of a record that couldn't be read was calculated and written.
    pub(super) fn note_fixed(&self, now: &Membership, known: &Record) {
        let role = known.bad.trailing_zeros() as usize;
        let sector = self.geometry.stripe_member_sector(known.stripe);
        if let Some(slot) = now.members.reads(role) {
            self.read_errors[slot]
                .corrected
                .fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "raid5: member {role} could not read sector {sector} of its data: it was calculated and written again"
            );
        }
    }

    /// Halves the counts of read errors, so that old errors count less.
    pub fn forgive_read_errors(&self) {
        for errors in &self.read_errors {
            let halve = |count: u32| Some(count / 2);
            let _ = errors
                .recent
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, halve);
        }
    }

    /// Blocks of a device that were calculated and written again, ever.
    pub fn corrected(&self, slot: usize) -> u32 {
        self.read_errors[slot].corrected.load(Ordering::Relaxed)
    }

    /// Slots of these members that failed, as a mask.
    pub(super) fn failed(&self, now: &Membership) -> u64 {
        let present = now.live().fold(0, |mask, slot| mask | bit(slot));
        self.failed.load(Ordering::Relaxed) & present
    }

    /// For the queue that has stopped words.
    pub(super) fn set_membership(&self, next: Membership) {
        *self.membership.lock() = Arc::new(next);
    }

    pub fn queues(&self) -> Vec<Owner> {
        let queues = self.queues.lock();
        queues.iter().map(|(owner, _)| *owner).collect()
    }

    pub fn add_queue(&self, queue: Owner) -> Arc<Taken> {
        let taken = Arc::<Taken>::default();
        self.queues.lock().push((queue, Arc::clone(&taken)));
        taken
    }

    pub fn remove_queue(&self, queue: Owner) {
        self.queues.lock().retain(|(other, _)| *other != queue);
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
            .iter()
            .map(|(_, taken)| taken.0.load(Ordering::Relaxed));
        taken.sum()
    }

    /// The action that has to be done, if none is under way.
    pub fn wanted(&self) -> Option<Action> {
        let now = self.membership();
        let resyncs = now.unsynced().first().is_some() && now.members.failed().is_none();
        match now.members.incoming() {
            _ if now.broken => None,
            Some(_) => Some(Action::Recover),
            None => resyncs.then_some(Action::Resync),
        }
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
            .filter(|slot| self.slots[*slot].ability.volatile)
            .collect()
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
