//! Questions in JSON to an array while it serves: `pvblk raid` asks them over a control socket.
//!
//! Every answer is a [`Detail`]: the state of the array after the order was carried out. An order to the
//! background thread is waited for, so that a later question finds it done.

pub use super::detail::{
    AwayMember, Detail, DetailMember, DeviceState, Rebuilt, Serving, SpecAnswer, SyncProgress,
};

use super::shared::Shared;
use super::{ArrayMember, ArrayState, MemberState, SyncAction, check_stripes};
use crate::sleepy;
use pvblk_block::{BlockDevice, Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Longest wait until idle queues have closed a member that failed.
const CLOSING: Duration = Duration::from_secs(2);

/// Longest wait for the background thread to follow an order.
const PATIENCE: Duration = Duration::from_secs(5);

/// A question or an order. In JSON it is an object whose `raid` is its name: `{"raid": "fail", "member":
/// "2"}`.
///
/// A `member` is a place, as a number, or the name of a device: as in the array's specification, or another
/// specification of the same file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "raid", rename_all = "lowercase", deny_unknown_fields)]
pub enum Question {
    /// Asks for the state of the array.
    Detail {},
    /// Asks for the specification that starts the array in its present state; the answer is a [`SpecAnswer`].
    Spec {},
    /// Takes one more device: see [`Raid5::add`].
    Add {
        /// Its volume spec.
        member: String,
        /// Also if it is of another array.
        #[serde(default)]
        force: bool,
    },
    /// Takes a device back that was a member: see [`Raid5::re_add`].
    #[serde(rename = "re-add")]
    ReAdd {
        /// Its volume spec, or the place of a member that is waited for.
        member: String,
    },
    /// Throws a member out: see [`Raid5::fail`].
    Fail {
        /// The member that fails.
        member: String,
    },
    /// Gives a spare back.
    Remove {
        /// The spare to remove.
        member: String,
    },
    /// Makes another device the member of a place: see [`Raid5::replace`].
    Replace {
        /// The member to replace.
        member: String,
        /// Volume spec of the one that comes; else a spare.
        #[serde(default)]
        with: Option<String>,
        /// Also if that is of another array.
        #[serde(default)]
        force: bool,
    },
    /// Begins to compare parity with data.
    Check {},
    /// Begins to make parity right.
    Repair {},
    /// Ends the check or repair under way. Recovery and resync begin again.
    Idle {},
    /// Sets whether recovery and resync begin by themselves; those under way end.
    Frozen {
        /// True: nothing does.
        on: bool,
    },
    /// Sets the KiB a second of each member that recovery, resync and checks take; a value that
    /// isn't given stays.
    Speed {
        /// While others use the array.
        #[serde(default)]
        min_kib: Option<u64>,
        /// The greatest speed.
        #[serde(default)]
        max_kib: Option<u64>,
    },
    /// Sets the number of stripes that may have pages: see [`Raid5::set_stripes`].
    Stripes {
        /// The new number.
        stripes: usize,
    },
    /// Sets the path by which writes go to stripes: see [`super::Raid5::set_write_path`].
    WritePath {
        /// `direct` or `stripe-queue`.
        path: String,
    },
    /// Hands a question on to the device of a member, such as a cache; the answer is that device's.
    Ask { member: String, question: Value },
}

/// The device that is being rebuilt.
fn rebuilding(state: &ArrayState) -> Option<&ArrayMember> {
    let rebuilds = |m: &&ArrayMember| matches!(m.state, MemberState::Rebuilding(_));
    state.members.iter().find(rebuilds)
}

impl Shared {
    /// Answers a question. Errors say in one line why an order can't be carried out, or what to do
    /// first.
    ///
    /// One question is answered at a time: the state that it found must hold until its order is
    /// carried out.
    pub(super) fn answer(&self, question: &Question) -> Result<Detail, Error> {
        match question {
            Question::Detail {} | Question::Spec {} => {}
            Question::Ask { .. } => {
                return Err(Error::config("its answer is the member's, and no detail"));
            }
            Question::Add { member, force } => self.answer_add(member, *force)?,
            Question::ReAdd { member } => self.answer_re_add(member)?,
            Question::Fail { member } => self.answer_fail(member)?,
            Question::Remove { member } => self.answer_remove(member)?,
            Question::Replace {
                member,
                with,
                force,
            } => self.answer_replace(member, with.as_deref(), *force)?,
            Question::Check {} => self.answer_sync(SyncAction::Check)?,
            Question::Repair {} => self.answer_sync(SyncAction::Repair)?,
            Question::Idle {} => self.answer_idle()?,
            Question::Frozen { on } => {
                self.freeze(*on);
                if *on {
                    self.until(|s| s.sync.is_none())?;
                }
            }
            Question::Speed { min_kib, max_kib } => {
                let state = self.state();
                self.set_speed(
                    min_kib.unwrap_or(state.speed_min_kib),
                    max_kib.unwrap_or(state.speed_max_kib),
                )?;
            }
            Question::Stripes { stripes } => {
                check_stripes(*stripes)?;
                self.set_stripes(*stripes)?;
            }
            Question::WritePath { path } => self.set_write_path(path.parse()?),
        }
        Ok(self.detail())
    }

    /// As text; `None` if the question isn't for an array.
    pub(super) fn answer_text(&self, question: &str) -> Option<Result<String, Error>> {
        let wrong =
            |e: serde_json::Error| Error::caused(ErrorKind::Config, "a question to an array", e);
        let value: Value = match serde_json::from_str(question) {
            Ok(value) => value,
            Err(e) => return Some(Err(wrong(e))),
        };
        value.get("raid")?;
        let answer = || {
            let question: Question = serde_json::from_value(value).map_err(wrong)?;
            match question {
                Question::Ask { member, question } => return self.ask_member(&member, &question),
                Question::Spec {} => serde_json::to_string(&self.spec_answer()),
                other => serde_json::to_string(&self.answer(&other)?),
            }
            .map_err(wrong)
        };
        Some(answer())
    }

    fn detail(&self) -> Detail {
        Detail {
            spec: self.spec(),
            ..Detail::of_state(&self.state(), &self.control.geometry)
        }
    }

    fn spec_answer(&self) -> SpecAnswer {
        let parts = self.spec_parts();
        SpecAnswer {
            spec: self.control.names.spec(&parts),
            list: parts.list(),
        }
    }

    fn ask_member(&self, member: &str, question: &Value) -> Result<String, Error> {
        let place = self.place(&self.state(), member)?;
        let answer = self
            .device_at(place)
            .and_then(|device| device.ask(&question.to_string()));
        answer.unwrap_or_else(|| {
            Err(Error::config(format!(
                "{member}: its device has no answer to {question}"
            )))
        })
    }

    fn answer_add(&self, text: &str, force: bool) -> Result<(), Error> {
        let state = self.state();
        if let Some(twin) = state
            .members
            .iter()
            .find(|m| self.control.names.same_device(&m.name, text))
        {
            return Err(Error::config(format!(
                "{text}: it is in the array already, as {}",
                twin.name
            )));
        }
        let device = self.control.names.open(text)?;
        self.add(text, &device, force, &mut sleepy())?;
        if state.failed.is_some() && rebuilding(&state).is_none() && !state.frozen {
            self.until(|s| s.failed.is_none() || rebuilding(s).is_some())?;
        }
        Ok(())
    }

    fn answer_re_add(&self, text: &str) -> Result<(), Error> {
        let state = self.state();
        if state.frozen {
            return Err(Error::config("the array is frozen: unfreeze it first"));
        }
        let (name, device) = match self.held_device(text) {
            Some(held) => held,
            None if text.parse::<usize>().is_ok() => {
                return Err(Error::config(format!(
                    "no member comes back to place {text} by itself: name the device that is to come back"
                )));
            }
            None => (text.to_owned(), self.control.names.open(text)?),
        };
        self.re_add(&name, &device, &mut sleepy())?;
        self.until(|s| s.failed.is_none() || rebuilding(s).is_some())
    }

    fn answer_fail(&self, text: &str) -> Result<(), Error> {
        let before = self.state();
        let place = self.place(&before, text)?;
        let name = |s: &ArrayState| rebuilding(s).map(|m| m.name.clone());
        let was_rebuilding = name(&before);
        let devices: Vec<_> = self.devices().iter().map(Arc::downgrade).collect();
        self.fail(place)?;
        self.until(|s| {
            let other = before.failed.is_none() || name(s) != was_rebuilding;
            s.broken || (s.failed == Some(place) && other)
        })?;
        // The device may be added again at once, so it should be closed; no request waits for that.
        let begin = Instant::now();
        let kept: Vec<_> = self.devices().iter().map(Arc::downgrade).collect();
        let is_gone = |d: &Weak<dyn BlockDevice>| !kept.iter().any(|k| k.ptr_eq(d));
        let is_open = |d: &&Weak<dyn BlockDevice>| is_gone(d) && d.strong_count() > 0;
        while devices.iter().any(|d| is_open(&d)) && begin.elapsed() < CLOSING {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn answer_remove(&self, text: &str) -> Result<(), Error> {
        let state = self.state();
        let known = state
            .members
            .iter()
            .find(|m| self.control.names.same_device(&m.name, text));
        self.remove(known.map_or(text, |m| &m.name))
    }

    fn answer_replace(&self, text: &str, with: Option<&str>, force: bool) -> Result<(), Error> {
        let state = self.state();
        let place = self.place(&state, text)?;
        // Before anything is added, and so written.
        if state.failed.is_some() {
            return Err(Error::config(
                "a member is missing, which comes first: add a device, and it takes its place",
            ));
        }
        if let Some(sync) = state.sync {
            return Err(Error::config(format!(
                "replace: {} is under way; wait for its end, or stop it",
                sync.action
            )));
        }
        if state.frozen {
            return Err(Error::config("the array is frozen: unfreeze it first"));
        }
        if let Some(with) = with {
            self.answer_add(with, force)?;
        }
        if let Err(e) = self.replace(place) {
            if let Some(with) = with {
                self.remove(with)?;
            }
            return Err(e);
        }
        self.until(|s| rebuilding(s).is_some())
    }

    fn answer_sync(&self, action: SyncAction) -> Result<(), Error> {
        let before = self.state().syncs;
        self.sync(Some(action))?;
        // A short one may be over already.
        self.until(|s| s.syncs > before)
    }

    fn answer_idle(&self) -> Result<(), Error> {
        let sync = self.state().sync;
        self.sync(None)?;
        // Others begin again at once.
        let ends = |a| matches!(a, SyncAction::Check | SyncAction::Repair);
        match sync.is_some_and(|s| ends(s.action)) {
            true => self.until(|s| !s.sync.is_some_and(|s| ends(s.action))),
            false => Ok(()),
        }
    }

    /// The place that a text means: a number, or the name of a device that has one for itself.
    fn place(&self, state: &ArrayState, text: &str) -> Result<usize, Error> {
        let places = self.control.geometry.members();
        let wrong = || {
            let names = state.members.iter().filter(|m| m.place.is_some());
            let names: Vec<&str> = names.map(|m| m.name.as_str()).collect();
            Error::config(format!(
                "{text}: no such member; there are places 0 to {}, which are {}",
                places - 1,
                names.join(", ")
            ))
        };
        if let Ok(place) = text.parse::<usize>() {
            return match place < places {
                true => Ok(place),
                false => Err(wrong()),
            };
        }
        let device = state
            .members
            .iter()
            .find(|m| self.control.names.same_device(&m.name, text));
        let device = device.ok_or_else(wrong)?;
        match (device.place, device.state) {
            (None, _) => Err(Error::config(format!(
                "{} is a spare: remove it instead",
                device.name
            ))),
            (Some(place), MemberState::Rebuilding(_)) if state.failed != Some(place) => {
                Err(Error::config(format!(
                    "{} isn't a member yet: it is to replace the one at place {place}",
                    device.name
                )))
            }
            (Some(place), _) => Ok(place),
        }
    }

    /// Waits until the background thread has reached a state.
    fn until(&self, done: impl Fn(&ArrayState) -> bool) -> Result<(), Error> {
        let begin = Instant::now();
        while !done(&self.state()) {
            if begin.elapsed() > PATIENCE {
                return Err(Error::config(format!(
                    "the array was told, but hasn't done it in {} s; look at its detail, and at the server's log",
                    PATIENCE.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "ask_tests.rs"]
mod tests;
