//! Locks that are taken away.

use crate::on_cluster;
use crate::served::{Served, Writer};
use pvblk_e2e::ceph::Cluster;
use pvblk_e2e::outcome::check;
use pvblk_e2e::{Stop, full};
use rustix::process::Signal;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const TOGETHER: usize = 5;
/// Blocks of a load: few, so that a stale write has something to write over.
pub const BLOCKS: u64 = 512;

/// Five disks of one server, and so of one connection, are stolen one after another under load.
pub fn steals() -> Result<(), Stop> {
    on_cluster(|cluster| {
        let names: Vec<String> = (0..TOGETHER).map(|n| format!("stolen{n}")).collect();
        for name in &names {
            cluster.image(name, "2M")?;
        }
        let rounds = if full() { 200 } else { 2 };
        let mut writes = 0;
        let begin = Instant::now();
        for round in 0..rounds {
            writes += round_of_steals(cluster, &names, round).map_err(|stop| match stop {
                Stop::Fail(why) => Stop::Fail(format!("round {round}: {why}")),
                skip => skip,
            })?;
        }
        println!(
            "{} steals in {} s, {writes} writes",
            rounds * TOGETHER as u64,
            begin.elapsed().as_secs()
        );
        Ok(())
    })
}

pub fn round_of_steals(cluster: &Cluster, names: &[String], round: u64) -> Result<u64, Stop> {
    let disks: Vec<_> = names
        .iter()
        .map(|n| (n.as_str(), cluster.spec(n, "")))
        .collect();
    let mut served = Served::start(cluster, &disks, &[])?;
    let mut writers = Vec::new();
    for name in names {
        writers.push(Writer::start_after(&served, name, (BLOCKS, round << 32))?);
    }
    let mut sum = 0;
    for (stolen, name) in names.iter().enumerate() {
        for writer in &writers {
            // The disks whose lock is still there go on, whoever was stolen before.
            let now = writer.progress.load(Ordering::Relaxed);
            writer.wait_progress(now + 50)?;
        }
        cluster.steal(name)?;
        let at_once = std::fs::read(cluster.export(name, "at-once")?)?;
        let stays = || -> Result<(), Stop> {
            let later = std::fs::read(cluster.export(name, "later")?)?;
            check(at_once == later, || {
                let (owner, log) = (cluster.lock(name), served.daemon.lines());
                let log = log[log.len().saturating_sub(20)..].join("\n");
                format!(
                    "{name}: a write landed after its lock was stolen; now the lock is {owner:?}'s; {log}"
                )
            })
        };
        stays()?;
        let written = writers.remove(0).end()?;
        check(written.errors > 0, || {
            format!("{name}: its client saw no error")
        })?;
        stays()?;
        written.check(&at_once).map_err(|stop| match stop {
            Stop::Fail(why) => Stop::Fail(format!("{name}: {why}")),
            skip => skip,
        })?;
        sum += written.writes;
        served.wait_told(&format!("disk {name}: its lock was taken away"))?;
        check(stolen + writers.len() + 1 == names.len(), || {
            "lost count".into()
        })?;
    }
    // Its disks didn't end in order, which its status tells.
    served.daemon.signal(Signal::TERM)?;
    let status = served.daemon.wait(Duration::from_secs(120))?;
    check(status.code() == Some(1), || format!("{status}"))?;
    Ok(sum)
}

/// A thief blocks the owner first and breaks its lock a moment later. The owner doesn't take the lock again in between.
pub fn slow_thief() -> Result<(), Stop> {
    on_cluster(|cluster| {
        // A thief that takes many seconds for the second step on a loaded machine has lost, so it gets some attempts.
        for attempt in 0..5 {
            let name = &*format!("slowly{attempt}");
            cluster.image(name, "2M")?;
            let mut served = Served::one(cluster, name, "")?;
            let writer = Writer::start(&served, name, BLOCKS)?;
            writer.wait_progress(100)?;
            let Some(held) = cluster.lock(name)? else {
                return Stop::fail("nobody has the lock");
            };
            cluster.block(name)?;
            std::thread::sleep(Duration::from_millis(700));
            if cluster.break_held(name, &held, false).is_err() {
                continue;
            }
            let written = writer.end()?;
            check(written.errors > 0, || "its client saw no error".into())?;
            served.wait_told(&format!("disk {name}: its lock was taken away"))?;
            written.check(&std::fs::read(cluster.export(name, "out")?)?)?;
            return served.daemon.kill();
        }
        Stop::fail("the owner takes the lock again before it is broken")
    })
}

pub fn waits() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("waits", "2M")?;
        let mut served = Served::one(cluster, "waits", ",on-lost-lock=wait")?;
        let writer = Writer::start(&served, "waits", BLOCKS)?;
        writer.wait_progress(100)?;
        cluster.steal("waits")?;
        let at_once = std::fs::read(cluster.export("waits", "at-once")?)?;
        served.wait_told("disk waits: its lock was taken away")?;
        std::thread::sleep(Duration::from_secs(2));
        check(!writer.thread.is_finished(), || {
            "the client's requests ended".into()
        })?;
        let later = std::fs::read(cluster.export("waits", "later")?)?;
        check(at_once == later, || {
            "a write landed after the lock was stolen".into()
        })?;
        served.daemon.kill()?;
        let written = writer.end()?;
        check(written.errors == 0, || format!("{} errors", written.errors))?;
        written.check(&at_once)
    })
}
