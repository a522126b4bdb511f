//! [`Control`]: the parts of an array that orders and questions need; and [`Snapshot`]: an array at a moment.

use super::manage::Orders;
use super::returns::{Away, Missed};
use super::shared::Shared;
use super::{ArrayOptions, MemberNames, Origin, SpecParts, limits_of, name_of};
use crate::core::State;
use crate::{Assembly, Geometry, Member, Superblock};
use parking_lot::Mutex;
use pvblk_block::stacked::WaitEntry;
use pvblk_block::{Error, EventHub, Limits};
use std::sync::Arc;
use std::time::Duration;

/// See the module's documentation.
pub struct Control {
    pub(super) name: String,
    pub(super) geometry: Geometry,
    pub(super) limits: Limits,
    pub(super) names: Arc<dyn MemberNames>,
    /// Devices without a place.
    pub(super) spares: Mutex<Vec<Member>>,
    /// The name of the spare that becomes a member just now: it can't be taken away any more. Changed while `spares` is locked.
    pub(super) arriving: Mutex<Option<String>>,
    /// Held while a device is added: two at a time would take the same number.
    pub(super) adding: Mutex<()>,
    /// The time that a member has for an I/O; `None`: it is waited for.
    pub(super) limit: Option<Duration>,
    pub(super) re_add: bool,
    /// Devices that were members, and may have I/O left or come back.
    pub(super) away: Mutex<Vec<Away>>,
    /// The device that comes back next, by the bitmap.
    pub(super) returning: Mutex<Option<Member>>,
    /// The last whole member that was left out. Without a bitmap, it missed the chunks that are marked in memory.
    pub(super) missed: Mutex<Option<Missed>>,
    pub(super) origin: Mutex<Origin>,
    pub(super) orders: Orders,
    /// Of the background thread.
    pub(super) wait: Arc<WaitEntry>,
    pub(super) events: EventHub,
}

impl Control {
    /// That of an array that is assembled; its spares are taken out.
    pub(super) fn new(assembly: &mut Assembly, options: &ArrayOptions) -> Result<Control, Error> {
        let incoming = assembly.incoming.iter().map(|i| &i.member);
        let all: Vec<&Member> = assembly.present().chain(incoming).collect();
        let limits: Vec<Limits> = all.iter().map(|m| m.device.limits()).collect();
        let devices = all.iter().map(|m| m.name.clone()).collect();
        let wait = WaitEntry::new().map_err(|e| Error::os("raid5: starting", e))?;
        Ok(Control {
            name: name_of(assembly),
            geometry: assembly.geometry,
            limits: limits_of(&limits, &assembly.geometry),
            names: Arc::clone(&options.names),
            spares: Mutex::new(std::mem::take(&mut assembly.spares)),
            arriving: Mutex::default(),
            adding: Mutex::default(),
            limit: options.member_timeout,
            re_add: options.re_add,
            away: Mutex::default(),
            returning: Mutex::default(),
            missed: Mutex::default(),
            origin: Mutex::new(Origin {
                devices,
                ..Origin::default()
            }),
            orders: Orders::default(),
            wait: Arc::new(wait),
            events: EventHub::default(),
        })
    }

    /// True if a spare can become a member.
    pub(super) fn has_spare(&self) -> bool {
        self.spares.lock().iter().any(Member::is_spare)
    }
}

/// A spare, for users.
pub struct SpareNow {
    pub(super) name: String,
    /// Its number in the superblocks.
    pub(super) number: u32,
}

/// An array at a moment. A spare that becomes a member is in one of the lists, or in both.
pub struct Snapshot {
    pub(super) state: State,
    /// The superblock of the array, as it was last written.
    pub(super) superblock: Superblock,
    /// Users' names of the devices, by slot.
    pub(super) names: Vec<Option<String>>,
    pub(super) spares: Vec<SpareNow>,
    /// Superblocks on disk may still call a device a member that isn't one any more.
    pub(super) lag: bool,
}

impl Snapshot {
    pub(super) fn name(&self, slot: usize) -> Option<String> {
        self.names.get(slot).cloned().flatten()
    }
}

/// Spares, as users see them.
pub(super) fn spares_now(spares: &[Member]) -> Vec<SpareNow> {
    let spare = |s: &Member| SpareNow {
        name: s.name.clone(),
        number: s.superblock.dev_number,
    };
    spares.iter().map(spare).collect()
}

impl Shared {
    /// Forgets names of devices that were members, once superblocks on disk (`lag`: not yet) don't name them any more. `changed`: the members
    /// aren't those of before.
    pub(super) fn forget_old_names(&self, changed: bool, lag: bool) {
        let mut origin = self.control.origin.lock();
        origin.stale |= changed;
        let due = origin.stale && !lag;
        drop(origin);
        if due {
            self.spec_parts();
        }
    }

    /// Parts of the specification of the array in its present state.
    pub(super) fn spec_parts(&self) -> SpecParts {
        let control = &self.control;
        // Locked before the snapshot, so that names of an older one don't replace those of a newer one.
        let mut origin = control.origin.lock();
        let now = self.snapshot();
        let members = places_of(&now, &control.geometry);
        let incoming = now.state.members.iter();
        let incoming = incoming.filter(|m| m.rebuilt_sectors.is_some());
        let mut spares: Vec<String> = incoming.filter_map(|m| now.name(m.slot)).collect();
        let mut all: Vec<String> = now.names.iter().flatten().cloned().collect();
        let here = now.state.members.iter();
        let here: Vec<String> = here.filter_map(|m| now.name(m.slot)).collect();
        let are_spare = now.spares.iter().map(|spare| &spare.name);
        spares.extend(are_spare.filter(|name| !here.contains(name)).cloned());
        for spare in &spares {
            if !all.contains(spare) {
                all.push(spare.clone());
            }
        }
        if now.lag {
            for old in origin.devices.drain(..) {
                if !all.contains(&old) {
                    all.push(old);
                }
            }
        }
        origin.devices.clone_from(&all);
        origin.stale = now.lag;
        SpecParts {
            set_uuid: now.superblock.set_uuid,
            missing: now.lag && now.state.failed.is_some(),
            members,
            spares,
            devices: all,
            patterns: origin.patterns.clone(),
            stripes: now.state.stripes,
            write_path: now.state.path,
            member_timeout: control.limit,
            re_add: control.re_add,
        }
    }

    /// The specification that starts the array in its present state.
    pub(super) fn spec(&self) -> String {
        self.control.names.spec(&self.spec_parts())
    }
}

/// The user's name of the member at each place; `None`: there is none, or it isn't recovered.
pub(super) fn places_of(now: &Snapshot, geometry: &Geometry) -> Vec<Option<String>> {
    let mut places = vec![None; geometry.members()];
    let members = now.state.members.iter();
    for member in members.filter(|m| m.rebuilt_sectors.is_none()) {
        places[member.place] = now.name(member.slot);
    }
    places
}
