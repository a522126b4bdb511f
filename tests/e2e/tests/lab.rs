//! The experiments run from end to end and write their samples. Their figures are for `make lab`, not for a
//! test.

use pvblk_e2e::daemon::{lab, pvblk};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run};
use pvblk_e2e::{Stop, run_all, vm};
use serde_json::Value;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    run_all(&[
        ("rings_fills_its_tables", rings),
        ("queues_fills_its_tables", queues),
        ("fio_is_compared_with_bench", fio),
        ("md_is_measured_beside_us", md),
        ("a_shape_that_is_not_seen_fails", unseen_shape),
        ("the_command_names_the_lab", named_by_the_command),
    ])
}

/// Runs `pvblk-lab ARGS --json`; returns its JSON and its output.
fn experiment(args: &[&str], file: &Path) -> Result<(Value, String), Stop> {
    let shown = file.display().to_string();
    let all = [args, &["--json", &shown]].concat();
    let finished = run(lab(&all)?, Duration::from_secs(300))?.success()?;
    Ok((
        serde_json::from_slice(&std::fs::read(file)?)?,
        finished.stdout,
    ))
}

/// The file has this many charts, whose page can be made.
fn has_charts(record: &Value, file: &Path, count: usize) -> Result<(), Stop> {
    let charts = record["report"]["charts"].as_array().map_or(0, Vec::len);
    check(charts == count, || format!("{charts} charts"))?;
    let page = file.with_extension("html");
    let (file, to) = (file.display().to_string(), page.display().to_string());
    let command = pvblk(["report", &file, "--output", &to])?;
    run(command, Duration::from_secs(60))?.success()?;
    let page = std::fs::read_to_string(page)?;
    // Each for wide windows and for phones.
    let drawn = page.matches("<svg ").count();
    check(drawn == 2 * count, || format!("{drawn} pictures"))?;
    let text = record["report"]["text"].as_str().unwrap_or_default();
    let line = text.lines().find(|l| l.contains("k/s")).unwrap_or("none");
    let line = line.replace('&', "&amp;").replace('<', "&lt;");
    check(page.contains(&line), || format!("no line {line}"))
}

/// Every entry of `list` has `n` samples under each of `names`, with a rate above 0.
fn sampled(list: &Value, names: &[&str], n: usize) -> Result<(), Stop> {
    let entries = list.as_array().cloned().unwrap_or_default();
    check(!entries.is_empty(), || "an empty table".into())?;
    for entry in &entries {
        for name in names {
            let samples = entry[*name].as_array().cloned().unwrap_or_default();
            let good = |s: &Value| s["iops"].as_f64().is_some_and(|r| r > 0.0);
            check(samples.len() == n && samples.iter().all(good), || {
                format!("{name} of {entry}")
            })?;
        }
    }
    Ok(())
}

fn rings() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("r.json");
    let args = ["rings", "--quick", "--runs", "1", "--seconds", "0.05"];
    let (record, text) = experiment(&args, &file)?;
    let result = &record["result"];
    for table in ["random", "sizes", "sequential", "batched"] {
        sampled(
            &result[table],
            &["one_page", "eight_pages", "eight_again"],
            1,
        )?;
    }
    sampled(&result["elevator"], &["one_page", "eight_pages"], 1)?;
    check(text.contains("209k/s") && text.contains("rrqm/s"), || text)?;
    has_charts(&record, &file, 2)
}

fn queues() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("q.json");
    let args = ["queues", "--quick", "--runs", "1", "--seconds", "0.05"];
    let (record, text) = experiment(&args, &file)?;
    let result = &record["result"];
    for table in ["null", "shapes"] {
        sampled(
            &result[table],
            &["one_queue", "several", "several_again"],
            1,
        )?;
    }
    sampled(&result["serial"], &["samples"], 1)?;
    check(text.contains("CPUs"), || text)?;
    has_charts(&record, &file, 1)
}

fn fio() -> Result<(), Stop> {
    need(&["fio"])?;
    let dir = tempfile::tempdir()?;
    let args = ["fio", "--runs", "3", "--seconds", "1"];
    let (record, _) = experiment(&args, &dir.path().join("f.json"))?;
    sampled(&record["result"]["jobs"], &["fio", "bench"], 3)
}

/// One cell: the guest takes orders, its answers can be parsed, and md's parity is right
/// afterwards.
fn md() -> Result<(), Stop> {
    need(&["setpriv", "taskset"])?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("md.json");
    let (uml, json) = (vm::starter(vm::Kind::Uml), file.display().to_string());
    let uml = uml.display().to_string();
    let which = ["--cells", "4 KiB random", "--depths", "32"];
    let how = ["--runs", "1", "--seconds", "0.3", "--uml", &uml];
    let args = [&["md", "--json", &json], &which[..], &how[..]].concat();
    // For the guest's packages, if they aren't there.
    let finished = run(lab(args)?, Duration::from_secs(900))?;
    let mut said = finished.stderr.lines();
    if let Some(line) = said.find(|l| l.contains("no guest: ")) {
        return Stop::skip(line.trim_start_matches("pvblk-lab: "));
    }
    let text = finished.success()?.stdout;
    let record: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    let result = &record["result"];
    let about = result["guest"].as_str().unwrap_or_default();
    check(
        result["mismatches"] == 0 && about.contains("raid5\n4\n65536\nresync\n"),
        || format!("another array, or wrong parity: {result}"),
    )?;
    let samples = result["cells"][0]["samples"].as_array().cloned();
    let samples = samples.unwrap_or_default();
    let good = |s: &Value| {
        let figure = |name: &str| s[name][0].as_f64().unwrap_or(0.0);
        (1.0..1e8).contains(&figure("rate")) && (0.01..1e5).contains(&figure("cpu_us"))
    };
    check(samples.len() == 8 && samples.iter().all(good), || {
        format!("{samples:?}")
    })?;
    check(text.contains("| 4 KiB random | 32 "), || text)
}

/// A table can't pass by itself: samples of two milliseconds, of which the device's first 0.21 pass in silence, don't reach
/// its cap.
fn unseen_shape() -> Result<(), Stop> {
    let args = [
        "rings",
        "--quick",
        "--runs",
        "1",
        "--seconds",
        "0.002",
        "--slower",
        "1",
        "--check",
    ];
    let finished = run(lab(args)?, Duration::from_secs(300))?;
    check(
        finished.status.is_some_and(|s| s.code() == Some(1))
            && finished.stdout.contains("FAIL")
            && finished.stderr.contains("were not seen"),
        || {
            format!(
                "{:?}\n{}\n{}",
                finished.status, finished.stdout, finished.stderr
            )
        },
    )
}

/// Earlier versions had the experiments in the command itself.
fn named_by_the_command() -> Result<(), Stop> {
    for (args, culprit) in [
        (&["lab", "path", "--quick"][..], "pvblk-lab path --quick"),
        (&["compare", "a", "--", "b"], "pvblk-lab compare a -- b"),
        (&["lab", "--help"], "pvblk-lab --help"),
    ] {
        let finished = run(pvblk(args)?, Duration::from_secs(60))?;
        let named = finished.stderr.trim_end().ends_with(culprit);
        let right = finished.status.is_some_and(|s| s.code() == Some(2))
            && finished.stderr.lines().count() == 1
            && named;
        if !right {
            return Err(finished.failure(&format!("should name `{culprit}`, status 2")));
        }
    }
    Ok(())
}
