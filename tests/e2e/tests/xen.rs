//! Guests on the real Xen: stock blkfronts on disks that `pvblk serve --xen` serves in dom0. All of it runs in software, so slowly.

use pvblk_e2e::daemon::{binary, example};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run};
use pvblk_e2e::{Stop, full, run_all, vm};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

fn main() -> ExitCode {
    run_all(&[
        ("stock_guests_use_served_disks", stock_guests),
        ("a_hostile_guest_harms_nobody", hostile_guest),
    ])
}

/// One machine for all steps: its start takes longer than most of them.
fn stock_guests() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let mut added = vec![stripped(&binary()?, dir.path())?];
    let mut steps: Vec<&str> = STEPS.into();
    if full() {
        let mark = dir.path().join("full");
        std::fs::write(&mark, "")?;
        added.push(mark);
        steps.extend(MORE_STEPS);
    }
    round("xen-disk.sh", added, dir.path(), &steps)
}

/// With a front end of our own that breaks rules; each rule has a test without Xen, too, in crates/export/tests/xen_hostile.rs.
fn hostile_guest() -> Result<(), Stop> {
    if !full() {
        return Stop::skip("boots Xen once more; make test-vm (PVBLK_E2E_FULL=1) does it");
    }
    let dir = tempfile::tempdir()?;
    let front = example("hostile_front", "pvblk-export")?;
    let added = [binary()?, front].map(|p| stripped(&p, dir.path()));
    let added = added.into_iter().collect::<Result<_, Stop>>()?;
    round("xen-hostile.sh", added, dir.path(), &HOSTILE_STEPS)
}

/// A copy without symbols, which would take longer to load than everything else.
fn stripped(program: &Path, dir: &Path) -> Result<PathBuf, Stop> {
    need(&["strip"])?;
    let name = program.file_name().unwrap_or_default();
    let copy = dir.join(name);
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&copy).arg(program);
    run(strip, Duration::from_secs(60))?.success()?;
    Ok(copy)
}

/// Runs a script in dom0; it has to pass all steps.
fn round(script: &str, added: Vec<PathBuf>, dir: &Path, steps: &[&str]) -> Result<(), Stop> {
    let machine = vm::Machine {
        added,
        ..vm::Machine::default()
    };
    let (script, out) = (vm::named(script), dir.join("out"));
    let limit = Duration::from_secs(3600);
    let said = vm::script_on(vm::Kind::Xen, &script, &machine, &out, limit)?;
    for step in steps {
        let passed = said.lines().any(|l| {
            l.strip_prefix("passed ")
                .is_some_and(|l| l.starts_with(step))
        });
        check(passed, || format!("no step {step:?} in:\n{said}"))?;
    }
    for line in said.lines().filter(|l| l.starts_with("passed ")) {
        println!("{line}");
    }
    Ok(())
}

const STEPS: [&str; 10] = [
    "a guest with 4 CPUs has 4 queues of 8 pages",
    "ext4, checked data, fstrim, remount and e2fsck with persistent grants",
    "a guest sees its disk grow",
    "latency of guest, ring, back end and volume apart",
    "detached, and gone in the guest",
    "stopped, started and used again, with copied grants",
    "a disk by name is back after its server",
    "a guest destroyed under load, and started again",
    "a guest that reboots has its disk again, by name",
    "the server stops in order",
];

const MORE_STEPS: [&str; 8] = [
    "the same with one queue of one page, and copied grants",
    "two guests at once, and a member of an array lost under one of them",
    "latency of a guest, hop by hop",
    "detached from a guest that stays",
    "a guest is saved under load, and goes on",
    "saved under load, and restored",
    "restored, and attached by hand before it runs",
    "a driver domain serves another guest",
];

const HOSTILE_STEPS: [&str; 14] = [
    "hostile: good",
    "hostile: ring-ref",
    "hostile: event-channel",
    "hostile: grants",
    "hostile: segments",
    "hostile: index",
    "hostile: revoked",
    "hostile: garbage",
    "hostile: storm",
    "hostile: states",
    "hostile: vanish",
    "the other guest's disk went on",
    "the log names the rules",
    "the server stops in order",
];
