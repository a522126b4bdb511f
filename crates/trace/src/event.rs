//! Events of the trace: one type for those of our hooks and those of a file.

use pvblk_block::trace::{Phase, TraceEvent, TraceOrigin};
use pvblk_block::{Op, RequestFlags, SECTOR, Status};
use std::fmt;

/// A device's number in blktrace's form: major in the upper 12 bits, minor in the lower 20.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub u32);

impl Device {
    /// In a gap: the gap concerns all devices.
    pub const ALL: Device = Device(0);
    /// Major number of traced layers: the first of those for local and experimental use (240 to 254 in Linux'
    /// devices.txt) that btt doesn't take for stacked devices, as it does 253, 254 and 9.
    pub const MAJOR: u32 = 240;
    /// Number of minors.
    pub const MINORS: u32 = 1 << 20;

    /// Combines both numbers; bits that don't fit are cut off.
    pub fn new(major: u32, minor: u32) -> Device {
        Device(major << 20 | minor & (Device::MINORS - 1))
    }

    pub fn major(self) -> u32 {
        self.0 >> 20
    }

    pub fn minor(self) -> u32 {
        self.0 & (Device::MINORS - 1)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.major(), self.minor())
    }
}

/// A step of a request; the letters are blkparse(1)'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Not blktrace's: events of the device were lost, from this one's time on.
    Gap,
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
    /// D: issued to the layer below.
    Issue,
    /// C: the request has completed.
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

/// Additional data of some actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extra {
    #[default]
    None,
    /// Of a remap: the origin of the request.
    Remap {
        /// The device before.
        from: Device,
        /// First sector there (512 B).
        sector: u64,
    },
    /// Of a split: the first sector (512 B) of the second part.
    Split(u64),
    /// Of an unplug: the number of waiting requests.
    Waiting(u64),
    /// Of Q, G, M, F, I, D and C that our hooks recorded: the request's identity, which no other request in flight on the
    /// device has.
    Request(u64),
    /// Of a gap: its end, and the number of lost events.
    Gap {
        /// Time in nanoseconds; events up to then may be lost.
        until_ns: u64,
        lost: u64,
    },
}

/// One step of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time in nanoseconds of a monotonic clock.
    pub time_ns: u64,
    pub action: Action,
    pub device: Device,
    /// Number of the ring in which it was recorded; blktrace's CPU.
    pub queue: u32,
    /// Number of the submitter; blktrace's process.
    pub submitter: u32,
    /// The request's operation. In blktrace files, a write of zeros looks like any other write.
    pub op: Op,
    /// Force unit access: on stable storage at completion.
    pub fua: bool,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in bytes; 0 for a flush.
    pub bytes: u32,
    /// Of a completion, the error number (errno); 0 for success.
    pub error: u16,
    /// Additional data of some actions.
    pub extra: Extra,
}

/// The greatest length that a record can hold, in bytes: a multiple of a sector that fits in 32 bits.
pub(crate) const MAX_BYTES: u32 = u32::MAX - (SECTOR as u32 - 1);

impl Event {
    /// Converts an event of our hooks, recorded at `time_ns` in ring `queue`.
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
                (Phase::Remap | Phase::Plug | Phase::Sleep, _) => Extra::None,
                _ => Extra::Request(event.other),
            },
        }
    }

    /// A gap: `lost` events of `device`, or of all devices, are lost, with times from `from_ns` to `until_ns`.
    pub(crate) fn gap(device: Device, from_ns: u64, until_ns: u64, lost: u64) -> Event {
        Event {
            time_ns: from_ns,
            action: Action::Gap,
            device,
            queue: 0,
            submitter: 0,
            op: Op::Read,
            fua: false,
            sector: 0,
            bytes: 0,
            error: 0,
            extra: Extra::Gap { until_ns, lost },
        }
    }

    /// Number of lost events, if this is a gap.
    pub fn lost(&self) -> u64 {
        match self.extra {
            Extra::Gap { lost, .. } => lost,
            _ => 0,
        }
    }

    /// The request's identity, if it is known.
    pub(crate) fn request(&self) -> Option<u64> {
        match self.extra {
            Extra::Request(id) => Some(id),
            _ => None,
        }
    }

    /// First sector after the request; saturates.
    pub fn end(&self) -> u64 {
        self.sector
            .saturating_add(u64::from(self.bytes).div_ceil(SECTOR))
    }
}

/// The error number that Linux uses for a status (errno.h).
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

/// Name of an operation in tables.
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

    /// A read of 4 KiB at sector 0.
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
