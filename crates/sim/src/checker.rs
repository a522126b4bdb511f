//! [`Checker`]: what each sector may hold, from what users were told and nothing else. It doesn't see the disk.
//!
//! A sector has a history of versions: what was there at first, and what each write put there, in the order of submission (no two writes of
//! one sector are in flight together). Of a version it is known when it was acknowledged, until when a read may find it, and whether a loss
//! of the cache may bring it back. Acknowledging the next write ends it for reads; a flush that covers a later version, or a read that shows
//! that it is gone, ends it for good; a loss makes all readable again that may come back.

use crate::stamp::{self, Bytes, FOREIGN, ZEROS};
use std::collections::BTreeSet;

/// Time of what didn't happen yet.
const NEVER: u64 = u64::MAX;
/// Called so, a version is what nobody knows.
const ANYTHING: u64 = u64::MAX;
/// Versions of a sector from which on the useless are forgotten.
const MANY: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Version {
    /// As [`stamp::name`] calls it.
    name: u64,
    acked: u64,
    /// A read that was submitted at this time or later doesn't find it.
    until: u64,
    /// A loss may bring it back, or it may be there now and durable.
    back: bool,
    /// When users could know that a cache was lost which it may have been in; 0: none was, [`NEVER`]: not yet.
    dropped: u64,
    /// It was there, or given up, before the last loss: if it is found, it is on the medium.
    survivor: bool,
}

#[derive(Clone, Debug)]
struct Sector {
    /// Oldest first, never empty. The last is in flight if `writing`.
    versions: Vec<Version>,
    writing: bool,
    /// When anything of this changed last.
    changed: u64,
    /// Since it was settled, it was written to an array that had all members.
    whole: bool,
}

/// A flush in flight.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flush {
    /// When it was submitted.
    pub since: u64,
    /// When its user had last been told of a loss, or was opened.
    pub told: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Checker {
    sectors: Vec<Sector>,
    /// Sectors with more than one version that may be there after a loss.
    unsettled: BTreeSet<u64>,
    now: u64,
    /// Reads in flight.
    reads: usize,
    /// Sectors with writes in flight.
    writing: usize,
    last_ack: u64,
    /// Writes acknowledged before this time are flushed.
    flushed: u64,
    /// When a front end last had a reason to fail flushes.
    suspicion: u64,
    /// It will have one at the next connection.
    suspect: bool,
}

impl Checker {
    /// For so many sectors of zeros, or of what nobody knows.
    pub fn new(sectors: u64, known: bool) -> Checker {
        let sector = Sector {
            versions: vec![Version {
                name: if known { ZEROS } else { ANYTHING },
                acked: 0,
                until: NEVER,
                back: true,
                dropped: 0,
                survivor: true,
            }],
            writing: false,
            changed: 0,
            whole: false,
        };
        Checker {
            sectors: vec![sector; sectors as usize],
            unsettled: BTreeSet::new(),
            now: 1,
            reads: 0,
            writing: 0,
            last_ack: 0,
            flushed: 0,
            suspicion: 0,
            suspect: false,
        }
    }

    /// A moment later than all before.
    pub fn now(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// True if no write is in flight there.
    pub fn is_free(&self, sector: u64, sectors: u64) -> bool {
        (sector..sector + sectors).all(|s| !self.sectors[s as usize].writing)
    }

    /// Write number `id`, 0 for zeros, is submitted. `whole`: to an array that has all members.
    pub fn write_submitted(&mut self, sector: u64, sectors: u64, id: u64, whole: bool) {
        let quiet = self.reads == 0;
        for at in sector..sector + sectors {
            let s = &mut self.sectors[at as usize];
            if quiet && s.versions.len() >= MANY {
                s.versions.retain(|v| v.back || v.until == NEVER);
            }
            s.versions.push(Version {
                name: id,
                acked: NEVER,
                until: NEVER,
                back: true,
                dropped: 0,
                survivor: false,
            });
            s.writing = true;
            s.whole |= whole;
            self.unsettled.insert(at);
        }
        self.writing += sectors as usize;
    }

    /// The write in flight there has completed; `durable` if it promised that.
    pub fn write_acked(&mut self, sector: u64, sectors: u64, durable: bool) {
        let now = self.now();
        self.last_ack = now;
        for at in sector..sector + sectors {
            self.ended(at, now);
            let s = &mut self.sectors[at as usize];
            let last = s.versions.len() - 1;
            s.versions[last].acked = now;
            if durable {
                s.versions[last].dropped = 0;
                s.settle(last, now);
            } else if s.versions[last].dropped == 0 {
                // One that was answered before the cache was lost may be told afterwards.
                s.only_from(last, now);
            }
            self.tidy(at);
        }
    }

    /// The write in flight there failed, or nobody waits for it any more: it may have happened, or not.
    pub fn write_failed(&mut self, sector: u64, sectors: u64) {
        let now = self.now();
        (sector..sector + sectors).for_each(|at| self.ended(at, now));
    }

    /// The write in flight there was acknowledged, and did nothing, as a discard may.
    pub fn write_ignored(&mut self, sector: u64, sectors: u64) {
        let now = self.now();
        for at in sector..sector + sectors {
            self.ended(at, now);
            self.sectors[at as usize].versions.pop();
            self.tidy(at);
        }
    }

    fn ended(&mut self, at: u64, now: u64) {
        let s = &mut self.sectors[at as usize];
        if std::mem::take(&mut s.writing) {
            self.writing -= 1;
        }
        s.changed = now;
    }

    /// A read is submitted. Returns when.
    pub fn read_submitted(&mut self) -> u64 {
        self.reads += 1;
        self.now()
    }

    /// A read that was submitted at `since` has ended, with these bytes of these sectors, or without any.
    pub fn read_done(&mut self, since: u64, found: &[(u64, Bytes)]) -> Result<(), String> {
        self.reads = self.reads.saturating_sub(1);
        found.iter().try_for_each(|(sector, bytes)| {
            let name = self.check(*sector, since, bytes, "reads as")?;
            self.seen(*sector, name, since);
            Ok(())
        })
    }

    /// `sector` was found on the disks themselves, while nothing is in flight.
    pub fn check_raw(&self, sector: u64, bytes: &Bytes) -> Result<(), String> {
        let how = "is on the members as";
        self.check(sector, NEVER - 1, bytes, how).map(|_| ())
    }

    fn check(&self, sector: u64, since: u64, bytes: &Bytes, how: &str) -> Result<u64, String> {
        let versions = &self.sectors[sector as usize].versions;
        let name = stamp::name(bytes, sector);
        let may = || versions.iter().filter(|v| v.until > since);
        if may().any(|v| v.name == name || v.name == ANYTHING) {
            return Ok(name);
        }
        let call = |v: &Version| match v.name {
            ZEROS => "zeros".into(),
            n if n & FOREIGN != 0 => format!("what was there ({n:x})"),
            n => format!("write {n}"),
        };
        let old = versions.iter().any(|v| v.name == name);
        Err(format!(
            "sector {sector} {how} {}{}; it may hold {}",
            stamp::describe(bytes, sector),
            if old { ", which was overwritten" } else { "" },
            may().map(call).collect::<Vec<_>>().join(" or ")
        ))
    }

    /// A read that was submitted at `since` found this.
    fn seen(&mut self, sector: u64, name: u64, since: u64) {
        let now = self.now;
        let s = &mut self.sectors[sector as usize];
        let last = s.versions.len() - 1;
        if s.changed > since {
            return; // it may be what was there before
        }
        let may = |v: &Version| v.until == NEVER && (v.name == name || v.name == ANYTHING);
        let known = s.versions.iter().rposition(|v| may(v) && v.name == name);
        let Some(at) = known.or_else(|| s.versions.iter().rposition(may)) else {
            return;
        };
        if s.writing && at == last {
            return; // what comes may not be there for good
        }
        s.versions[at].name = name;
        let upto = last - usize::from(s.writing);
        for (n, v) in s.versions[..=upto].iter_mut().enumerate() {
            if n != at {
                v.until = v.until.min(now);
                v.back &= n < at;
            }
        }
        if s.versions[at].survivor {
            s.settle(at, now);
        }
        self.tidy(sector);
    }

    /// A flush is submitted; its user was told of a loss at `told` for the last time.
    pub fn flush_submitted(&mut self, told: u64) -> Flush {
        let since = self.now();
        Flush { since, told }
    }

    /// It succeeded: all that was acknowledged before it is safe, but for what its user knew to be lost.
    pub fn flush_done(&mut self, flush: Flush) {
        let now = self.now();
        self.flushed = self.flushed.max(flush.since);
        let sectors = &mut self.sectors;
        self.unsettled.retain(|&at| {
            let s = &mut sectors[at as usize];
            let covered = |v: &Version| {
                v.back && v.acked < flush.since && (v.dropped == 0 || v.dropped > flush.told)
            };
            if let Some(version) = s.versions.iter().rposition(covered) {
                s.settle(version, now);
            }
            s.whole &= !s.is_settled();
            !s.is_settled()
        });
    }

    /// It failed. Only a loss that its user didn't know of when it submitted the flush excuses that.
    pub fn flush_failed(&self, flush: Flush) -> Result<(), String> {
        if self.suspicion > flush.told {
            return Ok(());
        }
        Err("a flush failed, and nothing was lost".into())
    }

    /// Nobody can tell whether the cache was lost: if writes are not flushed, flushes may fail after the next connection.
    pub fn cache_is_doubtful(&mut self) {
        self.suspect |= self.writing > 0 || self.last_ack > self.flushed;
    }

    /// The cache is lost.
    pub fn cache_lost(&mut self) {
        self.cache_is_doubtful();
        let now = self.now();
        for s in &mut self.sectors {
            s.changed = now;
            let done = s.versions.len() - usize::from(s.writing);
            for (n, v) in s.versions.iter_mut().enumerate().filter(|(_, v)| v.back) {
                v.until = NEVER;
                // Whoever was told of an earlier loss knows enough.
                if v.dropped == 0 && !v.survivor {
                    v.dropped = NEVER;
                }
                // One in flight may be done after the loss.
                v.survivor |= n < done;
            }
        }
    }

    /// A front end has another connection: from now on it knows of losses before.
    pub fn connected(&mut self) {
        let now = self.now();
        if std::mem::take(&mut self.suspect) {
            self.suspicion = now;
        }
        let versions = self.sectors.iter_mut().flat_map(|s| &mut s.versions);
        for v in versions.filter(|v| v.dropped == NEVER) {
            v.dropped = now;
        }
    }

    /// There are new users. They don't know what is flushed.
    pub fn started(&mut self) {
        self.connected();
        self.last_ack = self.now;
    }

    /// The users are dead: what is in flight is never answered. Once the disk has finished, writes are done or not.
    pub fn abandon(&mut self) {
        let now = self.now();
        self.reads = 0;
        for at in 0..self.sectors.len() as u64 {
            if self.sectors[at as usize].writing {
                self.ended(at, now);
            }
        }
    }

    /// Whether a loss may leave different contents there.
    pub fn is_unsettled(&self, sector: u64) -> bool {
        self.unsettled.contains(&sector)
    }

    /// Whether one of these sectors is unsettled, and was written to an array that had all members.
    pub fn is_whole(&self, sector: u64, sectors: u64) -> bool {
        let all = self.unsettled.range(sector..sector + sectors);
        all.into_iter().any(|&s| self.sectors[s as usize].whole)
    }

    /// All members are there again, or about to be, for what is unsettled.
    pub fn make_whole(&mut self) {
        for &s in &self.unsettled {
            self.sectors[s as usize].whole = true;
        }
    }

    /// Nobody can know what a sector holds after the loss that was just told.
    pub fn anything(&mut self, sector: u64) {
        let versions = &mut self.sectors[sector as usize].versions;
        if let Some(oldest) = versions.iter_mut().find(|v| v.back) {
            oldest.name = ANYTHING;
        }
    }

    fn tidy(&mut self, sector: u64) {
        let s = &mut self.sectors[sector as usize];
        if s.is_settled() {
            s.whole = false;
            self.unsettled.remove(&sector);
        }
    }
}

impl Sector {
    /// Whether a loss leaves the same contents whatever survives.
    fn is_settled(&self) -> bool {
        self.versions.iter().filter(|v| v.back).count() < 2
    }

    /// Reads from now on find nothing before version `at`.
    fn only_from(&mut self, at: usize, now: u64) {
        let before = self.versions[..at].iter_mut();
        before.for_each(|v| v.until = v.until.min(now));
    }

    /// Version `at` is durable: those before it can't come back.
    fn settle(&mut self, at: usize, now: u64) {
        self.only_from(at, now);
        self.versions[..at].iter_mut().for_each(|v| v.back = false);
    }
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
