//! The search of the bounds for each run, planted bugs, and traces.

use pvblk_raid5_model::{
    Bound, Broken, Bug, Model, Property, Step, bound, replay, search, shape, some,
};
use support::{all_hold, are_found, is_found_only_where_it_is, page_states};

mod support;

fn planted(bug: Bug) -> Model {
    Model {
        bound: bug.bound(),
        bug: Some(bug),
    }
}

#[test]
fn all_properties_hold() {
    // That step exists for a planted bug only.
    let models = some().into_iter().map(|bound| Model { bound, bug: None });
    all_hold(models, &["parked"]);
}

#[test]
fn planted_bugs_are_found() {
    are_found(
        Bug::ALL
            .iter()
            .map(|bug| (planted(*bug), bug.name(), bug.breaks())),
    );
}

#[test]
fn every_property_has_a_bug_that_breaks_it() {
    for property in Property::OF_WRITES {
        let breaks = |bug: &&Bug| bug.breaks() == *property;
        let bug = Bug::ALL.iter().find(breaks);
        assert!(bug.is_some(), "nothing breaks {}", property.name());
    }
}

#[test]
fn a_bug_is_not_found_where_it_is_not() {
    for &bug in Bug::ALL {
        let clean = Model {
            bound: bug.bound(),
            bug: None,
        };
        is_found_only_where_it_is(&planted(bug), &clean, bug.name());
    }
}

#[test]
fn the_page_states_every_property() {
    page_states(
        "0048-stripes-own-themselves.md",
        Property::OF_WRITES,
        Bug::ALL.len(),
    );
}

fn steps(text: &str) -> Vec<Step> {
    let read = |line: &str| Step::read(line).unwrap_or_else(|| panic!("{line:?} is no step"));
    let lines = text.split(',');
    lines.map(read).collect()
}

/// Two writes of one stripe: the second joins while blocks are read for the first.
const TOGETHER: &str = "write submitted 0, epoch checked 0, write submitted 1, reads ended 0, closed 0, \
    log begun 2, log written 2, data begun 0, data ended 0";

fn two() -> Model {
    Model {
        bound: bound(&["0:a", "0:b"]),
        bug: None,
    }
}

#[test]
fn a_trace_of_a_batch_is_allowed() {
    let end = replay(&two(), &steps(TOGETHER)).expect("the model allows it");
    // Both are acknowledged by one batch.
    assert!(end.writes.iter().all(|w| w.left == 0), "{end:?}");
    // Lines of a trace are read as they are written.
    for step in steps(TOGETHER) {
        assert_eq!(Step::read(&step.to_string()), Some(step));
    }
}

#[test]
fn a_trace_that_leaves_out_or_swaps_steps_is_refused() {
    let all = steps(TOGETHER);
    for n in 0..all.len() - 1 {
        // It doesn't matter when the second one joins, until the batch is closed.
        if all[n] == Step::Submit(1) {
            continue;
        }
        let mut without = all.clone();
        without.remove(n);
        let refused = replay(&two(), &without).expect_err("a step is missing");
        // The second write may come before, as it may at any time.
        assert!(
            refused.at == n || all[n + 1] == Step::Submit(1),
            "{refused}"
        );
        assert!(refused.allowed.contains(&all[n]), "{refused}");
    }
    let early = TOGETHER.replace("log written 2, data begun 0", "data begun 0, log written 2");
    let refused = replay(&two(), &steps(&early)).expect_err("data before the log");
    assert_eq!(
        refused.to_string(),
        "step 6, data begun 0: it isn't allowed here; allowed are: device dies 0, device dies 1, device dies 2, log written 2"
    );
}

#[test]
fn a_smaller_bound_is_counted_by_hand() {
    // One write and nothing else: it is submitted, claimed, read for, closed, logged and written, in one order.
    let one = Bound {
        flush: false,
        failure: false,
        spare: false,
        spare_fails: false,
        ..bound(&["0:a"])
    };
    let found = search(&Model {
        bound: one,
        bug: None,
    })
    .expect("nothing is wrong");
    assert_eq!((found.states, found.steps, found.depth), (9, 8, 8));
    assert_eq!(found.rests, 2);
}

#[test]
fn writes_are_read() {
    for text in ["0:a", "1:b/2!", "1:ab"] {
        assert!(shape(text).is_some(), "{text}");
    }
    for text in ["", "0", "2:a", "0:c", "0:a/3", "x:a"] {
        assert!(shape(text).is_none(), "{text}");
    }
    let broken = Broken {
        property: Property::HoleIsLogged,
        text: "so".into(),
    };
    assert_eq!(broken.to_string(), "hole-is-logged: so");
}
