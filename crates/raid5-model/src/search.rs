//! Breadth-first search of all states.
//!
//! A state is remembered by 64 bits of a hash. Among two million states, two that are taken for one are to be expected in one of nine
//! million searches. The step by which a state was reached first is kept for the trace.

use crate::check::{Broken, Property};
use crate::machine::{Machine, Vocabulary};
use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// The outcome of a search that found nothing wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub states: u64,
    pub steps: u64,
    /// Length of the longest of the shortest ways to a state.
    pub depth: u64,
    /// States in which nobody has to do anything.
    pub rests: u64,
    /// Kinds of steps that were taken, as a mask.
    pub kinds: u64,
}

impl Found {
    /// Adds another search's outcome.
    pub fn add(&mut self, other: &Found) {
        self.states += other.states;
        self.steps += other.steps;
        self.depth = self.depth.max(other.depth);
        self.rests += other.rests;
        self.kinds |= other.kinds;
    }

    /// Steps of a model that no state had.
    pub fn never<S: Vocabulary>(&self) -> Vec<&'static str> {
        let words = S::WORDS.iter().enumerate();
        let never = words.filter(|(n, _)| self.kinds & (1 << n) == 0);
        never.map(|(_, (word, _))| *word).collect()
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} states, {} steps, {} deep, {} at rest",
            self.states, self.steps, self.depth, self.rests
        )
    }
}

/// A property that doesn't hold, and the shortest way there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace<S> {
    pub bound: String,
    pub broken: Broken,
    pub steps: Vec<S>,
    /// States that were seen before.
    pub states: u64,
}

impl<S: fmt::Display> fmt::Display for Trace<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.broken)?;
        writeln!(f, "  with {}, after {} states:", self.bound, self.states)?;
        self.steps
            .iter()
            .try_for_each(|step| writeln!(f, "  {step}"))
    }
}

/// Seen states: each with the one before it and the step between.
struct Seen<S> {
    hashes: HashSet<u64, BuildHasherDefault<AsItIs>>,
    /// `None`: the first state.
    ways: Vec<Option<(u32, S)>>,
}

impl<S: Copy> Seen<S> {
    /// The steps to the state with this number.
    fn way(&self, mut at: u32) -> Vec<S> {
        let mut steps = Vec::new();
        while let Some((before, step)) = self.ways[at as usize] {
            steps.push(step);
            at = before;
        }
        steps.reverse();
        steps
    }
}

/// Searches all states of a bound. The error is the first property that doesn't hold, by the shortest way.
pub fn search<M: Machine>(model: &M) -> Result<Found, Box<Trace<M::Step>>> {
    let first = model.first();
    let mut seen = Seen {
        hashes: HashSet::default(),
        ways: vec![None],
    };
    seen.hashes.insert(hash(&first));
    let mut found = Found {
        states: 1,
        ..Found::default()
    };
    let mut level = vec![(0, first)];
    let mut steps = Vec::new();
    while !level.is_empty() {
        let mut next = Vec::new();
        for (number, state) in &level {
            let broken = |broken, last: Option<M::Step>, seen: &Seen<M::Step>| {
                let mut steps = seen.way(*number);
                steps.extend(last);
                Box::new(Trace {
                    bound: model.bound(),
                    broken,
                    steps,
                    states: seen.ways.len() as u64,
                })
            };
            steps.clear();
            model.steps(state, &mut steps);
            if steps.iter().all(|step| step.is_free()) {
                found.rests += 1;
                model
                    .check_rest(state)
                    .map_err(|b| broken(b, None, &seen))?;
            }
            for &step in &steps {
                found.steps += 1;
                found.kinds |= 1 << step.kind();
                let after = model.after(state, step);
                let after = after.map_err(|b| broken(b, Some(step), &seen))?;
                if model.rank(&after) <= model.rank(state) {
                    let text = || format!("{step} leads back: a run may go on for ever");
                    let b = Broken::new(Property::EveryoneEnds, text);
                    return Err(broken(b, Some(step), &seen));
                }
                if !seen.hashes.insert(hash(&after)) {
                    continue;
                }
                let checked = model.check(state, &after);
                checked.map_err(|b| broken(b, Some(step), &seen))?;
                let at = seen.ways.len() as u32;
                seen.ways.push(Some((*number, step)));
                next.push((at, after));
            }
        }
        found.depth += u64::from(!next.is_empty());
        level = next;
    }
    found.states = seen.ways.len() as u64;
    Ok(found)
}

fn hash(state: &impl Hash) -> u64 {
    let mut hasher = Folding(0x9e37_79b9_7f4a_7c15);
    state.hash(&mut hasher);
    hasher.finish()
}

/// Multiplies to 128 bits and folds: fast, and good enough for small numbers in a fixed order.
struct Folding(u64);

impl Folding {
    fn add(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0xa076_1d64_78bd_642f;
        self.0 = (product as u64 ^ (product >> 64) as u64).wrapping_add(0xe703_7ed1_a0b4_28db);
    }
}

impl Hasher for Folding {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.add(u64::from(n));
    }

    fn write_usize(&mut self, n: usize) {
        self.add(n as u64);
    }

    fn write_isize(&mut self, n: isize) {
        self.add(n as u64);
    }
}

/// For numbers that are hashes already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}
