//! Repairs that an entry of a partial parity log asks for after a crash. See [`super::ppl`] for the log
//! itself.

use super::geometry::{Geometry, STRIPE_BYTES, STRIPE_SECTORS};
use super::ppl::{PplEntry, PplError};

/// New parity of one block: the XOR of the data blocks that were to change and, unless all were, of the partial parity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Member that gets the parity.
    pub parity_member: usize,
    /// Where: the same place on all members.
    pub member_sector: u64,
    /// Members to be read there.
    pub data_members: Vec<usize>,
    /// Offset of the block in the entry's partial parity, in bytes.
    pub partial_parity: Option<u64>,
}

/// The repair of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairPlan {
    /// Blocks to be made right.
    pub repairs: Vec<Repair>,
    /// Blocks that stay as they are, since a member whose data changed isn't there.
    pub left_alone: u64,
}

impl PplEntry {
    /// Checks that this is the partial parity that the entry was written with. If not, the log wasn't
    /// finished, so neither data nor parity of the entry were begun: the entry is skipped.
    pub fn check(&self, partial_parity: &[u8]) -> Result<(), PplError> {
        let right = partial_parity.len() == self.pp_bytes as usize
            && crc32c::crc32c(partial_parity) == self.checksum;
        right.then_some(()).ok_or(PplError::PartialParity)
    }

    /// Plans the repairs of an entry in the log of `log_member`. `is_missing` says that a sector of a member
    /// can't be used: the member is gone, or the sector isn't recovered.
    ///
    /// Entries that md would never write are refused; one that reaches outside would repair stripes that
    /// aren't broken.
    pub fn plan(
        &self,
        geometry: &Geometry,
        log_member: usize,
        is_missing: impl Fn(usize, u64) -> bool,
    ) -> Result<RepairPlan, PplError> {
        let shape = PplError::Shape {
            data_bytes: self.data_bytes,
            pp_bytes: self.pp_bytes,
        };
        let block = STRIPE_BYTES as u32;
        if !self.data_bytes.is_multiple_of(block) || !self.pp_bytes.is_multiple_of(block) {
            return Err(shape);
        }
        let chunk_sectors = geometry.chunk_sectors();
        let (data_sectors, pp_sectors) = (
            u64::from(self.data_bytes / 512),
            u64::from(self.pp_bytes / 512),
        );
        let all = geometry.data_members() as u64;
        // An entry has no number of blocks: it follows from the two sizes. If partial parity fills a chunk it may have
        // holes, which other writers than md make use of; then all blocks up to the end of the data are meant.
        let (blocks, deep_sectors, end) = match pp_sectors {
            0 => (all, data_sectors / all, None),
            n if n < chunk_sectors => (data_sectors / n, n, None),
            n if n == chunk_sectors => (all, n, Some(data_sectors)),
            _ => return Err(shape),
        };
        let whole = end.is_some() || blocks * deep_sectors == data_sectors;
        if data_sectors == 0
            || !whole
            || !(1..=all).contains(&blocks)
            || !deep_sectors.is_multiple_of(STRIPE_SECTORS)
        {
            return Err(shape);
        }
        let range = PplError::Range(self.data_sector);
        let length = end.unwrap_or((blocks - 1) * chunk_sectors + deep_sectors);
        let end = self.data_sector.checked_add(length);
        let end = end.filter(|&end| end <= geometry.capacity_sectors());
        let end = end.ok_or(range.clone())?;
        if !self.data_sector.is_multiple_of(STRIPE_SECTORS) {
            return Err(range);
        }
        let row = geometry.locate(self.data_sector).row;
        if geometry.locate(end - 1).row != row {
            return Err(range);
        }
        let right = geometry.parity_member(row);
        if self.parity_member as usize != right || log_member != right {
            return Err(PplError::Parity {
                entry: self.parity_member,
                log: log_member,
                right,
            });
        }

        let mut plan = RepairPlan::default();
        for at in (0..deep_sectors).step_by(STRIPE_SECTORS as usize) {
            let first = self.data_sector + at;
            let sectors = (0..blocks).map(|n| first + n * chunk_sectors);
            let places: Vec<_> = sectors
                .take_while(|&s| s < end)
                .map(|s| geometry.locate(s))
                .collect();
            let Some(place) = places.first() else {
                continue;
            };
            if places.iter().any(|p| is_missing(p.member, p.member_sector)) {
                plan.left_alone += 1;
                continue;
            }
            plan.repairs.push(Repair {
                parity_member: right,
                member_sector: place.member_sector,
                data_members: places.iter().map(|p| p.member).collect(),
                partial_parity: (pp_sectors > 0).then_some(at * 512),
            });
        }
        Ok(plan)
    }
}

#[cfg(test)]
#[path = "recover_tests.rs"]
mod tests;
