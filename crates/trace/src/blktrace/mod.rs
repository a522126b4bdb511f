//! Files in the format of `blktrace`: `NAME.blktrace.N`, one for each CPU, or one dump of all (`blkparse -d`).
//!
//! A record is 48 bytes in the writer's byte order, followed by its payload, without padding. Constants are those of
//! Linux' `blktrace_api.h`, as docs/decisions/0008-trace.md lists them.

mod capture;
mod reader;
mod record;
mod writer;

pub use capture::{Capture, files_of};
pub use reader::{ReadError, Reader, Step};
pub use record::{Record, record_of};
pub use writer::{CaptureWriter, Writer, Written, write_capture};

use crate::{Device, Event};

/// First four bytes of a record; the lowest byte is the version.
pub const MAGIC: u32 = 0x6561_7400;
/// The only version of the format.
pub const VERSION: u32 = 7;
/// Bytes of a record without its payload.
pub const RECORD_BYTES: usize = 48;

/// Bit of an action: a cgroup's number precedes the payload.
const CGROUP: u32 = 0x100;

/// Categories: the upper half of an action.
mod category {
    pub const READ: u32 = 1 << 16;
    pub const WRITE: u32 = 2 << 16;
    pub const FLUSH: u32 = 4 << 16;
    pub const QUEUE: u32 = 0x10 << 16;
    pub const REQUEUE: u32 = 0x20 << 16;
    pub const ISSUE: u32 = 0x40 << 16;
    pub const COMPLETE: u32 = 0x80 << 16;
    pub const FS: u32 = 0x100 << 16;
    /// Commands passed through to the device; they have no sectors.
    pub const PC: u32 = 0x200 << 16;
    pub const NOTIFY: u32 = 0x400 << 16;
    pub const DISCARD: u32 = 0x2000 << 16;
    pub const FUA: u32 = 0x8000 << 16;
}

/// Codes of notifications: the lower half of an action.
mod notify {
    pub const PROCESS: u32 = 0;
    pub const TIMESTAMP: u32 = 1;
    pub const MESSAGE: u32 = 2;
}

/// Prefix of our messages that name a device; messages of other programs don't have it.
const NAME_MESSAGE: &str = "pvblk device ";
/// Prefix of our messages that report events lost by a queue.
const DROP_MESSAGE: &str = "pvblk dropped ";

/// Prefix of our messages that tell how many requests are followed.
const EVERY_MESSAGE: &str = "pvblk follows one request in ";

/// N, if `message` is one of ours that tells that from now on one request in N is followed.
pub fn every(message: &str) -> Option<u32> {
    let every = message.strip_prefix(EVERY_MESSAGE)?.parse().ok()?;
    Some(every).filter(|every| *every > 0)
}

/// The name of a device, if `message` is one of ours that tells a name.
pub fn name(message: &str) -> Option<&str> {
    message.strip_prefix(NAME_MESSAGE)
}

/// The gap that `message` reports, if it is one of ours: `pvblk dropped N events until T`, with T in nanoseconds. Older captures
/// have no `until`: then the gap is a moment.
pub fn gap(time_ns: u64, device: Device, message: &str) -> Option<Event> {
    let mut words = message.strip_prefix(DROP_MESSAGE)?.split_whitespace();
    let lost = words.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let until = words.skip_while(|word| *word != "until").nth(1);
    let until_ns = until.and_then(|t| t.parse().ok()).unwrap_or(time_ns);
    Some(Event::gap(device, time_ns, until_ns.max(time_ns), lost))
}
