//! The state of the model: media, the words of stripes and logs, the rare machines, and what users were told.
//!
//! All of it is small numbers, so that states are cheap to copy, to compare and to hash.

/// Members of the array.
pub const MEMBERS: usize = 3;
/// Devices: the members, and a spare that may become one.
pub const DEVICES: usize = 4;
/// Number of the spare device.
pub const SPARE: usize = 3;
/// Stripes of the array.
pub const STRIPES: usize = 2;
/// Data blocks of a stripe.
pub const BLOCKS: usize = 2;
/// Sectors of a block.
pub const SECTORS: usize = 2;
/// Most write requests of a run.
pub const WRITES: usize = 3;
/// Index of parity, after the data blocks.
pub const PARITY: usize = 2;
/// No member, write or version.
pub const NONE: u8 = 0xff;
/// Rebuilding, in a stripe's list of arrivals.
pub const SYNC: u8 = 3;

/// Contents of a sector: a sum over GF(2), with one bit for each version of each block, so that parity is exact. Bits 0 and 1
/// are the contents that the blocks have at first; then follow two bits for each write, one for each block.
pub type Value = u8;

/// The contents that a version of a block has: version 0 is there at first, version 1 + n is of write n.
pub fn value(block: usize, version: u8) -> Value {
    match version {
        0 => 1 << block,
        n => 1 << (2 * n as usize + block),
    }
}

/// The version of a block with these contents; `None`: nobody wrote them there.
pub fn version(block: usize, contents: Value) -> Option<u8> {
    (0..=WRITES as u8).find(|v| value(block, *v) == contents)
}

/// Contents of a sector, in one of the models.
pub trait Contents: Copy + Ord {
    /// Contents that no sector has.
    const NONE: Self;
}

impl Contents for Value {
    const NONE: Value = NONE;
}

/// A sector of a device with a volatile cache, which holds at most so many versions of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Sector<V = Value, const VERSIONS: usize = 3> {
    /// The contents that a read finds.
    pub now: V,
    /// Others that a power cut may leave, in rising order; `NONE` fills.
    pub others: [V; VERSIONS],
}

impl<V: Contents, const VERSIONS: usize> Sector<V, VERSIONS> {
    /// A sector that a power cut leaves as it is.
    pub fn new(now: V) -> Self {
        Sector {
            now,
            others: [V::NONE; VERSIONS],
        }
    }

    /// A write begins: from now on a power cut may leave these contents.
    pub fn begin(&mut self, contents: V) {
        if contents == self.now || self.others.contains(&contents) {
            return;
        }
        let Some(free) = self.others.iter_mut().find(|o| **o == V::NONE) else {
            panic!("a sector has more versions in the cache than the model holds");
        };
        *free = contents;
        self.others.sort_unstable();
    }

    /// A write has ended. Without FUA, a power cut may still undo it.
    pub fn end(&mut self, contents: V, fua: bool) {
        let before = self.now;
        self.now = contents;
        if fua {
            self.others = [V::NONE; VERSIONS];
            return;
        }
        if before != contents {
            match self.others.iter_mut().find(|o| **o == contents) {
                Some(other) => *other = before,
                None => self.begin(before),
            }
            self.others.sort_unstable();
        }
    }

    /// A flush has reached the device; `flying` is a write in flight, which it doesn't cover.
    pub fn flush(&mut self, flying: Option<V>) {
        self.others = [V::NONE; VERSIONS];
        if let Some(flying) = flying {
            self.begin(flying);
        }
    }

    /// All contents that a power cut may leave.
    pub fn all(&self) -> impl Iterator<Item = V> + '_ {
        let others = self.others.iter().copied().filter(|o| *o != V::NONE);
        std::iter::once(self.now).chain(others)
    }
}

/// A log's entry for a stripe.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Entry {
    /// Blocks that change, as a mask; 0: there is no entry.
    pub touched: u8,
    /// The XOR of the blocks that don't change.
    pub partial: [Value; SECTORS],
}

/// State of a stripe's word, and of its batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Phase {
    /// Nobody works on the stripe.
    #[default]
    Free,
    /// Claimed; the owner has not looked at the epoch yet.
    Claimed,
    /// The owner saw a stop and is about to park. Only a planted bug makes this a step of its own.
    Parking,
    /// The owner waits for the next epoch, without I/O.
    Parked,
    /// The batch is open, and blocks are read.
    Reading,
    /// The batch is open, and what was asked for has been read.
    Read,
    /// The batch is closed and calculated; there is nothing to log.
    Closed,
    /// The batch is in its log's list.
    Listed,
    /// The batch is in a unit whose log is being written.
    Logging,
    /// The batch is in a log that is stable.
    Logged,
    /// Data and parity are being written.
    Writing,
    /// All is written but for a member that failed; the owner waits for superblocks that name it.
    Unnamed,
    /// All is written; the owner is about to release the stripe.
    Ending,
    /// Rebuilding reads the other members.
    SyncReading,
    /// Rebuilding writes the incoming device.
    SyncWriting,
}

/// A stripe: the word, and what its owner alone touches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stripe {
    pub phase: Phase,
    /// The epoch in which the batch was planned.
    pub epoch: u8,
    /// The block that is written alone, as the owner saw it when it planned. Rebuilding may get on meanwhile.
    pub alone: u8,
    /// Requests, in the order of their arrival; the first one's queue owns the stripe. `NONE` fills.
    pub list: [u8; WRITES + 1],
    /// Blocks that are being read, and those that were read, as masks.
    pub need: u8,
    pub valid: u8,
    /// Rounds of reads.
    pub round: u8,
    /// Contents that were read, by block, parity last.
    pub reads: [[Value; SECTORS]; BLOCKS + 1],
    /// Blocks of each write that the batch does.
    pub batch: [u8; WRITES],
    /// The same when parity was calculated.
    pub calculated: [u8; WRITES],
    pub touched: u8,
    /// New contents, by block, parity last.
    pub new: [[Value; SECTORS]; BLOCKS + 1],
    pub partial: [Value; SECTORS],
    pub fua: bool,
    pub failed: bool,
}

impl Default for Stripe {
    fn default() -> Stripe {
        Stripe {
            phase: Phase::Free,
            epoch: 0,
            alone: NONE,
            list: [NONE; WRITES + 1],
            need: 0,
            valid: 0,
            round: 0,
            reads: [[0; SECTORS]; BLOCKS + 1],
            batch: [0; WRITES],
            calculated: [0; WRITES],
            touched: 0,
            new: [[0; SECTORS]; BLOCKS + 1],
            partial: [0; SECTORS],
            fua: false,
            failed: false,
        }
    }
}

impl Stripe {
    /// Puts a request at the end of the list.
    pub fn push(&mut self, request: u8) {
        if let Some(free) = self.list.iter_mut().find(|l| **l == NONE) {
            *free = request;
        }
    }

    /// Takes a request off the list.
    pub fn remove(&mut self, request: u8) {
        if let Some(at) = self.list.iter().position(|l| *l == request) {
            self.list[at..].rotate_left(1);
            self.list[WRITES] = NONE;
        }
    }

    /// Forgets the plan and everything that was read; the requests wait in the list still.
    pub fn forget_plan(&mut self) {
        *self = Stripe {
            phase: self.phase,
            list: self.list,
            ..Stripe::default()
        };
    }

    /// True if nothing of the stripe is in flight, so that the array may change its members.
    pub fn is_drained(&self) -> bool {
        matches!(
            self.phase,
            Phase::Free | Phase::Parked | Phase::Listed | Phase::Unnamed
        )
    }
}

/// State of a log's word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum LogPhase {
    #[default]
    Idle,
    /// Somebody is about to begin a unit, and has not looked at the epoch yet.
    Claimed,
    /// It waits for the next epoch.
    Held,
    /// Members are flushed, so that it may be written over.
    Flushing,
    Writing,
    /// It is stable; the stripes of its unit are being written.
    Stripes,
}

/// The log of a parity member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Log {
    pub phase: LogPhase,
    /// Stripes of the next unit, as a mask.
    pub next: u8,
    /// Stripes of this unit that aren't written.
    pub unit: u8,
    /// Stripes of the last unit may be in the members' caches only.
    pub stale: bool,
}

/// The machine that leaves out a member that failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Kick {
    #[default]
    None,
    /// The epoch is odd.
    Begun,
    /// It waits for stripes and logs.
    Draining,
    /// The others are flushed.
    Flushed,
    /// Superblocks are being written.
    Naming,
}

/// The machine that rebuilds a member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Sync {
    #[default]
    Off,
    /// It waits for a stripe, or works on it.
    AtStripe,
    /// It has released the stripe and writes it: a planted bug.
    Late,
    /// A stripe is done; members are to be flushed.
    Done,
    Flushed,
    /// Superblocks are being written that say how far it is.
    Telling,
    /// All stripes are done, and superblocks say so.
    Whole,
    /// Superblocks are being written that call the device the member.
    Taking,
    /// It is the member.
    Over,
}

/// Contents of the superblocks, as far as they differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Superblock {
    /// The place without a member.
    pub failed: u8,
    /// Stripes of that place that the incoming device holds.
    pub committed: u8,
    /// The place that the spare has.
    pub swapped: u8,
}

/// Members while the array serves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Members {
    pub failed: u8,
    pub swapped: u8,
    pub incoming: bool,
    /// As `core::Incoming` has them.
    pub begun: u8,
    pub done: u8,
    pub committed: u8,
}

impl Default for Members {
    fn default() -> Members {
        Members {
            failed: NONE,
            swapped: NONE,
            incoming: false,
            begun: 0,
            done: 0,
            committed: 0,
        }
    }
}

impl Members {
    /// The device that has a place's block of a stripe.
    pub fn device(&self, place: usize, stripe: usize) -> Option<usize> {
        if place as u8 == self.swapped {
            return Some(SPARE);
        }
        if place as u8 != self.failed {
            return Some(place);
        }
        (self.incoming && stripe < self.begun as usize).then_some(SPARE)
    }

    /// The place whose block of a stripe would be missing after a power cut.
    pub fn uncommitted(&self, stripe: usize) -> Option<usize> {
        let there = self.incoming && stripe < self.committed as usize;
        (self.failed != NONE && !there).then_some(self.failed as usize)
    }

    /// Devices that are flushed.
    pub fn has(&self, device: usize) -> bool {
        match device {
            SPARE => self.incoming || self.swapped != NONE,
            _ => device as u8 != self.failed && device as u8 != self.swapped,
        }
    }
}

/// A write request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Write {
    pub submitted: bool,
    /// Blocks that aren't done, as a mask.
    pub left: u8,
}

/// A flush request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Flush {
    #[default]
    None,
    Flying,
    Done,
}

/// Versions that users may find in a sector. Versions are bits: 1 for version 0, and so on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Expected {
    /// After a power cut.
    pub may: u8,
    /// The same once the flush in flight is done.
    pub after_flush: u8,
    /// The version that was acknowledged last.
    pub now: u8,
}

/// See the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct State {
    /// By device, stripe and sector of the block.
    pub media: [[[Sector; SECTORS]; STRIPES]; DEVICES],
    /// Stable logs, by device and stripe.
    pub entries: [[Entry; STRIPES]; DEVICES],
    pub stripes: [Stripe; STRIPES],
    /// Logs by the place that has them.
    pub logs: [Log; MEMBERS],
    pub epoch: u8,
    pub kick: Kick,
    /// Stripes that the kick waits for, and logs behind them, as a mask.
    pub waits: u8,
    pub sync: Sync,
    /// The stripe that is rebuilt next, and the block that was calculated.
    pub sync_stripe: u8,
    pub sync_block: [Value; SECTORS],
    pub superblock: Superblock,
    /// Superblocks in flight.
    pub next_superblock: Option<Superblock>,
    pub members: Members,
    /// The device that doesn't work any more.
    pub dead: u8,
    pub writes: [Write; WRITES],
    pub flush: Flush,
    /// By stripe, block and sector.
    pub expected: [[[Expected; SECTORS]; BLOCKS]; STRIPES],
}

impl State {
    /// True while a kick stops the stripes.
    pub fn is_stopped(&self) -> bool {
        self.epoch % 2 == 1
    }

    /// The device that doesn't work, if the array counts on it still.
    pub fn dead_member(&self) -> Option<usize> {
        let dead = self.dead as usize;
        (self.dead != NONE && self.members.has(dead)).then_some(dead)
    }
}
