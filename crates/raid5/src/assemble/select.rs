//! Selects the members of an array among candidates, by their superblocks alone.

use super::{is_member, rank};
use crate::identity::time_text;
use crate::superblock::{Feature, Role, Superblock};
use pvblk_block::{Error, ErrorKind};

/// A device that says that it belongs to the array.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The user's name of the device.
    pub name: String,
    /// As on disk.
    pub superblock: Superblock,
}

/// A place whose member no candidate is, although the newest superblock counts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    pub place: usize,
    /// The member's number in the superblocks.
    pub number: u32,
}

/// Decision about each candidate, by its index in the list that was given.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Members, devices that are being rebuilt, and spares.
    pub taken: Vec<usize>,
    /// The others, with a line for the user that names the device.
    pub left_out: Vec<(usize, String)>,
    /// Members to be found yet.
    pub absent: Vec<Absent>,
}

/// Selects the devices of one array: all candidates have its UUID. `force`: stale members are taken too.
///
/// Fails if two candidates are one device or equally fresh at one place, with both names, and if none is a member.
pub fn select(candidates: &[Candidate], force: bool) -> Result<Selection, Error> {
    let mut selection = Selection::default();
    let apart = selection.leave_copies(candidates)?;
    let sb = |n: usize| &candidates[n].superblock;
    let members = apart.iter().copied().filter(|&n| is_member(sb(n)));
    let newest = members.reduce(|a, b| match rank(sb(b)) > rank(sb(a)) {
        true => b,
        false => a,
    });
    let Some(newest) = newest.map(sb) else {
        let names: Vec<&str> = candidates.iter().map(|c| c.name.as_str()).collect();
        return Err(Error::config(format!(
            "no candidate is a member of the array, there are only spares of it: {}",
            names.join(", ")
        )));
    };
    // A superblock isn't to be believed yet: there are no more places than roles.
    let places = (newest.raid_disks as usize).min(newest.roles.len());
    let mut whole: Vec<Option<usize>> = vec![None; places];
    for n in apart {
        let (name, sb) = (&candidates[n].name, sb(n));
        let place = match sb.role() {
            Role::Spare => {
                selection.taken.push(n);
                continue;
            }
            Role::Active(place) if usize::from(place) < whole.len() => usize::from(place),
            role => {
                let why = format!("{name} is left out: it has no place in the array ({role:?})");
                selection.left_out.push((n, why));
                continue;
            }
        };
        if !is_fresh(sb, newest) {
            match force {
                true => selection.taken.push(n),
                false => selection.left_out.push((n, stale(name, sb, newest))),
            }
            continue;
        }
        selection.taken.push(n);
        let is_whole = sb.recovered_sectors() == sb.size_sectors;
        match whole[place] {
            _ if !is_whole || sb.has(Feature::REPLACEMENT) => {}
            None => whole[place] = Some(n),
            Some(other) => {
                return Err(both(
                    &candidates[other].name,
                    name,
                    &format!("are both at place {place} of the array, and as fresh"),
                ));
            }
        }
    }
    selection.absent = absent(candidates, &selection, newest);
    selection.left_out.sort_unstable_by_key(|(n, _)| *n);
    Ok(selection)
}

impl Selection {
    /// Leaves out older copies of a device; returns the other candidates.
    fn leave_copies(&mut self, candidates: &[Candidate]) -> Result<Vec<usize>, Error> {
        let mut apart: Vec<usize> = Vec::new();
        for (n, candidate) in candidates.iter().enumerate() {
            let (name, sb) = (&candidate.name, &candidate.superblock);
            let is_twin = |&m: &usize| candidates[m].superblock.device_uuid == sb.device_uuid;
            let Some(at) = apart.iter().position(is_twin) else {
                apart.push(n);
                continue;
            };
            let twin = &candidates[apart[at]];
            if twin.superblock.events == sb.events {
                return Err(both(
                    &twin.name,
                    name,
                    "are the same member, or one is a copy",
                ));
            }
            let (older, newer) = match sb.events > twin.superblock.events {
                true => (std::mem::replace(&mut apart[at], n), n),
                false => (n, apart[at]),
            };
            let why = format!(
                "{} is left out: it is an older copy of {} (events {}, and {})",
                candidates[older].name,
                candidates[newer].name,
                candidates[older].superblock.events,
                candidates[newer].superblock.events,
            );
            self.left_out.push((older, why));
        }
        apart.sort_unstable();
        Ok(apart)
    }
}

/// md's rule, and the additional one of the module above.
pub(super) fn is_fresh(sb: &Superblock, newest: &Superblock) -> bool {
    is_listed(sb, newest) && sb.events.saturating_add(1) >= newest.events
}

/// True if the newest superblock gives the device the role that it says it has.
fn is_listed(sb: &Superblock, newest: &Superblock) -> bool {
    let entry = usize::try_from(sb.dev_number).ok();
    entry.and_then(|n| newest.roles.get(n)) == Some(&sb.role())
}

fn stale(name: &str, sb: &Superblock, newest: &Superblock) -> String {
    let why = match is_listed(sb, newest) {
        true => "it missed changes",
        false => "it was thrown out of the array",
    };
    format!(
        "{name} is left out, since it is stale: {why} after {} UTC (events {}, newest {})",
        time_text(sb.utime),
        sb.events,
        newest.events
    )
}

/// Places that nothing taken has whole, and whose member was seen nowhere. A member that is there and stale isn't absent: the array
/// starts without it, as if it was named in a list.
fn absent(candidates: &[Candidate], selection: &Selection, newest: &Superblock) -> Vec<Absent> {
    let taken = selection.taken.iter().map(|&n| &candidates[n].superblock);
    let is_there = |place: u16| {
        let mut whole = taken.clone().filter(|sb| is_fresh(sb, newest));
        whole
            .any(|sb| sb.role() == Role::Active(place) && sb.recovered_sectors() == sb.size_sectors)
    };
    let is_seen = |number: usize| {
        let mut all = candidates.iter().map(|c| &c.superblock);
        all.any(|sb| sb.dev_number as usize == number && is_listed(sb, newest))
    };
    let roles = || newest.roles.iter().enumerate();
    let places = 0..newest.raid_disks.min(newest.roles.len() as u32) as u16;
    let first = |place: u16| {
        let of_place = roles().filter(|(_, role)| **role == Role::Active(place));
        let mut unseen = of_place.filter(|(number, _)| !is_seen(*number));
        unseen.next().map(|(number, _)| Absent {
            place: place.into(),
            number: number as u32,
        })
    };
    places.filter(|p| !is_there(*p)).filter_map(first).collect()
}

fn both(a: &str, b: &str, what: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        format!("{a} and {b} {what}: leave one out of the candidates"),
    )
}

#[cfg(test)]
mod tests;
