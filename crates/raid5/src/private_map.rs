//! Begins and ends the private map of an array that isn't served.

use super::assemble::Assembly;
use super::bitmap::{BitmapHeader, PAGE_BYTES, WriteIntent};
use super::blocking::{Blocking, Idle};
use super::identity::now_secs;
use super::repair::{At, Disks, write_superblocks};
use super::superblock::Policy;
use pvblk_block::Error;

/// The array keeps a private map from now on, or doesn't any more. It was made ready by [`super::prepare`]; its superblocks are written, and say
/// clean. Returns false, and has written nothing, if it was so before.
///
/// Fails with one line if the array has a write-intent bitmap, which serves the same purpose, or a member has no room for the map.
pub fn set_private_map(
    assembly: &mut Assembly,
    keep: bool,
    idle: &mut Idle<'_>,
) -> Result<bool, Error> {
    if assembly.keeps_private_map() == keep {
        return Ok(false);
    }
    match keep {
        true => assembly.bitmap = Some(new_map(assembly)?),
        false => {
            assembly.bitmap = None;
            erase(assembly, idle)?;
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
    // What a member that is missing has missed isn't known.
    let mut map = WriteIntent::new(header, assembly.failed().is_some());
    for range in &assembly.unsynced {
        map.need(range.clone());
    }
    Ok(map)
}

/// Overwrites the maps, spares' too, so that the next start finds none.
fn erase(assembly: &Assembly, idle: &mut Idle<'_>) -> Result<(), Error> {
    let mut disks = Disks::open(assembly)?;
    let zeros = [0; PAGE_BYTES];
    let all = At::all(assembly).into_iter();
    let writes: Vec<_> = all
        .filter_map(|at| {
            let map = at.of(assembly)?.superblock.private_map()?;
            Some((at, map.sector, &zeros[..]))
        })
        .collect();
    if let Some((_, error)) = disks.write_each(&writes, idle)?.into_iter().next() {
        return Err(error);
    }
    for spare in &assembly.spares {
        if let Some(map) = spare.superblock.private_map() {
            Blocking::open(&spare.device)?.write(map.sector, &zeros, idle)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "private_map_tests.rs"]
mod tests;
