//! The array at rest and after power cuts: acknowledged writes are there, parity is right, and nothing is lost.

use super::device::SECTOR;
use super::recovery::AfterCut;
use super::{DATA_SECTORS, UUID, World};
use crate::core::queue::QueueCore;
use crate::{Policy, STRIPE_SECTORS, ppl_signature};

impl World {
    /// Power is cut: the array as it would be then is looked at, and the run goes on.
    pub fn cut(&mut self) {
        if self.rot.is_some() {
            // Nobody compares sums here.
            return;
        }
        let mut disk = self.disk.clone();
        let by_bitmap = self.comes_by_bitmap();
        for (_, errand) in &self.errands {
            if self.rng.bool() {
                disk.write(*errand, by_bitmap, |_| false);
            }
        }
        if disk.missing() > 1 {
            return;
        }
        let is_unsynced = disk.resynced < self.unsynced.0.last().map_or(0, |range| range.end);
        let is_logged = matches!(self.policy, Policy::Ppl(_));
        let bits = self.bits.clone();
        let mut lost = None;
        let is_whole = disk.missing() == 0 && disk.incoming.is_none() && !is_unsynced;
        if (is_logged || bits.is_some()) && is_whole && self.rng.u32(..3) == 0 {
            let is_doomed = |slot: &Option<usize>| slot.is_some_and(|s| self.doomed & 1 << s != 0);
            let dead = disk.roles.iter().position(is_doomed);
            let any = self.rng.usize(..disk.roles.len());
            lost = Some(dead.filter(|_| self.rng.bool()).unwrap_or(any));
        }
        let incoming = disk
            .incoming
            .filter(|(_, role, _)| disk.roles[*role].is_none());
        let members = disk.roles.iter().enumerate().map(|(role, slot)| {
            let incoming = incoming.filter(|(_, of, _)| *of == role);
            let slot = slot.or(incoming.map(|(slot, ..)| slot))?;
            if lost == Some(role) {
                return None;
            }
            let mut flying = Vec::new();
            for io in self
                .ios
                .iter()
                .filter(|io| io.io.slot == slot && io.io.op.is_write())
            {
                flying.push((io.io.sector, io.bytes.clone()));
            }
            Some(self.devices[slot].cut(&flying, &mut self.rng))
        });
        let members = members.collect();
        // Of any of the members, whichever is read.
        let present = disk.roles.iter().enumerate();
        let present = present.filter(|(role, _)| lost != Some(*role));
        let present: Vec<usize> = present.filter_map(|(_, slot)| *slot).collect();
        let reads = *self.rng.choice(&present).expect("a member");
        let marked = bits.map(|bits| {
            let all = 0..self.geometry.stripes();
            all.filter(|stripe| bits.marks(reads, *stripe)).collect()
        });
        let marks: Option<Vec<u64>> = marked;
        let mut after = AfterCut {
            geometry: self.geometry,
            data_sectors: DATA_SECTORS,
            members,
            marked: marks.clone().filter(|_| disk.by_bitmap),
            incoming: incoming.map(|(_, role, held)| (role, held)),
            repaired: 0,
        };
        self.ways.cuts += 1;
        self.ways.cuts_in_recoveries += usize::from(disk.incoming.is_some());
        self.ways.cuts_in_resyncs += usize::from(is_unsynced);
        self.ways.cuts_degraded += usize::from(disk.missing() > 0);
        self.ways.cuts_with_loss += usize::from(lost.is_some());
        self.ways.cuts_in_kicks += usize::from(self.is_kicking());
        if is_logged {
            after.recover(ppl_signature(&UUID));
            self.ways.repairs += after.repaired;
            let mut wrong = after.wrong();
            wrong.retain(|stripe| !self.unsynced.has(*stripe) || *stripe < disk.resynced);
            assert_eq!(wrong, [0; 0], "parity after a cut; {disk:?}");
        }
        if let Some(marked) = &marks {
            let mut wrong = after.wrong();
            wrong.retain(|stripe| !marked.contains(stripe));
            assert_eq!(wrong, [0; 0], "parity of unmarked stripes; {disk:?}");
        }
        for stripe in 0..self.geometry.stripes() {
            for index in 0..self.geometry.data_members() {
                let role = self.geometry.stripe_data(stripe, index);
                let first = self.geometry.stripe_array_sector(stripe, index);
                let sectors = first..first + STRIPE_SECTORS;
                // Without a log a missing member's block is lost with its stripe's parity, and with a log if it was being written.
                let is_open = sectors.clone().any(|sector| self.history.is_open(sector));
                let is_known = is_logged || marks.as_ref().is_some_and(|m| !m.contains(&stripe));
                if (!is_known && after.misses(stripe, role))
                    || (is_logged && lost == Some(role) && is_open)
                {
                    continue;
                }
                let block = after.data(stripe, index);
                for (sector, bytes) in sectors.zip(block.chunks(SECTOR)) {
                    let survives = self.history.survives(sector, bytes);
                    let text = || self.history.text(sector, bytes);
                    assert!(
                        survives,
                        "sector {sector} of stripe {stripe} after a cut: {}; {disk:?}, lost {lost:?}",
                        text()
                    );
                }
            }
        }
    }

    /// Nothing happens any more: all has ended, the array is right, and nothing is lost. So many requests weren't asked.
    pub fn finish(&mut self, unasked: usize) {
        let left: Vec<usize> = (0..self.asked.len())
            .filter(|tag| self.asked[*tag].is_some())
            .collect();
        self.note_ends();
        let corrected = (0..self.devices.len()).map(|slot| self.common.corrected(slot) as usize);
        self.ways.fixed += corrected.sum::<usize>();
        let is_idle = |queue: &QueueCore| queue.is_idle();
        if !left.is_empty() || unasked > 0 || !self.queues.iter().flatten().all(is_idle) {
            panic!("requests {left:?} don't end:\n{}", self.state());
        }
        self.end_rot();
        let membership = self.common.membership();
        self.ways.broken += usize::from(membership.broken);
        if !membership.broken {
            self.check_contents();
        }
        for queue in &mut self.queues {
            queue.take().map(QueueCore::close);
        }
        let all = self.queues.len() * self.common.parts;
        assert!(self.common.places.open(all).is_some(), "places are lost");
        if self.common.logs.is_some() {
            assert!(
                self.common.log_places.open(all).is_some(),
                "places at logs are lost"
            );
        }
        let words = 0..self.common.words.count();
        let (mut kept, mut free) = (0, true);
        for word in words.map(|at| self.common.words.peek(at)) {
            kept += usize::from(word.has_pages());
            free &= word.owner().is_none();
        }
        assert!(free, "a word isn't free");
        let (here, all) = self.common.stock.count();
        assert_eq!(here + kept, all, "sets are lost");
    }

    fn check_contents(&mut self) {
        let devices = &self.devices;
        let members = self.disk.roles.iter();
        let members = members.map(|slot| slot.map(|slot| devices[slot].contents().to_vec()));
        assert_eq!(self.disk.incoming, None, "a rebuild isn't done");
        let after = AfterCut {
            geometry: self.geometry,
            data_sectors: DATA_SECTORS,
            members: members.collect(),
            incoming: None,
            marked: None,
            repaired: 0,
        };
        assert_eq!(after.wrong(), [0; 0], "parity at rest");
        for stripe in 0..self.geometry.stripes() {
            for index in 0..self.geometry.data_members() {
                let first = self.geometry.stripe_array_sector(stripe, index);
                let block = after.data(stripe, index);
                for (sector, bytes) in (first..).zip(block.chunks(SECTOR)) {
                    assert!(
                        self.history.is_read(sector, bytes, u64::MAX),
                        "sector {sector} of stripe {stripe} at rest: {}",
                        self.history.text(sector, bytes)
                    );
                }
            }
        }
    }

    /// Everything that waits, for messages.
    pub fn state(&self) -> String {
        let mut text = format!("epoch {:?}\n", self.common.epoch.look());
        for at in 0..self.common.words.count() {
            let word = self.common.words.peek(at);
            text += &format!(
                "word {at}: {:?} {:?} list {:?}\n",
                word.phase(),
                word.owner(),
                word.newest()
            );
        }
        for (at, logs) in (0..self.geometry.members()).zip(self.common.logs.iter().cycle()) {
            let word = logs.peek(at);
            text += &format!(
                "log {at}: {:?} {:?} list {:?}\n",
                word.phase(),
                word.owner(),
                word.newest()
            );
        }
        for asked in self
            .asked
            .iter()
            .enumerate()
            .filter_map(|(n, asked)| Some((n, asked.as_ref()?)))
        {
            text += &format!("request {} of queue {}\n", asked.0, asked.1.queue + 1);
        }
        for queue in self.queues.iter().flatten() {
            text += &format!("{queue:?}\n");
        }
        text
    }
}
