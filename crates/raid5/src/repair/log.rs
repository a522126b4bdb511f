//! The partial parity log after a crash.
//!
//! A log that can't be read is no worse than an empty one: it is on stable storage before the writes that it
//! lists begin, so a log that a cut left unfinished lists none that began. The same goes for an entry whose
//! partial parity doesn't match.

use super::super::assemble::{Assembly, Member};
use super::super::blocking::{Blocking, Idle};
use super::super::geometry::{STRIPE_BYTES, STRIPE_SECTORS};
use super::super::parity::xor_of;
use super::super::ppl::{PPL_HEADER_BYTES, PplHeader, find_newest, ppl_signature};
use super::super::recover::Repair;
use super::super::superblock::{LogArea, Policy};
use super::{At, Disk, Disks, is_missing};
use pvblk_block::Error;

/// Findings in the logs.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Entries that had been written whole.
    pub entries: u64,
    pub notes: Vec<String>,
}

/// Makes parity right of all that the logs name. It isn't flushed.
pub(super) fn recover(
    assembly: &Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<Found, Error> {
    let missing = |place, sector| is_missing(assembly, place, sector);
    let mut found = Found::default();
    let (mut repaired, mut left_alone) = (0, 0);
    for place in 0..assembly.members.len() {
        let on = At::home(assembly, place);
        let Some((on, (log, name))) = on.and_then(|on| Some((on, log_of(assembly, on)?))) else {
            continue;
        };
        let mut area = vec![0; log.sectors as usize * 512];
        disks.at(on)?.read(log.sector, &mut area, idle)?;
        let newest = match find_newest(&area, signature(assembly)) {
            Ok(newest) => newest,
            Err(e) => {
                found.notes.push(format!(
                    "{name}: its partial parity log is passed over: {e}"
                ));
                continue;
            }
        };
        let start = newest.offset_sectors as usize * 512 + PPL_HEADER_BYTES;
        for (at, entry) in newest.header.entries_at() {
            let partial = area.get(start + at as usize..);
            let partial = partial.and_then(|p| p.get(..entry.pp_bytes as usize));
            let plan = entry
                .check(partial.unwrap_or_default())
                .and_then(|()| entry.plan(&assembly.geometry, place, missing));
            match plan {
                Ok(plan) => {
                    found.entries += 1;
                    left_alone += plan.left_alone;
                    for repair in &plan.repairs {
                        // Parity that isn't there is calculated when it is rebuilt.
                        if missing(repair.parity_member, repair.member_sector) {
                            continue;
                        }
                        // It is right on stable storage, and data may not be what was written.
                        let at = repair.member_sector..repair.member_sector + STRIPE_SECTORS;
                        let map = assembly.map_with_sums();
                        if map.is_some_and(|map| map.set_sectors(at) == 0) {
                            continue;
                        }
                        repaired += 1;
                        apply(disks, repair, partial.unwrap_or_default(), idle)?;
                    }
                }
                Err(e) => found.notes.push(format!(
                    "{name}: an entry of its partial parity log is passed over: {e}"
                )),
            }
        }
    }
    if found.entries > 0 {
        found.notes.push(format!(
            "parity of {repaired} blocks was made right from the logs"
        ));
    }
    if left_alone > 0 {
        found.notes.push(format!(
            "{left_alone} blocks of the missing member were being written and may hold anything"
        ));
    }
    Ok(found)
}

fn apply(
    disks: &mut Disks,
    repair: &Repair,
    partial: &[u8],
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let mut blocks = vec![vec![0; STRIPE_BYTES]; repair.data_members.len()];
    for (block, &member) in blocks.iter_mut().zip(&repair.data_members) {
        disks.read(member, repair.member_sector, block, idle)?;
    }
    let mut sources: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    if let Some(at) = repair.partial_parity {
        sources.push(&partial[at as usize..at as usize + STRIPE_BYTES]);
    }
    let mut parity = [0; STRIPE_BYTES];
    xor_of(&mut parity, &sources);
    disks.write(repair.parity_member, repair.member_sector, &parity, idle)
}

/// Makes the logs of all members empty, of the device that is being recovered too, in all of their areas: a
/// log that md or an earlier run left further behind would look newer than one that is written later at the
/// start.
pub(in super::super) fn empty(
    assembly: &Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    for at in At::all(assembly) {
        if let Some((log, _)) = log_of(assembly, at) {
            empty_at(log, signature(assembly), disks.at(at)?, idle)?;
        }
    }
    Ok(())
}

/// The same of one device.
pub(in super::super) fn empty_log(
    member: &Member,
    disk: &mut Disk,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    match member.superblock.policy() {
        Policy::Ppl(log) => {
            let signature = ppl_signature(&member.superblock.set_uuid);
            empty_at(log, signature, disk.blocking(), idle)
        }
        _ => Ok(()),
    }
}

fn empty_at(
    log: LogArea,
    signature: u32,
    disk: &mut Blocking,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let mut area = vec![0; log.sectors as usize * 512];
    area[..PPL_HEADER_BYTES].copy_from_slice(&PplHeader::empty(signature).encode());
    disk.write_cached(log.sector, &area, idle)?;
    disk.flush(idle)
}

fn signature(assembly: &Assembly) -> u32 {
    ppl_signature(&assembly.newest().set_uuid)
}

fn log_of(assembly: &Assembly, at: At) -> Option<(LogArea, &str)> {
    let member = at.of(assembly)?;
    match member.superblock.policy() {
        Policy::Ppl(log) => Some((log, &member.name)),
        _ => None,
    }
}
