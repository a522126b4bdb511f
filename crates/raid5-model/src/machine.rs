//! A model, as far as the search and traces have to know it.

use crate::check::Broken;
use std::fmt;
use std::hash::Hash;

/// The names of a model's steps.
pub trait Vocabulary: Copy + PartialEq + fmt::Display {
    /// All names, each with a sentence.
    const WORDS: &[(&str, &str)];

    /// The place of the step's name among all names.
    fn kind(self) -> usize;

    /// True if nobody has to do it.
    fn is_free(self) -> bool;
}

/// See the module's documentation.
pub trait Machine {
    type State: Copy + Hash;
    type Step: Vocabulary;

    /// The bound that is searched, in words.
    fn bound(&self) -> String;

    /// The state in which a run begins.
    fn first(&self) -> Self::State;

    /// The steps that a state allows.
    fn steps(&self, state: &Self::State, out: &mut Vec<Self::Step>);

    /// The state after a step that the state allows, or the property that the step breaks.
    fn after(&self, state: &Self::State, step: Self::Step) -> Result<Self::State, Broken>;

    /// Checks a state that follows another one.
    fn check(&self, before: &Self::State, after: &Self::State) -> Result<(), Broken>;

    /// Checks a state from which on nobody has to take a step.
    fn check_rest(&self, state: &Self::State) -> Result<(), Broken>;

    /// A number that every step raises.
    fn rank(&self, state: &Self::State) -> u64;
}
