//! Failures of the cluster's daemons.

use crate::on_cluster;
use crate::served::{Served, Writer};
use pvblk_e2e::ceph::Cluster;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::wait_for;
use pvblk_e2e::{Stop, full};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A verify load beside `disturb`, which must see no error.
pub fn verified(
    cluster: &Cluster,
    image: &str,
    disturb: impl FnOnce() -> Result<(), Stop>,
) -> Result<(), Stop> {
    cluster.image(image, "64M")?;
    let mut served = Served::one(cluster, image, "")?;
    let writer = Writer::start(&served, image, 4096)?;
    writer.wait_progress(500)?;
    disturb()?;
    // It goes on.
    let now = writer.progress.load(Ordering::Relaxed);
    writer.wait_progress(now + 500)?;
    let written = writer.stop()?;
    check(written.errors == 0, || format!("{} errors", written.errors))?;
    served.daemon.stop()?;
    written.check(&std::fs::read(cluster.export(image, "out")?)?)
}

pub fn kills() -> Result<(), Stop> {
    on_cluster(|cluster| {
        verified(cluster, "kills", || {
            for _ in 0..if full() { 10 } else { 2 } {
                for daemon in ["mon", "osd.0"] {
                    cluster.signal(daemon, Signal::KILL)?;
                    std::thread::sleep(Duration::from_secs(1));
                    cluster.restart(daemon)?;
                    cluster.ceph(&["mon", "stat"])?;
                    std::thread::sleep(Duration::from_secs(2));
                }
            }
            Ok(())
        })
    })
}

pub fn stopped() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("opening", "16M")?;
        verified(cluster, "stopped", || {
            cluster.signal("osd.0", Signal::STOP)?;
            let begin = Instant::now();
            let ended = end_while_opening(cluster);
            let pause = Duration::from_secs(if full() { 60 } else { 6 });
            std::thread::sleep(pause.saturating_sub(begin.elapsed()));
            cluster.signal("osd.0", Signal::CONT)?;
            ended
        })
    })
}

/// A server whose disk can't be opened while the cluster is silent ends when it is told to.
fn end_while_opening(cluster: &Cluster) -> Result<(), Stop> {
    let disk = format!("opening={}", cluster.spec("opening", ""));
    let log = cluster.dir().join("opening.log");
    let mut command = pvblk(["serve", "--disk", &disk, "--nbd=unix:none"])?;
    let mut child = Killed(command.stderr(File::create(&log)?).spawn()?);
    let tasks = format!("/proc/{}/task", child.0.id());
    wait_for("it opens the disk", || {
        let mut names = std::fs::read_dir(&tasks)?.flatten().map(|task| task.path());
        Ok(names.any(|task| {
            std::fs::read_to_string(task.join("comm"))
                .is_ok_and(|name| name.trim() == "pvblk-signal")
        }))
    })?;
    let pid = i32::try_from(child.0.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        kill_process(pid, Signal::TERM)?;
    }
    let mut status = None;
    wait_for("it ends", || {
        status = child.0.try_wait()?;
        Ok(status.is_some())
    })?;
    let said = std::fs::read_to_string(&log)?;
    let told = said.contains("stopped while disk opening was being opened");
    check(told && status.and_then(|s| s.code()) == Some(1), || {
        format!("{status:?}: {said}")
    })
}

/// A process that ends with this.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
