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
    stays: Arc<AtomicBool>,
    patience: Duration,
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
            end: io.now() + self.patience,
        }
    }

    fn is_over(&self, _: Stopping, _: Instant) -> bool {
        !self.stays.load(Ordering::SeqCst)
    }

    fn give_up(&mut self) {
        self.told.lock().push((0, "given up".into()));
    }
}

struct Bed {
    dir: tempfile::TempDir,
    poor: Arc<AtomicBool>,
    told: Arc<Mutex<Vec<(u64, String)>>>,
    /// The peers stay when the server stops, and it waits for so long.
    stays: Arc<AtomicBool>,
    patience: Duration,
}

impl Bed {
    fn new(stays: bool) -> Bed {
        Bed {
            dir: tempfile::tempdir().unwrap(),
            poor: Arc::default(),
            told: Arc::default(),
            stays: Arc::new(AtomicBool::new(stays)),
            patience: Duration::from_millis(50),
        }
    }

    fn told(&self) -> Vec<(u64, String)> {
        self.told.lock().clone()
    }

    fn server(&self, io: &Io) -> Accepting {
        let socket = UnixListener::bind(self.dir.path().join("s")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Accepting {
            listener: Listener::new(socket, "s".into(), 7, io).unwrap(),
            accepted: Vec::new(),
            poor: Arc::clone(&self.poor),
            told: Arc::clone(&self.told),
            stays: Arc::clone(&self.stays),
            patience: self.patience,
        }
    }

    fn dial(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("s")).unwrap()
    }
}

#[test]
fn a_listener_rests_without_descriptors_and_while_it_is_not_wanted() {
    let bed = Bed::new(false);
    let (start, passed) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let now = Arc::clone(&passed);
    let clock = move || start + Duration::from_millis(now.load(Ordering::Relaxed));
    let mut control = Control::new("test", Box::new(clock), |io| Ok(bed.server(io))).unwrap();
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
        let bed = Bed::new(stays);
        let mut inbox = None;
        let mut thread = ControlThread::start("pvblk-test", "test", |io| {
            inbox = Some(Arc::clone(&io.inbox));
            Ok(bed.server(io))
        })
        .unwrap();
        let inbox = inbox.unwrap();
        inbox.put(3, Event::Resized);
        inbox.put(4, Event::FenceOpen);
        thread.begin_stop();
        thread.stop();
        // Once is enough.
        thread.stop();
        let told = bed.told();
        let mut expected = vec![(3, "Resized"), (4, "FenceOpen"), (0, "stop")];
        expected.extend(stays.then_some((0, "given up")));
        let told: Vec<(u64, &str)> = told.iter().map(|(id, what)| (*id, &**what)).collect();
        assert_eq!(told, expected);
    }
}

#[test]
fn servers_stop_side_by_side_and_a_second_stop_does_not_begin_anew() {
    let beds = [(); 2].map(|()| Bed {
        patience: Duration::from_secs(60),
        ..Bed::new(true)
    });
    let mut inboxes = Vec::new();
    let threads = beds.each_ref().map(|bed| {
        let started = ControlThread::start("pvblk-test", "test", |io| {
            inboxes.push(Arc::clone(&io.inbox));
            Ok(bed.server(io))
        });
        started.unwrap()
    });
    let until_told = |count: usize| {
        while beds.iter().any(|bed| bed.told.lock().len() < count) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    threads.iter().for_each(ControlThread::begin_stop);
    until_told(1);
    threads.iter().for_each(ControlThread::begin_stop);
    // An event that comes after the second stop shows that it was taken.
    inboxes.iter().for_each(|i| i.put(3, Event::Resized));
    until_told(2);
    for bed in &beds {
        bed.stays.store(false, Ordering::SeqCst);
    }
    drop(threads);
    for bed in &beds {
        // Neither waited for the other, nor gave up, and each stopped once.
        assert_eq!(bed.told(), [(0, "stop".into()), (3, "Resized".into())]);
    }
}
