use super::*;
use parking_lot::Mutex;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A server that accepts, and whose peers stay as long as the test likes.
struct Accepting {
    listener: Listener<UnixListener>,
    accepted: Vec<UnixStream>,
    /// No descriptors are left.
    poor: Arc<AtomicBool>,
    told: Arc<Mutex<Vec<(u64, String)>>>,
    stays: bool,
}

impl Server for Accepting {
    fn ready(&mut self, token: u64, io: &Io) {
        assert_eq!(token, 7);
        let poor = self.poor.load(Ordering::Relaxed);
        let socket = self.listener.accept(io, |l| match poor {
            true => Err(io::Error::from_raw_os_error(24)),
            false => Ok(Some(l.accept()?.0)),
        });
        self.accepted.extend(socket);
    }

    fn event(&mut self, id: u64, event: Event, _io: &Io) {
        self.told.lock().push((id, format!("{event:?}")));
    }

    fn due(&self) -> Option<Instant> {
        self.listener.due()
    }

    fn passed(&mut self, _: Option<Stopping>, io: &Io) {
        self.listener.passed(io);
    }

    fn stop(&mut self, io: &Io) -> Stopping {
        self.told.lock().push((0, "stop".into()));
        Stopping {
            grace: io.now(),
            end: io.now() + Duration::from_millis(50),
        }
    }

    fn is_over(&self, _: Stopping, _: Instant) -> bool {
        !self.stays
    }

    fn give_up(&mut self) {
        self.told.lock().push((0, "given up".into()));
    }
}

struct Bed {
    dir: tempfile::TempDir,
    poor: Arc<AtomicBool>,
    told: Arc<Mutex<Vec<(u64, String)>>>,
}

impl Bed {
    fn new() -> Bed {
        Bed {
            dir: tempfile::tempdir().unwrap(),
            poor: Arc::default(),
            told: Arc::default(),
        }
    }

    fn server(&self, io: &Io, stays: bool) -> Accepting {
        let socket = UnixListener::bind(self.dir.path().join("s")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Accepting {
            listener: Listener::new(socket, "s".into(), 7, io).unwrap(),
            accepted: Vec::new(),
            poor: Arc::clone(&self.poor),
            told: Arc::clone(&self.told),
            stays,
        }
    }

    fn dial(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("s")).unwrap()
    }
}

#[test]
fn a_listener_rests_without_descriptors_and_while_it_is_not_wanted() {
    let bed = Bed::new();
    let (start, passed) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let now = Arc::clone(&passed);
    let clock = move || start + Duration::from_millis(now.load(Ordering::Relaxed));
    let mut control =
        Control::new("test", Box::new(clock), |io| Ok(bed.server(io, false))).unwrap();
    let pass = |ms| passed.fetch_add(ms, Ordering::Relaxed);
    let turn = |control: &mut Control<Accepting>| {
        (0..3).for_each(|_| control.turn(Some(Duration::ZERO)));
        control.server.accepted.len()
    };
    let _first = bed.dial();
    assert_eq!(turn(&mut control), 1);
    bed.poor.store(true, Ordering::Relaxed);
    let _second = bed.dial();
    assert_eq!(turn(&mut control), 1);
    let due = control.server.due().unwrap();
    bed.poor.store(false, Ordering::Relaxed);
    pass(99);
    assert_eq!(turn(&mut control), 1, "it rests");
    pass(1);
    assert!(due <= control.io.now());
    assert_eq!(turn(&mut control), 2);
    // A shorter pause doesn't end a longer one.
    control
        .server
        .listener
        .pause(&control.io, Duration::from_secs(1));
    control
        .server
        .listener
        .pause(&control.io, Duration::from_millis(1));
    let _third = bed.dial();
    pass(999);
    assert_eq!(turn(&mut control), 2);
    control.server.listener.want(&control.io, false);
    pass(1);
    assert_eq!(turn(&mut control), 2, "nobody is wanted");
    control.server.listener.want(&control.io, true);
    assert_eq!(turn(&mut control), 3);
}

#[test]
fn events_come_in_order_and_a_stop_waits_only_for_who_is_left() {
    for stays in [false, true] {
        let bed = Bed::new();
        let mut inbox = None;
        let mut thread = ControlThread::start("pvblk-test", "test", |io| {
            inbox = Some(Arc::clone(&io.inbox));
            Ok(bed.server(io, stays))
        })
        .unwrap();
        let inbox = inbox.unwrap();
        inbox.put(3, Event::Resized);
        inbox.put(4, Event::FenceOpen);
        thread.begin_stop();
        thread.stop();
        // Once is enough.
        thread.stop();
        let told = bed.told.lock().clone();
        let mut expected = vec![(3, "Resized"), (4, "FenceOpen"), (0, "stop")];
        expected.extend(stays.then_some((0, "given up")));
        let told: Vec<(u64, &str)> = told.iter().map(|(id, what)| (*id, &**what)).collect();
        assert_eq!(told, expected);
    }
}

/// A server whose peers leave when they are let go.
struct Partner {
    /// Stops that were begun, of all servers.
    stopped: Arc<AtomicU64>,
    /// Number of events.
    told: Arc<AtomicU64>,
    let_go: Arc<AtomicBool>,
    gave_up: Arc<AtomicBool>,
}

impl Server for Partner {
    fn ready(&mut self, _: u64, _: &Io) {}

    fn event(&mut self, _: u64, _: Event, _: &Io) {
        self.told.fetch_add(1, Ordering::SeqCst);
    }

    fn due(&self) -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(5))
    }

    fn passed(&mut self, _: Option<Stopping>, _: &Io) {}

    fn stop(&mut self, io: &Io) -> Stopping {
        self.stopped.fetch_add(1, Ordering::SeqCst);
        let end = io.now() + Duration::from_secs(60);
        Stopping { grace: end, end }
    }

    fn is_over(&self, _: Stopping, _: Instant) -> bool {
        self.let_go.load(Ordering::SeqCst)
    }

    fn give_up(&mut self) {
        self.gave_up.store(true, Ordering::SeqCst);
    }
}

#[test]
fn servers_stop_side_by_side_and_a_second_stop_does_not_begin_anew() {
    let [stopped, told] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let [let_go, gave_up] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let mut inboxes = Vec::new();
    let mut start = || {
        let partner = Partner {
            stopped: Arc::clone(&stopped),
            told: Arc::clone(&told),
            let_go: Arc::clone(&let_go),
            gave_up: Arc::clone(&gave_up),
        };
        let made = ControlThread::start("pvblk-test", "test", |io| {
            inboxes.push(Arc::clone(&io.inbox));
            Ok(partner)
        });
        made.unwrap()
    };
    let threads = [start(), start()];
    let until = |done: &dyn Fn() -> bool| {
        while !done() && !gave_up.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    threads.iter().for_each(ControlThread::begin_stop);
    until(&|| stopped.load(Ordering::SeqCst) == 2);
    threads.iter().for_each(ControlThread::begin_stop);
    // An event that comes after the second stop shows that it was taken.
    inboxes.iter().for_each(|i| i.put(0, Event::Resized));
    until(&|| told.load(Ordering::SeqCst) == 2);
    let_go.store(true, Ordering::SeqCst);
    drop(threads);
    assert!(!gave_up.load(Ordering::SeqCst));
    assert_eq!(stopped.load(Ordering::SeqCst), 2, "each stops once");
}
