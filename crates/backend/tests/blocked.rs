//! A worker whose thread is blocked, or panics, in a call of one disk's lane: the other disks don't notice.

mod support;

use parking_lot::Mutex;
use pvblk_backend::{Backend, BackendOptions, Disk, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, Op, QueueContext,
    Readiness, Request, RequestFlags, Status,
};
use pvblk_testing::wait;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use support::log::Log;
use support::source::{Feed, source};
use tracing::Level;

const NONE: RequestFlags = RequestFlags::empty();

/// Completes all requests at once, unless a door is shut: then the caller blocks there.
#[derive(Clone, Default)]
struct Doors {
    submit: Arc<Mutex<()>>,
    drop: Arc<Mutex<()>>,
    /// Threads that are or were in `submit`.
    entered: Arc<AtomicUsize>,
    /// A thread that passes a door while this is set panics.
    panics: Arc<AtomicBool>,
}

impl Doors {
    fn panic(&self) {
        self.panics.store(true, Ordering::Release);
    }

    /// Panics once if `panics` is set.
    fn passed(&self) {
        assert!(!self.panics.swap(false, Ordering::AcqRel), "planted");
    }
}

#[derive(Default)]
struct Doored {
    events: EventHub,
    doors: Doors,
}

struct DooredQueue {
    doors: Doors,
    done: Vec<Completion>,
}

impl BlockDevice for Doored {
    fn describe(&self) -> String {
        "doored".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        1 << 20
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(DooredQueue {
            doors: self.doors.clone(),
            done: Vec::new(),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

impl DeviceQueue for DooredQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.doors.entered.fetch_add(1, Ordering::AcqRel);
        drop(self.doors.submit.lock());
        self.doors.passed();
        let done = batch.drain(..).map(|request| Completion {
            request,
            status: Status::Ok,
        });
        self.done.extend(done);
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }
    fn arm(&mut self) -> Readiness {
        match self.done.is_empty() {
            true => Readiness::Wait(None),
            false => Readiness::Ready,
        }
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for DooredQueue {
    fn drop(&mut self) {
        drop(self.doors.drop.lock());
        self.doors.passed();
    }
}

struct Rig {
    doors: Doors,
    bad: Disk,
    good: Disk,
    backend: Backend,
    ends: Arc<Mutex<Vec<String>>>,
}

fn rig(workers: usize) -> Rig {
    rig_named("bad", workers)
}

/// The disk that blocks has this name.
fn rig_named(bad: &str, workers: usize) -> Rig {
    let doors = Doors::default();
    let device = Arc::new(Doored {
        doors: doors.clone(),
        ..Doored::default()
    });
    Rig {
        bad: Disk::new(bad, device, Tracing::off()),
        good: Disk::new("good", Arc::new(Doored::default()), Tracing::off()),
        doors,
        backend: Backend::start(&BackendOptions {
            workers,
            ..BackendOptions::default()
        })
        .unwrap(),
        ends: Arc::default(),
    }
}

impl Rig {
    fn attach(&self, disk: &Disk) -> (Feed, pvblk_backend::SourceId) {
        let (feed, source) = source(8);
        let (ends, name) = (Arc::clone(&self.ends), disk.name().to_owned());
        let on_end = move |end: SourceEnd| {
            let how = match end {
                SourceEnd::Closed => "closed".to_owned(),
                SourceEnd::Broken(e) => e.to_string(),
            };
            ends.lock().push(format!("{name} {how}"));
        };
        let id = self.backend.attach(disk, source, Box::new(on_end)).unwrap();
        (feed, id)
    }

    /// Waits until lanes of these disks, and no others, have ended by a panic.
    #[track_caller]
    fn ends_by_a_bug(&self, disks: &[&str]) {
        wait("the end", || self.ends.lock().len() == disks.len());
        for (end, disk) in self.ends.lock().iter().zip(disks) {
            assert!(end.starts_with(disk) && end.contains("panicked"), "{end}");
        }
    }

    #[track_caller]
    fn goes_on(&self, feed: &Feed, writes: u64) {
        let before = feed.answered();
        for sector in 0..writes {
            feed.write(sector, NONE);
            wait("a healthy disk answers", || {
                feed.answered() == before + sector as usize + 1
            });
        }
    }
}

#[test]
fn a_blocked_disk_holds_up_no_other_and_comes_back() {
    let rig = rig(1);
    let (bad, _) = rig.attach(&rig.bad);
    let (second, _) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    rig.goes_on(&good, 2);
    for round in 0..3 {
        let shut = rig.doors.submit.lock();
        bad.write(1, NONE);
        wait("the worker is in there", || {
            rig.doors.entered.load(Ordering::Acquire) == 2 * round + 1
        });
        rig.goes_on(&good, 50);
        wait("the disk is marked", || rig.bad.stall().is_on());
        assert!(!rig.good.stall().is_on() && rig.bad.stall().lasts().is_some());
        // Its other lanes wait rather than take another thread each.
        second.write(2, NONE);
        rig.goes_on(&good, 50);
        assert_eq!(rig.doors.entered.load(Ordering::Acquire), 2 * round + 1);
        let (late, _) = rig.attach(&rig.good);
        rig.goes_on(&late, 5);
        drop(shut);
        wait("it is back", || bad.answered() == round + 1);
        wait("its other lane, too", || second.answered() == round + 1);
        wait("no mark is left", || !rig.bad.stall().is_on());
        rig.goes_on(&good, 5);
    }
}

#[test]
fn a_lane_is_detached_while_its_thread_is_blocked() {
    let rig = rig(1);
    let (bad, id) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    let shut = rig.doors.submit.lock();
    bad.write(1, NONE);
    wait("the worker is in there", || {
        rig.doors.entered.load(Ordering::Acquire) == 1
    });
    rig.goes_on(&good, 5);
    rig.backend.detach(&id);
    rig.goes_on(&good, 5);
    assert!(rig.ends.lock().is_empty());
    drop(shut);
    wait("the end", || *rig.ends.lock() == ["bad closed"]);
    assert_eq!(bad.answers(), [(1, Status::Ok)]);
}

#[test]
fn a_queue_that_blocks_at_its_end_holds_up_nobody() {
    let rig = rig(1);
    let (_bad, id) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    let shut = rig.doors.drop.lock();
    rig.backend.detach(&id);
    rig.goes_on(&good, 20);
    wait("the disk is marked", || rig.bad.stall().is_on());
    rig.goes_on(&good, 20);
    assert!(rig.ends.lock().is_empty());
    drop(shut);
    wait("the end", || *rig.ends.lock() == ["bad closed"]);
    wait("no mark is left", || !rig.bad.stall().is_on());
    rig.goes_on(&good, 20);
}

#[test]
fn a_back_end_ends_while_a_disk_is_blocked() {
    let rig = rig(2);
    let (bad, _) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    let shut = rig.doors.submit.lock();
    bad.flush(1, NONE);
    wait("the worker is in there", || {
        rig.doors.entered.load(Ordering::Acquire) == 1
    });
    rig.goes_on(&good, 5);
    wait("the disk is marked", || rig.bad.stall().is_on());
    drop(rig.backend);
    drop(shut);
}

#[test]
fn a_panic_in_a_lane_ends_that_lane() {
    let rig = rig(1);
    let (bad, _) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    rig.goes_on(&good, 20);
    rig.doors.panic();
    bad.write(1, NONE);
    rig.goes_on(&good, 20);
    rig.ends_by_a_bug(&["bad"]);
    rig.goes_on(&good, 20);
    let (bad, _) = rig.attach(&rig.bad);
    rig.goes_on(&bad, 20);
}

#[test]
fn a_panic_of_a_thread_that_was_replaced_ends_its_lane_and_the_stall() {
    let rig = rig(1);
    let (bad, _) = rig.attach(&rig.bad);
    let (second, _) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    let shut = rig.doors.submit.lock();
    bad.write(1, NONE);
    wait("the disk is marked", || rig.bad.stall().is_on());
    rig.goes_on(&good, 20);
    rig.doors.panic();
    drop(shut);
    rig.ends_by_a_bug(&["bad"]);
    wait("no mark is left", || !rig.bad.stall().is_on());
    rig.goes_on(&second, 20);
    rig.goes_on(&good, 20);
}

#[test]
fn a_lane_that_panics_at_its_end_still_tells_it() {
    let rig = rig(1);
    let (good, _) = rig.attach(&rig.good);
    for replaced in [false, true] {
        let (bad, id) = rig.attach(&rig.bad);
        rig.goes_on(&bad, 2);
        let shut = replaced.then(|| rig.doors.drop.lock());
        rig.doors.panic();
        rig.backend.detach(&id);
        if replaced {
            wait("the disk is marked", || rig.bad.stall().is_on());
            rig.goes_on(&good, 5);
            assert!(rig.ends.lock().is_empty());
        }
        drop(shut);
        rig.ends_by_a_bug(&["bad"]);
        wait("no mark is left", || !rig.bad.stall().is_on());
        rig.goes_on(&good, 5);
        rig.ends.lock().clear();
    }
}

#[test]
fn a_panic_of_the_worker_itself_ends_its_lanes_and_it_goes_on() {
    let rig = rig(1);
    let (away, _) = rig.attach(&rig.bad);
    let (one, _) = rig.attach(&rig.good);
    let (two, _) = rig.attach(&rig.good);
    let shut = rig.doors.submit.lock();
    away.write(1, NONE);
    wait("the disk is marked", || rig.bad.stall().is_on());
    for feed in [&one, &two] {
        rig.goes_on(feed, 5);
    }
    one.panic_in_the_worker();
    rig.ends_by_a_bug(&["good", "good"]);
    let (three, id) = rig.attach(&rig.good);
    rig.goes_on(&three, 50);
    // A lane that wasn't there then comes back to it.
    drop(shut);
    wait("it is back", || away.answered() == 1);
    rig.goes_on(&away, 5);
    rig.ends.lock().clear();
    rig.backend.detach(&id);
    wait("an end in order", || *rig.ends.lock() == ["good closed"]);
}

#[test]
fn a_request_of_every_kind_passes_a_worker_that_was_replaced() {
    let rig = rig(1);
    let (bad, _) = rig.attach(&rig.bad);
    let (good, _) = rig.attach(&rig.good);
    let shut = rig.doors.submit.lock();
    bad.flush(1, RequestFlags::BARRIER);
    wait("the worker is in there", || {
        rig.doors.entered.load(Ordering::Acquire) == 1
    });
    good.flush(1, RequestFlags::BARRIER);
    good.write(2, RequestFlags::PREFLUSH);
    good.send(Request::new(Op::Discard, 0, 8, 3));
    wait("answers", || good.answered() == 3);
    drop(shut);
    wait("the other's", || bad.answered() == 1);
}

/// Of all tests here: a test looks for lines about its own disk.
fn log() -> &'static Log {
    static LOG: LazyLock<Log> = LazyLock::new(|| {
        let log = Log::default();
        tracing::subscriber::set_global_default(log.clone()).unwrap();
        log
    });
    &LOG
}

#[test]
fn a_stall_that_lasts_is_logged_although_all_workers_sleep() {
    let log = log();
    let rig = rig_named("logged", 1);
    let (bad, _) = rig.attach(&rig.bad);
    let shut = rig.doors.submit.lock();
    bad.write(1, NONE);
    let lines = |text: &str| {
        let of_disk = |l: &String| l.contains("logged") && l.contains(text);
        log.lines(Level::WARN).iter().filter(|l| of_disk(l)).count()
    };
    wait("the disk is marked", || rig.bad.stall().is_on());
    wait("its line", || lines(": stalled: ") == 1);
    assert!(rig.bad.stall().lasts() >= Some(Duration::from_secs(1)));
    assert_eq!(lines(": back after "), 0);
    drop(shut);
    wait("the other line", || lines(": back after ") == 1);
    assert_eq!(lines(""), 2);
}
