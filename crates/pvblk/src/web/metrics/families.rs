//! All families of metrics: the one list of their names, types, labels and units.

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Only grows, until the server starts again or the disk is removed. Samples end in `_total`.
    Counter,
    Gauge,
    Histogram,
    /// The value is 1; the labels tell. Samples end in `_info`.
    Info,
}

/// Samples of one meaning.
#[derive(Debug)]
pub struct Family {
    /// Without the ending of its samples.
    pub name: &'static str,
    pub kind: Type,
    /// Of its samples, in their order; tests compare them with what is written and with the reference.
    #[cfg(test)]
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

impl Family {
    /// The unit that the name ends in, if it does.
    pub fn unit(&self) -> Option<&'static str> {
        let ends = |unit: &&&str| self.name.rsplit('_').next() == Some(**unit);
        ["seconds", "bytes"].iter().find(ends).copied()
    }

    /// Names of its samples.
    #[cfg(test)]
    pub fn samples(&self) -> Vec<String> {
        let endings: &[&str] = match self.kind {
            Type::Counter => &["_total"],
            Type::Gauge => &[""],
            Type::Info => &["_info"],
            Type::Histogram => &["_bucket", "_sum", "_count"],
        };
        endings
            .iter()
            .map(|end| format!("{}{end}", self.name))
            .collect()
    }
}

macro_rules! families {
    ($($id:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(pub static $id: Family = Family {
            name: $name,
            kind: Type::$kind,
            #[cfg(test)]
            labels: &[$($label),*],
            help: $help,
        };)*

        /// All families, in the order in which they are written.
        #[cfg(test)]
        pub static ALL: &[&Family] = &[$(&$id),*];
    };
}

families! {
    UP = Gauge "pvblk_up" [] "1 if the server answered; `pvblk web` says 0 if it didn't.";
    BUILD = Info "pvblk_build" ["version"] "The server's version.";
    CPU = Counter "process_cpu_seconds" [] "Time that the server's process used CPUs, user and system. Not from pvblk web.";
    START = Gauge "process_start_time_seconds" [] "When the server began to count, in seconds since 1970. Not from pvblk web.";
    DISKS = Gauge "pvblk_disks" ["state"] "Disks by state: opening, serving, removing, failed.";
    UNANSWERED = Gauge "pvblk_scrape_unanswered" [] "Arrays and caches that did not answer in time for this reading: their lines are missing.";
    LEFT_OUT = Gauge "pvblk_scrape_disks_without_buckets" [] "Disks in use whose buckets are left out of this reading, so that it stays small.";
    EVENTS = Counter "pvblk_events" ["kind", "severity"] "Events of the server by kind, those included that were left out of the list.";

    DISK = Info "pvblk_disk" ["disk", "volume"] "A disk, and the kind of volume that it stands on.";
    DISK_STATUS = Gauge "pvblk_disk_status" ["disk", "state", "health"] "1 for the state (opening, serving, removing, failed) and health (healthy, degraded, stalled, failed) that the disk has now.";
    DISK_SIZE = Gauge "pvblk_disk_size_bytes" ["disk"] "Size of the disk; 0 until it is open.";
    DISK_CONNECTIONS = Gauge "pvblk_disk_connections" ["disk"] "Queues and connections of front ends and clients that use the disk.";
    DISK_IN_FLIGHT = Gauge "pvblk_disk_requests_in_flight" ["disk"] "Requests that were taken and have not ended.";
    DISK_BUSY = Counter "pvblk_disk_busy_seconds" ["disk"] "Time with requests in flight, summed over queues.";
    DISK_REQUESTS = Counter "pvblk_disk_requests" ["disk", "op"] "Requests that ended, with or without an error.";
    DISK_BYTES = Counter "pvblk_disk_transferred_bytes" ["disk", "op"] "Bytes of requests that ended.";
    DISK_ERRORS = Counter "pvblk_disk_errors" ["disk", "op"] "Requests that ended with an error.";
    DISK_TIME = Counter "pvblk_disk_request_time_seconds" ["disk", "op"] "Times of requests that ended, together, each from when the server took it to its answer.";
    DISK_MERGES = Counter "pvblk_disk_merges" ["disk", "op"] "Requests that were merged into others on their way to another server's rings. Only if there were some.";
    DISK_LATENCY = Histogram "pvblk_disk_request_duration_seconds" ["disk", "op"] "Times of requests that ended. Only of disks in use, unless the reader asks for buckets=all.";
    HOPS_FOLLOWED = Gauge "pvblk_hops_followed_one_in" [] "One request in so many is followed for the hops; 0: none is.";
    HOPS_LOST = Counter "pvblk_hops_lost_events" [] "Events of followed requests that were lost.";
    HOPS_UNKNOWN = Counter "pvblk_hops_unknown_requests" [] "Followed requests that are in no hop, since events of theirs may be lost.";
    HOPS_LEFT_OUT = Gauge "pvblk_scrape_hops_left_out" [] "Hops of the last second that are left out, so that a reading stays small.";
    HOP_REQUESTS = Counter "pvblk_disk_hop_requests" ["disk", "hop"] "Requests that passed a hop of their way, an estimate: those that were followed, times the number of which each is one.";
    HOP_TIME = Counter "pvblk_disk_hop_time_seconds" ["disk", "hop"] "Times of requests in a hop of their way, together, the same estimate.";
    LIMIT_REQUESTS = Gauge "pvblk_disk_limit_requests_per_second" ["disk", "scope", "op"] "Limit of requests a second: of the disk or of each connection; of reads, of writes, or of all.";
    LIMIT_BYTES = Gauge "pvblk_disk_limit_bytes_per_second" ["disk", "scope", "op"] "The same of bytes a second.";

    ARRAY_DEGRADED = Gauge "pvblk_array_degraded" ["disk"] "1 if a place of the array has no member that is whole.";
    ARRAY_FAILED = Gauge "pvblk_array_failed" ["disk"] "1 if two members failed: requests fail.";
    ARRAY_MEMBERS = Gauge "pvblk_array_members" ["disk", "state"] "Places and devices of the array by state: active, rebuilding, spare, faulty, removed.";
    ARRAY_AWAY = Gauge "pvblk_array_members_away" ["disk"] "Members that did not answer, and come back by themselves.";
    ARRAY_CORRECTED = Counter "pvblk_array_corrected_reads" ["disk", "place"] "Blocks that the member at this place could not read, and that were calculated and written again, ever.";
    ARRAY_CHECKSUM = Counter "pvblk_array_checksum_errors" ["disk", "place"] "Blocks of the member at this place that were other than was written, or whose checksums on it were, and that were made right, since the array is served.";
    ARRAY_MISMATCH = Gauge "pvblk_array_mismatch_bytes" ["disk"] "Bytes of members whose parity was wrong in the last check or repair.";
    ARRAY_SYNC_DONE = Gauge "pvblk_array_sync_done_bytes" ["disk", "action"] "Bytes of each member that the resync, recover, check, repair or checksum under way has done.";
    ARRAY_SYNC_SIZE = Gauge "pvblk_array_sync_size_bytes" ["disk", "action"] "Bytes of each member that it has to do.";

    CACHE_HITS = Counter "pvblk_cache_hits" ["disk"] "Pages of 4 KiB that reads found in the cache.";
    CACHE_MISSES = Counter "pvblk_cache_misses" ["disk"] "Pages that reads did not find; those being read already count as well.";
    CACHE_READ = Counter "pvblk_cache_read_bytes" ["disk"] "Bytes read from the volume below the cache.";
    CACHE_WRITTEN = Counter "pvblk_cache_written_bytes" ["disk"] "Bytes written to the volume below the cache.";
    CACHE_USED = Gauge "pvblk_cache_used_bytes" ["disk"] "Bytes of pages with data.";
    CACHE_FREE = Gauge "pvblk_cache_free_bytes" ["disk"] "Bytes of pages without.";
    CACHE_DIRTY = Gauge "pvblk_cache_dirty_bytes" ["disk"] "Bytes of pages that are to be written, those being written included.";
    CACHE_AHEAD = Counter "pvblk_cache_readahead_pages" ["disk"] "Pages read in advance.";
    CACHE_AHEAD_USED = Counter "pvblk_cache_readahead_used_pages" ["disk"] "Of those, pages that were used.";
    CACHE_REFAULTS = Counter "pvblk_cache_refaults" ["disk"] "Pages read again not long after they were reclaimed: the cache is too small for its load.";
    CACHE_STALLED = Counter "pvblk_cache_stall_seconds" ["disk"] "Time that requests waited for memory of the cache.";
    CACHE_THROTTLED = Counter "pvblk_cache_throttled_seconds" ["disk"] "Time that writers waited because too much was dirty.";
    CACHE_ERRORS = Counter "pvblk_cache_errors" ["disk", "op"] "Reads and writes of the volume below the cache that failed.";

    MEMORY = Gauge "pvblk_memory_bytes" ["kind"] "Memory in use by kind: heap, private, shared, unallocated (guests' memory that nobody has allocated).";
    MEMORY_LIMIT = Gauge "pvblk_memory_limit_bytes" ["kind"] "The most that this may become.";
    MEMORY_ANONYMOUS = Gauge "pvblk_memory_anonymous_bytes" [] "The kernel's figure for private memory of the server, RssAnon.";
    POOL = Gauge "pvblk_buffer_pool_bytes" [] "Buffers of requests that the server has, free or in use.";
    POOL_USED = Gauge "pvblk_buffer_in_use_bytes" [] "Of those, in use.";
    POOL_ALLOCATED = Counter "pvblk_buffer_allocated_bytes" [] "Buffers that came from the system.";
    POOL_RETURNED = Counter "pvblk_buffer_returned_bytes" [] "Buffers that were given back to the system.";
    POOL_STALLS = Counter "pvblk_buffer_stalls" [] "Requests that waited for a buffer.";
    DISK_BUFFERS = Gauge "pvblk_disk_buffer_bytes" ["disk"] "Buffers of the disk's requests, free or in use. Only if there are some.";
    SQUEEZES = Counter "pvblk_squeezes" [] "Times that free memory was given back because the system is short of it.";
    SQUEEZE_ACTIVE = Gauge "pvblk_squeeze_active" [] "1 while buffers are squeezed.";
    SQUEEZE_TIME = Counter "pvblk_squeeze_seconds" [] "Time under squeeze.";
    SQUEEZE_LONGEST = Gauge "pvblk_squeeze_longest_seconds" [] "The longest time that giving memory back took.";
    SQUEEZE_DEVICES = Counter "pvblk_squeeze_device_bytes" [] "Memory that caches and arrays gave back.";
    PRESSURE_SIGNALS = Counter "pvblk_pressure_signals" [] "Signals of memory pressure.";
    PRESSURE_SOURCE = Gauge "pvblk_pressure_source" ["source"] "1 if this source tells the server of memory pressure, 0 if it can't.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        let mut names: Vec<&str> = ALL.iter().map(|f| f.name).collect();
        for family in ALL {
            let name = family.name;
            assert!(
                name.starts_with("pvblk_") || name.starts_with("process_"),
                "{name}"
            );
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{name}"
            );
            for ending in [
                "_total",
                "_info",
                "_count",
                "_sum",
                "_bucket",
                "_ms",
                "_ns",
                "_kib",
                "_pages_total",
            ] {
                assert!(!name.ends_with(ending), "{name}");
            }
            assert!(
                family.help.ends_with('.') && !family.help.contains(['\n', '\\']),
                "{name}"
            );
            // A reader that sorts families finds no name that is another one's sample.
            for other in ALL.iter().filter(|o| o.name != name) {
                assert!(!other.samples().iter().any(|s| s == name), "{name}");
            }
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }

    #[test]
    fn units_are_the_ends_of_names() {
        assert_eq!(DISK_TIME.unit(), Some("seconds"));
        assert_eq!(DISK_BYTES.unit(), Some("bytes"));
        assert_eq!(DISKS.unit(), None);
        assert_eq!(
            DISK_LATENCY.samples()[0],
            "pvblk_disk_request_duration_seconds_bucket"
        );
    }
}
