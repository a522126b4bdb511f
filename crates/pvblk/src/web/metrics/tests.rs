use super::super::backing::Streamed;
use super::snapshot::Process;
use super::*;
use crate::control::rpc::RpcError;
use crate::memory::Report;
use families::{Family, Type};
use pvblk_trace::live::{DiskHops, HopTimes, HopsReport};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A server with so many disks, of which some are used.
pub struct Planted {
    pub disks: usize,
    pub used: usize,
}

fn used(n: u64) -> Counts {
    let mut counts = Counts {
        in_flight: 3,
        busy_ns: 2_500_000_000,
        ..Counts::default()
    };
    for o in &mut counts.operations[..2] {
        *o = Operation {
            requests: n,
            bytes: n * 4096,
            errors: 1,
            merges: 0,
            time_ns: n * 1_000_000,
            latency: [0; buckets::COUNTS],
        };
        o.latency[8] = n;
    }
    counts
}

impl Backing for Planted {
    fn call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        assert_eq!(method, "disk.ask");
        Ok(match params["question"].get("cache") {
            Some(_) => {
                json!({"hits": 7, "misses": 3, "pgpgin": 5, "nr_dirty": 2, "nr_writeback": 1, "stall_ns": 1500})
            }
            None => json!({
                "name": "r", "uuid": "", "created_secs": 0, "updated_secs": 0, "events": 0, "level": 5, "raid_devices": 3, "layout": "",
                "chunk_bytes": 0, "array_bytes": 0, "member_bytes": 0, "consistency_policy": "", "clean": true, "degraded": true,
                "in_sync_bytes": 0, "missing": 1, "notes": [], "members": [
                    {"number": 0, "place": 0, "state": "active sync", "name": "file:a", "rebuilt_bytes": null, "corrected_reads": 4},
                    {"number": 3, "place": 1, "state": "spare rebuilding", "name": "file:d", "rebuilt_bytes": 1024, "corrected_reads": 0}
                ],
                "serving": {"failed": false, "mismatch_sectors": 8, "trouble": null, "stripes": 1, "active_stripes": 0, "write_path": "",
                    "frozen": false, "speed_min_kib": 0, "speed_max_kib": 0,
                    "sync": {"action": "recover", "done_bytes": 1024, "of_bytes": 4096, "mismatch_sectors": 0}}
            }),
        })
    }

    fn stream(&self, _: &str, _: Value) -> Result<Streamed, RpcError> {
        Err(RpcError::new(1, "no"))
    }

    fn follow(
        &self,
        every: u32,
        take: &mut dyn FnMut(Option<HopsReport>) -> bool,
    ) -> Result<(), RpcError> {
        let hop = HopTimes {
            label: "worker".into(),
            count: 3,
            sum_ns: 1500,
            ..HopTimes::default()
        };
        let disk = |n| DiskHops {
            disk: format!("vm{n:04}"),
            hops: vec![hop.clone()],
            ..DiskHops::default()
        };
        let report = HopsReport {
            every: every.into(),
            disks: (0..self.used).map(disk).collect(),
            ..HopsReport::default()
        };
        let mut goes_on = take(Some(report));
        while goes_on {
            std::thread::sleep(Duration::from_millis(1));
            goes_on = take(None);
        }
        Ok(())
    }

    fn snapshot(&self) -> Result<Snapshot, String> {
        if self.disks == 0 {
            return Err("it is gone".into());
        }
        let disk = |n: usize| DiskFigures {
            name: format!("vm{n:04}"),
            state: "serving".into(),
            health: "healthy".into(),
            volume: match n {
                0 => "cache:1M:raid5:[file:a][missing]".into(),
                _ => format!("file:/srv/{n}.img"),
            },
            size_bytes: 1 << 30,
            limit: Some("read-iops=1k,connection-write-bw=5M,bw=7,burst=20ms".to_owned())
                .filter(|_| n == 0),
            connections: 1,
            counts: Some(if n < self.used {
                used(1000)
            } else {
                Counts::default()
            }),
        };
        let mut disks: Vec<DiskFigures> = (0..self.disks).map(disk).collect();
        if let Some(counts) = &mut disks[0].counts {
            counts.operations[1].merges = 2;
        }
        let memory: Report = serde_json::from_value(json!({
            "settings": {}, "squeezing": true, "squeezes": 3, "merged_signals": 1, "source_signals": 4, "longest_squeeze_us": 1500,
            "device_bytes": 4096, "disks": [{"disk": "vm0000", "pool_pages": 2, "in_use_pages": 1, "peak_pages": 2, "allocated_pages": 2,
                "taken_pages": 2, "squeezes": 0, "squeezed_pages": 0, "returned_pages": 0, "allocation_stalls": 0, "squeezed_ms": 0.0}],
            "total": {"pool_pages": 2, "in_use_pages": 1, "peak_pages": 2, "allocated_pages": 2, "taken_pages": 2, "squeezes": 0,
                "squeezed_pages": 0, "returned_pages": 0, "allocation_stalls": 5, "squeezed_ms": 12.5},
            "sources": [{"name": "psi", "missing": null}, {"name": "cgroup", "missing": "none"}],
            "owners": [{"owner": "a", "kind": "heap", "live_bytes": 10, "cap_bytes": 20}, {"owner": "b", "kind": "heap", "live_bytes": 1, "cap_bytes": 2}],
            "private_bytes": 0, "shared_bytes": 0, "cap_bytes": 0, "rss_anon_bytes": 4096
        })).unwrap();
        Ok(Snapshot {
            version: "1.2".into(),
            process: Some(Process {
                cpu_ns: 1,
                start: SystemTime::UNIX_EPOCH,
            }),
            disks,
            events: BTreeMap::from([("member-failed".to_owned(), 2)]),
            memory: Some(memory),
        })
    }

    fn is_there(&self) -> Result<(), String> {
        Ok(())
    }
}

fn read(metrics: &Metrics, planted: Planted, form: Form, buckets: Buckets) -> String {
    let backing: Arc<dyn Backing> = Arc::new(planted);
    let query = Query {
        buckets,
        hops: None,
    };
    read_as(metrics, &backing, form, query)
}

fn read_as(metrics: &Metrics, backing: &Arc<dyn Backing>, form: Form, query: Query) -> String {
    let mut out = Vec::new();
    metrics.write(backing, form, query, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// A reading of metrics that have followed requests before.
fn followed(disks: usize, used: usize) -> String {
    let metrics = Metrics::default();
    let backing: Arc<dyn Backing> = Arc::new(Planted { disks, used });
    loop {
        let query = Query::default();
        let text = read_as(&metrics, &backing, Form::Prometheus, query);
        if text.contains("pvblk_hops_followed_one_in 64") {
            return text;
        }
        std::thread::yield_now();
    }
}

/// A sample: its name, its labels and its value.
fn sample(line: &str) -> (&str, Vec<&str>, &str) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let Some((name, labels)) = series.split_once('{') else {
        return (series, Vec::new(), value);
    };
    let labels = labels.trim_end_matches('}').split("\",");
    (
        name,
        labels.map(|l| l.split('=').next().unwrap()).collect(),
        value,
    )
}

#[test]
fn figures_are_in_their_families() {
    let text = followed(2, 1);
    for line in [
        "pvblk_up 1",
        "pvblk_build_info{version=\"1.2\"} 1",
        "pvblk_disks{state=\"serving\"} 2",
        "pvblk_events_total{kind=\"member-failed\",severity=\"error\"} 2",
        "pvblk_events_total{kind=\"disk-gone\",severity=\"error\"} 0",
        "pvblk_disk_info{disk=\"vm0000\",volume=\"cache\"} 1",
        "pvblk_disk_status{disk=\"vm0001\",state=\"serving\",health=\"healthy\"} 1",
        "pvblk_disk_requests_total{disk=\"vm0000\",op=\"read\"} 1000",
        "pvblk_disk_requests_total{disk=\"vm0001\",op=\"write\"} 0",
        "pvblk_disk_transferred_bytes_total{disk=\"vm0000\",op=\"write\"} 4096000",
        "pvblk_disk_request_time_seconds_total{disk=\"vm0000\",op=\"read\"} 1",
        "pvblk_disk_busy_seconds_total{disk=\"vm0000\"} 2.500000000",
        "pvblk_disk_request_duration_seconds_bucket{disk=\"vm0000\",op=\"read\",le=\"0.000524288\"} 0",
        "pvblk_disk_request_duration_seconds_bucket{disk=\"vm0000\",op=\"read\",le=\"0.001048576\"} 1000",
        "pvblk_disk_request_duration_seconds_bucket{disk=\"vm0000\",op=\"read\",le=\"+Inf\"} 1000",
        "pvblk_disk_request_duration_seconds_count{disk=\"vm0000\",op=\"read\"} 1000",
        "pvblk_disk_hop_requests_total{disk=\"vm0000\",hop=\"worker\"} 192",
        "pvblk_disk_hop_time_seconds_total{disk=\"vm0000\",hop=\"worker\"} 0.000096000",
        "pvblk_disk_limit_requests_per_second{disk=\"vm0000\",scope=\"disk\",op=\"read\"} 1000",
        "pvblk_disk_limit_bytes_per_second{disk=\"vm0000\",scope=\"connection\",op=\"write\"} 5000000",
        "pvblk_disk_limit_bytes_per_second{disk=\"vm0000\",scope=\"disk\",op=\"all\"} 7",
        "pvblk_array_degraded{disk=\"vm0000\"} 1",
        "pvblk_array_members{disk=\"vm0000\",state=\"rebuilding\"} 1",
        "pvblk_array_corrected_reads_total{disk=\"vm0000\",place=\"0\"} 4",
        "pvblk_array_sync_done_bytes{disk=\"vm0000\",action=\"recover\"} 1024",
        "pvblk_array_mismatch_bytes{disk=\"vm0000\"} 4096",
        "pvblk_cache_hits_total{disk=\"vm0000\"} 7",
        "pvblk_cache_read_bytes_total{disk=\"vm0000\"} 5120",
        "pvblk_cache_dirty_bytes{disk=\"vm0000\"} 12288",
        "pvblk_cache_stall_seconds_total{disk=\"vm0000\"} 0.000001500",
        "pvblk_memory_bytes{kind=\"heap\"} 11",
        "pvblk_buffer_pool_bytes 8192",
        "pvblk_disk_buffer_bytes{disk=\"vm0000\"} 8192",
        "pvblk_squeeze_seconds_total 0.012500000",
        "pvblk_pressure_source{source=\"cgroup\"} 0",
        "pvblk_scrape_unanswered 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} isn't in\n{text}");
    }
    assert!(!text.contains("duration_seconds_bucket{disk=\"vm0001\""));
}

#[test]
fn every_family_has_samples_with_its_labels_and_no_others() {
    let text = followed(2, 1);
    let mut seen = BTreeSet::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let (name, mut labels, _) = sample(line);
        let is_of = |f: &&&Family| f.samples().iter().any(|s| s == name);
        let family = families::ALL.iter().find(is_of).unwrap();
        if family.kind == Type::Histogram && name.ends_with("_bucket") {
            assert_eq!(labels.pop(), Some("le"), "{line}");
        }
        assert_eq!(labels, family.labels, "{line}");
        seen.insert(family.name);
    }
    let all: BTreeSet<&str> = families::ALL.iter().map(|f| f.name).collect();
    assert_eq!(seen, all);
    let open = read(
        &Metrics::default(),
        Planted { disks: 2, used: 1 },
        Form::OpenMetrics,
        Buckets::Active,
    );
    assert!(open.ends_with("\n# EOF\n"));
}

#[test]
fn a_server_that_is_gone_is_told() {
    let gone = |form| {
        read(
            &Metrics::default(),
            Planted { disks: 0, used: 0 },
            form,
            Buckets::Active,
        )
    };
    assert!(gone(Form::Prometheus).ends_with("pvblk_up 0\n"));
    assert!(gone(Form::OpenMetrics).ends_with("pvblk_up 0\n# EOF\n"));
}

#[test]
fn nothing_is_followed_for_readers_who_do_not_want_it() {
    let metrics = Metrics::default();
    let backing: Arc<dyn Backing> = Arc::new(Planted { disks: 1, used: 1 });
    let query = Query {
        hops: None,
        ..Query::default()
    };
    read_as(&metrics, &backing, Form::Prometheus, query);
    assert!(metrics.hops.next().is_none());
}

#[test]
fn readings_stay_small() {
    let lines = |used, buckets| {
        let planted = Planted { disks: 1000, used };
        let text = match buckets {
            Buckets::Active => followed(1000, used),
            _ => read(&Metrics::default(), planted, Form::Prometheus, buckets),
        };
        text.lines().count()
    };
    for used in [0, 100, 1000] {
        let count = lines(used, Buckets::Active);
        assert!(count <= 21_500, "{count} lines");
    }
    assert!(lines(1000, Buckets::All) > 50_000);
    assert!(lines(1000, Buckets::None) < 16_000);
    let planted = Planted {
        disks: 1000,
        used: 1000,
    };
    let text = read(
        &Metrics::default(),
        planted,
        Form::Prometheus,
        Buckets::Active,
    );
    let left_out = "pvblk_scrape_disks_without_buckets 887";
    assert!(
        text.lines().any(|l| l == left_out),
        "{:?}",
        text.lines().find(|l| l.starts_with("pvblk_scrape_d"))
    );
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn file(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The table of the reference, as it should be.
fn table() -> String {
    let mut text = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for family in families::ALL {
        let samples = family.samples();
        let name = match family.kind {
            Type::Histogram => family.name.to_owned(),
            _ => samples[0].clone(),
        };
        let labels: Vec<String> = family.labels.iter().map(|l| format!("`{l}`")).collect();
        let kind = format!("{:?}", family.kind).to_lowercase();
        text += &format!(
            "| `{name}` | {kind} | {} | {} |\n",
            labels.join(", "),
            family.help.trim_end_matches('.')
        );
    }
    text
}

#[test]
fn the_reference_lists_every_metric() {
    let page = file("docs/reference/metrics.md");
    assert!(
        page.contains(&table()),
        "docs/reference/metrics.md should have this table:\n{}",
        table()
    );
}

/// Names of our metrics in a text, and names of labels in selectors and after `by`, with the text around them.
fn used_names(text: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c: char| !is_word(c));
    let metrics = words.filter(|w| w.starts_with("pvblk_") || w.starts_with("process_"));
    let metrics = metrics.map(str::to_owned).collect();
    let mut labels = BTreeSet::new();
    for expression in expressions(text) {
        for (open, close) in [('{', '}'), ('(', ')')] {
            for part in expression.split(open).skip(1) {
                let inside = part.split(close).next().unwrap_or_default();
                if open == '{' {
                    let names = inside.split(',').filter_map(|m| m.split(['=', '!']).next());
                    labels.extend(names.map(|n| n.trim().to_owned()));
                }
            }
        }
        for word in ["by (", "on (", "by(", "on(", "ignoring (", "without ("] {
            for part in expression.split(word).skip(1) {
                let names = part.split(')').next().unwrap_or_default().split(',');
                labels.extend(names.map(|n| n.trim().to_owned()));
            }
        }
    }
    labels.remove("");
    (metrics, labels)
}

/// PromQL in the dashboard and in rules.
fn expressions(text: &str) -> Vec<String> {
    if let Ok(dashboard) = serde_json::from_str::<Value>(text) {
        let mut found = Vec::new();
        collect(&dashboard, &mut found);
        return found;
    }
    let lines = text.lines().filter_map(|l| l.trim().strip_prefix("expr: "));
    lines.map(str::to_owned).collect()
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value.as_str() {
                    Some(text) if key == "expr" => found.push(text.to_owned()),
                    _ => collect(value, found),
                }
            }
        }
        Value::Array(all) => all.iter().for_each(|v| collect(v, found)),
        _ => {}
    }
}

#[test]
fn dashboard_and_rules_use_metrics_that_are_exported() {
    for path in ["dist/grafana/pvblk.json", "dist/prometheus/pvblk.rules.yml"] {
        let text = file(path);
        let (metrics, labels) = used_names(&text);
        assert!(
            metrics.len() > 5 && expressions(&text).len() > 5,
            "{path}: {metrics:?}"
        );
        let exported: BTreeSet<String> = families::ALL.iter().flat_map(|f| f.samples()).collect();
        let unknown: Vec<&String> = metrics.difference(&exported).collect();
        assert!(unknown.is_empty(), "{path}: {unknown:?}");
        let mut known: BTreeSet<String> = families::ALL
            .iter()
            .flat_map(|f| f.labels)
            .map(|l| (*l).to_owned())
            .collect();
        known.extend(["instance", "job", "le"].map(str::to_owned));
        let unknown: Vec<&String> = labels.difference(&known).collect();
        assert!(unknown.is_empty(), "{path}: {unknown:?}");
    }
}
