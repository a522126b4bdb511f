//! The search of the model of checksums for each run, and planted bugs.

use pvblk_raid5_model::sums::{Bug, Model, Step, bound, some};
use pvblk_raid5_model::{Property, replay, search};
use support::{all_hold, are_found, is_found_only_where_it_is, page_states};

mod support;

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
    // That step exists for a planted bug only.
    let models = some().into_iter().map(|bound| Model { bound, bug: None });
    all_hold(models, &["sums set"]);
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
    for property in Property::OF_SUMS {
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
        // And the whole bound has nothing else that breaks.
        assert!(search(&clean).is_ok(), "{}", bug.name());
    }
}

#[test]
fn the_page_states_every_property() {
    page_states("0052-checksums.md", Property::OF_SUMS, Bug::ALL.len());
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
