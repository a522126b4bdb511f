//! The first 256 bytes as they lie on disk.

use super::{Role, Superblock};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct mdp_superblock_1` without the roles. Little-endian and without alignment, so the same on every machine.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RawSuperblock {
    pub magic: U32,
    pub major_version: U32,
    pub feature_map: U32,
    pub pad0: U32,
    pub set_uuid: [u8; 16],
    pub set_name: [u8; 32],
    pub ctime: U64,
    pub level: U32,
    pub layout: U32,
    pub size: U64,
    pub chunksize: U32,
    pub raid_disks: U32,
    pub bitmap_or_ppl: [u8; 4],
    pub new_level: U32,
    pub reshape_position: U64,
    pub delta_disks: U32,
    pub new_layout: U32,
    pub new_chunk: U32,
    pub new_offset: U32,
    pub data_offset: U64,
    pub data_size: U64,
    pub super_offset: U64,
    pub recovery_offset: U64,
    pub dev_number: U32,
    pub cnt_corrected_read: U32,
    pub device_uuid: [u8; 16],
    pub devflags: u8,
    pub bblog_shift: u8,
    pub bblog_size: U16,
    pub bblog_offset: U32,
    pub utime: U64,
    pub events: U64,
    pub resync_offset: U64,
    pub checksum: U32,
    pub max_dev: U32,
    pub pad3: [u8; 32],
}

// The offsets of `md_p.h`, at compile time.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<RawSuperblock>() == super::FIXED_BYTES);
    assert!(offset_of!(RawSuperblock, set_uuid) == 16);
    assert!(offset_of!(RawSuperblock, set_name) == 32);
    assert!(offset_of!(RawSuperblock, ctime) == 64);
    assert!(offset_of!(RawSuperblock, size) == 80);
    assert!(offset_of!(RawSuperblock, bitmap_or_ppl) == 96);
    assert!(offset_of!(RawSuperblock, reshape_position) == 104);
    assert!(offset_of!(RawSuperblock, data_offset) == 128);
    assert!(offset_of!(RawSuperblock, super_offset) == 144);
    assert!(offset_of!(RawSuperblock, dev_number) == 160);
    assert!(offset_of!(RawSuperblock, device_uuid) == 168);
    assert!(offset_of!(RawSuperblock, devflags) == 184);
    assert!(offset_of!(RawSuperblock, bblog_offset) == 188);
    assert!(offset_of!(RawSuperblock, utime) == 192);
    assert!(offset_of!(RawSuperblock, resync_offset) == 208);
    assert!(offset_of!(RawSuperblock, checksum) == super::CHECKSUM_AT);
    assert!(offset_of!(RawSuperblock, pad3) == 224);
};

impl RawSuperblock {
    /// The fields, without roles.
    pub fn fields(&self) -> Superblock {
        Superblock {
            feature_map: self.feature_map.get(),
            set_uuid: self.set_uuid,
            set_name: self.set_name,
            ctime: self.ctime.get(),
            level: self.level.get().cast_signed(),
            layout: self.layout.get(),
            size_sectors: self.size.get(),
            chunk_sectors: self.chunksize.get(),
            raid_disks: self.raid_disks.get(),
            bitmap_or_ppl: self.bitmap_or_ppl,
            reshape_level: self.new_level.get(),
            reshape_position: self.reshape_position.get(),
            reshape_delta_disks: self.delta_disks.get(),
            reshape_layout: self.new_layout.get(),
            reshape_chunk: self.new_chunk.get(),
            reshape_offset: self.new_offset.get(),
            data_offset_sectors: self.data_offset.get(),
            data_size_sectors: self.data_size.get(),
            recovery_offset_sectors: self.recovery_offset.get(),
            dev_number: self.dev_number.get(),
            corrected_reads: self.cnt_corrected_read.get(),
            device_uuid: self.device_uuid,
            devflags: self.devflags,
            bblog_shift: self.bblog_shift,
            bblog_size_sectors: self.bblog_size.get(),
            bblog_offset_sectors: self.bblog_offset.get().cast_signed(),
            utime: self.utime.get(),
            events: self.events.get(),
            resync_offset_sectors: self.resync_offset.get(),
            roles: Vec::<Role>::new(),
            rest: Vec::new(),
        }
    }

    /// Takes the fields over, but for those that every superblock has alike.
    pub fn set(&mut self, s: &Superblock) {
        self.feature_map.set(s.feature_map);
        self.set_uuid = s.set_uuid;
        self.set_name = s.set_name;
        self.ctime.set(s.ctime);
        self.level.set(s.level.cast_unsigned());
        self.layout.set(s.layout);
        self.size.set(s.size_sectors);
        self.chunksize.set(s.chunk_sectors);
        self.raid_disks.set(s.raid_disks);
        self.bitmap_or_ppl = s.bitmap_or_ppl;
        self.new_level.set(s.reshape_level);
        self.reshape_position.set(s.reshape_position);
        self.delta_disks.set(s.reshape_delta_disks);
        self.new_layout.set(s.reshape_layout);
        self.new_chunk.set(s.reshape_chunk);
        self.new_offset.set(s.reshape_offset);
        self.data_offset.set(s.data_offset_sectors);
        self.data_size.set(s.data_size_sectors);
        self.recovery_offset.set(s.recovery_offset_sectors);
        self.dev_number.set(s.dev_number);
        self.cnt_corrected_read.set(s.corrected_reads);
        self.device_uuid = s.device_uuid;
        self.devflags = s.devflags;
        self.bblog_shift = s.bblog_shift;
        self.bblog_size.set(s.bblog_size_sectors);
        self.bblog_offset
            .set(s.bblog_offset_sectors.cast_unsigned());
        self.utime.set(s.utime);
        self.events.set(s.events);
        self.resync_offset.set(s.resync_offset_sectors);
    }
}
