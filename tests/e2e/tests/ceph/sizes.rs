//! Images that grow and shrink.

use crate::on_cluster;
use crate::served::{Served, named};
use pvblk_e2e::control::Control;
use pvblk_e2e::nbd::Command;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run_ok, wait_for};
use pvblk_e2e::{MIB, Stop};
use rustix::process::Signal;

/// A client on rings that stays attached learns the new size. NBD has no message for it; the server takes requests by the new size.
pub fn resize() -> Result<(), Stop> {
    need(&["nbdinfo", "qemu-io"])?;
    on_cluster(|cluster| {
        let name = &*named("grows");
        cluster.image(name, "16M")?;
        let at = |end: &str| cluster.dir().join(format!("{name}.{end}"));
        let (control, rings, vhost) = (at("ctl"), at("rings"), at("vhost"));
        let more = [
            format!("--control=unix:{}", control.display()),
            format!("--local=unix:{}", rings.display()),
            format!("--vhost-user={name}=unix:{}", vhost.display()),
        ];
        let mut served = Served::start(cluster, &[(name, cluster.spec(name, ""))], &more)?;
        let others = [
            (
                "rings",
                format!("rings:unix:{},disk={name}", rings.display()),
            ),
            ("vhost", format!("vhost-user:unix:{}", vhost.display())),
        ];
        let mut attached = Served::start(cluster, &others, &[])?;
        let mut connection = served.connect(name)?;
        let mut write_at = |at: u64| -> Result<u32, Stop> {
            connection.send(Command::Write, at, at, &[1; 4096])?;
            match connection.receive()? {
                Some(reply) => Ok(reply.error),
                None => Stop::fail("the server hung up"),
            }
        };
        check(write_at(0)? == 0, || "the first write".into())?;
        for (size, bytes) in [("48M", 48 * MIB), ("32M", 32 * MIB)] {
            let image = format!("rbd/{name}");
            cluster.rbd(&[
                "resize",
                "--no-progress",
                "--allow-shrink",
                "--size",
                size,
                &image,
            ])?;
            wait_for_size(&served, name, bytes)?;
            wait_for_size(&attached, "rings", bytes)?;
            // This client has no channel for the server's message, which guests in QEMU hear, and asks when it is told to.
            attached.daemon.signal(Signal::HUP)?;
            wait_for_size(&attached, "vhost", bytes)?;
            let (last, behind) = (write_at(bytes - 4096)?, write_at(bytes)?);
            check(last == 0 && behind != 0, || {
                format!("{size}: {last}, {behind}")
            })?;
        }
        for disk in ["rings", "vhost"] {
            attached.io(disk, &["write -P 2 31M 1M", "read -P 2 31M 1M"])?;
        }
        let mut control = Control::open(&control)?;
        let shown = control
            .must("disk.list", serde_json::json!({}))?
            .to_string();
        check(shown.contains(&(32 * MIB).to_string()), || shown.clone())?;
        attached.daemon.stop()?;
        served.daemon.stop()
    })
}

fn wait_for_size(server: &Served, disk: &str, bytes: u64) -> Result<(), Stop> {
    wait_for(&format!("the new size of {disk}"), || {
        let said = run_ok("nbdinfo", ["--size", &server.uri(disk)])?;
        Ok(said.stdout.trim() == bytes.to_string())
    })
}
