//! Questions in JSON to an array while it serves: `pvblk raid` asks them over a control socket.
//!
//! Every answer is a [`Detail`]: the state of the array after the order was carried out. An order to the
//! background thread is waited for, so that a later question finds it done.

use super::{ArrayMember, ArrayState, MemberState, Raid5, SyncAction};
use crate::{Assembly, Geometry, Policy, Superblock, sleepy, uuid_text};
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
    /// Sets the number of stripe heads: see [`Raid5::set_stripes`].
    Stripes {
        /// The new number.
        stripes: usize,
    },
    /// Sets the path by which writes go to stripes: see [`Raid5::set_write_path`].
    WritePath {
        /// `direct` or `stripe-queue`.
        path: String,
    },
}

/// An array, with the words of `mdadm --detail`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Detail {
    /// Name of the array.
    pub name: String,
    /// Its id, as mdadm prints it.
    pub uuid: String,
    /// Seconds since 1970.
    pub created_secs: u64,
    /// The same, of its newest superblock.
    pub updated_secs: u64,
    /// Counter of the newest superblock.
    pub events: u64,
    /// The RAID level, always 5.
    pub level: u32,
    /// Number of places.
    pub raid_devices: usize,
    /// Such as `left-symmetric`.
    pub layout: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Bytes that users have.
    pub array_bytes: u64,
    /// Bytes of each member that are used for data and parity.
    pub member_bytes: u64,
    /// `ppl`, `bitmap` or `resync`.
    pub consistency_policy: String,
    /// It was stopped in order, or nothing was written since its start.
    pub clean: bool,
    /// A place has no member that is whole.
    pub degraded: bool,
    /// Bytes of each member, from the start, whose parity is right.
    pub in_sync_bytes: u64,
    /// The place without a member that is whole.
    pub missing: Option<usize>,
    /// Places and devices.
    pub members: Vec<DetailMember>,
    /// Findings of the look at the members, a line each.
    pub notes: Vec<String>,
    /// The specification that starts the array in its present state.
    #[serde(default)]
    pub spec: String,
    /// State that only an array that serves has.
    pub serving: Option<Serving>,
}

/// The answer to [`Question::Spec`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecAnswer {
    /// The specification that starts the array now, and if its members are files also after a rebuild that is under way.
    pub spec: String,
    /// Its members by place and its spares, as a specification.
    pub list: String,
}

/// A place, or a device without one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetailMember {
    /// The device's number in the superblocks.
    pub number: Option<u32>,
    /// Number of its place; `None` for a spare.
    pub place: Option<usize>,
    pub state: DeviceState,
    /// The user's name of the device.
    pub name: Option<String>,
    /// Bytes that are rebuilt, while it is being rebuilt.
    pub rebuilt_bytes: Option<u64>,
    /// Blocks that it could not read, and that were calculated and written again, ever.
    pub corrected_reads: u32,
}

/// State of a device, in mdadm's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    #[serde(rename = "active sync")]
    Active,
    /// It becomes one.
    #[serde(rename = "spare rebuilding")]
    Rebuilding,
    /// It can become one.
    #[serde(rename = "spare")]
    Spare,
    /// It was one, and was thrown out.
    #[serde(rename = "faulty")]
    Faulty,
    /// No device is at this place.
    #[serde(rename = "removed")]
    Removed,
}

impl DeviceState {
    /// The state in mdadm's words.
    pub fn text(self) -> &'static str {
        match self {
            DeviceState::Active => "active sync",
            DeviceState::Rebuilding => "spare rebuilding",
            DeviceState::Spare => "spare",
            DeviceState::Faulty => "faulty",
            DeviceState::Removed => "removed",
        }
    }
}

/// State that only an array that serves has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Serving {
    /// Two members failed: nothing works any more.
    pub failed: bool,
    /// The recovery, resync or check under way.
    pub sync: Option<SyncProgress>,
    /// Sectors of members whose parity was wrong in the last check or repair: md's `mismatch_cnt`.
    pub mismatch_sectors: u64,
    /// Why the last rebuild didn't end.
    pub trouble: Option<String>,
    /// The last rebuild that ended.
    #[serde(default)]
    pub rebuilt: Option<Rebuilt>,
    /// Devices that were thrown out because they didn't answer, and come back by themselves.
    #[serde(default)]
    pub away: Vec<AwayMember>,
    /// Milliseconds after which a member that doesn't answer is thrown out.
    #[serde(default)]
    pub member_timeout_ms: Option<u64>,
    /// Stripe heads: md's `stripe_cache_size`.
    pub stripes: usize,
    /// Those at work: md's `stripe_cache_active`.
    pub active_stripes: usize,
    /// The write path: `direct` or `stripe-queue`.
    pub write_path: String,
    /// Nothing begins by itself.
    pub frozen: bool,
    /// KiB a second of each member, while others use the array: md's `sync_speed_min`.
    pub speed_min_kib: u64,
    /// The same, at most: md's `sync_speed_max`.
    pub speed_max_kib: u64,
}

/// A rebuild that came to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilt {
    pub place: usize,
    /// Sectors of the member that were written.
    pub sectors: u64,
    /// Only those that the write-intent bitmap marked.
    pub by_bitmap: bool,
}

/// A device that was a member, and comes back when it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwayMember {
    /// The place that it had.
    pub place: usize,
    /// The user's name of the device.
    pub name: String,
}

/// Progress of a recovery, resync or check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncProgress {
    /// `resync`, `recover`, `check` or `repair`.
    pub action: String,
    /// Bytes of each member that are done.
    pub done_bytes: u64,
    /// Bytes in all.
    pub of_bytes: u64,
    /// Sectors of members whose parity was wrong, so far.
    pub mismatch_sectors: u64,
    /// Only what the write-intent bitmap marks is rebuilt.
    #[serde(default)]
    pub by_bitmap: bool,
    /// KiB a second of each member; known to clients that ask more than once.
    #[serde(default)]
    pub speed_kib: Option<u64>,
    /// Until its end, at this speed.
    #[serde(default)]
    pub seconds_left: Option<u64>,
}

impl Detail {
    /// An array that isn't served.
    pub fn of_assembly(assembly: &Assembly) -> Detail {
        let mut members = Vec::new();
        let incoming = assembly.incoming.as_ref();
        for (place, member) in assembly.members.iter().enumerate() {
            if let Some(m) = member {
                members.push(row(
                    &m.superblock,
                    &m.name,
                    Some(place),
                    DeviceState::Active,
                ));
            }
            if let Some(i) = incoming.filter(|i| i.place == place) {
                members.push(DetailMember {
                    rebuilt_bytes: Some(i.recovered_sectors * 512),
                    ..row(
                        &i.member.superblock,
                        &i.member.name,
                        Some(place),
                        DeviceState::Rebuilding,
                    )
                });
            } else if member.is_none() {
                members.push(removed(place));
            }
        }
        for spare in &assembly.spares {
            let state = match spare.is_spare() {
                true => DeviceState::Spare,
                false => DeviceState::Faulty,
            };
            members.push(row(&spare.superblock, &spare.name, None, state));
        }
        Detail {
            clean: !assembly.dirty,
            degraded: assembly.failed().is_some(),
            in_sync_bytes: assembly.in_sync_sectors() * 512,
            missing: assembly.failed(),
            members,
            notes: assembly.notes.clone(),
            ..Detail::of_superblock(assembly.newest(), &assembly.geometry)
        }
    }

    /// An array that serves.
    fn of_state(state: &ArrayState, geometry: &Geometry) -> Detail {
        let mut members: Vec<DetailMember> = state.members.iter().map(member).collect();
        if let Some(place) = state.failed
            && !members.iter().any(|m| m.place == Some(place))
        {
            let before = |m: &&DetailMember| m.place.is_some_and(|p| p < place);
            let at = members.iter().take_while(before).count();
            members.insert(at, removed(place));
        }
        let whole = geometry.member_sectors();
        Detail {
            clean: !state.dirty,
            degraded: state.failed.is_some(),
            in_sync_bytes: state.in_sync_sectors.unwrap_or(whole) * 512,
            missing: state.failed,
            members,
            serving: Some(Serving {
                failed: state.broken,
                sync: state.sync.as_ref().map(|s| SyncProgress {
                    action: s.action.to_string(),
                    done_bytes: s.done_sectors * 512,
                    of_bytes: s.of_sectors * 512,
                    mismatch_sectors: s.mismatch_sectors,
                    by_bitmap: s.by_bitmap,
                    speed_kib: None,
                    seconds_left: None,
                }),
                mismatch_sectors: state.mismatch_sectors,
                trouble: state.trouble.clone(),
                rebuilt: state.recovered.map(|r| Rebuilt {
                    place: r.place,
                    sectors: r.sectors,
                    by_bitmap: r.by_bitmap,
                }),
                away: state
                    .away
                    .iter()
                    .map(|(place, name)| AwayMember {
                        place: *place,
                        name: name.clone(),
                    })
                    .collect(),
                member_timeout_ms: state
                    .member_timeout
                    .map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
                stripes: state.stripes,
                active_stripes: state.active_stripes,
                write_path: state.write_path.to_string(),
                frozen: state.frozen,
                speed_min_kib: state.speed_min_kib,
                speed_max_kib: state.speed_max_kib,
            }),
            ..Detail::of_superblock(&state.superblock, geometry)
        }
    }

    fn of_superblock(sb: &Superblock, geometry: &Geometry) -> Detail {
        let seconds = |stamp: u64| stamp & ((1 << 40) - 1);
        let policy = match sb.policy() {
            Policy::Resync => "resync",
            Policy::Bitmap { .. } => "bitmap",
            Policy::Ppl(_) => "ppl",
        };
        Detail {
            name: sb.name(),
            uuid: uuid_text(&sb.set_uuid),
            created_secs: seconds(sb.ctime),
            updated_secs: seconds(sb.utime),
            events: sb.events,
            level: 5,
            raid_devices: geometry.members(),
            layout: geometry.layout().to_string(),
            chunk_bytes: geometry.chunk_sectors() * 512,
            array_bytes: geometry.capacity_sectors() * 512,
            member_bytes: geometry.member_sectors() * 512,
            consistency_policy: policy.into(),
            clean: true,
            degraded: false,
            in_sync_bytes: 0,
            missing: None,
            members: Vec::new(),
            notes: Vec::new(),
            spec: String::new(),
            serving: None,
        }
    }
}

fn row(sb: &Superblock, name: &str, place: Option<usize>, state: DeviceState) -> DetailMember {
    DetailMember {
        number: Some(sb.dev_number),
        place,
        state,
        name: Some(name.to_owned()),
        rebuilt_bytes: None,
        corrected_reads: sb.corrected_reads,
    }
}

fn removed(place: usize) -> DetailMember {
    DetailMember {
        number: None,
        place: Some(place),
        state: DeviceState::Removed,
        name: None,
        rebuilt_bytes: None,
        corrected_reads: 0,
    }
}

fn member(m: &ArrayMember) -> DetailMember {
    let (state, rebuilt) = match m.state {
        MemberState::InSync => (DeviceState::Active, None),
        MemberState::Rebuilding(sectors) => (DeviceState::Rebuilding, Some(sectors * 512)),
        MemberState::Spare => (DeviceState::Spare, None),
    };
    DetailMember {
        number: Some(m.number),
        place: m.place,
        state,
        name: Some(m.name.clone()),
        rebuilt_bytes: rebuilt,
        corrected_reads: m.corrected_reads,
    }
}

/// The device that is being rebuilt.
fn rebuilding(state: &ArrayState) -> Option<&ArrayMember> {
    let rebuilds = |m: &&ArrayMember| matches!(m.state, MemberState::Rebuilding(_));
    state.members.iter().find(rebuilds)
}

impl Raid5 {
    /// Answers a question. Errors say in one line why an order can't be carried out, or what to do
    /// first.
    ///
    /// One question is answered at a time: the state that it found must hold until its order is
    /// carried out.
    pub fn answer(&self, question: &Question) -> Result<Detail, Error> {
        match question {
            Question::Detail {} | Question::Spec {} => {}
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
            Question::Stripes { stripes } => self.set_stripes(*stripes)?,
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
            ..Detail::of_state(&self.state(), &self.shared.geometry)
        }
    }

    fn spec_answer(&self) -> SpecAnswer {
        let parts = self.shared.spec_parts();
        SpecAnswer {
            spec: self.shared.names.spec(&parts),
            list: parts.list(),
        }
    }

    fn answer_add(&self, text: &str, force: bool) -> Result<(), Error> {
        let state = self.state();
        if let Some(twin) = state
            .members
            .iter()
            .find(|m| self.shared.names.same_device(&m.name, text))
        {
            return Err(Error::config(format!(
                "{text}: it is in the array already, as {}",
                twin.name
            )));
        }
        let device = self.shared.names.open(text)?;
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
        let (name, device) = match self.shared.held_device(text) {
            Some(held) => held,
            None => (text.to_owned(), self.shared.names.open(text)?),
        };
        self.re_add(&name, &device, &mut sleepy())?;
        self.until(|s| s.failed.is_none() || rebuilding(s).is_some())
    }

    fn answer_fail(&self, text: &str) -> Result<(), Error> {
        let before = self.state();
        let place = self.place(&before, text)?;
        let name = |s: &ArrayState| rebuilding(s).map(|m| m.name.clone());
        let was_rebuilding = name(&before);
        let devices: Vec<_> = self.members().iter().map(Arc::downgrade).collect();
        self.fail(place)?;
        self.until(|s| {
            let other = before.failed.is_none() || name(s) != was_rebuilding;
            s.broken || (s.failed == Some(place) && other)
        })?;
        // The device may be added again at once, so it should be closed; no request waits for that.
        let begin = Instant::now();
        let kept: Vec<_> = self.members().iter().map(Arc::downgrade).collect();
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
            .find(|m| self.shared.names.same_device(&m.name, text));
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
        self.sync(Some(action))?;
        self.until(|s| s.sync.is_some())
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
        let places = self.shared.geometry.members();
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
            .find(|m| self.shared.names.same_device(&m.name, text));
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
