//! Memory for the data of one connection's requests, within the budget of its disk.
//!
//! Invariant: while the connection is short, one place on the budget's list of waiters is its own; the place is passed on when memory was
//! taken, or when the connection ends.

use crate::nbd::shares::DiskShare;
use pvblk_backend::{BufferPool, LaneWaker, Waiter};
use pvblk_block::{Buffer, Job};
use std::sync::Arc;

/// See the module's documentation.
pub(super) struct Memory {
    pool: BufferPool,
    /// Buffers of the request that is being admitted.
    taken: Vec<Buffer>,
    share: Arc<DiskShare>,
    /// `None` until the connection is with a worker.
    waiter: Option<Arc<Waiter>>,
    /// The budget had no room for the last request.
    short: bool,
}

impl Memory {
    pub(super) fn new(pool: BufferPool, share: Arc<DiskShare>) -> Memory {
        Memory {
            pool: pool.with_budget(&share.memory),
            taken: Vec::new(),
            share,
            waiter: None,
            short: false,
        }
    }

    /// From now on the connection's lane is woken when the budget has room again.
    pub(super) fn bind(&mut self, waker: &LaneWaker) {
        let waker = waker.clone();
        self.waiter = Some(Waiter::new(move || waker.wake()));
    }

    /// The share of the disk, which all of its connections have.
    pub(super) fn share(&self) -> &DiskShare {
        &self.share
    }

    /// Takes memory for a request; [`Memory::taken`] has it then. Where the budget has no room, the connection waits for some.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        let mut done = self.pool.take(bytes, &mut self.taken);
        if !done && self.pool.is_short_of_budget() {
            self.short = true;
            if let Some(waiter) = &self.waiter {
                self.share.memory.wait(waiter);
                // Some may have come back before it was on the list.
                done = self.pool.take(bytes, &mut self.taken);
            }
        }
        if done && std::mem::take(&mut self.short) {
            // There may be room for the next one, too.
            self.share.memory.pass_on();
        }
        done
    }

    /// Buffers of the last [`Memory::take`], to be moved out.
    #[inline]
    pub(super) fn taken(&mut self) -> &mut Vec<Buffer> {
        &mut self.taken
    }

    /// True if `bytes` that weren't to be had will be.
    pub(super) fn may_wait(&self, bytes: usize) -> bool {
        if self.pool.is_short_of_budget() {
            return self.share.memory.may_hold(BufferPool::claimed_for(bytes));
        }
        self.pool.used_pages() > 0
    }

    /// True while the budget has no room for the next request.
    pub(super) fn is_short(&self) -> bool {
        self.short
    }

    /// True while it is short and nobody will wake the connection: it has to try again by itself.
    pub(super) fn must_retry(&self) -> bool {
        self.short && self.waiter.is_none()
    }

    /// Takes buffers back.
    #[inline]
    pub(super) fn give(&mut self, buffers: &mut Vec<Buffer>) {
        if !buffers.is_empty() {
            self.pool.give(buffers);
        }
    }

    /// Forgets `bytes` that a device lost.
    pub(super) fn lose(&mut self, bytes: usize) {
        self.pool.lose(bytes);
    }

    /// Gives back memory above the pool's limit.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.pool.settle();
    }

    /// Gives back some of the memory that wasn't needed lately.
    pub(super) fn decay(&mut self) {
        let job = self.pool.decay_elsewhere();
        self.leave(job);
    }

    /// Gives back memory that isn't needed, or all.
    pub(super) fn rest(&mut self, all: bool) {
        let job = self.pool.rest_elsewhere(all);
        self.leave(job);
    }

    /// Leaves a job to the disk's threads: unmapping takes long, and others on this worker would have to wait.
    fn leave(&self, job: Option<Job>) {
        let Some(job) = job else {
            return;
        };
        let left = match &self.share.questions {
            Some(disk) => disk.leave(job).err(),
            None => Some(job),
        };
        if let Some(job) = left {
            job();
        }
    }

    #[cfg(test)]
    pub(super) fn pool(&self) -> &BufferPool {
        &self.pool
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.short {
            self.share.memory.pass_on();
        }
        self.rest(true);
    }
}
