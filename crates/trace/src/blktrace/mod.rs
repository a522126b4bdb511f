//! Files as `blktrace` writes them: `NAME.blktrace.N`, one for each CPU, or one dump of all (`blkparse -d`).
//!
//! A record is 48 bytes in the writer's byte order, and then its payload, without padding. Constants are those of
//! Linux' `blktrace_api.h`, as docs/decisions/0008-trace.md lists them.

mod capture;
mod reader;
mod record;
mod writer;

pub use capture::{Capture, files_of};
pub use reader::{ReadError, Reader, Step};
pub use record::{Record, record_of};
pub use writer::{CaptureWriter, Writer, write_capture};

/// The first four bytes of a record; the lowest byte is the version.
pub const MAGIC: u32 = 0x6561_7400;
/// The only version there is.
pub const VERSION: u32 = 7;
/// Bytes of a record without its payload.
pub const RECORD_BYTES: usize = 48;

/// A cgroup's number precedes the payload.
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

/// A message of ours that names a device begins so; real ones don't.
const NAME_MESSAGE: &str = "pvblk device ";
/// A message of ours that tells how many events a queue lost begins so.
const DROP_MESSAGE: &str = "pvblk dropped ";

/// The name of a device, if this is a message of ours that tells one.
pub fn name(message: &str) -> Option<&str> {
    message.strip_prefix(NAME_MESSAGE)
}

/// How many events were lost, if this is a message of ours that tells that.
pub fn dropped(message: &str) -> Option<u64> {
    let count = message.strip_prefix(DROP_MESSAGE)?;
    let number = count.split_whitespace().next().and_then(|n| n.parse().ok());
    Some(number.unwrap_or(0))
}
