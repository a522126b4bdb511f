//! Finds the devices of an array by their superblocks, and writes nothing.
//!
//! The rules are md's, and one more. The newest superblock counts. A member may be one event behind it, since
//! superblocks are written one after another and a crash can come in between; data is written to the array
//! only when all superblocks are. The additional rule: the newest superblock must still list the device as a
//! member. A member that failed in that very event is one behind too, and must not come back.
//!
//! One device at a time can become a member: one that is recovered for a place without a member, or one that
//! replaces the member there.

mod choice;
mod select;

pub use select::{Absent, Candidate, Selection, select};

use super::bitmap::WriteIntent;
use super::blocking::{Blocking, Idle};
use super::geometry::Geometry;
use super::identity::uuid_text;
use super::repair::At;
use super::superblock::{Feature, Kept, Policy, Role, SUPER_BYTES, SUPER_SECTOR, Superblock};
use choice::Choice;
use pvblk_block::{BlockDevice, Error, ErrorKind};
use std::ops::Range;
use std::sync::Arc;

/// A device with its superblock.
pub struct Member {
    pub device: Arc<dyn BlockDevice>,
    /// The user's name of the device.
    pub name: String,
    /// As on disk.
    pub superblock: Superblock,
}

impl Member {
    /// True if the device has no place, now or before, and can be given one.
    pub fn is_spare(&self) -> bool {
        self.superblock.role() == Role::Spare
    }
}

/// A device that is being recovered: it gets the data of a place without a member, or of the member that it
/// replaces.
pub struct Incoming {
    /// The place in the array that it is to have.
    pub place: usize,
    /// The device. Its superblock has [`Feature::RECOVERY_OFFSET`], and [`Feature::REPLACEMENT`] while the place has a member too.
    pub member: Member,
    /// Sectors of its data from the start that are recovered, in whole stripes.
    pub recovered_sectors: u64,
}

/// Members that belong together.
pub struct Assembly {
    /// Shape of the array.
    pub geometry: Geometry,
    /// By place; `None`: missing, failed, stale or not whole.
    pub members: Vec<Option<Member>>,
    /// The one that is being rebuilt.
    pub incoming: Option<Incoming>,
    /// Devices of the array that have no place. They are never written to. Those that can be rebuilt onto are spares by
    /// [`Member::is_spare`].
    pub spares: Vec<Member>,
    /// Parity may be wrong, wherever the consistency policy says.
    pub dirty: bool,
    /// Sectors of the members whose parity isn't known to be right, in whole stripes, ascending and apart; from [`super::prepare`].
    pub unsynced: Vec<Range<u64>>,
    /// Sectors of the members whose blocks' sums aren't known, in an array that has them, since it wasn't stopped in order; from [`super::prepare`].
    pub unsummed: Vec<Range<u64>>,
    /// The write-intent bitmap as all members have it, or the private map of an array that has no bitmap and keeps one; from [`super::prepare`].
    pub bitmap: Option<WriteIntent>,
    /// Data of the array may be wrong, because it is started by force.
    pub guessed: bool,
    /// Events that superblocks have to reach: those on a device that they leave out have to be two behind.
    pub(super) owed_events: u64,
    /// Devices that couldn't be written to, and aren't part of it any more.
    pub(super) thrown_out: Vec<(At, Member)>,
    /// For the user, a line each, such as `b.img is stale (events 7, newest 12)`.
    pub notes: Vec<String>,
}

/// Options that the user gives for a start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssembleOptions {
    /// Take stale members when there are too few others, and start an array that is dirty and has no member to spare.
    pub force: bool,
    /// Leaves the resync to [`Assembly::unsynced`], except for the first stripe, instead of doing it before
    /// the array serves.
    pub resync_later: bool,
}

impl Assembly {
    /// These members, by place, and nothing else. `dirty`: their superblocks say that parity may be wrong.
    pub fn new(geometry: Geometry, members: Vec<Option<Member>>, dirty: bool) -> Assembly {
        Assembly {
            geometry,
            members,
            incoming: None,
            spares: Vec::new(),
            dirty,
            unsynced: Vec::new(),
            unsummed: Vec::new(),
            bitmap: None,
            guessed: false,
            owed_events: 0,
            thrown_out: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The place without a member that is whole, if there is one; there is at most one.
    pub fn failed(&self) -> Option<usize> {
        self.members.iter().position(Option::is_none)
    }

    /// The slot of the device that is being rebuilt, while an array serves: its place's, if no member has that, else the one behind all places.
    pub(crate) fn incoming_slot(&self) -> Option<usize> {
        let place = self.incoming.as_ref()?.place;
        Some(match self.members[place] {
            None => place,
            Some(_) => self.members.len(),
        })
    }

    /// Members and the device that is being rebuilt, by slot.
    pub(crate) fn by_slot(&mut self) -> Vec<Option<&mut Member>> {
        let slot = self.incoming_slot();
        let mut all: Vec<_> = self.members.iter_mut().map(Option::as_mut).collect();
        if let (Some(slot), Some(incoming)) = (slot, &mut self.incoming) {
            all.resize_with(all.len().max(slot + 1), || None);
            all[slot] = Some(&mut incoming.member);
        }
        all
    }

    /// Members that are there and whole.
    pub fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().flatten()
    }

    /// Superblocks of the members, and of the one that is being rebuilt.
    pub(super) fn superblocks(&self) -> impl Iterator<Item = &Superblock> {
        let incoming = self.incoming.iter().map(|i| &i.member);
        self.present().chain(incoming).map(|m| &m.superblock)
    }

    /// The superblock to believe: the first of the newest.
    pub fn newest(&self) -> &Superblock {
        // An assembly has all members but one, so at least two.
        self.superblocks()
            .reduce(|a, b| if b.events > a.events { b } else { a })
            .expect("members")
    }

    /// The means by which parity is made right after a crash.
    pub fn policy(&self) -> Policy {
        self.newest().policy()
    }

    /// The private map and sums that superblocks go with.
    pub(super) fn kept(&self) -> Kept {
        let bitmap = self.bitmap.as_ref();
        bitmap.map_or(Kept::Nothing, |bitmap| bitmap.header().kept())
    }

    /// The private map of an array that has sums.
    pub(super) fn map_with_sums(&self) -> Option<&WriteIntent> {
        let bitmap = self.bitmap.as_ref();
        bitmap.filter(|bitmap| bitmap.header().has_sums())
    }

    /// The newest event counter.
    pub fn events(&self) -> u64 {
        self.newest().events
    }

    /// Sectors of the members, from the start, whose parity was right when the superblocks were written; all of them if the array is clean.
    pub fn in_sync_sectors(&self) -> u64 {
        if !self.dirty {
            return self.geometry.member_sectors();
        }
        let newest = self.newest().events;
        let newest = self.superblocks().filter(|s| s.events == newest);
        let offsets = newest.map(|s| s.resync_offset_sectors);
        let least = offsets.min().unwrap_or(0);
        least.min(self.geometry.member_sectors())
    }
}

/// Reads the superblock of a device; the error names the device.
pub fn read_superblock(
    name: &str,
    device: &Arc<dyn BlockDevice>,
    idle: &mut Idle<'_>,
) -> Result<Superblock, Error> {
    let sectors = device.capacity_sectors();
    if sectors < SUPER_SECTOR + SUPER_BYTES as u64 / 512 {
        return Err(Error::config(format!(
            "{name}: {sectors} sectors are too few for a member of an array"
        )));
    }
    let mut bytes = [0; SUPER_BYTES];
    Blocking::open(device)?.read(SUPER_SECTOR, &mut bytes, idle)?;
    Superblock::parse(&bytes).map_err(|e| Error::caused(ErrorKind::Config, name, e))
}

/// Finds the array of these devices, whatever their order. Refuses, with one line that says what to do,
/// devices of several arrays, and too few of one. Writes nothing.
pub fn assemble(
    devices: Vec<(String, Arc<dyn BlockDevice>)>,
    options: &AssembleOptions,
    idle: &mut Idle<'_>,
) -> Result<Assembly, Error> {
    let mut found = Vec::new();
    for (name, device) in devices {
        let superblock = read_superblock(&name, &device, idle)?;
        found.push(Member {
            device,
            name,
            superblock,
        });
    }
    one_array(&found)?;
    let Some(newest) = newest(&found) else {
        return Err(Error::config(format!(
            "{}: no member of an array, only spares; name the members too",
            names(&found)
        )));
    };
    let geometry = check(newest)?;
    let (newest, newest_name) = (newest.superblock.clone(), newest.name.clone());

    let mut choice = Choice::new(geometry, &newest);
    for member in found {
        choice.add(member)?;
    }
    choice.take_replacements();
    if options.force {
        choice.take_stale();
    }
    choice.take_incoming(idle)?;
    let (count, of) = (choice.members.iter().flatten().count(), geometry.members());
    if count + 1 < of {
        let missing = places(&choice.members);
        let notes = choice.notes.iter();
        let why = notes.map(|n| format!("; {n}")).collect::<String>();
        return Err(Error::config(format!(
            "array {} of {of} members: {count} of them are usable, and {} are needed; missing at {missing}{why}; name the others",
            quoted(&newest),
            of - 1,
        )));
    }
    choice.check_members(&newest_name, idle)?;
    choice.check_spares(idle)?;
    let mut assembly = Assembly {
        incoming: choice.incoming,
        spares: choice.spares,
        guessed: choice.guessed,
        notes: choice.notes,
        ..Assembly::new(geometry, choice.members, false)
    };
    // A resync that was interrupted leaves an offset; either way parity isn't right everywhere.
    let dirty = |s: &Superblock| s.events == newest.events && !s.is_clean();
    let dirty = assembly.superblocks().any(dirty);
    assembly.dirty = dirty;
    Ok(assembly)
}

/// All of one array, and each of them once.
fn one_array(found: &[Member]) -> Result<(), Error> {
    let Some((first, others)) = found.split_first() else {
        return Err(Error::config("an array without members: name them"));
    };
    for other in others {
        if other.superblock.set_uuid != first.superblock.set_uuid {
            return Err(Error::config(format!(
                "{} is of array {} and {} of {}: name the members of one",
                first.name,
                array_id(&first.superblock),
                other.name,
                array_id(&other.superblock),
            )));
        }
    }
    for (n, member) in found.iter().enumerate() {
        let uuid = &member.superblock.device_uuid;
        let twin = found[..n]
            .iter()
            .find(|m| m.superblock.device_uuid == *uuid);
        if let Some(twin) = twin {
            return Err(Error::config(format!(
                "{} and {} are the same member, or one is a copy: leave that out",
                twin.name, member.name
            )));
        }
    }
    Ok(())
}

/// The newest of those that say that they are members; of several, one that is whole.
fn newest(found: &[Member]) -> Option<&Member> {
    let members = found.iter().filter(|m| is_member(&m.superblock));
    members.reduce(|a, b| match rank(&b.superblock) > rank(&a.superblock) {
        true => b,
        false => a,
    })
}

fn is_member(sb: &Superblock) -> bool {
    matches!(sb.role(), Role::Active(_))
}

/// The superblock with the greatest is believed.
fn rank(sb: &Superblock) -> (u64, bool) {
    let partly = sb.has(Feature::RECOVERY_OFFSET) || sb.has(Feature::REPLACEMENT);
    (sb.events, !partly)
}

fn check(member: &Member) -> Result<Geometry, Error> {
    let sb = &member.superblock;
    sb.check(member.device.capacity_sectors())
        .map_err(|e| Error::caused(ErrorKind::Config, &member.name, e))
}

/// `a.img, b.img`
fn names(members: &[Member]) -> String {
    let names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
    names.join(", ")
}

/// Places without a member: `1, 3`.
fn places(members: &[Option<Member>]) -> String {
    let empty = (0..members.len()).filter(|&n| members[n].is_none());
    let empty: Vec<String> = empty.map(|n| n.to_string()).collect();
    empty.join(", ")
}

fn quoted(sb: &Superblock) -> String {
    match sb.name() {
        name if name.is_empty() => uuid_text(&sb.set_uuid),
        name => format!("{name:?}"),
    }
}

fn array_id(sb: &Superblock) -> String {
    let uuid = uuid_text(&sb.set_uuid);
    match sb.name() {
        name if name.is_empty() => uuid,
        name => format!("{name:?} ({uuid})"),
    }
}

#[cfg(test)]
#[path = "assemble_tests.rs"]
mod tests;
