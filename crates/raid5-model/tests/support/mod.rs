//! Checks of a model, whichever it is: its properties hold, and each of its planted bugs is found by one of them.

use pvblk_raid5_model::{Found, Machine, Property, replay, search};
use std::fmt::Debug;
use std::time::Instant;

/// Searches all of these models; only the steps of these names are never taken. A search that takes no step finds nothing wrong.
pub fn all_hold<M: Machine>(models: impl IntoIterator<Item = M>, never: &[&str]) {
    let begin = Instant::now();
    let mut sum = Found::default();
    for model in models {
        match search(&model) {
            Ok(found) => {
                println!("{}: {found}", model.bound());
                sum.add(&found);
            }
            Err(trace) => panic!("{trace}"),
        }
    }
    println!("{sum}; {:?}", begin.elapsed());
    assert_eq!(sum.never::<M::Step>(), never);
}

/// Searches models with planted bugs, each with the name and the property of its bug, which has to find it.
pub fn are_found<M: Machine>(planted: impl IntoIterator<Item = (M, &'static str, Property)>) {
    let mut wrong = Vec::new();
    for (model, name, breaks) in planted {
        let begin = Instant::now();
        match search(&model) {
            Err(trace) if trace.broken.property == breaks => {
                print!("{name} in {:?}: {trace}", begin.elapsed());
            }
            Err(trace) => wrong.push(format!("{name}: {trace}")),
            Ok(found) => wrong.push(format!("{name} is not found: {found}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The trace of a planted bug breaks what the search said, and nothing on the model without the bug.
pub fn is_found_only_where_it_is<M>(planted: &M, clean: &M, name: &str)
where
    M: Machine<State: Debug>,
{
    let Err(trace) = search(planted) else {
        panic!("{name} is not found");
    };
    if let Err(refused) = replay(clean, &trace.steps) {
        assert_eq!(refused.broken, None, "{name}");
    }
    match replay(planted, &trace.steps) {
        Err(refused) => assert_eq!(refused.broken.as_ref(), Some(&trace.broken)),
        // Only the state after it shows that somebody waits for ever.
        Ok(state) => assert_eq!(planted.check_rest(&state), Err(trace.broken)),
    }
}

/// The page of decisions has each property's sentence, and the number of planted bugs.
pub fn page_states(page: &str, properties: &[Property], bugs: usize) {
    let path = format!("{}/../../docs/decisions/{page}", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(path).expect("the page is readable");
    for property in properties {
        let row = format!("| `{}` | {} |", property.name(), property.about());
        assert!(page.contains(&row), "the page lacks {row}");
    }
    let bugs = format!("Each of {bugs} planted bugs");
    assert!(page.contains(&bugs), "the page lacks {bugs:?}");
}
