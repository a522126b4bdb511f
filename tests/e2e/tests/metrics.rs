//! Metrics and the API over HTTP, read by curl's like, by promtool, by an OpenMetrics parser and by a real Prometheus.

use pvblk_e2e::arrays::{Disks, raid, spec};
use pvblk_e2e::control::Control;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::http::Place;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{self, need, run, tool};
use pvblk_e2e::{Daemon, Stop, run_all, stage};
use serde_json::{Value, json};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        (
            "methods_are_answered_over_http_as_on_the_control_socket",
            methods,
        ),
        ("changes_need_the_token", changes),
        ("other_machines_and_foreign_names_are_kept_out", kept_out),
        ("promtool_and_a_parser_find_nothing_wrong", promtool),
        ("alert_rules_fire_when_they_should", rules),
        ("a_real_prometheus_answers_what_stat_says", prometheus),
    ])
}

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);

/// A server with an array, a cache and a plain disk.
struct Scene {
    daemon: Daemon,
    place: Place,
    dir: TempDir,
    _members: Disks,
}

impl Scene {
    fn new(web: &str, extra: &[&str]) -> Result<Scene, Stop> {
        let dir = tempfile::tempdir()?;
        let unix = |name: &str| stage::unix(&dir.path().join(name));
        let web = match web {
            "unix" => unix("web"),
            tcp => tcp.to_owned(),
        };
        let members = Disks::new(3)?;
        let paths = members.paths(0..3);
        raid(&["create", "--raid-devices", "3"], &paths)?;
        let array = format!("r=cache:4M:{}", spec(&paths, None));
        let (nbd, control) = (unix("nbd"), unix("ctl"));
        let mut args = vec![
            "serve",
            "--disk",
            &array,
            "--disk",
            "vm1=mem:64M",
            "--limit",
            "vm1:write-bw=1G",
        ];
        args.extend(["--nbd", &nbd, "--control", &control, "--web", &web]);
        args.extend(extra);
        let daemon = Daemon::start(args)?;
        let place = Place::told(&daemon.lines())?;
        Ok(Scene {
            daemon,
            place,
            dir,
            _members: members,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn pvblk(&self, args: &[&str]) -> Result<String, Stop> {
        let mut command = pvblk(args)?;
        command.env("PVBLK_CONTROL", stage::unix(&self.path("ctl")));
        Ok(run(command, HANG)?.success()?.stdout)
    }

    /// Reads and writes a known number of blocks.
    fn load(&self, disk: &str) -> Result<(), Stop> {
        let uri = stage::uri(&self.path("nbd"), disk);
        for rw in ["randread", "randwrite"] {
            self.pvblk(&[
                "bench",
                "--target",
                &uri,
                "--rw",
                rw,
                "--size",
                "4m",
                "--iodepth",
                "4",
            ])?;
        }
        Ok(())
    }

    /// The counters of one disk and operation, as `pvblk stat` says.
    fn stat(&self, disk: &str, op: &str) -> Result<Value, Stop> {
        let stat: Value = serde_json::from_str(&self.pvblk(&["stat", disk, "--json"])?)?;
        Ok(stat["disks"][0]["operations"][op].clone())
    }
}

/// The value of one series.
fn value(text: &str, series: &str) -> Result<f64, Stop> {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(series)?.strip_prefix(' '));
    let value = line.and_then(|v| v.parse().ok());
    value.ok_or_else(|| Stop::Fail(format!("no {series} in\n{text}")))
}

fn error(answer: &Value) -> &str {
    answer["error"]["message"].as_str().unwrap_or_default()
}

/// The same over HTTP of the server and of `pvblk web`.
fn methods() -> Result<(), Stop> {
    let mut scene = Scene::new("unix", &[])?;
    let mode = fs::metadata(scene.path("web"))?.permissions().mode();
    check(mode & 0o777 == 0o600, || format!("mode {mode:o}"))?;
    scene.load("r")?;
    let control = stage::unix(&scene.path("ctl"));
    let mut front = Daemon::start(["web", "--control", &control, "--listen", "tcp:127.0.0.1:0"])?;
    let behind = Place::told(&front.lines())?;
    for place in [&scene.place, &behind] {
        let ask = |path: &str| place.get(path)?.json();
        let list = ask("/api/disk.list")?;
        let names: Vec<&str> = list["disks"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|d| d["name"].as_str())
            .collect();
        check(names == ["r", "vm1"], || format!("{list}"))?;
        let page = ask("/api/disk.list?most=1")?;
        check(page["next"] == "r", || format!("{page}"))?;
        let shown = ask("/api/disk.show?name=vm1")?;
        check(shown["limit"] == "write-bw=1G", || format!("{shown}"))?;
        let detail = ask("/api/disk.ask?name=r&question=%7B%22raid%22:%22detail%22%7D")?;
        check(detail["raid_devices"] == 3, || format!("{detail}"))?;
        let cache = ask("/api/disk.ask?name=r&question=%7B%22cache%22:%22counters%22%7D")?;
        check(cache["hits"].is_u64(), || format!("{cache}"))?;
        let memory = ask("/api/memory.ask")?;
        check(memory["owners"].is_array(), || format!("{memory}"))?;
        let stat = ask("/api/stat")?;
        check(
            stat["disks"].as_array().is_some_and(|d| d.len() == 2),
            || format!("{stat}"),
        )?;
        check(stat["events"]["peer-attached"].as_u64() >= Some(2), || {
            format!("{}", stat["events"])
        })?;
        for (path, status, why) in [
            ("/api/disk.show?name=none", 404, "none"),
            ("/api/disk.remove?name=vm1", 404, "POST calls the others"),
            ("/api/disk.show", 400, "name is missing"),
            ("/api/stat?disc=vm1", 400, "there is no disc"),
            (
                "/api/memory.ask?question=%7B%22memory%22:%22squeeze%22%7D",
                400,
                "POST asks the others",
            ),
        ] {
            let answer = place.get(path)?;
            let said = answer.json()?;
            check(
                answer.status == status && error(&said).contains(why),
                || format!("{path}: {answer:?} {said}"),
            )?;
        }
        let answer = place.get("/api/stat")?;
        for header in [
            "Cache-Control: no-store",
            "Content-Security-Policy: default-src 'self'",
            "application/json",
        ] {
            check(answer.headers.contains(header), || answer.headers.clone())?;
        }
        check(place.get("/healthz")?.text() == "ok\n", || {
            "not healthy".into()
        })?;
        let home = place.get("/")?;
        check(
            home.status == 200 && home.headers.contains("text/html"),
            || format!("{home:?}"),
        )?;
        // Without requests there are no disks in it.
        let mut hops = place.follow("/api/hops?disk=vm1&every=8")?;
        let object: Value = serde_json::from_str(&hops.next().unwrap_or_default())?;
        check(
            object["every"].as_u64() <= Some(8) && object["disks"].is_array(),
            || format!("{object}"),
        )?;
        check(place.get("/api/hops?every=0")?.status == 400, || "0".into())?;
        let mut events = place.follow("/api/events?follow=true")?;
        let first: Value = serde_json::from_str(&events.next().unwrap_or_default())?;
        check(first["kind"] == "peer-attached", || format!("{first}"))?;
    }
    // Readers over HTTP leave the control socket to others.
    let held: Vec<_> = (0..20)
        .map_while(|_| behind.follow("/api/events?follow=true").ok())
        .collect();
    check((2..16).contains(&held.len()), || {
        format!("{} streams at a time", held.len())
    })?;
    let mut control = Control::open(&scene.path("ctl"))?;
    control.must("pvblk.version", json!({}))?;
    drop((held, control));
    // Streams end with their server.
    let begin = Instant::now();
    let events = loop {
        match behind.follow("/api/events?follow=true") {
            // The streams of before end when their readers are missed.
            Err(_) if begin.elapsed() < HANG => std::thread::sleep(Duration::from_millis(10)),
            followed => break followed?,
        }
    };
    scene.daemon.stop()?;
    let seen = events.count();
    check(seen >= 2, || format!("{seen} events"))?;
    let answer = behind.get("/api/stat")?;
    check(answer.status == 503, || format!("{answer:?}"))?;
    check(behind.get("/healthz")?.status == 503, || "healthy".into())?;
    let gone = behind.get("/metrics")?.text();
    check(gone.ends_with("pvblk_up 0\n"), || gone)?;
    front.stop()
}

fn changes() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let token = dir.path().join("token");
    fs::write(&token, "0123456789abcdefghij\n")?;
    let path = token.to_string_lossy().into_owned();
    fs::set_permissions(&token, PermissionsExt::from_mode(0o644))?;
    match Scene::new("tcp:127.0.0.1:0", &["--web-token-file", &path]) {
        Err(Stop::Fail(said)) if said.contains("chmod 600") => {}
        Err(e) => return Err(e),
        Ok(_) => return Stop::fail("a token that others can read is taken"),
    }
    fs::set_permissions(&token, PermissionsExt::from_mode(0o600))?;
    let params = json!({"name": "vm1", "limit": "iops=1k"});
    let closed = Scene::new("tcp:127.0.0.1:0", &[])?;
    let answer = closed.place.post(
        "/api/disk.set",
        &params,
        "Authorization: Bearer 0123456789abcdefghij\r\n",
    )?;
    let said = answer.json()?;
    check(
        answer.status == 403 && error(&said).contains("--web-token-file"),
        || format!("{answer:?}"),
    )?;
    let open = Scene::new("tcp:127.0.0.1:0", &["--web-token-file", &path])?;
    for wrong in [
        "",
        "Authorization: Bearer 0123456789abcdefghik\r\n",
        "Authorization: Basic 0123456789abcdefghij\r\n",
    ] {
        let answer = open.place.post("/api/disk.set", &params, wrong)?;
        check(
            answer.status == 401 && answer.headers.contains("WWW-Authenticate: Bearer"),
            || format!("{wrong} {answer:?}"),
        )?;
    }
    let limit = || {
        open.place
            .get("/api/disk.show?name=vm1")?
            .json()
            .map(|d| d["limit"].clone())
    };
    check(limit()? == "write-bw=1G", || "it was changed".into())?;
    let right = "Authorization: Bearer 0123456789abcdefghij\r\n";
    let answer = open.place.post("/api/disk.set", &params, right)?;
    check(answer.status == 200 && limit()? == "iops=1k", || {
        format!("{answer:?}")
    })?;
    let answer = open
        .place
        .post("/api/disk.remove", &json!({"name": "vm1"}), right)?;
    check(answer.json()?["state"] == "gone", || format!("{answer:?}"))?;
    let answer = open
        .place
        .post("/api/disk.remove", &json!(["vm1"]), right)?;
    check(answer.status == 400, || format!("{answer:?}"))
}

fn kept_out() -> Result<(), Stop> {
    let args = [
        "serve",
        "--disk",
        "a=mem:1M",
        "--nbd",
        "unix:/nowhere/x",
        "--web",
        "tcp:0.0.0.0:0",
    ];
    let dir = tempfile::tempdir()?;
    let nbd = stage::unix(&dir.path().join("nbd"));
    let args = args.map(|a| {
        if a == "unix:/nowhere/x" {
            nbd.as_str()
        } else {
            a
        }
    });
    let refused = run(pvblk(args)?, HANG)?;
    let said = refused.stderr.lines().last().unwrap_or_default().to_owned();
    check(
        said.contains("--web-allow-remote") && refused.status.is_some_and(|s| !s.success()),
        || said,
    )?;
    let named = args
        .iter()
        .chain(&["--web-allow-remote", "--web-host", "storage1"]);
    let open = Daemon::start(named)?;
    let place = Place::told(&open.lines())?;
    for (host, status) in [
        ("evil.example", 403),
        ("storage1:9808", 200),
        ("10.0.0.1", 200),
    ] {
        let request = format!("GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let answer = place.send(&request)?;
        check(answer.status == status, || format!("{host}: {answer:?}"))?;
    }
    Ok(())
}

const OPEN_METRICS: &str = "Accept: application/openmetrics-text;version=1.0.0\r\n";

fn promtool() -> Result<(), Stop> {
    let scene = Scene::new("tcp:127.0.0.1:0", &[])?;
    scene.load("r")?;
    scene.load("vm1")?;
    let text = scene.place.get("/metrics?buckets=all")?;
    check(text.headers.contains("text/plain; version=0.0.4"), || {
        text.headers.clone()
    })?;
    let open = scene.place.get_with("/metrics", OPEN_METRICS)?;
    check(
        open.headers
            .contains("application/openmetrics-text; version=1.0.0"),
        || open.headers.clone(),
    )?;
    let text = text.text();
    let of = |op: &str| format!("pvblk_disk_requests_total{{disk=\"vm1\",op=\"{op}\"}}");
    for op in ["read", "write"] {
        let stat = scene.stat("vm1", op)?;
        check(
            value(&text, &of(op))? == stat["requests"].as_f64().unwrap_or(-1.0),
            || format!("{op}: {stat}\n{text}"),
        )?;
    }
    check(
        value(&text, "pvblk_array_members{disk=\"r\",state=\"active\"}")? == 3.0,
        || text.clone(),
    )?;
    check(
        value(&text, "pvblk_cache_misses_total{disk=\"r\"}")? >= 0.0,
        || text.clone(),
    )?;
    check(
        value(
            &text,
            "pvblk_disk_limit_bytes_per_second{disk=\"vm1\",scope=\"disk\",op=\"write\"}",
        )? == 1e9,
        || text.clone(),
    )?;
    need(&["promtool"])?;
    let file = scene.path("metrics");
    fs::write(&file, &text)?;
    let mut lint = tool("promtool", ["check", "metrics"]);
    lint.stdin(fs::File::open(&file)?);
    let said = run(lint, HANG)?.success()?;
    check(said.stdout.is_empty() && said.stderr.is_empty(), || {
        format!("{said:?}")
    })?;
    // Where Debian's package is found.
    let python = "/usr/bin/python3";
    need(&[python])?;
    let parser = "import sys\ntry:\n    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
        except ImportError:\n    sys.exit(77)\n\
        families = list(parse(open(sys.argv[1]).read()))\n\
        print(len(families), sum(len(f.samples) for f in families))\n";
    fs::write(&file, open.text())?;
    let parsed = run(
        tool(python, ["-c".as_ref(), parser.as_ref(), file.as_os_str()]),
        HANG,
    )?;
    if parsed.status.and_then(|s| s.code()) == Some(77) {
        return Stop::skip("python3-prometheus-client is not installed");
    }
    let parsed = parsed.success()?.stdout;
    let numbers: Vec<usize> = parsed
        .split_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect();
    check(
        numbers.len() == 2 && numbers[0] > 40 && numbers[1] > 100,
        || parsed,
    )
}

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../dist")
        .join(name)
}

fn rules() -> Result<(), Stop> {
    need(&["promtool"])?;
    for (what, name) in [
        ("check", "prometheus/pvblk.rules.yml"),
        ("test", "prometheus/pvblk.rules.test.yml"),
    ] {
        let path = dist(name);
        tools::run_ok(
            "promtool",
            [what.as_ref(), "rules".as_ref(), path.as_os_str()],
        )?;
    }
    Ok(())
}

/// A Prometheus; killed when dropped.
struct Prometheus {
    child: Child,
    place: Place,
}

impl Prometheus {
    /// Reads `target` each second, by our rules.
    fn start(dir: &Path, target: u16) -> Result<Prometheus, Stop> {
        // Nobody else takes the port between here and there, most likely; a start that fails is tried again.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = dir.join("prometheus.yml");
        let rules = dist("prometheus/pvblk.rules.yml").canonicalize()?;
        let text = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules:?}]\n\
             scrape_configs:\n  - job_name: pvblk\n    static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
        );
        fs::write(&config, text)?;
        let data = dir.join("data");
        let args = [
            format!("--config.file={}", config.display()),
            format!("--storage.tsdb.path={}", data.display()),
            format!("--web.listen-address=127.0.0.1:{port}"),
            "--log.level=warn".to_owned(),
        ];
        let mut command = tool("prometheus", args);
        let child = command
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.join("prometheus.log"))?)
            .spawn()?;
        Ok(Prometheus {
            child,
            place: Place::Tcp(port),
        })
    }

    /// The value of a query; `None`: it has none, or Prometheus isn't ready.
    fn query(&self, query: &str) -> Option<f64> {
        let escaped: String = query.bytes().map(|b| format!("%{b:02x}")).collect();
        let answer = self
            .place
            .get(&format!("/api/v1/query?query={escaped}"))
            .ok()?;
        let answer = answer.json().ok()?;
        answer["data"]["result"][0]["value"][1]
            .as_str()?
            .parse()
            .ok()
    }

    /// Waits until a query has this value.
    fn until(&self, query: &str, wanted: f64) -> Result<(), Stop> {
        let begin = Instant::now();
        loop {
            let found = self.query(query);
            if found == Some(wanted) {
                return Ok(());
            }
            if begin.elapsed() > HANG {
                return Stop::fail(format!("{query}: {found:?} instead of {wanted}"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn prometheus() -> Result<(), Stop> {
    need(&["prometheus"])?;
    let scene = Scene::new("tcp:127.0.0.1:0", &[])?;
    let Place::Tcp(port) = scene.place else {
        return Stop::fail("no port");
    };
    let prometheus = Prometheus::start(scene.dir.path(), port)?;
    // It reads while there is load, and afterwards has the last values.
    scene.load("vm1")?;
    for (op, series, field) in [
        ("read", "pvblk_disk_requests_total", "requests"),
        ("write", "pvblk_disk_transferred_bytes_total", "bytes"),
        (
            "write",
            "pvblk_disk_request_duration_seconds_count",
            "requests",
        ),
    ] {
        let stat = scene.stat("vm1", op)?;
        let wanted = stat[field].as_f64().unwrap_or(-1.0);
        check(wanted > 0.0, || format!("{stat}"))?;
        prometheus.until(
            &format!("{series}{{job=\"pvblk\",disk=\"vm1\",op=\"{op}\"}}"),
            wanted,
        )?;
    }
    // Sums of a query, too: what stat has in nanoseconds, Prometheus has in seconds.
    let stat = scene.stat("vm1", "read")?;
    let (time, requests) = (stat["time_ns"].as_f64(), stat["requests"].as_f64());
    let average = time.unwrap_or(0.0) / 1e9 / requests.unwrap_or(1.0);
    let query = "sum(pvblk_disk_request_time_seconds_total{disk=\"vm1\",op=\"read\"}) / sum(pvblk_disk_requests_total{disk=\"vm1\",op=\"read\"})";
    let found = prometheus.query(query).unwrap_or(-1.0);
    check((found / average - 1.0).abs() < 1e-9, || {
        format!("{found} and {average}")
    })?;
    prometheus.until("up{job=\"pvblk\"}", 1.0)?;
    prometheus.until(
        "count(pvblk_array_members{disk=\"r\",state=\"active\"} == 3)",
        1.0,
    )
}
