//! Decisions of a cache that is short of memory, apart from the machines that carry them out.

/// Decisions about memory. The provided methods are those of every cache that is served ([`Standard`]). The experiments override them, to show what
/// other decisions cost (docs/decisions/0012-page-cache.md). A cache is compiled for one policy, so the standard one costs no branch.
pub trait Policy: Clone + Send + Sync + 'static {
    /// True if frames that a device fills are taken in rising order and sorted within a request, so that neighbouring pages are few segments.
    fn keeps_frames_in_order(&self) -> bool {
        true
    }

    /// True if a request that found no free frame ends its turn before it reclaims, and again before it tries to allocate.
    fn yields_before_reclaim(&self) -> bool {
        false
    }

    /// The next step of a request that has reclaimed `progress` pages and then found no free frame all the same. `congested`: the device has many
    /// writes of the cache.
    fn after_failure(&self, progress: usize, _congested: bool) -> AfterFailure {
        match progress {
            0 => AfterFailure::SleepUntilEnd,
            _ => AfterFailure::Reclaim,
        }
    }

    /// True if a read goes on with the frames that it has, though its plan wants more and there are none.
    ///
    /// Reads of a few pages cost as much as larger ones: a sleeper waits until it has half of its plan, if anything is about to end.
    fn goes_on_with(&self, short: &Shortfall) -> bool {
        short.only_optional || short.asleep && (short.has_half || short.is_idle)
    }

    /// True if background reclaim takes free frames off the lists of the CPUs, on which they don't count as free.
    fn background_drains_lists(&self) -> bool {
        true
    }

    /// True if the frames are divided among the reads that wait, and read-ahead windows among those who read in order.
    fn divides_frames(&self) -> bool {
        true
    }

    /// Share of the cache in percent that active pages keep from reclaim as long as they are used, 0 to 99. The rest is for new pages, which show there
    /// whether they are used again; a larger rest loses loops over more than the cache, and what is used beside scans (`pvblk-lab hit-rates`).
    fn protected_percent(&self) -> u8 {
        80
    }

    /// True if of the active pages beyond that share those that nobody used since the last look go, and the others stay active. False if the oldest become
    /// inactive, used or not.
    fn keeps_used_active(&self) -> bool {
        true
    }

    /// True if a page is active at once that comes back after `distance` other pages left the inactive list. `active`, `frames`: pages on the active list,
    /// and of the whole cache.
    fn returns_as_active(&self, distance: u64, _active: u64, frames: u64) -> bool {
        distance <= frames * u64::from(self.protected_percent()) / 100
    }

    /// True if active pages are reclaimed where inactive ones aren't enough.
    fn gives_up_active(&self) -> bool {
        true
    }

    /// Share of the frames in percent, 0 to 99, that reads can't count on because active pages have them.
    fn kept_from_reads_percent(&self) -> u8 {
        0
    }
}

/// The policy of every cache that is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standard;

impl Policy for Standard {}

/// The step after a reclaim after which an allocation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Another reclaim, at once.
    Reclaim,
    /// A sleep until any I/O of the cache has ended, at most the configured timeout.
    SleepUntilEnd,
    /// A sleep until any I/O of the cache has ended, at most a millisecond.
    SleepBriefly,
    /// A sleep for the whole timeout.
    SleepTimeout,
    /// A sleep until the device has few writes of the cache, at most the timeout.
    SleepWhileCongested,
}

/// A read whose plan wants more frames than there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// It is to sleep until there may be more.
    pub asleep: bool,
    /// Pages that its last reclaim freed.
    pub progress: usize,
    /// No I/O of the cache is under way, so none will end.
    pub is_idle: bool,
    /// It has frames for at least half of its plan.
    pub has_half: bool,
    /// It has frames for every page that was asked for; the others would be read in advance.
    pub only_optional: bool,
}
