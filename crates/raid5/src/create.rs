//! Superblocks of a new array, as `mdadm --create --metadata=1.2 --level=5` makes them.
//!
//! Where it differs from mdadm: all members are active from the start. mdadm makes the last one a spare and rebuilds it, unless
//! told `--assume-clean` or `--force`; here [`NewArray::clean`] is the former (new sparse files are all zeros, and zeros
//! have right parity) and its absence the latter. The write-intent bitmap of a clean array is all clear, where mdadm sets
//! every bit. Random numbers and the time come from the caller.

use super::bitmap::BitmapHeader;
use super::geometry::{Geometry, Layout};
use super::sums::sums_sectors;
use super::superblock::{
    FIXED_BYTES, Feature, NO_OFFSET, Role, SUPER_BYTES, Superblock, SuperblockError,
};
use pvblk_block::Error;

/// The bitmap, the log, or the room for a later bitmap starts 4 KiB after the superblock.
const AFTER_SUPER_SECTORS: u64 = 8;
/// Size of a partial parity log area by mdadm: 1 MiB, for several logs in turn.
const PPL_AREA_SECTORS: u64 = 2048;
/// Size of a bad block log by mdadm.
const BAD_BLOCK_SECTORS: u64 = 8;
/// Data starts at a multiple of this: 1 MiB.
const ALIGN_SECTORS: u64 = 2048;
/// Seconds between sweeps of the bitmap, mdadm's default.
const SWEEP_S: u32 = 5;

/// The means by which a new array survives a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// All parity is calculated again after a crash.
    Resync,
    /// With a write-intent bitmap.
    Bitmap,
    /// With a partial parity log, which closes the write hole.
    Ppl,
}

/// Description of a new array.
#[derive(Clone, Debug)]
pub struct NewArray<'a> {
    /// A random identifier.
    pub set_uuid: [u8; 16],
    /// As it is to be written, usually `host:name`; at most 31 bytes.
    pub name: &'a str,
    /// Seconds since 1970.
    pub created_secs: u64,
    /// Order in which members hold parity.
    pub layout: Layout,
    /// Sectors of a chunk.
    pub chunk_sectors: u32,
    /// Size of each member's device; the first one's decides where data starts, as in mdadm.
    pub device_sectors: &'a [u64],
    /// Sectors to use on each member, in whole chunks; `None`: as many as the smallest has.
    pub size_sectors: Option<u64>,
    /// Means by which the array survives a crash.
    pub consistency: Consistency,
    /// Members have room for sums of their blocks before the private map.
    pub checksums: bool,
    /// All parity is right already.
    pub clean: bool,
}

/// A new array, ready to be written.
#[derive(Clone, Debug)]
pub struct Created {
    geometry: Geometry,
    common: Superblock,
    device_sectors: Vec<u64>,
    bitmap: Option<BitmapHeader>,
}

impl NewArray<'_> {
    /// Works it out. Fails with one line if the devices are too few, too small, or don't fit the wishes.
    pub fn build(&self) -> Result<Created, Error> {
        let members = u32::try_from(self.device_sectors.len()).unwrap_or(u32::MAX);
        // The name first, since it needs nothing else.
        let mut set_name = [0; 32];
        if self.name.len() >= set_name.len() || self.name.contains('\0') {
            return Err(Error::config(format!(
                "raid5 name {:?}: it has at most 31 bytes, none of them zero",
                self.name
            )));
        }
        set_name[..self.name.len()].copy_from_slice(self.name.as_bytes());

        let first = self.device_sectors.first().copied().unwrap_or(0);
        let data_offset_sectors = self.data_offset_sectors(first);
        let smallest = self.device_sectors.iter().min().copied().unwrap_or(0);
        let room = smallest.saturating_sub(data_offset_sectors);
        if !self.device_sectors.is_empty() && room < u64::from(self.chunk_sectors) {
            return Err(Error::config(format!(
                "raid5 member of {smallest} sectors: metadata takes {data_offset_sectors}, and what is left holds no chunk; take larger members"
            )));
        }
        let used = self.size_sectors.unwrap_or(room);
        if used > room {
            return Err(Error::config(format!(
                "raid5 of {used} sectors on each member: the smallest has {room} for data; take less"
            )));
        }
        let geometry = Geometry::new(members, self.chunk_sectors, self.layout, used)?;
        let size_sectors = geometry.member_sectors();

        let bitmap = match self.consistency {
            Consistency::Bitmap => Some(BitmapHeader {
                chunk_bytes: bitmap_chunk_bytes(size_sectors).ok_or_else(|| {
                    Error::config(format!(
                        "raid5 members of {size_sectors} sectors: no bitmap is large enough; take a partial parity log"
                    ))
                })?,
                sync_size_sectors: size_sectors,
                daemon_sleep_s: SWEEP_S,
                ..BitmapHeader::new(self.set_uuid)
            }),
            _ => None,
        };
        let (feature, bitmap_or_ppl, area_sectors) = match self.consistency {
            Consistency::Resync => (0, [0; 4], bitmap_space_sectors(size_sectors)),
            Consistency::Bitmap => {
                let bytes = bitmap.as_ref().map_or(0, BitmapHeader::area_bytes);
                let offset = (AFTER_SUPER_SECTORS as u32).to_le_bytes();
                (Feature::BITMAP.0, offset, bytes as u64 / 512)
            }
            Consistency::Ppl => {
                let [a, b] = (AFTER_SUPER_SECTORS as u16).to_le_bytes();
                let [c, d] = (PPL_AREA_SECTORS as u16).to_le_bytes();
                (Feature::PPL.0, [a, b, c, d], PPL_AREA_SECTORS)
            }
        };
        let mut roles = vec![Role::Spare; table(self.device_sectors.len())];
        for (place, role) in roles.iter_mut().take(self.device_sectors.len()).enumerate() {
            *role = Role::Active(place as u16);
        }
        let common = Superblock {
            feature_map: feature,
            set_uuid: self.set_uuid,
            set_name,
            ctime: self.created_secs,
            level: 5,
            layout: self.layout.md(),
            size_sectors,
            chunk_sectors: self.chunk_sectors,
            raid_disks: members,
            bitmap_or_ppl,
            reshape_level: 0,
            reshape_position: 0,
            reshape_delta_disks: 0,
            reshape_layout: 0,
            reshape_chunk: 0,
            reshape_offset: 0,
            data_offset_sectors,
            data_size_sectors: 0,
            recovery_offset_sectors: 0,
            dev_number: 0,
            corrected_reads: 0,
            device_uuid: [0; 16],
            devflags: 0,
            bblog_shift: 0,
            bblog_size_sectors: BAD_BLOCK_SECTORS as u16,
            bblog_offset_sectors: (AFTER_SUPER_SECTORS + area_sectors) as i32,
            utime: self.created_secs,
            events: 0,
            resync_offset_sectors: if self.clean { NO_OFFSET } else { 0 },
            rest: vec![0; SUPER_BYTES - FIXED_BYTES - 2 * roles.len()],
            roles,
        };
        Ok(Created {
            geometry,
            common,
            device_sectors: self.device_sectors.to_vec(),
            bitmap,
        })
    }

    /// Metadata, room for it to grow, and headroom for a reshape: a thousandth of the device, 128 MiB at most, and not less than
    /// a few chunks.
    fn data_offset_sectors(&self, device_sectors: u64) -> u64 {
        let area = match self.consistency {
            Consistency::Ppl => PPL_AREA_SECTORS,
            _ => bitmap_space_sectors(device_sectors),
        };
        let mut headroom: u64 = 128 * 2048;
        while headroom << 10 > device_sectors && headroom / 2 >= u64::from(self.chunk_sectors) * 2 {
            headroom /= 2;
        }
        let sums = match self.checksums {
            true => sums_sectors(device_sectors),
            false => 0,
        };
        (24 + area + headroom + sums).next_multiple_of(ALIGN_SECTORS)
    }
}

impl Created {
    /// Shape of the array.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Makes an array without the member at a place. As in mdadm, no device has its number.
    pub fn leave_out(&mut self, place: usize) {
        self.common.roles[place] = Role::Spare;
    }

    /// Adds a spare, a device of this size, and returns its number: [`Created::superblock`] gives the
    /// superblock to write to it. The superblocks of the others may get longer by it. Fails if the device is
    /// too small, or there are too many.
    pub fn add_spare(&mut self, device_sectors: u64) -> Result<usize, Error> {
        let sb = &mut self.common;
        let needed = sb.data_offset_sectors + sb.size_sectors;
        if device_sectors < needed {
            return Err(Error::config(format!(
                "raid5 spare of {device_sectors} sectors: it needs {needed}, as the members do; take a larger one"
            )));
        }
        let number = self.device_sectors.len();
        if number >= sb.most_roles() as usize {
            return Err(SuperblockError::Full(sb.most_roles()).into());
        }
        let mut roles = sb.roles.clone();
        roles.resize(table(number + 1).max(roles.len()), Role::Spare);
        sb.set_roles(roles);
        self.device_sectors.push(device_sectors);
        Ok(number)
    }

    /// The superblock of the member at a place, or of the spare with a number.
    pub fn superblock(&self, member: usize, device_uuid: [u8; 16]) -> Superblock {
        let data_offset = self.common.data_offset_sectors;
        Superblock {
            dev_number: member as u32,
            device_uuid,
            data_size_sectors: self.device_sectors[member] - data_offset,
            ..self.common.clone()
        }
    }

    /// Gives the bitmap chunks of another size, in bytes. Errors if there is no bitmap, the size isn't a power of two from 4 KiB to 2 GiB, or the
    /// bits have no room before the data.
    pub fn set_bitmap_chunk(&mut self, bytes: u64) -> Result<(), Error> {
        let Some(bitmap) = &mut self.bitmap else {
            return Err(Error::config(
                "raid5 bitmap chunks: the consistency policy is another; take bitmap",
            ));
        };
        let valid = bytes.is_power_of_two() && (4096..=2 << 30).contains(&bytes);
        let Some(chunk_bytes) = u32::try_from(bytes).ok().filter(|_| valid) else {
            return Err(Error::config(format!(
                "raid5 bitmap chunks of {bytes} bytes: they are a power of two, 4 KiB to 2 GiB"
            )));
        };
        let room = bitmap.area_bytes();
        let smaller = BitmapHeader {
            chunk_bytes,
            ..bitmap.clone()
        };
        if smaller.area_bytes() > room {
            return Err(Error::config(format!(
                "raid5 bitmap chunks of {bytes} bytes: the bits don't fit the {room} bytes that this array has for them; take larger chunks"
            )));
        }
        *bitmap = smaller;
        Ok(())
    }

    /// The header of the bitmap, the same on all members, if there is one.
    pub fn bitmap(&self) -> Option<&BitmapHeader> {
        self.bitmap.as_ref()
    }
}

/// Entries in the table of roles for so many devices: as many as fill the sectors that have to be written anyway.
fn table(devices: usize) -> usize {
    let bytes = (FIXED_BYTES + 2 * devices).next_multiple_of(512);
    (bytes - FIXED_BYTES) / 2
}

/// Size of a bitmap's area by mdadm: 128 KiB from 200 GiB on, 64 KiB from 8 GiB on, else 4 KiB.
fn bitmap_space_sectors(device_sectors: u64) -> u64 {
    const GIB: u64 = 1 << 21;
    match device_sectors {
        n if n < 128 => 0,
        n if n - 128 >= 200 * GIB => 256,
        n if n - 8 > 8 * GIB => 128,
        _ => 8,
    }
}

/// 64 MiB, or more if the bits wouldn't fit the space; at most 2 GiB, which a header can say.
fn bitmap_chunk_bytes(size_sectors: u64) -> Option<u32> {
    let space_bytes = bitmap_space_sectors(size_sectors) * 512;
    let most_bits = space_bytes.saturating_sub(256).max(1) * 8;
    let mut chunk_bytes = 4096u64;
    let mut bits = size_sectors / 8 + 1;
    while bits > most_bits {
        chunk_bytes *= 2;
        bits = bits.div_ceil(2);
    }
    u32::try_from(chunk_bytes.max(64 << 20)).ok()
}

#[cfg(test)]
#[path = "create_tests.rs"]
mod tests;
