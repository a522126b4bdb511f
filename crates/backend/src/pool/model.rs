//! Every interleaving of a pool's users, on the pool itself.
//!
//! Each actor is a list of steps, each of which happens under one hold of the pool's lock, or between two: a
//! worker that takes, completes and gives back, a device that still has a buffer for a while, two squeezes of
//! which each drains, releases and returns, a disconnect. All orders of all steps are run, each from the
//! start, with released memory poisoned.

use super::*;
use std::collections::HashSet;

/// The state at a moment of one run.
struct ModelState {
    pool: Option<BufferPool>,
    /// The pool for squeezes, which may come after the disconnect.
    shared: Arc<PoolShared>,
    /// Taken buffers, each with the byte that was written to it.
    in_use: Vec<Option<(Vec<Buffer>, u8)>>,
    /// Buffers that the device still has.
    at_device: Vec<Option<Buffer>>,
    leaving: Vec<Option<Leaving>>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The worker takes a page for a request and writes to it; the device gets it.
    Take(usize),
    /// The request completes and the page is given back.
    Give(usize),
    /// The device drops its buffer.
    Forget(usize),
    /// The page's data must be unchanged.
    Look(usize),
    Drain(usize),
    Release(usize),
    Return(usize),
    Disconnect,
}

impl ModelState {
    fn new(limit: usize) -> ModelState {
        let pool = BufferPool::new(&Arc::default(), "model", "model", None, limit);
        let shared = Arc::clone(&pool.shared);
        ModelState {
            pool: Some(pool),
            shared,
            in_use: (0..3).map(|_| None).collect(),
            at_device: (0..3).map(|_| None).collect(),
            leaving: (0..2).map(|_| None).collect(),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Take(request) => {
                let Some(pool) = &mut self.pool else { return };
                let mut buffers = Vec::new();
                if !pool.take(PAGE_SIZE, &mut buffers) {
                    return;
                }
                let mark = 0x10 + request as u8;
                buffers[0].write(0, &[mark; PAGE_SIZE]);
                self.at_device[request] = Some(buffers[0].clone());
                self.in_use[request] = Some((buffers, mark));
            }
            Step::Look(request) => {
                if let Some((buffers, mark)) = &self.in_use[request] {
                    assert_eq!(buffers[0].to_vec(), [*mark; PAGE_SIZE], "in use");
                }
                self.look_at_device(request);
            }
            Step::Give(request) => {
                if let (Some(pool), Some((mut buffers, _))) =
                    (&mut self.pool, self.in_use[request].take())
                {
                    pool.give(&mut buffers);
                }
                self.look_at_device(request);
            }
            Step::Forget(request) => {
                self.look_at_device(request);
                self.at_device[request] = None;
            }
            Step::Drain(by) => self.leaving[by] = Some(self.shared.begin(0, by == 0)),
            Step::Release(by) => {
                if let Some(leaving) = &mut self.leaving[by] {
                    self.shared.release(leaving, by == 0);
                }
            }
            Step::Return(by) => {
                if let Some(leaving) = self.leaving[by].take() {
                    self.shared.end(leaving);
                }
            }
            Step::Disconnect => {
                // A source does this: buffers in its slots go back first.
                if let Some(mut pool) = self.pool.take() {
                    for (mut buffers, _) in self.in_use.iter_mut().filter_map(Option::take) {
                        pool.give(&mut buffers);
                    }
                }
            }
        }
        self.check();
    }

    /// The device reads the data that it was given, whatever became of the buffer elsewhere.
    fn look_at_device(&self, request: usize) {
        if let Some(buffer) = &self.at_device[request] {
            let mark = 0x10 + request as u8;
            assert_eq!(buffer.to_vec(), [mark; PAGE_SIZE], "at the device");
        }
    }

    /// Checks that a page is in one place at most, and that the counts are right.
    fn check(&self) {
        let mut seen = HashSet::new();
        let in_use = self.in_use.iter().flatten().flat_map(|(b, _)| b);
        for buffer in in_use {
            let new = seen.insert(Arc::as_ptr(buffer.region()));
            assert!(new, "a page is used by two");
        }
        let inner = self.shared.inner.lock();
        let claimed = inner.free.claimed();
        if self.pool.is_some() {
            assert_eq!(inner.used_pages, seen.len() + claimed, "pages in use");
        }
        assert!(inner.used_pages + inner.free.hot_pages() <= inner.limit_pages);
    }
}

/// Runs all orders of the actors' steps; returns their number.
fn explore(limit: usize, actors: &[&[Step]]) -> u64 {
    let mut schedule = Vec::new();
    let mut count = 0;
    let mut at = vec![0; actors.len()];
    descend(limit, actors, &mut at, &mut schedule, &mut count);
    count
}

fn descend(
    limit: usize,
    actors: &[&[Step]],
    at: &mut Vec<usize>,
    schedule: &mut Vec<Step>,
    count: &mut u64,
) {
    let mut last = true;
    for actor in 0..actors.len() {
        if let Some(&step) = actors[actor].get(at[actor]) {
            last = false;
            at[actor] += 1;
            schedule.push(step);
            descend(limit, actors, at, schedule, count);
            schedule.pop();
            at[actor] -= 1;
        }
    }
    if last {
        *count += 1;
        replay(limit, schedule);
    }
}

fn replay(limit: usize, schedule: &[Step]) {
    let run = || {
        let mut world = ModelState::new(limit);
        schedule.iter().for_each(|&step| world.step(step));
        world.at_device.clear();
        for by in 0..2 {
            world.step(Step::Return(by));
        }
        world.step(Step::Disconnect);
        // No bytes of the pool are left on the bill.
        world.shared.trim(0, true);
        assert_eq!(
            world.shared.gauge.live_bytes(),
            0,
            "memory that is nobody's"
        );
    };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    if let Err(why) = caught {
        eprintln!("in this order: {schedule:?}");
        std::panic::resume_unwind(why);
    }
}

use Step::{Disconnect, Drain, Forget, Give, Look, Release, Return, Take};

const SQUEEZE: &[Step] = &[Drain(0), Release(0), Return(0)];
const SHRINK: &[Step] = &[Drain(1), Release(1), Return(1)];

#[test]
fn release_against_allocation_and_completion() {
    pvblk_sys::poison_released_memory();
    let worker = &[Take(0), Give(0), Take(1), Look(1), Give(1)];
    let count = explore(64, &[worker, SQUEEZE, &[Look(0), Forget(0)]]);
    assert_eq!(count, 2520); // 10! / (5! 3! 2!)
}

#[test]
fn two_releases_at_once() {
    pvblk_sys::poison_released_memory();
    let worker = &[Take(0), Take(1), Give(0), Look(1)];
    let count = explore(2, &[worker, SQUEEZE, SHRINK]);
    assert_eq!(count, 4200); // 10! / (4! 3! 3!)
}

#[test]
fn release_against_disconnect() {
    pvblk_sys::poison_released_memory();
    let worker = &[Take(0), Take(1), Give(0), Disconnect];
    let count = explore(64, &[worker, SQUEEZE, &[Look(1), Forget(1)]]);
    assert_eq!(count, 1260); // 9! / (4! 3! 2!)
    let worker = &[Take(0), Give(0), Disconnect];
    let count = explore(64, &[worker, SQUEEZE, SHRINK]);
    assert_eq!(count, 1680); // 9! / (3! 3! 3!)
}
