//! Background work of a cache: reclaim, and write-back of what is old, while none of its users polls.

use crate::PageCache;
use crate::core::Out;
use crate::policy::{Policy, Standard};
use crate::shared::Shared;
use pvblk_block::stacked::{Background, BackgroundThread, Due};
use pvblk_block::{Completion, Error};
use pvblk_sys::Poller;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The background reclaim and write-back of a cache, instead of the queues that are polled: as `kswapd` and the flusher do on CPUs of their own. For
/// simulations and experiments, where it is one more actor: [`BackgroundWork::step`] has to be called again and again. [`crate::PageCache::keep`]
/// starts a thread that does it.
pub struct BackgroundWork<P: Policy = Standard> {
    shared: Arc<Shared<P>>,
    exclusive: bool,
    out: Out,
    ended: Vec<Completion>,
}

impl<P: Policy> BackgroundWork<P> {
    /// Takes the work over from the queues, until it is dropped.
    pub fn new(cache: &PageCache<P>) -> BackgroundWork<P> {
        cache.shared.kept.store(true, Ordering::Relaxed);
        BackgroundWork::of(&cache.shared, true)
    }

    fn of(shared: &Arc<Shared<P>>, exclusive: bool) -> BackgroundWork<P> {
        BackgroundWork {
            shared: Arc::clone(shared),
            exclusive,
            out: Out::default(),
            ended: Vec::new(),
        }
    }

    /// Does a part of the work, at the time of the cache's clock.
    pub fn step(&mut self) -> Due {
        let shared = &self.shared;
        let mut armed = true;
        for end in shared.queues.unattended(usize::MAX) {
            armed &= end.lower.poll_unattended(&mut self.ended);
        }
        let news = !self.ended.is_empty();
        let mut core = shared.core.lock();
        core.at_time(shared.clock.now());
        for c in self.ended.drain(..) {
            core.ended(c.request, c.status);
        }
        let mut more = core.background_reclaim();
        core.write_back();
        let tick = core.tick();
        shared.background_work(&mut core);
        core.take_out(&mut self.out);
        more |= news || !self.out.ios.is_empty();
        drop(core);
        // It looks after what it began itself.
        let _ = shared.deliver(&mut self.out, None);
        if !armed {
            shared.queues.wake_sleepers(usize::MAX);
        }
        match (more, tick) {
            (true, _) => Due::Now,
            (false, Some(at)) => Due::At(at),
            (false, None) => Due::Never,
        }
    }

    /// Asks for a wake-up for the I/O that no request needs, and says when that is due.
    pub fn arm(&mut self) -> Due {
        let lower = &self.shared.background.lower;
        match lower.is_idle() {
            true => Due::Never,
            false => lower.arm().into(),
        }
    }

    /// True if background reclaim was asked for and isn't done.
    pub fn wants_reclaim(&self) -> bool {
        self.shared.core.lock().wants_reclaim()
    }
}

impl<P: Policy> Drop for BackgroundWork<P> {
    fn drop(&mut self) {
        if self.exclusive {
            self.shared.kept.store(false, Ordering::Relaxed);
        }
    }
}

/// The work of a cache's thread, besides the steps of queues that are polled.
struct Work<P: Policy> {
    work: BackgroundWork<P>,
    /// The answer of the last step.
    due: Due,
}

/// Longest sleep of the thread while pages are dirty.
const NAP: Duration = Duration::from_secs(1);

impl<P: Policy> Background for Work<P> {
    fn step(&mut self) -> Due {
        self.due = self.work.step();
        self.due
    }

    fn arm(&mut self, poller: &Poller) -> io::Result<Due> {
        let shared = &self.work.shared;
        let lower = &shared.background.lower;
        let of_io = match lower.is_idle() {
            true => Due::Never,
            false => lower.arm_in(poller, 1)?.into(),
        };
        if self.due.earlier(of_io) == Due::Never {
            shared.background_rests.store(true, Ordering::Relaxed);
            // A page that becomes dirty after this look does so under the lock, after it: the step that makes it dirty sees that the thread rests.
            if !shared.core.lock().is_clean() {
                return Ok(Due::At(shared.clock.now() + NAP));
            }
        }
        Ok(of_io)
    }

    fn woken(&mut self) {
        let shared = &self.work.shared;
        shared.background_rests.store(false, Ordering::Relaxed);
        shared.background.lower.woken();
    }
}

/// Starts a cache's thread.
pub(crate) fn start_thread<P: Policy>(shared: &Arc<Shared<P>>) -> Result<BackgroundThread, Error> {
    let work = Work {
        work: BackgroundWork::of(shared, false),
        due: Due::Now,
    };
    let clock = Arc::clone(&shared.clock);
    BackgroundThread::start("pvblk-cache", &shared.background_wait, clock, work)
        .map_err(|e| Error::os("cache: starting a thread", e))
}
