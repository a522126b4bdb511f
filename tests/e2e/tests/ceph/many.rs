//! Many images in one server.

use crate::on_cluster;
use crate::served::Served;
use pvblk_e2e::outcome::check;
use pvblk_e2e::{Stop, full};
use std::path::Path;
use std::time::Duration;

pub fn hundred() -> Result<(), Stop> {
    if !full() {
        return Stop::skip("only with PVBLK_E2E_FULL=1");
    }
    on_cluster(|cluster| {
        let names: Vec<String> = (0..100).map(|n| format!("many{n}")).collect();
        for name in &names {
            cluster.image(name, "16M")?;
        }
        let disks: Vec<_> = names
            .iter()
            .map(|n| (n.as_str(), cluster.spec(n, "")))
            .collect();
        let one = Served::start(cluster, &disks[..1], &[])?;
        let few = Used::of(&one)?;
        drop(one);
        let mut served = Served::start(cluster, &disks, &[])?;
        for name in &names {
            served.io(name, &["write -P 1 0 64k"])?;
        }
        std::thread::sleep(Duration::from_secs(5));
        let before = Used::of(&served)?;
        std::thread::sleep(Duration::from_secs(30));
        let after = Used::of(&served)?;
        println!(
            "1 image: {few:?}; 100 images: {after:?}; {} ticks of 10 ms in 30 s at rest",
            after.ticks - before.ticks
        );
        check(after.threads < few.threads + 20, || format!("{after:?}"))?;
        served.daemon.stop()
    })
}

#[derive(Debug)]
#[allow(dead_code)]
struct Used {
    threads: usize,
    resident_kib: u64,
    ticks: u64,
}

impl Used {
    fn of(served: &Served) -> Result<Used, Stop> {
        let proc = Path::new("/proc").join(served.daemon.pid().to_string());
        let status = std::fs::read_to_string(proc.join("status"))?;
        let number = |name: &str| {
            let line = status.lines().find(|l| l.starts_with(name));
            line.and_then(|l| l.split_whitespace().nth(1)?.parse().ok())
                .unwrap_or(0)
        };
        let stat = std::fs::read_to_string(proc.join("stat"))?;
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let tick = |n: usize| {
            fields
                .get(n)
                .and_then(|f| f.parse::<u64>().ok())
                .unwrap_or(0)
        };
        Ok(Used {
            threads: number("Threads:") as usize,
            resident_kib: number("VmRSS:"),
            ticks: tick(11) + tick(12),
        })
    }
}
