//! Pages of sums on the members: see [`crate::sums`].

use super::super::assemble::Assembly;
use super::super::blocking::Idle;
use super::super::sums::{GROUP_SECTORS, SUMS_PAGE_BYTES, erase_sums, groups, holder, page_sector};
use super::super::superblock::LogArea;
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
    // Side by side. A read that doesn't begin is one that fails.
    let mut begun = Vec::new();
    for (at, area) in homes.iter().flatten() {
        let sector = page_sector(*area, group);
        disks.at(*at)?.begin_read(sector, SUMS_PAGE_BYTES)?;
        begun.push(*at);
    }
    let mut pages = Vec::new();
    let mut ended = Ok(());
    for home in homes {
        let mut page = [0; SUMS_PAGE_BYTES];
        let Some((at, _)) = home else {
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

/// Makes the sums unknown that may be behind their blocks: those of these sectors of the members' data.
pub(super) fn erase(
    assembly: &Assembly,
    disks: &mut Disks,
    ranges: &[Range<u64>],
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let all = groups(assembly.geometry.member_sectors()) as u64;
    for at in At::all(assembly) {
        let Some(area) = area(assembly, at) else {
            continue;
        };
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let first = range.start / GROUP_SECTORS;
            let end = range.end.div_ceil(GROUP_SECTORS).min(all);
            let part = LogArea {
                sector: page_sector(area, first as usize),
                sectors: (end - first) * (SUMS_PAGE_BYTES as u64 / 512),
            };
            erase_sums(disks.at(at)?, part, idle)?;
        }
    }
    Ok(())
}
