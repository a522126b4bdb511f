//! The experiment on the real clock: a cold file read in order through the cache and by the kernel, and
//! chosen cells of the modelled experiment with threads.

use super::TOO_SMALL;
use super::policy::Policy;
use crate::driver::{Driver, DriverLoad};
use crate::machine::{Machine, cpu_ns};
use crate::path::median;
use crate::stats::{Confidence, PairRatio};
use crate::threads::joined;
use crate::verdict::{Check, median_ratio, ratio, table};
use anyhow::{Context, Result, ensure};
use pvblk_block::{BlockDevice, Op, SystemClock};
use pvblk_cache::{CacheConfig, PageCache};
use pvblk_volume::DelaySpec;
use rustix::fs::{Advice, fadvise};
use rustix::time::ClockId;
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const RECORD: usize = super::load::RECORD;
const RECORD_SECTORS: u64 = RECORD as u64 / 512;
/// Service time of each request at a thread's disk.
const SERVICE: Duration = Duration::from_micros(2600);
/// Sectors of a thread's part of the disk.
const SPAN: u64 = 1 << 21;
/// Threads of the chosen cells, reading in order and at random: there the cache is just too small.
const CELLS: [(u32, bool); 2] = [(12, false), (16, true)];
/// Least expected rate of the cache, as a share of the kernel's.
const LEAST: f64 = 0.9;

#[derive(Clone, Copy, Debug)]
pub struct RealOptions {
    /// Bytes of the file, a multiple of 64 KiB.
    pub bytes: u64,
    /// Number of interleaved rounds.
    pub runs: usize,
    /// Seconds of each sample of a cell.
    pub seconds: f64,
}

/// One way to read the file.
#[derive(Clone, Debug, Serialize)]
pub struct ReadWay {
    /// Name in tables.
    pub name: String,
    /// MB/s of each round.
    pub rates: Vec<f64>,
    /// CPU time of the reading process in ns for each KiB, of each round.
    pub cpu_ns_per_kib: Vec<f64>,
    /// MB/s of each round of the control, which repeats the same.
    pub again: Vec<f64>,
    /// KiB of each read of the device; `None` where it isn't known.
    pub kib_per_read: Option<f64>,
    /// Sleeps for memory in all rounds; `None` where it isn't known.
    pub stalls: Option<u64>,
}

/// Rates of a chosen cell, KiB a second.
#[derive(Clone, Debug, Serialize)]
pub struct RealCell {
    /// Number of reading threads.
    pub threads: u32,
    /// Reads go to random places instead of in order.
    pub random: bool,
    /// Pages of the cache.
    pub pages: u64,
    /// Rates with the policy of Linux 2.6.31.
    pub history: Vec<f64>,
    /// Rates with the default policy.
    pub default: Vec<f64>,
    /// Rates with the default policy once more, as the control.
    pub again: Vec<f64>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct RealResult {
    pub machine: Machine,
    /// Bytes of the file.
    pub bytes: u64,
    /// Ways to read the cold file; the kernel's comes first.
    pub cold: Vec<ReadWay>,
    /// Chosen cells, with threads.
    pub cells: Vec<RealCell>,
}

/// Checks that a page begins with its number, as all pages of the file do.
fn check(record: u64, first: impl Fn(usize) -> u64) -> Result<()> {
    let pages = RECORD / 4096;
    for page in [0, pages / 2, pages - 1] {
        let expected = record * pages as u64 + page as u64;
        ensure!(
            first(page * 4096) == expected,
            "page {expected} of the file has other data"
        );
    }
    Ok(())
}

fn make_file(path: &Path, bytes: u64) -> Result<File> {
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .with_context(|| format!("making {}", path.display()))?;
    let mut rng = fastrand::Rng::with_seed(2);
    let mut chunk = vec![0; 1 << 20];
    for number in 0..bytes.div_ceil(1 << 20) {
        rng.fill(&mut chunk);
        for (page, data) in chunk.chunks_mut(4096).enumerate() {
            let number = number * 256 + page as u64;
            data[..8].copy_from_slice(&number.to_le_bytes());
        }
        let left = (bytes - number * (1 << 20)).min(1 << 20) as usize;
        file.write_all(&chunk[..left])
            .with_context(|| format!("writing {}: is there room?", path.display()))?;
    }
    file.sync_all()?;
    Ok(file)
}

/// Bytes that this process has fetched from storage; `None` where the kernel doesn't say.
fn fetched() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("read_bytes: "))?;
    line.parse().ok()
}

/// One timed pass over the file after it left the kernel's cache.
struct Pass {
    rate: f64,
    cpu_ns_per_kib: f64,
}

fn pass(file: &File, bytes: u64, read: impl FnOnce() -> Result<()>) -> Result<Pass> {
    fadvise(file, 0, None, Advice::DontNeed)?;
    let (before, cpu) = (fetched(), cpu_ns(ClockId::ProcessCPUTime));
    let begin = Instant::now();
    read()?;
    let elapsed = begin.elapsed().as_secs_f64();
    let cpu = cpu_ns(ClockId::ProcessCPUTime) - cpu;
    if let (Some(before), Some(after)) = (before, fetched()) {
        let cold = after - before;
        ensure!(
            cold * 100 >= bytes * 98,
            "the file wasn't cold: {cold} of {bytes} bytes came from storage. Is the folder on a disk (not tmpfs)?"
        );
    }
    Ok(Pass {
        rate: bytes as f64 / elapsed / 1e6,
        cpu_ns_per_kib: cpu / (bytes >> 10) as f64,
    })
}

fn kernel_pass(file: &File, bytes: u64) -> Result<Pass> {
    let mut record = vec![0u8; RECORD];
    pass(file, bytes, || {
        for at in 0..bytes / RECORD as u64 {
            file.read_exact_at(&mut record, at * RECORD as u64)?;
            check(at, |b| {
                let word = record[b..].first_chunk().copied();
                word.map_or(u64::MAX, u64::from_le_bytes)
            })?;
        }
        Ok(())
    })
}

/// One pass through a new cache over the file, which is opened past the kernel's page cache.
fn our_pass(
    file: &File,
    path: &Path,
    bytes: u64,
    size: u64,
    counted: &mut [u64; 3],
) -> Result<Pass> {
    let inner = pvblk_volume::open(&format!("file:{},direct,ro", path.display()))?;
    let cache = Arc::new(PageCache::new(&CacheConfig::new(size), inner)?);
    let device: Arc<dyn BlockDevice> = cache.clone();
    let mut driver = Driver::open(&device, 0, 1, RECORD)?;
    let load = records(bytes / RECORD as u64);
    let pass = pass(file, bytes, || {
        let (mut next, mut wrong) = (0, None);
        let place = || {
            next += 1;
            next - 1
        };
        driver.run(&load, place, |buffer, record| {
            let word = |at| {
                let mut word = [0; 8];
                buffer.read(at, &mut word);
                u64::from_le_bytes(word)
            };
            if let Err(e) = check(record, word) {
                wrong = Some(e);
            }
        })?;
        wrong.map_or(Ok(()), Err)
    })?;
    let c = cache.counters();
    for (sum, one) in counted
        .iter_mut()
        .zip([c.pgpgin, c.read_requests, c.stalls])
    {
        *sum += one;
    }
    Ok(pass)
}

fn cold_reads(options: &RealOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<Vec<ReadWay>> {
    let (path, bytes) = (dir.join("cold"), options.bytes);
    progress("making a file");
    let file = make_file(&path, bytes)?;
    let sizes = [bytes, bytes / 4];
    let mut ways = vec![ReadWay::new("the kernel, read(2)".into())];
    for size in sizes {
        ways.push(ReadWay::new(format!("cache of {} MiB", size >> 20)));
    }
    let mut counted = [[0; 3]; 2];
    for round in 0..options.runs {
        progress(&format!(
            "cold reads, round {} of {}",
            round + 1,
            options.runs
        ));
        for again in [false, true] {
            for (at, way) in ways.iter_mut().enumerate() {
                let pass = match at {
                    0 => kernel_pass(&file, bytes)?,
                    n => our_pass(&file, &path, bytes, sizes[n - 1], &mut counted[n - 1])?,
                };
                way.add(&pass, again);
            }
        }
    }
    for (way, [kib, reads, stalls]) in ways[1..].iter_mut().zip(counted) {
        way.kib_per_read = Some(kib as f64 / reads.max(1) as f64);
        way.stalls = Some(stalls);
    }
    std::fs::remove_file(&path)?;
    Ok(ways)
}

impl ReadWay {
    fn new(name: String) -> ReadWay {
        ReadWay {
            name,
            rates: Vec::new(),
            cpu_ns_per_kib: Vec::new(),
            again: Vec::new(),
            kib_per_read: None,
            stalls: None,
        }
    }

    fn add(&mut self, pass: &Pass, again: bool) {
        if again {
            self.again.push(pass.rate);
        } else {
            self.rates.push(pass.rate);
            self.cpu_ns_per_kib.push(pass.cpu_ns_per_kib);
        }
    }
}

/// A load of `count` records, read one after another; the caller gives their places.
fn records(count: u64) -> DriverLoad {
    DriverLoad {
        op: Op::Read,
        block: RECORD,
        depth: 1,
        count,
        span: 0,
        sleep: true,
    }
}

/// KiB a second of all threads together.
fn cell(threads: u32, random: bool, policy: Policy, seconds: f64) -> Result<f64> {
    let pages = TOO_SMALL[usize::from(random)];
    let sectors = SPAN * (u64::from(threads) + 1);
    let delay = DelaySpec {
        service: SERVICE,
        serial: true,
        ..DelaySpec::default()
    };
    let inner = pvblk_volume::open(&format!("{delay}:null:{}", sectors * 512))?;
    let mut config = CacheConfig::new(pages * 4096);
    // Windows don't follow the device's round trip: they are the experiment's.
    config.readahead_bytes = Some(128 << 10);
    let clock = Arc::new(SystemClock);
    let cache: Arc<dyn BlockDevice> = match policy {
        Policy::DEFAULT => Arc::new(PageCache::new(&config, inner)?),
        other => Arc::new(PageCache::with_policy(&config, other, inner, clock)?),
    };
    // Half of the cache was read often, and all frames are in use.
    let mut driver = Driver::open(&cache, 0, 1, RECORD)?;
    let begin = SPAN * u64::from(threads) / RECORD_SECTORS;
    let often = pages / 2 * 4096 / RECORD as u64;
    let mut n = 0;
    let mut place = || {
        n += 1;
        begin + if n <= 3 * often { n % often } else { n }
    };
    let count = 3 * often + pages * 4096 / RECORD as u64 + 1;
    driver.run(&records(count), &mut place, |_, _| {})?;
    drop(driver);
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let start = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        let read = |thread: u32| -> Result<()> {
            let opened = Driver::open(&cache, thread, 1, RECORD);
            start.wait();
            let mut driver = opened?;
            let mut rng = fastrand::Rng::with_seed(u64::from(thread) + 1);
            let (begin, count) = (
                SPAN * u64::from(thread) / RECORD_SECTORS,
                SPAN / RECORD_SECTORS,
            );
            let mut at = 0;
            let mut place = || {
                at = if random {
                    rng.u64(..count)
                } else {
                    (at + 1) % count
                };
                begin + at
            };
            while !stop.load(Ordering::Relaxed) {
                driver.run(&records(1), &mut place, |_, _| {})?;
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let all: Vec<_> = (0..threads).map(|t| scope.spawn(move || read(t))).collect();
        start.wait();
        std::thread::sleep(super::load::RAMP);
        let (before, begin) = (done.load(Ordering::Relaxed), Instant::now());
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let read = done.load(Ordering::Relaxed) - before;
        let elapsed = begin.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        all.into_iter().try_for_each(joined)?;
        Ok((read * RECORD as u64 / 1024) as f64 / elapsed)
    })
}

/// Runs the experiment in an empty folder on a disk.
pub fn run(options: &RealOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<RealResult> {
    let cold = cold_reads(options, dir, progress)?;
    let mut cells = Vec::new();
    for (threads, random) in CELLS {
        let mut result = RealCell {
            threads,
            random,
            pages: TOO_SMALL[usize::from(random)],
            history: Vec::new(),
            default: Vec::new(),
            again: Vec::new(),
        };
        for round in 0..options.runs {
            progress(&format!(
                "{threads} threads, round {} of {}",
                round + 1,
                options.runs
            ));
            for (policy, samples) in [
                (Policy::DEFAULT, &mut result.default),
                (Policy::HISTORY, &mut result.history),
                (Policy::DEFAULT, &mut result.again),
            ] {
                samples.push(cell(threads, random, policy, options.seconds)?);
            }
        }
        cells.push(result);
    }
    Ok(RealResult {
        machine: Machine::here(),
        bytes: options.bytes,
        cold,
        cells,
    })
}

impl RealResult {
    pub fn table(&self) -> String {
        let mut t = table(&[
            "cold file, one process",
            "MB/s",
            "of the kernel's (95 %)",
            "A/A",
            "CPU ns/KiB",
            "KiB a read",
            "stalls",
        ]);
        let kernel = &self.cold[0];
        for way in &self.cold {
            let some = |v: Option<f64>| v.map_or(String::new(), |v| format!("{v:.1}"));
            t.add_row([
                way.name.clone(),
                format!("{:.0}", median(&way.rates)),
                ratio(&way.rates, &kernel.rates, (&kernel.again, &kernel.rates)),
                format!("{:.2}", median_ratio(&way.again, &way.rates)),
                format!("{:.0}", median(&way.cpu_ns_per_kib)),
                some(way.kib_per_read),
                way.stalls.map_or(String::new(), |s| s.to_string()),
            ]);
        }
        let mut text = format!(
            "\nA file of {} MiB, read once in order in records of 64 KiB, after it left all caches of this machine\n{t}\n",
            self.bytes >> 20
        );
        let mut t = table(&[
            "threads",
            "cache KiB",
            "default KiB/s",
            "history KiB/s",
            "history of default (95 %)",
        ]);
        for c in &self.cells {
            let what = if c.random { "anywhere" } else { "in order" };
            t.add_row([
                format!("{} {what}", c.threads),
                format!("{}", 4 * c.pages),
                format!("{:.0}", median(&c.default)),
                format!("{:.0}", median(&c.history)),
                ratio(&c.history, &c.default, (&c.again, &c.default)),
            ]);
        }
        text += &format!(
            "\nThreads on the real clock, each on a disk that takes {:.1} ms for each request\n{t}\n",
            SERVICE.as_secs_f64() * 1e3
        );
        text
    }

    /// Expectations from the historical measurement.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let kernel = &self.cold[0];
        for way in &self.cold[1..] {
            let rate = PairRatio::of(&way.rates, &kernel.rates, Confidence::default());
            checks.push(Check {
                expected: format!("{}: at least {LEAST} of the kernel's rate", way.name),
                figure: rate
                    .as_ref()
                    .map_or_else(|e| e.to_string(), |r| r.to_string()),
                holds: rate.is_ok_and(|r| r.median >= LEAST),
            });
        }
        for c in &self.cells {
            let lost = PairRatio::of(&c.history, &c.default, Confidence::default());
            checks.push(Check {
                expected: format!(
                    "{} threads, {}: history loses 30 to 85 % on the real clock, too",
                    c.threads,
                    if c.random { "anywhere" } else { "in order" }
                ),
                figure: lost
                    .as_ref()
                    .map_or_else(|e| e.to_string(), |r| format!("{r} of the default")),
                holds: lost.is_ok_and(|r| (0.15..=0.7).contains(&r.median)),
            });
        }
        checks
    }
}
