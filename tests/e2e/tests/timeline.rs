//! Timelines of `pvblk trace --perfetto`, read by decoders of others: the sums of slices are the figures of `pvblk latency`.

use pvblk_e2e::daemon::{lab, pvblk};
use pvblk_e2e::outcome::check;
use pvblk_e2e::perfetto::{by_protoc, by_trace_processor, same_sums};
use pvblk_e2e::stage::{unix, uri};
use pvblk_e2e::tools::{need, run};
use pvblk_e2e::{Daemon, Stop, run_all};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
/// Requests of the captured load.
const REQUESTS: &str = "1000";
fn main() -> ExitCode {
    run_all(&[
        ("sums_of_slices_are_those_of_latency", sums),
        ("perfettos_own_engine_sums_the_same", own_engine),
        ("a_running_server_is_drawn", live),
        ("mistakes_are_one_line", mistakes),
    ])
}

/// A capture of the whole ring path, its timeline, and its figures.
struct Sample {
    dir: TempDir,
    timeline: PathBuf,
    figures: Value,
}

fn sample() -> Result<Sample, Stop> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (capture, json) = (path("t"), path("t.json"));
    let seed = pvblk_testing::seed().to_string();
    let args = [
        "trace-sample",
        &capture,
        "--requests",
        REQUESTS,
        "--seed",
        &seed,
    ];
    run(lab(args)?, PATIENCE)?.success()?;
    run(pvblk(["latency", &capture, "--json", &json])?, PATIENCE)?.success()?;
    let timeline = dir.path().join("t.pftrace");
    let to = timeline.display().to_string();
    let said = run(
        pvblk(["trace", "--from", &capture, "--perfetto", &to])?,
        PATIENCE,
    )?;
    let said = said.success()?.stderr;
    check(said.contains("requests on all layers in"), || said)?;
    let figures = serde_json::from_slice(&std::fs::read(json)?)?;
    Ok(Sample {
        dir,
        timeline,
        figures,
    })
}

fn sums() -> Result<(), Stop> {
    need(&["protoc"])?;
    let sample = sample()?;
    let sums = by_protoc(&sample.timeline)?;
    let compared = same_sums(&sums, &sample.figures)?;
    check(compared > 12, || format!("only {compared} sums"))?;
    // The comparison itself must see a difference.
    let mut wrong = sums;
    for ((_, name), sum) in &mut wrong {
        if name == "D2C" {
            sum.1 += sum.1 / 500;
        }
    }
    check(same_sums(&wrong, &sample.figures).is_err(), || {
        "0.2 % more isn't seen".into()
    })
}

fn own_engine() -> Result<(), Stop> {
    need(&["trace_processor_shell"])?;
    let sample = sample()?;
    let query = sample.dir.path().join("sums.sql");
    let sums = by_trace_processor(&sample.timeline, &query)?;
    let compared = same_sums(&sums, &sample.figures)?;
    check(compared > 12, || format!("only {compared} sums"))
}

fn live() -> Result<(), Stop> {
    need(&["protoc"])?;
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let (nbd, control) = (unix(&path("nbd")), unix(&path("ctl")));
    let disk = "vm1=delay:1ms:mem:16M";
    let args = [
        "serve",
        "--disk",
        disk,
        "--nbd",
        &nbd,
        "--control",
        &control,
    ];
    let mut serve = Daemon::start(args)?;
    let target = uri(&path("nbd"), "vm1");
    let args = [
        "bench",
        "--target",
        &target,
        "--rw",
        "randread",
        "--iodepth",
        "8",
    ];
    let mut load = pvblk(args.iter().chain(&["--runtime", "60"]))?
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()?;
    let file = path("live.pftrace");
    let to = file.display().to_string();
    // Until some requests are in it, however busy the machine is.
    let drawn = (0..20).find_map(|_| {
        let args = ["trace", &control, "--seconds", "0.5", "--perfetto", &to];
        let said = pvblk(args).and_then(|c| run(c, PATIENCE)?.success());
        let said = match said {
            Ok(said) => said.stderr,
            Err(e) => return Some(Err(e)),
        };
        let requests: Option<u64> = said.split(' ').next().and_then(|n| n.parse().ok());
        requests.filter(|n| *n > 50).map(Ok)
    });
    let _ = load.kill();
    let _ = load.wait();
    serve.stop()?;
    let Some(requests) = drawn.transpose()? else {
        return Stop::fail("no requests in 20 timelines");
    };
    let sums = by_protoc(&file)?;
    let of = |track: &str, name: &str| {
        let of = sums.iter();
        let of = of.filter(|((t, n), _)| t.starts_with(track) && n == name);
        of.fold((0, 0), |sum, (_, s)| (sum.0 + s.0, sum.1 + s.1))
    };
    let (back, volume) = (
        of("vm1/back queue", "read"),
        of("vm1/delay:1ms:mem:16M queue", "read"),
    );
    check(back.0 + volume.0 == requests && volume.0 > 0, || {
        format!("{back:?} and {volume:?} of {requests}")
    })?;
    let works = of("vm1/back way", "vm1/delay:1ms:mem:16M: works");
    let whole = of("vm1/back way", "read");
    // A modelled device takes 1 ms at least.
    check(works.0 > 0 && works.1 >= works.0 * 1_000_000, || {
        format!("{works:?}")
    })?;
    check(works.1 <= whole.1, || format!("{works:?} of {whole:?}"))
}

fn mistakes() -> Result<(), Stop> {
    let refused = |args: &[&str], why: &str| -> Result<(), Stop> {
        let said = run(pvblk(args)?, PATIENCE)?;
        let failed = !said.status.is_some_and(|s| s.success());
        check(failed && said.stderr.contains(why), || {
            format!("{args:?}: {}", said.stderr)
        })
    };
    let missing = Path::new("/nonexistent/t").display().to_string();
    refused(
        &["trace", "--from", &missing, "--perfetto", "/dev/null"],
        "no such file",
    )?;
    refused(&["trace", "--from", &missing], "--perfetto")?;
    refused(&["trace", "unix:/nonexistent", "--guest", "a=b"], "--from")?;
    refused(
        &["trace", "unix:/x", "--output", "a", "--perfetto", "b"],
        "--output",
    )
}
