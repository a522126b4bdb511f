//! Begins and ends the private map of an array that isn't served.

use super::assemble::Assembly;
use super::bitmap::{BitmapHeader, WriteIntent};
use super::blocking::{Blocking, Idle};
use super::identity::now_secs;
use super::repair::{At, erase_map, write_superblocks};
use super::superblock::{Kept, Policy};
use pvblk_block::Error;

/// Begins or ends (`keep`) the private map of an array that [`super::prepare`] made ready, and writes its superblocks as clean. Returns false, and
/// has written no superblock, if the array had that state before; maps that an earlier try or a spare has left are erased then, too.
///
/// Fails with one line if the array has a write-intent bitmap, which serves the same purpose, if a member has no room for the map or is larger than
/// 60 TiB, or if a write fails.
pub fn set_private_map(
    assembly: &mut Assembly,
    keep: bool,
    idle: &mut Idle<'_>,
) -> Result<bool, Error> {
    let kept = assembly.kept() != Kept::Nothing;
    if keep {
        if kept {
            return Ok(false);
        }
        assembly.bitmap = Some(new_map(assembly)?);
    } else {
        // Those of spares, and what an earlier try has left, too.
        erase(assembly, idle)?;
        if !kept && !assembly.newest().keeps_map() {
            return Ok(false);
        }
        if kept {
            assembly.bitmap = None;
        }
    }
    write_superblocks(assembly, true, now_secs(), idle)?;
    Ok(true)
}

fn new_map(assembly: &Assembly) -> Result<WriteIntent, Error> {
    if let Policy::Bitmap { .. } = assembly.policy() {
        return Err(Error::config(
            "the array has a write-intent bitmap: it needs no map",
        ));
    }
    let all = At::all(assembly).into_iter();
    let mut without = all
        .filter_map(|at| at.of(assembly))
        .filter(|member| member.superblock.private_map().is_none());
    if let Some(member) = without.next() {
        return Err(Error::config(format!(
            "{}: the 4 KiB before its data are used, so there is no room for a map",
            member.name
        )));
    }
    let sectors = assembly.geometry.member_sectors();
    let header = BitmapHeader::private(assembly.newest().set_uuid, sectors);
    let header = header.ok_or_else(|| {
        Error::config(format!(
            "members of {sectors} sectors are too large for a map: the largest have 60 TiB"
        ))
    })?;
    // Nobody knows which writes a missing member lacks.
    let mut map = WriteIntent::new(header, assembly.failed().is_some());
    map.need(&assembly.unsynced);
    Ok(map)
}

/// Overwrites the maps, spares' too, so that the next start finds none.
fn erase(assembly: &Assembly, idle: &mut Idle<'_>) -> Result<(), Error> {
    let all = At::all(assembly).into_iter();
    let all = all.filter_map(|at| at.of(assembly));
    for member in all.chain(&assembly.spares) {
        let mut disk = Blocking::open(&member.device)?;
        erase_map(&member.superblock, &mut disk, idle)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "private_map_tests.rs"]
mod tests;
