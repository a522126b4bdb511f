//! What happened in a seed: its last events, how often each kind happened, and how much time passed.

use pvblk_block::{Clock, ManualClock};
use std::collections::VecDeque;
use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Events kept.
const KEPT: usize = 48;

/// One event: what, and up to three numbers that its text names.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Number of the step.
    pub step: u64,
    /// Text; each `#` stands for the next number.
    pub text: &'static str,
    /// The numbers.
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

/// How often each kind of event happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(Vec<(&'static str, u64)>);

impl Counts {
    /// Adds to a kind.
    pub fn add(&mut self, kind: &'static str, n: u64) {
        match self.0.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, sum)) => *sum += n,
            None => self.0.push((kind, n)),
        }
    }

    /// How often a kind happened.
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

/// See the module's documentation.
#[derive(Debug)]
pub struct Log {
    events: VecDeque<Event>,
    /// Number of the step that is under way.
    pub step: u64,
    /// Steps since anything moved.
    pub still: u32,
    /// Requests so far.
    pub requests: u64,
    /// Print each event to standard error.
    pub verbose: bool,
    /// Kinds of events that were counted.
    pub counts: Counts,
    /// The time of everything in this seed. It stands still during a step.
    pub clock: Arc<ManualClock>,
    begin: Instant,
}

impl Log {
    /// An empty one.
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

    /// Time that has passed: the clock's, and a microsecond for each step, since a clock stands still while actors move.
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

    /// Adds an event to the step under way.
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
