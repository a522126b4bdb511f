//! Disks and exports that come and go while a server runs, over its control socket.

use pvblk_e2e::control::Control;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::slow_medium::{Kind, Rule, SlowMedium};
use pvblk_e2e::{Daemon, MIB, Stop, run_all, stage, tools};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("the_command_adds_lists_changes_and_removes", the_command),
        ("requests_are_answered_when_they_are_done", any_order),
        ("a_stream_may_follow_an_answer_at_once", stream_follows),
        ("lines_that_are_no_requests_are_told_so", lines),
        (
            "a_medium_that_hangs_at_its_opening_holds_up_its_own_command",
            opening_hangs,
        ),
        (
            "a_disk_removed_by_force_frees_its_name_and_is_flushed_when_its_io_ends",
            forced,
        ),
        ("a_stop_waits_for_a_disk_that_was_removed_by_force", stop),
        ("a_thousand_disks_leave_nothing_behind", thousand),
        ("virtual_machines_and_listeners_come_and_go", exports),
    ])
}

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);

/// A server without disks, and its sockets.
struct Scene {
    daemon: Daemon,
    dir: TempDir,
}

impl Scene {
    fn new() -> Result<Scene, Stop> {
        let dir = tempfile::tempdir()?;
        let unix = |name: &str| stage::unix(&dir.path().join(name));
        let args = ["serve", "--control", &unix("ctl"), "--nbd", &unix("nbd")];
        Ok(Scene {
            daemon: Daemon::start(args)?,
            dir,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn client(&self) -> Result<Client, Stop> {
        let socket = UnixStream::connect(self.path("ctl"))?;
        socket.set_read_timeout(Some(HANG))?;
        Ok(Client {
            lines: BufReader::new(socket),
            last: 0,
        })
    }

    fn call(&self, method: &str, params: Value) -> Result<Value, Stop> {
        self.client()?.call(method, params)
    }

    /// Runs a command of `pvblk` at this server; returns what it printed.
    fn run(&self, args: &[&str]) -> Result<tools::Finished, Stop> {
        let mut command = pvblk(args)?;
        command.env("PVBLK_CONTROL", stage::unix(&self.path("ctl")));
        tools::run(command, HANG)
    }

    fn said(&self, args: &[&str]) -> Result<String, Stop> {
        Ok(self.run(args)?.success()?.stdout)
    }

    /// The last line of a command that fails.
    fn refused(&self, args: &[&str]) -> Result<String, Stop> {
        let finished = self.run(args)?;
        let one = finished.stderr.lines().count() == 1;
        match !succeeded(&finished) && one {
            true => Ok(finished.stderr.trim_end().to_owned()),
            false => Err(finished.failure("should fail with one line")),
        }
    }
}

fn succeeded(finished: &tools::Finished) -> bool {
    finished.status.is_some_and(|s| s.success())
}

struct Client {
    lines: BufReader<UnixStream>,
    last: u64,
}

impl Client {
    fn send(&mut self, method: &str, params: Value) -> Result<u64, Stop> {
        self.last += 1;
        let request =
            json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params});
        self.lines
            .get_ref()
            .write_all(format!("{request}\n").as_bytes())?;
        Ok(self.last)
    }

    fn receive(&mut self) -> Result<Value, Stop> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        serde_json::from_str(&line).map_err(|e| Stop::Fail(format!("{line:?}: {e}")))
    }

    /// The result; an error is a failure that begins with its code.
    fn call(&mut self, method: &str, params: Value) -> Result<Value, Stop> {
        let id = self.send(method, params)?;
        let response = self.receive()?;
        check(response["id"] == id, || format!("{response}"))?;
        match response.get("error") {
            None => Ok(response["result"].clone()),
            Some(e) => Stop::fail(format!("{}: {}", e["code"], e["message"])),
        }
    }
}

fn code(result: Result<Value, Stop>) -> Result<i64, Stop> {
    match result {
        Ok(value) => Stop::fail(format!("should be refused: {value}")),
        Err(Stop::Fail(text)) => {
            let code = text.split(':').next().and_then(|c| c.parse().ok());
            code.ok_or(Stop::Fail(text))
        }
        Err(e) => Err(e),
    }
}

fn the_command() -> Result<(), Stop> {
    let mut scene = Scene::new()?;
    File::create(scene.path("a.img"))?.set_len(16 * MIB)?;
    let a = format!("a=file:{}", scene.path("a.img").display());
    let said = scene.said(&["disk", "add", &a])?;
    check(
        said.contains("disk a: serving") && said.contains("16 MiB"),
        || said,
    )?;
    Connection::open(&scene.path("nbd"), "a")?;
    let twice = scene.refused(&["disk", "add", &a])?;
    check(twice.contains("there is a disk a already"), || twice)?;
    let said = scene.said(&["disk", "list"])?;
    check(said.contains("| a ") && said.contains("serving"), || said)?;
    let list: Value = serde_json::from_str(&scene.said(&["disk", "list", "--json"])?)
        .map_err(|e| Stop::Fail(e.to_string()))?;
    check(list["disks"][0]["size_bytes"] == 16 * MIB, || {
        list.to_string()
    })?;
    let said = scene.said(&["disk", "set", "a", "--exclusive", "on"])?;
    check(said.contains("exclusive"), || said)?;
    let said = scene.said(&["disk", "show", "a"])?;
    check(said.contains("nbd+unix:///a?socket="), || said)?;
    let connection = Connection::open(&scene.path("nbd"), "a")?;
    let used = scene.refused(&["disk", "remove", "a"])?;
    check(
        used.contains("used by NBD") && used.contains("--force"),
        || used,
    )?;
    drop(connection);
    // The server notices that the connection is closed.
    let start = Instant::now();
    while !succeeded(&scene.run(&["disk", "remove", "a"])?) {
        check(start.elapsed() < HANG, || "still in use".into())?;
    }
    let none = scene.refused(&["disk", "remove", "a"])?;
    check(none.contains("there is no disk a"), || none)?;
    let wrong = scene.refused(&["disk", "add", "a=floppy:1M"])?;
    check(wrong.contains("disk a"), || wrong)?;
    check(Connection::open(&scene.path("nbd"), "a").is_err(), || {
        "a removed disk is found".into()
    })?;
    scene.daemon.stop()
}

fn any_order() -> Result<(), Stop> {
    let mut scene = Scene::new()?;
    let mut client = scene.client()?;
    // 200 requests, of which the server has 64 at work at most.
    let mut wanted: Vec<u64> = Vec::new();
    for n in 0..100 {
        wanted.push(client.send(
            "disk.add",
            json!({"name": format!("d{n}"), "volume": "mem:1M"}),
        )?);
        wanted.push(client.send("disk.list", json!({}))?);
    }
    let mut seen = Vec::new();
    for _ in &wanted {
        let response = client.receive()?;
        check(response.get("error").is_none(), || response.to_string())?;
        seen.extend(response["id"].as_u64());
    }
    seen.sort_unstable();
    check(seen == wanted, || format!("{seen:?}"))?;
    let disks = client.call("disk.list", json!({"most": 7}))?;
    check(
        disks["disks"].as_array().is_some_and(|d| d.len() == 7),
        || disks.to_string(),
    )?;
    check(disks["next"].is_string(), || disks.to_string())?;
    scene.daemon.stop()
}

/// A client that has the answer to its request may ask for a stream: the request is over for the server, too.
fn stream_follows() -> Result<(), Stop> {
    let scene = Scene::new()?;
    for _ in 0..300 {
        let mut control = Control::open(&scene.path("ctl"))?;
        control.must("stat", json!({}))?;
        control.must("events", json!({}))?;
    }
    Ok(())
}

fn lines() -> Result<(), Stop> {
    let mut scene = Scene::new()?;
    let mut client = scene.client()?;
    let mut ask = |line: &str| -> Result<Value, Stop> {
        client.lines.get_ref().write_all(line.as_bytes())?;
        client.receive()
    };
    for (line, code) in [
        ("{\n", -32700),
        ("[]\n", -32600),
        (
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"no.such\"}\n",
            -32601,
        ),
        (
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"disk.show\"}\n",
            -32602,
        ),
        (
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"disk.show\",\"params\":{\"name\":\"x\"}}\n",
            2,
        ),
        (
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"disk.list\",\"params\":{\"x\":1}}\n",
            -32602,
        ),
        (
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"disk.add\",\"params\":{\"name\":\"x\",\"volume\":\"mem:1M\",\"timeout_secs\":0}}\n",
            -32602,
        ),
    ] {
        let answer = ask(line)?;
        check(answer["error"]["code"] == code, || {
            format!("{line}{answer}")
        })?;
    }
    // A request without id is carried out and gets no response.
    let quiet = "{\"jsonrpc\":\"2.0\",\"method\":\"disk.add\",\"params\":{\"name\":\"q\",\"volume\":\"mem:1M\"}}\n";
    let version = "{\"jsonrpc\":\"2.0\",\"id\":\"v\",\"method\":\"pvblk.version\"}\n";
    let answer = ask(&format!("{quiet}\n\n{version}"))?;
    check(
        answer["id"] == "v" && answer["result"]["protocol"] == 1,
        || answer.to_string(),
    )?;
    let start = Instant::now();
    while scene.call("disk.show", json!({"name": "q"})).is_err() {
        check(start.elapsed() < HANG, || "it isn't added".into())?;
    }
    // A line that never ends.
    let mut client = scene.client()?;
    let long = format!("{{{}", " ".repeat(17 << 10));
    let _ = client.lines.get_ref().write_all(long.as_bytes());
    let answer = client.receive()?;
    check(answer["error"]["code"] == -32600, || answer.to_string())?;
    // Lines of earlier versions.
    let mut socket = UnixStream::connect(scene.path("ctl"))?;
    socket.write_all(b"memory {\"memory\":\"report\"}\n")?;
    let mut said = String::new();
    BufReader::new(socket).read_line(&mut said)?;
    check(said == "ok\n", || said)?;
    let memory = scene.call("memory.ask", json!({"question": {"memory": "report"}}))?;
    check(memory["settings"].is_object(), || memory.to_string())?;
    scene.daemon.stop()
}

fn opening_hangs() -> Result<(), Stop> {
    let medium = SlowMedium::new()?;
    let path = medium.add("disk", MIB)?;
    medium.set("disk", &[Kind::Open], Rule::Hold);
    let mut scene = Scene::new()?;
    let mut client = scene.client()?;
    let slow =
        json!({"name": "slow", "volume": format!("file:{}", path.display()), "timeout_secs": 1});
    let slow = client.send("disk.add", slow)?;
    medium.wait_held("disk", &[Kind::Open], 1)?;
    // Another one, on the same connection, comes and goes beside it.
    for (method, params) in [
        ("disk.add", json!({"name": "quick", "volume": "mem:1M"})),
        ("disk.remove", json!({"name": "quick"})),
    ] {
        let id = client.send(method, params)?;
        let first = client.receive()?;
        let answer = match first["id"] == slow {
            // The machine was held up for a second: the rest is tested all the same.
            true => {
                check(first["error"]["code"] == 5, || first.to_string())?;
                client.receive()?
            }
            false => first,
        };
        check(answer["id"] == id && answer.get("error").is_none(), || {
            answer.to_string()
        })?;
    }
    let shown = scene.call("disk.show", json!({"name": "slow"}))?;
    check(shown["state"] == "opening", || shown.to_string())?;
    let start = Instant::now();
    let again = || scene.call("disk.add", json!({"name": "slow", "volume": "mem:1M"}));
    let busy = code(again())?;
    check(busy == 6, || format!("{busy}"))?;
    // Once it has given up, the open that ends is closed again, and the name is free.
    let shown = || scene.call("disk.show", json!({"name": "slow"}));
    std::thread::sleep(Duration::from_millis(1500));
    medium.heal("disk");
    while shown().is_ok() {
        check(start.elapsed() < HANG, || "its name isn't freed".into())?;
        std::thread::sleep(Duration::from_millis(10));
    }
    again()?;
    scene.daemon.stop()
}

/// A disk with a write that its medium holds.
fn held(scene: &Scene, medium: &SlowMedium) -> Result<Connection, Stop> {
    let path = medium.add("disk", MIB)?;
    let volume = format!("file:{}", path.display());
    scene.call("disk.add", json!({"name": "a", "volume": volume}))?;
    let mut connection = Connection::open(&scene.path("nbd"), "a")?;
    medium.set("disk", &[Kind::Fsync], Rule::Hold);
    connection.send(Command::Write, 1, 0, &[7; 4096])?;
    let reply = connection.receive()?;
    check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
    connection.send(Command::Flush, 2, 0, &[])?;
    medium.wait_held("disk", &[Kind::Fsync], 1)?;
    Ok(connection)
}

fn forced() -> Result<(), Stop> {
    let medium = SlowMedium::new()?;
    let mut scene = Scene::new()?;
    let connection = held(&scene, &medium)?;
    let used = code(scene.call("disk.remove", json!({"name": "a"})))?;
    check(used == 4, || format!("{used}"))?;
    let remove = json!({"name": "a", "force": true, "timeout_secs": 0.2});
    let late = code(scene.call("disk.remove", remove))?;
    check(late == 5, || format!("{late}"))?;
    // The name is free, the backing isn't.
    let volume = format!("file:{}", medium.point().join("disk").display());
    let locked = code(scene.call("disk.add", json!({"name": "b", "volume": volume})))?;
    check(locked == 1, || format!("{locked}"))?;
    scene.call("disk.add", json!({"name": "a", "volume": "mem:1M"}))?;
    let list = scene.call("disk.list", json!({}))?;
    let states: Vec<_> = list["disks"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|d| &d["state"])
        .collect();
    check(states == ["serving", "removing"], || list.to_string())?;
    medium.heal("disk");
    let start = Instant::now();
    while scene
        .call("disk.add", json!({"name": "b", "volume": volume}))
        .is_err()
    {
        check(start.elapsed() < HANG, || "its backing isn't freed".into())?;
        std::thread::sleep(Duration::from_millis(10));
    }
    let list = scene.call("disk.list", json!({}))?;
    check(
        list["disks"].as_array().is_some_and(|d| d.len() == 2),
        || list.to_string(),
    )?;
    drop(connection);
    scene.daemon.stop()
}

fn stop() -> Result<(), Stop> {
    let medium = SlowMedium::new()?;
    let mut scene = Scene::new()?;
    let connection = held(&scene, &medium)?;
    let remove = json!({"name": "a", "force": true, "timeout_secs": 0.2});
    let late = code(scene.call("disk.remove", remove))?;
    check(late == 5, || format!("{late}"))?;
    scene.daemon.signal(rustix::process::Signal::TERM)?;
    // It waits: the disk's flush is at the medium.
    std::thread::sleep(Duration::from_millis(500));
    check(
        Path::new(&format!("/proc/{}/task", scene.daemon.pid())).exists(),
        || "it is gone".into(),
    )?;
    medium.heal("disk");
    let status = scene.daemon.wait(HANG)?;
    check(status.success(), || scene.daemon.lines().join("\n"))?;
    drop(connection);
    Ok(())
}

/// Counts of a process: descriptors, threads, and kilobytes of private memory.
fn counts(pid: u32) -> Result<(usize, usize, u64), Stop> {
    let count = |what: &str| -> Result<usize, Stop> {
        Ok(std::fs::read_dir(format!("/proc/{pid}/{what}"))?.count())
    };
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    Ok((count("fd")?, count("task")?, kib.unwrap_or(0)))
}

fn thousand() -> Result<(), Stop> {
    let mut scene = Scene::new()?;
    let mut client = scene.client()?;
    let file = scene.path("a.img");
    File::create(&file)?.set_len(MIB)?;
    let mut round = |n: usize| -> Result<(), Stop> {
        let volume = match n % 3 {
            0 => format!("file:{}", file.display()),
            1 => "cache:1M:mem:1M".to_owned(),
            _ => "mem:1M".to_owned(),
        };
        let socket = stage::unix(&scene.path("vm"));
        let disk = json!({"name": format!("d{n}"), "volume": volume, "vhost_user": socket});
        client.call("disk.add", disk)?;
        client.call("disk.remove", json!({"name": format!("d{n}")}))?;
        Ok(())
    };
    (0..100).try_for_each(&mut round)?;
    let pid = scene.daemon.pid();
    settle(pid)?;
    let before = counts(pid)?;
    (100..1100).try_for_each(&mut round)?;
    settle(pid)?;
    let after = counts(pid)?;
    check((after.0, after.1) == (before.0, before.1), || {
        format!("descriptors, threads, KiB: {before:?} before, {after:?} after")
    })?;
    // A thousand names, and what the heap keeps free.
    check(after.2 < before.2 + 4096, || {
        format!("descriptors, threads, KiB: {before:?} before, {after:?} after")
    })?;
    let memory = scene.call("memory.ask", json!({"question": {"memory": "report"}}))?;
    check(
        memory["disks"].as_array().is_some_and(Vec::is_empty),
        || memory["disks"].to_string(),
    )?;
    let owners = memory["owners"].as_array().map_or(0, Vec::len);
    check(owners < 50, || format!("{owners} lines on the memory bill"))?;
    scene.daemon.stop()
}

/// Waits until threads that idle have ended: the number is the same for three seconds.
fn settle(pid: u32) -> Result<(), Stop> {
    let (start, mut same) = (Instant::now(), 0);
    let mut last = counts(pid)?;
    while same < 30 {
        check(start.elapsed() < HANG, || "threads come and go".into())?;
        std::thread::sleep(Duration::from_millis(100));
        let now = counts(pid)?;
        same = match (now.0, now.1) == (last.0, last.1) {
            true => same + 1,
            false => 0,
        };
        last = now;
    }
    Ok(())
}

fn exports() -> Result<(), Stop> {
    let mut scene = Scene::new()?;
    scene.said(&["disk", "add", "a=mem:1M"])?;
    let vm = stage::unix(&scene.path("vm"));
    let of_vm = ["--disk", "a", "--vhost-user", &vm];
    scene.said(&[&["export", "add"], &of_vm[..]].concat())?;
    check(scene.path("vm").exists(), || "there is no socket".into())?;
    let shown = scene.said(&["disk", "show", "a"])?;
    check(shown.contains("vhost-user:unix:"), || shown)?;
    let twice = scene.refused(&[&["export", "add"], &of_vm[..]].concat())?;
    check(twice.contains("already"), || twice)?;
    scene.said(&[&["export", "remove"], &of_vm[..]].concat())?;
    check(!scene.path("vm").exists(), || "the socket is left".into())?;
    let other = stage::unix(&scene.path("other"));
    scene.said(&["export", "add", "--nbd", &other])?;
    let connection = Connection::open(&scene.path("other"), "a")?;
    let used = scene.refused(&["export", "remove", "--nbd", &other])?;
    check(used.contains("--force"), || used)?;
    scene.said(&["export", "remove", "--nbd", &other, "--force"])?;
    check(!scene.path("other").exists(), || {
        "the socket is left".into()
    })?;
    drop(connection);
    let rings = stage::unix(&scene.path("rings"));
    scene.said(&["export", "add", "--local", &rings])?;
    let front = stage::unix(&scene.path("front"));
    let mut attach = Daemon::start([
        "attach",
        &rings,
        "--disk",
        "a",
        "--nbd",
        &front,
        "--reconnect",
        "0",
    ])?;
    let used = scene.refused(&["disk", "remove", "a"])?;
    check(used.contains("--force"), || used)?;
    scene.said(&["disk", "remove", "a", "--force"])?;
    attach.wait(HANG)?;
    let which = scene.refused(&["export", "add", "--disk", "a"])?;
    check(which.contains("which export?"), || which)?;
    scene.daemon.stop()
}
