//! Chooses the device for each place.

use super::{Incoming, Member, check, places};
use crate::geometry::{Geometry, STRIPE_SECTORS};
use crate::superblock::{Feature, Role, Superblock, SuperblockError};
use crate::{Blocking, Idle};
use pvblk_block::{Error, ErrorKind};
use std::cmp::Reverse;

/// Devices on their way to places.
pub(super) struct Choice<'a> {
    pub members: Vec<Option<Member>>,
    pub incoming: Option<Incoming>,
    pub spares: Vec<Member>,
    pub notes: Vec<String>,
    /// Stale members were taken.
    pub guessed: bool,
    /// Fresh, but not whole, or to replace another; with their places.
    rebuilt: Vec<(usize, Member)>,
    stale: Vec<(usize, Member)>,
    /// The superblock to believe.
    newest: &'a Superblock,
    geometry: Geometry,
}

impl<'a> Choice<'a> {
    pub fn new(geometry: Geometry, newest: &'a Superblock) -> Choice<'a> {
        let none = std::iter::repeat_with(|| None);
        Choice {
            members: none.take(geometry.members()).collect(),
            incoming: None,
            spares: Vec::new(),
            notes: Vec::new(),
            guessed: false,
            rebuilt: Vec::new(),
            stale: Vec::new(),
            newest,
            geometry,
        }
    }

    pub fn add(&mut self, member: Member) -> Result<(), Error> {
        let (name, sb) = (&member.name, &member.superblock);
        let place = match sb.role() {
            Role::Active(place) if usize::from(place) < self.members.len() => usize::from(place),
            Role::Spare => {
                self.add_spare(member);
                return Ok(());
            }
            role => {
                self.notes
                    .push(format!("{name} has no place in the array ({role:?})"));
                self.spares.push(member);
                return Ok(());
            }
        };
        let events = format!("events {}, newest {}", sb.events, self.newest.events);
        let thrown_out = self.entry(sb.dev_number) != Some(sb.role());
        if thrown_out || sb.events.saturating_add(1) < self.newest.events {
            self.notes.push(match thrown_out {
                true => format!(
                    "{name} is stale ({events}): it was thrown out of the array; add it to have it rebuilt"
                ),
                false => format!("{name} is stale ({events}); add it to have it rebuilt"),
            });
            // Half of a member isn't one, whatever is insisted on.
            if sb.recovered_sectors() == sb.size_sectors {
                self.stale.push((place, member));
            }
        } else if sb.recovered_sectors() < sb.size_sectors || sb.has(Feature::REPLACEMENT) {
            self.rebuilt.push((place, member));
        } else if let Some(other) = &self.members[place] {
            return Err(Error::config(format!(
                "{} and {name} are both at place {place} of the array: leave out the one that is a copy",
                other.name
            )));
        } else {
            self.members[place] = Some(member);
        }
        Ok(())
    }

    fn add_spare(&mut self, member: Member) {
        let (name, number) = (&member.name, member.superblock.dev_number);
        let twin = |m: &&Member| m.superblock.dev_number == number;
        match (self.entry(number), self.spares.iter().find(twin)) {
            (None | Some(Role::Spare), None) => {
                self.notes.push(format!("{name} is a spare"));
                self.spares.push(member);
            }
            (_, Some(other)) => self.notes.push(format!(
                "{name} is left out: it is a spare with the same number as {}; add it again",
                other.name
            )),
            (Some(role), None) => self.notes.push(format!(
                "{name} is left out: it says that it is a spare, and the array that its number is another's ({role:?}); add it again"
            )),
        }
    }

    /// The role that the newest superblock gives a device, by its number.
    fn entry(&self, number: u32) -> Option<Role> {
        let number = usize::try_from(number).ok();
        number.and_then(|n| self.newest.roles.get(n)).copied()
    }

    /// Gives each place that is empty to a replacement that has all the sectors: as md does, it is the member then.
    pub fn take_replacements(&mut self) {
        let (mut whole, rebuilt) = (Vec::new(), std::mem::take(&mut self.rebuilt));
        for (place, member) in rebuilt {
            let sb = &member.superblock;
            match sb.recovered_sectors() == sb.size_sectors && self.members[place].is_none() {
                true => {
                    self.notes.push(format!(
                        "{} takes the place of the member that it replaces, since that isn't there",
                        member.name
                    ));
                    self.members[place] = Some(member);
                }
                false => whole.push((place, member)),
            }
        }
        self.rebuilt = whole;
    }

    /// Fills places with stale members, the newest first, until one place at most is empty.
    pub fn take_stale(&mut self) {
        self.stale.sort_by_key(|(_, m)| m.superblock.events);
        let empty = |members: &[Option<Member>]| members.iter().filter(|m| m.is_none()).count();
        while empty(&self.members) > 1 {
            let Some((place, member)) = self.stale.pop() else {
                break;
            };
            if self.members[place].is_some() {
                continue;
            }
            self.notes.push(format!(
                "{} is taken by force (events {}, newest {}): what it missed is lost",
                member.name, member.superblock.events, self.newest.events
            ));
            self.members[place] = Some(member);
            self.guessed = true;
        }
    }

    /// Chooses the member that is being rebuilt, when all others have their places.
    pub fn take_incoming(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        let mut rebuilt = std::mem::take(&mut self.rebuilt);
        // The device that makes the array complete comes first, then the one with most data.
        rebuilt.sort_by_key(|(place, member)| {
            let has = member.superblock.recovered_sectors();
            (self.members[*place].is_some(), Reverse(has))
        });
        for (place, member) in rebuilt {
            let (name, sb) = (&member.name, &member.superblock);
            let (has, of) = (sb.recovered_sectors(), sb.size_sectors);
            let has = has - has % STRIPE_SECTORS;
            let replaces = sb.has(Feature::REPLACEMENT);
            let other = self.members[place].as_ref();
            if let Some(other) = other.filter(|o| o.superblock.dev_number == sb.dev_number) {
                return Err(Error::config(format!(
                    "{} and {name} have the same number in the array, {}: leave out the one that is a copy",
                    other.name, sb.dev_number
                )));
            }
            let problem = match (other, &self.incoming) {
                (Some(other), _) if !replaces => {
                    Some(format!("{} has place {place} of the array", other.name))
                }
                (_, Some(first)) => Some(format!("{} comes first", first.member.name)),
                _ => self.problem(&member, idle)?,
            };
            if let Some(why) = problem {
                self.notes.push(format!(
                    "{name} was being rebuilt, {has} of {of} sectors are, and is left out: {why}"
                ));
                self.spares.push(member);
                continue;
            }
            self.notes.push(match other {
                None if replaces => format!(
                    "{name} was to replace a member that isn't there, and is rebuilt instead: {has} of {of} sectors are"
                ),
                None => format!("{name} is being rebuilt: {has} of {of} sectors are"),
                Some(other) => format!(
                    "{name} is to replace {}: {has} of {of} sectors are copied",
                    other.name
                ),
            });
            self.incoming = Some(Incoming {
                place,
                member,
                recovered_sectors: has,
            });
        }
        Ok(())
    }

    /// Leaves out spares that can't be used, and notes the one that will be.
    pub fn check_spares(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        for spare in std::mem::take(&mut self.spares) {
            let problem = match spare.is_spare() {
                true => self.problem(&spare, idle)?,
                false => None,
            };
            match problem {
                Some(why) => self.notes.push(format!(
                    "{} is left out, since it can't be a spare: {why}",
                    spare.name
                )),
                None => self.spares.push(spare),
            }
        }
        let empty = places(&self.members);
        if empty.is_empty() {
            return Ok(());
        }
        self.notes
            .push(format!("the array is degraded: no member at place {empty}"));
        let mut spares = self.spares.iter().filter(|m| m.is_spare());
        if let (None, Some(spare)) = (&self.incoming, spares.next()) {
            self.notes
                .push(format!("{} will be rebuilt for place {empty}", spare.name));
        }
        Ok(())
    }

    /// Why a device that the array can do without can't be used; `None` if it can.
    fn problem(&self, member: &Member, idle: &mut Idle<'_>) -> Result<Option<String>, Error> {
        let sb = &member.superblock;
        match sb.check(member.device.capacity_sectors()) {
            Err(e) => return Ok(Some(e.to_string())),
            Ok(geometry) if geometry != self.geometry || !sb.has_policy_of(self.newest) => {
                return Ok(Some("it disagrees about the array's shape".into()));
            }
            Ok(_) => {}
        }
        let mut members = self.members.iter().flatten();
        if members.any(|m| sb.dev_number >= m.superblock.most_roles()) {
            let number = sb.dev_number;
            return Ok(Some(format!("no room for its number {number} on others")));
        }
        Ok(bad_blocks(member, idle)?.map(|e| e.to_string()))
    }

    /// Refuses members that disagree with the newest superblock, which is of the device with that name.
    pub fn check_members(&self, newest_name: &str, idle: &mut Idle<'_>) -> Result<(), Error> {
        for member in self.members.iter().flatten() {
            let sb = &member.superblock;
            if check(member)? != self.geometry || !sb.has_policy_of(self.newest) {
                return Err(Error::config(format!(
                    "{} and {newest_name} disagree about the array's shape; if mdadm changes it, let that finish",
                    member.name
                )));
            }
            if let Some(e) = bad_blocks(member, idle)? {
                return Err(Error::caused(ErrorKind::Config, &member.name, e));
            }
        }
        Ok(())
    }
}

/// The reason why a member can't be used because of its bad block log.
fn bad_blocks(member: &Member, idle: &mut Idle<'_>) -> Result<Option<SuperblockError>, Error> {
    let sb = &member.superblock;
    let Some(log) = sb.bad_block_log().filter(|_| sb.has(Feature::BAD_BLOCKS)) else {
        return Ok(None);
    };
    let mut bytes = vec![0; log.sectors as usize * 512];
    Blocking::open(&member.device)?.read(log.sector, &mut bytes, idle)?;
    Ok(sb.check_bad_blocks(&bytes).err())
}
