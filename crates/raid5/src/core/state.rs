//! The state of an array that serves, for users.

use pvblk_block::Error;
use std::fmt;
use std::str::FromStr;

/// The path by which writes go to stripes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WritePath {
    /// At once, as in md.
    #[default]
    Direct,
    /// Through the stripe queue.
    StripeQueue,
}

impl fmt::Display for WritePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WritePath::Direct => "direct",
            WritePath::StripeQueue => "stripe-queue",
        })
    }
}

impl FromStr for WritePath {
    type Err = Error;

    fn from_str(text: &str) -> Result<WritePath, Error> {
        match text {
            "direct" => Ok(WritePath::Direct),
            "stripe-queue" => Ok(WritePath::StripeQueue),
            _ => Err(Error::config(format!(
                "write path {text:?}: it is direct or stripe-queue"
            ))),
        }
    }
}

/// An action on all stripes, in md's words (`sync_action`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Parity is made right where it isn't known to be.
    Resync,
    /// A device becomes a member.
    Recover,
    /// Parity is compared with the data.
    Check,
    /// A check that makes wrong parity right.
    Repair,
    /// Blocks whose checksums aren't known get them, where data and parity fit. Not one of md's.
    Checksum,
}

impl Action {
    /// True if parity that doesn't fit the data is made right, or what is written comes from it.
    pub(super) fn makes_parity(self) -> bool {
        !matches!(self, Action::Check | Action::Checksum)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Resync => "resync",
            Action::Recover => "recover",
            Action::Check => "check",
            Action::Repair => "repair",
            Action::Checksum => "checksum",
        })
    }
}

/// Progress of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncNow {
    pub action: Action,
    /// Sectors of each member that are done, of those to be done.
    pub done_sectors: u64,
    /// All of these.
    pub of_sectors: u64,
    /// Sectors of members whose parity was wrong.
    pub mismatch_sectors: u64,
    /// Only those that the write-intent bitmap marks.
    pub by_bitmap: bool,
}

/// A device of the array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberNow {
    /// Its number among the devices.
    pub slot: usize,
    /// Its place in the array.
    pub place: usize,
    /// Its number in the superblocks.
    pub number: u32,
    /// Sectors of it that are rebuilt; `None`: it is a member.
    pub rebuilt_sectors: Option<u64>,
    /// Blocks that it could not read, and that were calculated and written again, ever.
    pub corrected_reads: u32,
    /// Blocks of it, or sums on it, that were other than was written, and were made right, since the start.
    pub misfits: u32,
}

/// The array at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Devices, by their numbers.
    pub members: Vec<MemberNow>,
    /// The place without a member.
    pub failed: Option<usize>,
    /// Two members failed.
    pub broken: bool,
    /// Its superblocks say that it isn't stopped in order.
    pub dirty: bool,
    /// Event counter of the superblocks.
    pub events: u64,
    /// The recovery, resync or check under way.
    pub sync: Option<SyncNow>,
    /// Sectors of each member, from the start, whose parity is right; `None`: all.
    pub in_sync_sectors: Option<u64>,
    /// Recoveries, resyncs and checks that have begun.
    pub syncs: u64,
    /// Sectors of members whose parity was wrong, of the last check or repair.
    pub mismatch_sectors: u64,
    /// Why the last rebuild or check didn't come to its end.
    pub trouble: Option<String>,
    /// The last recovery that came to its end: place, sectors written, and whether only what the bitmap marked.
    pub recovered: Option<(usize, u64, bool)>,
    /// Stripes that may have pages.
    pub stripes: usize,
    /// Stripes that are at work.
    pub active_stripes: usize,
    /// Requests taken, ever.
    pub requests: u64,
    /// Path by which writes go to stripes.
    pub path: WritePath,
}
