//! Two servers and one image.

use crate::on_cluster;
use crate::served::{Served, Writer, named};
use crate::steals::BLOCKS;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::run;
use pvblk_e2e::{Stop, full};
use rustix::process::Signal;
use std::time::Duration;

/// A second server is refused while the first lives.
pub fn one_writer() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("owned", "16M")?;
        let mut first = Served::one(cluster, "owned", "")?;
        let spec = cluster.spec("owned", "");
        let second = run(
            pvblk(["serve", "--disk", &format!("b={spec}"), "--nbd=unix:none"])?,
            Duration::from_secs(120),
        )?;
        let refused = !second.status.is_some_and(|s| s.success());
        check(
            refused && second.stderr.contains("has the image open for writing"),
            || format!("{second:?}"),
        )?;
        first.daemon.stop()
    })
}

/// A server that ends in order leaves no lock, for which the next one would wait half a minute; also while it looks at its lock.
pub fn given_back() -> Result<(), Stop> {
    on_cluster(|cluster| {
        for round in 0..if full() { 20 } else { 4 } {
            let name = &*format!("given{round}");
            cluster.image(name, "4M")?;
            // A cache has a queue that nobody polls at the end.
            let over = ["", "cache:16M:"][round % 2];
            let disk = format!("{over}{}", cluster.spec(name, ""));
            let mut served = Served::start(cluster, &[(name, disk)], &[])?;
            served.io(name, &["write -P 1 0 64k"])?;
            // From a second on the flush at the end makes the disk look at its lock.
            std::thread::sleep(Duration::from_millis(1200));
            served.daemon.stop()?;
            check(cluster.lock(name)?.is_none(), || {
                format!("round {round}, {over}: the lock is left")
            })?;
        }
        Ok(())
    })
}

/// The cluster gives the lock of a dead server to the next one.
pub fn crashed() -> Result<(), Stop> {
    if !full() {
        return Stop::skip("only with PVBLK_E2E_FULL=1");
    }
    on_cluster(|cluster| {
        cluster.image("crashed", "16M")?;
        let mut first = Served::one(cluster, "crashed", "")?;
        let writer = Writer::start(&first, "crashed", 1024)?;
        writer.wait_progress(100)?;
        first.daemon.kill()?;
        let written = writer.stop()?;
        let mut next = Served::one(cluster, "crashed", "")?;
        written.check(&std::fs::read(cluster.export("crashed", "out")?)?)?;
        next.daemon.stop()
    })
}

/// A server that is stopped for so long that the next one gets its lock finds that out when it goes on, and none of its writes lands.
pub fn replaced() -> Result<(), Stop> {
    on_cluster(|cluster| {
        let name = &*named("replaced");
        cluster.image(name, "2M")?;
        let mut first = Served::one(cluster, name, "")?;
        let old = Writer::start(&first, name, BLOCKS)?;
        old.wait_progress(100)?;
        first.daemon.signal(Signal::STOP)?;
        let mut next = Served::one(cluster, name, "")?;
        // Each block is written to, so an old write shows wherever it lands.
        let new = Writer::start_after(&next, name, (BLOCKS, 1 << 32))?;
        new.wait_progress(2 * BLOCKS)?;
        let written = new.stop()?;
        first.daemon.signal(Signal::CONT)?;
        let old = old.end()?;
        check(old.errors > 0, || {
            "the old server's client saw no error".into()
        })?;
        written.check(&std::fs::read(cluster.export(name, "out")?)?)?;
        first.wait_told(&format!("disk {name}: its lock was taken away"))?;
        first.daemon.kill()?;
        next.daemon.stop()
    })
}

/// Ceph keeps a client whose lock is broken without blocking it from nothing: the server has to look.
pub fn broken_without_a_block() -> Result<(), Stop> {
    on_cluster(|cluster| {
        let name = &*named("unblocked");
        cluster.image(name, "2M")?;
        let mut first = Served::one(cluster, name, "")?;
        let writer = Writer::start(&first, name, BLOCKS)?;
        writer.wait_progress(100)?;
        cluster.break_lock(name, false)?;
        let written = writer.end()?;
        check(written.errors > 0, || "its client saw no error".into())?;
        first.wait_told(&format!("disk {name}: its lock was taken away"))?;
        written.check(&std::fs::read(cluster.export(name, "out")?)?)?;
        // The lock is free.
        let mut next = Served::one(cluster, name, "")?;
        next.io(name, &["write -P 1 0 4k"])?;
        next.daemon.stop()?;
        first.daemon.kill()
    })
}
