//! Headers of requests and replies, compact and extended (proto.md, "Transmission phase"; extended ones: its branch `extension-ext-header`).

use super::{
    CHUNK_BYTES, Command, EXTENDED_BYTES, EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC,
    MAX_PAYLOAD, REQUEST_BYTES, REQUEST_MAGIC, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, cflag, chunk, u32_at, u64_at,
};

/// The form of a connection's requests and replies, which both sides agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Compact requests; a reply is one header, and the data of a read.
    #[default]
    Simple,
    /// Compact requests; a read is answered in chunks, and anything else may be.
    Structured,
    /// Requests and chunks have headers of 32 bytes with lengths of 64 bits; there is no other reply than chunks.
    Extended,
}

impl Mode {
    /// True if reads are answered in chunks.
    #[inline]
    pub fn has_chunks(self) -> bool {
        self != Mode::Simple
    }

    /// Bytes of a request's header.
    #[inline]
    pub fn request_bytes(self) -> usize {
        match self {
            Mode::Extended => EXTENDED_BYTES,
            _ => REQUEST_BYTES,
        }
    }

    /// Bytes of the shortest header that a reply may begin with.
    #[inline]
    pub fn shortest_reply(self) -> usize {
        match self {
            Mode::Extended => EXTENDED_BYTES,
            _ => SIMPLE_REPLY_BYTES,
        }
    }
}

/// A request header, not yet checked against anything but its own form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequest {
    /// Command flags ([`cflag`]), without [`cflag::PAYLOAD_LEN`] of an extended header.
    pub flags: u16,
    pub command: Command,
    /// The client's mark, returned in the reply.
    pub cookie: u64,
    pub offset: u64,
    /// Length in bytes of the range, or of the payload of a request that has one.
    pub len: u64,
    /// Bytes of payload that follow the header.
    pub payload: u32,
}

/// A request that the stream can't go on after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadRequest {
    /// It begins with this, and not with the magic number that was agreed on.
    Magic(u32),
    /// Its payload has so many bytes, more than [`MAX_PAYLOAD`].
    Payload(u64),
}

/// The bytes of a request's header.
#[derive(Clone, Copy, Debug)]
pub struct RequestHeader {
    bytes: [u8; EXTENDED_BYTES],
    len: u8,
}

impl RequestHeader {
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Command flags ([`cflag`]), without [`cflag::PAYLOAD_LEN`].
    #[inline]
    pub fn flags(&self) -> u16 {
        u16_at(&self.bytes, 4) & !cflag::PAYLOAD_LEN
    }

    /// First byte of the range.
    #[inline]
    pub fn offset(&self) -> u64 {
        u64_at(&self.bytes, 16)
    }
}

/// The header of a request, as [`parse_request`] reads it. `command` is its number; a `len` of more than 32 bits needs [`Mode::Extended`].
#[inline]
pub fn request_header(
    mode: Mode,
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    len: u64,
) -> RequestHeader {
    let is_write = Command::from(command) == Command::Write;
    let (magic, flags) = match mode {
        Mode::Extended if is_write => (EXTENDED_REQUEST_MAGIC, flags | cflag::PAYLOAD_LEN),
        Mode::Extended => (EXTENDED_REQUEST_MAGIC, flags),
        _ => (REQUEST_MAGIC, flags),
    };
    let mut b = [0; EXTENDED_BYTES];
    b[..4].copy_from_slice(&magic.to_be_bytes());
    b[4..6].copy_from_slice(&flags.to_be_bytes());
    b[6..8].copy_from_slice(&command.to_be_bytes());
    b[8..16].copy_from_slice(&cookie.to_be_bytes());
    b[16..24].copy_from_slice(&offset.to_be_bytes());
    match mode {
        Mode::Extended => b[24..].copy_from_slice(&len.to_be_bytes()),
        _ => {
            debug_assert!(len <= u64::from(u32::MAX));
            b[24..28].copy_from_slice(&(len as u32).to_be_bytes());
        }
    }
    RequestHeader {
        bytes: b,
        len: mode.request_bytes() as u8,
    }
}

/// The request at the front of `bytes`; `None` if more bytes are needed. Any bytes are fine but a wrong magic number, and with extended headers a payload
/// that no request may have.
#[inline]
pub fn parse_request(bytes: &[u8], mode: Mode) -> Result<Option<NbdRequest>, BadRequest> {
    if mode == Mode::Extended {
        return parse_extended(bytes);
    }
    let Some(b) = bytes.first_chunk::<REQUEST_BYTES>() else {
        return Ok(None);
    };
    let magic = u32_at(b, 0);
    if magic != REQUEST_MAGIC {
        return Err(BadRequest::Magic(magic));
    }
    let command = u16_at(b, 6).into();
    let len = u32_at(b, 24);
    Ok(Some(NbdRequest {
        flags: u16_at(b, 4),
        command,
        cookie: u64_at(b, 8),
        offset: u64_at(b, 16),
        len: u64::from(len),
        payload: if command == Command::Write { len } else { 0 },
    }))
}

fn parse_extended(bytes: &[u8]) -> Result<Option<NbdRequest>, BadRequest> {
    let Some(b) = bytes.first_chunk::<EXTENDED_BYTES>() else {
        return Ok(None);
    };
    let magic = u32_at(b, 0);
    if magic != EXTENDED_REQUEST_MAGIC {
        return Err(BadRequest::Magic(magic));
    }
    let (flags, len) = (u16_at(b, 4), u64_at(b, 24));
    let command = u16_at(b, 6).into();
    // QEMU's client (10.0) leaves the flag out of writes. Nobody means a write without data by that.
    let payload = match flags & cflag::PAYLOAD_LEN != 0 || command == Command::Write {
        true if len > u64::from(MAX_PAYLOAD) => return Err(BadRequest::Payload(len)),
        true => len as u32,
        false => 0,
    };
    Ok(Some(NbdRequest {
        flags: flags & !cflag::PAYLOAD_LEN,
        command,
        cookie: u64_at(b, 8),
        offset: u64_at(b, 16),
        len,
        payload,
    }))
}

/// A simple reply with `error` (0: done). The data of a read follow it.
#[inline]
pub fn simple_reply(cookie: u64, error: u32) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut b = [0; SIMPLE_REPLY_BYTES];
    b[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    b[4..8].copy_from_slice(&error.to_be_bytes());
    b[8..].copy_from_slice(&cookie.to_be_bytes());
    b
}

/// The bytes of a chunk's header.
#[derive(Clone, Copy, Debug)]
pub struct ChunkHeader {
    bytes: [u8; EXTENDED_BYTES],
    len: u8,
}

impl ChunkHeader {
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The header of a reply's only and last chunk, with `len` bytes of payload. `offset` is the request's.
#[inline]
pub fn last_chunk(mode: Mode, kind: u16, cookie: u64, offset: u64, len: u32) -> ChunkHeader {
    chunk_header(mode, chunk::FLAG_DONE, kind, cookie, offset, len)
}

/// The header of a chunk after which another one of the same reply comes.
#[inline]
pub fn next_chunk(mode: Mode, kind: u16, cookie: u64, offset: u64, len: u32) -> ChunkHeader {
    chunk_header(mode, 0, kind, cookie, offset, len)
}

#[inline]
fn chunk_header(
    mode: Mode,
    flags: u16,
    kind: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> ChunkHeader {
    let mut b = [0; EXTENDED_BYTES];
    b[4..6].copy_from_slice(&flags.to_be_bytes());
    b[6..8].copy_from_slice(&kind.to_be_bytes());
    b[8..16].copy_from_slice(&cookie.to_be_bytes());
    let n = match mode {
        Mode::Extended => {
            b[..4].copy_from_slice(&EXTENDED_REPLY_MAGIC.to_be_bytes());
            b[16..24].copy_from_slice(&offset.to_be_bytes());
            b[24..].copy_from_slice(&u64::from(len).to_be_bytes());
            EXTENDED_BYTES
        }
        _ => {
            b[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
            b[16..20].copy_from_slice(&len.to_be_bytes());
            CHUNK_BYTES
        }
    };
    ChunkHeader {
        bytes: b,
        len: n as u8,
    }
}

#[inline]
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_parsed_byte_by_byte() {
        let mut b = [0u8; 28];
        b[..8].copy_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6]);
        b[8..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        b[22..24].copy_from_slice(&[0x10, 0]);
        b[24..].copy_from_slice(&[0, 0, 2, 0]);
        let parse = |b: &[u8]| parse_request(b, Mode::Structured);
        let r = parse(&b).unwrap().unwrap();
        assert_eq!(r.flags, cflag::FUA);
        assert_eq!(r.command, Command::WriteZeroes);
        assert_eq!(r.cookie, 0x0102_0304_0506_0708);
        assert_eq!((r.offset, r.len, r.payload), (4096, 512, 0));
        assert_eq!(parse(&b[..27]), Ok(None));
        assert_eq!(
            parse_request(&[&b[..], &[0; 4]].concat(), Mode::Extended),
            Err(BadRequest::Magic(REQUEST_MAGIC))
        );
        b[7] = 1;
        assert_eq!(parse(&b).unwrap().unwrap().payload, 512);
        b[0] = 0;
        assert_eq!(parse(&b), Err(BadRequest::Magic(0x0060_9513)));
    }

    #[test]
    fn an_extended_request_is_parsed_byte_by_byte() {
        let mut b = [0u8; 32];
        b[..8].copy_from_slice(&[0x21, 0xe4, 0x1c, 0x71, 0, 0x20, 0, 1]);
        b[8..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        b[22..24].copy_from_slice(&[0x10, 0]);
        b[30..].copy_from_slice(&[2, 0]);
        let parse = |b: &[u8]| parse_request(b, Mode::Extended);
        let r = parse(&b).unwrap().unwrap();
        assert_eq!((r.flags, r.command), (0, Command::Write));
        assert_eq!(r.cookie, 0x0102_0304_0506_0708);
        assert_eq!((r.offset, r.len, r.payload), (4096, 512, 512));
        assert_eq!(parse(&b[..31]), Ok(None));
        // A write has a payload without the flag, too.
        b[5] = 0;
        assert_eq!(parse(&b).unwrap().unwrap().payload, 512);
        // Without the flag the length of others is that of a range.
        (b[7], b[27]) = (6, 1);
        let r = parse(&b).unwrap().unwrap();
        assert_eq!((r.len, r.payload), ((1 << 32) + 512, 0));
        b[5] = 0x20;
        assert_eq!(parse(&b), Err(BadRequest::Payload((1 << 32) + 512)));
        b[0] = 0;
        assert_eq!(parse(&b), Err(BadRequest::Magic(0x00e4_1c71)));
    }

    #[test]
    fn replies_have_the_bytes_of_the_document() {
        assert_eq!(
            next_chunk(Mode::Structured, chunk::BLOCK_STATUS, 2, 9, 12).as_bytes(),
            [
                0x66, 0x8e, 0x33, 0xef, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 12
            ]
        );
        assert_eq!(
            simple_reply(0x11, 22),
            [
                0x67, 0x44, 0x66, 0x98, 0, 0, 0, 22, 0, 0, 0, 0, 0, 0, 0, 0x11
            ]
        );
        assert_eq!(
            last_chunk(Mode::Structured, chunk::ERROR, 2, 9, 6).as_bytes(),
            [
                0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 6
            ]
        );
        assert_eq!(
            last_chunk(Mode::Extended, chunk::ERROR, 2, 9, 6).as_bytes(),
            [
                0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
                9, 0, 0, 0, 0, 0, 0, 0, 6
            ]
        );
    }

    #[test]
    fn requests_are_what_a_server_reads() {
        for (mode, len) in [
            (Mode::Simple, 512),
            (Mode::Structured, u64::from(u32::MAX)),
            (Mode::Extended, 1 << 40),
        ] {
            let head = request_header(mode, 1, 6, 77, 4096, len);
            let r = parse_request(head.as_bytes(), mode).unwrap().unwrap();
            assert_eq!((r.flags, r.command), (1, Command::WriteZeroes));
            assert_eq!((r.cookie, r.offset, r.len), (77, 4096, len));
            assert_eq!((head.flags(), head.offset()), (1, 4096));
            let head = request_header(mode, 1, 1, 77, 4096, 512);
            let r = parse_request(head.as_bytes(), mode).unwrap().unwrap();
            assert_eq!((r.flags, r.len, r.payload), (1, 512, 512));
            assert_eq!(head.flags(), 1);
        }
    }
}
