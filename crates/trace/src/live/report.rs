//! The form of `hops` in the control protocol (docs/reference/control.md).

use serde::{Deserialize, Serialize};

/// Hops of all disks over some time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopsReport {
    /// End of that time, in nanoseconds of the system's monotonic clock.
    pub at_ns: u64,
    /// Its length: a second, or more if the reader was too slow for that.
    pub elapsed_ns: u64,
    /// One request of so many is followed.
    pub every: u64,
    /// Events that were lost.
    pub lost: u64,
    /// Requests that are left out, since events may be lost.
    pub unknown: u64,
    /// Disks that are left out, since there are too many.
    #[serde(default)]
    pub hidden: u64,
    pub disks: Vec<DiskHops>,
}

impl HopsReport {
    /// Leaves out histograms and the slowest requests.
    pub fn make_brief(&mut self) {
        for disk in &mut self.disks {
            disk.slowest.clear();
            disk.hops.iter_mut().for_each(|h| h.latency_ns.clear());
        }
    }
}

/// Hops of the requests to one disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHops {
    pub disk: String,
    /// Those that were followed, times `every`: an estimate of all.
    pub requests: u64,
    /// In the order of a request's way. All together are the time of the requests that were followed.
    pub hops: Vec<HopTimes>,
    /// The slowest requests, the slowest first.
    pub slowest: Vec<SlowRequest>,
}

/// The times of one hop.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopTimes {
    /// By the steps at its ends, such as `Q2D`.
    pub name: String,
    /// The layer on which the requests were.
    pub layer: String,
    /// Where they were, for people.
    pub label: String,
    /// Number of layers above it.
    pub depth: u32,
    /// Requests that passed it, of those that were followed.
    pub count: u64,
    pub sum_ns: u64,
    /// Pairs of a bucket's shortest time and its count.
    pub latency_ns: Vec<(u64, u64)>,
    /// The member of an array that the layer belongs to.
    pub member: Option<String>,
}

/// One of the requests that took longest, with its whole way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRequest {
    pub op: String,
    /// First sector (512 B).
    pub sector: u64,
    pub bytes: u64,
    /// Its begin on the clock of `at_ns`.
    pub begin_ns: u64,
    pub total_ns: u64,
    /// One after the other.
    pub hops: Vec<HopOfRequest>,
}

/// A hop of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopOfRequest {
    pub layer: String,
    pub label: String,
    /// Number of layers above it.
    #[serde(default)]
    pub depth: u32,
    /// Since the request's begin.
    pub begin_ns: u64,
    pub ns: u64,
}
