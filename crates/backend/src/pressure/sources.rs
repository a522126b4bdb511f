//! PressureSources of memory pressure on this machine.
//!
//! | source | shows | when |
//! |---|---|---|
//! | PSI (`/proc/pressure/memory`, v2 `memory.pressure`) | tasks waited for memory | once in a window of half a second |
//! | v2 `memory.events` | a group came to `high` or `max` | at once |
//! | v1 `memory.pressure_level`, `low` | a group's memory is being reclaimed | after 512 pages |
//! | watermarks | little is left below a limit | within a few milliseconds, while there is something to give |
//!
//! One thread waits for all of them. It looks at a watermark when somebody may have come near it, and seldom
//! while pools have no free pages, so that a server at rest costs nothing.

use super::{Pressure, files};

use super::watermark::Watermark;
use pvblk_block::Error;
use pvblk_sys::{EventFd, Poller};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// "Some task waited 20 ms for memory in half a second", the shortest window (Documentation/accounting/psi.rst).
const PSI_TRIGGER: &str = "some 20000 500000";
/// Interval at which free memory of pools is looked for.
const LOOK_AT_POOLS: Duration = Duration::from_millis(50);
/// Least number of free bytes that are worth a look.
const WORTH_BYTES: u64 = 256 << 10;
const STOP: u64 = u64::MAX;
const LIMITS: u64 = STOP - 1;
/// A task that opens files of limits again and again wakes the thread once in this time.
const DEAF: Duration = Duration::from_millis(50);

/// One source and its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PressureSourceState {
    /// Name such as `cgroup v1 /sys/fs/cgroup/memory/a`.
    pub name: String,
    /// The reason why the source isn't available, if it isn't.
    pub missing: Option<String>,
}

enum Wait {
    /// The source's file has an exceptional condition on pressure.
    File(File),
    /// The source's file has an exceptional condition on pressure, and has to be read again
    /// afterwards.
    Reread(File),
    Event(EventFd, #[expect(dead_code, reason = "kept open")] File),
}

/// The sources that were found.
pub struct PressureSources {
    waits: Vec<Wait>,
    marks: Vec<Watermark>,
    /// Readable when somebody opened or wrote a limit of a watermark.
    written: Option<OwnedFd>,
    states: Vec<PressureSourceState>,
}

/// Listens to the sources until it is dropped.
pub struct PressureWatch {
    stop: Arc<AtomicBool>,
    event: Arc<EventFd>,
    signals: Arc<AtomicU64>,
    states: Vec<PressureSourceState>,
    thread: Option<JoinHandle<()>>,
}

impl PressureSources {
    /// Opens the sources of this machine.
    pub fn find() -> PressureSources {
        let proc = Path::new("/proc");
        // Other mounts may have names that are no UTF-8.
        let read = |name: &str| {
            let text = std::fs::read(proc.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&text).into_owned()
        };
        let groups = files::groups(&read("self/cgroup"), &read("self/mountinfo"));
        let mut found = PressureSources::none();
        let psi = proc.join("pressure/memory");
        let wait = psi_trigger(&psi).map(Wait::File);
        found.add(format!("PSI {}", psi.display()), wait);
        const NONE: &str = "no mount shows this process's group";
        match groups.v2.iter().find(|m| m.is_reached()) {
            Some(mount) => {
                for (number, group) in mount.directories.iter().enumerate() {
                    found.add_v2(group, number == 0);
                }
            }
            None => found.miss("cgroup v2", NONE),
        }
        match groups.v1.iter().find(|m| m.is_reached()) {
            Some(mount) => {
                for (number, group) in mount.directories.iter().enumerate() {
                    found.add_v1(group, number == 0);
                }
            }
            None => found.miss("cgroup v1 memory", NONE),
        }
        match Watermark::system(proc) {
            Ok(mark) => found.add_mark("/proc/meminfo".into(), mark),
            Err(why) => found.miss("watermark of /proc/meminfo", &why),
        }
        found.written = written_limits(&mut found.marks);
        found
    }

    /// No source at all.
    pub fn none() -> PressureSources {
        PressureSources {
            waits: Vec::new(),
            marks: Vec::new(),
            written: None,
            states: Vec::new(),
        }
    }

    fn add_v2(&mut self, group: &Path, is_own: bool) {
        let shown = group.display();
        let pressure = group.join("memory.pressure");
        // The limits of groups above show as far as they concern this process.
        if is_own || pressure.exists() {
            let wait = psi_trigger(&pressure).map(Wait::File);
            self.add(format!("PSI {}", pressure.display()), wait);
        }
        let events = group.join("memory.events");
        if !is_own && !events.exists() {
            return; // the root has none
        }
        let wait = File::open(&events).map_err(|e| e.to_string());
        let wait = wait.map(|mut file| {
            // Reading arms the file: earlier events aren't reported.
            let _ = file.read_to_string(&mut String::new());
            Wait::Reread(file)
        });
        self.add(format!("cgroup v2 {}", events.display()), wait);
        if events.exists() {
            match Watermark::v2(group) {
                Ok(mark) => self.add_mark(format!("{shown}/memory.current"), mark),
                Err(why) => self.miss(&format!("watermark of {shown}"), &why),
            }
        }
    }

    fn add_v1(&mut self, group: &Path, is_own: bool) {
        let shown = group.display();
        let wait = v1_event(group);
        if is_own || wait.is_ok() {
            let name = format!("cgroup v1 {shown}/memory.pressure_level");
            self.add(name, wait);
        }
        match Watermark::v1(group) {
            Ok(mark) => self.add_mark(format!("{shown}/memory.usage_in_bytes"), mark),
            Err(why) => self.miss(&format!("watermark of {shown}"), &why),
        }
    }

    fn add(&mut self, name: String, wait: Result<Wait, String>) {
        match wait {
            Ok(wait) => {
                self.waits.push(wait);
                self.states.push(PressureSourceState {
                    name,
                    missing: None,
                });
            }
            Err(why) => self.miss(&name, &why),
        }
    }

    fn add_mark(&mut self, file: String, mut mark: Watermark) {
        let at = match mark.margin(Instant::now()) {
            Some(margin) => format!("{} MiB", margin >> 20),
            None => "no limit now".into(),
        };
        let name = format!("watermark of {file}, {at}");
        self.states.push(PressureSourceState {
            name,
            missing: None,
        });
        self.marks.push(mark);
    }

    fn miss(&mut self, name: &str, why: &str) {
        self.states.push(PressureSourceState {
            name: name.to_owned(),
            missing: Some(why.to_owned()),
        });
    }

    /// Starts to listen.
    pub fn watch(self, pressure: Arc<Pressure>) -> Result<PressureWatch, Error> {
        let os = |e| Error::os("listening for memory pressure", e);
        let poller = Poller::new().map_err(os)?;
        let event = Arc::new(EventFd::new().map_err(os)?);
        poller.add(event.as_fd(), STOP, false).map_err(os)?;
        for (token, wait) in (0..).zip(&self.waits) {
            match wait {
                Wait::File(file) | Wait::Reread(file) => poller.add_priority(file.as_fd(), token),
                Wait::Event(event, _) => poller.add(event.as_fd(), token, false),
            }
            .map_err(os)?;
        }
        if let Some(written) = &self.written {
            poller.add(written.as_fd(), LIMITS, false).map_err(os)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let signals = Arc::new(AtomicU64::new(0));
        let mut listener = Listener {
            worth: false,
            worth_at: None,
            poller,
            waits: self.waits,
            marks: self.marks,
            written: self.written,
            deaf_until: None,
            pressure,
            stop: Arc::clone(&stop),
            signals: Arc::clone(&signals),
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-pressure".into())
            .stack_size(128 << 10)
            .spawn(move || {
                let _ = pvblk_sys::cpu::set_timer_slack_ns(100_000);
                listener.run();
            })
            .map_err(os)?;
        Ok(PressureWatch {
            stop,
            event,
            signals,
            states: self.states,
            thread: Some(thread),
        })
    }
}

impl PressureWatch {
    /// All sources, available or not, with the reason.
    pub fn states(&self) -> &[PressureSourceState] {
        &self.states
    }

    /// Number of signals of pressure from all sources.
    pub fn signals(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.signals)
    }
}

impl Drop for PressureWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.event.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Listener {
    /// True if pools had free memory worth giving back when they were last looked at.
    worth: bool,
    worth_at: Option<Instant>,
    poller: Poller,
    waits: Vec<Wait>,
    marks: Vec<Watermark>,
    /// Readable when somebody opened or wrote a limit of a watermark.
    written: Option<OwnedFd>,
    /// The poller hasn't that descriptor until then.
    deaf_until: Option<Instant>,
    pressure: Arc<Pressure>,
    stop: Arc<AtomicBool>,
    signals: Arc<AtomicU64>,
}

impl Listener {
    fn run(&mut self) {
        let mut events = Vec::new();
        while !self.stop.load(Ordering::Acquire) {
            events.clear();
            let timeout = self.timeout();
            if let Err(e) = self.poller.wait(&mut events, timeout) {
                tracing::error!("waiting for memory pressure: {e}");
                return;
            }
            let mut told = false;
            let marks = self.waits.len();
            for event in &events {
                let at = event.token as usize;
                if event.token == LIMITS {
                    self.limits_opened();
                } else if let Some(wait) = self.waits.get_mut(at) {
                    told |= heard(wait);
                } else if let Some(mark) = self.marks.get_mut(at - marks) {
                    mark.rang();
                }
            }
            if !told {
                told = self.look();
            }
            if told {
                self.signals.fetch_add(1, Ordering::Relaxed);
                let squeezed = self.pressure.squeeze();
                self.marks.iter_mut().for_each(Watermark::forget);
                if squeezed.bytes > 0 {
                    tracing::debug!("memory pressure: {} KiB given back", squeezed.bytes >> 10);
                }
            }
        }
    }

    fn limits_opened(&mut self) {
        let now = Instant::now();
        if let Some(written) = &self.written {
            let mut events = [0; 4096];
            while rustix::io::read(written, &mut events).is_ok_and(|n| n > 0) {}
            if self.poller.remove(written.as_fd()).is_ok() {
                self.deaf_until = Some(now + DEAF);
            }
        }
        self.marks.iter_mut().for_each(|m| m.limit_opened(now));
    }

    /// Listens again to those who open limits; the kernel has kept what happened meanwhile.
    fn hear_limits(&mut self, now: Instant) {
        let is_over = self.deaf_until.is_some_and(|until| now >= until);
        if is_over && let Some(written) = &self.written {
            self.deaf_until = None;
            let _ = self.poller.add(written.as_fd(), LIMITS, false);
        }
    }

    /// True if pools have something to give and a watermark whose time has come is low. Threshold events that
    /// the kernel has are set on the way.
    fn look(&mut self) -> bool {
        let now = Instant::now();
        self.hear_limits(now);
        if !self.marks.iter().any(|mark| mark.is_due(now)) {
            return false;
        }
        // A look at hundreds of pools takes longer than one at the watermarks.
        if self.worth_at.is_none_or(|at| now >= at + LOOK_AT_POOLS) {
            self.worth = self.pressure.free_bytes() >= WORTH_BYTES;
            self.worth_at = Some(now);
        }
        let mut is_low = false;
        for (token, mark) in (self.waits.len() as u64..).zip(&mut self.marks) {
            if !mark.joins(now) {
                continue;
            }
            if !self.worth {
                mark.glance(now);
                continue;
            }
            is_low |= mark.is_low(now);
            // Setting an event takes the kernel a while, so it is left out under pressure.
            if !is_low && let Some(event) = mark.new_threshold() {
                let _ = self.poller.add(event.as_fd(), token, false);
            }
        }
        is_low
    }

    /// Time until the next look.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let next = self.marks.iter().map(|m| m.next_look(now)).min()?;
        // Pools that have nothing to give have something later.
        let pools = self.worth_at.filter(|_| !self.worth);
        let next = pools.map_or(next, |at| next.max(at + LOOK_AT_POOLS));
        let next = self.deaf_until.map_or(next, |until| next.min(until));
        Some(next.saturating_duration_since(now))
    }
}

/// A descriptor that is readable when somebody opened or wrote a limit of these watermarks, which then know that
/// they are told. The kernel tells it of files of cgroups as of others (inotify(7)).
fn written_limits(marks: &mut [Watermark]) -> Option<OwnedFd> {
    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
    let written = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
    for mark in marks {
        let watch = |file| {
            inotify::add_watch(&written, file, WatchFlags::OPEN | WatchFlags::MODIFY).is_ok()
        };
        if mark.limit_files().all(watch) {
            mark.tell_limit(Instant::now());
        }
    }
    Some(written)
}

/// True if the source signals pressure.
fn heard(wait: &mut Wait) -> bool {
    match wait {
        Wait::File(_) => true,
        Wait::Reread(file) => {
            // Reading from the beginning arms it again.
            let mut text = [0; 4096];
            let _ = std::os::unix::fs::FileExt::read_at(file, &mut text, 0);
            true
        }
        Wait::Event(event, _) => event.drain(),
    }
}

/// A PSI trigger: a file that has an exceptional condition when tasks wait for memory.
fn psi_trigger(path: &PathBuf) -> Result<File, String> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|e| e.to_string())?;
    file.write_all(format!("{PSI_TRIGGER}\0").as_bytes())
        .map_err(|e| e.to_string())?;
    Ok(file)
}

/// An event that is signalled when memory of a v1 group is reclaimed
/// (Documentation/admin-guide/cgroup-v1/memory.rst, 11).
fn v1_event(group: &Path) -> Result<Wait, String> {
    let event = EventFd::new().map_err(|e| e.to_string())?;
    let level = File::open(group.join("memory.pressure_level")).map_err(|e| e.to_string())?;
    let text = format!("{} {} low", event.number(), level.as_raw_fd());
    std::fs::write(group.join("cgroup.event_control"), text).map_err(|e| e.to_string())?;
    Ok(Wait::Event(event, level))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::tests::TestGroup;

    #[test]
    fn every_source_is_there_or_says_why_not() {
        let pressure = Arc::new(Pressure::default());
        let sources = PressureSources::find();
        assert!(sources.written.is_some(), "no inotify");
        let watch = sources.watch(Arc::clone(&pressure)).unwrap();
        assert!(!watch.states().is_empty());
        for state in watch.states() {
            assert!(!state.name.is_empty() && state.missing.as_deref() != Some(""));
        }
        drop(watch);
        assert_eq!(Arc::strong_count(&pressure), 1);
    }

    #[test]
    fn an_event_squeezes() {
        let event = EventFd::new().unwrap();
        let other = event.try_clone().unwrap();
        let file = File::open("/dev/null").unwrap();
        let mut sources = PressureSources::none();
        sources.waits.push(Wait::Event(event, file));
        let pressure = Arc::new(Pressure::default());
        let watch = sources.watch(Arc::clone(&pressure)).unwrap();
        other.notify();
        let until = Instant::now() + Duration::from_secs(20);
        while pressure.report().squeezes == 0 {
            assert!(Instant::now() < until, "nobody squeezed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(watch.signals().load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_limit_that_somebody_writes_is_looked_at_at_once() {
        let group = TestGroup::v2("limits");
        let mut marks = vec![Watermark::v2(group.path()).unwrap()];
        let written = written_limits(&mut marks).expect("inotify");
        let mut listener = Listener {
            worth: false,
            worth_at: None,
            poller: Poller::new().unwrap(),
            waits: Vec::new(),
            marks,
            written: Some(written),
            deaf_until: None,
            pressure: Arc::new(Pressure::default()),
            stop: Arc::default(),
            signals: Arc::default(),
        };
        let written = listener.written.as_ref().unwrap();
        listener.poller.add(written.as_fd(), LIMITS, false).unwrap();
        let told = |listener: &Listener| {
            let mut events = Vec::new();
            let waited = listener.poller.wait(&mut events, Some(Duration::ZERO));
            waited.unwrap();
            events.iter().map(|e| e.token).collect::<Vec<_>>()
        };
        let now = Instant::now();
        assert!(!listener.look());
        // There is no limit, and nothing to do for long.
        assert!(listener.marks[0].next_look(now) > now + Duration::from_secs(1));
        assert_eq!(told(&listener), []);
        group.write("memory.max", "4096\n");
        assert_eq!(told(&listener), [LIMITS]);
        listener.limits_opened();
        let soon = Instant::now() + Duration::from_millis(50);
        assert!(listener.marks[0].next_look(now) <= soon);
        // It isn't told again, nor is what happens now, but after a while.
        std::fs::read(group.path().join("memory.max")).unwrap();
        assert_eq!(told(&listener), []);
        listener.hear_limits(Instant::now());
        listener.hear_limits(Instant::now() + DEAF);
        assert_eq!(told(&listener), [LIMITS]);
    }
}
