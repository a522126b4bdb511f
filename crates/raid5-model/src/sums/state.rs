//! The state of the model: media, sums in memory and on disk, marks, batches, direct reads, and what users may find.

use crate::state::{self, BLOCKS, Contents, MEMBERS, NONE, PARITY};

/// Stripes of the array. They share a group of sums.
pub const STRIPES: usize = 2;
/// Most requests of a run.
pub const REQUESTS: usize = 3;
/// The action `checksum`, as the one that a batch is for, and a rebuild.
pub const CHECK: u8 = 3;
pub const REBUILD: u8 = 4;

/// Contents of a block, or the sum of a block that has them: a sum over GF(2), with one bit for each version of each data block, and one for
/// each fault. A sum stands for its block's place and stripe as well, so a block from elsewhere counts as one with a flipped bit.
pub type Value = u16;

impl Contents for Value {
    const NONE: Value = 0xffff;
}

/// A block, or a sum, of a device with a volatile cache: those of all requests, and one with a flipped bit.
pub type Sector = state::Sector<Value, 4>;

/// A sum that isn't known.
pub const UNKNOWN: Value = 1 << 15;
/// A sum that no block has.
pub const NO_BLOCKS: Value = 1 << 14;

/// The contents that a version of a data block has: version 0 is there at first, version 1 + n is of request n.
pub fn value(block: usize, version: u8) -> Value {
    1 << (2 * version as usize + block)
}

/// The version of a data block with these contents; `None`: nobody wrote them there.
pub fn version(block: usize, contents: Value) -> Option<u8> {
    (0..=REQUESTS as u8).find(|v| value(block, *v) == contents)
}

/// Bits that a fault flips.
pub fn rot(fault: u8) -> Value {
    1 << (8 + fault)
}

/// The place whose member has the sums of another one.
pub fn holder(place: usize) -> usize {
    (place + 1) % MEMBERS
}

/// State of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Phase {
    /// Nobody works on the stripe.
    #[default]
    Free,
    /// It wants its bit and its group, if they aren't there.
    Claimed,
    /// It may begin, and reads.
    Reading,
    /// All was read that it needs; it is about to write.
    Read,
    Writing,
    /// A block that was calculated is being written.
    Fixing,
    /// It has left its word, and gives the blocks sums: a planted bug.
    Late,
}

/// A stripe's word and batch. Masks have a bit for each place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Batch {
    pub phase: Phase,
    /// The request that it is for, or [`CHECK`], or [`REBUILD`].
    pub job: u8,
    /// Blocks that are known, as they should be.
    pub valid: u8,
    pub got: [Value; MEMBERS],
    /// The place whose block didn't fit, and the block.
    pub bad: u8,
    pub misfit: Value,
    /// The place whose block doesn't fit either, and that is taken for right.
    pub trusted: u8,
    /// Blocks that were calculated and written.
    pub fixed: u8,
    /// Blocks whose write is lost.
    pub lost: u8,
}

impl Default for Batch {
    fn default() -> Batch {
        Batch {
            phase: Phase::Free,
            job: NONE,
            valid: 0,
            got: [0; MEMBERS],
            bad: NONE,
            misfit: 0,
            trusted: NONE,
            fixed: 0,
            lost: 0,
        }
    }
}

/// State of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Asked {
    #[default]
    New,
    /// A direct read is at its member.
    Direct,
    /// It has its block, and has looked at the group.
    Looked,
    /// It has compared the block with the sum, which it fits.
    Fits,
    /// It waits for its stripe's word.
    Waits,
    /// A batch does it.
    Batch,
    Done,
}

/// A request, and what a direct read has found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ask {
    pub asked: Asked,
    /// Versions that the read may return, as a mask.
    pub may: u8,
    pub contents: Value,
    /// The group was in memory from its second look on.
    pub stayed: bool,
    /// The block's sum had to be known when it looked.
    pub covered: bool,
}

/// A word of a chunk, or of a group: the bit is on all members, or the sums are in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum There {
    #[default]
    Clear,
    Set,
    /// A sweep takes it away, unless somebody uses it.
    Clearing,
}

/// A sweep that goes on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Sweep {
    #[default]
    None,
    /// It waits for the batches that there were at its begin.
    Waiting,
    /// Pages of sums are being written.
    Writing,
    Written,
    Flushed,
}

/// The action `checksum`, which follows a start, or a rebuild.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Check {
    #[default]
    None,
    /// The turn of this stripe is next, or under way.
    Turn(u8),
    /// All have had theirs; sums are to be written.
    Ended,
    Writing,
    Done,
}

/// A device that is rebuilt for the place without a member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Spare {
    #[default]
    None,
    /// Stripes that are begun, and those that are done.
    Comes(u8, u8),
    /// It is the member.
    Over,
    /// A block for it can't be calculated, so it is left out.
    Gone,
}

/// The time before a power cut and after it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Power {
    #[default]
    Before,
    /// It was cut, and caches are lost.
    Cut,
    /// The start has made parity of marked chunks.
    Repaired,
    /// It has made sums unknown.
    Forgot,
    /// The array is served again.
    After,
}

/// Writes of a device that are lost, or go elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Armed {
    #[default]
    None,
    /// The next block of each of these devices (a mask) is lost.
    Blocks(u8),
    /// Its next page of sums is lost.
    Page(u8),
    /// Its next block goes to the other stripe.
    Astray(u8),
    /// All of its writes are lost, for now.
    All(u8),
}

/// See the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct State {
    /// Blocks by place and stripe.
    pub media: [[Sector; STRIPES]; MEMBERS],
    /// Sums on disk, by the place and stripe of their block.
    pub pages: [[Sector; STRIPES]; MEMBERS],
    /// The map on each member: a mask of chunks.
    pub bits: [u8; MEMBERS],
    pub chunks: [There; STRIPES],
    pub group: There,
    /// Sums in memory, by place and stripe.
    pub memory: [[Value; STRIPES]; MEMBERS],
    pub dirty: bool,
    /// Pages that are being written, and those of them that are lost.
    pub flying: [[Value; STRIPES]; MEMBERS],
    pub lost_pages: u8,
    pub batches: [Batch; STRIPES],
    pub asks: [Ask; REQUESTS],
    pub sweep: Sweep,
    /// Sweeps that have begun, and whether this one is of bits.
    pub sweeps: u8,
    pub sweeps_bits: bool,
    /// The group is among those that the sweep takes away.
    pub sweeps_group: bool,
    /// Words that the sweep waits for.
    pub owned: u8,
    pub check: Check,
    /// The place without a member.
    pub missing: u8,
    pub spare: Spare,
    /// The device that is rebuilt has its page of sums.
    pub given: bool,
    pub power: Power,
    pub armed: Armed,
    pub faults: u8,
    /// Devices that had a fault, as a mask.
    pub harmed: u8,
    /// Versions that the last write left, or those before it until it has ended, by stripe and data block; [`ANY`].
    pub may: [[u8; BLOCKS]; STRIPES],
    /// Blocks whose sums have to be known: masks of places.
    pub covered: [u8; STRIPES],
}

/// A bit of `State::may`: a start, a rebuild or a write took the block as it was, without a sum, with a fault that nothing could tell.
pub const ANY: u8 = 1 << 7;

impl State {
    /// True if the array is served.
    pub fn serves(&self) -> bool {
        matches!(self.power, Power::Before | Power::After)
    }

    /// The place whose block of a stripe isn't there, for the owner of its word.
    pub fn lacks(&self, at: usize) -> u8 {
        match self.spare {
            Spare::Comes(begun, _) if at < usize::from(begun) => NONE,
            _ => self.missing,
        }
    }

    /// True if a place's block of a stripe can be read without the word.
    pub fn has_block(&self, place: usize, at: usize) -> bool {
        let is_done = matches!(self.spare, Spare::Comes(_, done) if at < usize::from(done));
        self.missing != place as u8 || is_done
    }

    /// True if a member, or the device that is rebuilt, is there.
    pub fn has_device(&self, device: usize) -> bool {
        self.missing != device as u8 || matches!(self.spare, Spare::Comes(..))
    }

    /// True if a member has its page of sums.
    pub fn has_page(&self, device: usize) -> bool {
        self.missing != device as u8 || self.given
    }

    /// The device whose writes are all lost.
    pub fn loses(&self, device: usize) -> bool {
        self.armed == Armed::All(device as u8)
    }

    /// The contents that a block has to have; `None`: that can't be said.
    pub fn right(&self, stripe: usize, block: usize) -> Option<Value> {
        let data = |b: usize| {
            let may = self.may[stripe][b];
            let one = may & ANY == 0 && may.count_ones() == 1;
            one.then(|| value(b, may.trailing_zeros() as u8))
        };
        match block {
            PARITY => Some(data(0)? ^ data(1)?),
            b => data(b),
        }
    }
}
