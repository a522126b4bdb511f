//! Work between assembling and serving: parity is made right, logs are emptied, superblocks are written.
//!
//! The work for a dirty array follows from its consistency policy:
//!
//! | policy | all members there | one missing |
//! |---|---|---|
//! | partial parity log | stripes that the logs list; all, if no log lists any: parity may never have been made | stripes that the logs list; blocks of the missing member that were being written are lost |
//! | bitmap | chunks that the bitmap marks | refused, unless forced |
//! | resync | chunks that the private map marks, or all stripes | refused, unless forced |
//!
//! The resync can be left for later ([`AssembleOptions::resync_later`]), to be done while the array serves.
//!
//! A device that is being recovered counts for the part that it has: if its place has no member, blocks and
//! logs there are its own. If it is to replace a member, the two are equal only if there was no crash; after
//! a crash the recovery begins again.
//!
//! The order keeps an array that is cut off anywhere startable: repairs are flushed, then superblocks say clean, and only then are the logs
//! emptied.

mod bitmap;
mod disks;
mod log;
mod sums;
mod superblocks;

pub(super) use bitmap::{any_bitmap_header, erase_map, write_pages};
pub(super) use disks::{At, Disk, Disks};
pub(super) use log::empty_log;
pub(super) use sums::{Page, read_group, write_group};
pub use superblocks::write_superblocks;
pub(super) use superblocks::{Says, names_missing, write_progress, write_superblocks_on};

use super::assemble::{AssembleOptions, Assembly};
use super::bitmap::{BITMAP_HEADER_BYTES, PAGE_BYTES, WriteIntent};
use super::blocking::Idle;
use super::geometry::{STRIPE_BYTES, STRIPE_SECTORS};
use super::parity::xor_into;
use super::sums::GROUP_SECTORS;
use super::superblock::{Feature, Policy, Superblock};
use pvblk_block::Error;
use pvblk_block::planted::{Plant, has};
use std::ops::Range;

/// Sectors of each member that a resync handles at a time, if the members take as much.
const WINDOW_SECTORS: u64 = 1024;

/// Turns the progress of [`prepare`] into a few lines for people: each tenth.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raid5Progress {
    tenths: u64,
}

impl Raid5Progress {
    /// The line, if another tenth is done: `30 %, 300 of 1000 MiB of each member`.
    pub fn step(&mut self, done_sectors: u64, of_sectors: u64) -> Option<String> {
        let tenths = done_sectors.saturating_mul(10) / of_sectors.max(1);
        if tenths <= self.tenths {
            return None;
        }
        self.tenths = tenths;
        let (done, of) = (done_sectors / 2048, of_sectors / 2048);
        Some(format!(
            "{} %, {done} of {of} MiB of each member",
            tenths * 10
        ))
    }
}

/// Makes an array ready to be served: parity right, superblocks clean, of one event, and without the missing
/// member, logs empty.
///
/// With [`AssembleOptions::resync_later`] only the first stripe's parity is resynchronised: see
/// [`Assembly::unsynced`]. The superblocks hold the sector where the rest begins, and zero would mean that
/// all may be wrong.
///
/// Fails with one line if that isn't possible; metadata that was written until then does no harm. While
/// parity is computed, `progress` is called with the sectors of the members that are done, and their number
/// in all. Times in superblocks stay as they are.
pub fn prepare(
    assembly: &mut Assembly,
    options: &AssembleOptions,
    progress: &mut dyn FnMut(u64, u64),
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    for at in At::all(assembly) {
        if let Some(member) = at.of(assembly)
            && member.device.limits().read_only
        {
            return Err(Error::config(format!(
                "{} is read-only: an array writes to all of its members",
                member.name
            )));
        }
    }
    let mut disks = Disks::open(assembly)?;
    assembly.unsynced.clear();
    assembly.unsummed.clear();
    let (alike, is_current) = load_bitmap(assembly, &mut disks, idle)?;
    // From the marks as they are: a repair takes them away.
    let behind = sums_behind(assembly, is_current);
    // The last start or stop may have been cut off between two superblocks. A member that is missing becomes
    // stale now, because it lacks all later writes.
    let mut write = assembly.dirty || !alike || superblocks::differ(assembly);
    if assembly.dirty {
        begin_again(assembly, &mut disks, idle)?;
        repair(assembly, options, &mut disks, progress, idle)?;
        disks.flush(idle)?;
    }
    // After the repair, which may need a device that can't be written; and before superblocks say clean.
    forget_sums(assembly, &mut disks, behind, idle)?;
    write |= superblocks::names_missing(assembly);
    for at in At::all(assembly) {
        let features = |a: &Assembly| at.of(a).map(|m| m.superblock.feature_map);
        let before = features(assembly);
        superblocks::settle_features(assembly, at);
        write |= features(assembly) != before;
    }
    if write {
        let utime = assembly.newest().utime;
        write_superblocks(assembly, true, utime, idle)?;
    }
    if let Policy::Ppl(_) = assembly.policy() {
        log::empty(assembly, &mut disks, idle)?;
    }
    Ok(())
}

/// Sectors of the groups whose sums may be behind their blocks, in an array that has sums: those that the map marks if the array wasn't stopped in order,
/// or all, if the map isn't current.
fn sums_behind(assembly: &Assembly, is_current: bool) -> Vec<Range<u64>> {
    let sectors = assembly.geometry.member_sectors();
    let Some(map) = assembly.map_with_sums() else {
        return Vec::new();
    };
    match (is_current, assembly.dirty) {
        (false, _) => std::iter::once(0..sectors).collect(),
        (true, true) => rounded(map.marked_ranges(), GROUP_SECTORS, sectors),
        (true, false) => Vec::new(),
    }
}

/// Makes these sums unknown, so that sums on disk are right, or unknown, whenever superblocks say clean. If a device that the array needs can't be
/// written there, the array goes on without sums and map.
fn forget_sums(
    assembly: &mut Assembly,
    disks: &mut Disks,
    behind: Vec<Range<u64>>,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    if has(Plant::SumsKeptAfterCrash) {
        return Ok(());
    }
    match sums::erase(assembly, disks, &behind, idle) {
        Ok(()) => assembly.unsummed = behind,
        Err(error) => {
            if At::all(assembly)
                .into_iter()
                .any(|at| disks.at(at).is_ok_and(|disk| disk.is_ended()))
            {
                return Err(error);
            }
            assembly
                .notes
                .push(format!("the array is served without checksums: {error}"));
            assembly.bitmap = None;
        }
    }
    Ok(())
}

/// Begins a replacement again: after a crash it may differ from the member that it replaces. So no part of it
/// counts any more, and that is on disk before any other change.
fn begin_again(
    assembly: &mut Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let Some(incoming) = &mut assembly.incoming else {
        return Ok(());
    };
    let sb = &mut incoming.member.superblock;
    if !sb.has(Feature::REPLACEMENT) || incoming.recovered_sectors == 0 {
        return Ok(());
    }
    incoming.recovered_sectors = 0;
    sb.recovery_offset_sectors = 0;
    sb.feature_map |= Feature::RECOVERY_OFFSET.0;
    assembly.notes.push(format!(
        "{} begins again: the array wasn't stopped in order",
        incoming.member.name
    ));
    let disk = disks.at(At::Incoming)?;
    match superblocks::write_one(sb, disk, idle) {
        Err(error) if !disk.is_ended() => {
            superblocks::throw_out(assembly, disks, Some(At::Incoming), error)
        }
        result => result,
    }
}

fn repair(
    assembly: &mut Assembly,
    options: &AssembleOptions,
    disks: &mut Disks,
    progress: &mut dyn FnMut(u64, u64),
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let in_sync = assembly.in_sync_sectors();
    let sectors = assembly.geometry.member_sectors();
    let mut ranges: Vec<Range<u64>> = std::iter::once(in_sync..sectors).collect();
    let mut logged = false;
    let policy = assembly.policy();
    match policy {
        Policy::Resync if assembly.bitmap.is_none() => {}
        Policy::Resync | Policy::Bitmap { .. } => {
            let marked = assembly.bitmap.iter().flat_map(WriteIntent::dirty_ranges);
            ranges = marked.collect();
        }
        Policy::Ppl(_) => {
            if let Some(map) = assembly.map_with_sums() {
                // Other stripes are on stable storage with their parity: it would be calculated from blocks that nobody has compared.
                ranges = map.marked_ranges().collect();
            }
            let found = log::recover(assembly, disks, idle)?;
            assembly.notes.extend(found.notes);
            // An offset says that parity was never made behind it. Logs list only stripes that were written.
            // And a device that takes the place of a member doesn't have that member's log.
            let took_over = |s: &Superblock| s.has(Feature::REPLACEMENT);
            let took_over = assembly.present().any(|m| took_over(&m.superblock));
            logged = in_sync == 0 && !took_over;
            if logged && found.entries > 0 {
                ranges.clear();
            }
        }
    }
    let mut ranges = rounded(ranges.into_iter(), STRIPE_SECTORS, sectors);
    let Some(missing) = assembly.failed() else {
        if options.resync_later {
            ranges = leave(assembly, ranges);
        }
        resync(assembly, disks, &ranges, progress, idle)?;
        if let Some(bitmap) = &mut assembly.bitmap {
            if let Policy::Ppl(_) = policy {
                // A log tells itself where parity is wrong; the private map only has what is left for later.
                bitmap.resynced(0..sectors);
                bitmap.need(&assembly.unsynced);
            }
            ranges.into_iter().for_each(|range| bitmap.resynced(range));
        }
        return Ok(());
    };
    if !logged && !options.force {
        return Err(Error::config(format!(
            "the array wasn't stopped in order, it has no member at place {missing}, and no log tells what was being written: what is calculated for the \
             missing member may be wrong; name that member, or start with force"
        )));
    }
    assembly.guessed |= !logged;
    // By force: the recovered part isn't checked again, so parity has to be right there.
    let incoming = assembly.incoming.as_ref();
    if let Some(incoming) = incoming.filter(|i| !logged && i.place == missing) {
        let rebuilt = incoming.recovered_sectors;
        let ranges: Vec<_> = ranges
            .into_iter()
            .map(|r| r.start..r.end.min(rebuilt))
            .filter(|r| !r.is_empty())
            .collect();
        resync(assembly, disks, &ranges, progress, idle)?;
    }
    Ok(())
}

/// Leaves ranges to be resynchronised later, and returns those to be done at once: the first stripe, if it is
/// among them.
fn leave(assembly: &mut Assembly, mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut at_once = Vec::new();
    if let Some(first) = ranges.first_mut()
        && first.start == 0
    {
        first.start = STRIPE_SECTORS.min(first.end);
        at_once.push(0..first.start);
    }
    ranges.retain(|range| !range.is_empty());
    assembly.unsynced = ranges;
    at_once
}

/// Rounds ranges of sectors, which are in order, to whole units; adjacent ones are joined.
fn rounded(
    ranges: impl Iterator<Item = Range<u64>>,
    unit_sectors: u64,
    member_sectors: u64,
) -> Vec<Range<u64>> {
    let mut whole: Vec<Range<u64>> = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        let start = range.start - range.start % unit_sectors;
        let end = range.end.next_multiple_of(unit_sectors);
        let end = end.min(member_sectors);
        match whole.last_mut() {
            Some(last) if last.end >= start => last.end = last.end.max(end),
            _ => whole.push(start..end),
        }
    }
    whole
}

/// True if a sector of a place can't be read: the place has no member, and no device that has recovered it so
/// far.
fn is_missing(assembly: &Assembly, place: usize, member_sector: u64) -> bool {
    let incoming = assembly.incoming.as_ref().filter(|i| i.place == place);
    let rebuilt = incoming.is_some_and(|i| member_sector < i.recovered_sectors);
    assembly.members[place].is_none() && !rebuilt
}

/// Reads the bitmap, or the private map, if there is one. If none can be believed, every bit of it is set. Returns
/// true if all devices with room for it have it as it was read, and true if it can be believed.
fn load_bitmap(
    assembly: &mut Assembly,
    disks: &mut Disks,
    idle: &mut Idle<'_>,
) -> Result<(bool, bool), Error> {
    // The array was degraded, or is: then its bits don't tell which sectors are in sync.
    let in_sync = match assembly.failed() {
        None => assembly.in_sync_sectors(),
        Some(_) => 0,
    };
    let any = bitmap::any_bitmap_header(assembly, disks, idle).map_err(|(_, e)| e)?;
    let Some(any) = any else {
        return Ok((true, false));
    };
    let mut areas = Vec::new();
    let mut found: Option<(u64, Vec<u8>)> = None;
    let mut writes = 0;
    for at in At::all(assembly) {
        let found_here = bitmap::bitmap_header(assembly, at, disks, idle)?;
        let Some(superblock) = at.of(assembly).map(|member| &member.superblock) else {
            continue;
        };
        // There may be no room for a map.
        let Some(sector) = superblock.bitmap_sector() else {
            continue;
        };
        let Some((header, mut area)) = found_here else {
            areas.push(Vec::new());
            continue;
        };
        area.resize(header.area_bytes(), 0);
        if area.len() > PAGE_BYTES {
            disks.at(at)?.read(sector, &mut area, idle)?;
        }
        writes = writes.max(header.writes());
        // The last one that was written: a member may have lost writes of its map. Of md's any will do, since a bit is on all
        // members before a write starts. The device that is being recovered missed some; so did one that is a member by force,
        // and others don't tell which.
        let is_fresh = at != At::Incoming && !assembly.guessed;
        let is_current = header.is_current(superblock.events)
            && (!header.is_private() || superblock.keeps_map());
        let is_last = |(last, _): &(u64, _)| header.writes() > *last;
        if is_fresh && is_current && found.as_ref().is_none_or(is_last) {
            found = Some((header.writes(), area.clone()));
        }
        areas.push(area);
    }
    let Some((_, area)) = found else {
        if assembly.dirty && !matches!(assembly.policy(), Policy::Ppl(_)) {
            let note = "no bitmap is current: all parity is calculated";
            assembly.notes.push(note.into());
        }
        let mut area = vec![0; any.area_bytes()];
        area[..BITMAP_HEADER_BYTES].copy_from_slice(&any.encode());
        let mut bitmap = WriteIntent::load(&area, false, in_sync)?;
        bitmap.set_guided(None);
        bitmap.pass_writes(writes);
        assembly.bitmap = Some(bitmap);
        return Ok((false, false));
    };
    let mut bitmap = match has(Plant::MapForgotten) {
        false => WriteIntent::load(&area, true, in_sync)?,
        true => WriteIntent::new(any, false),
    };
    bitmap.pass_writes(writes);
    assembly.bitmap = Some(bitmap);
    Ok((areas.iter().all(|other| *other == area), true))
}

/// Calculates parity of these ranges of the members, and writes it where it is wrong.
pub(super) fn resync(
    assembly: &Assembly,
    disks: &mut Disks,
    ranges: &[Range<u64>],
    progress: &mut dyn FnMut(u64, u64),
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let of = ranges.iter().map(|r| r.end - r.start).sum();
    let window = (disks.window_bytes() as u64 / 512).min(WINDOW_SECTORS);
    let window = (window - window % STRIPE_SECTORS).max(STRIPE_SECTORS);
    let mut done = 0;
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let sectors = window.min(range.end - at);
            resync_window(assembly, disks, at, sectors, idle)?;
            at += sectors;
            done += sectors;
            progress(done, of);
        }
    }
    Ok(())
}

fn resync_window(
    assembly: &Assembly,
    disks: &mut Disks,
    sector: u64,
    sectors: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let bytes = sectors as usize * 512;
    // All members at a time.
    let places = 0..assembly.geometry.members();
    for place in places.clone() {
        disks.begin_read(place, sector, bytes)?;
    }
    // Parity included, their XOR is zero where parity is right.
    let mut sum = vec![0; bytes];
    let mut data = Vec::with_capacity(places.len());
    for place in places {
        let mut one = vec![0; bytes];
        disks.finish_read(place, &mut one, idle)?;
        xor_into(&mut sum, &[&one]);
        data.push(one);
    }
    for (n, wrong) in sum.chunks(STRIPE_BYTES).enumerate() {
        if wrong.iter().all(|&b| b == 0) {
            continue;
        }
        let stripe = sector / STRIPE_SECTORS + n as u64;
        let parity_member = assembly.geometry.stripe_parity(stripe);
        let at = n * STRIPE_BYTES;
        let parity = &mut data[parity_member][at..at + STRIPE_BYTES];
        xor_into(parity, &[wrong]);
        let stripe_sector = assembly.geometry.stripe_member_sector(stripe);
        disks.write(parity_member, stripe_sector, parity, idle)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "rebuilding_tests.rs"]
mod rebuilding_tests;

#[cfg(test)]
#[path = "unsynced_tests.rs"]
mod unsynced_tests;
