//! The write-intent bitmap, or private map, on all members.

use super::super::assemble::Assembly;
use super::super::bitmap::{BitmapHeader, PAGE_BYTES, WriteIntent};
use super::super::blocking::{Blocking, Idle};
use super::super::superblock::{Policy, Superblock};
use super::superblocks::{Failure, first_failure};
use super::{At, Disks};
use pvblk_block::Error;

/// Writes the bitmap's next events, if there is one; returns the devices that failed that.
pub(super) fn renew_bitmap(
    assembly: &mut Assembly,
    disks: &mut Disks,
    events: u64,
    idle: &mut Idle<'_>,
) -> Result<Vec<At>, Error> {
    match &mut assembly.bitmap {
        Some(bitmap) => bitmap.renew(events),
        None => return Ok(Vec::new()),
    }
    write_pages(assembly, disks, idle)
}

/// Writes the pages of the bitmap that aren't written; returns the devices that failed that. The pages count as written if all have them.
pub(in super::super) fn write_pages(
    assembly: &mut Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<Vec<At>, Error> {
    let Some(mut bitmap) = assembly.bitmap.take() else {
        return Ok(Vec::new());
    };
    let pages: Vec<usize> = bitmap.unwritten_pages().collect();
    let mut failed = Ok(Vec::new());
    for page in pages {
        let Some(write) = bitmap.begin_page(page) else {
            debug_assert!(false, "two write the bitmap at a time");
            continue;
        };
        failed = write_page(assembly, disks, (page, bitmap.page(page)), idle);
        let ok = failed.as_ref().is_ok_and(Vec::is_empty);
        bitmap.end_page(write, ok);
        if !ok {
            break;
        }
    }
    assembly.bitmap = Some(bitmap);
    failed
}

/// Writes a page to all devices side by side; returns those that fail that.
fn write_page(
    assembly: &Assembly,
    disks: &mut Disks,
    (page, bytes): (usize, &[u8]),
    idle: &mut Idle<'_>,
) -> Result<Vec<At>, Error> {
    let writes = writes(assembly, page * PAGE_BYTES, bytes);
    let mut failed = Vec::new();
    for (at, error) in disks.write_each(&writes, idle)? {
        tracing::warn!("raid5: bitmap: {error}");
        failed.push(at);
    }
    Ok(failed)
}

/// The writes of a part of the bitmap, from byte `from` on, to all devices that have one.
fn writes<'a>(assembly: &Assembly, from: usize, bytes: &'a [u8]) -> Vec<(At, u64, &'a [u8])> {
    let all = At::all(assembly).into_iter();
    all.filter_map(|at| {
        let sector = at.of(assembly)?.superblock.bitmap_sector()?;
        Some((at, sector + from as u64 / 512, bytes))
    })
    .collect()
}

/// The header of a device's bitmap, or private map, and its first page; `None` if there is none that belongs to the array, or the map can't be read.
pub(super) fn bitmap_header(
    assembly: &Assembly,
    at: At,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<Option<(BitmapHeader, Vec<u8>)>, Error> {
    let Some(member) = at.of(assembly) else {
        return Ok(None);
    };
    let Some(sector) = member.superblock.bitmap_sector() else {
        return Ok(None);
    };
    let superblock = &member.superblock;
    let is_private = !matches!(superblock.policy(), Policy::Bitmap { .. });
    let mut page = vec![0; PAGE_BYTES];
    let disk = disks.at(at)?;
    match disk.read(sector, &mut page, idle) {
        // An array can do without a private map.
        Err(_) if is_private && !disk.is_ended() => return Ok(None),
        read => read?,
    }
    let room = superblock.bitmap_room_sectors();
    let belongs = |h: &BitmapHeader| {
        let checked = h.check(&superblock.set_uuid, &assembly.geometry, room);
        checked.is_ok() && h.is_private() == is_private
    };
    let header = BitmapHeader::parse(&page).ok().filter(belongs);
    Ok(header.map(|header| (header, page)))
}

/// The first header that [`bitmap_header`] finds; `None`: there is no private map. Errors name the device to blame, if one is. One is that there is
/// no bitmap though it is the consistency policy.
pub(in super::super) fn any_bitmap_header(
    assembly: &Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<Option<BitmapHeader>, (Option<At>, Error)> {
    for at in At::all(assembly) {
        let header = bitmap_header(assembly, at, disks, idle).map_err(|error| {
            let to_blame = disks.at(at).is_ok_and(|d| !d.is_ended());
            (to_blame.then_some(at), error)
        })?;
        if let Some((header, _)) = header {
            return Ok(Some(header));
        }
    }
    let Policy::Bitmap { .. } = assembly.policy() else {
        return Ok(None);
    };
    let text = "no member has the bitmap that the superblocks promise: have mdadm remove it (--grow --bitmap=none)";
    Err((None, Error::config(text)))
}

/// Overwrites a private map on a device, if there is one: it would be taken for the array's at the next start.
pub(in super::super) fn erase_map(
    superblock: &Superblock,
    disk: &mut Blocking,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let Some(map) = superblock.private_map() else {
        return Ok(());
    };
    let mut page = [0; PAGE_BYTES];
    disk.read(map.sector, &mut page, idle)?;
    match BitmapHeader::parse(&page) {
        Ok(header) if header.is_private() => disk.write(map.sector, &[0; PAGE_BYTES], idle),
        _ => Ok(()),
    }
}

/// Writes all of the bitmap, if there is one, with these events.
pub(super) fn write_bitmap(
    assembly: &mut Assembly,
    disks: &mut Disks,
    clean: bool,
    events: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Failure> {
    let whole = clean && assembly.failed().is_none();
    let mut kept = assembly.bitmap.take();
    let mut untracked = match (&kept, assembly.policy()) {
        // A private map that isn't known is left as it is, and isn't current any more.
        (None, Policy::Bitmap { .. }) => {
            let header = any_bitmap_header(assembly, disks, idle);
            let header = header.map_err(|(at, error)| Failure { at, error })?;
            let all = !whole || !assembly.unsynced.is_empty();
            header.map(|header| WriteIntent::new(header, all))
        }
        _ => None,
    };
    let Some(bitmap) = kept.as_mut().or(untracked.as_mut()) else {
        return Ok(());
    };
    bitmap.renew(events);
    let written = write_area(assembly, disks, bitmap, whole, idle);
    if written.is_ok() {
        bitmap.all_written();
    }
    assembly.bitmap = kept;
    written
}

/// Writes all of a bitmap to all devices. `whole`: without the bits that aren't needed.
fn write_area(
    assembly: &Assembly,
    disks: &mut Disks,
    bitmap: &mut WriteIntent,
    whole: bool,
    idle: &mut Idle<'_>,
) -> Result<(), Failure> {
    let mut write = |bitmap: &mut WriteIntent| {
        bitmap.number_write();
        first_failure(disks.write_each(&writes(assembly, 0, bitmap.area()), idle))
    };
    if whole {
        // Power may fail in the middle of a page, so `events_cleared` is on all members before any bit is cleared.
        if bitmap.begin_clearing(bitmap.header().events, |_| true) {
            write(bitmap)?;
        }
        bitmap.clear_unneeded();
    }
    write(bitmap)
}
