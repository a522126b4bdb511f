//! Which devices are an array: chosen by their superblocks, changed by nobody.
//!
//! The rules are md's, and one more. The newest superblock counts. A member may be one event behind it, since superblocks are
//! written one after another and a crash can come in between; nothing is written to the array before all are. And the newest must
//! still call it a member: one that was thrown out in that very event is one behind too, and must not come back.

use super::blocking::{Blocking, Idle};
use super::geometry::Geometry;
use super::superblock::{Feature, NO_OFFSET, Policy, Role, SUPER_BYTES, SUPER_SECTOR, Superblock};
use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;

/// A device and what its superblock says.
pub struct Member {
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// What the user calls it.
    pub name: String,
    /// As on disk.
    pub superblock: Superblock,
}

/// Members that belong together.
pub struct Assembly {
    /// Shape of the array.
    pub geometry: Geometry,
    /// By place; `None`: missing, failed or stale.
    pub members: Vec<Option<Member>>,
    /// Devices of the array that have no place. They are never written to.
    pub spares: Vec<Member>,
    /// Parity may be wrong, wherever the consistency policy says.
    pub dirty: bool,
    /// For the user, a line each, such as `b.img is stale (events 7, newest 12)`.
    pub notes: Vec<String>,
}

/// What the user insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssembleOptions {
    /// Take stale members when there are too few others, and start an array that is dirty and has no member to spare.
    pub force: bool,
}

impl Assembly {
    /// The place without a member, if there is one; there is at most one.
    pub fn failed(&self) -> Option<usize> {
        self.members.iter().position(Option::is_none)
    }

    /// Members that are there.
    pub fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().flatten()
    }

    /// The superblock to believe: the first of the newest.
    pub fn newest(&self) -> &Superblock {
        let newest = self.present().map(|m| &m.superblock);
        // An assembly has all members but one, so at least two.
        newest
            .reduce(|a, b| if b.events > a.events { b } else { a })
            .expect("members")
    }

    /// How parity is made right after a crash.
    pub fn policy(&self) -> Policy {
        self.newest().policy()
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
        let newest = self.present().filter(|m| m.superblock.events == newest);
        let offsets = newest.map(|m| m.superblock.resync_offset_sectors);
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
    Superblock::parse(&bytes).map_err(|e| Error::config(format!("{name}: {e}")))
}

/// Finds the array that the devices are, whatever their order. Refuses, with one line that says what to do, devices of several arrays, and
/// too few of one. Nothing is written.
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

    let mut choice = Choice {
        members: std::iter::repeat_with(|| None)
            .take(geometry.members())
            .collect(),
        spares: Vec::new(),
        stale: Vec::new(),
        notes: Vec::new(),
    };
    for member in found {
        choice.add(member, &newest)?;
    }
    if options.force {
        choice.take_stale(newest.events)?;
    }
    let Choice {
        members,
        spares,
        mut notes,
        ..
    } = choice;
    let count = members.iter().flatten().count();
    if count + 1 < members.len() {
        let missing = places(&members);
        let why = notes.iter().map(|n| format!("; {n}")).collect::<String>();
        return Err(Error::config(format!(
            "array {} of {} members: {count} of them are usable, and {} are needed; missing at {missing}{why}; name the others",
            quoted(&newest),
            members.len(),
            members.len() - 1,
        )));
    }
    for member in members.iter().flatten() {
        if check(member)? != geometry || !same_policy(&member.superblock, &newest) {
            return Err(Error::config(format!(
                "{} and {newest_name} disagree about the array's shape; if mdadm changes it, let that finish",
                member.name
            )));
        }
        check_bad_blocks(member, idle)?;
    }
    if count < members.len() {
        notes.push(format!(
            "the array is degraded: no member at place {}",
            places(&members)
        ));
    }
    // A resync that was interrupted leaves an offset; either way parity isn't right everywhere.
    let dirty = members
        .iter()
        .flatten()
        .any(|m| m.superblock.events == newest.events && !m.superblock.is_clean());
    Ok(Assembly {
        geometry,
        members,
        spares,
        dirty,
        notes,
    })
}

/// Devices on their way to places.
struct Choice {
    members: Vec<Option<Member>>,
    spares: Vec<Member>,
    stale: Vec<(usize, Member)>,
    notes: Vec<String>,
}

impl Choice {
    fn add(&mut self, member: Member, newest: &Superblock) -> Result<(), Error> {
        let (name, sb) = (&member.name, &member.superblock);
        let place = match sb.role() {
            Role::Active(place) if usize::from(place) < self.members.len() => usize::from(place),
            Role::Spare => {
                self.notes.push(format!("{name} is a spare; left alone"));
                self.spares.push(member);
                return Ok(());
            }
            role => {
                self.notes
                    .push(format!("{name} has no place in the array ({role:?})"));
                self.spares.push(member);
                return Ok(());
            }
        };
        let events = format!("events {}, newest {}", sb.events, newest.events);
        // What the newest says of this device, by its number.
        let number = usize::try_from(sb.dev_number).ok();
        let role = number.and_then(|n| newest.roles.get(n)).copied();
        if role != Some(sb.role()) {
            self.notes.push(format!(
                "{name} is stale ({events}): it was thrown out of the array; mdadm --add rebuilds it"
            ));
            self.stale.push((place, member));
        } else if sb.events.saturating_add(1) < newest.events {
            self.notes.push(format!(
                "{name} is stale ({events}); mdadm --add rebuilds it"
            ));
            self.stale.push((place, member));
        } else if sb.recovered_sectors() < sb.size_sectors {
            self.notes.push(format!(
                "{name} is being rebuilt, {} of {} sectors are; left out",
                sb.recovered_sectors(),
                sb.size_sectors
            ));
            self.spares.push(member);
        } else if let Some(other) = &self.members[place] {
            return Err(Error::config(format!(
                "{} and {name} are both at place {place} of the array: leave out the one that is a copy",
                other.name
            )));
        } else {
            self.members[place] = Some(member);
        }
        Ok(())
    }

    /// Fills places with stale members, the newest first, until one place at most is empty.
    fn take_stale(&mut self, newest: u64) -> Result<(), Error> {
        self.stale.sort_by_key(|(_, m)| m.superblock.events);
        let empty = |members: &[Option<Member>]| members.iter().filter(|m| m.is_none()).count();
        while empty(&self.members) > 1 {
            let Some((place, member)) = self.stale.pop() else {
                break;
            };
            if self.members[place].is_some() {
                continue;
            }
            self.notes.push(format!(
                "{} is taken by force (events {}, newest {newest}): what it missed is lost",
                member.name, member.superblock.events
            ));
            self.members[place] = Some(member);
        }
        Ok(())
    }
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

/// The newest of those that say that they are members.
fn newest(found: &[Member]) -> Option<&Member> {
    let members = found
        .iter()
        .filter(|m| matches!(m.superblock.role(), Role::Active(_)));
    members.reduce(|a, b| {
        if b.superblock.events > a.superblock.events {
            b
        } else {
            a
        }
    })
}

fn check(member: &Member) -> Result<Geometry, Error> {
    let sb = &member.superblock;
    sb.check(member.device.capacity_sectors())
        .map_err(|e| Error::config(format!("{}: {e}", member.name)))
}

fn same_policy(a: &Superblock, b: &Superblock) -> bool {
    std::mem::discriminant(&a.policy()) == std::mem::discriminant(&b.policy())
}

fn check_bad_blocks(member: &Member, idle: &mut Idle<'_>) -> Result<(), Error> {
    let sb = &member.superblock;
    let Some(log) = sb.bad_block_log().filter(|_| sb.has(Feature::BAD_BLOCKS)) else {
        return Ok(());
    };
    let mut bytes = vec![0; log.sectors as usize * 512];
    Blocking::open(&member.device)?.read(log.sector, &mut bytes, idle)?;
    sb.check_bad_blocks(&bytes)
        .map_err(|e| Error::config(format!("{}: {e}", member.name)))
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

/// As mdadm prints ids: four groups of eight digits.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let (groups, _) = uuid.as_chunks::<4>();
    let groups: Vec<String> = groups
        .iter()
        .map(|g| format!("{:08x}", u32::from_be_bytes(*g)))
        .collect();
    groups.join(":")
}

/// Says that all of its parity is right, or that none is known to be.
pub(super) fn resync_offset(clean: bool) -> u64 {
    if clean { NO_OFFSET } else { 0 }
}

#[cfg(test)]
#[path = "assemble_tests.rs"]
mod tests;
