//! The invariants of all machines and between them, for tests; and unfinished work, for people.

use super::Core;
use crate::policy::Policy;

impl<P: Policy> Core<P> {
    /// Unfinished work, for people who look for a hang.
    pub fn unfinished(&self) -> String {
        let requests = self.requests.describe();
        let waiting = (0..self.memory.len() as u32).filter_map(|frame| {
            let request = self.waiters.newest(frame)?;
            let page = self.memory.page_of(frame);
            Some(format!("request {request} waits for page {page:?}"))
        });
        let all = requests.chain(self.io.describe()).chain(waiting);
        let all = all.chain(self.ranges.describe());
        let mut all: Vec<_> = all.collect();
        let counters = self.writes.counters();
        all.push(format!(
            "{} dirty, {} written",
            counters.nr_dirty, counters.nr_writeback
        ));
        all.join("; ")
    }

    /// Errors if an invariant doesn't hold between two steps; slow.
    pub fn check(&self) -> Result<(), String> {
        let exists = |number| self.requests.exists(number);
        self.requests.check()?;
        self.ranges.check()?;
        self.waiters.check(exists)?;
        self.writes.check(exists)?;
        self.memory
            .check(self.requests.held_frames(), &self.writes)?;
        self.check_io()?;
        self.check_counters()
    }

    /// A frame is at the device exactly if it is being read or written, and a request that waits for a frame waits for I/O.
    fn check_io(&self) -> Result<(), String> {
        let (reads, writes) = self.io.frames()?;
        if let Some(frame) = reads.iter().find(|&&f| !self.memory.is_reading(f)) {
            return Err(format!("frame {frame} is read and nobody knows"));
        }
        if let Some(frame) = writes.iter().find(|&&f| !self.writes.is_writing(f)) {
            return Err(format!("frame {frame} is written and nobody knows"));
        }
        let (mut reading, mut writing) = (0, 0);
        for frame in 0..self.memory.len() as u32 {
            let is_reading = self.memory.is_reading(frame);
            reading += usize::from(is_reading);
            writing += usize::from(self.writes.is_writing(frame));
            if self.waiters.any(frame) && !is_reading && !self.writes.is_busy(frame) {
                return Err(format!("frame {frame} is waited for, and nothing ends"));
            }
        }
        match (reading, writing) == (reads.len(), writes.len()) {
            true => Ok(()),
            false => Err(format!(
                "{reading} frames are to be read and {writing} to be written, {} and {} are",
                reads.len(),
                writes.len()
            )),
        }
    }

    /// Each counter is one machine's.
    fn check_counters(&self) -> Result<(), String> {
        let all = [
            self.memory.counters(),
            self.writes.counters(),
            *self.reads.counters(),
            *self.io.counters(),
        ];
        let all = all.map(|counters| counters.all());
        for (at, (name, _)) in all[0].iter().enumerate() {
            let counting = all.iter().filter(|counters| counters[at].1 > 0).count();
            if counting > 1 {
                return Err(format!("{counting} machines count {name}"));
            }
        }
        Ok(())
    }
}
