//! A server in a sandbox: it serves as one without, asks its parent for files and sockets, and ends with it in order.

use pvblk_e2e::control::Control;
use pvblk_e2e::credentials::{write_client, write_server};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::sandbox::{need_sandbox, user};
use pvblk_e2e::tools::{fio_verify, need_fio_nbd, run};
use pvblk_e2e::{Daemon, MIB, Stop, daemon, run_all, stage};
use pvblk_testing::certs::{Authority, Time};
use rustix::process::{Signal, geteuid};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("disks_are_served_as_without_a_sandbox", served),
        ("the_child_has_no_rights", rights),
        ("files_are_opened_where_that_is_allowed", files),
        ("servers_are_connected_to_again_and_again", servers),
        (
            "servers_are_connected_to_where_that_is_allowed",
            allowed_servers,
        ),
        ("credentials_are_read_anew_for_each_connection", credentials),
        (
            "credentials_are_read_where_that_is_allowed",
            allowed_credentials,
        ),
        ("the_parent_runs_the_program_of_events", on_event),
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
        need_sandbox()?;
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
        self.start_with(disks, &[])
    }

    fn start_with(&self, disks: &[String], more: &[String]) -> Result<Daemon, Stop> {
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
        args.extend_from_slice(more);
        Daemon::start(args)
    }

    fn rings(&self, name: &str) -> String {
        format!("rings:{}", self.unix(name))
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
    let child = server.serving_pid()?;
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
        let is_told = answer.contains("Permission denied") && answer.contains("--open-in");
        check(is_told, || answer.clone())?;
    }
    let outside = scene.at("outside");
    let named = |l: &String| l.contains("asked for") && l.contains(&outside.display().to_string());
    check(server.lines().iter().any(named), || {
        format!("{:?}", server.lines())
    })?;
    let image = json!({"name": "n", "volume": "rbd:pool/image"});
    control.send("disk.add", &image)?;
    let answer = control.receive()?.unwrap_or_default().to_string();
    check(answer.contains("names no image"), || answer.clone())?;
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

/// Another server's disks `a` and `b`, which is killed and started again.
fn origin(scene: &Scene) -> Result<Daemon, Stop> {
    Daemon::start([
        "serve",
        "--disk",
        &format!("a=file:{}", scene.at("m0").display()),
        "--disk",
        &format!("b=file:{}", scene.at("m1").display()),
        "--nbd",
        &scene.unix("origin-nbd"),
        "--local",
        &scene.unix("origin-rings"),
    ])
}

/// A server that stays, whose clients don't find it anew: each start has another port, and vhost-user's connections are made once.
fn steady(scene: &Scene) -> Result<Daemon, Stop> {
    let vhost = format!("a={}", scene.unix("steady-vhost"));
    Daemon::start([
        "serve",
        "--disk",
        "a=mem:32M",
        "--disk",
        "b=mem:32M",
        "--nbd",
        "tcp:127.0.0.1:0",
        "--vhost-user",
        &vhost,
    ])
}

/// The port of an NBD server on loopback.
fn port(server: &Daemon) -> Result<u16, Stop> {
    let lines = server.lines();
    let found = lines.iter().find_map(|line| {
        let rest = line.split_once("nbd://127.0.0.1:")?.1;
        rest.split('/').next()?.parse().ok()
    });
    found.ok_or_else(|| Stop::Fail(format!("no port in {lines:?}")))
}

/// The child serves disks of other servers, which are killed and come back.
fn servers() -> Result<(), Stop> {
    need_fio_nbd()?;
    let scene = Scene::new()?;
    let mut origin_ = origin(&scene)?;
    let steady = steady(&scene)?;
    let disks = [
        format!(
            "n=nbd+unix:///a?socket={}",
            scene.at("origin-nbd").display()
        ),
        format!("r={},disk=b", scene.rings("origin-rings")),
        format!("t=cache:4M:nbd://127.0.0.1:{}/b", port(&steady)?),
        format!("v=vhost-user:{}", scene.unix("steady-vhost")),
    ];
    let mut server = scene.start(&[&[scene.disk_a()][..], &disks].concat())?;
    let job = ["--rw=randrw", "--bs=16k", "--iodepth=16", "--size=4m"];
    let verify = |disk| fio_verify(&stage::uri(&scene.at("nbd"), disk), &job, HANG);
    for disk in ["n", "r", "t", "v"] {
        verify(disk)?;
    }
    for _ in 0..3 {
        origin_.kill()?;
        origin_ = origin(&scene)?;
        verify("n")?;
        verify("r")?;
    }
    server.stop()
}

fn allowed_servers() -> Result<(), Stop> {
    let scene = Scene::new()?;
    std::fs::create_dir(scene.at("servers"))?;
    let _origin = origin(&scene)?;
    let steady = steady(&scene)?;
    let port = port(&steady)?;
    symlink(scene.at("origin-nbd"), scene.at("servers/link"))?;
    symlink(scene.at("origin-rings"), scene.at("servers/rings"))?;
    let _inside = Daemon::start([
        "serve",
        "--disk",
        "a=mem:1M",
        "--nbd",
        &scene.unix("servers/nbd"),
    ])?;
    let folder = scene.unix("servers");
    let more = ["--connect-to".to_owned(), folder];
    let mut server = scene.start_with(&[scene.disk_a()], &more)?;
    let mut control = scene.control()?;
    let unix = |name: &str| format!("nbd+unix:///a?socket={}", scene.at(name).display());
    let right = json!({"name": "right", "volume": unix("servers/nbd")});
    control.must("disk.add", right)?;
    for volume in [
        unix("origin-nbd"),
        unix("servers/link"),
        unix("servers/../origin-nbd"),
        format!("nbd://127.0.0.1:{port}/a"),
        format!("nbd://localhost:{port}/a"),
        format!("{},disk=b", scene.rings("servers/rings")),
        format!("vhost-user:{}", scene.unix("steady-vhost")),
    ] {
        control.send("disk.add", &json!({"name": "wrong", "volume": volume}))?;
        let answer = control.receive()?.unwrap_or_default();
        let text = answer["error"]["message"].as_str().unwrap_or_default();
        let is_told =
            text.contains("a server in a sandbox connects to servers that its configuration names");
        check(is_told && !text.contains('\n'), || {
            format!("{volume}: {answer}")
        })?;
    }
    let named = |l: &String| l.contains("asked for a connection") && l.contains("origin-nbd");
    check(server.lines().iter().any(named), || {
        format!("{:?}", server.lines())
    })?;
    server.stop()
}

/// A server with TLS, whose disks `a` and `b` need a client's certificate; its credentials and those of its client are made anew, by an authority that nobody
/// has heard of before.
fn secured_origin(scene: &Scene) -> Result<Daemon, Stop> {
    let authority = Authority::default();
    write_server(&scene.at("server"), &authority)?;
    let client = authority.client("vm1.example", Time::Now);
    for folder in ["client", "in/client", "elsewhere"] {
        write_client(&scene.at(folder), &authority, Some(&client))?;
    }
    // They are the parent's only.
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(scene.at("client"), private)?;
    let server = scene.at("server");
    Daemon::start([
        "serve",
        "--disk",
        &format!("a=file:{}", scene.at("m0").display()),
        "--disk",
        &format!("b=file:{}", scene.at("m1").display()),
        "--nbd",
        &format!("{},tls={}", scene.unix("origin"), server.display()),
    ])
}

fn secured(scene: &Scene, disk: &str, folder: &str) -> String {
    let (socket, folder) = (scene.at("origin"), scene.at(folder));
    let (socket, folder) = (socket.display(), folder.display());
    format!("nbds+unix:///{disk}?socket={socket}&tls-certificates={folder}")
}

/// The child, which can't open them, has the parent do it; after each restart of the server only new ones are of use.
fn credentials() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let mut origin = secured_origin(&scene)?;
    let disk = format!("n={}", secured(&scene, "a", "client"));
    let mut server = scene.start(&[scene.disk_a(), disk])?;
    let mut connection = Connection::open(&scene.at("nbd"), "n")?;
    connection.patience(HANG)?;
    for round in 0..3_u8 {
        let place = u64::from(round) * BLOCK as u64;
        connection.send(Command::Write, 1, place, &[round + 1; BLOCK])?;
        let answer = connection.receive()?;
        check(answer.is_some_and(|r| r.error == 0), || {
            format!("round {round}: {answer:?}, {:?}", server.lines())
        })?;
        origin.kill()?;
        origin = secured_origin(&scene)?;
    }
    drop(connection);
    server.stop()?;
    origin.stop()?;
    let mut data = vec![0; 3 * BLOCK];
    File::open(scene.at("m0"))?.read_exact_at(&mut data, 0)?;
    let is_written = |(n, block): (usize, &[u8])| block.iter().all(|&b| usize::from(b) == n + 1);
    check(data.chunks(BLOCK).enumerate().all(is_written), || {
        "an answered write is lost".into()
    })
}

fn allowed_credentials() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let _origin = secured_origin(&scene)?;
    symlink(scene.at("elsewhere"), scene.at("in/link"))?;
    let named = format!("n={}", secured(&scene, "a", "client"));
    let mut server = scene.start(&[scene.disk_a(), named])?;
    let mut control = scene.control()?;
    for (name, right) in [("named", "client"), ("below", "in/client")] {
        let volume = secured(&scene, "b", right);
        control.must("disk.add", json!({"name": name, "volume": volume}))?;
        control.must("disk.remove", json!({"name": name}))?;
    }
    for wrong in ["elsewhere", "in/link", "in/../elsewhere"] {
        let volume = secured(&scene, "b", wrong);
        control.send("disk.add", &json!({"name": "wrong", "volume": volume}))?;
        let answer = control.receive()?.unwrap_or_default();
        let text = answer["error"]["message"].as_str().unwrap_or_default();
        let file = scene.at(wrong).join("ca-cert.pem");
        let expected = format!("TLS: reading {}: Permission denied", file.display());
        check(text.contains(&expected) && !text.contains('\n'), || {
            format!("{wrong}: {answer}")
        })?;
    }
    let file = scene.at("elsewhere/ca-cert.pem").display().to_string();
    let told = |l: &String| l.contains("asked for") && l.contains(&file);
    check(server.lines().iter().any(told), || {
        format!("{:?}", server.lines())
    })?;
    server.stop()
}

/// The program has the parent's rights, and is started by it.
fn on_event() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let (program, out) = (scene.at("program"), scene.at("events"));
    let text = format!(
        "#!/bin/sh\necho \"$PPID $(id -u) $1 $2 $PVBLK_EVENT_KIND\" >>{}\n",
        out.display()
    );
    std::fs::write(&program, text)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let more = ["--on-event".to_owned(), program.display().to_string()];
    let mut server = scene.start_with(&[scene.disk_a()], &more)?;
    let volume = format!("file:{}", scene.at("in/later").display());
    let mut control = scene.control()?;
    control.must("disk.add", json!({"name": "later", "volume": volume}))?;
    let (parent, user) = (server.pid(), geteuid().as_raw());
    let expected = format!("{parent} {user} disk-added later disk-added");
    let lines = || std::fs::read_to_string(&out).unwrap_or_default();
    wait("the program runs", || {
        lines().lines().any(|l| l == expected)
    })?;
    server.stop()?;
    check(server.complaint().is_none(), || {
        format!("{:?}", server.complaint())
    })
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
    let child = server.serving_pid()?;
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
    let child = server.serving_pid()?;
    let _connection = write_to_cache(&scene)?;
    server.kill_first()?;
    wait("the child ends", || gone(child))?;
    let mut data = vec![0; BLOCK];
    File::open(scene.at("outside"))?.read_exact_at(&mut data, 0)?;
    check(data.iter().all(|&b| b == 9), || {
        "an answered write is lost".into()
    })
}

fn mistakes() -> Result<(), Stop> {
    let scene = Scene::new()?;
    let user = user();
    let disk = ["--disk", "a=mem:1M", "--nbd"];
    let nbd = scene.unix("nbd");
    for (more, expected) in [
        (&["--sandbox", "no-such-user"][..], "no such user"),
        (&["--sandbox", "root"], "without privileges"),
        (&["--open-in", "/tmp"], "give --sandbox USER too"),
        (&["--connect-to", "tcp:h:1"], "give --sandbox USER too"),
        (
            &["--sandbox", &user, "--connect-to", "h:1"],
            "write tcp:HOST:PORT",
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
