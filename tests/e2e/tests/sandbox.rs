//! A server in a sandbox: it serves as one without, asks its parent for files and sockets, and ends with it in order.

use pvblk_e2e::control::Control;
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{fio_verify, need_fio_nbd, run};
use pvblk_e2e::{Daemon, MIB, Stop, daemon, run_all, stage};
use rustix::process::{Signal, geteuid};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("disks_are_served_as_without_a_sandbox", served),
        ("the_child_has_no_rights", rights),
        ("files_are_opened_where_that_is_allowed", files),
        ("the_parent_ends_with_its_child", child_ends),
        ("the_child_flushes_when_its_parent_is_gone", parent_ends),
        ("mistakes_are_told_before_anything_is_served", mistakes),
    ])
}

/// A limit that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);
const BLOCK: usize = 64 << 10;

struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Result<Scene, Stop> {
        if !Path::new("/sys/kernel/security/lsm").exists() && landlock_is_missing() {
            return Stop::skip("this kernel has no Landlock");
        }
        let dir = tempfile::tempdir()?;
        let scene = Scene { dir };
        std::fs::create_dir(scene.at("in"))?;
        for name in ["a", "m0", "m1", "m2", "in/later", "outside"] {
            File::create(scene.at(name))?.set_len(32 * MIB)?;
        }
        Ok(scene)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn unix(&self, name: &str) -> String {
        stage::unix(&self.at(name))
    }

    fn start(&self, disks: &[String]) -> Result<Daemon, Stop> {
        let mut args: Vec<String> = ["serve", "--sandbox"].map(String::from).into();
        args.push(user());
        args.extend(["--open-in".into(), self.at("in").display().to_string()]);
        for disk in disks {
            args.extend(["--disk".into(), disk.clone()]);
        }
        args.extend(["--nbd".into(), self.unix("nbd")]);
        args.extend(["--local".into(), self.unix("rings")]);
        args.extend(["--vhost-user".into(), format!("a={}", self.unix("vhost"))]);
        args.extend(["--control".into(), self.unix("control")]);
        args.extend(["--web".into(), self.unix("web")]);
        Daemon::start(args)
    }

    fn disk_a(&self) -> String {
        format!("a=file:{}", self.at("a").display())
    }

    fn control(&self) -> Result<Control, Stop> {
        Control::open(&self.at("control"))
    }

    /// Files of sockets that are there.
    fn sockets(&self) -> Vec<&'static str> {
        let names = ["nbd", "rings", "vhost", "control", "web", "in/second"];
        let there = names.into_iter().filter(|n| self.at(n).exists());
        there.collect()
    }
}

/// Root's servers become `nobody`; others stay who they are.
fn user() -> String {
    match geteuid().is_root() {
        true => "nobody".into(),
        false => geteuid().as_raw().to_string(),
    }
}

/// True if a server says so.
fn landlock_is_missing() -> bool {
    let args = [
        "serve",
        "--sandbox",
        &user(),
        "--disk",
        "a=mem:1M",
        "--control",
        "none",
    ];
    let command = daemon::pvblk(args);
    let said = command.and_then(|c| run(c, HANG));
    said.is_ok_and(|s| s.stderr.contains("Landlock"))
}

/// The process that serves.
fn child_of(daemon: &Daemon) -> Result<u32, Stop> {
    let pid = daemon.pid();
    let tasks = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(tasks)?;
    let first = children.split_whitespace().next();
    match first.and_then(|c| c.parse().ok()) {
        Some(child) => Ok(child),
        None => Stop::fail("the server has no child"),
    }
}

fn gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |s| s.contains(") Z "))
}

fn wait(what: &str, mut done: impl FnMut() -> bool) -> Result<(), Stop> {
    let begin = Instant::now();
    while !done() {
        check(begin.elapsed() < HANG, || format!("never happened: {what}"))?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn served() -> Result<(), Stop> {
    need_fio_nbd()?;
    let scene = Scene::new()?;
    let members: Vec<String> = (0..3)
        .map(|n| scene.at(&format!("m{n}")).display().to_string())
        .collect();
    let mut create = vec!["raid", "create", "--raid-devices", "3"];
    create.extend(members.iter().map(String::as_str));
    let created = run(daemon::pvblk(create)?, HANG)?;
    created.success()?;
    let array = format!("r=cache:8M:raid5:[{}]", members.join("]["));
    let mut server = scene.start(&[scene.disk_a(), array, "m=mem:32M".into()])?;
    for disk in ["a", "r"] {
        let uri = stage::uri(&scene.at("nbd"), disk);
        let job = ["--rw=randrw", "--bs=16k", "--iodepth=16", "--size=16m"];
        fio_verify(&uri, &job, HANG)?;
    }
    for target in [
        format!("rings:{},disk=a", scene.unix("rings")),
        format!("vhost-user:{}", scene.unix("vhost")),
    ] {
        let job = ["--rw", "randwrite", "--bs", "4k", "--size", "4m"];
        let more = ["--iodepth", "8", "--option", "verify=crc32c"];
        let args = [&["bench", "--target", &target][..], &job, &more].concat();
        run(daemon::pvblk(args)?, HANG)?.success()?;
    }
    let mut control = scene.control()?;
    let list = control.must("disk.list", json!({}))?;
    check(
        list["disks"].as_array().is_some_and(|d| d.len() == 3),
        || format!("{list}"),
    )?;
    server.stop()?;
    check(scene.sockets().is_empty(), || {
        format!("{:?} are left", scene.sockets())
    })?;
    check(server.complaint().is_none(), || {
        format!("{:?}", server.complaint())
    })
}

fn rights() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let server = scene.start(&[scene.disk_a()])?;
    let child = child_of(&server)?;
    let status = std::fs::read_to_string(format!("/proc/{child}/status"))?;
    let of = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key));
        line.unwrap_or_default().trim().to_owned()
    };
    for key in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        check(of(key) == "0000000000000000", || {
            format!("{key} {}", of(key))
        })?;
    }
    check(of("Seccomp:") == "2", || "no filter of system calls".into())?;
    check(of("NoNewPrivs:") == "1", || "NoNewPrivs".into())?;
    if geteuid().is_root() {
        check(of("CapBnd:") == "0000000000000000", || of("CapBnd:"))?;
        check(!of("Uid:").split_whitespace().any(|id| id == "0"), || {
            of("Uid:")
        })?;
        check(of("Groups:").is_empty(), || of("Groups:"))?;
    }
    // Each thread, not only the first.
    for task in std::fs::read_dir(format!("/proc/{child}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("status"))?;
        check(text.contains("Seccomp:\t2"), || text.clone())?;
    }
    Ok(())
}

fn files() -> Result<(), Stop> {
    let scene = Scene::new()?;
    symlink(scene.at("outside"), scene.at("in/link"))?;
    let mut server = scene.start(&[scene.disk_a()])?;
    let mut control = scene.control()?;
    let add = |name: &str| {
        let volume = format!("file:{}", scene.at(name).display());
        json!({"name": name.replace('/', "-"), "volume": volume})
    };
    control.must("disk.add", add("in/later"))?;
    for wrong in ["outside", "in/link"] {
        control.send("disk.add", &add(wrong))?;
        let answer = control.receive()?.unwrap_or_default().to_string();
        check(answer.contains("Permission denied"), || answer.clone())?;
    }
    let outside = scene.at("outside");
    let named = |l: &String| l.contains("asked for") && l.contains(&outside.display().to_string());
    check(server.lines().iter().any(named), || {
        format!("{:?}", server.lines())
    })?;
    let remote = json!({"name": "n", "volume": "nbd://127.0.0.1:1/a"});
    control.send("disk.add", &remote)?;
    let answer = control.receive()?.unwrap_or_default().to_string();
    check(answer.contains("give no --sandbox"), || answer.clone())?;
    // Sockets likewise.
    control.must("export.add", json!({"nbd": scene.unix("in/second")}))?;
    control.send("export.add", &json!({"nbd": scene.unix("third")}))?;
    let answer = control.receive()?.unwrap_or_default().to_string();
    check(answer.contains("--open-in"), || answer.clone())?;
    let mut connection = Connection::open(&scene.at("in/second"), "in-later")?;
    connection.send(Command::Write, 1, 0, &[7; BLOCK])?;
    check(connection.receive()?.is_some_and(|r| r.error == 0), || {
        "a write".into()
    })?;
    drop(connection);
    let second = json!({"nbd": scene.unix("in/second"), "force": true});
    control.must("export.remove", second)?;
    wait("the socket's file goes", || !scene.at("in/second").exists())?;
    server.stop()
}

/// A write whose data is in the cache only.
fn write_to_cache(scene: &Scene) -> Result<Connection, Stop> {
    let mut connection = Connection::open(&scene.at("nbd"), "c")?;
    connection.send(Command::Write, 1, 0, &[9; BLOCK])?;
    check(connection.receive()?.is_some_and(|r| r.error == 0), || {
        "a write".into()
    })?;
    Ok(connection)
}

fn child_ends() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let mut server = scene.start(&[scene.disk_a()])?;
    let child = child_of(&server)?;
    let child = i32::try_from(child)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let child = child.ok_or_else(|| Stop::Fail("its number".into()))?;
    rustix::process::kill_process(child, Signal::KILL)?;
    let status = server.wait(HANG)?;
    check(status.code() == Some(1), || format!("{status}"))?;
    let told = |l: &String| l.contains("was ended by signal 9");
    check(server.lines().iter().any(told), || {
        format!("{:?}", server.lines())
    })?;
    check(scene.sockets().is_empty(), || {
        format!("{:?} are left", scene.sockets())
    })?;
    // The next one finds nothing in its way.
    scene.start(&[scene.disk_a()])?.stop()
}

fn parent_ends() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let cached = format!("c=cache:4M:file:{}", scene.at("outside").display());
    let mut server = scene.start(&[scene.disk_a(), cached])?;
    let child = child_of(&server)?;
    let _connection = write_to_cache(&scene)?;
    server.kill()?;
    wait("the child ends", || gone(child))?;
    let mut data = vec![0; BLOCK];
    File::open(scene.at("outside"))?.read_exact_at(&mut data, 0)?;
    check(data.iter().all(|&b| b == 9), || {
        "an answered write is lost".into()
    })
}

fn mistakes() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let program = scene.at("program");
    std::fs::write(&program, "#!/bin/sh\n")?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let program = program.display().to_string();
    let user = user();
    let disk = ["--disk", "a=mem:1M", "--nbd"];
    let nbd = scene.unix("nbd");
    for (more, expected) in [
        (&["--sandbox", "no-such-user"][..], "no such user"),
        (&["--sandbox", "root"], "without privileges"),
        (&["--open-in", "/tmp"], "give --sandbox USER too"),
        (
            &["--sandbox", &user, "--on-event", &program],
            "--on-event runs a program",
        ),
        (
            &["--sandbox", &user, "--disk", "n=nbd://127.0.0.1:1/a"],
            "connects to another server",
        ),
        (
            &["--sandbox", &user, "--open-in", "/no/such/folder"],
            "/no/such/folder",
        ),
    ] {
        let args = [&["serve"][..], &disk, &[&nbd], more].concat();
        let out = run(daemon::pvblk(args)?, HANG)?;
        let is_told = out.stderr.contains(expected) && out.stderr.lines().count() == 1;
        let failed = out.status.is_some_and(|s| !s.success());
        check(is_told && failed, || {
            format!("{more:?}: {:?} {}", out.status, out.stderr)
        })?;
    }
    Ok(())
}
