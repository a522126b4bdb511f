//! fio writes, reads back and checks every block's checksum, on four connections at once.

use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need_fio_nbd, run, tool};
use pvblk_e2e::{MIB, Route, Stage, Stop, full, run_all};
use serde_json::Value;
use std::process::ExitCode;
use std::time::Duration;

const JOBS: u64 = 4;

fn main() -> ExitCode {
    run_all(&[
        ("fio_verifies_over_nbd", || verified(Route::Nbd)),
        ("fio_verifies_over_rings", || verified(Route::Rings)),
    ])
}

/// Mixed sizes, mixed reads and writes; each job has its own range, so that it knows the data that it must
/// read.
fn verified(route: Route) -> Result<(), Stop> {
    need_fio_nbd()?;
    let seconds = if full() { 60 } else { 10 };
    let bytes = 256 * MIB;
    let mut stage = Stage::new(route, bytes)?;
    let part = bytes / JOBS;
    let mut args: Vec<String> = [
        "--name=verify",
        "--ioengine=nbd",
        "--rw=randrw",
        "--rwmixread=30",
        "--bssplit=4k/40:8k/10:16k/10:64k/20:128k/10:1m/10",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_state_save=0",
        "--verify_fatal=1",
        // Check soon after writing as well, while other writes are in flight; two requests to the same
        // place at once have no defined result, so fio must not make any.
        "--verify_backlog=256",
        "--serialize_overlap=1",
        "--time_based=1",
        "--output-format=json",
        "--fsync=64",
    ]
    .map(String::from)
    .into();
    args.extend([
        format!("--uri={}", stage.uri()),
        format!("--numjobs={JOBS}"),
        format!("--size={part}"),
        format!("--offset_increment={part}"),
        format!("--runtime={seconds}"),
    ]);
    let finished = run(tool("fio", &args), Duration::from_secs(seconds + 90))?.success()?;
    // fio prints notes before its JSON now and then.
    let json = finished
        .stdout
        .find('{')
        .map_or("", |at| &finished.stdout[at..]);
    let report: Value = serde_json::from_str(json)?;
    let jobs = report["jobs"].as_array().cloned().unwrap_or_default();
    check(jobs.len() as u64 == JOBS, || {
        format!("{} jobs reported", jobs.len())
    })?;
    for job in &jobs {
        let done = |kind: &str| job[kind]["total_ios"].as_u64().unwrap_or(0);
        check(
            job["error"] == 0 && done("read") > 0 && done("write") > 0,
            || format!("a job failed or stood still: {job:#}"),
        )?;
    }
    stage.stop()
}
