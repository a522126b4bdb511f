//! The oracle: what each sector may hold, from what the workload was told and nothing else.

use crate::stamp;

/// Time of what never happened.
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Version {
    stamp: u64,
    acked: u64,
    /// When the front end could know that a cache was lost which it may have been in; 0: none was, `NEVER`: not yet.
    dropped: u64,
    /// It was acknowledged, or given up, before that: if it is there, it survived.
    survivor: bool,
}

#[derive(Debug)]
struct Sector {
    /// What may be there after the next loss, oldest first. Never empty.
    versions: Vec<Version>,
    /// From here on, it may be there now.
    floor: usize,
    /// A write in flight, and `dropped` for it.
    writing: Option<(u64, u64)>,
    /// When anything of this changed last.
    changed: u64,
}

/// A read in flight.
#[derive(Debug)]
struct Read {
    id: u64,
    sector: usize,
    sectors: usize,
    since: u64,
    /// Sector and what it may be found to hold.
    allowed: Vec<(usize, u64)>,
}

/// A flush in flight.
#[derive(Clone, Copy, Debug)]
pub struct Flush {
    /// When it was submitted.
    pub since: u64,
    /// When its submitter had last been told of a loss, or was opened.
    pub told: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Checker {
    sectors: Vec<Sector>,
    reads: Vec<Read>,
    now: u64,
    /// Writes in flight.
    writing: usize,
    last_ack: u64,
    /// Writes acknowledged before this time are flushed.
    flushed: u64,
    /// When the front end last had a reason to fail flushes.
    suspicion: u64,
    /// It will have one at the next connection.
    suspect: bool,
}

impl Checker {
    /// For `sectors` of zeros.
    pub fn new(sectors: u64) -> Checker {
        let zeros = || Sector {
            versions: vec![Version {
                stamp: stamp::ZEROS,
                acked: 0,
                dropped: 0,
                survivor: true,
            }],
            floor: 0,
            writing: None,
            changed: 0,
        };
        Checker {
            sectors: (0..sectors).map(|_| zeros()).collect(),
            reads: Vec::new(),
            now: 1,
            writing: 0,
            last_ack: 0,
            flushed: 0,
            suspicion: 0,
            suspect: false,
        }
    }

    /// The time. It advances with everything that is told.
    pub fn now(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// True if a write to the sector is in flight.
    pub fn is_being_written(&self, sector: u64) -> bool {
        self.sectors[sector as usize].writing.is_some()
    }

    /// A write of one sector is submitted.
    pub fn write_submitted(&mut self, sector: u64, stamp: u64) {
        let at = sector as usize;
        self.sectors[at].writing = Some((stamp, 0));
        self.writing += 1;
        for read in &mut self.reads {
            if (read.sector..read.sector + read.sectors).contains(&at) {
                read.allowed.push((at, stamp));
            }
        }
    }

    /// Its write has completed; `durable` if it promised that.
    pub fn write_acked(&mut self, sector: u64, durable: bool) {
        let acked = self.now();
        let s = &mut self.sectors[sector as usize];
        let Some((stamp, dropped)) = s.writing.take() else {
            return;
        };
        self.writing -= 1;
        self.last_ack = acked;
        let dropped = if durable { 0 } else { dropped };
        s.versions.push(Version {
            stamp,
            acked,
            dropped,
            survivor: false,
        });
        s.changed = acked;
        // One that was answered before the cache was lost may be told afterwards.
        if dropped == 0 {
            s.floor = s.versions.len() - 1;
        }
        if durable {
            s.forget(s.versions.len() - 1);
        }
    }

    /// A read is submitted.
    pub fn read_submitted(&mut self, id: u64, sector: u64, sectors: u64) {
        let since = self.now();
        let (sector, sectors) = (sector as usize, sectors as usize);
        let mut allowed = Vec::with_capacity(2 * sectors);
        for at in sector..sector + sectors {
            let s = &self.sectors[at];
            allowed.extend(s.versions[s.floor..].iter().map(|v| (at, v.stamp)));
            allowed.extend(s.writing.map(|(stamp, _)| (at, stamp)));
        }
        self.reads.push(Read {
            id,
            sector,
            sectors,
            since,
            allowed,
        });
    }

    /// It found `found`, sector by sector.
    pub fn read_done(&mut self, id: u64, found: &[Option<u64>]) -> Result<(), String> {
        let Some(at) = self.reads.iter().position(|r| r.id == id) else {
            return Err(format!("read {id} isn't in flight"));
        };
        let read = self.reads.swap_remove(at);
        for (i, &found) in found.iter().enumerate() {
            let at = read.sector + i;
            let Some(found) = found.filter(|&f| read.allowed.contains(&(at, f))) else {
                let allowed = read.allowed.iter().filter(|a| a.0 == at).map(|a| a.1);
                return Err(format!(
                    "sector {at} holds {}, and may hold {}",
                    name(found),
                    allowed
                        .map(|s| name(Some(s)))
                        .collect::<Vec<_>>()
                        .join(" or ")
                ));
            };
            self.sectors[at].seen(found, read.since);
        }
        Ok(())
    }

    /// A flush is submitted; its submitter was told of a loss at `told` for the last time.
    pub fn flush_submitted(&mut self, told: u64) -> Flush {
        let since = self.now();
        Flush { since, told }
    }

    /// It succeeded: all that was acknowledged before it is safe, but for what its submitter knew to be lost.
    pub fn flush_done(&mut self, flush: Flush) {
        self.flushed = self.flushed.max(flush.since);
        for s in &mut self.sectors {
            let covered =
                |v: &Version| v.acked < flush.since && (v.dropped == 0 || v.dropped > flush.told);
            if let Some(at) = s.versions.iter().rposition(covered) {
                s.forget(at);
            }
        }
    }

    /// It failed. Only a loss that its submitter didn't know of when it submitted the flush excuses that.
    pub fn flush_failed(&mut self, flush: Flush) -> Result<(), String> {
        if self.suspicion > flush.told {
            return Ok(());
        }
        Err("a flush failed, and nothing was lost".into())
    }

    /// Nobody can tell whether the cache was lost: if writes are not flushed, flushes may fail after the next connection.
    pub fn cache_is_doubtful(&mut self) {
        self.suspect |= self.writing > 0 || self.last_ack > self.flushed;
    }

    /// The front end has another connection: from now on it knows of losses before.
    pub fn connected(&mut self) {
        let now = self.now();
        if std::mem::take(&mut self.suspect) {
            self.suspicion = now;
        }
        for s in &mut self.sectors {
            let versions = s.versions.iter_mut().map(|v| &mut v.dropped);
            let writing = s.writing.iter_mut().map(|(_, dropped)| dropped);
            for dropped in versions.chain(writing).filter(|d| **d == NEVER) {
                *dropped = now;
            }
        }
    }

    /// There is another front end. It doesn't know what is flushed.
    pub fn started(&mut self) {
        self.connected();
        self.last_ack = self.now;
    }

    /// The cache is lost.
    pub fn cache_lost(&mut self) {
        self.cache_is_doubtful();
        let now = self.now();
        for s in &mut self.sectors {
            s.floor = 0;
            s.changed = now;
            for v in &mut s.versions {
                // Whoever was told of an earlier loss knows enough.
                if v.dropped == 0 && !v.survivor {
                    v.dropped = NEVER;
                }
                v.survivor = true;
            }
            // One in flight may have been answered before the first loss already, and nobody told.
            if let Some((_, dropped)) = s.writing.as_mut().filter(|w| w.1 == 0) {
                *dropped = NEVER;
            }
        }
        for read in &mut self.reads {
            for at in read.sector..read.sector + read.sectors {
                let versions = self.sectors[at].versions.iter();
                read.allowed.extend(versions.map(|v| (at, v.stamp)));
            }
        }
    }

    /// The front end is dead: what is in flight is never answered. Once its back end has finished, writes are done or not.
    pub fn abandon(&mut self) {
        let now = self.now();
        self.reads.clear();
        self.writing = 0;
        for s in &mut self.sectors {
            if let Some((stamp, dropped)) = s.writing.take() {
                s.versions.push(Version {
                    stamp,
                    acked: NEVER,
                    dropped,
                    survivor: false,
                });
                s.changed = now;
            }
        }
    }
}

impl Sector {
    /// Versions before `at` can't come back.
    fn forget(&mut self, at: usize) {
        self.versions.drain(..at);
        self.floor = self.floor.saturating_sub(at);
    }

    /// A read that was submitted at `since` found `stamp`.
    fn seen(&mut self, stamp: u64, since: u64) {
        let may_be_new = self.writing.is_some_and(|w| w.0 == stamp);
        if may_be_new || self.changed > since {
            return; // what it found may be what comes, or what was there before
        }
        if let Some(at) = self.versions.iter().rposition(|v| v.stamp == stamp)
            && at >= self.floor
        {
            self.versions.truncate(at + 1);
            self.floor = at;
            if self.versions[at].survivor {
                self.forget(at); // what survived is on the medium
            }
        }
    }
}

fn name(stamp: Option<u64>) -> String {
    match stamp {
        None => "a torn sector".into(),
        Some(stamp::ZEROS) => "zeros".into(),
        Some(s) => format!("write {} of sector {}", s >> 16, s & 0xffff),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(c: &mut Checker, found: u64) -> Result<(), String> {
        c.read_submitted(1, 0, 1);
        c.read_done(1, &[Some(found)])
    }

    fn write(c: &mut Checker, data: u64) {
        c.write_submitted(0, data);
        c.write_acked(0, false);
    }

    #[test]
    fn what_is_acknowledged_stays_while_the_cache_does_and_what_is_flushed_for_ever() {
        let mut c = Checker::new(1);
        write(&mut c, 10);
        assert!(read(&mut c, 10).is_ok() && read(&mut c, 0).is_err());
        let flush = c.flush_submitted(0);
        write(&mut c, 11);
        c.flush_done(flush);
        assert!(read(&mut c, 10).is_err());
        c.cache_lost();
        assert!(read(&mut c, 0).is_err());
        assert!(read(&mut c, 10).is_ok());
        assert!(
            read(&mut c, 11).is_err(),
            "a read has shown that it is gone"
        );
    }

    #[test]
    fn a_flush_that_spans_a_loss_must_not_succeed_until_the_loss_is_told() {
        let mut c = Checker::new(1);
        let opened = c.now();
        write(&mut c, 10);
        let (before, replayed) = (c.flush_submitted(opened), c.flush_submitted(opened));
        assert!(c.flush_failed(before).is_err());
        c.cache_lost();
        c.connected();
        assert!(c.flush_failed(before).is_ok());
        let told = c.now();
        let after = c.flush_submitted(told);
        c.flush_done(after);
        assert!(c.flush_failed(after).is_err());
        c.flush_done(replayed); // it says that the write is safe
        assert!(read(&mut c, 0).is_err());
    }

    #[test]
    fn a_read_may_find_what_is_in_flight_or_was_while_it_was_read() {
        let mut c = Checker::new(1);
        c.read_submitted(2, 0, 1);
        write(&mut c, 10);
        assert!(c.read_done(2, &[Some(0)]).is_ok());
        c.write_submitted(0, 11);
        assert!(read(&mut c, 10).is_ok() && read(&mut c, 11).is_ok());
        c.abandon();
        assert!(read(&mut c, 11).is_ok() && read(&mut c, 10).is_err());
        assert!(c.read_done(7, &[None]).is_err());
    }
}
