//! Data that goes in and comes back, and what the cluster knows of it.

use crate::on_cluster;
use crate::served::Served;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{compare, need, run, run_ok, tool, wait_for};
use pvblk_e2e::{MIB, Stop, pattern};
use std::time::Duration;

pub fn data() -> Result<(), Stop> {
    need(&["qemu-img", "qemu-io", "cmp"])?;
    on_cluster(|cluster| {
        cluster.image("data", "64M")?;
        let source = cluster.dir().join("source");
        pattern::write(&source, 64 * MIB, 1)?;
        let mut served = Served::one(cluster, "data", "")?;
        let (file, uri) = (source.display().to_string(), served.uri("data"));
        run_ok(
            "qemu-img",
            ["convert", "-n", "-f", "raw", "-O", "raw", &file, &uri],
        )?;
        run_ok(
            "qemu-img",
            ["compare", "-f", "raw", "-F", "raw", &file, &uri],
        )?;
        // Zeroes, with and without their space, a discard, FUA and a flush.
        served.io(
            "data",
            &["write -z 1M 3M", "write -z -u 8M 5M", "discard 16M 8M"],
        )?;
        served.io(
            "data",
            &["write -f -P 7 40M 64k", "flush", "read -P 7 40M 64k"],
        )?;
        served.io(
            "data",
            &["read -P 0 1M 3M", "read -P 0 8M 5M", "read -P 0 16M 8M"],
        )?;
        check(served.daemon.complaint().is_none(), || {
            format!("{:?}", served.daemon.complaint())
        })?;
        served.daemon.stop()?;
        check(cluster.lock("data")?.is_none(), || {
            "the lock is left".into()
        })?;
        let bytes = std::fs::read(cluster.export("data", "out")?)?;
        let mut expected = std::fs::read(&source)?;
        let mib = MIB as usize;
        for zeroed in [mib..4 * mib, 8 * mib..13 * mib, 16 * mib..24 * mib] {
            expected[zeroed].fill(0);
        }
        expected[40 * mib..40 * mib + 65536].fill(7);
        check(bytes == expected, || "the cluster has other data".into())
    })
}

pub fn every_way() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("ways", "64M")?;
        let at = |name: &str| cluster.dir().join(name).display().to_string();
        let more = [
            format!("--local=unix:{}", at("rings")),
            format!("--vhost-user=ways=unix:{}", at("vhost")),
        ];
        let disks = [("ways", cluster.spec("ways", ""))];
        let mut served = Served::start(cluster, &disks, &more)?;
        for target in [
            served.uri("ways"),
            format!("rings:unix:{},disk=ways", at("rings")),
            format!("vhost-user:unix:{}", at("vhost")),
        ] {
            let args = [
                "bench",
                "--target",
                &target,
                "--rw=randwrite",
                "--bs=4k,4k",
                "--iodepth=16",
                "--size=16m",
                "--option=verify=crc32c",
            ];
            run(pvblk(args)?, Duration::from_secs(300))?.success()?;
        }
        served.daemon.stop()
    })
}

pub fn snapshots() -> Result<(), Stop> {
    need(&["qemu-io", "qemu-img", "cmp"])?;
    on_cluster(|cluster| {
        cluster.image("origin", "16M")?;
        let mut served = Served::one(cluster, "origin", "")?;
        served.io("origin", &["write -P 1 0 8M"])?;
        cluster.rbd(&["snap", "create", "--no-progress", "rbd/origin@s"])?;
        cluster.rbd(&["snap", "protect", "rbd/origin@s"])?;
        cluster.rbd(&["clone", "rbd/origin@s", "rbd/clone"])?;
        served.io("origin", &["write -P 2 0 4M"])?;
        served.daemon.stop()?;
        let before = cluster.export("origin@s", "before")?;
        let snapshot = format!("rbd:rbd/origin@s,conf={}", cluster.conf().display());
        let disks = [
            ("snapshot", snapshot),
            ("clone", cluster.spec("clone", "")),
            ("origin", cluster.spec("origin", ",ro")),
        ];
        let mut served = Served::start(cluster, &disks, &[])?;
        let read_only = ["-r", "-f", "raw"];
        served.io_with(
            &read_only,
            "snapshot",
            &["read -P 1 0 8M", "read -P 0 8M 8M"],
        )?;
        served.io_with(&read_only, "origin", &["read -P 2 0 4M", "read -P 1 4M 4M"])?;
        for name in ["snapshot", "origin"] {
            check(served.io(name, &["write -P 3 0 4k"]).is_err(), || {
                format!("{name} was written to")
            })?;
        }
        served.io(
            "clone",
            &["read -P 1 0 8M", "write -P 3 1M 1M", "read -P 3 1M 1M"],
        )?;
        served.daemon.stop()?;
        compare(&before, &cluster.export("origin@s", "after")?)
    })
}

pub fn holes() -> Result<(), Stop> {
    need(&["nbdinfo", "qemu-io"])?;
    on_cluster(|cluster| {
        cluster.image("holes", "64M")?;
        let mut served = Served::one(cluster, "holes", "")?;
        served.io("holes", &["write -P 1 8M 4k"])?;
        let map = |served: &Served| -> Result<Vec<(u64, u64, u64)>, Stop> {
            let said = run_ok("nbdinfo", ["--map", "--json", &served.uri("holes")])?;
            let map: serde_json::Value = serde_json::from_str(&said.stdout)?;
            let all = map.as_array().into_iter().flatten();
            let number = |e: &serde_json::Value, name: &str| e[name].as_u64().unwrap_or(u64::MAX);
            Ok(all
                .map(|e| {
                    (
                        number(e, "offset") / MIB,
                        number(e, "length") / MIB,
                        number(e, "type"),
                    )
                })
                .collect())
        };
        let (hole, is_data) = (3, 0);
        let found = map(&served)?;
        check(
            found == [(0, 8, hole), (8, 4, is_data), (12, 52, hole)],
            || format!("{found:?}"),
        )?;
        // Written after the question was asked.
        served.io("holes", &["write -P 1 20M 5M"])?;
        let found = map(&served)?;
        let expected = [
            (0, 8, hole),
            (8, 4, is_data),
            (12, 8, hole),
            (20, 8, is_data),
            (28, 36, hole),
        ];
        check(found == expected, || format!("{found:?}"))?;
        served.daemon.stop()
    })
}

pub fn full_cluster() -> Result<(), Stop> {
    need(&["qemu-io"])?;
    on_cluster(|cluster| {
        cluster.image("full", "2G")?;
        let mut served = Served::one(cluster, "full", "")?;
        served.io("full", &["write -P 1 0 128M"])?;
        for (name, ratio) in [
            ("nearfull", "0.01"),
            ("backfillfull", "0.02"),
            ("full", "0.03"),
        ] {
            cluster.ceph(&["osd", &format!("set-{name}-ratio"), ratio])?;
        }
        let write = |at: u32| {
            let uri = served.uri("full");
            let write = format!("write -P 2 {at}M 1M");
            run(
                tool("qemu-io", ["-f", "raw", "-c", &write, &uri]),
                Duration::from_secs(120),
            )
        };
        // A write of a place that has its space already may succeed.
        let mut next = 128;
        let fails = wait_for("writes fail for lack of space", || {
            next += 1;
            let said = write(next)?;
            Ok(format!("{}{}", said.stdout, said.stderr).contains("No space left on device"))
        });
        for (name, ratio) in [
            ("full", "0.95"),
            ("backfillfull", "0.90"),
            ("nearfull", "0.85"),
        ] {
            cluster.ceph(&["osd", &format!("set-{name}-ratio"), ratio])?;
        }
        fails?;
        wait_for("writes succeed again", || {
            Ok(write(128)?.status.is_some_and(|s| s.success()))
        })?;
        served.io("full", &["read -P 1 0 128M", "read -P 2 128M 1M"])?;
        served.daemon.stop()
    })
}
