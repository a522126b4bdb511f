//! Policies of page caches when memory is short: those of kernels of 2008 to 2010 and ours, with the
//! alternatives of each decision.

use pvblk_cache::{AfterFailure, Shortfall, Standard};

/// The order in which a refill takes frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameOrder {
    /// Frame numbers rise, also at the cold end, and are sorted within a request.
    Kept,
    /// Frame numbers fall at the cold end, as in Linux 2.6.25 to 2.6.30.
    Reversed,
}

/// The action of a request that reclaimed pages itself and then finds no free frame all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitPolicy {
    /// If pages were reclaimed, it empties the lists and tries again; else it sleeps until any I/O has ended.
    Progress,
    /// If the device is congested, it sleeps until the timeout or until congestion ends; else it tries again.
    IfCongested,
    /// It sleeps for the whole timeout, whether or not pages were reclaimed, as in Linux 2.6.31.
    FullTimeout,
}

/// The share of the cache that active pages may keep from reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActiveShare {
    /// This share in percent, 0 to 99, of pages that were used often once: with 50 no active page is given up while there are as many inactive ones, as
    /// in Linux 2.6.31.
    Percent(u8),
    /// The share of the cache that is served, of pages that are used.
    Used,
}

/// A cache's decisions when memory is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Order in which frames are taken.
    pub order: FrameOrder,
    /// Action of a request that finds no frame.
    pub wait: WaitPolicy,
    /// Share of the cache that active pages keep.
    pub active: ActiveShare,
}

impl Policy {
    /// The policy of Linux 2.6.31.
    pub const HISTORY: Policy = Policy {
        order: FrameOrder::Kept,
        wait: WaitPolicy::FullTimeout,
        active: ActiveShare::Percent(50),
    };
    /// The decisions of [`pvblk_cache::Standard`], made by this type.
    pub const DEFAULT: Policy = Policy {
        order: FrameOrder::Kept,
        wait: WaitPolicy::Progress,
        active: ActiveShare::Used,
    };

    /// All policies; those of one order of frames come first.
    pub fn all(quick: bool) -> Vec<Policy> {
        let mut all = Vec::new();
        for order in [FrameOrder::Kept, FrameOrder::Reversed] {
            for wait in [
                WaitPolicy::FullTimeout,
                WaitPolicy::IfCongested,
                WaitPolicy::Progress,
            ] {
                for active in [
                    ActiveShare::Percent(50),
                    ActiveShare::Percent(25),
                    ActiveShare::Percent(0),
                    ActiveShare::Used,
                ] {
                    let policy = Policy {
                        order,
                        wait,
                        active,
                    };
                    let is_end = policy == Policy::HISTORY || policy == Policy::DEFAULT;
                    if !quick || is_end {
                        all.push(policy);
                    }
                }
            }
        }
        all
    }

    /// Name in tables.
    pub fn name(&self) -> String {
        let order = match self.order {
            FrameOrder::Kept => "kept",
            FrameOrder::Reversed => "reversed",
        };
        let wait = match self.wait {
            WaitPolicy::FullTimeout => "full",
            WaitPolicy::IfCongested => "congested",
            WaitPolicy::Progress => "progress",
        };
        match self.active {
            ActiveShare::Percent(share) => format!("{order} {wait} {share}"),
            ActiveShare::Used => format!("{order} {wait} used"),
        }
    }
}

impl pvblk_cache::Policy for Policy {
    fn keeps_frames_in_order(&self) -> bool {
        self.order == FrameOrder::Kept
    }

    /// A kernel gives up the CPU at this point.
    fn yields_before_reclaim(&self) -> bool {
        self.wait != WaitPolicy::Progress
    }

    fn after_failure(&self, progress: usize, congested: bool) -> AfterFailure {
        match self.wait {
            WaitPolicy::FullTimeout => AfterFailure::SleepTimeout,
            WaitPolicy::IfCongested if congested => AfterFailure::SleepWhileCongested,
            WaitPolicy::IfCongested if progress == 0 => AfterFailure::SleepBriefly,
            WaitPolicy::IfCongested => AfterFailure::Reclaim,
            WaitPolicy::Progress => Standard.after_failure(progress, congested),
        }
    }

    fn goes_on_with(&self, short: &Shortfall) -> bool {
        match self.wait {
            // A kernel of 2009 slept for each page of a window, too. Other I/O has to end, though.
            WaitPolicy::FullTimeout => short.asleep && short.progress == 0 && short.is_idle,
            WaitPolicy::IfCongested => short.asleep || short.only_optional,
            WaitPolicy::Progress => Standard.goes_on_with(short),
        }
    }

    fn background_drains_lists(&self) -> bool {
        self.wait != WaitPolicy::FullTimeout
    }

    fn divides_frames(&self) -> bool {
        self.wait == WaitPolicy::Progress
    }

    fn protected_percent(&self) -> u8 {
        match self.active {
            ActiveShare::Percent(share) => share,
            ActiveShare::Used => Standard.protected_percent(),
        }
    }

    fn keeps_used_active(&self) -> bool {
        self.active == ActiveShare::Used
    }

    fn returns_as_active(&self, distance: u64, active: u64, frames: u64) -> bool {
        match self.active {
            ActiveShare::Percent(_) => distance <= active,
            ActiveShare::Used => Standard.returns_as_active(distance, active, frames),
        }
    }

    fn gives_up_active(&self) -> bool {
        self.active == ActiveShare::Used
    }

    fn kept_from_reads_percent(&self) -> u8 {
        match self.active {
            ActiveShare::Percent(share) => share,
            ActiveShare::Used => Standard.kept_from_reads_percent(),
        }
    }
}
