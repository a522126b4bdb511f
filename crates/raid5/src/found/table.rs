//! The marks. Facts are those of each format's own documentation, or of libblkid's manual.

/// Where a mark is.
pub(super) enum At {
    /// Bytes from the start.
    Start(usize),
    /// Bytes before the end.
    End(usize),
    /// At a place that depends on the size in bytes, near the end.
    Place(fn(u64) -> Option<u64>),
}

/// A magic number, and the format that has it.
pub(super) struct Magic {
    pub at: At,
    pub bytes: &'static [u8],
    /// Checks the rest of the format, given the bytes in which the magic was found.
    pub check: fn(&[u8]) -> bool,
    pub what: &'static str,
    pub container: bool,
}

const fn mark(at: usize, bytes: &'static [u8], what: &'static str) -> Magic {
    Magic {
        at: At::Start(at),
        bytes,
        check: always,
        what,
        container: false,
    }
}

const fn container(at: usize, bytes: &'static [u8], what: &'static str) -> Magic {
    Magic {
        container: true,
        ..mark(at, bytes, what)
    }
}

const fn at_end(back: usize, bytes: &'static [u8], what: &'static str) -> Magic {
    Magic {
        at: At::End(back),
        ..mark(0, bytes, what)
    }
}

const fn always(_: &[u8]) -> bool {
    true
}

pub(super) const LUKS: &str = "a LUKS volume";
const EXT: &str = "an ext2, ext3 or ext4 file system";
const SWAP: &str = "swap space";
const LVM: &str = "an LVM physical volume";
const MD: &str = "a member of an md array";
const GPT: &str = "a GUID partition table";
const FAT: &str = "a FAT file system";
const ZFS: &str = "a member of a ZFS pool";
const VMDK: &str = "a VMDK image";
const VHD: &str = "a VHD image";
const PARALLELS: &str = "a Parallels image";
const MD_MAGIC: &[u8] = &0xa92b_4efc_u32.to_le_bytes();
const MD_MAGIC_BIG: &[u8] = &0xa92b_4efc_u32.to_be_bytes();

pub(super) const MAGICS: &[Magic] = &[
    // Containers. All have their mark in the first 4 KiB.
    container(0, b"QFI\xfb\0\0\0\x01", "a QCOW image"),
    Magic {
        check: |b| b.get(7) != Some(&1),
        ..container(0, b"QFI\xfb", "a qcow2 image")
    },
    container(0, b"QED\0", "a QED image"),
    container(0, b"KDMV", VMDK),
    container(0, b"COWD", VMDK),
    container(0, b"# Disk DescriptorFile", VMDK),
    container(0, b"vhdxfile", "a VHDX image"),
    container(0, b"conectix", VHD),
    container(64, &0xbeda_107f_u32.to_le_bytes(), "a VDI image"),
    container(0, b"WithoutFreeSpace", PARALLELS),
    container(0, b"WithouFreSpacExt", PARALLELS),
    container(0, b"LUKS\xba\xbe", LUKS),
    at_end(512, b"conectix", VHD),
    // File systems.
    Magic {
        check: is_ext,
        ..mark(1080, &[0x53, 0xef], EXT)
    },
    mark(0, b"XFSB", "an XFS file system"),
    mark(0x10040, b"_BHRfS_M", "a btrfs file system"),
    mark(3, b"NTFS    ", "an NTFS file system"),
    mark(3, b"EXFAT   ", "an exFAT file system"),
    mark(54, b"FAT12   ", FAT),
    mark(54, b"FAT16   ", FAT),
    mark(54, b"FAT     ", FAT),
    mark(82, b"FAT32   ", FAT),
    mark(0x8001, b"CD001", "an ISO 9660 file system"),
    mark(0x8001, b"BEA01", "a UDF file system"),
    mark(0, b"hsqs", "a squashfs file system"),
    mark(0, b"sqsh", "a squashfs file system"),
    mark(1024, &0xe0f5_e1e2_u32.to_le_bytes(), "an EROFS file system"),
    mark(1024, &0xf2f5_2010_u32.to_le_bytes(), "an F2FS file system"),
    mark(0x8000, b"JFS1", "a JFS file system"),
    mark(0x10034, b"ReIsEr", "a ReiserFS file system"),
    mark(0x10000, &[1, 0x16, 0x19, 0x70], "a GFS2 file system"),
    mark(0, b"bluestore block device", "a Ceph OSD"),
    // Swap space, by the size of the machine's pages.
    mark(4086, b"SWAPSPACE2", SWAP),
    mark(8182, b"SWAPSPACE2", SWAP),
    mark(16374, b"SWAPSPACE2", SWAP),
    mark(65526, b"SWAPSPACE2", SWAP),
    mark(4086, b"SWAP-SPACE", SWAP),
    mark(4086, b"S1SUSPEND", "a suspended system"),
    mark(4086, b"S2SUSPEND", "a suspended system"),
    // Volumes and arrays.
    mark(0, b"LABELONE", LVM),
    mark(512, b"LABELONE", LVM),
    mark(1024, b"LABELONE", LVM),
    mark(1536, b"LABELONE", LVM),
    Magic {
        check: |b| word(b, 4) == Some(1),
        ..mark(0, MD_MAGIC, MD)
    },
    Magic {
        check: |b| word(b, 4100) == Some(1),
        ..mark(4096, MD_MAGIC, MD)
    },
    Magic {
        at: At::Place(md_1_0),
        ..mark(0, MD_MAGIC, MD)
    },
    Magic {
        at: At::Place(md_0_90),
        ..mark(0, MD_MAGIC, MD)
    },
    Magic {
        at: At::Place(md_0_90),
        ..mark(0, MD_MAGIC_BIG, MD)
    },
    at_end(
        1024,
        b"Intel Raid ISM Cfg Sig. ",
        "a member of an Intel RAID array",
    ),
    at_end(
        512,
        &0xde11_de11_u32.to_be_bytes(),
        "a member of a DDF array",
    ),
    Magic {
        check: has_uberblock,
        ..mark(0, b"", ZFS)
    },
    mark(
        4120,
        &[
            0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba,
            0x6d, 0x81,
        ],
        "a bcache device",
    ),
    mark(
        4120,
        &[
            0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d,
            0xf7, 0xef,
        ],
        "a bcachefs file system",
    ),
    mark(3, b"-FVE-FS-", "a BitLocker volume"),
    mark(0, b"integrt\0", "a dm-integrity device"),
    mark(0, b"verity\0\0", "a dm-verity device"),
    mark(0, b"dmvdo001", "a VDO device"),
    mark(516, b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis device"),
    mark(32, b"ORCLDISK", "an Oracle ASM disk"),
    // Partitions.
    mark(512, b"EFI PART", GPT),
    mark(4096, b"EFI PART", GPT),
    at_end(512, b"EFI PART", GPT),
    at_end(4096, b"EFI PART", GPT),
    Magic {
        check: has_partitions,
        ..mark(510, &[0x55, 0xaa], "an MBR partition table")
    },
];

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}

/// Blocks of 1 to 64 KiB, and a revision that exists.
fn is_ext(bytes: &[u8]) -> bool {
    let blocks = word(bytes, 1024 + 24).is_some_and(|log| log <= 6);
    blocks && word(bytes, 1024 + 76).is_some_and(|revision| revision <= 1)
}

/// At least one partition with a type, a place and a length; and nothing else in the flags than *bootable*.
fn has_partitions(bytes: &[u8]) -> bool {
    let entry = |n: usize| bytes.get(446 + 16 * n..462 + 16 * n);
    let mut entries = (0..4).filter_map(entry);
    let flags_are_right = entries.clone().all(|e| e[0] & 0x7f == 0);
    // A GUID partition table is found by its own magic.
    let is_used =
        |e: &[u8]| ![0, 0xee].contains(&e[4]) && e[8..12] != [0; 4] && e[12..16] != [0; 4];
    flags_are_right && entries.any(is_used)
}

/// The first two labels have 128 KiB of uberblocks each, of 1 KiB or more.
fn has_uberblock(bytes: &[u8]) -> bool {
    let magic = 0x00ba_b10c_u64;
    let first = (128 << 10..256 << 10).step_by(1024);
    let mut found = first.filter_map(|at| bytes.get(at..at + 8));
    found.any(|b| b == magic.to_le_bytes() || b == magic.to_be_bytes())
}

/// At least 8 KiB, and less than 12, before the end.
fn md_1_0(size: u64) -> Option<u64> {
    let sectors = (size / 512).checked_sub(16)?;
    Some((sectors & !7) * 512)
}

/// The last 64 KiB that begin at a multiple of that, and end before the end.
fn md_0_90(size: u64) -> Option<u64> {
    (size & !0xffff).checked_sub(0x1_0000)
}
