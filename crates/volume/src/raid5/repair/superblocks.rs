//! Superblocks of a whole array, and the bitmap that goes with them.

use super::super::assemble::{Assembly, Member, resync_offset};
use super::super::bitmap::{BitmapHeader, PAGE_BYTES, WriteIntent};
use super::super::blocking::{Blocking, Idle};
use super::super::superblock::{Policy, Role, SUPER_SECTOR};
use super::Disks;
use pvblk_block::Error;

/// Writes the superblocks of all members that are there: one event later, clean or dirty, of the time `now_secs` (since 1970). All of them
/// are on stable storage when this returns, and the bitmap, if there is one, was before.
///
/// Before it says clean, all that was written is flushed. A member that can't be written to is thrown out, as long as it is the only one that is missing:
/// then it is noted, and the others are written (again) to say so.
///
/// The superblocks call a member that isn't there faulty. When they begin to do so they end up two events ahead of it, since md takes
/// members that are one behind. They go there one event after the other, since a cut must leave no other member two behind.
///
/// The bitmap, so far, is all or nothing: all of its bits are set while the array is dirty, and taken away when it gets clean. While a member is
/// missing they stay, since nobody knows what it missed.
pub fn write_superblocks(
    assembly: &mut Assembly,
    clean: bool,
    now_secs: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let mut disks = Disks::open(assembly)?;
    let newest = assembly.events();
    // Those that lag behind come first.
    let differ = assembly.present().any(|m| m.superblock.events != newest);
    let mut events = newest + u64::from(!differ);
    let mut last = newest + 1 + u64::from(names_missing(assembly));
    while events <= last {
        match write_all(assembly, &mut disks, clean, events, now_secs, idle) {
            Ok(()) => events += 1,
            Err(Failure { place, error }) => {
                throw_out(assembly, &mut disks, place, error)?;
                // It may have these events, although it told an error.
                last = last.max(events + 2);
            }
        }
    }
    assembly.dirty = !clean;
    Ok(())
}

/// A member that could not be written, and why.
struct Failure {
    /// `None`: no member is to blame.
    place: Option<usize>,
    error: Error,
}

fn write_all(
    assembly: &mut Assembly,
    disks: &mut Disks,
    clean: bool,
    events: u64,
    now_secs: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Failure> {
    let places: Vec<usize> = (0..assembly.members.len())
        .filter(|&n| assembly.members[n].is_some())
        .collect();
    if clean {
        each(&places, disks, |_, disk| disk.flush(idle))?;
    }
    let (roles, _) = roles(assembly);
    if let Policy::Bitmap { .. } = assembly.policy() {
        write_bitmap(assembly, disks, &places, clean, events, idle)?;
    }
    for member in assembly.members.iter_mut().flatten() {
        let sb = &mut member.superblock;
        sb.events = events;
        sb.utime = now_secs;
        sb.resync_offset_sectors = resync_offset(clean);
        sb.roles.clone_from(&roles);
    }
    each(&places, disks, |place, disk| {
        let Some(member) = &assembly.members[place] else {
            return Ok(());
        };
        let sb = &member.superblock;
        let bytes = sb.written_bytes().next_multiple_of(disk.unit_bytes());
        disk.write(SUPER_SECTOR, &sb.encode()[..bytes], idle)
    })
}

fn each(
    places: &[usize],
    disks: &mut Disks,
    mut act: impl FnMut(usize, &mut Blocking) -> Result<(), Error>,
) -> Result<(), Failure> {
    for &place in places {
        let disk = disks
            .at(place)
            .map_err(|error| Failure { place: None, error })?;
        act(place, disk).map_err(|error| Failure {
            place: (!disk.is_ended()).then_some(place),
            error,
        })?;
    }
    Ok(())
}

fn throw_out(
    assembly: &mut Assembly,
    disks: &mut Disks,
    place: Option<usize>,
    error: Error,
) -> Result<(), Error> {
    let Some(place) = place.filter(|_| assembly.failed().is_none()) else {
        return Err(error);
    };
    if let Some(member) = assembly.members[place].take() {
        assembly
            .notes
            .push(format!("{} is thrown out: {error}", member.name));
    }
    disks.drop_at(place);
    Ok(())
}

/// The table of roles as it is to be, and whether it calls a member faulty that the one on disk didn't.
fn roles(assembly: &Assembly) -> (Vec<Role>, bool) {
    let mut roles = assembly.newest().roles.clone();
    // By force, a member may be back that the table calls faulty.
    for (place, member) in assembly.members.iter().enumerate() {
        let role = Role::Active(place as u16);
        let number = member.as_ref().map(Member::number);
        for (n, entry) in roles.iter_mut().enumerate() {
            if *entry == role && number != Some(n) {
                *entry = Role::Faulty;
            }
        }
        if let Some(entry) = number.and_then(|n| roles.get_mut(n)) {
            *entry = role;
        }
    }
    let on_disk = &assembly.newest().roles;
    let mut pairs = roles.iter().zip(on_disk);
    let news = pairs.any(|(new, old)| *new == Role::Faulty && *old != Role::Faulty);
    (roles, news)
}

/// Whether the superblocks on disk still count on a member that isn't there.
pub(super) fn names_missing(assembly: &Assembly) -> bool {
    roles(assembly).1
}

impl Member {
    /// Its number in the table of roles.
    fn number(&self) -> usize {
        self.superblock.dev_number as usize
    }
}

/// The header of a member's bitmap; `None` if there is none that belongs to the array.
pub(super) fn bitmap_header(
    assembly: &Assembly,
    place: usize,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<Option<BitmapHeader>, Error> {
    let Some(member) = &assembly.members[place] else {
        return Ok(None);
    };
    let Policy::Bitmap { sector } = member.superblock.policy() else {
        return Ok(None);
    };
    let mut page = vec![0; PAGE_BYTES];
    disks.at(place)?.read(sector, &mut page, idle)?;
    let room = member.superblock.bitmap_room_sectors();
    let header = BitmapHeader::parse(&page).ok().filter(|h| {
        let uuid = &member.superblock.set_uuid;
        h.check(uuid, &assembly.geometry, room).is_ok()
    });
    Ok(header)
}

fn write_bitmap(
    assembly: &Assembly,
    disks: &mut Disks,
    places: &[usize],
    clean: bool,
    events: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Failure> {
    let nobody = |error| Failure { place: None, error };
    let mut header = None;
    for &place in places {
        header = bitmap_header(assembly, place, disks, idle).map_err(|error| Failure {
            place: disks
                .at(place)
                .is_ok_and(|d| !d.is_ended())
                .then_some(place),
            error,
        })?;
        if header.is_some() {
            break;
        }
    }
    let mut header = header.ok_or_else(|| {
        nobody(Error::config(
            "no member has the bitmap that the superblocks promise: have mdadm remove it (--grow --bitmap=none)",
        ))
    })?;
    let all = !clean || assembly.failed().is_some();
    header.events = events;
    header.state = 0;
    if !all {
        header.events_cleared = events;
    }
    let bitmap = WriteIntent::new(header, all);
    let pages = bitmap.pages();
    let area: Vec<u8> = pages.flat_map(|p| bitmap.page(p).to_vec()).collect();
    each(places, disks, |place, disk| {
        let policy = assembly.members[place]
            .as_ref()
            .map(|m| m.superblock.policy());
        match policy {
            Some(Policy::Bitmap { sector }) => disk.write(sector, &area, idle),
            _ => Ok(()),
        }
    })
}
