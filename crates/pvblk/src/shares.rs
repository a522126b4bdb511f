//! NBD clients' share of the server: memory and connections, of each disk and of all.

use anyhow::{Result, bail};
use pvblk_backend::{Budget, memory_limit};
use pvblk_export::nbd::Shares;
use std::sync::Arc;

/// The largest request needs that much.
const LEAST_MEMORY: u64 = 40 << 20;
/// Without being told, all clients together get a quarter of the machine's memory, or of the control group's limit, but no more than this,
const MOST_OF_ALL: u64 = 4 << 30;
/// and those of one disk no more than this.
const MOST_OF_DISK: u64 = 512 << 20;
/// Every disk's clients get so much, whatever the others have; less only where there are many disks.
const FLOOR: u64 = 64 << 20;
/// The least floor.
const LEAST_FLOOR: u64 = 1 << 20;

/// The bounds that the user set; the others are derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Bytes of all clients' data.
    pub memory: Option<u64>,
    /// Bytes of one disk's clients' data.
    pub memory_of_disk: Option<u64>,
    pub connections: usize,
    pub connections_of_disk: usize,
}

impl Default for ClientLimits {
    fn default() -> ClientLimits {
        ClientLimits {
            memory: None,
            memory_of_disk: None,
            connections: 1024,
            connections_of_disk: 128,
        }
    }
}

impl ClientLimits {
    /// Checks what was given by flags, or in the file.
    pub fn check(self) -> Result<ClientLimits> {
        for (flag, bytes) in [
            ("--max-client-memory", self.memory),
            ("--max-client-memory-per-disk", self.memory_of_disk),
        ] {
            if bytes.is_some_and(|n| n < LEAST_MEMORY) {
                bail!("{flag}: at least 40M, for the largest request");
            }
        }
        for (flag, n) in [
            ("--max-connections", self.connections),
            ("--max-connections-per-disk", self.connections_of_disk),
        ] {
            if !(1..=65536).contains(&n) {
                bail!("{flag} {n}: from 1 to 65536");
            }
        }
        Ok(self)
    }

    /// Budgets for `disks` disks that there are first, and for more that come later, under one total.
    pub fn budgets(self, disks: usize) -> DiskBudgets {
        let quarter = memory_limit().map_or(MOST_OF_ALL, |n| n / 4);
        let of_all = self
            .memory
            .unwrap_or(quarter.clamp(LEAST_MEMORY, MOST_OF_ALL));
        let of_disk = self
            .memory_of_disk
            .unwrap_or((of_all / 4).clamp(FLOOR, MOST_OF_DISK))
            .min(of_all);
        DiskBudgets {
            total: Budget::total(of_all),
            of_disk,
            first: disks.max(1),
        }
    }

    /// The bounds for connections.
    pub fn shares(self) -> Arc<Shares> {
        Arc::new(Shares::new(self.connections_of_disk, self.connections))
    }
}

/// Budgets of disks that come and go.
#[derive(Debug)]
pub struct DiskBudgets {
    total: Arc<Budget>,
    of_disk: u64,
    /// Number of disks at the start.
    first: usize,
}

impl DiskBudgets {
    /// For one more disk beside `others`. The floors of those that are there stay as they are.
    pub fn next(&self, others: usize) -> Arc<Budget> {
        let share = self.total.limit() / 2 / self.first.max(others + 1) as u64;
        let floor = share.clamp(LEAST_FLOOR, FLOOR).min(self.of_disk);
        Budget::of_owner(&self.total, self.of_disk, floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_have_a_limit_a_floor_and_a_total() {
        let limits = ClientLimits {
            memory: Some(1 << 30),
            ..ClientLimits::default()
        };
        let one = limits.check().unwrap().budgets(1);
        assert_eq!(one.next(0).limit(), 256 << 20);
        let many = limits.budgets(100);
        let all: Vec<_> = (0..100).map(|n| many.next(n)).collect();
        let claims: Vec<_> = all.iter().filter_map(|b| b.take(256 << 20)).collect();
        assert_eq!(claims.len(), 4);
        // The others have their floor.
        let floors: Vec<_> = all[4..].iter().filter_map(|b| b.take(5 << 20)).collect();
        assert_eq!(floors.len(), 96);
        let small = ClientLimits {
            memory_of_disk: Some(1 << 20),
            ..limits
        };
        let e = small.check().unwrap_err().to_string();
        assert!(
            e.contains("--max-client-memory-per-disk") && e.contains("40M"),
            "{e}"
        );
        let none = ClientLimits {
            connections: 0,
            ..limits
        };
        assert!(none.check().is_err());
    }
}
