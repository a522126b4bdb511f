//! Bugs that are planted in the command: the tests have to find them.

use crate::served::{Bug, plant};
use crate::{one_writer, sizes};
use pvblk_e2e::Stop;
use std::path::PathBuf;

type Test = fn() -> Result<(), Stop>;

/// Each with the test that finds it, and a part of that test's words.
const BUGS: &[(&str, Test, &str)] = &[
    ("taken-unblocked", one_writer::replaced, "was acknowledged"),
    (
        "lock-unchecked",
        one_writer::broken_without_a_block,
        "the load ends",
    ),
    ("watch-missed", sizes::resize, "the new size"),
];

pub fn found() -> Result<(), Stop> {
    let Some(binary) = std::env::var_os("PVBLK_PLANTED_BIN").map(PathBuf::from) else {
        return Stop::skip(
            "PVBLK_PLANTED_BIN names no command with planted bugs, as `make test-ceph` builds one",
        );
    };
    for &(name, test, words) in BUGS {
        let binary = binary.clone();
        plant(Some(Bug { name, binary }));
        let outcome = test();
        plant(None);
        match outcome {
            Err(Stop::Fail(why)) if why.contains(words) => println!("{name} is found: {why}"),
            other => return Stop::fail(format!("{name} isn't found: {other:?}")),
        }
    }
    Ok(())
}
