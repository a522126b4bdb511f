//! [`Checker`]: the contents that each sector may have, according to the completions that users got and
//! nothing else. It doesn't look at the disk.
//!
//! A sector has a history of versions: its first contents, and those of each write, in the order of
//! submission (no two writes of one sector are in flight together). The checker knows of each version when it
//! was acknowledged, until when a read may find it, and whether a loss of the cache may bring it back. The
//! acknowledgement of the next write ends it for reads. A flush that covers a later version ends it for good,
//! and so does a read that finds a later version. After a loss, all versions that may come back can be read
//! again.

use crate::stamp::{self, Bytes, FOREIGN, ZEROS};
use std::collections::BTreeSet;

/// Time of an event that hasn't happened.
const NEVER: u64 = u64::MAX;
/// The name of a version with unknown contents.
const ANYTHING: u64 = u64::MAX;
/// A sector with as many versions forgets those that no read can find.
const MANY: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Version {
    /// The number of the write, or another name as [`stamp::name`] gives it.
    name: u64,
    acked: u64,
    /// A read that was submitted at this time or later doesn't find this version.
    until: u64,
    /// A loss may bring this version back, or it may be on the medium now.
    back: bool,
    /// The time from which users could know of the loss of a cache that this version may have been in; 0: no
    /// such loss, [`NEVER`]: not yet told.
    dropped: u64,
    /// The version was there, or given up, before the last loss: if a read finds it, it is on the
    /// medium.
    survivor: bool,
}

#[derive(Clone, Debug)]
struct Sector {
    /// Oldest first, never empty. The last one is in flight if `writing`.
    versions: Vec<Version>,
    writing: bool,
    /// Time of the last change of this sector.
    changed: u64,
    /// Since all its older versions were ended, the sector was written to an array that had all
    /// members.
    whole: bool,
    /// Since its last write ended, the array's members were flushed as one of them was kicked.
    kept: bool,
}

/// A flush in flight, or the time of another request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flush {
    /// Time of the submission.
    pub since: u64,
    /// Time at which its user was last told of a loss, or was opened.
    pub told: u64,
}

/// Checks reads against the history of each sector.
#[derive(Debug)]
pub struct Checker {
    sectors: Vec<Sector>,
    /// Sectors with more than one version that may be there after a loss.
    unsettled: BTreeSet<u64>,
    now: u64,
    /// Number of reads in flight.
    reads: usize,
    /// Number of sectors with writes in flight.
    writing: usize,
    last_ack: u64,
    /// Writes acknowledged before this time are flushed.
    flushed: u64,
    /// Time at which a front end last had a reason to fail flushes.
    suspicion: u64,
    /// A front end will have a reason to fail flushes at the next connection.
    suspect: bool,
}

impl Checker {
    /// A checker for `sectors` sectors, of zeros, or with unknown contents unless `known`.
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
            kept: false,
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

    /// A time later than all before.
    pub fn now(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// True if no write to these sectors is in flight.
    pub fn is_free(&self, sector: u64, sectors: u64) -> bool {
        (sector..sector + sectors).all(|s| !self.sectors[s as usize].writing)
    }

    /// Write number `id`, 0 for zeros, is submitted. `whole`: the array has all its members.
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
            s.kept = false;
            self.unsettled.insert(at);
        }
        self.writing += sectors as usize;
    }

    /// The write in flight has completed; `durable` if it was to be stable then.
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
                // A write that was completed before the cache was lost may be reported afterwards.
                s.only_from(last, now);
            }
            self.tidy(at);
        }
    }

    /// The write in flight failed, or its user is gone: it may have happened, or not.
    pub fn write_failed(&mut self, sector: u64, sectors: u64) {
        let now = self.now();
        (sector..sector + sectors).for_each(|at| self.ended(at, now));
    }

    /// The write in flight was acknowledged and did nothing, as a discard may.
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

    /// A read is submitted. Returns the time.
    pub fn read_submitted(&mut self) -> u64 {
        self.reads += 1;
        self.now()
    }

    /// A read that was submitted at `since` has ended, with the contents of sectors in `found`, which is
    /// empty if it failed.
    pub fn read_done(&mut self, since: u64, found: &[(u64, Bytes)]) -> Result<(), String> {
        self.reads = self.reads.saturating_sub(1);
        found.iter().try_for_each(|(sector, bytes)| {
            let name = self.check(*sector, since, bytes, "reads as")?;
            self.seen(*sector, name, since);
            Ok(())
        })
    }

    /// Checks the contents of `sector` on the disks themselves, while no request is in flight.
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

    /// Notes that a read that was submitted at `since` found this version.
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

    /// A flush is submitted, whose user was last told of a loss at `told`.
    pub fn flush_submitted(&mut self, told: u64) -> Flush {
        let since = self.now();
        Flush { since, told }
    }

    /// The flush succeeded: all that was acknowledged before it is stable, except for the writes that its
    /// user knew to be lost.
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

    /// The flush failed. The only excuse is a loss that its user didn't know of at the submission.
    pub fn flush_failed(&self, flush: Flush) -> Result<(), String> {
        if self.suspicion > flush.told {
            return Ok(());
        }
        Err("a flush failed, and nothing was lost".into())
    }

    /// A loss of the cache can't be excluded: if writes are not flushed, flushes may fail after the next
    /// connection.
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
                // A user that was told of an earlier loss knows enough.
                if v.dropped == 0 && !v.survivor {
                    v.dropped = NEVER;
                }
                // A write in flight may be done after the loss.
                v.survivor |= n < done;
            }
        }
    }

    /// A front end has another connection, by which it learns of earlier losses.
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

    /// The users are new ones, which don't know what is flushed.
    pub fn started(&mut self) {
        self.connected();
        self.last_ack = self.now;
    }

    /// The users are dead, and their requests never complete. Once the disk has finished, their writes are
    /// done or not.
    pub fn abandon(&mut self) {
        let now = self.now();
        self.reads = 0;
        for at in 0..self.sectors.len() as u64 {
            if self.sectors[at as usize].writing {
                self.ended(at, now);
            }
        }
    }

    /// True if the sector's contents after a loss aren't determined.
    pub fn is_unsettled(&self, sector: u64) -> bool {
        self.unsettled.contains(&sector)
    }

    /// True if one of these sectors is unsettled, and was written to an array that had all members.
    pub fn is_whole(&self, sector: u64, sectors: u64) -> bool {
        let all = self.unsettled.range(sector..sector + sectors);
        all.into_iter().any(|&s| self.sectors[s as usize].whole)
    }

    /// True if the stripe of an unsettled sector may be written in part.
    pub fn is_open(&self, sector: u64) -> bool {
        self.is_unsettled(sector) && !self.sectors[sector as usize].kept
    }

    /// A member was kicked, and before that the others were flushed. `all`: writes in flight have not gone on since.
    pub fn kicked(&mut self, all: bool) {
        for &s in &self.unsettled {
            let s = &mut self.sectors[s as usize];
            s.whole = false;
            s.kept |= all || !s.writing;
        }
    }

    /// All members are there again, or about to be, for the unsettled sectors.
    pub fn make_whole(&mut self) {
        for &s in &self.unsettled {
            self.sectors[s as usize].whole = true;
        }
    }

    /// The sector's contents after the loss that was just told are unknown.
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
    /// True if a loss leaves the same contents whatever survives.
    fn is_settled(&self) -> bool {
        self.versions.iter().filter(|v| v.back).count() < 2
    }

    /// Reads from now on find no version before `at`.
    fn only_from(&mut self, at: usize, now: u64) {
        let before = self.versions[..at].iter_mut();
        before.for_each(|v| v.until = v.until.min(now));
    }

    /// Version `at` is stable: those before it can't come back.
    fn settle(&mut self, at: usize, now: u64) {
        self.only_from(at, now);
        self.versions[..at].iter_mut().for_each(|v| v.back = false);
    }
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
