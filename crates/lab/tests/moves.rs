//! Lanes of every export that move between workers all the time, while data is written and checked.

use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Service};
use pvblk_bench::{self as bench, Load, RunOptions};
use pvblk_block::trace::Tracing;
use pvblk_export::local::LocalServer;
use pvblk_export::nbd::{NbdConfig, NbdServer};
use pvblk_export::vhost_user::{Listen, VhostLimits, VhostServer};
use pvblk_protocol::xenbus::BackendOffers;
use pvblk_volume::VolumeSpec;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const WORKERS: usize = 3;

/// Two queues, each of which writes a half and reads it back.
const JOB: &str = "\
[random]
rw=randrw
bssplit=512/20:4k/60:64k/20
iodepth=16
verify=crc32c
size=50%
offset_increment=50%
numjobs=2
loops=3
group_reporting
";

fn check(spec: &str) {
    let seed = pvblk_testing::seed();
    let mut jobs = bench::parse_jobs(JOB, "test").unwrap();
    jobs.set_all(&format!("randseed={seed}")).unwrap();
    let spec: VolumeSpec = spec.parse().unwrap();
    let load = Load {
        threads: 2,
        ..Load::default()
    };
    let target = bench::open_target(&spec, &load, &Arc::default()).unwrap();
    let report = bench::run(&jobs.jobs, &target, &RunOptions::default()).unwrap();
    assert!(!report.failed(), "{spec}: {}", report.table());
    target.close().unwrap();
}

fn service() -> Arc<Service> {
    let backend = Backend::start(&BackendOptions {
        workers: WORKERS,
        ..BackendOptions::default()
    });
    let disk = |name: &str| {
        let volume = pvblk_volume::open("mem:8M").unwrap();
        Arc::new(Disk::new(name, volume, Tracing::off()))
    };
    let disks = ["local", "nbd", "vhost"].map(disk);
    Service::new(backend.unwrap(), Disks::new(disks.into()), Arc::default())
}

/// Sends lanes from worker to worker until it is dropped.
struct Mover<'a>(&'a AtomicBool);

impl Drop for Mover<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).display().to_string()
}

#[test]
fn nobody_notices_that_lanes_move() {
    let service = service();
    let dir = tempfile::tempdir().unwrap();
    let [local, nbd, vhost] = ["local", "nbd", "vhost"].map(|name| path(dir.path(), name));
    let _local = LocalServer::bind(Path::new(&local), &service, BackendOffers::default()).unwrap();
    let addr = format!("unix:{nbd}").parse().unwrap();
    let _nbd = NbdServer::bind(&addr, NbdConfig::default(), &service).unwrap();
    let listen = Listen {
        disk: "vhost".into(),
        path: vhost.clone().into(),
    };
    let limits = VhostLimits {
        queues: 2,
        unallocated: None,
    };
    let _vhost = VhostServer::bind(&[listen], &service, limits).unwrap();
    let stop = AtomicBool::new(false);
    let moves = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let (mut rng, mut moves) = (pvblk_testing::random(), 0);
            let mut before = service.backend().lanes();
            while !stop.load(Ordering::Relaxed) {
                let [from, to] = [(); 2].map(|()| rng.usize(..WORKERS));
                service.backend().move_a_lane(from, to);
                std::thread::sleep(std::time::Duration::from_micros(200));
                let now = service.backend().lanes();
                moves += usize::from(now != before);
                before = now;
            }
            moves
        });
        let stop = Mover(&stop);
        std::thread::scope(|scope| {
            let specs = [
                format!("rings:unix:{local},disk=local,queues=2"),
                format!("nbd+unix:///nbd?socket={nbd}"),
                format!("vhost-user:unix:{vhost},queues=2"),
            ];
            for spec in specs {
                scope.spawn(move || check(&spec));
            }
        });
        drop(stop);
        mover.join().unwrap()
    });
    assert!(moves > 10, "only {moves} moves were seen");
}
