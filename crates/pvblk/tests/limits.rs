//! Limits of served disks, by each export: only upper bounds, since a slow machine does less.

mod serving;

use std::path::Path;
use std::process::{Child, Command};
use std::time::Instant;

struct Serve(Child);

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Requests and seconds of a benchmark that is stopped after a while.
fn bench(target: &str, rw: &str, bs: &str) -> (f64, f64) {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("json");
    let begin = Instant::now();
    let out = Command::new(env!("CARGO_BIN_EXE_pvblk"))
        .args(["bench", "--target", target, "--rw", rw, "--bs", bs])
        .args(["--iodepth", "16", "--runtime", "1500ms", "--json"])
        .arg(&json)
        .output()
        .unwrap();
    assert!(out.status.success(), "{target}: {out:?}");
    // Longer than the time in which it had requests in flight.
    let seconds = begin.elapsed().as_secs_f64();
    let text = std::fs::read_to_string(json).unwrap();
    let result: serde_json::Value = serde_json::from_str(&text).unwrap();
    let job = &result["jobs"][0];
    let kind = if rw.ends_with("read") {
        "read"
    } else {
        "write"
    };
    let requests = job[kind]["total_ios"].as_f64().unwrap();
    (requests, seconds)
}

fn targets(dir: &Path) -> [String; 3] {
    let at = |name: &str| dir.join(name).display().to_string();
    [
        format!("nbd+unix:///a?socket={}", at("nbd")),
        format!("rings:unix:{},disk=a", at("rings")),
        format!("vhost-user:unix:{}", at("vhost")),
    ]
}

fn serve(dir: &Path, more: &[String]) -> Serve {
    let at = |name: &str| format!("unix:{}", dir.join(name).display());
    let fixed = [
        "--workers=2".into(),
        "--no-pressure".into(),
        format!("--nbd={}", at("nbd")),
        format!("--local={}", at("rings")),
    ];
    Serve(serving::start(&[&fixed, more].concat()))
}

#[test]
fn no_export_passes_more_than_the_limit_and_a_burst() {
    let dir = tempfile::tempdir().unwrap();
    let vhost = dir.path().join("vhost");
    let _serve = serve(
        dir.path(),
        &[
            "--disk=a=mem:16M".into(),
            format!("--vhost-user=a=unix:{}", vhost.display()),
            "--limit=a:read-iops=400,write-bw=2M,burst=50ms".into(),
        ],
    );
    for target in targets(dir.path()) {
        let (reads, seconds) = bench(&target, "randread", "4k");
        // Every lane may have one that waited.
        let most = 400.0 * (seconds + 0.05) + 64.0;
        assert!(reads <= most, "{target}: {reads} reads in {seconds} s");
        assert!(reads > 0.0);
        let (writes, seconds) = bench(&target, "randwrite", "16k");
        let most = 2e6 * (seconds + 0.05) / 16384.0 + 64.0;
        assert!(writes <= most, "{target}: {writes} writes in {seconds} s");
        assert!(writes > 0.0);
    }
}

#[test]
fn the_configuration_file_has_limits_and_a_flag_goes_before_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config");
    let text = "[disk.a]\nvolume = 'mem:16M'\nlimit = 'connection-iops=50'\n[disk.b]\nvolume = 'mem:16M'\nlimit = 'iops=1'\n";
    std::fs::write(&config, text).unwrap();
    let config = format!("--config={}", config.display());
    let _serve = serve(dir.path(), &[config, "--limit=b:none".into()]);
    let target = |disk| format!("nbd+unix:///{disk}?socket={}/nbd", dir.path().display());
    let (reads, seconds) = bench(&target("a"), "randread", "4k");
    assert!(
        reads <= 50.0 * (seconds + 0.02) + 16.0,
        "{reads} in {seconds} s"
    );
    // Not one a second.
    let (reads, seconds) = bench(&target("b"), "randread", "4k");
    assert!(reads > 16.0 + 2.0 * seconds, "{reads} in {seconds} s");
}

#[test]
fn limits_that_cannot_be_read_are_refused_with_what_to_write() {
    for (limit, why) in [
        (
            "a:iops=0",
            "iops `0` is not a rate of 1 to 1000M requests per second",
        ),
        ("a:reads=5", "there are read-iops, write-iops, iops"),
        ("a", "write NAME:LIMITS"),
        ("b:iops=5", "there is no disk b"),
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_pvblk"))
            .args([
                "serve",
                "--disk=a=mem:1M",
                "--nbd=unix:/nowhere/nbd",
                "--limit",
                limit,
            ])
            .output()
            .unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(
            !out.status.success() && text.contains(why),
            "{limit}: {text}"
        );
    }
}
