//! NBD over TLS with the clients that people have: qemu-img, nbdinfo, nbdcopy, nbdkit; and rights of clients by certificate, user and group.

use pvblk_e2e::credentials::{write_client, write_server};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{compare, need, run, run_ok, tool};
use pvblk_e2e::{Daemon, MIB, Stop, pattern, run_all, stage};
use pvblk_testing::certs::{Authority, Time};
use serde_json::Value;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("qemu_img_by_tls", qemu_img),
        ("nbdcopy_by_tls", nbdcopy),
        ("nbdkit_by_tls", nbdkit),
        ("wrong_certificates_are_refused", wrong_certificates),
        ("nobody_gets_a_disk_in_the_clear", downgrade),
        ("tls_may_be_optional", optional),
        ("certificates_give_rights", rights),
        ("new_credentials_need_no_restart", new_credentials),
        ("sockets_are_for_a_group", groups),
        ("mistakes_are_told", mistakes),
        ("a_disk_of_another_server_by_tls", own_client),
        ("a_disk_of_nbdkit_by_tls", own_client_of_nbdkit),
        ("a_server_with_tls_may_die", own_client_reconnects),
    ])
}

/// A server with TLS on a port of this machine, and the folders of its clients.
struct Bed {
    folder: TempDir,
    authority: Authority,
    server: Daemon,
}

impl Bed {
    /// `options` follow the address; the disks are `a` and `b`, of 64 MiB.
    fn new(options: &str) -> Result<Bed, Stop> {
        let folder = tempfile::tempdir()?;
        let authority = Authority::default();
        let tls = folder.path().join("tls");
        write_server(&tls, &authority)?;
        let (a, b) = (folder.path().join("a.img"), folder.path().join("b.img"));
        for file in [&a, &b] {
            std::fs::File::create(file)?.set_len(64 * MIB)?;
        }
        let server = Daemon::start([
            "serve".to_owned(),
            format!("--disk=a={}", a.display()),
            format!("--disk=b={}", b.display()),
            format!("--nbd=tcp:127.0.0.1:0,tls={}{options}", tls.display()),
        ])?;
        let bed = Bed {
            folder,
            authority,
            server,
        };
        let vm1 = bed.authority.client("vm1.example", Time::Now);
        write_client(&bed.path("vm1"), &bed.authority, Some(&vm1))?;
        Ok(bed)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn port(&self) -> Result<String, Stop> {
        let lines = self.server.lines();
        let found = lines.iter().find_map(|line| {
            let rest = line.split_once("nbds://127.0.0.1:")?.1;
            Some(rest.split('/').next()?.to_owned())
        });
        found.ok_or_else(|| Stop::Fail(format!("no port in {lines:?}")))
    }

    /// The URI of a disk for libnbd's programs, with the credentials of a client.
    fn uri(&self, disk: &str, client: &str) -> Result<String, Stop> {
        let (port, folder) = (self.port()?, self.path(client));
        Ok(format!(
            "nbds://localhost:{port}/{disk}?tls-certificates={}",
            folder.display()
        ))
    }

    /// Arguments by which QEMU's programs reach a disk.
    fn qemu(&self, disk: &str, client: &str) -> Result<[String; 4], Stop> {
        let (port, folder) = (self.port()?, self.path(client));
        Ok([
            "--object".into(),
            format!(
                "tls-creds-x509,id=t,endpoint=client,dir={}",
                folder.display()
            ),
            "--image-opts".into(),
            format!(
                "driver=raw,file.driver=nbd,file.host=localhost,file.port={port},file.export={disk},file.tls-creds=t"
            ),
        ])
    }

    /// A client's question that is to be refused; `why` is in its or the server's words.
    fn refuses(&self, uri: &str, why: &str) -> Result<(), Stop> {
        let said = run(tool("nbdinfo", [uri]), Duration::from_secs(60))?;
        let failed = said.status.is_some_and(|s| !s.success());
        let begin = Instant::now();
        loop {
            let words = format!("{} {}", said.stderr, self.server.lines().join("\n"));
            if failed && words.contains(why) {
                return Ok(());
            }
            // The server's log may come after the client's end.
            check(failed && begin.elapsed() < Duration::from_secs(60), || {
                format!("{uri} isn't refused with {why:?}: {said:?}, {words}")
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn info(uri: &str) -> Result<Value, Stop> {
    let said = run_ok("nbdinfo", ["--json", uri])?;
    Ok(serde_json::from_str(&said.stdout)?)
}

fn qemu_img() -> Result<(), Stop> {
    need(&["qemu-img", "cmp"])?;
    let mut bed = Bed::new("")?;
    let image = bed.path("image");
    pattern::write(&image, 64 * MIB, 1)?;
    let image_arg = image.display().to_string();
    let [object, creds, opts, target] = bed.qemu("a", "vm1")?;
    // --image-opts is about the source, --target-image-opts about the target.
    let source = format!("driver=raw,file.driver=file,file.filename={image_arg}");
    let to = [
        "convert",
        "-n",
        &object,
        &creds,
        &opts,
        "--target-image-opts",
        &source,
        &target,
    ];
    run_ok("qemu-img", to)?;
    run_ok(
        "qemu-img",
        ["compare", &object, &creds, &opts, &source, &target],
    )?;
    bed.server.stop()?;
    compare(&image, &bed.path("a.img"))
}

fn nbdcopy() -> Result<(), Stop> {
    need(&["nbdcopy", "nbdinfo", "cmp"])?;
    let mut bed = Bed::new("")?;
    let (image, back) = (bed.path("image"), bed.path("back"));
    pattern::write(&image, 64 * MIB, 2)?;
    let uri = bed.uri("a", "vm1")?;
    let about = info(&uri)?;
    check(about["TLS"] == true, || format!("no TLS: {about:#}"))?;
    // Four connections, with many requests in flight in each.
    let many = ["--connections=4", "--requests=64", "--flush"];
    let (image_arg, back_arg) = (image.display().to_string(), back.display().to_string());
    run_ok("nbdcopy", many.iter().copied().chain([&*image_arg, &uri]))?;
    run_ok("nbdcopy", many.iter().copied().chain([&*uri, &back_arg]))?;
    compare(&image, &back)?;
    bed.server.stop()?;
    compare(&image, &bed.path("a.img"))
}

fn nbdkit() -> Result<(), Stop> {
    need(&["nbdkit", "nbdcopy", "cmp"])?;
    let bed = Bed::new("")?;
    let image = bed.path("image");
    pattern::write(&image, 64 * MIB, 3)?;
    let (port, folder) = (bed.port()?, bed.path("vm1"));
    let run = format!("nbdcopy {} \"$uri\"", image.display());
    run_ok(
        "nbdkit",
        [
            "-U",
            "-",
            "nbd",
            "hostname=localhost",
            &format!("port={port}"),
            "export=b",
            "tls=require",
            &format!("tls-certificates={}", folder.display()),
            "--run",
            &run,
        ],
    )?;
    compare(&image, &bed.path("b.img"))
}

fn wrong_certificates() -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let bed = Bed::new("")?;
    info(&bed.uri("a", "vm1")?)?;
    let stranger = Authority::default();
    let clients = [
        ("none", None, "no certificates"),
        (
            "expired",
            Some(bed.authority.client("vm1.example", Time::Past)),
            "expired",
        ),
        (
            "stranger",
            Some(stranger.client("vm1.example", Time::Now)),
            "BadSignature",
        ),
    ];
    for (name, client, why) in clients {
        write_client(&bed.path(name), &bed.authority, client.as_ref())?;
        bed.refuses(&bed.uri("a", name)?, why)?;
    }
    // A client that trusts nobody but another authority.
    let vm1 = bed.authority.client("vm1.example", Time::Now);
    write_client(&bed.path("elsewhere"), &stranger, Some(&vm1))?;
    bed.refuses(&bed.uri("a", "elsewhere")?, "certificate")?;
    info(&bed.uri("a", "vm1")?)?;
    Ok(())
}

fn downgrade() -> Result<(), Stop> {
    need(&["nbdinfo", "qemu-img"])?;
    let bed = Bed::new("")?;
    let port = bed.port()?;
    // libnbd's word for NBD_REP_ERR_TLS_REQD.
    bed.refuses(&format!("nbd://localhost:{port}/a"), "not supported")?;
    let plain = format!("nbd://localhost:{port}/a");
    let said = run(tool("qemu-img", ["info", &plain]), Duration::from_secs(60))?;
    check(said.status.is_some_and(|s| !s.success()), || {
        format!("a disk in the clear: {said:?}")
    })
}

fn optional() -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let bed = Bed::new(",tls-mode=allow,verify-peer=no")?;
    let port = bed.port()?;
    let plain = info(&format!("nbd://localhost:{port}/a"))?;
    check(plain["TLS"] == false, || format!("{plain:#}"))?;
    write_client(&bed.path("none"), &bed.authority, None)?;
    let secured = info(&bed.uri("a", "none")?)?;
    check(secured["TLS"] == true, || format!("{secured:#}"))
}

fn rights() -> Result<(), Stop> {
    need(&["nbdinfo", "nbdcopy"])?;
    let bed = Bed::new(",allow=cert:vm1.example=a,allow=cert:backup=*:ro")?;
    let backup = bed.authority.client("backup", Time::Now);
    write_client(&bed.path("backup"), &bed.authority, Some(&backup))?;
    let read_only = |disk: &str, client: &str| -> Result<Value, Stop> {
        let about = info(&bed.uri(disk, client)?)?;
        Ok(about["exports"][0]["is_read_only"].clone())
    };
    check(read_only("a", "vm1")? == false, || {
        "vm1 may not write".into()
    })?;
    check(read_only("a", "backup")? == true, || {
        "backup may write a".into()
    })?;
    check(read_only("b", "backup")? == true, || {
        "backup may write b".into()
    })?;
    bed.refuses(&bed.uri("b", "vm1")?, "has no right to disk b")?;
    let listed = run_ok("nbdinfo", ["--list", "--json", &bed.uri("", "vm1")?])?;
    let listed: Value = serde_json::from_str(&listed.stdout)?;
    let names: Vec<&Value> = listed["exports"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|e| &e["export-name"])
        .collect();
    check(names == ["a"], || format!("{listed:#}"))?;
    let image = bed.path("image");
    pattern::write(&image, MIB, 4)?;
    let write = tool(
        "nbdcopy",
        [&image.display().to_string(), &bed.uri("a", "backup")?],
    );
    let said = run(write, Duration::from_secs(60))?;
    check(said.status.is_some_and(|s| !s.success()), || {
        format!("backup wrote: {said:?}")
    })
}

/// The server's certificate is replaced by one of another authority.
fn new_credentials() -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let bed = Bed::new("")?;
    info(&bed.uri("a", "vm1")?)?;
    let next = Authority::default();
    let vm1 = next.client("vm1.example", Time::Now);
    write_client(&bed.path("next"), &next, Some(&vm1))?;
    write_server(&bed.path("tls"), &next)?;
    let (uri, begin) = (bed.uri("a", "next")?, Instant::now());
    while let Err(e) = info(&uri) {
        if begin.elapsed() > Duration::from_secs(60) {
            return Err(e);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    bed.refuses(&bed.uri("a", "vm1")?, "certificate")
}

/// A socket that a group may connect to, and rules for users.
fn groups() -> Result<(), Stop> {
    need(&["nbdinfo", "setpriv"])?;
    if !rustix::process::geteuid().is_root() {
        return Stop::skip("only root can give a socket to another group");
    }
    let folder = tempfile::tempdir()?;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755))?;
    let socket = folder.path().join("nbd.sock");
    let place = socket.display();
    let rules = "allow=uid:root=*,allow=gid:65534=a:ro";
    let mut server = Daemon::start([
        "serve".to_owned(),
        "--disk=a=mem:8M".to_owned(),
        "--disk=b=mem:8M".to_owned(),
        format!("--nbd=unix:{place},socket-group=nogroup,{rules}"),
        format!("--control=unix:{}", folder.path().join("ctl").display()),
    ])?;
    clients_are_listed(&socket, folder.path())?;
    let meta = std::fs::metadata(&socket)?;
    check((meta.mode() & 0o777, meta.gid()) == (0o660, 65534), || {
        format!("mode {:o}, group {}", meta.mode(), meta.gid())
    })?;
    let ask = |disk: &str, ids: &[&str]| -> Result<Option<bool>, Stop> {
        let uri = format!("nbd+unix:///{disk}?socket={place}");
        let args = ids.iter().copied().chain(["nbdinfo", "--json", &uri]);
        let said = run(tool("setpriv", args), Duration::from_secs(60))?;
        if !said.status.is_some_and(|s| s.success()) {
            return Ok(None);
        }
        let about: Value = serde_json::from_str(&said.stdout)?;
        Ok(about["exports"][0]["is_read_only"].as_bool())
    };
    let member = ["--reuid=1", "--regid=1", "--groups=65534"];
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let stranger = ["--reuid=1", "--regid=1", "--clear-groups"];
    for (disk, ids, rights) in [
        ("a", &["--clear-groups"][..], Some(false)),
        ("b", &["--clear-groups"], Some(false)),
        ("a", &nobody, Some(true)),
        ("b", &nobody, None),
        ("a", &member, Some(true)),
        ("a", &stranger, None),
    ] {
        let got = ask(disk, ids)?;
        check(got == rights, || format!("{disk} {ids:?}: {got:?}"))?;
    }
    server.stop()
}

/// A client that is there is shown with its process; one that has left isn't.
fn clients_are_listed(socket: &Path, folder: &Path) -> Result<(), Stop> {
    let control = format!("unix:{}", folder.join("ctl").display());
    let clients = || -> Result<Value, Stop> {
        let show = ["disk", "show", "a", "--json", "--control", &control];
        let said = run(pvblk_e2e::daemon::pvblk(show)?, Duration::from_secs(60))?.success()?;
        let shown: Value = serde_json::from_str(&said.stdout)?;
        Ok(shown["clients"].clone())
    };
    let connection = pvblk_e2e::nbd::Connection::open(socket, "a")?;
    let (mut there, begin) = (clients()?, Instant::now());
    while there.as_array().is_none_or(Vec::is_empty) && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
        there = clients()?;
    }
    let client = &there[0];
    let is_this = client["pid"] == std::process::id() && client["uid"] == 0;
    check(is_this && client["via"] == "nbd", || format!("{there:#}"))?;
    drop(connection);
    while clients()?.as_array().is_none_or(|all| !all.is_empty()) {
        check(begin.elapsed() < Duration::from_secs(60), || {
            "it is listed still".into()
        })?;
    }
    Ok(())
}

fn mistakes() -> Result<(), Stop> {
    for (listen, why) in [
        ("tcp:127.0.0.1:0,tls=/nowhere", "/nowhere/server-cert.pem"),
        ("tcp:127.0.0.1:0,tsl=/x", "none of its options"),
        ("unix:/tmp/x,socket-group=no-such-group", "no-such-group"),
        ("tcp:0.0.0.0:0", "tls=DIR"),
    ] {
        let listen = format!("--nbd={listen}");
        let args = ["serve", "--disk=a=mem:1M", &listen];
        let said = run(pvblk_e2e::daemon::pvblk(args)?, Duration::from_secs(60))?;
        let failed = said.status.is_some_and(|s| !s.success());
        check(failed && said.stderr.contains(why), || format!("{said:?}"))?;
    }
    Ok(())
}

/// A server in front of the disk of another one, and the URI of its export.
fn front(folder: &Path, origin: &str) -> Result<(Daemon, String), Stop> {
    let socket = folder.join("front.sock");
    let (disk, listen) = (format!("--disk=f={origin}"), stage::unix(&socket));
    let daemon = Daemon::start(["serve", &disk, "--nbd", &listen])?;
    Ok((daemon, stage::uri(&socket, "f")))
}

fn own_client() -> Result<(), Stop> {
    need(&["qemu-img", "nbdinfo", "cmp"])?;
    let mut bed = Bed::new("")?;
    let image = bed.path("image");
    pattern::write(&image, 64 * MIB, 6)?;
    let (mut daemon, uri) = front(bed.folder.path(), &bed.uri("a", "vm1")?)?;
    let image_arg = image.display().to_string();
    let args = ["convert", "-n", "-f", "raw", "-O", "raw"];
    run_ok("qemu-img", args.iter().copied().chain([&*image_arg, &uri]))?;
    let args = ["compare", "-f", "raw", "-F", "raw", &image_arg, &uri];
    run_ok("qemu-img", args)?;
    // Holes come through, too.
    let map = run_ok("nbdinfo", ["--map", "--totals", &uri])?.stdout;
    check(map.contains("hole"), || map.clone())?;
    daemon.stop()?;
    bed.server.stop()?;
    compare(&image, &bed.path("a.img"))
}

/// Others' servers send messages of TLS's own while nobody asks for anything.
fn own_client_of_nbdkit() -> Result<(), Stop> {
    need(&["nbdkit", "nbdcopy", "cmp"])?;
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let authority = Authority::default();
    write_server(&at("server"), &authority)?;
    let vm1 = authority.client("vm1.example", Time::Now);
    write_client(&at("client"), &authority, Some(&vm1))?;
    let (socket, certificates) = (at("kit.sock"), at("server"));
    let certificates = format!("--tls-certificates={}", certificates.display());
    let kit = tool("nbdkit", ["-f", "--tls=require", "--tls-verify-peer"])
        .arg(certificates)
        .arg("-U")
        .arg(&socket)
        .args(["memory", "64M"])
        .spawn()?;
    let mut kit = Killed(kit);
    let begin = Instant::now();
    while !socket.exists() {
        let ended = kit.0.try_wait()?.is_some();
        check(!ended && begin.elapsed() < Duration::from_secs(60), || {
            "nbdkit doesn't listen".into()
        })?;
        std::thread::sleep(Duration::from_millis(10));
    }
    let (socket, client) = (socket.display(), at("client"));
    let client = client.display();
    let origin = format!("nbds+unix:///?socket={socket}&tls-certificates={client}");
    let (mut daemon, uri) = front(folder.path(), &origin)?;
    let (image, back) = (at("image"), at("back"));
    pattern::write(&image, 64 * MIB, 7)?;
    let [image_arg, back_arg] = [&image, &back].map(|p| p.display().to_string());
    run_ok("nbdcopy", ["--flush", &image_arg, &uri])?;
    run_ok("nbdcopy", [&uri, &back_arg])?;
    compare(&image, &back)?;
    daemon.stop()
}

/// A process of somebody else, killed when dropped.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Data that were written before the server died are there when it is back.
fn own_client_reconnects() -> Result<(), Stop> {
    need(&["qemu-io"])?;
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let authority = Authority::default();
    write_server(&at("server"), &authority)?;
    let vm1 = authority.client("vm1.example", Time::Now);
    write_client(&at("client"), &authority, Some(&vm1))?;
    let (file, socket, server) = (at("a.img"), at("origin.sock"), at("server"));
    std::fs::File::create(&file)?.set_len(64 * MIB)?;
    let (disk, listen) = (
        // Its cache goes with it.
        format!("--disk=a=cache:16M:file:{}", file.display()),
        format!("--nbd=unix:{},tls={}", socket.display(), server.display()),
    );
    let start = || Daemon::start(["serve", &disk, &listen]);
    let origin_uri = format!(
        "nbds+unix:///a?socket={}&tls-certificates={}",
        socket.display(),
        at("client").display()
    );
    let mut origin = start()?;
    let (mut daemon, uri) = front(folder.path(), &origin_uri)?;
    let io = |commands: &[&str]| -> Result<(), Stop> {
        let mut args = vec!["-f", "raw"];
        commands.iter().for_each(|c| args.extend(["-c", c]));
        args.push(&uri);
        let said = run_ok("qemu-io", args)?.stdout;
        check(!said.contains("fail"), || said.clone())
    };
    // No flush follows: QEMU's programs flush when they end, unless told otherwise.
    let mut client = pvblk_e2e::nbd::Connection::open(&at("front.sock"), "f")?;
    client.send(pvblk_e2e::nbd::Command::Write, 1, MIB, &[7; 65536])?;
    let answer = client.receive()?;
    check(answer.is_some_and(|r| r.error == 0), || {
        format!("{answer:?}")
    })?;
    origin.kill()?;
    let mut origin = start()?;
    io(&["read -P 7 1M 64k", "write -P 8 2M 1M", "read -P 8 2M 1M"])?;
    daemon.stop()?;
    origin.stop()
}
