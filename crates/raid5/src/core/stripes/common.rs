//! [`Common`]: the parts of an array that all its queues share.

use super::queue::Mail;
use super::record::{Part, Stripe};
use crate::core::members::Members;
use crate::core::plan::{View, bit};
use crate::core::slots::{Slot, Unsynced};
use crate::words::{
    Epoch, Errands, LogFormat, Logs, Owner, PageMemory, Places, Room, Stock, StripePages, Table,
};
use crate::{Geometry, Policy};
use parking_lot::Mutex;
use pvblk_block::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Parameters of an array.
pub struct Setup {
    pub geometry: Geometry,
    pub policy: Policy,
    pub slots: Vec<Slot>,
    pub members: Members,
    /// Stripes whose parity isn't known to be right.
    pub unsynced: Unsynced,
    /// Number of words. Stripes share them if there are more.
    pub words: usize,
    /// Number of stripes that may have pages.
    pub sets: usize,
    /// Most queues, and the parts of requests that each may have at words.
    pub queues: usize,
    pub parts: usize,
    /// Bounds of a log's unit.
    pub room: Room,
    /// [`crate::ppl_signature`] of the array.
    pub signature: u32,
}

/// Members, as they are while words go on. Only the queue that has stopped all words replaces it.
#[derive(Clone)]
pub struct Membership {
    pub members: Members,
    pub unsynced: Arc<Unsynced>,
    /// Two members failed: nothing works any more.
    pub broken: bool,
}

/// See the module's documentation. Queues have an [`Arc`] of it.
pub struct Common {
    pub geometry: Geometry,
    pub policy: Policy,
    pub slots: Box<[Slot]>,
    /// The words of stripes: a stripe's is its number, modulo their count.
    pub words: Table<Stripe, Part>,
    pub epoch: Epoch,
    /// Only an array with a log has them.
    pub logs: Option<Logs<Stripe>>,
    pub room: Room,
    pub stock: Arc<Stock<StripePages>>,
    memory: PageMemory,
    /// Places at words, and at logs.
    pub places: Places,
    pub log_places: Places,
    pub parts: usize,
    /// Replaced in a stop. Queues take a copy when the epoch has another number than at their last look.
    membership: Mutex<Arc<Membership>>,
    /// Slots that failed some I/O, as a mask.
    failed: AtomicU64,
    /// Open queues: they are told when words go on.
    queues: Mutex<Vec<Owner>>,
}

impl Common {
    pub fn new(setup: Setup) -> Result<Arc<Common>, Error> {
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
    pub fn view<'a>(&'a self, now: &'a Membership) -> View<'a> {
        View {
            geometry: &self.geometry,
            policy: self.policy,
            members: &now.members,
            unsynced: &now.unsynced,
        }
    }

    pub fn membership(&self) -> Arc<Membership> {
        Arc::clone(&self.membership.lock())
    }

    /// A device failed I/O of a queue, which hasn't left the I/O's word yet: so a kick that waits for the word sees it.
    pub fn note_failure(&self, slot: usize) {
        self.failed.fetch_or(bit(slot), Ordering::Relaxed);
    }

    /// Slots of these members that failed, as a mask.
    pub fn failed(&self, now: &Membership) -> u64 {
        let present = now.members.slots().iter().flatten();
        let present = present.fold(0, |mask, slot| mask | bit(*slot));
        self.failed.load(Ordering::Relaxed) & present
    }

    /// For the queue that has stopped words.
    pub fn set_membership(&self, next: Membership) {
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
    pub fn volatile(&self, now: &Membership) -> Vec<usize> {
        let slots = now.members.slots().iter().flatten().copied();
        slots
            .filter(|slot| self.slots[*slot].ability.volatile)
            .collect()
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
