//! Who looks after a cache while nobody polls: [`Keeper::step`], again and again. [`crate::PageCache::keep`] makes a thread of it.

use crate::core::Out;
use crate::device::Shared;
use crate::policy::{Policy, Standard};
use crate::{PageCache, core::Core};
use pvblk_block::{Completion, Error, Readiness};
use pvblk_sys::Poller;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

/// What is due for a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// More at once.
    Now,
    /// At this time, or when I/O of the cache ends.
    At(Instant),
    /// When somebody uses the cache, or I/O of it ends.
    Never,
}

/// Does a cache's background reclaim and write-back, instead of whoever polls: as `kswapd` and the flusher do on CPUs of their own. For
/// simulation and experiments, where it is one more actor.
pub struct Keeper<P: Policy = Standard> {
    shared: Arc<Shared<P>>,
    exclusive: bool,
    out: Out,
    ended: Vec<Completion>,
}

impl<P: Policy> Keeper<P> {
    /// Takes over from those who poll, until it is dropped.
    pub fn new(cache: &PageCache<P>) -> Keeper<P> {
        cache.shared.kept.store(true, Ordering::Relaxed);
        Keeper::of(&cache.shared, true)
    }

    fn of(shared: &Arc<Shared<P>>, exclusive: bool) -> Keeper<P> {
        Keeper {
            shared: Arc::clone(shared),
            exclusive,
            out: Out::default(),
            ended: Vec::new(),
        }
    }

    /// Does a piece of what there is to do, at the time of the cache's clock.
    pub fn step(&mut self) -> Due {
        let shared = &self.shared;
        shared.keeper_lane.poll_for_others(&mut self.ended);
        shared.poll_idle_lanes(usize::MAX, &mut self.ended);
        let news = !self.ended.is_empty();
        let mut core = shared.core.lock();
        core.at_time(shared.clock.now());
        for c in self.ended.drain(..) {
            core.ended(c.request, c.status);
        }
        let mut more = core.background_reclaim();
        core.write_back();
        let tick = core.tick();
        shared.background(&mut core);
        core.take_out(&mut self.out);
        more |= news || !self.out.ios.is_empty();
        drop(core);
        shared.dispatch(&mut self.out, None);
        match (more, tick) {
            (true, _) => Due::Now,
            (false, Some(at)) => Due::At(at),
            (false, None) => Due::Never,
        }
    }

    /// Asks the lane for what no request needs to wake whoever waits on it; [`Due`] of its I/O.
    pub fn arm(&mut self) -> Due {
        if self.shared.keeper_lane.is_idle() {
            return Due::Never;
        }
        match self.shared.keeper_lane.arm() {
            Readiness::Ready => Due::Now,
            Readiness::Wait(Some(at)) => Due::At(at),
            Readiness::Wait(None) => Due::Never,
        }
    }

    /// Whether background reclaim was asked for and isn't done.
    pub fn wants_reclaim(&self) -> bool {
        self.shared.core.lock().wants_reclaim()
    }
}

impl<P: Policy> Drop for Keeper<P> {
    fn drop(&mut self) {
        if self.exclusive {
            self.shared.kept.store(false, Ordering::Relaxed);
        }
    }
}

/// A keeper's thread.
pub(crate) struct Thread<P: Policy> {
    shared: Arc<Shared<P>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<P: Policy> Thread<P> {
    pub fn start(shared: &Arc<Shared<P>>) -> Result<Thread<P>, Error> {
        let os = |e| Error::os("cache: starting a thread", e);
        let mut keeper = Keeper::of(shared, false);
        let stop = Arc::new(AtomicBool::new(false));
        let poller = Poller::new().map_err(os)?;
        let lane = Arc::clone(&shared.keeper_lane);
        poller.add(lane.bell.as_fd(), 0, false).map_err(os)?;
        let (stopped, seen) = (Arc::clone(&stop), Arc::clone(shared));
        let body = move || {
            let (mut events, mut waits) = (Vec::new(), false);
            while !stopped.load(Ordering::Acquire) {
                let mut due = keeper.step();
                if due != Due::Now {
                    due = match (due, keeper.arm()) {
                        (Due::At(a), Due::At(b)) => Due::At(a.min(b)),
                        (Due::Never, other) | (other, Due::Never) => other,
                        (_, other) => other,
                    };
                }
                let wait = match due {
                    Due::Now => continue,
                    Due::At(at) => Some(at.saturating_duration_since(seen.clock.now())),
                    Due::Never => {
                        seen.keeper_asleep.store(true, Ordering::SeqCst);
                        match seen.core.lock().is_clean() {
                            true => None,
                            false => Some(std::time::Duration::from_secs(1)),
                        }
                    }
                };
                events.clear();
                let waited = lane
                    .wait_in(&poller, 1, &mut waits)
                    .and_then(|()| poller.wait(&mut events, wait));
                if waited.is_err() {
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                seen.keeper_asleep.store(false, Ordering::SeqCst);
                lane.bell.drain();
                lane.woken();
            }
        };
        let thread = std::thread::Builder::new().name("pvblk-cache".into());
        let thread = thread.spawn(body).map_err(os)?;
        Ok(Thread {
            shared: Arc::clone(shared),
            stop,
            thread: Some(thread),
        })
    }
}

impl<P: Policy> Drop for Thread<P> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.shared.keeper_lane.bell.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const _: () = assert!(Core::KEEPER == 0);
