//! One event, wherever it comes from: our hooks or a file.

use pvblk_block::trace::{Phase, TraceEvent, TraceOrigin};
use pvblk_block::{Op, RequestFlags, SECTOR, Status};
use std::fmt;

/// A device's number as blktrace has it: major in the upper 12 bits, minor in the lower 20.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub u32);

impl Device {
    /// Major of our floors: the first of those for local and experimental use (240 to 254 in Linux' devices.txt).
    /// 253 and 254 are left out, as 9 is: btt takes those for stacked devices.
    pub const MAJOR: u32 = 240;
    /// Most minors.
    pub const MINORS: u32 = 1 << 20;

    /// From both parts; what is too large is cut off.
    pub fn new(major: u32, minor: u32) -> Device {
        Device(major << 20 | minor & (Device::MINORS - 1))
    }

    /// The upper part.
    pub fn major(self) -> u32 {
        self.0 >> 20
    }

    /// The lower part.
    pub fn minor(self) -> u32 {
        self.0 & (Device::MINORS - 1)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.major(), self.minor())
    }
}

/// A step of a request's life; the letters are blkparse(1)'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A: remapped from another device.
    Remap,
    /// Q: reached the device.
    Queue,
    /// X: split in two.
    Split,
    /// S: waits for a tag.
    Sleep,
    /// G: got a tag.
    Get,
    /// M: merged behind another request.
    BackMerge,
    /// F: merged in front of another request.
    FrontMerge,
    /// P: the queue was plugged.
    Plug,
    /// I: inserted in a queue.
    Insert,
    /// U: the queue was unplugged.
    Unplug,
    /// R: put back after it was issued.
    Requeue,
    /// D: issued to what is below.
    Issue,
    /// C: completed.
    Complete,
}

impl From<Phase> for Action {
    fn from(phase: Phase) -> Action {
        match phase {
            Phase::Queue => Action::Queue,
            Phase::Get => Action::Get,
            Phase::BackMerge => Action::BackMerge,
            Phase::FrontMerge => Action::FrontMerge,
            Phase::Insert => Action::Insert,
            Phase::Issue => Action::Issue,
            Phase::Complete => Action::Complete,
            Phase::Remap => Action::Remap,
            Phase::Plug => Action::Plug,
            Phase::Unplug => Action::Unplug,
            Phase::Sleep => Action::Sleep,
            Phase::Split => Action::Split,
        }
    }
}

/// What some actions carry besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extra {
    /// Nothing.
    #[default]
    None,
    /// A remap: where the request was before.
    Remap {
        /// On this device,
        from: Device,
        /// at this sector (512 B).
        sector: u64,
    },
    /// A split: the first sector (512 B) of the second part.
    Split(u64),
    /// An unplug: how many requests waited.
    Waiting(u64),
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds of a monotonic clock.
    pub time_ns: u64,
    /// Which step.
    pub action: Action,
    /// On which device.
    pub device: Device,
    /// In which ring it was recorded: blktrace's CPU.
    pub queue: u32,
    /// Who submitted: blktrace's process.
    pub submitter: u32,
    /// The request's operation. blktrace can't tell a write of zeros from another write.
    pub op: Op,
    /// On stable storage at completion.
    pub fua: bool,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in bytes; 0 for a flush.
    pub bytes: u32,
    /// For a completion, the error's number (errno); 0 if it went well.
    pub error: u16,
    /// What some actions carry besides.
    pub extra: Extra,
}

/// The longest length that a record can tell, in bytes: a multiple of a sector that fits 32 bits.
pub(crate) const MAX_BYTES: u32 = u32::MAX - (SECTOR as u32 - 1);

impl Event {
    /// An event of our hooks, recorded at `time_ns` in ring `queue`.
    pub(crate) fn of(origin: &TraceOrigin, event: &TraceEvent, time_ns: u64, queue: u32) -> Event {
        let bytes = u64::from(event.sectors) * SECTOR;
        Event {
            time_ns,
            action: event.phase.into(),
            device: Device(origin.device.0),
            queue,
            submitter: origin.submitter,
            op: event.op,
            fua: event.flags.contains(RequestFlags::FUA),
            sector: event.sector,
            bytes: u32::try_from(bytes).unwrap_or(MAX_BYTES),
            error: event.status.map_or(0, errno),
            extra: match (event.phase, origin.above) {
                (Phase::Remap, Some(from)) => Extra::Remap {
                    from: Device(from.0),
                    sector: event.other,
                },
                (Phase::Split, _) => Extra::Split(event.other),
                (Phase::Unplug, _) => Extra::Waiting(event.other),
                _ => Extra::None,
            },
        }
    }

    /// First sector after it; saturates.
    pub fn end(&self) -> u64 {
        self.sector
            .saturating_add(u64::from(self.bytes).div_ceil(SECTOR))
    }
}

/// A status as Linux numbers it (errno.h).
fn errno(status: Status) -> u16 {
    use rustix::io::Errno;
    let number = match status {
        Status::Ok => return 0,
        Status::IoError => Errno::IO,
        Status::Unsupported => Errno::OPNOTSUPP,
        Status::NoSpace => Errno::NOSPC,
        Status::ReadOnly => Errno::ROFS,
        Status::Invalid => Errno::INVAL,
    };
    number.raw_os_error() as u16
}

/// An operation's name in tables.
pub fn op_name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "write zeroes",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One event, of a read of 4 KiB at sector 0.
    pub(crate) fn event() -> Event {
        Event {
            time_ns: 0,
            action: Action::Queue,
            device: Device::new(Device::MAJOR, 0),
            queue: 0,
            submitter: 0,
            op: Op::Read,
            fua: false,
            sector: 0,
            bytes: 4096,
            error: 0,
            extra: Extra::None,
        }
    }
}
