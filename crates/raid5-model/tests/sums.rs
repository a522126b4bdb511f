//! The search of the model of checksums for each run, and planted bugs.

use pvblk_raid5_model::sums::{Bug, Model, Step, bound, some};
use pvblk_raid5_model::{Found, Property, replay, search};
use std::time::Instant;

fn clean(words: &str) -> Model {
    let bound = bound(words);
    Model {
        bound: bound.expect("words of a bound"),
        bug: None,
    }
}

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
    // A search that takes no step finds nothing wrong. This one exists for a planted bug only.
    assert_eq!(sum.never::<Step>(), ["sums set"]);
}

#[test]
fn planted_bugs_are_found() {
    let mut wrong = Vec::new();
    for &bug in Bug::ALL {
        let begin = Instant::now();
        match search(&planted(bug)) {
            Err(trace) if trace.broken.property == bug.breaks() => {
                print!("{} in {:?}: {trace}", bug.name(), begin.elapsed());
            }
            Err(trace) => wrong.push(format!("{}: {trace}", bug.name())),
            Ok(found) => wrong.push(format!("{} is not found: {found}", bug.name())),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_property_has_a_bug_that_breaks_it() {
    for property in Property::OF_SUMS {
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
        let planted = planted(bug);
        match replay(&planted, &trace.steps) {
            Err(refused) => assert_eq!(refused.broken.as_ref(), Some(&trace.broken)),
            // Only the state after it shows that somebody waits for ever.
            Ok(state) => assert_eq!(planted.check_rest(&state), Err(trace.broken)),
        }
        // And the whole bound has nothing else that breaks.
        assert!(search(&clean).is_ok(), "{}", bug.name());
    }
}

#[test]
fn the_page_states_every_property() {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/decisions/0052-checksums.md"
    );
    let page = std::fs::read_to_string(page).expect("the page is readable");
    for property in Property::OF_SUMS {
        let row = format!("| `{}` | {} |", property.name(), property.about());
        assert!(page.contains(&row), "the page lacks {row}");
    }
    let bugs = format!("Each of {} planted bugs", Bug::ALL.len());
    assert!(page.contains(&bugs), "the page lacks {bugs:?}");
}

#[test]
fn a_smaller_bound_is_counted_by_hand() {
    // One write: it is asked, has the word, gets bit and group, is opened, reads, writes and ends, in one order.
    let found = search(&clean("0:a")).expect("nothing is wrong");
    assert_eq!((found.states, found.steps, found.depth), (8, 7, 7));
    assert_eq!(found.rests, 2);
}

fn steps(text: &str) -> Vec<Step> {
    let read = |line: &str| Step::read(line).unwrap_or_else(|| panic!("{line:?} is no step"));
    text.split(',').map(read).collect()
}

/// A block with a flipped bit is read by a batch, which calculates and writes it.
const REPAIR: &str = "bit flips 0, request asked 0, word claimed 0, prepared 0, opened 0, read 0, \
    prepared 0, opened 0, read 0, repair ended 0, opened 0, read 0";

#[test]
fn a_flipped_bit_is_made_right() {
    let model = clean("0:a? flip");
    let end = replay(&model, &steps(REPAIR)).expect("the model allows it");
    assert_eq!(end.media[0][0].now, model.first().media[0][0].now);
    for step in steps(REPAIR) {
        assert_eq!(Step::read(&step.to_string()), Some(step));
    }
    // The repair waits for its bit.
    let early = REPAIR.replacen(
        "prepared 0, opened 0, read 0, repair",
        "opened 0, read 0, repair",
        1,
    );
    let refused = replay(&model, &steps(&early)).expect_err("no bit");
    assert_eq!(refused.at, 6, "{refused}");
}

#[test]
fn words_of_bounds_are_read() {
    for words in [
        "0:a 0:b? sweep cut",
        "1:ab modify apart flip sum lost all astray twice",
        "0:a missing0 unknown1",
    ] {
        let read = bound(words).expect(words);
        assert_eq!(bound(&read.to_string()), Some(read), "{words}");
    }
    for words in ["2:a", "0:ab?", "0:c", "missing3", "x", "0:a 0:a 0:a 0:a"] {
        assert_eq!(bound(words), None, "{words}");
    }
}
