//! Between assembling and serving: parity is made right, logs are emptied, superblocks say how things are.
//!
//! What a dirty array needs follows from its consistency policy:
//!
//! | policy | all members there | one missing |
//! |---|---|---|
//! | partial parity log | what the logs name; all of it if no log names anything, since then parity may never have been made | what the logs name; blocks of the missing member that were being written are lost |
//! | bitmap | what the bitmap marks | refused, unless forced |
//! | resync | all of it | refused, unless forced |
//!
//! The order keeps an array that is cut off anywhere startable: repairs are flushed, then superblocks say clean, and only then are the logs
//! emptied.

mod log;
mod superblocks;

pub use superblocks::write_superblocks;

use super::assemble::{AssembleOptions, Assembly};
use super::bitmap::{PAGE_BYTES, WriteIntent};
use super::blocking::{Blocking, Idle};
use super::geometry::{STRIPE_BYTES, STRIPE_SECTORS};
use super::parity::xor_into;
use super::superblock::Policy;
use pvblk_block::Error;
use std::ops::Range;

/// Sectors of each member that a resync handles at a time, if the members take as much.
const WINDOW_SECTORS: u64 = 1024;

/// Blocking access to all members that are there, by place.
pub(super) struct Disks {
    disks: Vec<Option<Blocking>>,
    data_offsets: Vec<u64>,
}

impl Disks {
    pub(super) fn open(assembly: &Assembly) -> Result<Disks, Error> {
        let mut disks = Vec::new();
        let mut data_offsets = Vec::new();
        for member in &assembly.members {
            disks.push(match member {
                Some(m) => Some(Blocking::open(&m.device)?),
                None => None,
            });
            let offset = member.as_ref().map(|m| m.superblock.data_offset_sectors);
            data_offsets.push(offset.unwrap_or(0));
        }
        Ok(Disks {
            disks,
            data_offsets,
        })
    }

    /// The member at a place. It must be there.
    pub(super) fn at(&mut self, place: usize) -> Result<&mut Blocking, Error> {
        let disk = self.disks.get_mut(place).and_then(Option::as_mut);
        disk.ok_or_else(|| Error::config(format!("no member at place {place}")))
    }

    pub(super) fn drop_at(&mut self, place: usize) {
        self.disks[place] = None;
    }

    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Blocking> {
        self.disks.iter_mut().flatten()
    }

    /// Reads from a member's data.
    pub(super) fn read(
        &mut self,
        place: usize,
        sector: u64,
        to: &mut [u8],
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let offset = self.data_offsets[place];
        self.at(place)?.read(offset + sector, to, idle)
    }

    /// Writes to a member's data; see [`Disks::flush`].
    pub(super) fn write(
        &mut self,
        place: usize,
        sector: u64,
        from: &[u8],
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let offset = self.data_offsets[place];
        self.at(place)?.write_cached(offset + sector, from, idle)
    }

    pub(super) fn flush(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        self.all().try_for_each(|disk| disk.flush(idle))
    }
}

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

/// Makes an array ready to be served: parity right, superblocks clean, of one event, and without the member that is missing, logs empty.
///
/// Fails if that can't be had, with one line; what was written until then does no harm. `progress` is told sectors of the members that are
/// done, and of how many, while parity is calculated. Times in superblocks stay as they are.
pub fn prepare(
    assembly: &mut Assembly,
    options: &AssembleOptions,
    progress: &mut dyn FnMut(u64, u64),
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    for member in assembly.present() {
        if member.device.limits().read_only {
            return Err(Error::config(format!(
                "{} is read-only: an array writes to all of its members",
                member.name
            )));
        }
    }
    let mut disks = Disks::open(assembly)?;
    if assembly.dirty {
        repair(assembly, options, &mut disks, progress, idle)?;
        disks.flush(idle)?;
    }
    // The last start or stop may have been cut off between two superblocks. And a member that is missing becomes stale now: what
    // is written from here on it doesn't have.
    let newest = assembly.events();
    let differ = assembly.present().any(|m| m.superblock.events != newest);
    if assembly.dirty || differ || superblocks::names_missing(assembly) {
        let utime = assembly.newest().utime;
        write_superblocks(assembly, true, utime, idle)?;
    }
    if let Policy::Ppl(_) = assembly.policy() {
        log::empty(assembly, &mut disks, idle)?;
    }
    Ok(())
}

fn repair(
    assembly: &mut Assembly,
    options: &AssembleOptions,
    disks: &mut Disks,
    progress: &mut dyn FnMut(u64, u64),
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let in_sync = assembly.in_sync_sectors();
    let rest = in_sync..assembly.geometry.member_sectors();
    let mut ranges: Vec<Range<u64>> = std::iter::once(rest).collect();
    let mut logged = false;
    match assembly.policy() {
        Policy::Resync => {}
        Policy::Bitmap { .. } => ranges = marked(assembly, disks, in_sync, idle)?.unwrap_or(ranges),
        // An offset says that parity was never made behind it. Logs only name what was written.
        Policy::Ppl(_) => {
            let found = log::recover(assembly, disks, idle)?;
            assembly.notes.extend(found.notes);
            logged = in_sync == 0;
            if logged && found.entries > 0 {
                ranges.clear();
            }
        }
    }
    let Some(missing) = assembly.failed() else {
        return resync(assembly, disks, &ranges, progress, idle);
    };
    if !logged && !options.force {
        return Err(Error::config(format!(
            "the array wasn't stopped in order, it has no member at place {missing}, and no log tells what was being written: what is calculated for the \
             missing member may be wrong; name that member, or start with force"
        )));
    }
    Ok(())
}

/// What the bitmap marks, or `None` if none can be believed.
fn marked(
    assembly: &mut Assembly,
    disks: &mut Disks,
    in_sync_sectors: u64,
    idle: &mut Idle<'_>,
) -> Result<Option<Vec<Range<u64>>>, Error> {
    // The array was degraded, or is: then its bits say nothing of what is in sync.
    let in_sync = match assembly.failed() {
        None => in_sync_sectors,
        Some(_) => 0,
    };
    for place in 0..assembly.members.len() {
        let Some(header) = superblocks::bitmap_header(assembly, place, disks, idle)? else {
            continue;
        };
        let Some(member) = &assembly.members[place] else {
            continue;
        };
        let Policy::Bitmap { sector } = member.superblock.policy() else {
            continue;
        };
        // Any will do: a bit is on all members before a write starts.
        if header.is_current(member.superblock.events) {
            let mut area = vec![0; header.area_bytes()];
            disks.at(place)?.read(sector, &mut area, idle)?;
            debug_assert!(area.len().is_multiple_of(PAGE_BYTES));
            let bitmap = WriteIntent::load(&area, true, in_sync)?;
            return Ok(Some(bitmap.dirty_ranges().collect()));
        }
    }
    assembly
        .notes
        .push("no bitmap is current: all parity is calculated".into());
    Ok(None)
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
    let window = disks.all().map(|d| d.window_bytes() as u64 / 512).min();
    let window = window.unwrap_or(0).min(WINDOW_SECTORS);
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
    let offsets = disks.data_offsets.clone();
    for (disk, offset) in disks.all().zip(offsets) {
        disk.begin_read(offset + sector, bytes)?;
    }
    // Parity included, their XOR is zero where parity is right.
    let mut sum = vec![0; bytes];
    let mut data = Vec::with_capacity(assembly.geometry.members());
    for disk in disks.all() {
        let mut one = vec![0; bytes];
        disk.finish_read(&mut one, idle)?;
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
