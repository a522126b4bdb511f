//! Devices to rebuild onto: a spare has the array's metadata, and no place.

use super::assemble::{Assembly, Member, read_superblock};
use super::bitmap::{BitmapHeader, WriteIntent};
use super::blocking::Idle;
use super::geometry::STRIPE_BYTES;
use super::identity::uuid_text;
use super::new_array::{ask_first, write_member};
use super::repair::{Disks, any_bitmap_header};
use super::superblock::{Feature, Policy, Role, Superblock, SuperblockError};
use pvblk_block::{BlockDevice, Error, ErrorKind};
use std::sync::Arc;

/// Makes a device a spare of the array whose newest superblock is `like`: writes log or bitmap and then its
/// superblock, and flushes. Its contents are lost. The array's other devices need no change.
///
/// `taken`: numbers of the array's devices that are at hand. `bitmap`: the header of the array's bitmap, or of
/// its private map, if it has one.
///
/// Fails with one line, and has written nothing then unless writing failed, if the device is read-only or too
/// small, its logical sectors don't fit, it has contents, or it is in use: as a member of this array, or by
/// its superblock in another. `force` overrides all of these except a member that is at hand. A former member
/// and a spare of this array need no `force`.
pub fn make_spare(
    name: &str,
    device: &Arc<dyn BlockDevice>,
    like: &Superblock,
    taken: &[u32],
    bitmap: Option<&BitmapHeader>,
    force: bool,
    idle: &mut Idle<'_>,
) -> Result<Member, Error> {
    check_device(name, device, like)?;
    // A device without a superblock is free. A device that can't be read can't be written either,
    // and that error is returned.
    match read_superblock(name, device, idle) {
        Ok(old) => check_use(name, &old, like, taken, force)?,
        Err(_) if force => {}
        Err(_) => ask_first(name, device, idle)?,
    }
    let mut superblock = like.clone();
    let no_more = [
        Feature::RECOVERY_OFFSET,
        Feature::RECOVERY_BITMAP,
        Feature::REPLACEMENT,
        Feature::BAD_BLOCKS,
    ];
    for feature in no_more {
        superblock.feature_map &= !feature.0;
    }
    let named = |e: SuperblockError| Error::caused(ErrorKind::Config, name, e);
    superblock.dev_number = free_number(like, taken);
    superblock
        .set_role(superblock.dev_number, Role::Spare)
        .map_err(named)?;
    fastrand::fill(&mut superblock.device_uuid);
    superblock.data_size_sectors = device.capacity_sectors() - like.data_offset_sectors;
    superblock.recovery_offset_sectors = 0;
    superblock.corrected_reads = 0;
    superblock.devflags = 0;
    superblock.check(device.capacity_sectors()).map_err(named)?;
    let bits = bitmap.map(|header| {
        let header = BitmapHeader {
            events: like.events,
            ..header.clone()
        };
        // The spare has none of the array's data.
        let mut bits = WriteIntent::new(header, true);
        bits.set_guided(None);
        bits
    });
    write_member(device, &superblock, bits.as_ref(), idle)?;
    Ok(Member {
        device: Arc::clone(device),
        name: name.to_owned(),
        superblock,
    })
}

/// Gives an array that isn't served another spare: see [`make_spare`].
pub fn add_spare(
    assembly: &mut Assembly,
    name: &str,
    device: &Arc<dyn BlockDevice>,
    force: bool,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let incoming = assembly.incoming.iter().map(|i| &i.member);
    let all = assembly.present().chain(incoming).chain(&assembly.spares);
    let all: Vec<&Member> = all.collect();
    let taken: Vec<u32> = all.iter().map(|m| m.superblock.dev_number).collect();
    if let Ok(old) = read_superblock(name, device, idle) {
        let same = |m: &&&Member| m.superblock.device_uuid == old.device_uuid;
        if let Some(twin) = all.iter().find(same) {
            return Err(Error::config(format!(
                "{name} is {} already, or a copy of it: name another device",
                twin.name
            )));
        }
    }
    let bitmap = match &assembly.bitmap {
        Some(bitmap) => Some(bitmap.header().clone()),
        None => {
            let mut disks = Disks::open(assembly)?;
            any_bitmap_header(assembly, &mut disks, idle).map_err(|(_, e)| e)?
        }
    };
    let like = assembly.newest().clone();
    let spare = make_spare(name, device, &like, &taken, bitmap.as_ref(), force, idle)?;
    assembly.spares.push(spare);
    Ok(())
}

fn check_device(name: &str, device: &Arc<dyn BlockDevice>, like: &Superblock) -> Result<(), Error> {
    let limits = device.limits();
    if limits.read_only {
        return Err(Error::config(format!("{name} is read-only")));
    }
    let needed = like.data_offset_sectors + like.size_sectors;
    let found = device.capacity_sectors();
    if found < needed {
        return Err(Error::config(format!(
            "{name} has {found} sectors, and a member of this array needs {needed}: take a larger one"
        )));
    }
    // Blocks are read and written whole, and so is the metadata before the data.
    let unit = u64::from(limits.logical_sector_bytes);
    let mut places = vec![like.data_offset_sectors];
    match like.policy() {
        Policy::Resync | Policy::Bitmap { .. } => {}
        Policy::Ppl(log) => places.extend([log.sector, log.sectors]),
    }
    places.extend(like.bitmap_sector());
    let fits = |&sector: &u64| (sector * 512).is_multiple_of(unit);
    if unit > STRIPE_BYTES as u64 || !places.iter().all(fits) {
        return Err(Error::config(format!(
            "{name} has logical sectors of {unit} bytes, and this array is laid out for smaller ones: take another device"
        )));
    }
    Ok(())
}

/// Refuses a device that may be in use.
fn check_use(
    name: &str,
    old: &Superblock,
    like: &Superblock,
    taken: &[u32],
    force: bool,
) -> Result<(), Error> {
    if old.set_uuid != like.set_uuid {
        return match force {
            true => Ok(()),
            false => Err(Error::config(format!(
                "{name} is a member of array {:?} ({}); to lose that, use --force",
                old.name(),
                uuid_text(&old.set_uuid)
            ))),
        };
    }
    let entry = usize::try_from(old.dev_number).ok();
    let entry = entry.and_then(|n| like.roles.get(n)).copied();
    let fresh = old.events.saturating_add(1) >= like.events;
    match old.role() {
        role @ Role::Active(place) if fresh && entry == Some(role) => {
            let at_hand = taken.contains(&old.dev_number);
            match force && !at_hand {
                true => Ok(()),
                false => Err(Error::config(format!(
                    "{name} is a member of this array, at place {place}: name another device{}",
                    if at_hand { "" } else { ", or use --force" }
                ))),
            }
        }
        _ => Ok(()),
    }
}

/// The first free number, counted from the last place on, as in mdadm. Numbers of devices that were removed
/// are used again only when there is no other below [`NUMBERS`]: their superblocks are hundreds of events
/// behind by then, and so known to be stale.
fn free_number(like: &Superblock, taken: &[u32]) -> u32 {
    let entry = |n: &u32| like.roles.get(*n as usize);
    let is_new = |n: &u32| matches!(entry(n), None | Some(Role::Spare)) && !taken.contains(n);
    let was_thrown_out = |n: &u32| matches!(entry(n), Some(Role::Faulty)) && !taken.contains(n);
    let first = like.raid_disks..NUMBERS.min(like.most_roles());
    first
        .clone()
        .find(is_new)
        .or_else(|| { first }.find(was_thrown_out))
        .or_else(|| (NUMBERS..u32::MAX).find(is_new))
        .unwrap_or(u32::MAX)
}

/// Numbers of devices that are given out before any is given out again.
const NUMBERS: u32 = 256;

#[cfg(test)]
#[path = "spare_tests.rs"]
mod tests;
