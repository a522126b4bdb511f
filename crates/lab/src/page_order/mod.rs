//! `lab page-order`: seed 002's tables. Processes that read through a page cache under memory pressure, by what the cache does then.

pub mod disks;
pub mod load;

use pvblk_cache::{ActiveShare, CacheConfig, FrameOrder, WaitPolicy};

/// What a cache does when memory is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Order of frames.
    pub order: FrameOrder,
    /// Waiting for memory.
    pub wait: WaitPolicy,
    /// Protection of active pages.
    pub active: ActiveShare,
}

impl Policy {
    /// As in Linux 2.6.31.
    pub const HISTORY: Policy = Policy {
        order: FrameOrder::Kept,
        wait: WaitPolicy::FullTimeout,
        active: ActiveShare::Percent(50),
    };
    /// The defaults.
    pub const DEFAULT: Policy = Policy {
        order: FrameOrder::Kept,
        wait: WaitPolicy::Progress,
        active: ActiveShare::Refault,
    };

    /// Sets it.
    pub fn set(&self, config: &mut CacheConfig) {
        (config.order, config.wait, config.active) = (self.order, self.wait, self.active);
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Cell {
    /// How many read.
    pub processes: u32,
    /// Anywhere, or in order.
    pub random: bool,
    /// `None`: without the cache.
    pub policy: Option<Policy>,
    /// Pages of the cache.
    pub pages: u64,
    /// Of those, pages that were read often before.
    pub active_pages: u64,
}
