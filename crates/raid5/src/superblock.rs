//! md's superblock, version 1.2: 4 KiB at 4 KiB from the start of every member (`md_p.h`, `mdp_superblock_1`).
//!
//! Reading is in two steps. [`Superblock::parse`] decides if the bytes are a superblock, as md would;
//! [`Superblock::check`] decides if the array can be served by its rules. Fields that aren't used here are
//! carried along and written back.

mod error;
mod raw;

pub use error::{Feature, SuperblockError};

use super::geometry::{Geometry, Layout};
use raw::RawSuperblock;
use std::ops::Range;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Bytes to read for a superblock.
pub const SUPER_BYTES: usize = 4096;
/// Where it is on each member (minor version 2).
pub const SUPER_SECTOR: u64 = 8;
/// `MaxSector`: no such offset. As `resync_offset` it means that all parity is right.
pub const NO_OFFSET: u64 = u64::MAX;

/// Bit 40 of `utime`: microsecond 1. md's format has 24 bits for microseconds there, and md and mdadm write zeros. It is set in superblocks that
/// are written together with a private map.
const MAP_KEPT: u64 = 1 << 40;
/// Sectors of a private map: one page.
const MAP_SECTORS: u64 = 8;

/// Bytes before the roles.
pub(super) const FIXED_BYTES: usize = 256;
/// The first four bytes, little-endian.
pub const SUPER_MAGIC: u32 = 0xa92b_4efc;
/// `(4096 - 256) / 2`: the greatest number that md reads.
const MAX_ROLES: u32 = 1920;
const CHECKSUM_AT: usize = 216;

/// Role of a device in the array (`dev_roles` in `md_p.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The member at this place.
    Active(u16),
    /// The array's journal.
    Journal,
    /// The member has failed.
    Faulty,
    /// The device has no role, or none yet.
    Spare,
    /// A number that has no meaning.
    Unknown(u16),
}

impl Role {
    fn of(number: u16) -> Role {
        match number {
            0xffff => Role::Spare,
            0xfffe => Role::Faulty,
            0xfffd => Role::Journal,
            0xff00.. => Role::Unknown(number),
            place => Role::Active(place),
        }
    }

    fn number(self) -> u16 {
        match self {
            Role::Active(number) | Role::Unknown(number) => number,
            Role::Journal => 0xfffd,
            Role::Faulty => 0xfffe,
            Role::Spare => 0xffff,
        }
    }
}

/// An array with a million updates a second has had as many events after 292,000 years.
const MOST_EVENTS: u64 = 1 << 63;

/// Metadata beside md's, on the members, of the same events as a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Nothing that counts.
    Nothing,
    /// A private map.
    Map,
    /// A private map, and sums of the blocks.
    MapAndSums,
}

/// Where a log or a bitmap is, in sectors of the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogArea {
    /// First sector of the area.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
}

/// Means by which parity is made right after a crash (mdadm's "Consistency Policy").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// All of it is calculated again.
    Resync,
    /// The write-intent bitmap at this sector. Its size follows from its own header.
    Bitmap {
        /// First sector of the bitmap on the member.
        sector: u64,
    },
    /// The partial parity log in this area.
    Ppl(LogArea),
}

/// A range that a member can't read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadBlock {
    /// First sector on the member.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
}

/// All fields of a superblock, by their names in `md_p.h` with units. Fields that md keeps only for a reshape
/// are `reshape_*`, and are carried along.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names of the fields are the header's; those that say less are commented.
pub struct Superblock {
    /// Bits of [`Feature`].
    pub feature_map: u32,
    pub set_uuid: [u8; 16],
    /// Text, then zeros: see [`Superblock::name`].
    pub set_name: [u8; 32],
    /// Seconds in the low 40 bits, microseconds above; so is `utime`.
    pub ctime: u64,
    pub level: i32,
    /// md's number: see [`Layout::from_md`].
    pub layout: u32,
    /// Sectors used on each member.
    pub size_sectors: u64,
    pub chunk_sectors: u32,
    pub raid_disks: u32,
    /// A union: see [`Superblock::policy`].
    pub bitmap_or_ppl: [u8; 4],
    pub reshape_level: u32,
    pub reshape_position: u64,
    pub reshape_delta_disks: u32,
    pub reshape_layout: u32,
    pub reshape_chunk: u32,
    pub reshape_offset: u32,
    /// Where data starts on this member.
    pub data_offset_sectors: u64,
    /// Sectors of this member for data, of which not all may be used.
    pub data_size_sectors: u64,
    /// Sectors of this member that are rebuilt; read only with [`Feature::RECOVERY_OFFSET`].
    pub recovery_offset_sectors: u64,
    /// Number of this device in `roles`; it isn't its place in the array.
    pub dev_number: u32,
    pub corrected_reads: u32,
    pub device_uuid: [u8; 16],
    /// Hints (write-mostly, failfast); carried along.
    pub devflags: u8,
    pub bblog_shift: u8,
    pub bblog_size_sectors: u16,
    /// From the superblock, signed.
    pub bblog_offset_sectors: i32,
    pub utime: u64,
    /// Counts changes of the superblock; the newest member is the one to believe.
    pub events: u64,
    /// Before this sector parity is right; [`NO_OFFSET`] if all is.
    pub resync_offset_sectors: u64,
    /// Roles by `dev_number`; its length is `max_dev`.
    pub roles: Vec<Role>,
    /// The bytes after the roles in the 4 KiB.
    pub(super) rest: Vec<u8>,
}

impl Superblock {
    /// Reads one, with the checks that md makes before it believes a word.
    pub fn parse(bytes: &[u8; SUPER_BYTES]) -> Result<Superblock, SuperblockError> {
        let (raw, after) =
            RawSuperblock::read_from_prefix(bytes).map_err(|_| SuperblockError::Short)?;
        if raw.magic.get() != SUPER_MAGIC {
            return Err(SuperblockError::Magic(raw.magic.get()));
        }
        if raw.major_version.get() != 1 {
            return Err(SuperblockError::Version(raw.major_version.get()));
        }
        let max_dev = raw.max_dev.get();
        if max_dev > MAX_ROLES {
            return Err(SuperblockError::MaxDev(max_dev));
        }
        let (found, counted) = (raw.checksum.get(), checksum(bytes, max_dev));
        if found != counted {
            return Err(SuperblockError::Checksum { found, counted });
        }
        if raw.super_offset.get() != SUPER_SECTOR {
            return Err(SuperblockError::Place(raw.super_offset.get()));
        }
        // Unknown values here mean a newer format, as in md.
        if raw.pad0.get() != 0 || raw.pad3 != [0; 32] {
            return Err(SuperblockError::Padding);
        }
        let (roles, rest) = after.split_at(2 * max_dev as usize);
        let roles = roles.as_chunks().0.iter();
        Ok(Superblock {
            roles: roles.map(|r| Role::of(u16::from_le_bytes(*r))).collect(),
            rest: rest.to_vec(),
            ..raw.fields()
        })
    }

    /// The bytes, with their checksum. md itself writes only the first [`Superblock::written_bytes`].
    pub fn encode(&self) -> [u8; SUPER_BYTES] {
        let mut bytes = [0; SUPER_BYTES];
        let max_dev = self.roles.len().min(MAX_ROLES as usize);
        let mut raw = RawSuperblock::new_zeroed();
        raw.set(self);
        raw.magic.set(SUPER_MAGIC);
        raw.major_version.set(1);
        raw.super_offset.set(SUPER_SECTOR);
        raw.max_dev.set(max_dev as u32);
        bytes[..FIXED_BYTES].copy_from_slice(raw.as_bytes());
        let (roles, rest) = bytes[FIXED_BYTES..].split_at_mut(2 * max_dev);
        for (to, role) in roles.as_chunks_mut().0.iter_mut().zip(&self.roles) {
            *to = role.number().to_le_bytes();
        }
        let kept = self.rest.len().min(rest.len());
        rest[..kept].copy_from_slice(&self.rest[..kept]);
        let sum = checksum(&bytes, max_dev as u32);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Bytes of the 4 KiB that md writes: fields and roles, in whole sectors.
    pub fn written_bytes(&self) -> usize {
        (FIXED_BYTES + 2 * self.roles.len()).next_multiple_of(512)
    }

    /// True if a bit of the feature map is set.
    pub fn has(&self, feature: Feature) -> bool {
        self.feature_map & feature.0 != 0
    }

    /// The name, usually `host:name`, as far as it is text.
    pub fn name(&self) -> String {
        let end = self.set_name.iter().position(|&b| b == 0);
        String::from_utf8_lossy(&self.set_name[..end.unwrap_or(32)]).into_owned()
    }

    /// Role of this device. A number outside of the table is a spare, as in md.
    pub fn role(&self) -> Role {
        let at = usize::try_from(self.dev_number).ok();
        at.and_then(|n| self.roles.get(n))
            .copied()
            .unwrap_or(Role::Spare)
    }

    /// True if all parity was right when this was written.
    pub fn is_clean(&self) -> bool {
        self.resync_offset_sectors == NO_OFFSET
    }

    /// Sectors of this member that are up to date: all, unless it is being recovered. For a device without a
    /// place it means nothing.
    pub fn recovered_sectors(&self) -> u64 {
        match self.has(Feature::RECOVERY_OFFSET) {
            true => self.recovery_offset_sectors.min(self.size_sectors),
            false => self.size_sectors,
        }
    }

    /// True if this member was one before, is being recovered, and lacks only what the write-intent bitmap marks.
    pub fn is_recovered_by_bitmap(&self) -> bool {
        let all = [
            Feature::RECOVERY_BITMAP,
            Feature::RECOVERY_OFFSET,
            Feature::BITMAP,
        ];
        all.into_iter().all(|f| self.has(f)) && !self.has(Feature::REPLACEMENT)
    }

    /// Gives a device a role, and makes the table longer if it ends before that device. Fails, and changes
    /// nothing, if the table can't grow because of the area after the superblock on the member.
    pub fn set_role(&mut self, number: u32, role: Role) -> Result<(), SuperblockError> {
        let count = number.saturating_add(1);
        if count as usize > self.roles.len() {
            if count > self.most_roles() {
                return Err(SuperblockError::Full(self.most_roles()));
            }
            let mut roles = self.roles.clone();
            roles.resize(count as usize, Role::Spare);
            self.set_roles(roles);
        }
        self.roles[number as usize] = role;
        Ok(())
    }

    /// Takes over a table that may be longer or shorter; the bytes after it in the 4 KiB stay in place.
    pub(super) fn set_roles(&mut self, roles: Vec<Role>) {
        let (old, new) = (2 * self.roles.len(), 2 * roles.len());
        match new.checked_sub(old) {
            Some(more) => drop(self.rest.drain(..more.min(self.rest.len()))),
            None => drop(self.rest.splice(..0, vec![0; old - new])),
        }
        self.roles = roles;
    }

    /// Most bytes that the superblock may take on its member: up to the next area there, and no more than 4
    /// KiB.
    pub(super) fn room_bytes(&self) -> usize {
        let policy = match self.policy() {
            Policy::Resync => None,
            Policy::Bitmap { sector } => Some(sector),
            Policy::Ppl(log) => Some(log.sector),
        };
        let log = self.bad_block_log().map(|log| log.sector);
        let after = [policy, log, Some(self.data_offset_sectors)];
        let after = after.into_iter().flatten().filter(|&s| s > SUPER_SECTOR);
        let next = after.min().unwrap_or(u64::MAX) - SUPER_SECTOR;
        next.min(SUPER_BYTES as u64 / 512) as usize * 512
    }

    /// Entries that the table of roles has room for.
    pub(super) fn most_roles(&self) -> u32 {
        let most = self.room_bytes().saturating_sub(FIXED_BYTES) / 2;
        (most as u32).min(MAX_ROLES)
    }

    /// Where the consistency policy's log or bitmap is. Ask [`Superblock::check`] first: it makes sure that it is on the member.
    pub fn policy(&self) -> Policy {
        let [a, b, c, d] = self.bitmap_or_ppl;
        if self.has(Feature::PPL) || self.has(Feature::MULTIPLE_PPLS) {
            return Policy::Ppl(LogArea {
                sector: relative(i64::from(i16::from_le_bytes([a, b]))),
                sectors: u64::from(u16::from_le_bytes([c, d])),
            });
        }
        match self.has(Feature::BITMAP) {
            true => Policy::Bitmap {
                sector: relative(i64::from(i32::from_le_bytes([a, b, c, d]))),
            },
            false => Policy::Resync,
        }
    }

    /// True if the array had the same consistency policy when the other was written.
    pub fn has_policy_of(&self, other: &Superblock) -> bool {
        let kind = |sb: &Superblock| std::mem::discriminant(&sb.policy());
        kind(self) == kind(other)
    }

    /// The area for the bad block log, if there is one. It is only read if [`Feature::BAD_BLOCKS`] is set: without it, md leaves
    /// there whatever was on the disk before.
    pub fn bad_block_log(&self) -> Option<LogArea> {
        let there = self.bblog_size_sectors != 0 && self.bblog_offset_sectors != 0;
        there.then(|| LogArea {
            sector: relative(i64::from(self.bblog_offset_sectors)),
            sectors: u64::from(self.bblog_size_sectors),
        })
    }

    /// The entries of a bad block log: 54 bits of sector, 10 bits of length, both in units of `bblog_shift`; all ones end it.
    pub fn bad_blocks<'a>(&self, log: &'a [u8]) -> impl Iterator<Item = BadBlock> + use<'a> {
        let shift = u32::from(self.bblog_shift);
        let entries = log.as_chunks().0.iter().map(|e| u64::from_le_bytes(*e));
        entries
            .take_while(|&e| e != u64::MAX)
            .map(move |entry| BadBlock {
                sector: (entry >> 10).checked_shl(shift).unwrap_or(u64::MAX),
                sectors: (entry & 0x3ff).checked_shl(shift).unwrap_or(u64::MAX),
            })
    }

    /// Refuses a bad block log that isn't empty. To be called with the area of [`Superblock::bad_block_log`] if
    /// [`Feature::BAD_BLOCKS`] is set.
    pub fn check_bad_blocks(&self, log: &[u8]) -> Result<(), SuperblockError> {
        match self.bad_blocks(log).find(|b| b.sectors != 0) {
            Some(bad) => Err(SuperblockError::BadBlocks(bad)),
            None => Ok(()),
        }
    }

    /// Checks if the array can be served with a device of this size, and returns its geometry. The error
    /// names everything that isn't supported.
    pub fn check(&self, device_sectors: u64) -> Result<Geometry, SuperblockError> {
        self.check_features()?;
        if self.level != 5 {
            return Err(SuperblockError::Level(self.level));
        }
        // Each update adds one.
        if self.events >= MOST_EVENTS {
            return Err(SuperblockError::Shape(format!(
                "{} events are more than an array can have had",
                self.events
            )));
        }
        let layout = Layout::from_md(self.layout).ok_or(SuperblockError::Layout {
            number: self.layout,
            name: Layout::md_name(self.layout),
        })?;
        let geometry = Geometry::new(
            self.raid_disks,
            self.chunk_sectors,
            layout,
            self.size_sectors,
        )
        .map_err(|e| SuperblockError::Shape(e.to_string()))?;
        if geometry.member_sectors() != self.size_sectors {
            return Err(SuperblockError::Shape(format!(
                "a used size of {} sectors isn't a number of chunks of {}",
                self.size_sectors, self.chunk_sectors
            )));
        }
        self.check_roles()?;
        self.check_places(device_sectors)?;
        Ok(geometry)
    }

    fn check_features(&self) -> Result<(), SuperblockError> {
        let unknown = self.feature_map & !Feature::ALL;
        if unknown != 0 {
            return Err(SuperblockError::UnknownFeatures(unknown));
        }
        let known = |f: &Feature| *f == Feature::RECOVERY_BITMAP && self.is_recovered_by_bitmap();
        let refused = Feature::REFUSED
            .into_iter()
            .find(|f| self.has(*f) && !known(f));
        if let Some(feature) = refused {
            return Err(SuperblockError::Feature(feature));
        }
        let policies = [Feature::BITMAP, Feature::PPL, Feature::MULTIPLE_PPLS];
        if policies.into_iter().filter(|f| self.has(*f)).count() > 1 {
            return Err(SuperblockError::TwoPolicies);
        }
        Ok(())
    }

    fn check_roles(&self) -> Result<(), SuperblockError> {
        // A member and the device that replaces it have the same place.
        let mut taken = [0; *Geometry::MEMBERS.end() as usize];
        for role in &self.roles {
            let place = match *role {
                Role::Active(place) if u32::from(place) < self.raid_disks => usize::from(place),
                Role::Active(number) | Role::Unknown(number) => {
                    return Err(SuperblockError::Role(number));
                }
                Role::Journal | Role::Faulty | Role::Spare => continue,
            };
            taken[place] += 1;
            if taken[place] > 2 {
                return Err(SuperblockError::RoleThrice(place as u16));
            }
        }
        Ok(())
    }

    /// Everything on the member that has a place, and that no two share one.
    fn check_places(&self, device_sectors: u64) -> Result<(), SuperblockError> {
        // No device is longer than offsets in files can say; so an end that doesn't fit into 64 bits is behind all.
        let device_sectors = device_sectors.min(i64::MAX as u64 / 512);
        let data_end = self.data_offset_sectors.checked_add(self.data_size_sectors);
        if data_end.is_none_or(|end| end > device_sectors) {
            return Err(SuperblockError::TooSmall {
                needed: data_end.unwrap_or(u64::MAX),
                device: device_sectors,
            });
        }
        if self.size_sectors > self.data_size_sectors {
            return Err(SuperblockError::Places("used size", "room for data"));
        }
        let area = |log: LogArea| log.sector..log.sector.saturating_add(log.sectors);
        let header = SUPER_SECTOR..SUPER_SECTOR + self.written_bytes() as u64 / 512;
        let data = area(LogArea {
            sector: self.data_offset_sectors,
            sectors: self.data_size_sectors,
        });
        let mut places: Vec<(&'static str, Range<u64>)> =
            vec![("superblock", header), ("data", data)];
        match self.policy() {
            Policy::Resync => {}
            // The bitmap's own header has its size, and at least one sector is there; the reader of the
            // bitmap checks the rest.
            Policy::Bitmap { sector } => places.push(("bitmap", sector..sector.saturating_add(1))),
            Policy::Ppl(log) if log.sectors < 16 => return Err(SuperblockError::SmallPpl(log)),
            Policy::Ppl(log) => places.push(("partial parity log", area(log))),
        }
        match self.bad_block_log() {
            Some(log) if self.has(Feature::BAD_BLOCKS) && log.sectors > 8 => {
                return Err(SuperblockError::BadBlockLog);
            }
            None if self.has(Feature::BAD_BLOCKS) => return Err(SuperblockError::BadBlockLog),
            Some(log) => places.push(("bad block log", area(log))),
            None => {}
        }
        for (n, (name, place)) in places.iter().enumerate() {
            if place.end > device_sectors {
                return Err(SuperblockError::Places(name, "end of the device"));
            }
            let met = places[..n]
                .iter()
                .find(|(_, p)| p.start < place.end && place.start < p.end);
            if let Some((other, _)) = met {
                return Err(SuperblockError::Places(name, other));
            }
        }
        Ok(())
    }

    /// Sets the time of the last update, in seconds since 1970. `kept`: a private map with the same events is written before this superblock.
    pub fn set_updated(&mut self, secs: u64, kept: Kept) {
        let kept = match kept {
            Kept::Nothing => 0,
            Kept::Map => 1,
            Kept::MapAndSums => 2,
        };
        self.utime = (secs & (MAP_KEPT - 1)) | (kept * MAP_KEPT);
    }

    /// True if this superblock was written with a private map. Others that write to the array don't say so: their events alone don't tell,
    /// since md takes its last event back when an array becomes clean.
    pub fn keeps_map(&self) -> bool {
        self.kept() != Kept::Nothing
    }

    /// The private map, and the sums, that this superblock was written with.
    pub fn kept(&self) -> Kept {
        match self.utime / MAP_KEPT {
            0 => Kept::Nothing,
            2 => Kept::MapAndSums,
            _ => Kept::Map,
        }
    }

    /// Where the private map is or would be, first sector and number: the page before the data. `None`: the array has a write-intent bitmap, or
    /// the page is used.
    pub fn private_map(&self) -> Option<LogArea> {
        let sector = self.data_offset_sectors.checked_sub(MAP_SECTORS)?;
        let map = LogArea {
            sector,
            sectors: MAP_SECTORS,
        };
        let has_bitmap = matches!(self.policy(), Policy::Bitmap { .. });
        let is_aligned = sector.is_multiple_of(MAP_SECTORS);
        (!has_bitmap && is_aligned && self.is_free(sector, MAP_SECTORS)).then_some(map)
    }

    /// True if no metadata of md lies in these sectors before the data, but for a write-intent bitmap.
    pub(super) fn is_free(&self, sector: u64, sectors: u64) -> bool {
        let log = match self.policy() {
            Policy::Ppl(log) => Some(log),
            Policy::Resync | Policy::Bitmap { .. } => None,
        };
        // The first sectors are the superblock's, and a boot loader's.
        let head = LogArea {
            sector: 0,
            sectors: SUPER_SECTOR + SUPER_BYTES as u64 / 512,
        };
        let others = [Some(head), log, self.bad_block_log()];
        let meets = |other: LogArea| {
            let end = other.sector.saturating_add(other.sectors);
            other.sector < sector + sectors && sector < end
        };
        !others.into_iter().flatten().any(meets)
    }

    /// First sector of the write-intent bitmap, or else of the private map.
    pub(super) fn bitmap_sector(&self) -> Option<u64> {
        match self.policy() {
            Policy::Bitmap { sector } => Some(sector),
            _ => self.private_map().map(|map| map.sector),
        }
    }

    /// Sectors that the bitmap, or the private map, may have at most: up to the next area.
    pub fn bitmap_room_sectors(&self) -> u64 {
        let Policy::Bitmap { sector } = self.policy() else {
            return self.private_map().map_or(0, |map| map.sectors);
        };
        let next = [
            Some(self.data_offset_sectors),
            self.bad_block_log().map(|log| log.sector),
        ];
        let next = next.into_iter().flatten().filter(|&s| s > sector).min();
        next.map_or(0, |end| end - sector)
    }
}

/// Offsets of logs count from the superblock. One before the device becomes one behind every device, which no check accepts.
fn relative(offset_sectors: i64) -> u64 {
    SUPER_SECTOR
        .checked_add_signed(offset_sectors)
        .unwrap_or(u64::MAX)
}

/// The sum of all 32-bit words with the checksum's own taken for zero, folded once; a half word at the end counts as one.
fn checksum(bytes: &[u8; SUPER_BYTES], max_dev: u32) -> u32 {
    let len = FIXED_BYTES + 2 * max_dev as usize;
    let (words, half) = bytes[..len].as_chunks();
    let mut sum: u64 = words
        .iter()
        .map(|w| u64::from(u32::from_le_bytes(*w)))
        .sum();
    if let [a, b] = *half {
        sum += u64::from(u16::from_le_bytes([a, b]));
    }
    let at = CHECKSUM_AT;
    let own = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    sum -= u64::from(u32::from_le_bytes(own));
    (sum as u32).wrapping_add((sum >> 32) as u32)
}

#[cfg(test)]
mod tests;
