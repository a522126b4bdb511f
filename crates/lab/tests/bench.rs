//! The load generator on everything that it can measure: volumes, rings in one process, our NBD server.

use pvblk_backend::{Backend, BackendOptions, BlkifSource, Disk, Disks, Service};
use pvblk_bench::{self as bench, Jobs, Load, Report, RunOptions};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Op,
    QueueContext, Readiness, Request,
};
use pvblk_client::rings::Frontend;
use pvblk_export::nbd::{NbdConfig, NbdServer};
use pvblk_lab::loopback::Loopback;
use pvblk_volume::VolumeSpec;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn jobs(text: &str) -> Jobs {
    let seed = pvblk_testing::seed();
    let mut jobs = bench::parse_jobs(text, "test").unwrap();
    jobs.set_all(&format!("randseed={seed}")).unwrap();
    jobs
}

fn run(text: &str, device: &Arc<dyn BlockDevice>) -> Report {
    bench::run(&jobs(text).jobs, device, &RunOptions::default()).unwrap()
}

fn volume(spec: &str) -> Arc<dyn BlockDevice> {
    pvblk_volume::open(spec).unwrap()
}

const FILE_SERVER: &str = "\
[iometer]
bssplit=512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10
rw=randrw
rwmixread=80
direct=1
size=100%
ioengine=libaio
iodepth=64
";

/// Jobs of every kind, with checks of what they wrote.
const MIXED: &str = "\
[global]
iodepth=16
verify=crc32c
group_reporting
[fill]
rw=write
bs=64k
fsync=7
[random]
stonewall
rw=randrw
bssplit=512/20:4k/60:16k/20
size=50%
offset_increment=50%
numjobs=2
[over]
stonewall
rw=randwrite
norandommap
bs=4k
size=1m
io_size=4m
";

fn check_mixed(report: &Report) {
    assert!(!report.failed(), "{}", report.table());
    let entries = report.entries();
    let names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["fill", "random", "over"]);
    let fill = &entries[0];
    assert_eq!(fill.write.bytes, 8 << 20);
    assert_eq!(fill.flush.count(), 128 / 7);
    // The data is read back whole.
    assert_eq!((fill.read.bytes, fill.read.ios), (8 << 20, 128));
    assert_eq!((entries[1].threads, entries[1].group), (2, 1));
    assert_eq!(entries[2].write.ios, 1024);
    for e in &entries {
        assert_eq!(e.write.lat.count(), e.write.ios);
        assert_eq!(e.read.clat.count(), e.read.ios);
    }
}

#[test]
fn jobs_run_on_memory() {
    check_mixed(&run(MIXED, &volume("mem:8M")));
    let report = run(FILE_SERVER, &volume("mem:8M"));
    let total = report.total();
    assert_eq!(total.read.bytes + total.write.bytes, 8 << 20);
    // Blocks of the map are used up as it fills, so that later requests are cut; the mix stays the
    // same.
    let share = total.read.ios as f64 / (total.read.ios + total.write.ios) as f64;
    assert!((0.7..0.9).contains(&share), "{share}");
}

#[test]
fn jobs_run_over_rings() {
    let inner = volume("mem:8M");
    let loopback = Loopback {
        queues: 2,
        ring_pages: 4,
        ..Loopback::default()
    };
    let (front, back) = loopback.wire(inner.as_ref()).unwrap();
    let backend = Backend::start(&BackendOptions {
        workers: 2,
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("t", inner, Tracing::off());
    for parts in back {
        let source = Box::new(BlkifSource::new(parts));
        backend.attach(&disk, source, Box::new(|_| {})).unwrap();
    }
    let device: Arc<dyn BlockDevice> = Frontend::new(front).unwrap();
    // It runs twice: all of the shared memory has to come back in between.
    for _ in 0..2 {
        let report = run(MIXED, &device);
        check_mixed(&report);
        let total = report.total();
        assert_eq!(total.write.slat.count(), total.write.ios);
    }
}

#[test]
fn jobs_run_over_nbd() {
    let inner = volume("mem:8M");
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("disk", inner, Tracing::off());
    let disks = Disks::new(vec![Arc::new(disk)]);
    let service = Service::new(backend, disks, Arc::default());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    let addr = format!("unix:{}", path.display()).parse().unwrap();
    let server = NbdServer::bind(&addr, NbdConfig::default(), &service).unwrap();
    let uri = format!("nbd+unix:///disk?socket={}", path.display());
    let spec: VolumeSpec = uri.parse().unwrap();
    let load = Load {
        threads: 1,
        ..Load::default()
    };
    let target = bench::open_target(&spec, &load, &Arc::default()).unwrap();
    check_mixed(&run(MIXED, &target));
    target.close().unwrap();
    // A server that goes away ends the jobs with errors, and the target says why.
    let target = bench::open_target(&spec, &load, &Arc::default()).unwrap();
    drop(server);
    let job = jobs("[j]\nrw=randread\nruntime=60\ntime_based");
    match bench::run(&job.jobs, &target, &RunOptions::default()) {
        Ok(report) => assert!(report.failed()),
        // The client notices the end without a request, maybe before the job has opened its queue.
        Err(e) => assert!(e.to_string().contains("job j"), "{e}"),
    }
    let why = target.close().unwrap_err().to_string();
    assert!(why.contains("hung up") || why.contains("sending"), "{why}");
}

/// Flips a bit of one write's data, or drops a write, on its way.
struct Faulty {
    inner: Arc<dyn BlockDevice>,
    writes: Arc<AtomicU64>,
    flip: bool,
}

struct FaultyQueue(Box<dyn DeviceQueue>, Arc<AtomicU64>, bool);

impl Decorator for Faulty {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        "faulty".into()
    }
    fn open_device_queue(&self, c: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let inner = self.inner.open_device_queue(c)?;
        let writes = Arc::clone(&self.writes);
        Ok(Box::new(FaultyQueue(inner, writes, self.flip)))
    }
    fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: None,
            extents: None,
            cached: None,
            incarnation: None,
            close: None,
            questions: None,
            memory: None,
            buffers: inner.buffers,
        }
    }
}

impl DeviceQueue for FaultyQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        for r in batch.iter_mut().filter(|r| r.op == Op::Write) {
            if self.1.fetch_add(1, Ordering::Relaxed) != 300 {
                continue;
            }
            if self.2 {
                let mut byte = [0];
                r.buffers[0].read(1000, &mut byte);
                r.buffers[0].write(1000, &[byte[0] ^ 4]);
            } else {
                r.op = Op::Read; // the old data stay
            }
        }
        self.0.submit(batch);
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.0.poll(out);
    }
    fn arm(&mut self) -> Readiness {
        self.0.arm()
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.wait_fd()
    }
}

#[test]
fn planted_corruption_is_found() {
    for (flip, found) in [(true, "at byte 1000"), (false, "write ")] {
        let device: Arc<dyn BlockDevice> = Arc::new(Faulty {
            inner: volume("mem:1M"),
            writes: Arc::default(),
            flip,
        });
        // Each block is written twice: write 300 of 512 is lost over older data.
        let report = run(
            "[j]\nrw=randwrite\nloops=2\niodepth=4\nverify=crc32c",
            &device,
        );
        assert!(report.failed());
        let job = &report.threads[0];
        assert_eq!((job.errno, job.mismatch_count), (84, 1));
        let text = job.mismatches[0].to_string();
        assert!(text.contains(found), "{text}");
        assert!(report.to_json().unwrap().contains("\"error\": 84"));
    }
}

#[test]
fn verify_only_checks_what_an_earlier_run_wrote() {
    let device = volume("mem:1M");
    let text = "[j]\nrw=randwrite\nbs=8k\nverify=crc32c\n";
    let mut write = jobs(text);
    let options = RunOptions::default();
    assert!(!bench::run(&write.jobs, &device, &options).unwrap().failed());
    write.set_all("verify_only").unwrap();
    let report = bench::run(&write.jobs, &device, &options).unwrap();
    assert!(!report.failed());
    let total = report.total();
    assert_eq!((total.write.ios, total.read.ios), (0, 128));
    // Another seed wrote other data; a reader that knows no seed finds them whole.
    write.set_all("randseed=1").unwrap();
    let report = bench::run(&write.jobs, &device, &options).unwrap();
    assert_eq!(report.total().mismatch_count, 128);
    let read = "[r]\nrw=randread\nbs=8k\nverify=crc32c\n";
    assert!(!run(read, &device).failed());
    // Zeros are no data.
    let report = run(&(read.to_owned() + "verify_fatal=1"), &volume("mem:1M"));
    assert_eq!(
        (report.total().mismatch_count, report.total().read.ios),
        (1, 1)
    );
}

#[test]
fn errors_end_a_job_unless_it_goes_on() {
    let device = volume("fault:seed=5,read-error=0.1:mem:4M");
    let report = run("[j]\nrw=randread\niodepth=8", &device);
    let job = &report.threads[0];
    assert!(report.failed() && job.errno == 5 && job.read.errors >= 1);
    assert!(
        job.error
            .as_deref()
            .unwrap_or_default()
            .contains("a read of 4096 bytes")
    );
    let report = run(
        "[j]\nrw=randread\niodepth=8\ncontinue_on_error=all",
        &device,
    );
    let read = &report.threads[0].read;
    assert_eq!(read.ios + read.errors, 1024);
    assert!((40..200).contains(&read.errors), "{}", read.errors);
}

#[test]
fn a_stop_ends_the_run_and_keeps_the_figures() {
    let device = volume("delay:1ms:null:1T");
    let options = RunOptions {
        stop: Arc::new(AtomicBool::new(false)),
        ..RunOptions::default()
    };
    let stop = Arc::clone(&options.stop);
    let tell = move |p: &bench::Progress| {
        assert_eq!(p.threads, 2);
        stop.store(true, Ordering::Relaxed);
    };
    let options = RunOptions {
        progress: Some(&tell),
        ..options
    };
    let two = jobs("[j]\nrw=randrw\nnumjobs=2\niodepth=4\nnorandommap\n[later]\nstonewall\n");
    let report = bench::run(&two.jobs, &device, &options).unwrap();
    assert!(report.interrupted && !report.failed());
    assert_eq!(report.threads.len(), 2, "the next stage doesn't begin");
    assert!(report.total().read.ios > 0);
}

#[test]
fn ramp_pauses_and_rates_are_kept() {
    let device = volume("mem:8M");
    let report = run(
        "[j]\nrw=randrw\nramp_time=100ms\nruntime=300ms\ntime_based\nrate_iops=1000\niodepth=4",
        &device,
    );
    // The total can't be greater; how much less it is depends on the machine.
    let total = report.total();
    assert!(total.read.ios + total.write.ios <= 2 * 410);
    let report = run(
        "[j]\nrw=write\nsize=64k\nthinktime=1\nthinktime_blocks=4\niodepth=8",
        &device,
    );
    assert_eq!(report.total().write.ios, 16);
}

#[test]
fn json_has_the_keys_of_fio() {
    let text = format!("[global]\nbs=4k\n{MIXED}");
    let mut report = run(&text, &volume("mem:8M"));
    report.global = jobs(&text).global;
    let json: serde_json::Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
    for key in [
        "fio version",
        "timestamp",
        "timestamp_ms",
        "global options",
        "jobs",
    ] {
        assert!(!json[key].is_null(), "{key}");
    }
    assert_eq!(json["global options"]["iodepth"], "16");
    let job = &json["jobs"][0];
    for key in [
        "jobname",
        "groupid",
        "error",
        "eta",
        "elapsed",
        "job options",
        "read",
        "write",
        "trim",
        "sync",
        "job_runtime",
        "usr_cpu",
        "sys_cpu",
        "ctx",
        "majf",
        "minf",
        "iodepth_level",
        "iodepth_submit",
        "iodepth_complete",
        "latency_ns",
        "latency_us",
        "latency_ms",
        "latency_depth",
    ] {
        assert!(!job[key].is_null(), "{key}");
    }
    let write = &job["write"];
    for key in [
        "io_bytes",
        "io_kbytes",
        "bw_bytes",
        "bw",
        "iops",
        "runtime",
        "total_ios",
        "short_ios",
        "drop_ios",
        "slat_ns",
        "clat_ns",
        "lat_ns",
        "bw_min",
        "bw_max",
        "bw_agg",
        "bw_mean",
        "bw_dev",
        "bw_samples",
        "iops_min",
        "iops_max",
        "iops_mean",
        "iops_stddev",
        "iops_samples",
    ] {
        assert!(!write[key].is_null(), "{key}");
    }
    assert_eq!(write["io_bytes"], 8 << 20);
    assert_eq!(write["total_ios"], 128);
    assert_eq!(write["clat_ns"]["N"], 128);
    assert!(write["clat_ns"]["percentile"]["99.900000"].is_u64());
    assert_eq!(job["sync"]["total_ios"], 18);
    let levels = job["latency_ns"].as_object().into_iter();
    let levels = levels.chain(job["latency_us"].as_object());
    let levels = levels.chain(job["latency_ms"].as_object());
    let sum: f64 = levels
        .flat_map(|l| l.values())
        .filter_map(|v| v.as_f64())
        .sum();
    assert!((sum - 100.0).abs() < 0.5, "{sum}");
}
