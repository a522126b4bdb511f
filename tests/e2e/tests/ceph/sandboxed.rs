//! Images of a server in a sandbox: a third process has Ceph's library, and the one that reads bytes of clients has no rights.

use crate::on_cluster;
use crate::served::{Served, Writer};
use pvblk_e2e::Stop;
use pvblk_e2e::ceph::Cluster;
use pvblk_e2e::outcome::check;
use pvblk_e2e::sandbox::{need_sandbox, user};
use pvblk_e2e::tools::{run_ok, wait_for};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// Lets the user of the sandbox read the configuration and the keyring.
fn open_to_all(cluster: &Cluster) -> Result<(), Stop> {
    let set = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
    };
    set(cluster.dir(), 0o755)?;
    let folder = cluster.dir().join("c");
    set(&folder, 0o755)?;
    for entry in std::fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.display().to_string();
        if path.is_file() && (name.ends_with(".conf") || name.ends_with("pvblk.keyring")) {
            set(&path, 0o644)?;
        }
    }
    Ok(())
}

fn start(cluster: &Cluster, name: &str) -> Result<Served, Stop> {
    need_sandbox()?;
    open_to_all(cluster)?;
    let more = ["--sandbox".to_owned(), user()];
    Served::start(cluster, &[(name, cluster.spec(name, ""))], &more)
}

fn status(pid: u32, key: &str) -> Result<String, Stop> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|l| l.strip_prefix(key));
    Ok(line.unwrap_or_default().trim().to_owned())
}

pub fn served() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("sandboxed", "16M")?;
        let mut served = start(cluster, "sandboxed")?;
        let children = served.daemon.children()?;
        check(children.len() == 2, || format!("{children:?}"))?;
        for pid in children {
            for (key, expected) in [
                ("CapEff:", "0000000000000000"),
                ("CapPrm:", "0000000000000000"),
                ("NoNewPrivs:", "1"),
                ("Seccomp:", "2"),
            ] {
                let found = status(pid, key)?;
                check(found == expected, || format!("{key} {found}"))?;
            }
            let ids = status(pid, "Uid:")?;
            let is_root = ids.split_whitespace().any(|id| id == "0");
            check(!is_root || !geteuid().is_root(), || ids.clone())?;
        }
        served.io(
            "sandboxed",
            &["write -P 7 0 64k", "read -P 7 0 64k", "flush"],
        )?;
        let writer = Writer::start(&served, "sandboxed", 1024)?;
        writer.wait_progress(200)?;
        cluster.signal("osd.0", Signal::KILL)?;
        cluster.restart("osd.0")?;
        writer.wait_progress(400)?;
        let written = writer.stop()?;
        let owner = cluster.lock("sandboxed")?;
        check(owner.is_some(), || "nobody has the lock".into())?;
        served.daemon.stop()?;
        let owner = cluster.lock("sandboxed")?;
        check(owner.is_none(), || format!("the lock is left: {owner:?}"))?;
        written.check(&std::fs::read(
            cluster.export("sandboxed", "sandboxed.img")?,
        )?)
    })
}

/// An image that the configuration doesn't name is refused, and one that is removed is opened anew.
pub fn named() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("named", "16M")?;
        cluster.image("other", "16M")?;
        need_sandbox()?;
        open_to_all(cluster)?;
        let control = format!("unix:{}", cluster.dir().join("sandbox.ctl").display());
        let more = ["--sandbox", &user(), "--control", &control].map(String::from);
        let spec = cluster.spec("named", "");
        let mut served = Served::start(cluster, &[("named", spec.clone())], &more)?;
        let ask = |args: &[&str]| {
            let mut command = pvblk_e2e::daemon::pvblk(args.iter().copied())?;
            command.args(["--control", &control]);
            pvblk_e2e::tools::run(command, Duration::from_secs(200))
        };
        let other = ask(&[
            "disk",
            "add",
            &format!("other={}", cluster.spec("other", "")),
        ])?;
        let words = "opens images that its configuration names";
        let is_told = other.stderr.contains(words) && other.stderr.lines().count() == 1;
        check(is_told, || format!("{other:?}"))?;
        ask(&["disk", "remove", "named"])?.success()?;
        wait_for("the lock is given back", || {
            Ok(cluster.lock("named")?.is_none())
        })?;
        ask(&["disk", "add", &format!("again={spec}")])?.success()?;
        run_ok("nbdinfo", ["--size", &served.uri("again")])?;
        served.daemon.stop()
    })
}

/// The server ends with the process that opens images, so that systemd starts all of it again.
pub fn ended() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("ended", "16M")?;
        let mut served = start(cluster, "ended")?;
        // It was started first.
        let library = served.daemon.children()?.first().copied();
        let library = library.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let library = library.ok_or_else(|| Stop::Fail("its number".into()))?;
        kill_process(library, Signal::KILL)?;
        let status = served.daemon.wait(Duration::from_secs(120))?;
        check(!status.success(), || format!("{status}"))?;
        served.wait_told("the process that opens images ended")
    })
}
