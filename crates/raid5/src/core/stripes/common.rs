//! [`Common`]: the parts of an array that all its queues share.

use super::queue::Mail;
use super::record::{Part, Stripe};
use crate::core::log::MOST_BYTES as MOST_LOG_BYTES;
use crate::core::members::Members;
use crate::core::plan::{View, bit};
use crate::core::slots::{Slot, Unsynced};
use crate::core::zero::Ability;
use crate::words::{
    Epoch, Errands, LogFormat, Logs, Owner, PageMemory, Places, Room, Stock, StripePages, Table,
};
use crate::{Geometry, PPL_HEADER_BYTES, Policy, Superblock, log_space_bytes, ppl_signature};
use parking_lot::Mutex;
use pvblk_block::{Error, Limits, SECTOR};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
        stripes: usize,
    ) -> Setup {
        let present = || members.iter().flatten();
        let slots = members.iter().map(|member| {
            // The slot of a missing member is nobody's.
            let member = member.as_ref().or_else(|| present().next());
            let slot = |(superblock, limits): &(&Superblock, Limits)| {
                Slot::new(superblock, Ability::from(*limits))
            };
            member.map(slot)
        });
        let slots: Vec<Slot> = slots.flatten().collect();
        let roles = members.iter().enumerate();
        let roles = roles.map(|(role, member)| member.as_ref().map(|_| role));
        let space = slots.iter().map(|slot| log_space_bytes(slot.log_sectors));
        let write = present().map(|(_, limits)| u64::from(limits.max_sectors) * SECTOR);
        let segments = present().map(|(_, limits)| limits.max_segments as usize);
        let any = present().map(|(superblock, _)| *superblock).next();
        Setup {
            geometry,
            policy: any.map_or(Policy::Resync, Superblock::policy),
            members: Members::new(roles.collect(), None),
            unsynced: Unsynced::default(),
            dirty: false,
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

/// Members, as they are while words go on. Only the queue that has stopped all words replaces it.
#[derive(Clone)]
pub(super) struct Membership {
    pub(super) members: Members,
    pub(super) unsynced: Arc<Unsynced>,
    /// Superblocks say that parity may be wrong, so stripes may be written.
    pub(super) dirty: bool,
    /// Two members failed: nothing works any more.
    pub(super) broken: bool,
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
    /// Slots that failed some I/O, as a mask.
    failed: AtomicU64,
    /// Open queues: they are told when words go on.
    queues: Mutex<Vec<Owner>>,
}

impl Common {
    /// An array of these members, by role, whose parity is right, with pages for so many stripes.
    pub fn of(
        geometry: Geometry,
        members: Vec<Option<(&Superblock, Limits)>>,
        stripes: usize,
    ) -> Result<Arc<Common>, Error> {
        Common::new(Setup::of(geometry, members, stripes))
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
                members: setup.members,
                unsynced: Arc::new(setup.unsynced),
                dirty: setup.dirty,
                broken: false,
            })),
            failed: AtomicU64::new(0),
            queues: Mutex::new(Vec::new()),
        }))
    }

    /// The word of a stripe.
    pub fn word_of(&self, stripe: u64) -> usize {
        (stripe % self.words.count() as u64) as usize
    }

    /// The array as plans see it, with these members.
    pub(super) fn view<'a>(&'a self, now: &'a Membership) -> View<'a> {
        View {
            geometry: &self.geometry,
            policy: self.policy,
            members: &now.members,
            unsynced: &now.unsynced,
        }
    }

    pub(super) fn membership(&self) -> Arc<Membership> {
        Arc::clone(&self.membership.lock())
    }

    /// A device failed I/O of a queue, which hasn't left the I/O's word yet: so a kick that waits for the word sees it.
    pub fn note_failure(&self, slot: usize) {
        self.failed.fetch_or(bit(slot), Ordering::Relaxed);
    }

    /// Slots of these members that failed, as a mask.
    pub(super) fn failed(&self, now: &Membership) -> u64 {
        let present = now.members.slots().iter().flatten();
        let present = present.fold(0, |mask, slot| mask | bit(*slot));
        self.failed.load(Ordering::Relaxed) & present
    }

    /// For the queue that has stopped words.
    pub(super) fn set_membership(&self, next: Membership) {
        *self.membership.lock() = Arc::new(next);
    }

    pub fn queues(&self) -> Vec<Owner> {
        self.queues.lock().clone()
    }

    pub fn add_queue(&self, queue: Owner) {
        self.queues.lock().push(queue);
    }

    pub fn remove_queue(&self, queue: Owner) {
        self.queues.lock().retain(|other| *other != queue);
    }

    /// Members that have to be flushed.
    pub(super) fn volatile(&self, now: &Membership) -> Vec<usize> {
        let slots = now.members.slots().iter().flatten().copied();
        slots
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
