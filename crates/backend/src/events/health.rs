//! [`Health`]: the state of a disk, and the facts that it follows from.

use super::{Event, EventLog, Kind};
use crate::stall::Stall;
use parking_lot::Mutex;
use pvblk_block::{Clock, Completion, Condition, DeviceEvent, MemberChange, Op, Status};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A backing is well again if requests succeed and none has failed for this time.
pub(super) const QUIET: Duration = Duration::from_secs(5);

/// Limits are told of once they have held requests back without a pause for this time,
const LIMITED_FOR: Duration = Duration::from_secs(1);
/// and again only after as long without that.
const UNLIMITED_FOR: Duration = Duration::from_secs(60);

/// The last known state of a disk. The first of `Failed`, `Stalled` and `Degraded` that holds, else `Healthy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HealthState {
    Healthy,
    /// An array lacks a member, the backing is full, or requests fail.
    Degraded,
    /// Requests don't end.
    Stalled,
    /// The device is gone or its lock is lost, or an array has lost two members.
    Failed,
}

impl HealthState {
    pub fn name(self) -> &'static str {
        match self {
            HealthState::Healthy => "healthy",
            HealthState::Degraded => "degraded",
            HealthState::Stalled => "stalled",
            HealthState::Failed => "failed",
        }
    }
}

impl fmt::Display for HealthState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The facts about a disk that its state follows from. Each change of a fact is an event, once.
pub struct Health {
    disk: String,
    clock: Arc<dyn Clock>,
    stall: Arc<Stall>,
    /// Set when the disk is served.
    log: OnceLock<Arc<EventLog>>,
    facts: Mutex<Facts>,
    /// Requests fail, or did a short time ago: lanes report those that end well, too.
    in_trouble: AtomicBool,
    /// As [`Facts::hanging`], to be read without the lock.
    hangs: AtomicBool,
}

#[derive(Default)]
struct Facts {
    gone: bool,
    /// Another client has the disk's lock.
    lock_lost: bool,
    /// Its owner takes it away: the end of the device is no trouble.
    retired: bool,
    condition: Condition,
    /// The last time at which a request failed for lack of space.
    full: Option<Instant>,
    /// The last time at which a request failed otherwise.
    failing: Option<Instant>,
    hanging: bool,
    /// The last time at which the limits of the disk were seen to hold requests back for long.
    limited: Option<Instant>,
}

/// The ends of a batch's requests.
#[derive(Default)]
struct Ends {
    full: bool,
    failed: bool,
    wrote: bool,
    succeeded: bool,
}

impl Ends {
    fn of(done: &[Completion]) -> Ends {
        let mut ends = Ends::default();
        for Completion { request, status } in done {
            match status {
                Status::Ok => {
                    ends.succeeded = true;
                    ends.wrote |= matches!(request.op, Op::Write | Op::WriteZeroes);
                }
                Status::NoSpace => ends.full = true,
                Status::IoError => ends.failed = true,
                // The peer's own mistake.
                Status::Unsupported | Status::ReadOnly | Status::Invalid => {}
            }
        }
        ends
    }
}

impl Health {
    /// Health of a disk whose device has this condition, and of which nothing else is known.
    pub(crate) fn new(
        disk: &str,
        condition: Condition,
        stall: &Arc<Stall>,
        clock: Arc<dyn Clock>,
    ) -> Health {
        Health {
            disk: disk.to_owned(),
            clock,
            stall: Arc::clone(stall),
            log: OnceLock::new(),
            facts: Mutex::new(Facts {
                condition,
                ..Facts::default()
            }),
            in_trouble: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
        }
    }

    /// From now on events go to `log`. A condition that isn't well is told at once.
    pub(crate) fn link(&self, log: &Arc<EventLog>) {
        let facts = self.facts.lock();
        if self.log.set(Arc::clone(log)).is_err() {
            return;
        }
        if let Condition::Degraded { place } = facts.condition {
            let text = format!("its member at place {place} is missing");
            self.put(Event::new(Kind::MemberMissing, text).with("place", place));
        }
        if facts.condition != Condition::Whole {
            self.put_condition(&facts);
        }
    }

    /// The disk is taken out of service: nothing is told of it from now on.
    pub fn retire(&self) {
        self.facts.lock().retired = true;
    }

    /// Puts an event about the disk; the disk isn't served while there is no log.
    fn put(&self, event: Event) {
        if let Some(log) = self.log.get() {
            log.put(event.of(&self.disk));
        }
    }

    /// The state that follows from what is known now.
    pub fn state(&self) -> HealthState {
        self.state_of(&self.facts.lock())
    }

    fn state_of(&self, facts: &Facts) -> HealthState {
        if facts.gone || facts.lock_lost || facts.condition == Condition::Failed {
            HealthState::Failed
        } else if facts.hanging || self.stall.is_on() {
            HealthState::Stalled
        } else if facts.condition != Condition::Whole
            || facts.full.is_some()
            || facts.failing.is_some()
        {
            HealthState::Degraded
        } else {
            HealthState::Healthy
        }
    }

    /// The facts that keep the disk from being healthy, as the kinds of the events that told of them.
    pub fn reasons(&self) -> Vec<Kind> {
        let facts = self.facts.lock();
        let condition = match facts.condition {
            Condition::Whole => None,
            Condition::Degraded { .. } => Some(Kind::ArrayDegraded),
            Condition::Failed => Some(Kind::ArrayFailed),
        };
        let hanging = facts.hanging || self.stall.is_on();
        let all = [
            facts.gone.then_some(Kind::DiskGone),
            facts.lock_lost.then_some(Kind::LockLost),
            condition,
            hanging.then_some(Kind::BackingHanging),
            facts.full.map(|_| Kind::BackingFull),
            facts.failing.map(|_| Kind::BackingFailing),
        ];
        all.into_iter().flatten().collect()
    }

    /// True if lanes are to report all requests that end.
    #[inline]
    pub(crate) fn is_in_trouble(&self) -> bool {
        self.in_trouble.load(Ordering::Relaxed)
    }

    /// Requests have ended, some of them with an error, or [`Health::is_in_trouble`].
    #[cold]
    pub(crate) fn ended(&self, done: &[Completion]) {
        let (ends, now) = (Ends::of(done), self.clock.now());
        let mut facts = self.facts.lock();
        let is_told = facts.gone || facts.lock_lost || facts.condition == Condition::Failed;
        if facts.retired || is_told {
            // That was told, and explains it.
            return;
        }
        if ends.full && facts.full.replace(now).is_none() {
            let text = "writes fail: the file system or device below is full; make room there";
            self.put_with_state(&facts, Event::new(Kind::BackingFull, text));
        }
        if ends.failed && facts.failing.replace(now).is_none() {
            let text = "requests fail with I/O errors; look at the device below";
            self.put_with_state(&facts, Event::new(Kind::BackingFailing, text));
        }
        let is_quiet = |last: &mut Instant| now.saturating_duration_since(*last) >= QUIET;
        if ends.wrote && !ends.full && facts.full.take_if(is_quiet).is_some() {
            self.put_back(&facts, "writes end well again: there is room", "full");
        }
        if ends.succeeded && !ends.failed && facts.failing.take_if(is_quiet).is_some() {
            self.put_back(&facts, "requests end well again", "failing");
        }
        let in_trouble = facts.full.is_some() || facts.failing.is_some();
        self.in_trouble.store(in_trouble, Ordering::Relaxed);
    }

    fn put_back(&self, facts: &Facts, text: &str, was: &str) {
        let event = Event::new(Kind::BackingBack, text).with("was", was);
        self.put_with_state(facts, event);
    }

    fn put_with_state(&self, facts: &Facts, event: Event) {
        self.put(event.with("state", self.state_of(facts).name()));
    }

    /// The oldest request that hasn't ended has this age; `None`: there is none, or it isn't known to be old.
    pub(crate) fn oldest(&self, age: Option<Duration>, limit: Duration) {
        if age.is_none() && !self.may_hang() {
            return;
        }
        let age = age.max(self.stall.lasts());
        let is_hanging = age.is_some_and(|age| age >= limit);
        let mut facts = self.facts.lock();
        if facts.retired || facts.hanging == is_hanging {
            return;
        }
        facts.hanging = is_hanging;
        self.hangs.store(is_hanging, Ordering::Relaxed);
        match age {
            Some(age) if is_hanging => {
                let seconds = age.as_secs();
                let text = format!("a request hasn't ended for {seconds} s");
                let event = Event::new(Kind::BackingHanging, text).with("seconds", seconds);
                self.put_with_state(&facts, event);
            }
            _ => self.put_back(&facts, "requests that hung have ended", "hanging"),
        }
    }

    /// True if the next look may have to tell that something hangs, or no longer does.
    pub(crate) fn may_hang(&self) -> bool {
        self.stall.is_on() || self.hangs.load(Ordering::Relaxed)
    }

    /// The disk's limits have held so many requests back without a pause since then.
    pub(crate) fn held_back(&self, requests: u64, since: Instant) {
        let now = self.clock.now();
        if now.saturating_duration_since(since) < LIMITED_FOR {
            return;
        }
        let mut facts = self.facts.lock();
        let last = facts.limited.replace(now);
        let is_news = last.is_none_or(|last| now.saturating_duration_since(last) >= UNLIMITED_FOR);
        if is_news && !facts.retired {
            let text = format!("its limits hold requests back, {requests} now");
            self.put(Event::new(Kind::LimitReached, text).with("requests", requests));
        }
    }

    /// The device tells of a change.
    pub(crate) fn device(&self, event: DeviceEvent) {
        let mut facts = self.facts.lock();
        if facts.retired {
            return;
        }
        match event {
            DeviceEvent::Resized { sectors } => {
                let bytes = sectors.saturating_mul(pvblk_block::SECTOR);
                let text = format!("its size is {bytes} bytes now");
                self.put(Event::new(Kind::DiskResized, text).with("bytes", bytes));
            }
            DeviceEvent::Gone => {
                if !std::mem::replace(&mut facts.gone, true) {
                    let text = "its device is gone, and requests fail";
                    self.put_with_state(&facts, Event::new(Kind::DiskGone, text));
                }
            }
            DeviceEvent::LockLost { why } => {
                if !std::mem::replace(&mut facts.lock_lost, true) {
                    self.put_with_state(&facts, Event::new(Kind::LockLost, why));
                }
            }
            DeviceEvent::Condition(condition) => self.set_condition(&mut facts, condition),
            DeviceEvent::Member {
                place,
                name,
                change,
            } => {
                let (kind, what) = match change {
                    MemberChange::Failed => (Kind::MemberFailed, "failed"),
                    MemberChange::Back => (Kind::MemberBack, "is there again"),
                    MemberChange::RebuildStarted => (Kind::RebuildStarted, "is being rebuilt"),
                    MemberChange::RebuildFinished => (Kind::RebuildFinished, "is rebuilt"),
                    MemberChange::RebuildStopped => (Kind::RebuildStopped, "can't be rebuilt"),
                };
                let of = match name.is_empty() {
                    true => String::new(),
                    false => format!(", {name},"),
                };
                let text = format!("its member at place {place}{of} {what}");
                let event = Event::new(kind, text).with("place", place);
                self.put(match name.is_empty() {
                    true => event,
                    false => event.with("member", &*name),
                });
            }
        }
    }

    fn set_condition(&self, facts: &mut Facts, condition: Condition) {
        if std::mem::replace(&mut facts.condition, condition) != condition {
            self.put_condition(facts);
        }
    }

    fn put_condition(&self, facts: &Facts) {
        let (kind, text) = match facts.condition {
            Condition::Whole => (Kind::ArrayWhole, "the array has all its members again"),
            Condition::Degraded { .. } => (
                Kind::ArrayDegraded,
                "the array has no redundancy; give it another member (pvblk raid add)",
            ),
            Condition::Failed => (
                Kind::ArrayFailed,
                "the array has lost two members, and its requests fail",
            ),
        };
        let event = Event::new(kind, text);
        let event = match facts.condition {
            Condition::Degraded { place } => event.with("place", place),
            _ => event,
        };
        self.put_with_state(facts, event);
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health")
            .field("disk", &self.disk)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
