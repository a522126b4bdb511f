//! The search of a model. Model checks of other crates include this file.

/// Checks all executions with up to `preemptions` preemptions.
pub fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    // The bound is greater than any of these models needs; it stops a model that spins.
    builder.max_branches = 10_000;
    builder.check(model);
}
