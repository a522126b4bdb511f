//! Counters, under the names of `/proc/vmstat` where there are any.

use std::time::Duration;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts since the cache was made, but for those that begin with `nr_`, which are numbers of pages now.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// All of them with their names.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }

            /// Adds the counters of another part of the cache.
            pub(crate) fn add(&mut self, other: &Counters) {
                $(self.$name += other.$name;)*
            }

            /// Counts since `earlier`; numbers of pages as they are now.
            #[must_use]
            pub fn since(&self, earlier: &Counters) -> Counters {
                Counters {
                    $($name: match stringify!($name).starts_with("nr_") {
                        true => self.$name,
                        false => self.$name.wrapping_sub(earlier.$name),
                    },)*
                }
            }
        }
    };
}

counters! {
    /// Free pages, without those on lists of CPUs.
    nr_free_pages,
    /// Free pages on lists of CPUs.
    nr_listed_pages,
    /// Pages on the inactive list.
    nr_inactive_file,
    /// Pages on the active list.
    nr_active_file,
    /// Dirty pages, without those being written.
    nr_dirty,
    /// Pages that are being written.
    nr_writeback,
    /// KiB read from the device.
    pgpgin,
    /// KiB written to the device.
    pgpgout,
    /// Reads of the device.
    read_requests,
    /// Segments of those.
    read_segments,
    /// Writes to the device.
    write_requests,
    /// Segments of those.
    write_segments,
    /// Pages taken from the allocator.
    pgalloc,
    /// Pages given back.
    pgfree,
    /// Pages that became active.
    pgactivate,
    /// Pages that became inactive again.
    pgdeactivate,
    /// Pages that may have memory: those in use since theirs was given back.
    nr_warm_pages,
    /// Pages whose memory was given back to the system under pressure.
    pages_given_back,
    /// Active pages looked at.
    pgrefill,
    /// Pages that background reclaim looked at.
    pgscan_kswapd,
    /// Pages that requests looked at.
    pgscan_direct,
    /// Pages that background reclaim freed.
    pgsteal_kswapd,
    /// Pages that requests freed.
    pgsteal_direct,
    /// Reclaims by requests.
    allocstall,
    /// Times that background reclaim was asked for.
    pageoutrun,
    /// Pages read again not long after they were reclaimed.
    workingset_refault_file,
    /// Of those, pages that became active at once.
    workingset_activate_file,
    /// Pages that became dirty.
    pages_dirtied,
    /// Pages that were written.
    pages_written,
    /// Pages found, of reads.
    hits,
    /// Pages not found, of reads; those being read already count as well.
    misses,
    /// Pages read in advance.
    readahead_pages,
    /// Of those, pages that were used.
    readahead_used,
    /// Of those, pages that were reclaimed and had not been used.
    readahead_lost,
    /// Sleeps for memory.
    stalls,
    /// Nanoseconds of those.
    stall_ns,
    /// Allocations that failed though pages had been reclaimed for them.
    failed_after_progress,
    /// Sleeps of writers because too much was dirty.
    throttled,
    /// Nanoseconds of those.
    throttled_ns,
    /// Writes of pages that failed.
    write_errors,
    /// Read errors of the device.
    read_errors,
}

fn ratio(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

impl Counters {
    /// Share of read pages that were found.
    pub fn hit_ratio(&self) -> Option<f64> {
        ratio(self.hits, self.hits + self.misses)
    }

    /// Share of pages read in advance that were used.
    pub fn readahead_accuracy(&self) -> Option<f64> {
        ratio(self.readahead_used, self.readahead_pages)
    }

    /// Pages freed for each page looked at, as `sar`'s %vmeff.
    pub fn effectiveness(&self) -> Option<f64> {
        let scanned = self.pgscan_kswapd + self.pgscan_direct;
        ratio(self.pgsteal_kswapd + self.pgsteal_direct, scanned)
    }

    /// Share of looks that requests took themselves.
    pub fn direct_share(&self) -> Option<f64> {
        ratio(self.pgscan_direct, self.pgscan_kswapd + self.pgscan_direct)
    }

    /// Average length of a sleep for memory.
    pub fn average_stall(&self) -> Option<Duration> {
        self.stall_ns
            .checked_div(self.stalls)
            .map(Duration::from_nanos)
    }

    /// Segments for each read of the device.
    pub fn segments_per_read(&self) -> Option<f64> {
        ratio(self.read_segments, self.read_requests)
    }
}
