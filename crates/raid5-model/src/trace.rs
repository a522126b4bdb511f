//! Conformance of traces: a trace is a list of steps, and every step has to be one that the model allows at its place.
//!
//! Code that emits these steps, and devices that do, can be checked so, run by run: whatever order they took, it is one of those that
//! were searched, as long as the run is within a bound.

use crate::check::Broken;
use crate::machine::Machine;
use std::fmt;

/// A step that the model doesn't allow. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused<S> {
    /// Its place in the trace, from 0.
    pub at: usize,
    pub step: S,
    /// The property that it breaks; `None`: the state doesn't have the step.
    pub broken: Option<Broken>,
    /// The steps that the state has.
    pub allowed: Vec<S>,
}

impl<S: fmt::Display> fmt::Display for Refused<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, {}: ", self.at, self.step)?;
        if let Some(broken) = &self.broken {
            return write!(f, "it breaks {broken}");
        }
        let allowed: Vec<String> = self.allowed.iter().map(S::to_string).collect();
        write!(
            f,
            "it isn't allowed here; allowed are: {}",
            allowed.join(", ")
        )
    }
}

/// Follows a trace from the first state; returns the last one.
pub fn replay<M: Machine>(model: &M, steps: &[M::Step]) -> Result<M::State, Box<Refused<M::Step>>> {
    let mut state = model.first();
    let mut allowed = Vec::new();
    for (at, &step) in steps.iter().enumerate() {
        allowed.clear();
        model.steps(&state, &mut allowed);
        let refuse = |broken| {
            Box::new(Refused {
                at,
                step,
                broken,
                allowed: allowed.clone(),
            })
        };
        if !allowed.contains(&step) {
            return Err(refuse(None));
        }
        let after = model.after(&state, step).map_err(|b| refuse(Some(b)))?;
        model.check(&state, &after).map_err(|b| refuse(Some(b)))?;
        state = after;
    }
    Ok(state)
}
