//! The state of an array that serves, and orders to it.

use super::ask::{Detail, Question};
use super::device::Raid5;
use super::devices::SLOTS;
use super::pace::{SPEED_MAX_KIB, SPEED_MIN_KIB};
use super::shared::Shared;
use super::{ReAdded, check_stripes};
use crate::core::{Action, MemberNow, WritePath};
use crate::spare::make_spare;
use crate::{Idle, Member, Policy, Role, Superblock, read_superblock};
use parking_lot::Mutex;
use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;
use std::time::Duration;

/// An action on all stripes, in md's words.
pub use crate::core::Action as SyncAction;

/// Role of a device in an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// A member, whose data is up to date.
    InSync,
    /// It is being rebuilt; so many of its sectors are.
    Rebuilding(u64),
    /// It has no place.
    Spare,
}

/// A device of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayMember {
    /// The user's name of the device.
    pub name: String,
    /// Its number in the superblocks.
    pub number: u32,
    /// Its place, if it has one.
    pub place: Option<usize>,
    pub state: MemberState,
    /// Blocks that it could not read, and that were calculated and written again, ever.
    pub corrected_reads: u32,
    /// Blocks of it that were other than was written, or whose checksums on it were, and that were made right, since the start.
    pub checksum_errors: u32,
}

/// Progress of a recovery, resync or check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArraySync {
    pub action: SyncAction,
    /// Sectors of each member that are done.
    pub done_sectors: u64,
    /// Sectors in all.
    pub of_sectors: u64,
    /// Sectors of members whose parity was wrong, so far.
    pub mismatch_sectors: u64,
    /// Only what the write-intent bitmap marks is recovered.
    pub by_bitmap: bool,
}

/// A recovery that came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// The place whose member was recovered.
    pub place: usize,
    /// Sectors of it that were written.
    pub sectors: u64,
    /// Only those that the write-intent bitmap marked.
    pub by_bitmap: bool,
}

/// An array at a moment.
#[derive(Clone, Debug)]
pub struct ArrayState {
    /// Devices, spares last.
    pub members: Vec<ArrayMember>,
    /// The place without a member in sync.
    pub failed: Option<usize>,
    /// Two members failed: nothing works any more.
    pub broken: bool,
    /// The superblocks don't say clean.
    pub dirty: bool,
    /// The superblock of the array, as it was last written.
    pub superblock: Superblock,
    /// The recovery, resync or check under way.
    pub sync: Option<ArraySync>,
    /// Recoveries, resyncs and checks that have begun.
    pub syncs: u64,
    /// Sectors of each member, from the start, whose parity is right; `None`: all.
    pub in_sync_sectors: Option<u64>,
    /// Sectors of members whose parity was wrong, in the last check or repair: md's `mismatch_cnt`.
    pub mismatch_sectors: u64,
    /// Why the last rebuild or check didn't come to its end.
    pub trouble: Option<String>,
    /// The last recovery that did.
    pub recovered: Option<Recovered>,
    /// Devices that were kicked and are to come back by themselves, with their places.
    pub away: Vec<(usize, String)>,
    /// The time after which a member that doesn't answer is kicked.
    pub member_timeout: Option<Duration>,
    /// Stripes that may have pages.
    pub stripes: usize,
    /// Those that have something to do.
    pub active_stripes: usize,
    /// Path by which writes go to stripes.
    pub write_path: WritePath,
    /// Nothing is begun by itself.
    pub frozen: bool,
    /// Speeds in KiB a second of each member: while others use the array, and at most.
    pub speed_min_kib: u64,
    /// See `speed_min_kib`.
    pub speed_max_kib: u64,
}

/// Orders to the background thread that it hasn't taken yet, and settings.
#[derive(Clone, Debug)]
pub(super) struct PendingOrders {
    pub fail: Vec<usize>,
    pub replace: Option<usize>,
    pub action: Option<Action>,
    pub stop: bool,
    pub frozen: bool,
    pub speed_min_kib: u64,
    pub speed_max_kib: u64,
}

impl PendingOrders {
    /// True if there are orders, besides the settings.
    pub fn has_any(&self) -> bool {
        !self.fail.is_empty() || self.replace.is_some() || self.action.is_some() || self.stop
    }
}

pub(super) struct Orders(Mutex<PendingOrders>);

impl Default for Orders {
    fn default() -> Orders {
        Orders(Mutex::new(PendingOrders {
            fail: Vec::new(),
            replace: None,
            action: None,
            stop: false,
            frozen: false,
            speed_min_kib: SPEED_MIN_KIB,
            speed_max_kib: SPEED_MAX_KIB,
        }))
    }
}

impl Orders {
    fn change(&self, change: impl FnOnce(&mut PendingOrders)) {
        change(&mut self.0.lock());
    }

    /// The settings, and orders that weren't taken yet.
    pub fn pending(&self) -> PendingOrders {
        self.0.lock().clone()
    }

    /// Takes the orders; settings stay.
    pub fn take(&self) -> PendingOrders {
        let mut orders = self.0.lock();
        let taken = orders.clone();
        orders.fail.clear();
        orders.replace = None;
        orders.action = None;
        orders.stop = false;
        taken
    }

    /// These members could not be thrown out yet.
    pub fn fail_again(&self, places: &[usize]) {
        self.0.lock().fail.extend(places);
    }
}

impl Shared {
    /// See [`Raid5::state`].
    pub(super) fn state(&self) -> ArrayState {
        let now = self.snapshot();
        let control = &self.control;
        let member = |m: &MemberNow| ArrayMember {
            name: now.name(m.slot).unwrap_or_default(),
            number: m.number,
            place: Some(m.place),
            state: m
                .rebuilt_sectors
                .map_or(MemberState::InSync, MemberState::Rebuilding),
            corrected_reads: m.corrected_reads,
            checksum_errors: m.misfits,
        };
        let mut members: Vec<ArrayMember> = now.state.members.iter().map(member).collect();
        members.sort_by_key(|m| (m.place, m.state != MemberState::InSync));
        for spare in &now.spares {
            // One that has just become a member may be in both lists.
            if members.iter().any(|m| m.name == spare.name) {
                continue;
            }
            members.push(ArrayMember {
                name: spare.name.clone(),
                number: spare.number,
                place: None,
                state: MemberState::Spare,
                corrected_reads: 0,
                checksum_errors: 0,
            });
        }
        let orders = control.orders.pending();
        let state = now.state;
        ArrayState {
            members,
            failed: state.failed,
            broken: state.broken,
            dirty: state.dirty,
            superblock: now.superblock,
            sync: state.sync.map(|s| ArraySync {
                action: s.action,
                done_sectors: s.done_sectors,
                of_sectors: s.of_sectors,
                mismatch_sectors: s.mismatch_sectors,
                by_bitmap: s.by_bitmap,
            }),
            syncs: state.syncs,
            in_sync_sectors: state.in_sync_sectors,
            mismatch_sectors: state.mismatch_sectors,
            trouble: state.trouble,
            recovered: state
                .recovered
                .map(|(place, sectors, by_bitmap)| Recovered {
                    place,
                    sectors,
                    by_bitmap,
                }),
            away: self.held(),
            member_timeout: control.limit,
            stripes: state.stripes,
            active_stripes: state.active_stripes,
            write_path: state.path,
            frozen: orders.frozen,
            speed_min_kib: orders.speed_min_kib,
            speed_max_kib: orders.speed_max_kib,
        }
    }

    /// As [`Raid5::add`].
    pub(super) fn add(
        &self,
        name: &str,
        device: &Arc<dyn BlockDevice>,
        force: bool,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let control = &self.control;
        let _one = control.adding.lock();
        self.refuse_if_busy(name, device)?;
        let state = self.state();
        if state.broken {
            return Err(Error::config("the array has failed: nothing can be added"));
        }
        if state.members.iter().any(|m| m.name == name) {
            return Err(Error::config(format!("{name} is in the array already")));
        }
        let unit = device.limits().logical_sector_bytes;
        if unit > control.limits.logical_sector_bytes {
            return Err(Error::config(format!(
                "{name}: its sectors of {unit} bytes are larger than the array's"
            )));
        }
        let taken: Vec<u32> = state.members.iter().map(|m| m.number).collect();
        let header = self.bitmap_header();
        debug_assert!(
            header.is_some() || !matches!(state.superblock.policy(), Policy::Bitmap { .. })
        );
        let spare = make_spare(
            name,
            device,
            &state.superblock,
            &taken,
            header.as_ref(),
            force,
            idle,
        )?;
        control.origin.lock().devices.push(name.to_owned());
        control.spares.lock().push(spare);
        control.wait.wake();
        Ok(())
    }

    /// As [`Raid5::remove`].
    pub(super) fn remove(&self, name: &str) -> Result<(), Error> {
        let mut spares = self.control.spares.lock();
        let Some(at) = spares.iter().position(|s| s.name == name) else {
            return Err(Error::config(format!(
                "{name} is no spare of the array; a member has to fail first, and is gone then"
            )));
        };
        if self.control.arriving.lock().as_deref() == Some(name) {
            return Err(Error::config(format!(
                "{name} becomes a member just now: wait for that, and let it fail"
            )));
        }
        spares.remove(at);
        Ok(())
    }

    /// As [`Raid5::fail`].
    pub(super) fn fail(&self, place: usize) -> Result<(), Error> {
        let state = self.state();
        self.check_place(place)?;
        let rebuilds = |m: &ArrayMember| matches!(m.state, MemberState::Rebuilding(_));
        let incoming = state.members.iter().find(|m| rebuilds(m));
        match state.failed {
            Some(failed) if failed == place && incoming.is_some() => {}
            Some(failed) if failed == place => {
                return Err(Error::config(format!("no member is at place {place}")));
            }
            Some(failed) => {
                return Err(Error::config(format!(
                    "the member at place {failed} is missing: without place {place} the array would be lost"
                )));
            }
            None => {}
        }
        self.order(|orders| orders.fail.push(place));
        Ok(())
    }

    /// As [`Raid5::replace`].
    pub(super) fn replace(&self, place: usize) -> Result<(), Error> {
        self.check_place(place)?;
        let state = self.state();
        if state.sync.is_some_and(|s| s.action == Action::Recover) {
            return Err(Error::config(
                "a member is being rebuilt already; wait for its end",
            ));
        }
        if state.failed.is_some() {
            return Err(Error::config(
                "a member is missing, which comes first: a spare takes its place",
            ));
        }
        if !self.control.has_spare() {
            return Err(Error::config("there is no spare; add one first"));
        }
        if self.control.geometry.members() == SLOTS {
            return Err(Error::config(format!(
                "an array of {SLOTS} members has no room for one device more: fail the member, and a spare takes its place"
            )));
        }
        self.order(|orders| orders.replace = Some(place));
        Ok(())
    }

    /// As [`Raid5::sync`].
    pub(super) fn sync(&self, action: Option<SyncAction>) -> Result<(), Error> {
        let state = self.state();
        match action {
            None => self.order(|orders| orders.stop = true),
            Some(action @ (Action::Check | Action::Repair)) => {
                if let Some(sync) = state.sync {
                    return Err(Error::config(format!(
                        "{action}: {} is under way; wait for its end, or stop it",
                        sync.action
                    )));
                }
                if state.failed.is_some() {
                    return Err(Error::config(format!(
                        "{action}: a member is missing, so there is no parity to compare"
                    )));
                }
                self.order(|orders| orders.action = Some(action));
            }
            Some(action) => {
                return Err(Error::config(format!(
                    "{action} begins by itself; ask for check or repair"
                )));
            }
        }
        Ok(())
    }

    /// As [`Raid5::freeze`].
    pub(super) fn freeze(&self, frozen: bool) {
        self.order(|orders| {
            orders.frozen = frozen;
            orders.stop |= frozen;
        });
    }

    /// As [`Raid5::set_speed`].
    pub(super) fn set_speed(&self, min_kib: u64, max_kib: u64) -> Result<(), Error> {
        if min_kib == 0 || max_kib < min_kib {
            return Err(Error::config(format!(
                "speeds of {min_kib} to {max_kib} KiB a second: the least is at least 1, and the most not below it"
            )));
        }
        self.order(|orders| (orders.speed_min_kib, orders.speed_max_kib) = (min_kib, max_kib));
        Ok(())
    }

    fn check_place(&self, place: usize) -> Result<(), Error> {
        let members = self.control.geometry.members();
        match place < members {
            true => Ok(()),
            false => Err(Error::config(format!(
                "place {place}: the array has places 0 to {}",
                members - 1
            ))),
        }
    }

    fn order(&self, change: impl FnOnce(&mut PendingOrders)) {
        let control = &self.control;
        control.orders.change(change);
        control.wait.wake();
    }

    /// As [`Raid5::re_add`].
    pub(super) fn re_add(
        &self,
        name: &str,
        device: &Arc<dyn BlockDevice>,
        idle: &mut Idle<'_>,
    ) -> Result<ReAdded, Error> {
        let state = self.state();
        if state.broken {
            return Err(Error::config("the array has failed: nothing can be added"));
        }
        if state.members.iter().any(|m| m.name == name) {
            return Err(Error::config(format!("{name} is in the array already")));
        }
        self.refuse_if_busy(name, device)?;
        let found = read_superblock(name, device, idle)?;
        let newest = &state.superblock;
        if found.set_uuid != newest.set_uuid {
            return Err(Error::config(format!(
                "{name} is not of this array; to make it a spare, add it"
            )));
        }
        let Role::Active(place) = found.role() else {
            return Err(Error::config(format!(
                "{name} was not a member of this array; add it"
            )));
        };
        let place = usize::from(place);
        let rebuilds = |m: &ArrayMember| matches!(m.state, MemberState::Rebuilding(_));
        let incoming = state.members.iter().any(rebuilds);
        if state.failed != Some(place) || incoming {
            return Err(Error::config(format!(
                "{name} was the member at place {place}, which has another device; add it as a spare"
            )));
        }
        let entry = newest.roles.get(found.dev_number as usize);
        if matches!(entry, Some(Role::Active(_))) || found.events > newest.events {
            return Err(Error::config(format!(
                "{name}: its superblock (number {}, events {}) doesn't fit the array's (events {}): it was used elsewhere, or is a copy; add it, and it is rebuilt whole",
                found.dev_number, found.events, newest.events
            )));
        }
        let why = self.why_whole(place, &found);
        let fits = found.check(device.capacity_sectors());
        let why = match (why, fits) {
            (None, Ok(geometry)) if geometry == self.control.geometry => None,
            (None, Ok(_)) => Some("its superblock has another shape".into()),
            (None, Err(e)) => Some(e.to_string()),
            (why, _) => why,
        };
        if let Some(why) = why {
            tracing::warn!("raid5: {name} is rebuilt whole: {why}");
            self.add(name, device, false, idle)?;
            return Ok(ReAdded::Whole(why));
        }
        let control = &self.control;
        control.origin.lock().devices.push(name.to_owned());
        let member = Member {
            device: Arc::clone(device),
            name: name.to_owned(),
            superblock: found,
        };
        self.bring_back(place, member);
        control.wait.wake();
        Ok(ReAdded::ByBitmap)
    }
}

/// Orders and questions of users.
impl Raid5 {
    /// The current state.
    pub fn state(&self) -> ArrayState {
        self.shared.state()
    }

    /// The user's name of the member at each place; `None`: there is none, or it isn't recovered.
    pub fn places(&self) -> Vec<Option<String>> {
        self.shared.places()
    }

    /// The patterns by which the array was found, in the grammar of [`super::ArrayOptions::names`]; its specification keeps them.
    pub fn found_in(&self, patterns: Vec<String>) {
        self.shared.control.origin.lock().patterns = patterns;
    }

    /// The specification that starts the array in its present state.
    pub fn spec(&self) -> String {
        self.shared.spec()
    }

    /// Answers a question. Errors say in one line why an order can't be carried out, or what to do first.
    pub fn answer(&self, question: &Question) -> Result<Detail, Error> {
        self.shared.answer(question)
    }

    /// Adds a device as a spare, which becomes a member as soon as one is missing. Its contents are lost;
    /// `force`: also if it belongs to another array.
    pub fn add(
        &self,
        name: &str,
        device: &Arc<dyn BlockDevice>,
        force: bool,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        self.shared.add(name, device, force, idle)
    }

    /// Takes a device back that was a member: what it missed is written, if the write-intent bitmap or the memory of this server tells. Otherwise it
    /// becomes a spare, which is rebuilt whole. Errors if it wasn't a member of this array, or its place has another device.
    pub fn re_add(
        &self,
        name: &str,
        device: &Arc<dyn BlockDevice>,
        idle: &mut Idle<'_>,
    ) -> Result<ReAdded, Error> {
        self.shared.re_add(name, device, idle)
    }

    /// Takes a spare away. Errors if no spare has this name.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        self.shared.remove(name)
    }

    /// Throws the member at a place out, as if it had failed. Errors if that would end the array.
    pub fn fail(&self, place: usize) -> Result<(), Error> {
        self.shared.fail(place)
    }

    /// Makes a spare the member of a place, while the member that is there goes on until then.
    pub fn replace(&self, place: usize) -> Result<(), Error> {
        self.shared.replace(place)
    }

    /// Begins a check or repair; `None` ends the action under way.
    pub fn sync(&self, action: Option<SyncAction>) -> Result<(), Error> {
        self.shared.sync(action)
    }

    /// Sets whether recoveries and resyncs begin by themselves.
    pub fn freeze(&self, frozen: bool) {
        self.shared.freeze(frozen);
    }

    /// KiB a second of each member that rebuilds, resyncs and checks take: while others use the array, and at most.
    pub fn set_speed(&self, min_kib: u64, max_kib: u64) -> Result<(), Error> {
        self.shared.set_speed(min_kib, max_kib)
    }

    /// Sets the path of writes from now on; waiting writes go on from where they are.
    pub fn set_write_path(&self, path: WritePath) {
        self.shared.set_write_path(path);
    }

    /// Sets the number of stripes that may have pages, 8 to 32768. Sets of pages that are too many go as soon as no batch has them.
    pub fn set_stripes(&self, stripes: usize) -> Result<(), Error> {
        check_stripes(stripes)?;
        self.shared.set_stripes(stripes)
    }
}
