//! Requests that wait: some for their time, some until they are released.

use super::rules::{Kind, Rule, Rules};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Does a request and completes it; given an error number, completes it with that and does nothing.
pub(super) type Job = Box<dyn FnOnce(Option<i32>) + Send>;

struct Waiting {
    file: String,
    kind: Kind,
    /// `None`: until it is released.
    due: Option<Instant>,
    job: Job,
}

impl Waiting {
    fn fits(&self, file: &str, kinds: &[Kind]) -> bool {
        (file == "*" || self.file == file) && kinds.contains(&self.kind)
    }
}

#[derive(Default)]
struct State {
    rules: Rules,
    /// Waiting requests by number of arrival, so that requests that are released together are done
    /// in that order.
    waiting: BTreeMap<u64, Waiting>,
    arrived: u64,
    /// Requests that are being done at this moment by [`Schedule::work`].
    working: Vec<(String, Kind)>,
    over: bool,
    rng: fastrand::Rng,
}

impl State {
    /// Requests that are to be done now, and the time until the next.
    fn due(&mut self) -> (Vec<Waiting>, Option<Duration>) {
        let now = Instant::now();
        let mut times: Vec<(Instant, u64)> = self
            .waiting
            .iter()
            .filter_map(|(&n, w)| w.due.map(|due| (due, n)))
            .collect();
        times.sort_unstable();
        let mut jobs = Vec::new();
        for (due, n) in times {
            if due > now {
                return (jobs, Some(due - now));
            }
            jobs.extend(self.waiting.remove(&n));
        }
        (jobs, None)
    }
}

/// The requests that wait, and one thread that does them when their time has come.
pub(super) struct Schedule {
    state: Mutex<State>,
    bell: Condvar,
}

impl Schedule {
    pub fn new(seed: u64) -> Arc<Schedule> {
        let state = State {
            rng: fastrand::Rng::with_seed(seed),
            ..State::default()
        };
        Arc::new(Schedule {
            state: Mutex::new(state),
            bell: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread; it ends after [`Schedule::end`].
    pub fn start(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let schedule = Arc::clone(self);
        std::thread::Builder::new()
            .name("slow-medium".into())
            .spawn(move || schedule.work())
    }

    fn work(&self) {
        let mut state = self.state();
        while !state.over {
            let (jobs, pause) = state.due();
            if jobs.is_empty() {
                let pause = pause.unwrap_or(Duration::from_secs(3600));
                state = match self.bell.wait_timeout(state, pause) {
                    Ok((state, _)) => state,
                    Err(poisoned) => poisoned.into_inner().0,
                };
                continue;
            }
            state.working = jobs.iter().map(|w| (w.file.clone(), w.kind)).collect();
            drop(state);
            for waiting in jobs {
                (waiting.job)(None);
            }
            state = self.state();
            state.working.clear();
            self.bell.notify_all();
        }
    }

    /// Treats a request as its rule says.
    pub fn take(&self, file: &str, kind: Kind, job: Job) {
        let mut state = self.state();
        let due = match state.rules.of(file, kind) {
            Rule::Now => None,
            Rule::Fail(errno) => {
                drop(state);
                return job(Some(errno));
            }
            Rule::Hold => Some(None),
            Rule::Delay(span) => Some(Some(Instant::now() + span.draw(&mut state.rng))),
            Rule::Mix(usual, permille, long) => {
                let long_one = state.rng.u32(..1000) < permille;
                let span = if long_one { long } else { usual };
                Some(Some(Instant::now() + span.draw(&mut state.rng)))
            }
        };
        if let Some(due) = due
            && !state.over
        {
            let n = state.arrived;
            state.arrived += 1;
            let file = file.to_owned();
            let waiting = Waiting {
                file,
                kind,
                due,
                job,
            };
            state.waiting.insert(n, waiting);
            self.bell.notify_all();
            return;
        }
        drop(state);
        job(None);
    }

    /// Sets a rule for requests that come from now on.
    pub fn set(&self, file: &str, kinds: &[Kind], rule: Rule) {
        self.state().rules.set(file, kinds, rule);
    }

    /// Lets waiting requests go on at once; with an error they complete with it and aren't done. Returns
    /// their number.
    pub fn release(&self, file: &str, kinds: &[Kind], errno: Option<i32>) -> usize {
        let mut state = self.state();
        let fitting: Vec<u64> = state
            .waiting
            .iter()
            .filter(|(_, w)| w.fits(file, kinds))
            .map(|(&n, _)| n)
            .collect();
        let mut failed = Vec::new();
        let now = Instant::now();
        for n in &fitting {
            if errno.is_some() {
                failed.extend(state.waiting.remove(n).map(|w| w.job));
            } else if let Some(waiting) = state.waiting.get_mut(n) {
                waiting.due = Some(now);
            }
        }
        self.bell.notify_all();
        drop(state);
        for job in failed {
            job(errno);
        }
        fitting.len()
    }

    /// Numbers of waiting requests: of those that wait for a release, and of those that wait for their time
    /// or are to be done now.
    pub fn waiting(&self, file: &str, kinds: &[Kind]) -> (usize, usize) {
        let state = self.state();
        let mut fitting = state.waiting.values().filter(|w| w.fits(file, kinds));
        let held = fitting.clone().filter(|w| w.due.is_none()).count();
        let delayed = fitting.by_ref().filter(|w| w.due.is_some()).count();
        let fits = |(f, kind): &&(String, Kind)| (file == "*" || f == file) && kinds.contains(kind);
        (held, delayed + state.working.iter().filter(fits).count())
    }

    /// Ends all waiting: requests that wait, and all later ones, complete with an I/O error.
    pub fn end(&self) {
        let mut state = self.state();
        state.over = true;
        let waiting = std::mem::take(&mut state.waiting);
        self.bell.notify_all();
        drop(state);
        for (_, w) in waiting {
            (w.job)(Some(5));
        }
    }
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule").finish_non_exhaustive()
    }
}
