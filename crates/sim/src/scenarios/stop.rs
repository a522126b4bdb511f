//! A stop of several disks, some of which hang or fail: the same order of flushes as in production, with
//! times that are a function of the seed. Every disk that can be flushed in time has to be flushed, and each
//! other one reported.

use crate::bugs::Bug;
use crate::log::Log;
use crate::{ScenarioState, pick};
use fastrand::Rng;
use pvblk_backend::{StopTimes, Stopping};
use pvblk_block::Clock;
use std::time::{Duration, Instant};

pub fn bugs() -> Vec<Bug> {
    vec![Bug::FirstFailureEnds]
}

/// A disk with acknowledged writes that no flush covers. Times are in milliseconds.
#[derive(Clone, Copy, Debug)]
struct StoppedDisk {
    /// Time at which its last request completes; `None`: never.
    drained: Option<u64>,
    /// Length of its flush; `None`: it doesn't end.
    flush: Option<u64>,
    /// The flush ends with an error.
    fails: bool,
    /// Time at which the flush was begun.
    begun: Option<u64>,
    /// Its acknowledged writes are stable.
    safe: bool,
    /// The report on the disk, true if it was flushed.
    told: Option<bool>,
}

/// The longest wait of a stop for an event, as in production.
const TICK: u64 = 100;

/// The state of the scenario.
pub struct Stopped {
    rng: Rng,
    log: Log,
    bug: Option<Bug>,
    /// Time limits in milliseconds, for completions of requests and for a flush.
    patience: (u64, u64),
    disks: Vec<StoppedDisk>,
    begin: Instant,
}

impl ScenarioState for Stopped {
    fn new(seed: u64, bug: Option<Bug>, log: Log) -> Result<Stopped, String> {
        let mut rng = Rng::with_seed(seed);
        let (drain, flush) = (rng.u64(1_000..30_000), rng.u64(1_000..30_000));
        let count = pick(&mut rng, &[1, 2, 3, 8, 200]);
        Ok(Stopped {
            disks: (0..count).map(|_| disk(&mut rng, drain, flush)).collect(),
            rng,
            begin: log.clock.now(),
            log,
            bug,
            patience: (drain, flush),
        })
    }

    fn drive(&mut self) -> Result<(), String> {
        self.stop()?;
        self.judge()
    }

    fn log(&mut self) -> &mut Log {
        &mut self.log
    }
}

fn disk(rng: &mut Rng, drain: u64, flush: u64) -> StoppedDisk {
    let soon = |rng: &mut Rng, most: u64| match rng.u8(..4) {
        0 => 0,
        1 => rng.u64(..most),
        _ => rng.u64(..most / 20),
    };
    // No request or flush ends at the same time as its limit: the order of the two isn't defined.
    let clear = |at: u64, limit: u64| {
        if at.abs_diff(limit) <= 2 * TICK {
            0
        } else {
            at
        }
    };
    StoppedDisk {
        drained: (rng.u8(..8) > 0).then(|| clear(soon(rng, 2 * drain), drain)),
        flush: (rng.u8(..8) > 0).then(|| clear(soon(rng, 2 * flush), flush)),
        fails: rng.u8(..6) == 0,
        begun: None,
        safe: false,
        told: None,
    }
}

impl Stopped {
    fn stop(&mut self) -> Result<(), String> {
        let (drain, flush) = self.patience;
        let (disks, log) = (&mut self.disks, &mut self.log);
        let times = StopTimes {
            drain: Duration::from_millis(drain),
            flush: Duration::from_millis(flush),
        };
        let mut stopping = Stopping::new(disks.len(), self.begin, times);
        loop {
            log.step += 1;
            let now = log.elapsed().as_millis() as u64;
            // Flushes that have ended by now, in any order.
            let mut over: Vec<usize> = (0..disks.len())
                .filter(|&n| ended_at(&disks[n]).is_some_and(|t| t <= now && !disks[n].safe))
                .collect();
            self.rng.shuffle(&mut over);
            let mut failed = false;
            for n in over {
                let (well, drained) = (!disks[n].fails, is_drained_at(&disks[n], disks[n].begun));
                disks[n].safe = well;
                disks[n].flush = if well { disks[n].flush } else { None };
                log.add(
                    "disk #: its flush ends, well: #",
                    [n as u64, u64::from(well)],
                );
                if stopping.ended(n) {
                    tell(&mut disks[n], n, well && drained)?;
                }
                failed |= !well;
            }
            let turn = stopping.turn(log.clock.now(), |n| !is_drained_at(&disks[n], Some(now)));
            for n in turn.stuck {
                log.add("disk # is given up", [n as u64]);
                tell(&mut disks[n], n, false)?;
            }
            let early = failed && self.bug == Some(Bug::FirstFailureEnds);
            if stopping.is_over() || early {
                return Ok(());
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
            let by = Duration::from_millis(self.rng.u64(1..=TICK));
            log.clock.advance(by);
            // Slow flushes side by side wait for a free thread, at most a second for each that is
            // busy.
            let most = drain + flush + 1_000 * (1 + disks.len() as u64 / 64) + 2 * TICK;
            if now > most {
                return Err(format!("the stop takes longer than {most} ms"));
            }
        }
    }

    /// Checks the results of the stop.
    fn judge(&mut self) -> Result<(), String> {
        let (drain, flush) = self.patience;
        self.log.count("disks", self.disks.len() as u64);
        for (n, disk) in self.disks.iter().enumerate() {
            let can = !disk.fails && disk.flush.is_some_and(|t| t < flush);
            let answers = disk.drained.is_some_and(|t| t < drain);
            if can && !disk.safe {
                return Err(format!(
                    "disk {n} could be flushed, and its acknowledged writes are lost"
                ));
            }
            if disk.told == Some(true) && !disk.safe {
                return Err(format!("disk {n} is lost, and was told to be well"));
            }
            let end = match (disk.told, can && answers) {
                (None, _) => return Err(format!("nothing was said of disk {n}")),
                (Some(false), true) => {
                    return Err(format!("disk {n} was well, and nobody says so"));
                }
                (Some(true), _) => "flushed",
                (Some(false), _) if disk.fails => "failed",
                (Some(false), _) => "given up",
            };
            self.log.count(end, 1);
        }
        Ok(())
    }
}

/// The time at which the disk's flush ends.
fn ended_at(disk: &StoppedDisk) -> Option<u64> {
    Some(disk.begun? + disk.flush?)
}

fn is_drained_at(disk: &StoppedDisk, now: Option<u64>) -> bool {
    disk.drained
        .is_some_and(|t| now.is_some_and(|now| t <= now))
}

fn tell(disk: &mut StoppedDisk, number: usize, well: bool) -> Result<(), String> {
    match disk.told.replace(well) {
        None => Ok(()),
        Some(_) => Err(format!("disk {number}'s end is told twice")),
    }
}
