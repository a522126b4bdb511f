//! Writes: into the page's frame, or into a new one while the old one is being written.

use super::{Core, Job, MOST_PENDING, NONE, Need, State, copy, meeting};
use crate::config::PAGE_BYTES;
use crate::lists::On;
use crate::policy::Policy;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{RequestFlags, Status};

impl<P: Policy> Core<P> {
    /// True if the job is done.
    pub(super) fn run_write(&mut self, id: u32, job: &mut Job, sync: bool) -> bool {
        let begin = job.at;
        let goes_on = self.write_pages(id, job, sync);
        if sync && job.at > begin {
            self.write_out(begin, job.at, job.owner);
        }
        goes_on && job.pending == 0
    }

    /// Goes from page to page; false if it has to wait.
    fn write_pages(&mut self, id: u32, job: &mut Job, sync: bool) -> bool {
        while job.at < job.end {
            if job.filling.is_some() {
                if !self.fill(job) {
                    self.park(id, job);
                    return false;
                }
                self.start_filling(job);
            }
            if job.pending >= MOST_PENDING {
                return false;
            }
            let page = job.at;
            if self.wait_for_range(page, id) {
                return false;
            }
            if !sync && !self.may_dirty(page, job) {
                self.park(id, job);
                return false;
            }
            if job.status != Status::Ok {
                // The rest isn't begun.
                return true;
            }
            let found = self.table.find_locked(page);
            let frame = match found.map(|f| (f, self.frames[f as usize].state)) {
                Some((frame, State::Reading)) => {
                    self.wait_on(frame, id, u64::MAX);
                    return false;
                }
                Some((frame, State::Writing)) if !has(Plant::ChangedInPlace) => {
                    match self.replace(frame, job, page) {
                        Some(new) => new,
                        None => {
                            self.wait_on(frame, id, u64::MAX);
                            return false;
                        }
                    }
                }
                Some((frame, _)) => frame,
                None if self.is_whole(job, page) => match self.frame_for(job) {
                    Some(frame) => {
                        self.place(page, frame, State::Clean);
                        frame
                    }
                    None => {
                        self.park(id, job);
                        return false;
                    }
                },
                None => {
                    self.begin_part(job);
                    continue;
                }
            };
            self.write_frame(frame, page, job);
            if sync {
                self.sync_on(frame, id, page, job);
            }
            job.at += 1;
        }
        true
    }

    fn write_frame(&mut self, frame: u32, page: u64, job: &Job) {
        let (skip, first, len) = meeting(&job.request, page);
        let offset = frame as usize * PAGE_BYTES + first;
        let marked = self.table.is_marked(frame);
        self.table.shut(frame);
        copy(&job.request.buffers, skip, &self.region, offset, len, true);
        self.table.open(frame, marked);
        self.table.touch(frame);
        self.make_dirty(frame);
    }

    /// The page is being written: it gets a frame with a copy, and the old one is only the device's. `None`: there is none.
    fn replace(&mut self, old: u32, job: &Job, page: u64) -> Option<u32> {
        let new = self.frame_at_once(job.owner)?;
        if !self.is_whole(job, page) {
            let (to, from) = (new as usize * PAGE_BYTES, old as usize * PAGE_BYTES);
            self.region.copy_from(to, &self.region, from, PAGE_BYTES);
        }
        let uses = self.table.uses(old);
        let on = self.lists.on(old);
        self.table.remove(old);
        self.lists.put(old, On::None);
        let o = &mut self.frames[old as usize];
        o.orphan = true;
        let waits = std::mem::replace(&mut o.waits, NONE);
        let f = &mut self.frames[new as usize];
        (f.page, f.state, f.behind, f.waits) = (page, State::Clean, true, waits);
        self.table.insert(page, new);
        self.table.set_uses(new, uses);
        self.lists.put(new, on);
        Some(new)
    }

    /// The job's write of the page is done when the frame is written.
    fn sync_on(&mut self, frame: u32, id: u32, page: u64, job: &mut Job) {
        let f = &mut self.frames[frame as usize];
        f.fua |= job.request.flags.contains(RequestFlags::FUA);
        let next = f.syncs;
        let wait = self.waits.insert(super::Wait {
            job: id,
            page,
            next,
        });
        self.frames[frame as usize].syncs = wait as u32;
        job.pending += 1;
    }

    /// Whether one more page may become dirty. If not, the job's need is a throttle; or it has failed, since nothing can be written.
    fn may_dirty(&mut self, page: u64, job: &mut Job) -> bool {
        if let Need::Throttle { since, errors } = job.need {
            let slept = self.now.saturating_duration_since(since);
            let failed = self.counters.write_errors != errors;
            if self.is_too_dirty() && failed && self.writing == 0 {
                (job.status, job.at) = (Status::IoError, job.end);
            } else if self.is_too_dirty() {
                self.pump_background(job.owner);
                return false;
            }
            self.counters.throttled += 1;
            self.counters.throttled_ns += slept.as_nanos() as u64;
            job.need = Need::Nothing;
            return true;
        }
        if self.dirty.contains_key(&page) || !self.is_too_dirty() {
            return true;
        }
        job.need = Need::Throttle {
            since: self.now,
            errors: self.counters.write_errors,
        };
        self.pump_background(job.owner);
        false
    }
}
