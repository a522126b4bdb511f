//! RAID-5 in the on-disk format of Linux md, version 1.2.
//!
//! | file | has |
//! |---|---|
//! | `geometry` | where a sector of the array lies on the members, and back |
//! | `parity` | XOR of blocks |
//! | `identity` | ids and times as text |
//! | `superblock` | the 4 KiB on each member that describe the array; `create` makes new ones |
//! | `bitmap` | the write-intent bitmap, and the private map: the chunks that may differ on the members |
//! | `sums` | sums of blocks, by which blocks are found that aren't what was written |
//! | `ppl`, `recover` | the partial parity log, and the repair of parity after a crash |
//! | `blocking` | blocking I/O, for all of the next line |
//! | `new_array`, `assemble`, `repair`, `spare`, `private_map` | before and after serving: makes arrays, finds them, makes their parity right, adds devices |
//! | `head_pages` | a stripe's pages, and calculations in them, for `core` and `words` |
//! | `core` | while serving: state machines without I/O |
//! | `words` | state of `core` that queues share without a lock |
//! | `array` | the device: queues, the background thread, questions of users |
//!
//! The format is md's so that an array outlives this program: `mdadm` examines, assembles and repairs it.
//! Features of md that are missing here (reshape, journal, bad blocks, clusters) are refused by name, never
//! guessed at.
//!
//! Numbers and offsets come from `md_p.h` of the kernel's user headers, rules from `md(4)`, `mdadm(8)`, mdadm's
//! `bitmap.h` and `raid5-ppl.rst`; each place says which. Every unit is in the name: `_sectors` are 512 bytes.

mod array;
mod assemble;
mod bitmap;
mod blocking;
mod core;
mod create;
pub mod found;
mod geometry;
mod head_pages;
mod identity;
mod new_array;
mod parity;
mod ppl;
mod private_map;
mod recover;
mod repair;
mod spare;
mod sums;
mod superblock;
#[cfg(test)]
mod testing;
#[doc(hidden)]
pub mod words;

pub use self::core::WritePath;
pub use array::ask;
pub use array::{
    ArrayMember, ArrayOptions, ArrayState, ArraySync, BackgroundWork, MemberNames, MemberState,
    Raid5, ReAdded, Recovered, SpecParts, SyncAction, WriteCounts, serve,
};
pub use assemble::{
    Absent, AssembleOptions, Assembly, Candidate, Incoming, Member, Selection, assemble,
    read_superblock, select,
};
pub use bitmap::{
    BITMAP_HEADER_BYTES, BitmapError, BitmapHeader, Health, Intent, PAGE_BYTES, PageWrite,
    WriteIntent,
};
pub use blocking::{Blocking, Idle, sleepy};
pub use create::{Consistency, Created, NewArray};
pub use geometry::{
    ChunkPlace, Geometry, Layout, Piece, STRIPE_BYTES, STRIPE_SECTORS, StripeBlock,
};
pub use identity::{parse_uuid, time_text, uuid_text};
pub use new_array::{CreateOptions, NewMembers, create};
pub use parity::{xor_into, xor_of};
pub use ppl::{
    Batch, Full, Newest, PPL_HEADER_BYTES, PPL_MAX_ENTRIES, PplEntry, PplError, PplHeader,
    find_newest, log_space_bytes, ppl_signature, single_log_sectors, tells_multiple,
};
pub use private_map::set_private_map;
pub use recover::{Repair, RepairPlan};
pub use repair::{Raid5Progress, prepare, write_superblocks};
pub use spare::{add_spare, make_spare};
pub use superblock::{
    BadBlock, Feature, Kept, LogArea, NO_OFFSET, Policy, Role, SUPER_BYTES, SUPER_MAGIC,
    SUPER_SECTOR, Superblock, SuperblockError,
};
