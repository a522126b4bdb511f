//! A server's replies as a client reads them: headers and payloads, parsed and checked.

use super::{
    CHUNK_BYTES, EXTENDED_BYTES, EXTENDED_REPLY_MAGIC, Mode, SIMPLE_REPLY_BYTES,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, err, u32_at, u64_at,
};
use pvblk_block::Status;

/// Longest payload of an error chunk, in bytes: a message and a few numbers.
const MAX_ERROR: u32 = 8192;

/// A header of a reply; what follows it is not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// All of a reply but a read's data.
    Simple {
        cookie: u64,
        /// [`err`], or 0.
        error: u32,
    },
    /// One chunk of a reply.
    Chunk {
        cookie: u64,
        /// [`chunk`], or a type that nobody knows yet.
        kind: u16,
        /// No other chunk follows.
        last: bool,
        /// The request's offset, which an extended header repeats.
        offset: Option<u64>,
        /// Bytes of payload.
        len: u32,
    },
}

/// The first header of `bytes` and its length; `None` if more bytes are needed. Errors say what is wrong.
pub fn reply_head(bytes: &[u8], mode: Mode) -> Result<Option<(ReplyHead, usize)>, String> {
    if bytes.len() < mode.shortest_reply() {
        return Ok(None);
    }
    let first = u32_at(bytes, 0);
    if (first == EXTENDED_REPLY_MAGIC) != (mode == Mode::Extended) {
        return Err(format!(
            "a reply that starts with {first:#010x}, which is not what was negotiated"
        ));
    }
    match first {
        SIMPLE_REPLY_MAGIC => {
            let head = ReplyHead::Simple {
                error: u32_at(bytes, 4),
                cookie: u64_at(bytes, 8),
            };
            Ok(Some((head, SIMPLE_REPLY_BYTES)))
        }
        STRUCTURED_REPLY_MAGIC if mode == Mode::Simple => {
            Err("a structured reply, which was not negotiated".into())
        }
        STRUCTURED_REPLY_MAGIC if bytes.len() < CHUNK_BYTES => Ok(None),
        STRUCTURED_REPLY_MAGIC => {
            let head = chunk_head(bytes, None, u32_at(bytes, 16))?;
            Ok(Some((head, CHUNK_BYTES)))
        }
        EXTENDED_REPLY_MAGIC => {
            let len = u64_at(bytes, 24);
            let len =
                u32::try_from(len).map_err(|_| format!("a chunk with {len} bytes of payload"))?;
            let head = chunk_head(bytes, Some(u64_at(bytes, 16)), len)?;
            Ok(Some((head, EXTENDED_BYTES)))
        }
        other => Err(format!("a reply that starts with {other:#010x}")),
    }
}

fn chunk_head(bytes: &[u8], offset: Option<u64>, len: u32) -> Result<ReplyHead, String> {
    let flags = u32_at(bytes, 4) >> 16;
    if flags & !u32::from(chunk::FLAG_DONE) != 0 {
        return Err(format!("a chunk with unknown flags {flags:#x}"));
    }
    Ok(ReplyHead::Chunk {
        kind: u32_at(bytes, 4) as u16,
        last: flags != 0,
        cookie: u64_at(bytes, 8),
        offset,
        len,
    })
}

/// Bytes of a chunk's payload that are needed to understand it: all but data. Errors if `len` can't be.
pub fn chunk_fixed_part(kind: u16, len: u32, most_data: u32) -> Result<usize, String> {
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
pub fn is_error(kind: u16) -> bool {
    kind & 1 << 15 != 0
}

/// The number in an error chunk; errors if its message is longer than the chunk.
pub fn error_of_chunk(payload: &[u8]) -> Result<u32, String> {
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
pub fn status_of(error: u32) -> Status {
    match error {
        0 => Status::Ok,
        err::EPERM => Status::ReadOnly,
        err::EINVAL => Status::Invalid,
        err::ENOSPC => Status::NoSpace,
        err::ENOTSUP => Status::Unsupported,
        _ => Status::IoError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::{last_chunk, simple_reply};

    #[test]
    fn headers_are_understood_or_refused() {
        let simple = simple_reply(7, 5);
        assert_eq!(reply_head(&simple[..15], Mode::Structured), Ok(None));
        let want = ReplyHead::Simple {
            cookie: 7,
            error: 5,
        };
        assert_eq!(reply_head(&simple, Mode::Simple), Ok(Some((want, 16))));
        let chunked = last_chunk(Mode::Structured, chunk::OFFSET_DATA, 9, 512, 4104);
        let chunked = chunked.as_bytes();
        assert_eq!(reply_head(&chunked[..19], Mode::Structured), Ok(None));
        let want = ReplyHead::Chunk {
            cookie: 9,
            kind: 1,
            last: true,
            offset: None,
            len: 4104,
        };
        let found = reply_head(chunked, Mode::Structured);
        assert_eq!(found, Ok(Some((want, 20))));
        assert!(reply_head(chunked, Mode::Simple).is_err());
        let mut odd = chunked.to_vec();
        odd[5] = 2;
        assert!(reply_head(&odd, Mode::Structured).is_err());
        assert!(reply_head(&[0; 20], Mode::Structured).is_err());
    }

    #[test]
    fn extended_headers_are_the_only_ones_once_they_are_agreed_on() {
        let chunk = last_chunk(Mode::Extended, chunk::OFFSET_DATA, 9, 512, 4104);
        let bytes = chunk.as_bytes();
        assert_eq!(reply_head(&bytes[..31], Mode::Extended), Ok(None));
        let want = ReplyHead::Chunk {
            cookie: 9,
            kind: 1,
            last: true,
            offset: Some(512),
            len: 4104,
        };
        assert_eq!(reply_head(bytes, Mode::Extended), Ok(Some((want, 32))));
        assert!(reply_head(bytes, Mode::Structured).is_err());
        let mut long = bytes.to_vec();
        long[27] = 1;
        assert!(reply_head(&long, Mode::Extended).is_err());
        let simple = [&simple_reply(7, 5)[..], &[0; 16]].concat();
        assert!(reply_head(&simple, Mode::Extended).is_err());
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
            assert_eq!(
                chunk_fixed_part(kind, len, 4096).ok(),
                fixed,
                "{kind} {len}"
            );
        }
        assert_eq!(error_of_chunk(&[0, 0, 0, 28, 0, 1, b'x']), Ok(28));
        assert!(error_of_chunk(&[0, 0, 0, 28, 0, 2, b'x']).is_err());
        assert!(error_of_chunk(&[0; 6]).is_err());
    }
}
