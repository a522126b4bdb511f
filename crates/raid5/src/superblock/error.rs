//! Features of a superblock that aren't supported.

use super::{BadBlock, LogArea};
use pvblk_block::{Error, ErrorKind};
use thiserror::Error as ThisError;

/// A bit of the feature map (`MD_FEATURE_*` in `md_p.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Feature(pub u32);

impl Feature {
    /// There is a write-intent bitmap in the member.
    pub const BITMAP: Feature = Feature(1);
    /// This member is being rebuilt.
    pub const RECOVERY_OFFSET: Feature = Feature(2);
    /// A reshape is under way.
    pub const RESHAPE: Feature = Feature(4);
    /// The bad block log isn't empty.
    pub const BAD_BLOCKS: Feature = Feature(8);
    /// This member is to replace another.
    pub const REPLACEMENT: Feature = Feature(16);
    /// The reshape goes from the end.
    pub const RESHAPE_BACKWARDS: Feature = Feature(32);
    /// The reshape moves the data.
    pub const NEW_OFFSET: Feature = Feature(64);
    /// The rebuild is guided by the bitmap.
    pub const RECOVERY_BITMAP: Feature = Feature(128);
    /// Several hosts use the array.
    pub const CLUSTERED: Feature = Feature(256);
    /// There is a journal device.
    pub const JOURNAL: Feature = Feature(512);
    /// There is a partial parity log.
    pub const PPL: Feature = Feature(1024);
    /// There is a partial parity log, and md uses its area in turn.
    pub const MULTIPLE_PPLS: Feature = Feature(2048);
    /// The layout field means something in RAID-0.
    pub const RAID0_LAYOUT: Feature = Feature(4096);

    /// Every bit that has a meaning.
    pub const ALL: u32 = 0x1fff;

    /// Features that aren't supported at all.
    pub const REFUSED: [Feature; 7] = [
        Feature::RESHAPE,
        Feature::RESHAPE_BACKWARDS,
        Feature::NEW_OFFSET,
        Feature::RECOVERY_BITMAP,
        Feature::CLUSTERED,
        Feature::JOURNAL,
        Feature::RAID0_LAYOUT,
    ];

    /// The feature in words, and what to do about it.
    fn advice(self) -> &'static str {
        match self {
            Feature::RESHAPE | Feature::RESHAPE_BACKWARDS | Feature::NEW_OFFSET => {
                "a reshape is under way; let md finish it"
            }
            Feature::RECOVERY_BITMAP => "a rebuild guided by the bitmap, of an array that has none",
            Feature::CLUSTERED => "the array is clustered, and several hosts may use it",
            Feature::JOURNAL => "the array has a journal device; remove it with mdadm first",
            Feature::RAID0_LAYOUT => "a RAID-0 layout in an array of another level",
            _ => "this feature isn't supported",
        }
    }
}

/// Why a member can't be used. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[allow(missing_docs)] // The texts say it.
pub enum SuperblockError {
    #[error("fewer bytes than a superblock has")]
    Short,
    #[error("not a member of an md array with 1.2 metadata: {0:#010x} is not md's magic")]
    Magic(u32),
    #[error("md metadata of major version {0}; only 1 is known")]
    Version(u32),
    #[error("a table of {0} devices, more than a superblock holds")]
    MaxDev(u32),
    #[error(
        "the checksum is {found:#010x} and should be {counted:#010x}: the superblock is damaged"
    )]
    Checksum { found: u32, counted: u32 },
    #[error(
        "the superblock says that it lies at sector {0} and not at 8: it isn't of minor version 2, or was copied"
    )]
    Place(u64),
    #[error("reserved bytes aren't zero: metadata of a newer md")]
    Padding,
    #[error("unknown features {0:#x}: metadata of a newer md")]
    UnknownFeatures(u32),
    #[error("feature {:#x}: {}", .0.0, .0.advice())]
    Feature(Feature),
    #[error("more than one of bitmap, PPL and multiple PPLs: they exclude each other")]
    TwoPolicies,
    #[error("RAID level {0}; only 5 is supported")]
    Level(i32),
    #[error(
        "layout {number} ({name}); left- and right-, symmetric and asymmetric (0 to 3) are supported"
    )]
    Layout { number: u32, name: &'static str },
    #[error("{0}")]
    Shape(String),
    #[error("a member at place {0:#x}, outside of the array")]
    Role(u16),
    #[error("three members at place {0}")]
    RoleThrice(u16),
    #[error(
        "the table of devices is full: there is room for {0}; leave out devices that aren't needed"
    )]
    Full(u32),
    #[error("data ends at sector {needed}, the device at {device}: it was cut, or isn't the one")]
    TooSmall { needed: u64, device: u64 },
    #[error("{0} and {1} overlap")]
    Places(&'static str, &'static str),
    #[error("a partial parity log of {} sectors at {}: too small", .0.sectors, .0.sector)]
    SmallPpl(LogArea),
    #[error("bad blocks are said to be logged, but not where, or in more than 8 sectors")]
    BadBlockLog,
    #[error("the bad block log isn't empty ({} sectors at {}); have mdadm clear it, or replace the disk", .0.sectors, .0.sector)]
    BadBlocks(BadBlock),
}

impl From<SuperblockError> for Error {
    fn from(e: SuperblockError) -> Error {
        Error::caused(ErrorKind::Config, "", e)
    }
}
