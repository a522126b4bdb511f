//! Superblocks of a whole array, and the bitmap that goes with them.

use super::super::assemble::{Assembly, Member};
use super::super::blocking::{Blocking, Idle};
use super::super::superblock::{Feature, NO_OFFSET, Policy, Role, SUPER_SECTOR, Superblock};
use super::bitmap::{renew_bitmap, write_bitmap};
use super::{At, Disks};
use pvblk_block::Error;

/// Writes the superblocks of all members that are there, and of the one that is being recovered: one event
/// later, clean or dirty, with the time `now_secs` (since 1970). All of them are on stable storage when this
/// returns, and the bitmap, if there is one, was before.
///
/// Before a superblock says clean, all writes are flushed. A member that can't be written to is marked as
/// failed, as long as it is the only one that is missing: then the others are written (again) to say so. A
/// device that is being recovered is dropped like that in any case.
///
/// The superblocks list a missing member as faulty. When they begin to do so they end up two events ahead of
/// it, since md takes members that are one behind. They go there one event after the other, since a cut must
/// leave no other member two behind.
///
/// An unfinished resync ([`Assembly::unsynced`]) keeps an array that is stopped in order from being clean:
/// the superblocks hold the sector where it begins, and the next start goes on there. In a dirty array they
/// do so only if there is a partial parity log, because otherwise the next start would look at the log alone.
/// A bitmap marks these sectors itself, and without either all sectors are resynchronised.
///
/// The bitmap is [`Assembly::bitmap`]. In an array that becomes clean and isn't degraded only the bits of
/// sectors that are to be resynchronised stay. Without it the marked sectors aren't known, so all bits are
/// set, or none if the array becomes clean, isn't degraded and has nothing to be resynchronised.
pub fn write_superblocks(
    assembly: &mut Assembly,
    clean: bool,
    now_secs: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let mut disks = Disks::open(assembly)?;
    let says = if clean { Says::CleanEnd } else { Says::Dirty };
    write_superblocks_on(assembly, &mut disks, says, now_secs, idle)
}

/// The state of parity that superblocks tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Says {
    /// It may be wrong.
    Dirty,
    /// Nothing was written since they last said that it is right.
    StillClean,
    /// The array ends in order: members are flushed, and bits that aren't needed are cleared.
    CleanEnd,
}

/// The same, on queues that are open.
pub(in super::super) fn write_superblocks_on(
    assembly: &mut Assembly,
    disks: &mut Disks,
    says: Says,
    now_secs: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let newest = assembly.events();
    // Those that lag behind come first.
    let mut events = newest + u64::from(!differ(assembly));
    // At least those that an earlier try owes: it may have failed after a device was left out.
    let mut last = (newest + 1 + u64::from(names_missing(assembly))).max(assembly.owed_events);
    assembly.owed_events = last;
    while events <= last {
        match write_all(assembly, disks, says, events, now_secs, idle) {
            Ok(()) => events += 1,
            Err(Failure { at, error }) => {
                throw_out(assembly, disks, at, error).inspect_err(|_| {
                    // Tried again, the others must not get further ahead of the one that failed: two events are too many.
                    take_back(assembly, newest.max(events - 1));
                })?;
                // The member may have these events, although it returned an error.
                last = last.max(events + 2);
                assembly.owed_events = last;
            }
        }
    }
    assembly.dirty = says == Says::Dirty;
    Ok(())
}

/// The next superblocks come after these events.
fn take_back(assembly: &mut Assembly, events: u64) {
    for at in At::all(assembly) {
        if let Some(member) = at.of_mut(assembly) {
            member.superblock.events = events.min(member.superblock.events);
        }
    }
}

/// Writes superblocks that say how far a rebuild or a resync is, one event later, clean or dirty as they were. Returns the devices that failed that: they stay members,
/// one event behind, which counts as up to date.
pub(in super::super) fn write_progress(
    assembly: &mut Assembly,
    disks: &mut Disks,
    now_secs: u64,
    idle: &mut Idle<'_>,
) -> Result<Vec<At>, Error> {
    let all = At::all(assembly);
    let events = assembly.events() + 1;
    // First: a bitmap is never older than the superblocks.
    let mut failed = renew_bitmap(assembly, disks, events, idle)?;
    renew(assembly, &all, !assembly.dirty, events, now_secs);
    let well = all.into_iter().filter(|at| !failed.contains(at)).collect();
    for (at, error) in write_each(assembly, disks, well, idle)? {
        tracing::warn!("raid5: superblock: {error}");
        failed.push(at);
    }
    Ok(failed)
}

/// True if the superblocks have different events.
pub(super) fn differ(assembly: &Assembly) -> bool {
    let newest = assembly.events();
    assembly.superblocks().any(|s| s.events != newest)
}

/// A device that could not be written, and why.
pub(super) struct Failure {
    /// `None`: none is to blame.
    pub at: Option<At>,
    pub error: Error,
}

fn write_all(
    assembly: &mut Assembly,
    disks: &mut Disks,
    says: Says,
    events: u64,
    now_secs: u64,
    idle: &mut Idle<'_>,
) -> Result<(), Failure> {
    let all = At::all(assembly);
    let ends = says == Says::CleanEnd;
    if ends {
        each(&all, disks, |_, disk| disk.flush(idle))?;
    }
    write_bitmap(assembly, disks, ends, events, idle)?;
    renew(assembly, &all, says != Says::Dirty, events, now_secs);
    first_failure(write_each(assembly, disks, all, idle))
}

/// Writes the superblocks of these devices side by side; returns those that failed that.
fn write_each(
    assembly: &Assembly,
    disks: &mut Disks,
    all: Vec<At>,
    idle: &mut Idle<'_>,
) -> Result<Vec<(At, Error)>, Error> {
    let mut encoded = Vec::new();
    for at in all {
        let Some(member) = at.of(assembly) else {
            continue;
        };
        encoded.push((at, as_written(&member.superblock, disks.at(at)?)));
    }
    let writes: Vec<_> = encoded
        .iter()
        .map(|(at, bytes)| (*at, SUPER_SECTOR, bytes.as_slice()))
        .collect();
    disks.write_each(&writes, idle)
}

/// The first device that failed, if one did.
pub(super) fn first_failure(failed: Result<Vec<(At, Error)>, Error>) -> Result<(), Failure> {
    let failed = failed.map_err(|error| Failure { at: None, error })?;
    match failed.into_iter().next() {
        Some((at, error)) => Err(Failure {
            at: Some(at),
            error,
        }),
        None => Ok(()),
    }
}

/// The superblocks of these devices become those that are to be written.
fn renew(assembly: &mut Assembly, all: &[At], clean: bool, events: u64, now_secs: u64) {
    let (roles, _) = roles(assembly);
    let offset = resync_offset(assembly, clean);
    let kept = assembly.kept();
    for &at in all {
        settle_features(assembly, at);
        let Some(member) = at.of_mut(assembly) else {
            continue;
        };
        let sb = &mut member.superblock;
        sb.events = events;
        sb.set_updated(now_secs, kept);
        sb.resync_offset_sectors = offset;
        sb.set_roles(roles.clone());
    }
}

/// Writes a superblock as it is.
pub(super) fn write_one(
    sb: &Superblock,
    disk: &mut Blocking,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    disk.write(SUPER_SECTOR, &as_written(sb, disk), idle)
}

/// The bytes of a superblock that are written: no more than it takes, in whole units of the disk.
fn as_written(sb: &Superblock, disk: &Blocking) -> Vec<u8> {
    let bytes = sb.written_bytes().next_multiple_of(disk.unit_bytes());
    sb.encode()[..bytes].to_vec()
}

/// Where the next start is to go on to make parity right, as superblocks have it.
fn resync_offset(assembly: &Assembly, clean: bool) -> u64 {
    let rest = assembly.unsynced.first().map(|range| range.start);
    debug_assert!(rest != Some(0), "the first stripe is made right at once");
    match (assembly.policy(), clean) {
        (_, true) => rest.unwrap_or(NO_OFFSET),
        (Policy::Ppl(_), false) => rest.unwrap_or(0),
        _ => 0,
    }
}

/// Makes the superblock say whether the device is a member, is being rebuilt, or is to replace one.
pub(super) fn settle_features(assembly: &mut Assembly, at: At) {
    let (rebuilt, replaces) = (Feature::RECOVERY_OFFSET.0, Feature::REPLACEMENT.0);
    let by_bitmap = Feature::RECOVERY_BITMAP.0;
    match (at, &mut assembly.incoming) {
        (At::Member(place), _) => {
            if let Some(member) = &mut assembly.members[place] {
                member.superblock.feature_map &= !(rebuilt | replaces | by_bitmap);
            }
        }
        (At::Incoming, Some(incoming)) => {
            let sb = &mut incoming.member.superblock;
            sb.recovery_offset_sectors = incoming.recovered_sectors;
            sb.feature_map |= rebuilt | replaces;
            if assembly.members[incoming.place].is_none() {
                sb.feature_map &= !replaces;
            }
        }
        (At::Incoming, None) => {}
    }
}

fn each(
    all: &[At],
    disks: &mut Disks,
    mut act: impl FnMut(At, &mut Blocking) -> Result<(), Error>,
) -> Result<(), Failure> {
    for &at in all {
        let disk = disks.at(at).map_err(|error| Failure { at: None, error })?;
        act(at, disk).map_err(|error| Failure {
            at: (!disk.is_ended()).then_some(at),
            error,
        })?;
    }
    Ok(())
}

/// Goes on without a device, or fails with its error if that can't be.
pub(super) fn throw_out(
    assembly: &mut Assembly,
    disks: &mut Disks,
    at: Option<At>,
    error: Error,
) -> Result<(), Error> {
    let gone = match at {
        Some(At::Member(place)) if assembly.failed().is_none() => assembly.members[place].take(),
        Some(At::Incoming) => assembly.incoming.take().map(|i| i.member),
        _ => None,
    };
    let (Some(at), Some(member)) = (at, gone) else {
        return Err(error);
    };
    assembly
        .notes
        .push(format!("{} is thrown out: {error}", member.name));
    disks.drop_at(at);
    assembly.thrown_out.push((at, member));
    Ok(())
}

/// The table of roles as it is to be, and whether it calls a member faulty that the one on disk didn't.
fn roles(assembly: &Assembly) -> (Vec<Role>, bool) {
    let mut roles = assembly.newest().roles.clone();
    // Both the member and the device that replaces it have the place.
    let placed = At::all(assembly).into_iter().filter_map(|at| {
        let place = match at {
            At::Member(place) => place,
            At::Incoming => assembly.incoming.as_ref()?.place,
        };
        Some((at.of(assembly)?.number(), Role::Active(place as u16)))
    });
    let placed: Vec<(usize, Role)> = placed.collect();
    for (number, entry) in roles.iter_mut().enumerate() {
        if matches!(entry, Role::Active(_)) && !placed.contains(&(number, *entry)) {
            *entry = Role::Faulty;
        }
    }
    // By force, a member may be back that the table calls faulty. And one that is being rebuilt was a spare.
    for (number, role) in placed {
        if number >= roles.len() && number < assembly.newest().most_roles() as usize {
            roles.resize(number + 1, Role::Spare);
        }
        if let Some(entry) = roles.get_mut(number) {
            *entry = role;
        }
    }
    let on_disk = &assembly.newest().roles;
    let mut pairs = roles.iter().zip(on_disk);
    let news = pairs.any(|(new, old)| *new == Role::Faulty && *old != Role::Faulty);
    (roles, news)
}

/// True if the superblocks on disk still list a member that isn't there.
pub(in super::super) fn names_missing(assembly: &Assembly) -> bool {
    roles(assembly).1
}

impl Member {
    /// Its number in the table of roles.
    fn number(&self) -> usize {
        self.superblock.dev_number as usize
    }
}
