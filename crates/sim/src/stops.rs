//! A stop of several disks, some of which are in trouble: the same order of flushes as in production, under a clock that is a function
//! of one seed. Every disk that can be flushed in time is, and of each other one it is said.

use crate::Failure;
use crate::log::Log;
use fastrand::Rng;
use pvblk_backend::{StopTimes, Stopping};
use std::fmt;
use std::time::{Duration, Instant};

/// A bug to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The stop is over when the first disk fails.
    #[cfg(feature = "planted")]
    FirstFailureEnds,
}

impl Bug {
    /// All of them, with names.
    pub const ALL: &[(&str, Bug)] = &[
        #[cfg(feature = "planted")]
        ("first-failure-ends", Bug::FirstFailureEnds),
    ];
}

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A bug to be found.
    pub planted: Option<Bug>,
    /// Print every event to standard error.
    pub verbose: bool,
}

/// What happened in a seed, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Disks.
    pub disks: u64,
    /// Disks that were flushed.
    pub flushed: u64,
    /// Disks whose flush failed.
    pub failed: u64,
    /// Disks that were given up.
    pub stuck: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.disks += other.disks;
        self.flushed += other.flushed;
        self.failed += other.failed;
        self.stuck += other.stuck;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} disks, {} flushed, {} failed, {} given up",
            self.disks, self.flushed, self.failed, self.stuck
        )
    }
}

/// A disk with acknowledged writes that no flush covers. Times are in milliseconds.
#[derive(Clone, Copy, Debug)]
struct SimDisk {
    /// When its last request is answered; `None`: never.
    drained: Option<u64>,
    /// How long its flush takes; `None`: for ever.
    flush: Option<u64>,
    /// The flush ends with an error.
    fails: bool,
    /// When the flush was begun.
    begun: Option<u64>,
    /// Its acknowledged writes are durable.
    safe: bool,
    /// What was said of it: well or not.
    told: Option<bool>,
}

/// The longest wait of a stop for something to happen, as in production.
const TICK: u64 = 100;

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failure>> {
    #[cfg(feature = "planted")]
    pvblk_backend::planted::end_at_first_failure(options.planted == Some(Bug::FirstFailureEnds));
    let mut log = Log::new(options.verbose);
    stop(seed, &mut log).map_err(|what| {
        Box::new(Failure {
            seed,
            step: log.step,
            what,
            events: log.lines(),
        })
    })
}

fn disk(rng: &mut Rng, drain: u64, flush: u64) -> SimDisk {
    let soon = |rng: &mut Rng, most: u64| match rng.u8(..4) {
        0 => 0,
        1 => rng.u64(..most),
        _ => rng.u64(..most / 20),
    };
    // Nothing ends just when patience does: who comes first then is for nobody to say.
    let clear = |at: u64, limit: u64| {
        if at.abs_diff(limit) <= 2 * TICK {
            0
        } else {
            at
        }
    };
    SimDisk {
        drained: (rng.u8(..8) > 0).then(|| clear(soon(rng, 2 * drain), drain)),
        flush: (rng.u8(..8) > 0).then(|| clear(soon(rng, 2 * flush), flush)),
        fails: rng.u8(..6) == 0,
        begun: None,
        safe: false,
        told: None,
    }
}

fn stop(seed: u64, log: &mut Log) -> Result<Report, String> {
    let mut rng = Rng::with_seed(seed);
    let (drain, flush) = (rng.u64(1_000..30_000), rng.u64(1_000..30_000));
    let count = [1, 2, 3, 8, 200][rng.usize(..5)];
    let mut disks: Vec<SimDisk> = (0..count).map(|_| disk(&mut rng, drain, flush)).collect();
    let begin = Instant::now();
    let at = |now: u64| begin + Duration::from_millis(now);
    let times = StopTimes {
        drain: Duration::from_millis(drain),
        flush: Duration::from_millis(flush),
    };
    let mut stopping = Stopping::new(disks.len(), begin, times);
    let mut now = 0;
    loop {
        log.step += 1;
        // Flushes that have ended by now, in any order.
        let mut over: Vec<usize> = (0..disks.len())
            .filter(|&n| ended_at(&disks[n]).is_some_and(|t| t <= now && !disks[n].safe))
            .collect();
        rng.shuffle(&mut over);
        for n in over {
            let (well, drained) = (!disks[n].fails, is_drained_at(&disks[n], disks[n].begun));
            disks[n].safe = well;
            disks[n].flush = if well { disks[n].flush } else { None };
            log.add(
                "disk #: its flush ends, well: #",
                [n as u64, u64::from(well)],
            );
            if stopping.ended(n, well && drained) {
                tell(&mut disks[n], n, well && drained)?;
            }
        }
        let turn = stopping.turn(at(now), |n| !is_drained_at(&disks[n], Some(now)));
        for n in turn.stuck {
            log.add("disk # is given up", [n as u64]);
            tell(&mut disks[n], n, false)?;
        }
        if stopping.is_over() {
            break;
        }
        for (n, drained) in turn.flush {
            log.add(
                "disk # is flushed, drained: #",
                [n as u64, u64::from(drained)],
            );
            if disks[n].begun.replace(now).is_some() {
                return Err(format!("disk {n} is flushed twice"));
            }
        }
        now += rng.u64(1..=TICK);
        // Slow flushes side by side wait for places, at most a second for each that is taken.
        let most = drain + flush + 1_000 * (1 + disks.len() as u64 / 64) + 2 * TICK;
        if now > most {
            return Err(format!("the stop takes longer than {most} ms"));
        }
    }
    judge(&disks, drain, flush)
}

/// When the disk's flush ends.
fn ended_at(disk: &SimDisk) -> Option<u64> {
    Some(disk.begun? + disk.flush?)
}

fn is_drained_at(disk: &SimDisk, now: Option<u64>) -> bool {
    disk.drained
        .is_some_and(|t| now.is_some_and(|now| t <= now))
}

fn tell(disk: &mut SimDisk, number: usize, well: bool) -> Result<(), String> {
    match disk.told.replace(well) {
        None => Ok(()),
        Some(_) => Err(format!("disk {number}'s end is told twice")),
    }
}

/// What is true when the stop is over.
fn judge(disks: &[SimDisk], drain: u64, flush: u64) -> Result<Report, String> {
    let mut report = Report::default();
    for (n, disk) in disks.iter().enumerate() {
        report.disks += 1;
        let told = disk.told;
        let can = !disk.fails && disk.flush.is_some_and(|t| t < flush);
        let answers = disk.drained.is_some_and(|t| t < drain);
        if can && !disk.safe {
            return Err(format!(
                "disk {n} could be flushed, and its acknowledged writes are lost"
            ));
        }
        if told == Some(true) && !disk.safe {
            return Err(format!("disk {n} is lost, and was told to be well"));
        }
        match (told, can && answers) {
            (None, _) => return Err(format!("nothing was said of disk {n}")),
            (Some(false), true) => return Err(format!("disk {n} was well, and nobody says so")),
            (Some(true), _) => report.flushed += 1,
            (Some(false), _) if disk.fails => report.failed += 1,
            (Some(false), _) => report.stuck += 1,
        }
    }
    Ok(report)
}
