//! The client's side of the negotiation (proto.md, "Fixed newstyle negotiation"), over a blocking stream.

use pvblk_block::{Error, ErrorKind, Limits, SECTOR};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT, MAX_PAYLOAD, Mode, NBDMAGIC, OPTION_REPLY_MAGIC,
    info, opt, rep, tflag, u32_at, u64_at,
};
use std::io::{Read, Write};

/// Longest payload of an option reply, in bytes: a name and a description are the longest that may come.
const MAX_REPLY: usize = 64 << 10;
/// Most replies to one option: information of a few kinds.
const MAX_REPLIES: usize = 256;

/// A server's description of an export, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Size of the export.
    pub size_bytes: u64,
    /// Transmission flags ([`tflag`]).
    pub flags: u16,
    /// Form of requests and replies.
    pub mode: Mode,
    /// Bytes: requests begin and end at multiples of it.
    pub min_block: u32,
    /// Bytes: best size of a request.
    pub preferred_block: u32,
    /// Bytes: longest payload of a request.
    pub max_block: u32,
}

impl Terms {
    /// Several connections may be used at the same time: a flush on one covers the writes of all, or there are no writes.
    pub(super) fn takes_several(&self) -> bool {
        self.has(tflag::CAN_MULTI_CONN) || self.has(tflag::READ_ONLY)
    }

    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The abilities of the export, in a device's terms.
    pub(super) fn limits(&self) -> Limits {
        let sector = self.min_block.max(512);
        let trim = self.has(tflag::SEND_TRIM) && !self.has(tflag::READ_ONLY);
        Limits {
            logical_sector_bytes: sector,
            physical_sector_bytes: self.preferred_block.clamp(sector, 1 << 20),
            optimal_bytes: 0,
            readahead_bytes: 0,
            caches_reads: false,
            max_sectors: self.max_block / SECTOR as u32,
            max_segments: 1024,
            discard_granularity_bytes: if trim { sector } else { 0 },
            write_zeroes: self.has(tflag::SEND_WRITE_ZEROES) && !self.has(tflag::READ_ONLY),
            read_only: self.has(tflag::READ_ONLY),
            volatile_cache: self.has(tflag::SEND_FLUSH),
            non_rotational: !self.has(tflag::ROTATIONAL),
            // The protocol doesn't say who else writes.
            exclusive: false,
        }
    }
}

fn lost(e: std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::new(
            ErrorKind::Disconnected,
            "the server hung up while negotiating",
        ),
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            Error::new(ErrorKind::Disconnected, "the server doesn't answer")
        }
        _ => Error::os("negotiating", e),
    }
}

fn exactly<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], Error> {
    let mut b = [0; N];
    stream.read_exact(&mut b).map_err(lost)?;
    Ok(b)
}

fn send(stream: &mut impl Write, option: u32, payload: &[&[u8]]) -> Result<(), Error> {
    let len: usize = payload.iter().map(|p| p.len()).sum();
    let mut b = IHAVEOPT.to_be_bytes().to_vec();
    b.extend(option.to_be_bytes());
    b.extend((len as u32).to_be_bytes());
    payload.iter().for_each(|p| b.extend_from_slice(p));
    stream.write_all(&b).map_err(lost)
}

/// One reply to `option`: its type and payload.
fn reply(stream: &mut impl Read, option: u32) -> Result<(u32, Vec<u8>), Error> {
    let head: [u8; 20] = exactly(stream)?;
    if u64_at(&head, 0) != OPTION_REPLY_MAGIC {
        return Err(Error::protocol("an option reply has a wrong magic number"));
    }
    if u32_at(&head, 8) != option {
        return Err(Error::protocol(format!(
            "a reply to option {} came, but {option} was sent",
            u32_at(&head, 8)
        )));
    }
    let len = u32_at(&head, 16) as usize;
    if len > MAX_REPLY {
        return Err(Error::protocol(format!(
            "an option reply of {len} bytes, more than {MAX_REPLY}"
        )));
    }
    let mut payload = vec![0; len];
    stream.read_exact(&mut payload).map_err(lost)?;
    Ok((u32_at(&head, 12), payload))
}

/// The greetings of both sides, on a fresh connection; options come next.
pub(super) fn greet(stream: &mut (impl Read + Write)) -> Result<(), Error> {
    let greeting: [u8; 16] = exactly(stream)?;
    if u64_at(&greeting, 0) != NBDMAGIC {
        return Err(Error::protocol("this is no NBD server"));
    }
    let flags = u16::from_be_bytes(match u64_at(&greeting, 8) {
        IHAVEOPT => exactly(stream)?,
        _ => {
            return Err(Error::protocol(
                "the server speaks the oldstyle protocol only",
            ));
        }
    });
    if flags & FLAG_FIXED_NEWSTYLE == 0 {
        return Err(Error::protocol("the server doesn't speak fixed newstyle"));
    }
    let ours = u32::from(FLAG_FIXED_NEWSTYLE | (flags & FLAG_NO_ZEROES));
    stream.write_all(&ours.to_be_bytes()).map_err(lost)
}

/// Asks for TLS; its handshake begins right after.
pub(super) fn ask_for_tls(stream: &mut (impl Read + Write)) -> Result<(), Error> {
    match agree(stream, opt::STARTTLS)? {
        true => Ok(()),
        false => Err(Error::protocol(
            "the server has no TLS: use nbd:// or nbd+unix:// if data may go in the clear",
        )),
    }
}

/// Negotiates `export` after the greetings; the transmission phase begins right after.
/// With `context` also the number of the metadata context `base:allocation`, if the server has it.
pub(super) fn negotiate(
    stream: &mut (impl Read + Write),
    export: &str,
    context: bool,
) -> Result<(Terms, Option<u32>), Error> {
    if export.len() > proto::MAX_STRING {
        return Err(Error::config("an export's name has at most 4096 bytes"));
    }
    let mode = if agree(stream, opt::EXTENDED_HEADERS)? {
        Mode::Extended
    } else if agree(stream, opt::STRUCTURED_REPLY)? {
        Mode::Structured
    } else {
        Mode::Simple
    };
    let context = match context && mode.has_chunks() {
        true => select_allocation(stream, export)?,
        false => None,
    };
    Ok((go(stream, export, mode)?, context))
}

/// Asks for what this option turns on; false if the server hasn't got it.
fn agree(stream: &mut (impl Read + Write), option: u32) -> Result<bool, Error> {
    send(stream, option, &[])?;
    match reply(stream, option)? {
        (rep::ACK, p) if p.is_empty() => Ok(true),
        (kind, _) if kind & ERROR != 0 => Ok(false),
        (kind, _) => Err(unexpected(kind)),
    }
}

/// Selects `base:allocation`; its number, if the server has it.
fn select_allocation(stream: &mut (impl Read + Write), export: &str) -> Result<Option<u32>, Error> {
    let option = opt::SET_META_CONTEXT;
    let (name, query) = (
        export.as_bytes(),
        proto::Context::Allocation.name().as_bytes(),
    );
    let len = |b: &[u8]| (b.len() as u32).to_be_bytes();
    let payload = [
        &len(name)[..],
        name,
        &1u32.to_be_bytes(),
        &len(query),
        query,
    ];
    send(stream, option, &payload)?;
    let mut found = None;
    for _ in 0..MAX_REPLIES {
        match reply(stream, option)? {
            (rep::ACK, p) if p.is_empty() => return Ok(found),
            (rep::META_CONTEXT, p) if p.len() >= 4 && &p[4..] == query => {
                found = Some(u32_at(&p, 0));
            }
            (rep::META_CONTEXT, p) if p.len() >= 4 => {}
            (kind, _) if kind & ERROR != 0 => return Ok(None),
            (kind, _) => return Err(unexpected(kind)),
        }
    }
    Err(Error::protocol("the server's contexts don't end"))
}

/// The bit of reply types that are errors.
const ERROR: u32 = 1 << 31;

fn unexpected(kind: u32) -> Error {
    Error::protocol(format!("an option reply of unexpected type {kind:#x}"))
}

fn go(stream: &mut (impl Read + Write), export: &str, mode: Mode) -> Result<Terms, Error> {
    let name = export.as_bytes();
    let wanted = [1u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes()];
    let len = (name.len() as u32).to_be_bytes();
    send(stream, opt::GO, &[&len, name, &wanted[0], &wanted[1]])?;
    let mut size = None;
    // What holds if the server says nothing (proto.md, "Block size constraints").
    let mut blocks = (512, 4096, MAX_PAYLOAD);
    for _ in 0..MAX_REPLIES {
        match reply(stream, opt::GO)? {
            (rep::ACK, p) if p.is_empty() => {
                let (size_bytes, flags) =
                    size.ok_or_else(|| Error::protocol("the server didn't tell the size"))?;
                return terms(size_bytes, flags, mode, blocks);
            }
            (rep::INFO, p) if p.len() >= 2 => {
                match (u16::from_be_bytes([p[0], p[1]]), p.len()) {
                    (info::EXPORT, 12) => {
                        size = Some((u64_at(&p, 2), u16::from_be_bytes([p[10], p[11]])));
                    }
                    (info::BLOCK_SIZE, 14) => {
                        blocks = (u32_at(&p, 2), u32_at(&p, 6), u32_at(&p, 10));
                    }
                    (info::EXPORT | info::BLOCK_SIZE, n) => {
                        return Err(Error::protocol(format!(
                            "information of {n} bytes, which is not its length"
                        )));
                    }
                    _ => {} // further kinds may come, and are not needed
                }
            }
            (kind, p) if kind & ERROR != 0 => {
                let text = String::from_utf8_lossy(&p);
                let why = match kind {
                    rep::ERR_UNKNOWN => "there is no such export",
                    rep::ERR_UNSUP => "the server is too old: it doesn't know NBD_OPT_GO",
                    rep::ERR_TLS_REQD => "the server wants TLS: write nbds:// or nbds+unix://",
                    rep::ERR_POLICY => "the server's policy forbids it",
                    _ => "the server refuses the export",
                };
                let more = if text.is_empty() {
                    String::new()
                } else {
                    format!(" ({})", text.trim().escape_debug())
                };
                return Err(Error::config(format!("export {export:?}: {why}{more}")));
            }
            (kind, _) => return Err(unexpected(kind)),
        }
    }
    Err(Error::protocol("the server's information doesn't end"))
}

fn terms(
    size_bytes: u64,
    flags: u16,
    mode: Mode,
    (min, preferred, max): (u32, u32, u32),
) -> Result<Terms, Error> {
    if flags & tflag::HAS_FLAGS == 0 {
        return Err(Error::protocol(
            "transmission flags without NBD_FLAG_HAS_FLAGS",
        ));
    }
    let sound = min.is_power_of_two() && min <= 65536 && preferred.is_power_of_two();
    // A maximum of all ones is how a server says that it has none.
    if !sound || preferred < min || max < min || (max != u32::MAX && !max.is_multiple_of(min)) {
        return Err(Error::protocol(format!(
            "block sizes of {min}, {preferred} and {max} bytes make no sense"
        )));
    }
    if min > 4096 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the export needs blocks of {min} bytes; at most 4096 are supported"),
        ));
    }
    // Sectors here have 512 or 4096 bytes.
    let min_block = if min > 512 { 4096 } else { 512 };
    let max_block = max.min(MAX_PAYLOAD);
    let max_block = max_block - max_block % min_block;
    if max_block == 0 || size_bytes < u64::from(min_block) || size_bytes > i64::MAX as u64 {
        return Err(Error::protocol(format!(
            "an export of {size_bytes} bytes with blocks up to {max} bytes makes no sense"
        )));
    }
    Ok(Terms {
        size_bytes,
        flags,
        mode,
        min_block,
        preferred_block: preferred,
        max_block,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// A server that says what it was told to, and a client's words that nobody hears.
    struct Script(Cursor<Vec<u8>>);

    impl Read for Script {
        fn read(&mut self, b: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(b)
        }
    }
    impl Write for Script {
        fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
            Ok(b.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn greeting() -> Vec<u8> {
        let mut b = NBDMAGIC.to_be_bytes().to_vec();
        b.extend(IHAVEOPT.to_be_bytes());
        b.extend(3u16.to_be_bytes());
        b
    }

    fn answer(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
        let mut b = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        b.extend(option.to_be_bytes());
        b.extend(kind.to_be_bytes());
        b.extend((payload.len() as u32).to_be_bytes());
        b.extend(payload);
        b
    }

    fn export(size: u64, flags: u16) -> Vec<u8> {
        let mut p = vec![0, 0];
        p.extend(size.to_be_bytes());
        p.extend(flags.to_be_bytes());
        answer(opt::GO, rep::INFO, &p)
    }

    fn sizes(min: u32, preferred: u32, max: u32) -> Vec<u8> {
        let mut p = vec![0, 3];
        p.extend([min, preferred, max].into_iter().flat_map(u32::to_be_bytes));
        answer(opt::GO, rep::INFO, &p)
    }

    fn talk(parts: &[Vec<u8>]) -> Result<Terms, Error> {
        let mut script = Script(Cursor::new(parts.concat()));
        greet(&mut script)?;
        negotiate(&mut script, "x", false).map(|(terms, _)| terms)
    }

    /// A server that has structured replies, and no extended headers.
    fn structured() -> Vec<u8> {
        let no = answer(opt::EXTENDED_HEADERS, rep::ERR_UNSUP, b"no");
        [no, answer(opt::STRUCTURED_REPLY, rep::ACK, &[])].concat()
    }

    #[test]
    fn a_sound_server_is_understood() {
        let end = answer(opt::GO, rep::ACK, &[]);
        let t = talk(&[
            greeting(),
            structured(),
            answer(opt::GO, rep::INFO, &[0, 1, b'n']),
            export(1 << 20, 0b1101),
            sizes(1, 4096, u32::MAX),
            end.clone(),
        ])
        .unwrap();
        assert_eq!((t.size_bytes, t.mode), (1 << 20, Mode::Structured));
        assert_eq!((t.min_block, t.max_block), (512, MAX_PAYLOAD));
        assert!(t.limits().volatile_cache && !t.limits().write_zeroes);
        let no = [opt::EXTENDED_HEADERS, opt::STRUCTURED_REPLY]
            .map(|option| answer(option, rep::ERR_UNSUP, b"no"))
            .concat();
        let t = talk(&[greeting(), no, export(8192, 3), end.clone()]).unwrap();
        assert!(t.mode == Mode::Simple && t.limits().read_only);
        let yes = answer(opt::EXTENDED_HEADERS, rep::ACK, &[]);
        let t = talk(&[greeting(), yes, export(8192, 3), end]).unwrap();
        assert_eq!(t.mode, Mode::Extended);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let end = answer(opt::GO, rep::ACK, &[]);
        let mut old = NBDMAGIC.to_be_bytes().to_vec();
        old.extend([0; 8]);
        let mut huge = answer(opt::GO, rep::INFO, &[]);
        huge[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        let go = |parts: Vec<Vec<u8>>| {
            let mut all = vec![greeting(), structured()];
            all.extend(parts);
            all
        };
        for (parts, says) in [
            (vec![vec![0; 18]], "no NBD server"),
            (vec![old], "oldstyle"),
            (vec![greeting()], "hung up"),
            (vec![greeting(), end.clone()], "a reply to option 7"),
            (vec![greeting(), vec![1; 20]], "wrong magic"),
            (go(vec![end.clone()]), "didn't tell the size"),
            (go(vec![huge]), "more than 65536"),
            (
                go(vec![answer(opt::GO, rep::INFO, &[0, 0, 1])]),
                "not its length",
            ),
            (go(vec![answer(opt::GO, 9, &[])]), "unexpected type"),
            (go(vec![export(4096, 0), end.clone()]), "HAS_FLAGS"),
            (go(vec![export(0, 1), end.clone()]), "makes no sense"),
            (
                go(vec![export(4096, 1), sizes(3, 4, 8), end.clone()]),
                "make no sense",
            ),
            (
                go(vec![
                    export(1 << 20, 1),
                    sizes(8192, 8192, 8192),
                    end.clone(),
                ]),
                "at most 4096",
            ),
            (
                go(vec![answer(opt::GO, rep::ERR_UNKNOWN, b"gone\n")]),
                "no such export (gone)",
            ),
            (go(vec![export(4096, 1); 300]), "doesn't end"),
        ] {
            let e = talk(&parts).unwrap_err().to_string();
            assert!(e.contains(says), "{says}: {e}");
        }
    }
}
