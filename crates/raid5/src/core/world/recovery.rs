//! The array after a power cut: logs repair parity, and the contents are checked.

use super::device::SECTOR;
use crate::{Geometry, PPL_HEADER_BYTES, STRIPE_BYTES, STRIPE_SECTORS, find_newest, xor_into};

/// Devices after a cut, by role; `None`: it is lost.
pub struct AfterCut {
    pub geometry: Geometry,
    pub data_sectors: u64,
    pub members: Vec<Option<Vec<u8>>>,
    /// The role of a device that is being rebuilt, and stripes that it holds from the first on.
    pub incoming: Option<(usize, u64)>,
    /// Stripes that the bitmap marks: a device that comes back by it holds all others. `None`: it doesn't.
    pub marked: Option<Vec<u64>>,
    /// Blocks of parity that a log has repaired.
    pub repaired: usize,
}

impl AfterCut {
    fn at(&self, sector: u64) -> usize {
        (self.data_sectors + sector) as usize * SECTOR
    }

    /// True if a role's block isn't there.
    fn is_missing(&self, role: usize, sector: u64) -> bool {
        let held = self.incoming.filter(|(incoming, _)| *incoming == role);
        let stripe = sector / STRIPE_SECTORS;
        let lacks = |end| {
            let marked = self.marked.as_ref();
            stripe >= end && marked.is_none_or(|marked| marked.contains(&stripe))
        };
        self.members[role].is_none() || held.is_some_and(|(_, end)| lacks(end))
    }

    fn block(&self, role: usize, sector: u64) -> Option<&[u8]> {
        let at = self.at(sector);
        let member = self.members[role].as_ref();
        let member = member.filter(|_| !self.is_missing(role, sector))?;
        Some(&member[at..at + STRIPE_BYTES])
    }

    /// Repairs what the logs ask for.
    pub fn recover(&mut self, signature: u32) {
        for role in 0..self.members.len() {
            let Some(log) = &self.members[role] else {
                continue;
            };
            let area = log[..self.data_sectors as usize * SECTOR].to_vec();
            let Ok(newest) = find_newest(&area, signature) else {
                continue;
            };
            assert_eq!(newest.offset_sectors, 0);
            for (at, entry) in newest.header.entries_at() {
                let partial = &area[PPL_HEADER_BYTES + at as usize..][..entry.pp_bytes as usize];
                if entry.check(partial).is_err() {
                    // The unit wasn't written, so nothing of its stripes was.
                    continue;
                }
                let is_missing = |member: usize, sector| self.is_missing(member, sector);
                let plan = entry.plan(&self.geometry, role, is_missing);
                for repair in plan.expect("an entry that was written here").repairs {
                    let mut parity = [0; STRIPE_BYTES];
                    if let Some(at) = repair.partial_parity {
                        parity.copy_from_slice(&partial[at as usize..][..STRIPE_BYTES]);
                    }
                    for member in repair.data_members {
                        let data = self.block(member, repair.member_sector);
                        xor_into(&mut parity, &[data.expect("it isn't missing")]);
                    }
                    self.repaired += 1;
                    self.set_block(repair.parity_member, repair.member_sector, &parity);
                }
            }
        }
    }

    fn set_block(&mut self, role: usize, sector: u64, block: &[u8]) {
        let at = self.at(sector);
        if let Some(member) = &mut self.members[role] {
            member[at..at + STRIPE_BYTES].copy_from_slice(block);
        }
    }

    /// The XOR of all members' blocks of a stripe but one's.
    fn sum(&self, stripe: u64, but: Option<usize>) -> Vec<u8> {
        let sector = self.geometry.stripe_member_sector(stripe);
        let mut sum = vec![0; STRIPE_BYTES];
        for role in (0..self.members.len()).filter(|role| Some(*role) != but) {
            let block = self.block(role, sector).expect("no other is missing");
            xor_into(&mut sum, &[block]);
        }
        sum
    }

    /// True if a role's block of a stripe isn't there.
    pub fn misses(&self, stripe: u64, role: usize) -> bool {
        self.is_missing(role, self.geometry.stripe_member_sector(stripe))
    }

    /// The stripes whose blocks are all there, and whose parity is wrong.
    pub fn wrong(&self) -> Vec<u64> {
        let roles = 0..self.members.len();
        let is_whole = |stripe: &u64| !roles.clone().any(|role| self.misses(*stripe, role));
        let is_wrong = |stripe: &u64| self.sum(*stripe, None).iter().any(|byte| *byte != 0);
        let whole = (0..self.geometry.stripes()).filter(is_whole);
        whole.filter(is_wrong).collect()
    }

    /// A data block, calculated if its member is missing.
    pub fn data(&self, stripe: u64, index: usize) -> Vec<u8> {
        let role = self.geometry.stripe_data(stripe, index);
        let sector = self.geometry.stripe_member_sector(stripe);
        match self.block(role, sector) {
            Some(block) => block.to_vec(),
            None => self.sum(stripe, Some(role)),
        }
    }

    /// A sector of the array.
    pub fn sector(&self, sector: u64) -> Vec<u8> {
        let block = self.geometry.slot(sector);
        let data = self.data(block.stripe, block.index);
        data[block.offset_sectors as usize * SECTOR..][..SECTOR].to_vec()
    }
}
