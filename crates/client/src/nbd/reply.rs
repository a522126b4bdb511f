//! What a server answers: headers, parsed and checked without I/O.

use pvblk_block::Status;
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{
    CHUNK_BYTES, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, err,
    u32_at, u64_at,
};

/// Longest payload of an error chunk, in bytes: a message and a few numbers.
const MAX_ERROR: u32 = 8192;

/// A header of a reply; what follows it is not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// All of a reply but a read's data.
    Simple { cookie: u64, error: u32 },
    /// One chunk of a reply, with `len` bytes of payload.
    Chunk {
        cookie: u64,
        kind: u16,
        last: bool,
        len: u32,
    },
}

/// The first header of `bytes` and its length; `None` if more bytes are needed. Errors say what is wrong.
pub(super) fn head(bytes: &[u8], structured: bool) -> Result<Option<(Head, usize)>, String> {
    if bytes.len() < SIMPLE_REPLY_BYTES {
        return Ok(None);
    }
    match u32_at(bytes, 0) {
        SIMPLE_REPLY_MAGIC => {
            let head = Head::Simple {
                error: u32_at(bytes, 4),
                cookie: u64_at(bytes, 8),
            };
            Ok(Some((head, SIMPLE_REPLY_BYTES)))
        }
        STRUCTURED_REPLY_MAGIC if !structured => {
            Err("a structured reply, which was not negotiated".into())
        }
        STRUCTURED_REPLY_MAGIC if bytes.len() < CHUNK_BYTES => Ok(None),
        STRUCTURED_REPLY_MAGIC => {
            let flags = u32_at(bytes, 4) >> 16;
            if flags & !u32::from(chunk::FLAG_DONE) != 0 {
                return Err(format!("a chunk with unknown flags {flags:#x}"));
            }
            let head = Head::Chunk {
                kind: u32_at(bytes, 4) as u16,
                last: flags != 0,
                cookie: u64_at(bytes, 8),
                len: u32_at(bytes, 16),
            };
            Ok(Some((head, CHUNK_BYTES)))
        }
        other => Err(format!("a reply that starts with {other:#010x}")),
    }
}

/// Bytes of a chunk's payload that are needed to understand it: all but data. Errors if `len` can't be.
pub(super) fn fixed_part(kind: u16, len: u32, most_data: u32) -> Result<usize, String> {
    let sound = match kind {
        chunk::NONE => len == 0,
        chunk::OFFSET_DATA => len > 8 && len - 8 <= most_data,
        chunk::OFFSET_HOLE => len == 12,
        k if is_error(k) => (6..=MAX_ERROR).contains(&len),
        _ => {
            return Err(format!(
                "a chunk of type {kind}, which no request asked for"
            ));
        }
    };
    if !sound {
        return Err(format!("a chunk of type {kind} with {len} bytes"));
    }
    Ok(match kind {
        chunk::OFFSET_DATA => 8,
        _ => len as usize,
    })
}

/// Chunk types from here on are errors, also those that nobody knows yet.
pub(super) fn is_error(kind: u16) -> bool {
    kind & 1 << 15 != 0
}

/// The number in an error chunk; errors if its message is longer than the chunk.
pub(super) fn error_of_chunk(payload: &[u8]) -> Result<u32, String> {
    let message = usize::from(u16::from_be_bytes([payload[4], payload[5]]));
    let error = u32_at(payload, 0);
    if message > payload.len() - 6 {
        return Err("an error whose message is longer than its chunk".into());
    }
    if error == 0 {
        return Err("an error chunk without an error".into());
    }
    Ok(error)
}

/// A device's status for an error of the wire.
pub(super) fn status_of(error: u32) -> Status {
    match error {
        0 => Status::Ok,
        err::EPERM => Status::ReadOnly,
        err::EINVAL => Status::Invalid,
        err::ENOSPC => Status::NoSpace,
        err::ENOTSUP => Status::Unsupported,
        _ => Status::IoError,
    }
}

/// The header of a request.
pub(super) fn request(
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; proto::REQUEST_BYTES] {
    let mut b = [0; proto::REQUEST_BYTES];
    b[..4].copy_from_slice(&proto::REQUEST_MAGIC.to_be_bytes());
    b[4..6].copy_from_slice(&flags.to_be_bytes());
    b[6..8].copy_from_slice(&command.to_be_bytes());
    b[8..16].copy_from_slice(&cookie.to_be_bytes());
    b[16..24].copy_from_slice(&offset.to_be_bytes());
    b[24..].copy_from_slice(&len.to_be_bytes());
    b
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_protocol::nbd::{Command, last_chunk, parse_request, simple_reply};

    #[test]
    fn headers_are_understood_or_refused() {
        let simple = simple_reply(7, 5);
        assert_eq!(head(&simple[..15], true), Ok(None));
        let want = Head::Simple {
            cookie: 7,
            error: 5,
        };
        assert_eq!(head(&simple, false), Ok(Some((want, 16))));
        let chunked = last_chunk(chunk::OFFSET_DATA, 9, 4104);
        assert_eq!(head(&chunked[..19], true), Ok(None));
        let want = Head::Chunk {
            cookie: 9,
            kind: 1,
            last: true,
            len: 4104,
        };
        assert_eq!(head(&chunked, true), Ok(Some((want, 20))));
        assert!(head(&chunked, false).is_err());
        let mut odd = chunked;
        odd[5] = 2;
        assert!(head(&odd, true).is_err());
        assert!(head(&[0; 20], true).is_err());
    }

    #[test]
    fn payloads_have_their_lengths() {
        for (kind, len, fixed) in [
            (chunk::NONE, 0, Some(0)),
            (chunk::NONE, 1, None),
            (chunk::OFFSET_DATA, 8, None),
            (chunk::OFFSET_DATA, 9, Some(8)),
            (chunk::OFFSET_DATA, 8 + 4097, None),
            (chunk::OFFSET_HOLE, 12, Some(12)),
            (chunk::OFFSET_HOLE, 13, None),
            (chunk::ERROR, 6, Some(6)),
            (chunk::ERROR, 5, None),
            (chunk::ERROR, 1 << 20, None),
            (chunk::ERROR + 9, 20, Some(20)),
            (chunk::BLOCK_STATUS, 12, None),
        ] {
            assert_eq!(fixed_part(kind, len, 4096).ok(), fixed, "{kind} {len}");
        }
        assert_eq!(error_of_chunk(&[0, 0, 0, 28, 0, 1, b'x']), Ok(28));
        assert!(error_of_chunk(&[0, 0, 0, 28, 0, 2, b'x']).is_err());
        assert!(error_of_chunk(&[0; 6]).is_err());
    }

    #[test]
    fn requests_are_what_a_server_reads() {
        let r = parse_request(&request(1, 6, 77, 4096, 512)).unwrap();
        assert_eq!((r.flags, r.command), (1, Command::WriteZeroes));
        assert_eq!((r.cookie, r.offset, r.len), (77, 4096, 512));
    }
}
