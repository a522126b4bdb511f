//! The state of an array that serves, and orders to it.

use super::background::{SPEED_MAX_KIB, SPEED_MIN_KIB};
use super::{ArrayShared, LEAST_STRIPES, MOST_STRIPES, Raid5};
use crate::core::{Action, WritePath};
use crate::spare::make_spare;
use crate::{Idle, Member, Policy, Superblock};
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
    /// Number of stripe heads.
    pub stripes: usize,
    /// Those that have something to do.
    pub active_stripes: usize,
    /// Path by which writes go to stripe heads.
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

    /// Nothing begins by itself.
    pub fn is_frozen(&self) -> bool {
        self.0.lock().frozen
    }

    /// A replacement could not be begun yet.
    pub fn again(&self, place: usize) {
        self.0.lock().replace.get_or_insert(place);
    }
}

impl ArrayShared {
    /// See [`Raid5::state`].
    fn state(&self, orders: &Orders) -> ArrayState {
        let core = self.core.lock();
        let state = core.state();
        let superblocks = core.superblocks().0;
        let newest = superblocks.iter().flatten().max_by_key(|s| s.events);
        let superblock = newest.cloned().expect("an array has members");
        let devices = self.devices.lock();
        let name = |slot: usize| {
            let device = devices.get(slot).and_then(Option::as_ref);
            device.map_or_else(String::new, |d| d.name.clone())
        };
        let mut members: Vec<ArrayMember> = state
            .members
            .iter()
            .map(|m| ArrayMember {
                name: name(m.slot),
                number: m.number,
                place: Some(m.place),
                state: m
                    .rebuilt_sectors
                    .map_or(MemberState::InSync, MemberState::Rebuilding),
                corrected_reads: m.corrected_reads,
            })
            .collect();
        members.sort_by_key(|m| (m.place, m.state != MemberState::InSync));
        let spares = self.spares.lock();
        members.extend(spares.iter().map(|s| ArrayMember {
            name: s.name.clone(),
            number: s.superblock.dev_number,
            place: None,
            state: MemberState::Spare,
            corrected_reads: 0,
        }));
        // Until here, so that a spare that becomes a member is in one of these lists.
        drop((core, devices, spares));
        let orders = orders.0.lock().clone();
        ArrayState {
            members,
            failed: state.failed,
            broken: state.broken,
            dirty: state.dirty,
            superblock,
            sync: state.sync.map(|s| ArraySync {
                action: s.action,
                done_sectors: s.done_sectors,
                of_sectors: s.of_sectors,
                mismatch_sectors: s.mismatch_sectors,
                by_bitmap: s.by_bitmap,
            }),
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
            member_timeout: self.limit,
            stripes: state.stripes,
            active_stripes: state.active_stripes,
            write_path: state.path,
            frozen: orders.frozen,
            speed_min_kib: orders.speed_min_kib,
            speed_max_kib: orders.speed_max_kib,
        }
    }

    /// As [`Raid5::add`], without waking the background thread.
    pub(super) fn add(
        &self,
        orders: &Orders,
        name: &str,
        device: &Arc<dyn BlockDevice>,
        force: bool,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        // Two at a time would take the same number.
        let _one = self.adding.lock();
        self.refuse_if_busy(name, device)?;
        let state = self.state(orders);
        if state.broken {
            return Err(Error::config("the array has failed: nothing can be added"));
        }
        if state.members.iter().any(|m| m.name == name) {
            return Err(Error::config(format!("{name} is in the array already")));
        }
        let unit = device.limits().logical_sector_bytes;
        if unit > self.limits.logical_sector_bytes {
            return Err(Error::config(format!(
                "{name}: its sectors of {unit} bytes are larger than the array's"
            )));
        }
        let taken: Vec<u32> = state.members.iter().map(|m| m.number).collect();
        let header = self.core.lock().bitmap().map(|b| b.header().clone());
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
        self.origin.lock().devices.push(name.to_owned());
        self.spares.lock().push(spare);
        Ok(())
    }
}

impl Raid5 {
    /// The current state.
    pub fn state(&self) -> ArrayState {
        self.shared.state(&self.orders)
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
        self.shared.add(&self.orders, name, device, force, idle)?;
        self.wake_keeper();
        Ok(())
    }

    /// Takes a spare away. Errors if no spare has this name.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let mut spares = self.shared.spares.lock();
        let Some(at) = spares.iter().position(|s| s.name == name) else {
            return Err(Error::config(format!(
                "{name} is no spare of the array; a member has to fail first, and is gone then"
            )));
        };
        spares.remove(at);
        Ok(())
    }

    /// Throws the member at a place out, as if it had failed. Errors if that would end the array.
    pub fn fail(&self, place: usize) -> Result<(), Error> {
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

    /// Makes a spare the member of a place, while the member that is there goes on until then.
    pub fn replace(&self, place: usize) -> Result<(), Error> {
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
        if !self.shared.spares.lock().iter().any(Member::is_spare) {
            return Err(Error::config("there is no spare; add one first"));
        }
        self.order(|orders| orders.replace = Some(place));
        Ok(())
    }

    /// Begins a check or repair; `None` ends the action under way.
    pub fn sync(&self, action: Option<SyncAction>) -> Result<(), Error> {
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

    /// Sets whether recoveries and resyncs begin by themselves.
    pub fn freeze(&self, frozen: bool) {
        self.order(|orders| {
            orders.frozen = frozen;
            orders.stop |= frozen;
        });
    }

    /// KiB a second of each member that rebuilds, resyncs and checks take: while others use the array, and at most.
    pub fn set_speed(&self, min_kib: u64, max_kib: u64) -> Result<(), Error> {
        if min_kib == 0 || max_kib < min_kib {
            return Err(Error::config(format!(
                "speeds of {min_kib} to {max_kib} KiB a second: the least is at least 1, and the most not below it"
            )));
        }
        self.order(|orders| (orders.speed_min_kib, orders.speed_max_kib) = (min_kib, max_kib));
        Ok(())
    }

    /// Sets the number of stripe heads, 8 to 32768. Heads in use are freed when they are not in use any more.
    pub fn set_stripes(&self, stripes: usize) -> Result<(), Error> {
        if !(LEAST_STRIPES..=MOST_STRIPES).contains(&stripes) {
            return Err(Error::config(format!(
                "{stripes} stripes: it takes {LEAST_STRIPES} to {MOST_STRIPES}"
            )));
        }
        self.shared.core.lock().set_stripes(stripes)
    }

    fn check_place(&self, place: usize) -> Result<(), Error> {
        let members = self.shared.geometry.members();
        match place < members {
            true => Ok(()),
            false => Err(Error::config(format!(
                "place {place}: the array has places 0 to {}",
                members - 1
            ))),
        }
    }

    fn order(&self, change: impl FnOnce(&mut PendingOrders)) {
        change(&mut self.orders.0.lock());
        self.wake_keeper();
    }
}
