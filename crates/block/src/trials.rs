//! [`Trials`]: a number that is found by trial, as BQL and Kyber find theirs.
//!
//! The rate at which work is done is measured with the number, with another one, and with the number again. The other one takes its place if the rate
//! was higher than both times. The longer nothing is gained, the rarer are trials; a rate that changes much brings the next one at once.

use std::time::{Duration, Instant};

/// The numbers that are tried, and the gain for which one is taken.
#[derive(Clone, Copy, Debug)]
pub struct TrialRules {
    /// Others to try, in turn, as multiples of the number: numerator and denominator.
    pub factors: &'static [(u32, u32)],
    /// Bounds of the number.
    pub least: u32,
    pub most: u32,
    /// The gain for which another one is taken, as a part of the rate.
    pub gain: f64,
    /// Windows between two trials after each factor has failed once; twice as many when each has failed twice, and so on.
    pub calm: u32,
    /// Most windows between two trials.
    pub most_calm: u32,
}

/// Work since its begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Pieces, whose number makes a window long enough.
    pub pieces: u64,
    /// Their size, of which the rate is.
    pub amount: u64,
}

/// Turns of a window: many, since those who work get in and out of step.
const TURNS: u64 = 16;
/// Windows that last less are too noisy.
const SHORTEST: Duration = Duration::from_millis(4);
/// The share of the rate below which a trial ends early.
const HOPELESS: f64 = 0.75;
/// The change of the rate after which there is a trial at once.
const CHANGE: f64 = 0.25;

/// Windows of a trial, in their order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// Not before a trial; windows that are left.
    Calm(u32),
    Before,
    /// The rate before it.
    Trial(f64),
    /// The better of the rates before it, and the trial's.
    After(f64, f64),
}

#[derive(Clone, Copy, Debug)]
struct Window {
    begin: Instant,
    work: Work,
    /// Time of pauses.
    idle: Duration,
    /// The number has just changed: nothing is measured.
    settles: bool,
}

/// See the module's documentation. It knows no clock: the time is told with what happens.
#[derive(Debug)]
pub struct Trials {
    rules: TrialRules,
    /// The number without trials.
    chosen: u32,
    /// The number in force.
    number: u32,
    /// Index of the factor that is next.
    at: usize,
    /// The rate before the last trial.
    known: f64,
    /// Trials in a row that failed.
    failed: u32,
    stage: Stage,
    window: Option<Window>,
}

impl Trials {
    pub fn new(rules: TrialRules, first: u32) -> Trials {
        Trials {
            rules,
            chosen: first,
            number: first,
            at: 0,
            known: 0.0,
            failed: 0,
            stage: Stage::Before,
            window: None,
        }
    }

    /// The number in force.
    #[inline]
    pub fn get(&self) -> u32 {
        self.number
    }

    /// The number that was best so far.
    pub fn chosen(&self) -> u32 {
        self.chosen
    }

    /// Begins anew with another number, for reasons that trials don't know.
    pub fn begin_with(&mut self, number: u32) {
        self.chosen = number;
        self.begin(Stage::Before, number);
    }

    /// There was nothing to do for that long: a rate with long pauses in it says nothing.
    pub fn paused(&mut self, time: Duration) {
        if let Some(window) = &mut self.window {
            window.idle += time;
        }
    }

    /// Ends the window if it is long enough. A `turn` is as many pieces as are in progress at a time.
    pub fn look(&mut self, now: Instant, work: Work, turn: u64) {
        let Some(window) = &self.window else {
            self.window = Some(Window {
                begin: now,
                work,
                idle: Duration::ZERO,
                settles: true,
            });
            return;
        };
        let took = now.saturating_duration_since(window.begin);
        let pieces = work.pieces - window.work.pieces;
        let amount = work.amount - window.work.amount;
        let rate = amount as f64 / took.as_secs_f64().max(1e-9);
        let hopeless = matches!(self.stage, Stage::Trial(before) if rate < before * HOPELESS);
        let (turns, shortest) = match (window.settles, hopeless) {
            (true, _) => (2, Duration::ZERO),
            (false, true) => (TURNS / 4, SHORTEST / 4),
            (false, false) => (TURNS, SHORTEST),
        };
        if pieces < turns * turn || took < shortest {
            return;
        }
        let counts = !window.settles && window.idle <= took / 4;
        self.window = Some(Window {
            begin: now,
            work,
            idle: Duration::ZERO,
            settles: false,
        });
        if counts {
            self.step(rate);
        }
    }

    /// A window has ended.
    fn step(&mut self, rate: f64) {
        let gain = 1.0 + self.rules.gain;
        match self.stage {
            Stage::Calm(left) => {
                let changed =
                    rate > self.known * (1.0 + CHANGE) || rate * (1.0 + CHANGE) < self.known;
                if changed {
                    (self.failed, self.at) = (0, 0);
                }
                self.stage = match left {
                    left if left > 0 && !changed => Stage::Calm(left - 1),
                    _ => Stage::Before,
                };
            }
            Stage::Before => {
                self.known = rate;
                if self.other() == self.chosen {
                    self.at = (self.at + 1) % self.rules.factors.len();
                }
                self.begin(Stage::Trial(rate), self.other());
            }
            Stage::Trial(before) if rate > before * gain => {
                self.begin(Stage::After(before, rate), self.chosen);
            }
            Stage::Trial(_) => self.fail(),
            Stage::After(before, trial) if trial > before.max(rate) * gain => {
                self.chosen = self.other();
                self.failed = 0;
                self.begin(Stage::Before, self.chosen);
            }
            Stage::After(..) => self.fail(),
        }
    }

    /// The trial brought nothing.
    fn fail(&mut self) {
        let factors = self.rules.factors.len();
        self.at = (self.at + 1) % factors;
        self.failed += 1;
        let calm = (self.failed / factors as u32).saturating_mul(self.rules.calm);
        self.begin(Stage::Calm(calm.min(self.rules.most_calm)), self.chosen);
    }

    fn begin(&mut self, stage: Stage, number: u32) {
        self.stage = stage;
        if self.number != number {
            self.number = number;
            self.window = None;
        }
    }

    /// The number to try.
    fn other(&self) -> u32 {
        let (times, by) = self.rules.factors[self.at];
        let other = self.chosen * times / by;
        other.clamp(self.rules.least, self.rules.most)
    }
}
