//! The results of a run.

use super::latency::{Latency, Moments};
use std::time::{Duration, SystemTime};

/// Results of one direction of a job: reads or writes.
#[derive(Clone, Debug, Default)]
pub struct OpReport {
    /// Number of requests done.
    pub ios: u64,
    /// Bytes of these requests.
    pub bytes: u64,
    /// Requests that failed, or whose data were wrong.
    pub errors: u64,
    /// Length of the measurement.
    pub runtime: Duration,
    /// Submission: time in which the device took the request. Empty for a device that completes while it
    /// takes requests.
    pub slat: Latency,
    /// Completion: time from the submission's end to the completion.
    pub clat: Latency,
    /// Total: time from the begin of the submission to the completion.
    pub lat: Latency,
    /// KiB per second, sampled twice a second.
    pub bw_kib: Moments,
    /// Requests per second, sampled twice a second.
    pub iops_samples: Moments,
}

impl OpReport {
    /// Requests per second over the whole time.
    pub fn iops(&self) -> f64 {
        per_second(self.ios, self.runtime)
    }

    /// Bytes per second over the whole time.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.bytes, self.runtime)
    }

    fn merge(&mut self, other: &OpReport) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.runtime = self.runtime.max(other.runtime);
        self.slat.merge(&other.slat);
        self.clat.merge(&other.clat);
        self.lat.merge(&other.lat);
        self.bw_kib.merge(&other.bw_kib);
        self.iops_samples.merge(&other.iops_samples);
    }

    pub(super) fn clear(&mut self) {
        let (slat, clat, lat) = (&mut self.slat, &mut self.clat, &mut self.lat);
        [slat, clat, lat].into_iter().for_each(Latency::clear);
        (self.ios, self.bytes, self.errors) = (0, 0, 0);
        (self.bw_kib, self.iops_samples) = Default::default();
    }
}

fn per_second(n: u64, time: Duration) -> f64 {
    if time.is_zero() {
        return 0.0;
    }
    n as f64 / time.as_secs_f64()
}

/// Number of occurrences of each range: 0, 1, 2–3, 4–7, 8–15, 16–31, 32–63, 64 and more.
#[derive(Clone, Copy, Debug, Default)]
pub struct Powers(pub [u64; 8]);

impl Powers {
    #[inline]
    pub(super) fn record(&mut self, n: usize) {
        self.0[((usize::BITS - n.leading_zeros()) as usize).min(7)] += 1;
    }

    fn merge(&mut self, other: &Powers) {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a += b;
        }
    }
}

/// CPU time and switches of a job's threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Time in user code, in seconds.
    pub user_s: f64,
    /// Time in the kernel, in seconds.
    pub system_s: f64,
    /// Switches to another thread, wanted or not.
    pub switches: u64,
    /// Page faults that needed I/O.
    pub major_faults: u64,
    /// Page faults that didn't.
    pub minor_faults: u64,
    /// Elapsed time of all threads, in seconds.
    pub wall_s: f64,
}

/// A unit of wrong data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// First byte of the unit on the target.
    pub offset: u64,
    /// Description of the expected data.
    pub expected: String,
    /// Description of the data that was read.
    pub found: String,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch {
            offset,
            expected,
            found,
        } = self;
        write!(
            f,
            "wrong data at byte {offset}: expected {expected}, found {found}"
        )
    }
}

/// Results of one thread, or the sum of several.
#[derive(Clone, Debug, Default)]
pub struct JobReport {
    /// Name of the job.
    pub name: String,
    /// Number of its group.
    pub group: u32,
    /// True if the job is reported together with its group.
    pub grouped: bool,
    /// The job's options as they were written.
    pub options: Vec<(String, String)>,
    /// Number of threads.
    pub threads: u32,
    /// The most requests in flight that the job asked for.
    pub iodepth: u32,
    pub read: OpReport,
    pub write: OpReport,
    /// Times of flushes.
    pub flush: Latency,
    /// The first error.
    pub error: Option<String>,
    /// Number of that error as in errno(3): 5 for I/O errors, 84 for wrong data.
    pub errno: i32,
    /// The first 100 units of wrong data.
    pub mismatches: Vec<Mismatch>,
    /// Units of wrong data in all.
    pub mismatch_count: u64,
    /// Time from the job's start to its end.
    pub elapsed: Duration,
    /// Requests in flight when each one was submitted.
    pub depths: Powers,
    /// Requests in each submission.
    pub submits: Powers,
    /// Completions in each poll that found some.
    pub completes: Powers,
    pub usage: Usage,
}

impl JobReport {
    /// Adds the results of another thread. Rates are over the longer of both times.
    pub fn merge(&mut self, other: &JobReport) {
        self.threads += other.threads;
        self.iodepth = self.iodepth.max(other.iodepth);
        self.read.merge(&other.read);
        self.write.merge(&other.write);
        self.flush.merge(&other.flush);
        if self.error.is_none() {
            self.error.clone_from(&other.error);
            self.errno = other.errno;
        }
        self.mismatches.extend_from_slice(&other.mismatches);
        self.mismatch_count += other.mismatch_count;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.depths.merge(&other.depths);
        self.submits.merge(&other.submits);
        self.completes.merge(&other.completes);
        let (a, b) = (&mut self.usage, &other.usage);
        a.user_s += b.user_s;
        a.system_s += b.system_s;
        a.switches += b.switches;
        a.major_faults += b.major_faults;
        a.minor_faults += b.minor_faults;
        a.wall_s += b.wall_s;
    }

    /// Requests per second, reads and writes.
    pub fn iops(&self) -> f64 {
        self.read.iops() + self.write.iops()
    }

    /// Bytes per second, reads and writes.
    pub fn bytes_per_second(&self) -> f64 {
        self.read.bytes_per_second() + self.write.bytes_per_second()
    }

    /// Completion times of reads and writes together.
    pub fn clat(&self) -> Latency {
        let mut all = self.read.clat.clone();
        all.merge(&self.write.clat);
        all
    }

    /// Number of failed requests and of units with wrong data.
    pub fn errors(&self) -> u64 {
        self.read.errors + self.write.errors
    }
}

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// One entry for each thread, in the order of the jobs.
    pub threads: Vec<JobReport>,
    /// Options of the job file's `[global]` section.
    pub global: Vec<(String, String)>,
    /// True if the caller ended the run early.
    pub interrupted: bool,
    /// Time at which the run ended.
    pub finished: SystemTime,
}

impl Report {
    /// The results as they are shown: those of a group's threads are one entry where
    /// `group_reporting` says so.
    pub fn entries(&self) -> Vec<JobReport> {
        let mut entries: Vec<JobReport> = Vec::new();
        for job in &self.threads {
            match entries.last_mut() {
                Some(last) if last.grouped && job.grouped && last.group == job.group => {
                    last.merge(job);
                }
                _ => entries.push(job.clone()),
            }
        }
        entries
    }

    /// The sum over all threads.
    pub fn total(&self) -> JobReport {
        let mut total = JobReport {
            name: "total".into(),
            ..JobReport::default()
        };
        self.threads.iter().for_each(|job| total.merge(job));
        total
    }

    /// True if a request failed or data was wrong.
    pub fn failed(&self) -> bool {
        self.threads
            .iter()
            .any(|j| j.error.is_some() || j.errors() > 0 || j.mismatch_count > 0)
    }

    pub fn table(&self) -> String {
        super::table::render(self)
    }

    /// JSON with the layout, names and units of fio's `--output-format=json`.
    pub fn to_json(&self) -> serde_json::Result<String> {
        super::json::render(self)
    }
}
