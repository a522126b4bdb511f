//! Constants and wire structures of the NBD protocol; pure functions, no I/O. All integers are big-endian.

mod addr;
mod contexts;
mod headers;
mod replies;

pub use addr::NbdAddr;
pub use contexts::{
    Context, Contexts, LONGEST_QUESTION, STATE_CACHED, STATE_DIRTY, STATE_HOLE, STATE_ZERO,
    parse_question,
};
pub use headers::{
    BadRequest, ChunkHeader, Mode, NbdRequest, RequestHeader, last_chunk, next_chunk,
    parse_request, request_header, simple_reply,
};
pub use replies::{ReplyHead, chunk_fixed_part, error_of_chunk, is_error, reply_head, status_of};

use pvblk_block::{Limits, Status};

/// First half of the greeting (proto.md, "Newstyle negotiation").
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second half of the greeting, and the start of every option.
pub const IHAVEOPT: u64 = 0x4948_4156_454F_5054;
/// Start of every option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of every request, with extended headers.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of a chunk of a reply, with extended headers.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Bytes of a compact request header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of an extended header: of a request, and of a reply's chunk.
pub const EXTENDED_BYTES: usize = 32;
/// Bytes of a simple reply.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a structured reply's chunk header.
pub const CHUNK_BYTES: usize = 20;
/// Longest string of the protocol, in bytes.
pub const MAX_STRING: usize = 4096;
/// Longest payload of one read or write, in bytes: the size that every client may assume.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Handshake flag: fixed newstyle (server and client).
pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
/// Handshake flag: no padding after `NBD_OPT_EXPORT_NAME` (server and client).
pub const FLAG_NO_ZEROES: u16 = 2;

/// Options (proto.md, "Option types").
pub mod opt {
    /// Picks an export the old way, without a reply on failure.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the negotiation.
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    /// Asks for TLS.
    pub const STARTTLS: u32 = 5;
    /// Describes an export.
    pub const INFO: u32 = 6;
    /// Describes an export and starts the transmission phase.
    pub const GO: u32 = 7;
    /// Turns structured replies on.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selects metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Turns extended headers on.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Option replies (proto.md, "Option reply types").
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    /// One piece of information on an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known or not supported.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// The server's policy forbids it.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// The option's data make no sense.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// The server wants TLS first.
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The request is too large.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    /// The client has extended headers already, which include structured replies.
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Information types of `NBD_REP_INFO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags (proto.md, "Transmission flags").
pub mod tflag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The medium has a seek cost.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// `NBD_CMD_TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` works.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush covers the completed writes of all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` does something.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `NBD_CMD_BLOCK_STATUS` may have a payload that names some of the contexts.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Command flags (proto.md, "Command flags").
pub mod cflag {
    /// On stable storage before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Keep the zeroed range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One chunk of data.
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail rather than zero slowly.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// With extended headers: the length is that of a payload, which follows.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Errors of the wire (proto.md, "Error values").
pub mod err {
    /// Not permitted: the export is read-only.
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    /// Out of memory.
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    /// No space, or a write past the end.
    pub const ENOSPC: u32 = 28;
    pub const ENOTSUP: u32 = 95;
}

/// Chunk types of structured replies (proto.md, "Structured reply types").
pub mod chunk {
    /// Nothing but the end.
    pub const NONE: u16 = 0;
    /// Offset and data.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset and length of zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Block status descriptors.
    pub const BLOCK_STATUS: u16 = 5;
    /// Block status descriptors of 64 bits, with extended headers.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error with a message.
    pub const ERROR: u16 = 0x8001;
    /// Flag: the last chunk of its reply.
    pub const FLAG_DONE: u16 = 1;
}

/// The command of a request (proto.md, "Request types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `NBD_CMD_READ`
    Read,
    /// `NBD_CMD_WRITE`
    Write,
    /// `NBD_CMD_DISC`
    Disconnect,
    /// `NBD_CMD_FLUSH`
    Flush,
    /// `NBD_CMD_TRIM`
    Trim,
    /// `NBD_CMD_CACHE`
    Cache,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS`
    BlockStatus,
    /// A number that we don't know.
    Unknown(u16),
}

impl From<u16> for Command {
    fn from(n: u16) -> Command {
        match n {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            n => Command::Unknown(n),
        }
    }
}

/// A big-endian number at byte `at`; panics if it isn't in `b`.
#[inline]
pub fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// A big-endian number at byte `at`; panics if it isn't in `b`.
#[inline]
pub fn u64_at(b: &[u8], at: usize) -> u64 {
    (u64::from(u32_at(b, at)) << 32) | u64::from(u32_at(b, at + 4))
}

/// Transmission flags for a device.
///
/// `CAN_MULTI_CONN` is always true here: a flush is the device's, not the connection's. Zeros can always be written; `SEND_FAST_ZERO` says that
/// the device does so by itself, and faster than they could be sent to it.
pub fn transmission_flags(limits: &Limits, mode: Mode) -> u16 {
    let mut f = tflag::HAS_FLAGS | tflag::SEND_FLUSH | tflag::SEND_FUA | tflag::CAN_MULTI_CONN;
    for (on, flag) in [
        (limits.read_only, tflag::READ_ONLY),
        (!limits.non_rotational, tflag::ROTATIONAL),
        (mode.has_chunks(), tflag::SEND_DF),
        (limits.caches_reads, tflag::SEND_CACHE),
    ] {
        f |= if on { flag } else { 0 };
    }
    if !limits.read_only {
        if limits.discard_granularity_bytes != 0 {
            f |= tflag::SEND_TRIM;
        }
        f |= tflag::SEND_WRITE_ZEROES;
        if limits.write_zeroes {
            f |= tflag::SEND_FAST_ZERO;
        }
    }
    f
}

/// Minimum, preferred and maximum block size in bytes (proto.md, "Size constraints"). Parts of a block are read, changed and written, so the
/// minimum is 1, as clients that never ask assume.
pub fn block_sizes(limits: &Limits) -> (u32, u32, u32) {
    let preferred = limits
        .logical_sector_bytes
        .max(limits.physical_sector_bytes);
    (1, preferred.max(4096), MAX_PAYLOAD)
}

/// The wire's error for a device's status; 0 for [`Status::Ok`].
#[inline]
pub fn error_of(status: Status) -> u32 {
    match status {
        Status::Ok => 0,
        Status::IoError => err::EIO,
        Status::Unsupported => err::ENOTSUP,
        Status::NoSpace => err::ENOSPC,
        Status::ReadOnly => err::EPERM,
        Status::Invalid => err::EINVAL,
    }
}

/// A few words on an error, for structured replies.
pub fn error_text(error: u32) -> &'static str {
    match error {
        err::EPERM => "the export is read-only",
        err::ENOMEM => "out of memory for data",
        err::EINVAL => "invalid flags, range, alignment or command",
        err::ENOSPC => "no space left, or past the end of the export",
        err::ENOTSUP => "the device can't do that",
        _ => "input/output error of the device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_what_the_device_can() {
        let rw = Limits::default();
        assert_eq!(transmission_flags(&rw, Mode::Simple), 0b1001_0110_1101);
        let ro = Limits {
            read_only: true,
            non_rotational: false,
            ..rw
        };
        assert_eq!(transmission_flags(&ro, Mode::Structured), 0b0001_1001_1111);
        assert_eq!(block_sizes(&rw), (1, 4096, 32 << 20));
    }
}
