//! Pages of sums on the members: see [`crate::sums`].

use super::super::assemble::Assembly;
use super::super::blocking::Idle;
use super::super::sums::{GROUP_SECTORS, SUMS_PAGE_BYTES, erase_sums, groups, holder, page_sector};
use super::super::superblock::LogArea;
use super::superblocks::throw_out;
use super::{At, Disks};
use pvblk_block::Error;
use std::ops::Range;

/// A page of sums.
pub(in super::super) type Page = [u8; SUMS_PAGE_BYTES];

/// Where a device has sums, if there is room.
fn area(assembly: &Assembly, at: At) -> Option<LogArea> {
    at.of(assembly)?.superblock.sums_area()
}

/// The pages of a group, by the places whose sums they have: `None` where they aren't known. `incoming_has`: the device that is being rebuilt was
/// given its page since it came. A page that can't be read isn't known either; errors if `idle` ends it.
pub(in super::super) fn read_group(
    assembly: &Assembly,
    disks: &mut Disks,
    (group, incoming_has): (usize, bool),
    idle: &mut Idle<'_>,
) -> Result<Vec<Option<Page>>, Error> {
    let places = assembly.geometry.members();
    let home = |place: usize| {
        let holder = holder(place, places);
        let at = At::home(assembly, holder)?;
        let knows = at != At::Incoming || incoming_has;
        area(assembly, at).filter(|_| knows).map(|area| (at, area))
    };
    let homes: Vec<Option<(At, LogArea)>> = (0..places).map(home).collect();
    // Side by side.
    let mut begun: Vec<Option<At>> = Vec::new();
    let mut ended = Ok(());
    for home in homes {
        let is_begun = home.map(|(at, area)| {
            let sector = page_sector(area, group);
            let disk = disks.at(at);
            disk.and_then(|disk| disk.begin_read(sector, SUMS_PAGE_BYTES))
        });
        begun.push(
            home.filter(|_| matches!(is_begun, Some(Ok(()))))
                .map(|(at, _)| at),
        );
        if let Some(Err(error)) = is_begun {
            ended = Err(error);
        }
    }
    let mut pages = Vec::new();
    for home in begun {
        let mut page = [0; SUMS_PAGE_BYTES];
        let Some(at) = home else {
            pages.push(None);
            continue;
        };
        let disk = disks.at(at)?;
        match disk.finish_read(&mut page, idle) {
            Ok(()) => pages.push(Some(page)),
            Err(error) if disk.is_ended() => {
                ended = Err(error);
                pages.push(None);
            }
            Err(error) => {
                tracing::warn!("raid5: checksums: {error}; blocks of 4 MiB are without them");
                pages.push(None);
            }
        }
    }
    ended.map(|()| pages)
}

/// Writes the pages of a group, by the places whose sums they have, to stable storage; returns the devices that failed that.
pub(in super::super) fn write_group(
    assembly: &Assembly,
    disks: &mut Disks,
    (group, pages): (usize, &[Page]),
    idle: &mut Idle<'_>,
) -> Result<Vec<At>, Error> {
    let places = assembly.geometry.members();
    let incoming = assembly.incoming.as_ref().map(|incoming| incoming.place);
    let mut writes = Vec::new();
    for (place, page) in pages.iter().enumerate() {
        let holder = holder(place, places);
        let homes = [
            assembly.members[holder]
                .as_ref()
                .map(|_| At::Member(holder)),
            (incoming == Some(holder)).then_some(At::Incoming),
        ];
        for at in homes.into_iter().flatten() {
            if let Some(area) = area(assembly, at) {
                writes.push((at, page_sector(area, group), page.as_slice()));
            }
        }
    }
    let mut failed = Vec::new();
    for (at, error) in disks.write_each(&writes, idle)? {
        tracing::warn!("raid5: checksums: {error}");
        failed.push(at);
    }
    Ok(failed)
}

/// Makes the sums of these whole groups unknown, which may be behind their blocks. Devices that fail that are thrown out.
pub(super) fn erase(
    assembly: &mut Assembly,
    disks: &mut Disks,
    ranges: &[Range<u64>],
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    if ranges.is_empty() {
        return Ok(());
    }
    for at in At::all(assembly) {
        let Some(area) = area(assembly, at) else {
            continue;
        };
        let disk = disks.at(at)?;
        let erased = ranges.iter().try_for_each(|range| {
            let pages = groups(range.end) as u64 - range.start / GROUP_SECTORS;
            let part = LogArea {
                sector: page_sector(area, (range.start / GROUP_SECTORS) as usize),
                sectors: pages * (SUMS_PAGE_BYTES as u64 / 512),
            };
            erase_sums(disk, part, idle)
        });
        match erased.and_then(|()| disk.flush(idle)) {
            Ok(()) => {}
            Err(error) if disk.is_ended() => return Err(error),
            Err(error) => throw_out(assembly, disks, Some(at), error)?,
        }
    }
    Ok(())
}
