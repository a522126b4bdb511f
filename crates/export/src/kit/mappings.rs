//! [`MappingBudget`]: how much of front ends' memory a server maps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes of address space that all front ends of a server may map: an eighth of a process's.
const MAX_MAPPED: u64 = 16 << 40;
/// Most mappings that all front ends of a server may use: half of Linux's default `vm.max_map_count`.
const MAX_MAPPINGS: u64 = 32_768;

/// Limit of what the front ends of one server map together. Each front end can ask for much address space and many
/// mappings; without a limit a few hostile ones would leave none for the rest of the process.
#[derive(Debug)]
pub struct MappingBudget {
    bytes: AtomicU64,
    mappings: AtomicU64,
    max_mappings: u64,
}

impl MappingBudget {
    /// A full budget: 16 TiB of address space and 32768 mappings.
    pub fn new() -> Arc<MappingBudget> {
        MappingBudget::of_mappings(MAX_MAPPINGS)
    }

    /// As [`MappingBudget::new`], with this many mappings.
    pub fn of_mappings(max_mappings: u64) -> Arc<MappingBudget> {
        Arc::new(MappingBudget {
            bytes: AtomicU64::new(0),
            mappings: AtomicU64::new(0),
            max_mappings,
        })
    }

    /// Takes a share, given back on drop. `None` if it doesn't fit.
    pub fn take(self: &Arc<MappingBudget>, bytes: u64, mappings: u64) -> Option<MappingShare> {
        let share = MappingShare {
            budget: Arc::clone(self),
            bytes,
            mappings,
        };
        // Added before the comparison, so that two concurrent calls can't both take the last room.
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let count = self.mappings.fetch_add(mappings, Ordering::Relaxed) + mappings;
        (all <= MAX_MAPPED && count <= self.max_mappings).then_some(share)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A share of a [`MappingBudget`].
#[derive(Debug)]
pub struct MappingShare {
    budget: Arc<MappingBudget>,
    bytes: u64,
    mappings: u64,
}

impl Drop for MappingShare {
    fn drop(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.budget
            .mappings
            .fetch_sub(self.mappings, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_enforced_and_shares_are_given_back() {
        let budget = MappingBudget::new();
        let most = budget.take(MAX_MAPPED, 1).unwrap();
        assert!(budget.take(1, 1).is_none());
        drop(most);
        assert!(budget.take(1, MAX_MAPPINGS + 1).is_none());
        assert_eq!(budget.bytes(), 0);
        assert!(budget.take(MAX_MAPPED, MAX_MAPPINGS).is_some());
    }
}
