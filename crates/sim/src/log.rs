//! What happened, cheap enough to be kept always.

use std::collections::VecDeque;
use std::fmt;

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

/// The last events.
#[derive(Debug, Default)]
pub struct Log {
    events: VecDeque<Event>,
    /// Number of the step that is under way.
    pub step: u64,
    /// Print each event to standard error.
    pub verbose: bool,
}

impl Log {
    /// An empty one.
    pub fn new(verbose: bool) -> Log {
        Log {
            verbose,
            ..Log::default()
        }
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
