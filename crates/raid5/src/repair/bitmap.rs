//! The write-intent bitmap on all members.

use super::super::assemble::Assembly;
use super::super::bitmap::{BitmapHeader, PAGE_BYTES, WriteIntent};
use super::super::blocking::Idle;
use super::super::superblock::Policy;
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
    all.filter_map(|at| match at.of(assembly)?.superblock.policy() {
        Policy::Bitmap { sector } => Some((at, sector + from as u64 / 512, bytes)),
        _ => None,
    })
    .collect()
}

/// The header of a device's bitmap; `None` if there is none that belongs to the array.
pub(super) fn bitmap_header(
    assembly: &Assembly,
    at: At,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<Option<BitmapHeader>, Error> {
    let Some(member) = at.of(assembly) else {
        return Ok(None);
    };
    let Policy::Bitmap { sector } = member.superblock.policy() else {
        return Ok(None);
    };
    let mut page = vec![0; PAGE_BYTES];
    disks.at(at)?.read(sector, &mut page, idle)?;
    let room = member.superblock.bitmap_room_sectors();
    let header = BitmapHeader::parse(&page).ok().filter(|h| {
        let uuid = &member.superblock.set_uuid;
        h.check(uuid, &assembly.geometry, room).is_ok()
    });
    Ok(header)
}

/// The first header that [`bitmap_header`] finds.
pub(in super::super) fn any_bitmap_header(
    assembly: &Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<BitmapHeader, (Option<At>, Error)> {
    for at in At::all(assembly) {
        let header = bitmap_header(assembly, at, disks, idle).map_err(|error| {
            let to_blame = disks.at(at).is_ok_and(|d| !d.is_ended());
            (to_blame.then_some(at), error)
        })?;
        if let Some(header) = header {
            return Ok(header);
        }
    }
    let text = "no member has the bitmap that the superblocks promise: have mdadm remove it (--grow --bitmap=none)";
    Err((None, Error::config(text)))
}

/// Writes all of the bitmap, with these events.
pub(super) fn write_bitmap(
    assembly: &mut Assembly,
    disks: &mut Disks,
    clean: bool,
    events: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Failure> {
    let whole = clean && assembly.failed().is_none();
    let mut kept = assembly.bitmap.take();
    let mut untracked = match kept {
        Some(_) => None,
        None => {
            let header = any_bitmap_header(assembly, disks, idle);
            let header = header.map_err(|(at, error)| Failure { at, error })?;
            let all = !whole || !assembly.unsynced.is_empty();
            Some(WriteIntent::new(header, all))
        }
    };
    let Some(bitmap) = kept.as_mut().or(untracked.as_mut()) else {
        return Ok(());
    };
    bitmap.renew(events);
    if whole {
        bitmap.clear_unneeded();
    }
    let failed = disks.write_each(&writes(assembly, 0, bitmap.area()), idle);
    let written = first_failure(failed);
    if written.is_ok() {
        bitmap.all_written();
    }
    assembly.bitmap = kept;
    written
}
