//! For tests and for people: what must always hold, and what is unfinished.

use super::{Core, IoKind, NONE, State};
use crate::lists::On;
use crate::policy::Policy;

impl<P: Policy> Core<P> {
    /// What is unfinished, for people.
    pub fn unfinished(&self) -> String {
        let jobs = self.jobs.iter().filter_map(|(id, job)| {
            let j = job.as_ref()?;
            Some(format!(
                "job {id} of {}: {:?}, pages {}..{}, waits for {}, {:?}{}{}",
                j.owner,
                j.kind,
                j.at,
                j.end,
                j.pending,
                j.need,
                if j.is_parked { ", parked" } else { "" },
                if j.filling.is_some() { ", fills" } else { "" },
            ))
        });
        let ios = self.ios.iter().map(|(id, kind)| match kind {
            IoKind::Read { first, frames } => format!("read {id} of {} at {first}", frames.len()),
            IoKind::Write { first, frames } => format!("write {id} of {} at {first}", frames.len()),
            IoKind::Pass(job) => format!("pass {id} for {job}"),
        });
        let chains = self.frames.iter().filter(|f| f.waits != NONE);
        let chains = chains.map(|f| {
            let job = self.waits[f.waits as usize].job;
            format!("job {job} waits for page {}, {:?}", f.page, f.state)
        });
        let ranges = self
            .ranges
            .iter()
            .map(|r| format!("range {}..{} held by {}", r.first, r.end, r.job));
        let parked = (0..)
            .zip(&self.owners)
            .map(|(n, o)| format!("{n} has parked {:?}", o.parked));
        let ios = ios.chain(chains).chain(ranges).chain(parked);
        let dirty = format!("{} dirty, {} written", self.dirty.len(), self.writing);
        let all: Vec<_> = jobs.chain(ios).chain([dirty]).collect();
        all.join("; ")
    }

    /// What must always hold; slow. Errors say what doesn't.
    pub fn check(&self) -> Result<(), String> {
        let mut used = 0;
        let (mut reading, mut writing) = (0, 0);
        for (at, f) in self.frames.iter().enumerate() {
            let frame = at as u32;
            let free = self.alloc.is_free(frame);
            if free != (f.state == State::Free) && free {
                return Err(format!("frame {at} is free and {:?}", f.state));
            }
            reading += usize::from(f.state == State::Reading);
            writing += usize::from(f.state == State::Writing);
            let listed = !matches!(f.state, State::Free | State::Reading) && !f.orphan;
            if (self.lists.on(frame) != On::None) != listed {
                return Err(format!(
                    "frame {at} is {:?} and on a list it shouldn't be on",
                    f.state
                ));
            }
            if f.state == State::Free {
                continue;
            }
            used += 1;
            let ends = matches!(f.state, State::Reading | State::Writing) || f.behind;
            if f.waits != NONE && !ends {
                return Err(format!("page {} is {:?}, and waited for", f.page, f.state));
            }
            if f.syncs != NONE && !matches!(f.state, State::Dirty | State::Writing) {
                return Err(format!(
                    "page {} is {:?}, and to be written",
                    f.page, f.state
                ));
            }
            let found = self.table.find_locked(f.page);
            if f.orphan == (found == Some(frame)) {
                return Err(format!("page {} isn't where it should be", f.page));
            }
            let readable = !matches!(f.state, State::Reading) && !f.orphan;
            if self.table.is_open(frame) != readable {
                return Err(format!(
                    "page {} may be read in state {:?}",
                    f.page, f.state
                ));
            }
            if (self.dirty.get(&f.page) == Some(&frame)) != (f.state == State::Dirty) {
                return Err(format!(
                    "page {} is {:?} and not listed so",
                    f.page, f.state
                ));
            }
        }
        let held: usize = self
            .jobs
            .iter()
            .filter_map(|(_, j)| j.as_ref()?.filling.as_ref())
            .map(|f| f.frames.len())
            .sum();
        let free = self.alloc.free_frames() + self.alloc.listed_frames();
        if used + held + free != self.frames.len() {
            return Err(format!("{used} frames in use, {held} held, {free} free"));
        }
        let unwritten: u32 = self.epochs.values().sum();
        if reading != self.reading {
            return Err(format!(
                "{reading} frames are being read, {} counted",
                self.reading
            ));
        }
        if writing != self.writing || unwritten as usize != self.dirty.len() + self.writing {
            return Err(format!(
                "{writing} frames are being written, {} counted, {} dirty, {unwritten} by age",
                self.writing,
                self.dirty.len()
            ));
        }
        Ok(())
    }
}
