//! The control thread's turns, taken by the test, with a clock of its own: nothing here depends on how fast the machine is.

use super::*;
use crate::kit::Control;
use pvblk_backend::{Backend, BackendOptions, Disks};
use pvblk_block::trace::Tracing;
use pvblk_protocol::vhost_user::{Code, message};
use pvblk_sys::{EventFd, PeerFd, fdpass};
use ram_support::{Ram, RamDevice};
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;

#[path = "../../tests/ram_support/mod.rs"]
mod ram_support;

/// Microseconds that passed since the start, and how many pass whenever somebody looks.
#[derive(Default)]
struct Time {
    now: AtomicU64,
    look: AtomicU64,
}

impl Time {
    fn pass(&self, time: Duration) {
        self.now
            .fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.now.load(Ordering::Relaxed))
    }
}

/// Sockets a and b, and a control thread that is the test's.
struct Bed {
    control: Control<Ports>,
    time: Arc<Time>,
    dir: TempDir,
}

fn bed() -> Bed {
    let dir = tempfile::tempdir().unwrap();
    let listens = ["a", "b"].map(|disk| Listen {
        disk: disk.into(),
        path: dir.path().join(disk),
    });
    let disk = |name| {
        let device = Arc::new(RamDevice(Ram::new(2048)));
        Arc::new(Disk::new(name, device, Tracing::off()))
    };
    let disks = Disks::new(vec![disk("a"), disk("b")]);
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    let backend = Backend::start(&options).unwrap();
    let service = Service::new(backend, disks, Arc::default());
    let limits = VhostLimits {
        queues: 4,
        unallocated: None,
    };
    let (time, start) = (Arc::new(Time::default()), Instant::now());
    let clock = {
        let time = Arc::clone(&time);
        move || {
            let passed = time.look.load(Ordering::Relaxed);
            start + Duration::from_micros(time.now.fetch_add(passed, Ordering::Relaxed) + passed)
        }
    };
    let sockets = listens.iter().map(|l| {
        let disk = service.disks().find(&l.disk).unwrap();
        let socket = SocketFile::bind(&l.path, SocketType::STREAM).unwrap();
        (disk, socket)
    });
    let sockets = sockets.collect();
    let make = |io: &Io| Ports::new(sockets, &service, limits, Arc::default(), io);
    let control = Control::new(WHAT, Box::new(clock), make).unwrap();
    Bed { control, time, dir }
}

impl Bed {
    fn turn(&mut self) {
        self.control.turn(Some(Duration::ZERO));
    }

    fn connect(&mut self, disk: &str) -> UnixStream {
        let socket = UnixStream::connect(self.dir.path().join(disk)).unwrap();
        socket.set_nonblocking(true).unwrap();
        self.turn();
        socket
    }

    fn accepted(&self) -> u64 {
        self.control.server.next_session - 1
    }

    /// Bytes that wait for the server at the session of a socket.
    fn unread(&self, port: usize) -> u64 {
        let connected = self.control.server.ports[port].session.as_ref().unwrap();
        rustix::io::ioctl_fionread(connected.session.fd()).unwrap()
    }
}

/// Sends one kind of message as fast as the socket takes it.
struct Flood {
    socket: UnixStream,
    bytes: Vec<u8>,
    sent: u64,
}

impl Flood {
    fn new(socket: UnixStream) -> Flood {
        let bytes = message(Code::SetOwner as u32, 0, &[]).repeat(1000);
        Flood {
            socket,
            bytes,
            sent: 0,
        }
    }

    fn refill(&mut self) {
        loop {
            let at = (self.sent % self.bytes.len() as u64) as usize;
            match self.socket.write(&self.bytes[at..]) {
                Ok(n) => self.sent += n as u64,
                Err(e) if e.kind() == IoErrorKind::WouldBlock => return,
                Err(e) => panic!("{e}"),
            }
        }
    }

    /// Messages that the server has taken.
    fn taken(&self, bed: &Bed) -> u64 {
        (self.sent - bed.unread(0)) / 12
    }
}

fn ask(socket: &mut UnixStream) {
    let question = message(Code::GetFeatures as u32, 0, &[]);
    socket.write_all(&question).unwrap();
}

fn is_answered(socket: &mut UnixStream) -> bool {
    let mut answer = [0; 20];
    socket.read(&mut answer).is_ok_and(|n| n == answer.len())
}

#[test]
fn between_two_messages_of_one_session_another_has_at_most_32() {
    let mut bed = bed();
    let (mut flood, mut other) = (Flood::new(bed.connect("a")), bed.connect("b"));
    for round in 0..50 {
        flood.refill();
        let before = flood.taken(&bed);
        ask(&mut other);
        bed.turn();
        assert!(is_answered(&mut other), "{round}");
        assert_eq!(flood.taken(&bed) - before, 32);
    }
}

/// Each look at the clock takes a tenth of a millisecond here, and the control thread looks at least once for a message.
#[test]
fn a_flood_of_messages_has_a_tenth_of_the_control_threads_time() {
    let mut bed = bed();
    bed.time.look.store(100, Ordering::Relaxed);
    let (mut flood, mut other) = (Flood::new(bed.connect("a")), bed.connect("b"));
    for round in 0..200 {
        ask(&mut other);
        for _ in 0..20 {
            flood.refill();
            bed.turn();
        }
        assert!(is_answered(&mut other), "{round}");
        bed.time.pass(Duration::from_millis(10));
    }
    // What it may have at once, its tenth, and the turn with which it goes beyond that.
    let all = bed.time.now();
    let most = Duration::from_millis(32) + all / 10 + Duration::from_millis(2);
    let used = Duration::from_micros(100) * flood.taken(&bed) as u32;
    println!("{used:?} of {all:?} for the flood");
    assert!(used <= most, "{used:?} of {all:?}");
    assert!(used >= all / 20, "{used:?} of {all:?}: it is heard");
}

#[test]
fn connections_are_64_at_once_and_16_a_second_later_on() {
    let mut bed = bed();
    let come_and_go = |bed: &mut Bed, count: u64| {
        for _ in 0..count {
            drop(bed.connect("a"));
            (0..3).for_each(|_| bed.turn());
        }
    };
    come_and_go(&mut bed, 100);
    assert_eq!(bed.accepted(), 64);
    // Those that wait have their turn.
    for second in 1..=3 {
        bed.time.pass(Duration::from_secs(1));
        (0..100).for_each(|_| bed.turn());
        come_and_go(&mut bed, 4);
        let most = 64 + second * 16;
        assert!((most - 1..=most + 1).contains(&bed.accepted()), "{second}");
    }
    bed.connect("b");
}

#[test]
fn half_a_message_ends_its_session_after_10_seconds() {
    let mut bed = bed();
    let slow = bed.connect("a");
    let (whole, seconds) = (message(Code::SetOwner as u32, 0, &[]), Duration::from_secs);
    let send = |bed: &mut Bed, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]| {
        fdpass::send(slow.as_fd(), bytes, fds).unwrap();
        (0..3).for_each(|_| bed.turn());
    };
    let is_there = |bed: &Bed| bed.control.server.ports[0].session.is_some();
    // The rest comes in time, and then time without a message doesn't count.
    send(&mut bed, &whole[..5], &[]);
    bed.time.pass(seconds(9));
    send(&mut bed, &whole[5..], &[]);
    bed.time.pass(seconds(60));
    bed.turn();
    assert!(is_there(&bed));
    // It came while nobody looked.
    send(&mut bed, &whole[..5], &[]);
    fdpass::send(slow.as_fd(), &whole[5..], &[]).unwrap();
    bed.time.pass(seconds(11));
    (0..3).for_each(|_| bed.turn());
    assert!(is_there(&bed));
    // Byte by byte, with its own end of the socket.
    send(&mut bed, &whole[..1], &[slow.as_fd()]);
    for byte in &whole[1..10] {
        bed.time.pass(seconds(1));
        send(&mut bed, std::slice::from_ref(byte), &[]);
        assert!(is_there(&bed));
    }
    drop(slow);
    bed.turn();
    assert!(is_there(&bed), "the server has its end");
    bed.time.pass(seconds(1));
    (0..3).for_each(|_| bed.turn());
    assert!(!is_there(&bed));
    let mut next = bed.connect("a");
    ask(&mut next);
    bed.turn();
    assert!(is_answered(&mut next));
}

/// Closes a TCP socket that lingers until its peer has read what was sent, which the peer does when the returned one is dropped. As many others wait as there is room for.
fn fill(closer: &Arc<Closer>) -> std::net::TcpStream {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    slow.set_nonblocking(true).unwrap();
    while slow.write(&[0; 65536]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&slow, Some(Duration::from_secs(600))).unwrap();
    drop(PeerFd::new(slow.into(), closer));
    // The thread may take some of them before it has the slow one.
    pvblk_testing::wait("the thread closes the slow one", || {
        let event = EventFd::new().unwrap();
        let event = event.as_fd().try_clone_to_owned().unwrap();
        drop(PeerFd::new(event, closer));
        !closer.has_room()
    });
    peer
}

#[test]
fn a_front_end_is_not_heard_while_its_descriptors_wait_to_be_closed() {
    let mut bed = bed();
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    let peer = fill(&bed.control.server.ports[0].closer);
    ask(&mut a);
    ask(&mut b);
    bed.turn();
    assert!(!is_answered(&mut a) && is_answered(&mut b));
    bed.time.pass(Duration::from_secs(9));
    (0..3).for_each(|_| bed.turn());
    assert!(bed.control.server.ports[0].session.is_some());
    drop(peer);
    let closer = Arc::clone(&bed.control.server.ports[0].closer);
    pvblk_testing::wait("all are closed", || closer.has_room());
    bed.time.pass(Duration::from_millis(5));
    (0..3).for_each(|_| bed.turn());
    assert!(is_answered(&mut a));
    // It takes too long.
    let _peer = fill(&closer);
    ask(&mut a);
    bed.turn();
    bed.time.pass(Duration::from_secs(11));
    (0..3).for_each(|_| bed.turn());
    assert!(bed.control.server.ports[0].session.is_none());
}
