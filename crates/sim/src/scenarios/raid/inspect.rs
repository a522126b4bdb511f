//! Checks of the members themselves, while no request is in flight.

use super::shape::Shape;
use crate::checker::Checker;
use crate::disk::CrashDisk;
use crate::stamp;
use std::sync::Arc;

/// The contents of the array's members.
pub struct RawMembers<'a> {
    /// Layout of the array.
    pub shape: Shape,
    /// Disks of all roles and spares.
    pub disks: &'a [Arc<CrashDisk>],
    /// First sector of each disk's data.
    pub data_sectors: &'a [u64],
    /// Number of the disk in each role.
    pub by_role: &'a [usize],
    /// The role whose disk doesn't count.
    pub missing: Option<usize>,
    /// First sector of the members from which on parity may be wrong.
    pub in_sync: u64,
}

impl RawMembers<'_> {
    /// Checks that parity is right everywhere, and that the members hold contents that the checker
    /// allows.
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
                // With right parity the data computed without a member is the same as the member's
                // own.
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
