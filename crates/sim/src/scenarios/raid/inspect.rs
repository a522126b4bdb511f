//! Looks at the members themselves, while nothing is in flight.

use super::shape::Shape;
use crate::checker::Checker;
use crate::disk::CrashDisk;
use crate::stamp;
use std::sync::Arc;

/// The array's members, as they lie there.
pub struct Raw<'a> {
    /// Where things should be.
    pub shape: Shape,
    /// All there are.
    pub disks: &'a [Arc<CrashDisk>],
    /// Where each one's data begins.
    pub data_sectors: &'a [u64],
    /// Which of them is at which place.
    pub by_role: &'a [usize],
    /// The place whose disk doesn't count.
    pub missing: Option<usize>,
    /// From this sector of the members on parity may be wrong.
    pub in_sync: u64,
}

impl Raw<'_> {
    /// Parity is right everywhere, and what the members hold is what users were told.
    pub fn check(&self, checker: &Checker) -> Result<(), String> {
        for at in 0..self.shape.member_sectors() {
            let all: Vec<_> = self
                .by_role
                .iter()
                .map(|&m| self.disks[m].current(self.data_sectors[m] + at))
                .collect();
            let sum_without = |left_out: Option<usize>| {
                let mut sum = [0u8; 512];
                let others = all.iter().enumerate().filter(|(m, _)| Some(*m) != left_out);
                for (_, bytes) in others {
                    sum.iter_mut().zip(bytes).for_each(|(x, y)| *x ^= y);
                }
                sum
            };
            let synced = at < self.in_sync;
            if self.missing.is_none() && synced && sum_without(None) != [0; 512] {
                let blocks = self.shape.column(at).map(|(m, s)| {
                    let what = stamp::describe(&all[m], s);
                    format!("sector {s} on member {m} is {what}")
                });
                return Err(format!(
                    "parity is wrong at sector {at} of the members (parity on {}): {}",
                    self.shape.parity(at),
                    blocks.collect::<Vec<_>>().join(", ")
                ));
            }
            for (member, sector) in self.shape.column(at) {
                // With right parity a member left out gives the same as the member itself.
                let bytes = match self.missing == Some(member) {
                    true => sum_without(Some(member)),
                    false => all[member],
                };
                checker.check_raw(sector, &bytes)?;
            }
        }
        Ok(())
    }
}
