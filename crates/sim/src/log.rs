//! The log of a seed: its last events, the number of events of each kind, and the simulated time.

use pvblk_block::{Clock, ManualClock};
use std::collections::VecDeque;
use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of events that are kept.
const KEPT: usize = 48;

/// One event: a text and up to four numbers for it.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Number of the step.
    pub step: u64,
    /// The text; each `#` stands for the next number.
    pub text: &'static str,
    pub numbers: [u64; 4],
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6}  ", self.step)?;
        let mut numbers = self.numbers.iter();
        for c in self.text.chars() {
            match (c, numbers.len()) {
                ('#', 1..) => write!(f, "{}", numbers.next().unwrap_or(&0))?,
                _ => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}

/// Number of events by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(Vec<(&'static str, u64)>);

impl Counts {
    /// Adds `n` events of a kind.
    pub fn add(&mut self, kind: &'static str, n: u64) {
        match self.0.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, sum)) => *sum += n,
            None => self.0.push((kind, n)),
        }
    }

    /// Number of events of a kind.
    pub fn get(&self, kind: &str) -> u64 {
        let found = self.0.iter().find(|(k, _)| *k == kind);
        found.map_or(0, |(_, n)| *n)
    }
}

impl AddAssign<&Counts> for Counts {
    fn add_assign(&mut self, other: &Counts) {
        other.0.iter().for_each(|&(kind, n)| self.add(kind, n));
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.0.iter().map(|(kind, n)| format!("{n} {kind}"));
        f.write_str(&all.collect::<Vec<_>>().join(", "))
    }
}

/// The log of a seed.
#[derive(Debug)]
pub struct Log {
    events: VecDeque<Event>,
    /// Number of the current step.
    pub step: u64,
    /// Steps since any actor did something.
    pub still: u32,
    /// Number of requests so far.
    pub requests: u64,
    /// Prints each event to standard error.
    pub verbose: bool,
    /// Number of events by kind.
    pub counts: Counts,
    /// The clock of the whole simulation. It stands still during a step.
    pub clock: Arc<ManualClock>,
    begin: Instant,
}

impl Log {
    pub fn new(verbose: bool) -> Log {
        let clock = Arc::new(ManualClock::default());
        Log {
            events: VecDeque::new(),
            step: 0,
            still: 0,
            requests: 0,
            verbose,
            counts: Counts::default(),
            begin: clock.now(),
            clock,
        }
    }

    /// Simulated time: the clock's, and a microsecond for each step, since the clock stands still while
    /// actors do something.
    pub fn simulated(&self) -> Duration {
        self.elapsed() + Duration::from_micros(self.step)
    }

    /// Time that has passed on the clock.
    pub fn elapsed(&self) -> Duration {
        self.clock.now().duration_since(self.begin)
    }

    /// Counts an event.
    pub fn count(&mut self, kind: &'static str, n: u64) {
        self.counts.add(kind, n);
    }

    /// Adds an event to the current step.
    #[inline]
    pub fn add<const N: usize>(&mut self, text: &'static str, numbers: [u64; N]) {
        let mut all = [0; 4];
        all[..N].copy_from_slice(&numbers);
        let event = Event {
            step: self.step,
            text,
            numbers: all,
        };
        if self.verbose {
            eprintln!("{event}");
        }
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// One line for each event.
    pub fn lines(&self) -> Vec<String> {
        self.events.iter().map(Event::to_string).collect()
    }
}
