//! Disks of other servers as volumes: served, and measured, by the same specifications.

mod serving;

use pvblk_block::{BlockDevice, Buffer, Op, Queue, QueueContext, Request, Status};
use pvblk_client::nbd::{NbdClient, NbdClientConfig};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A bound for what hangs.
const HANG: Duration = Duration::from_secs(60);

struct Serve(Child);

impl Serve {
    fn start(args: &[String]) -> Serve {
        let fixed = ["--workers=1", "--no-pressure"].map(String::from);
        Serve(serving::start(&[&fixed, args].concat()))
    }

    /// Asks it to stop, and returns whether it ended well.
    fn stop(mut self) -> bool {
        let id = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < HANG {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("it didn't stop");
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server of disk `a`, 16 MiB of memory, with each export.
fn server(dir: &Path) -> Serve {
    let at = |name: &str| format!("unix:{}", dir.join(name).display());
    Serve::start(&[
        "--disk=a=mem:16M".into(),
        format!("--nbd={}", at("nbd")),
        format!("--local={}", at("rings")),
        format!("--vhost-user=a={}", at("vhost")),
    ])
}

/// Disk `a` by each of its exports, and below other volumes.
fn specs(dir: &Path) -> Vec<String> {
    let at = |name: &str| dir.join(name).display().to_string();
    let nbd = format!("nbd+unix:///a?socket={}", at("nbd"));
    vec![
        format!("{nbd}&connections=3"),
        format!("rings:unix:{},disk=a,queues=2,ring-pages=2", at("rings")),
        format!("vhost-user:unix:{},queue-size=64", at("vhost")),
        format!("cache:1M,mode=write-through:{nbd}"),
        format!("delay:10us:rings:unix:{},disk=a", at("rings")),
    ]
}

fn nbd(socket: &Path, export: &str) -> Result<Arc<dyn BlockDevice>, pvblk_block::Error> {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let client = NbdClient::connect(&uri.parse()?, NbdClientConfig::default())?;
    Ok(Arc::new(client))
}

fn queue(device: &Arc<dyn BlockDevice>) -> Queue {
    Queue::open(device, &QueueContext::new(8)).unwrap()
}

fn run(queue: &mut Queue, request: Box<Request>) -> Status {
    queue.submit(&mut vec![request]);
    let (begin, mut done) = (Instant::now(), Vec::new());
    while queue.poll(&mut done) == 0 {
        assert!(begin.elapsed() < HANG, "a request never came back");
        queue.arm();
        std::thread::sleep(Duration::from_micros(100));
    }
    done[0].status
}

fn read(queue: &mut Queue, sector: u64, bytes: usize) -> (Status, Vec<u8>) {
    let buffer = Buffer::anonymous(bytes).unwrap();
    let request = Request::with_buffers(Op::Read, sector, vec![buffer.clone()], 0);
    (run(queue, request), buffer.to_vec())
}

fn write(queue: &mut Queue, sector: u64, data: &[u8]) {
    let buffer = Buffer::anonymous(data.len()).unwrap();
    buffer.write(0, data);
    let request = Request::with_buffers(Op::Write, sector, vec![buffer], 0);
    assert_eq!(run(queue, request), Status::Ok);
}

/// A client of disk `b` with two queues, as soon as there is room for them: those of clients that have left are given back when the server
/// has noticed.
fn two_queues(socket: &Path) -> (Arc<dyn BlockDevice>, Vec<Queue>) {
    let begin = Instant::now();
    let attempt = || {
        let device = nbd(socket, "b").ok()?;
        let open = |_| Queue::open(&device, &QueueContext::new(8)).ok();
        let mut queues = (0..2).map(open).collect::<Option<Vec<Queue>>>()?;
        let works = |q: &mut Queue| read(q, 0, 512).0 == Status::Ok;
        queues.iter_mut().all(works).then_some((device, queues))
    };
    loop {
        if let Some(both) = attempt() {
            return both;
        }
        assert!(begin.elapsed() < HANG, "queues aren't given back");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_disk_of_another_server_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let origin = server(dir.path());
    let truth = nbd(&dir.path().join("nbd"), "a").unwrap();
    let mut truth = queue(&truth);
    for (round, spec) in (1u8..).zip(specs(dir.path())) {
        let socket = dir.path().join(format!("served{round}"));
        let listen = format!("--nbd=unix:{}", socket.display());
        let served = Serve::start(&[format!("--disk=b={spec}"), listen]);
        // Twice: queues of the first clients are free again for the next.
        for turn in 0..2u8 {
            let (device, mut queues) = two_queues(&socket);
            assert_eq!(device.capacity_sectors(), (16 << 20) / 512, "{spec}");
            for (at, queue) in (0u64..).zip(&mut queues) {
                let data: Vec<u8> = (0..100 * 512)
                    .map(|i| (i / 512) as u8 ^ round ^ turn << 4 ^ at as u8)
                    .collect();
                let sector = at * 4096 + u64::from(turn) * 1000;
                write(queue, sector, &data);
                assert_eq!(run(queue, Request::new(Op::Flush, 0, 0, 0)), Status::Ok);
                let (status, back) = read(queue, sector, data.len());
                assert!(status == Status::Ok && back == data, "{spec}");
                let (status, stored) = read(&mut truth, sector, data.len());
                assert!(status == Status::Ok && stored == data, "{spec}");
            }
        }
        assert!(served.stop(), "{spec}");
    }
    drop(truth);
    assert!(origin.stop());
}

#[test]
fn more_clients_than_connections_are_refused_and_the_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let _origin = server(dir.path());
    let socket = dir.path().join("served");
    let spec = &specs(dir.path())[0];
    let listen = format!("--nbd=unix:{}", socket.display());
    let _served = Serve::start(&[format!("--disk=b={spec}"), listen]);
    let clients: Vec<_> = (0..3).map(|_| nbd(&socket, "b").unwrap()).collect();
    let mut queues: Vec<Queue> = clients.iter().map(queue).collect();
    for queue in &mut queues {
        assert_eq!(read(queue, 0, 512).0, Status::Ok);
    }
    // The fourth is let go, before or after its negotiation.
    if let Ok(device) = nbd(&socket, "b")
        && let Ok(mut queue) = Queue::open(&device, &QueueContext::new(8))
    {
        assert_eq!(read(&mut queue, 0, 512).0, Status::IoError);
    }
    for queue in &mut queues {
        assert_eq!(read(queue, 0, 512).0, Status::Ok);
    }
}

#[test]
fn a_server_that_goes_away_takes_its_own_disk_only() {
    let dir = tempfile::tempdir().unwrap();
    let origin = server(dir.path());
    let socket = dir.path().join("served");
    let args = [
        format!("--disk=b={},on-reconnect=fail", specs(dir.path())[0]),
        "--disk=c=mem:1M".into(),
        format!("--nbd=unix:{}", socket.display()),
    ];
    let _served = Serve::start(&args);
    let (lost, other) = (nbd(&socket, "b").unwrap(), nbd(&socket, "c").unwrap());
    let (mut lost, mut other) = (queue(&lost), queue(&other));
    assert_eq!(read(&mut lost, 0, 512).0, Status::Ok);
    drop(origin);
    assert_eq!(read(&mut lost, 0, 512).0, Status::IoError);
    write(&mut other, 8, &[7; 512]);
    assert_eq!(read(&mut other, 8, 512), (Status::Ok, vec![7; 512]));
}

/// The server's disk is memory, which is gone with it: what was written and not flushed is written again.
#[test]
fn a_server_that_comes_back_is_waited_for_and_gets_what_it_lost() {
    let dir = tempfile::tempdir().unwrap();
    let origin = server(dir.path());
    let socket = dir.path().join("served");
    let args = [
        format!("--disk=b={}", specs(dir.path())[0]),
        format!("--nbd=unix:{}", socket.display()),
    ];
    let served = Serve::start(&args);
    let disk = nbd(&socket, "b").unwrap();
    let mut queue = queue(&disk);
    for n in 1..4u8 {
        write(&mut queue, 8, &[n; 4096]);
    }
    drop(origin);
    let again = std::thread::spawn({
        let dir = dir.path().to_owned();
        move || {
            std::thread::sleep(Duration::from_millis(300));
            server(&dir)
        }
    });
    assert_eq!(read(&mut queue, 8, 4096), (Status::Ok, vec![3; 4096]));
    assert_eq!(
        run(&mut queue, Request::new(Op::Flush, 0, 0, 0)),
        Status::Ok
    );
    let _origin = again.join().unwrap();
    drop(queue);
    assert!(served.stop());
}

fn pvblk(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvblk"));
    command.args(args).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn what_is_served_is_measured_by_the_same_specification() {
    let dir = tempfile::tempdir().unwrap();
    let _origin = server(dir.path());
    let mut all = specs(dir.path());
    all.push("delay:1us:mem:4M".into());
    for spec in all {
        let load = ["--rw", "randwrite", "--size", "1m", "--iodepth", "4"];
        let args = [
            &["bench", "--target", &spec, "--option", "verify=crc32c"],
            &load[..],
        ];
        let output = pvblk(&args.concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{spec}: {said}");
    }
}

#[test]
fn both_commands_refuse_a_wrong_specification_for_the_same_reason_in_one_line() {
    for (spec, why) in [
        (
            "nbd://h/x?x=1",
            "unknown option `x`: use socket=PATH, connections=N",
        ),
        ("rings:unix:/x", "the disk's name is missing"),
        ("vhost-user:/x", "a server's socket is missing"),
        ("cache:1M:http://h/x", "unknown kind `http`"),
        (
            "rings:unix:/nonexistent/x,disk=a",
            "connecting to /nonexistent/x",
        ),
    ] {
        let disk = format!("b={spec}");
        let serve = ["serve", "--disk", &disk, "--nbd", "unix:/nonexistent/y"];
        let bench = ["bench", "--target", spec, "--rw", "read"];
        for args in [&serve[..], &bench[..]] {
            let output = pvblk(args);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{spec}");
            assert!(said.contains(why), "{spec}: {said}");
            assert_eq!(
                said.lines().filter(|l| l.contains(why)).count(),
                1,
                "{said}"
            );
        }
    }
}
