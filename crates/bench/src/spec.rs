//! The description of a job, as plain data.

use super::sizes::BlockSizes;
use std::time::Duration;

/// The directions in which a job moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    Read,
    Write,
    /// Both, by [`JobSpec::read_percent`].
    Both,
}

/// An amount of the target, resolved when the job starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Bytes(u64),
    /// So many percent of the target.
    Percent(u32),
}

impl Amount {
    /// Bytes of a target of `total` bytes.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Amount::Bytes(n) => n,
            Amount::Percent(p) => (u128::from(total) * u128::from(p) / 100) as u64,
        }
    }
}

/// Where random requests go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Every block of the area is equally likely.
    Uniform,
    /// Zipf with this exponent, the popular blocks scattered over the target.
    Zipf(f64),
    /// Self-similar: a share `h` of the requests goes to a share `1-h` of the blocks, at every scale.
    Pareto(f64),
}

/// The check of data. Every unit (the smallest block of the job) carries a header and a CRC-32C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verify {
    /// It is checked at all.
    pub on: bool,
    /// End the job at the first mismatch.
    pub fatal: bool,
    /// Read everything back after writing.
    pub after: bool,
    /// Write nothing: check what an earlier run of the same job wrote.
    pub only: bool,
}

impl Default for Verify {
    /// Off; where it is turned on, data is read back after writing.
    fn default() -> Verify {
        Verify {
            on: false,
            fatal: false,
            after: true,
            only: false,
        }
    }
}

/// One job, in the terms of fio's job files. See [`super::parse_jobs`] for the options.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// Its name in reports.
    pub name: String,
    /// The target as a job file names it (`filename` or `uri`), if it does.
    pub target: Option<String>,
    pub mix: Mix,
    /// Random places instead of one after another.
    pub random: bool,
    /// Share of reads in percent, with [`Mix::Both`].
    pub read_percent: u32,
    /// Lengths of reads and of writes.
    pub sizes: [BlockSizes; 2],
    /// Requests start at multiples of this many bytes; `None`: of the smallest block.
    pub align_bytes: Option<u32>,
    /// Requests in flight of each thread, 1 to 4096.
    pub iodepth: u32,
    /// Most requests submitted together. fio's default is 1; a front end merges only inside of a batch.
    pub iodepth_batch: u32,
    /// Part of the target that is used; `None`: all after the offset.
    pub size: Option<Amount>,
    /// Where that part begins.
    pub offset: Amount,
    /// Each further thread of the job begins this many bytes later.
    pub offset_increment: Amount,
    /// Bytes to move, if not `size`.
    pub io_size: Option<Amount>,
    /// Most requests of each thread.
    pub number_ios: Option<u64>,
    pub runtime: Option<Duration>,
    /// Go on for all of `runtime`, however much that is.
    pub time_based: bool,
    /// Time before measuring begins.
    pub ramp_time: Duration,
    /// Rounds over the part.
    pub loops: u64,
    /// Seed of all random choices; each thread derives its own.
    pub seed: u64,
    /// The same choices in each run; else the seed is made unique.
    pub repeatable: bool,
    /// Random requests reach every block once before any of them again.
    pub random_map: bool,
    /// Where random requests go; all but uniform ones repeat blocks.
    pub distribution: Distribution,
    /// The check of the data that is read back.
    pub verify: Verify,
    /// A flush after this many writes.
    pub flush_every: Option<u32>,
    /// Most requests per second of each direction and thread.
    pub rate_iops: Option<u32>,
    /// Pause after [`JobSpec::thinktime_blocks`] requests.
    pub thinktime: Duration,
    /// Requests between pauses.
    pub thinktime_blocks: u32,
    /// Threads that do this same job.
    pub numjobs: u32,
    /// Start only when all earlier jobs are done.
    pub stonewall: bool,
    /// Begin a new group of the report.
    pub new_group: bool,
    /// Report the group's jobs as one.
    pub group_reporting: bool,
    /// Go on after I/O errors.
    pub continue_on_error: bool,
    /// The options as they were written, for reports.
    pub options: Vec<(String, String)>,
}

impl JobSpec {
    /// fio's defaults: sequential reads of 4 KiB, one at a time, once over the whole target.
    pub fn new(name: impl Into<String>) -> JobSpec {
        JobSpec {
            name: name.into(),
            target: None,
            mix: Mix::Read,
            random: false,
            read_percent: 50,
            sizes: [BlockSizes::Fixed(4096), BlockSizes::Fixed(4096)],
            align_bytes: None,
            iodepth: 1,
            iodepth_batch: 1,
            size: None,
            offset: Amount::Bytes(0),
            offset_increment: Amount::Bytes(0),
            io_size: None,
            number_ios: None,
            runtime: None,
            time_based: false,
            ramp_time: Duration::ZERO,
            loops: 1,
            seed: 0x5bd1_e995,
            repeatable: true,
            random_map: true,
            distribution: Distribution::Uniform,
            verify: Verify::default(),
            flush_every: None,
            rate_iops: None,
            thinktime: Duration::ZERO,
            thinktime_blocks: 1,
            numjobs: 1,
            stonewall: false,
            new_group: false,
            group_reporting: false,
            continue_on_error: false,
            options: Vec::new(),
        }
    }

    /// True if it reads.
    pub fn reads(&self) -> bool {
        self.mix != Mix::Write
    }

    /// True if it writes.
    pub fn writes(&self) -> bool {
        self.mix != Mix::Read
    }

    /// Lengths of the directions that it uses.
    fn used_sizes(&self) -> impl Iterator<Item = &BlockSizes> {
        let used = [self.reads(), self.writes()];
        self.sizes.iter().zip(used).filter(|s| s.1).map(|s| s.0)
    }

    /// The shortest request, in bytes.
    pub fn min_bytes(&self) -> u32 {
        self.used_sizes().map(BlockSizes::min).min().unwrap_or(512)
    }

    /// The longest request, in bytes.
    pub fn max_bytes(&self) -> u32 {
        self.used_sizes().map(BlockSizes::max).max().unwrap_or(512)
    }

    /// The length of all requests in bytes, if they have one.
    pub(super) fn fixed_bytes(&self) -> Option<u32> {
        (self.min_bytes() == self.max_bytes()).then(|| self.max_bytes())
    }

    /// Unit of places and of checking, in bytes.
    pub fn unit_bytes(&self) -> u32 {
        self.align_bytes.unwrap_or_else(|| self.min_bytes())
    }

    /// Memory for the data of all its threads, in bytes.
    pub fn buffer_bytes(&self) -> u64 {
        let each = u64::from(self.max_bytes()).next_multiple_of(4096);
        each * u64::from(self.iodepth) * u64::from(self.numjobs)
    }

    /// The check of data, if there is one.
    pub(super) fn checked(&self) -> Option<Verify> {
        Some(self.verify).filter(|v| v.on)
    }

    /// The first thing in the job that makes no sense, whatever the target.
    pub(super) fn problem(&self) -> Option<String> {
        let unit = self.unit_bytes();
        if self.verify.on && !self.used_sizes().all(|s| s.multiple_of(unit)) {
            return Some(format!(
                "with verify all block sizes must be multiples of the smallest, {unit} bytes"
            ));
        }
        if self.time_based && self.runtime.is_none() {
            return Some("time_based needs a runtime".into());
        }
        if self.checked().is_some_and(|v| v.only) && (self.runtime.is_some() || !self.repeatable) {
            return Some(
                "verify_only can repeat neither a job with a runtime nor one without randrepeat"
                    .into(),
            );
        }
        if self.verify.only && !self.verify.on {
            return Some("verify_only needs verify=crc32c".into());
        }
        None
    }
}
