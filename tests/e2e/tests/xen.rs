//! Guests on the real Xen: stock blkfronts on disks that `pvblk serve --xen` serves in dom0. All of it runs in software, so slowly.

use pvblk_e2e::daemon::binary;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run};
use pvblk_e2e::{Stop, full, run_all, vm};
use std::process::{Command, ExitCode};
use std::time::Duration;

fn main() -> ExitCode {
    run_all(&[("stock_guests_use_served_disks", stock_guests)])
}

/// One machine for all steps: its start takes longer than most of them.
fn stock_guests() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    // Symbols would take longer to load than everything else.
    let stripped = dir.path().join("pvblk");
    need(&["strip"])?;
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&stripped).arg(binary()?);
    run(strip, Duration::from_secs(60))?.success()?;
    let mut added = vec![stripped];
    let mut steps: Vec<&str> = STEPS.into();
    if full() {
        let mark = dir.path().join("full");
        std::fs::write(&mark, "")?;
        added.push(mark);
        steps.extend(MORE_STEPS);
    }
    let machine = vm::Machine {
        added,
        ..vm::Machine::default()
    };
    let script = vm::named("xen-disk.sh");
    let out = dir.path().join("out");
    let limit = Duration::from_secs(1500);
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

const STEPS: [&str; 9] = [
    "a guest with 4 CPUs has 4 queues of 8 pages",
    "ext4, checked data, fstrim, remount and e2fsck with persistent grants",
    "a guest sees its disk grow",
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
