//! The Debian package under a systemd that booted the machine: installed, upgraded under load, watched, stopped and purged (decision 46).

use pvblk_e2e::outcome::{Test, check, run_all};
use pvblk_e2e::package::package;
use pvblk_e2e::vm::{self, Kind, Machine};
use pvblk_e2e::{Stop, need_release};
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

/// Three minutes where nothing else runs.
const LIMIT: Duration = Duration::from_secs(3600);

const TESTS: &[Test] = &[("a_package_lives_and_ends_on_a_booted_debian", life)];

fn main() -> ExitCode {
    run_all(TESTS)
}

fn life() -> Result<(), Stop> {
    need_release()?;
    let package = package()?;
    let dir = tempfile::tempdir()?;
    let first = dir.path().join("pvblk.deb");
    fs::copy(&package.deb, &first)?;
    let machine = Machine {
        added: vec![first, package.next(dir.path())?],
        ..Machine::default()
    };
    let script = vm::named("booted.sh");
    let out = dir.path().join("out");
    let log = vm::script_on(Kind::Debian, &script, &machine, &out, LIMIT)?;
    let steps: Vec<&str> = log
        .lines()
        .filter_map(|l| Some(l.strip_prefix("step ")?.split_once(':')?.0))
        .collect();
    let expected = [
        "install",
        "configure",
        "journal",
        "groups",
        "upgrade",
        "watchdog",
        "security",
        "stop",
        "purge",
    ];
    print!("{log}");
    check(steps == expected, || format!("steps: {steps:?}"))
}
