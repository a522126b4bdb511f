//! The search of the bounds for each run, planted bugs, and traces.

use pvblk_raid5_model::{
    Bound, Broken, Bug, Found, Model, Property, Step, bound, replay, search, shape, some,
};
use std::time::Instant;

fn planted(bug: Bug) -> Model {
    Model {
        bound: bug.bound(),
        bug: Some(bug),
    }
}

#[test]
fn all_properties_hold() {
    let begin = Instant::now();
    let mut sum = Found::default();
    for bound in some() {
        match search(&Model { bound, bug: None }) {
            Ok(found) => {
                println!("{bound}: {found}");
                sum.add(&found);
            }
            Err(trace) => panic!("{trace}"),
        }
    }
    println!("{sum}; {:?}", begin.elapsed());
    // A search that takes no step finds nothing wrong. These two exist for planted bugs only.
    assert_eq!(sum.never::<Step>(), ["parked"]);
}

#[test]
fn planted_bugs_are_found() {
    let mut wrong = Vec::new();
    for &bug in Bug::ALL {
        match search(&planted(bug)) {
            Err(trace) if trace.broken.property == bug.breaks() => {
                print!("{}: {trace}", bug.name());
            }
            Err(trace) => wrong.push(format!("{}: {trace}", bug.name())),
            Ok(found) => wrong.push(format!("{} is not found: {found}", bug.name())),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
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
    // The traces of planted bugs, on the model without the bug: no step of them breaks a property.
    for &bug in Bug::ALL {
        let Err(trace) = search(&planted(bug)) else {
            panic!("{} is not found", bug.name());
        };
        let clean = Model {
            bound: bug.bound(),
            bug: None,
        };
        if let Err(refused) = replay(&clean, &trace.steps) {
            assert_eq!(refused.broken, None, "{}", bug.name());
        }
        let planted = Model {
            bug: Some(bug),
            ..clean
        };
        match replay(&planted, &trace.steps) {
            Err(refused) => assert_eq!(refused.broken.as_ref(), Some(&trace.broken)),
            // Only the state after it shows that somebody waits for ever.
            Ok(state) => assert_eq!(planted.check_rest(&state), Err(trace.broken)),
        }
    }
}

#[test]
fn the_page_states_every_property() {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/decisions/0048-stripes-own-themselves.md"
    );
    let page = std::fs::read_to_string(page).expect("the page is readable");
    for property in Property::OF_WRITES {
        let row = format!("| `{}` | {} |", property.name(), property.about());
        assert!(page.contains(&row), "the page lacks {row}");
    }
    let bugs = format!("Each of {} planted bugs", Bug::ALL.len());
    assert!(page.contains(&bugs), "the page lacks {bugs:?}");
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
