//! Target `nbd_requests`: one connection's source on a real socket, driven by a client that is mostly good.
//!
//! As long as the client's bytes make sense: each request is answered exactly once, with the error or the data
//! that it must get, and the disk gets exactly what was asked for. Always: no panic, no more in flight than agreed,
//! and an end.

use crate::nbd_device::{BAD, PatternDisk, SECTORS, byte};
use arbitrary::{Result, Unstructured};
use pvblk_backend::{RequestSource, SourceEnd};
use pvblk_block::{BlockDevice, Limits, Op, Request};
use pvblk_export::nbd::{NbdConfig, NbdSource, Negotiated};
use pvblk_protocol::nbd::{Context, Contexts, Mode, tflag, transmission_flags};
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The reply that a request must get.
#[derive(Debug)]
struct Wanted {
    command: u16,
    offset: u64,
    len: u32,
    /// It may end with any of these; empty: success.
    errors: Vec<u32>,
    /// Numbers of the contexts that a block status is about, and of those that came.
    ids: Vec<u32>,
    told: Vec<u32>,
}

struct Play {
    device: Arc<PatternDisk>,
    limits: Limits,
    source: NbdSource,
    client: UnixStream,
    mode: Mode,
    /// Numbers of the contexts that were selected.
    selected: Vec<u32>,
    depth: usize,
    to_send: VecDeque<u8>,
    received: Vec<u8>,
    wanted: BTreeMap<u64, Wanted>,
    next_cookie: u64,
    at_device: Vec<Box<Request>>,
    /// Bytes that writes asked for and that the device was asked to write.
    written: [u64; 2],
    /// Zeros may have been written, too.
    zeroed: bool,
    /// The client's bytes make no sense any more.
    junk: bool,
    leaving: bool,
    over: bool,
}

pub fn nbd_requests(data: &[u8]) {
    let _ = play(&mut Unstructured::new(data));
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let limits = Limits {
        logical_sector_bytes: *u.choose(&[512, 512, 4096])?,
        max_sectors: *u.choose(&[65536, 8, 16, 88])?,
        max_segments: *u.choose(&[8192, 1, 2, 11])?,
        read_only: u.ratio(1, 12)?,
        write_zeroes: u.arbitrary()?,
        discard_granularity_bytes: *u.choose(&[0, 4096])?,
        ..Limits::default()
    };
    let mode = mode(u.arbitrary()?);
    let pick = match mode.has_chunks() {
        true => u.int_in_range(0..=3u8)?,
        false => 0,
    };
    let picked = Context::ALL
        .into_iter()
        .filter(|c| pick & c.id() as u8 != 0);
    let contexts: Contexts = picked.collect();
    let selected: Vec<u32> = contexts.iter().map(Context::id).collect();
    let payload_flag = match mode {
        Mode::Extended if !selected.is_empty() => tflag::BLOCK_STATUS_PAYLOAD,
        _ => 0,
    };
    let depth = u.int_in_range(1..=12)?;
    let device = Arc::new(PatternDisk::new(limits));
    let (client, server) = UnixStream::pair().expect("sockets");
    client.set_nonblocking(true).expect("sockets");
    let negotiated = Negotiated {
        export: "disk".into(),
        device: Arc::clone(&device) as Arc<dyn BlockDevice>,
        transmission_flags: transmission_flags(&limits, mode) | payload_flag,
        mode,
        contexts,
        no_zeroes: true,
        leftover: Vec::new(),
    };
    let config = NbdConfig {
        depth,
        ..NbdConfig::default()
    };
    let mut play = Play {
        device,
        limits,
        source: NbdSource::new("fuzz", server.into(), negotiated, &config),
        client,
        mode,
        selected,
        depth: depth as usize,
        to_send: VecDeque::new(),
        received: Vec::new(),
        wanted: BTreeMap::new(),
        next_cookie: u.arbitrary()?,
        at_device: Vec::new(),
        written: [0; 2],
        zeroed: false,
        junk: false,
        leaving: false,
        over: false,
    };
    let result = (0..300).try_for_each(|_| play.step(u));
    play.end();
    result
}

/// The forms that a connection may have, by the lowest bits of a byte.
fn mode(byte: u8) -> Mode {
    match byte & 3 {
        1 => Mode::Structured,
        3 => Mode::Extended,
        _ => Mode::Simple,
    }
}

impl Play {
    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=11)? {
            0..=3 => self.request(u)?,
            4 => {
                let n = u.int_in_range(1..=4096)?;
                self.send(n);
            }
            5 | 6 => self.pull(u.int_in_range(1..=16)?),
            7 | 8 => {
                let n = u.int_in_range(0..=self.at_device.len())?;
                let pick = u.arbitrary::<u16>()?;
                self.complete(n, usize::from(pick));
            }
            9 => self.push(),
            10 => self.receive(),
            _ if u.ratio(1, 6)? => {
                self.junk = true;
                let n = u.int_in_range(1..=64)?;
                self.to_send.extend(u.bytes(n)?);
            }
            _ => drop(self.source.arm()),
        }
        Ok(())
    }

    /// The client asks for something.
    fn request(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        if self.leaving || self.to_send.len() > 64 << 10 {
            return Ok(());
        }
        let command = *u.choose(&[0u16, 0, 1, 1, 3, 4, 6, 7, 5, 8, 2])?;
        if command == 2 && !u.ratio(1, 8)? {
            return Ok(());
        }
        let flags: u16 = if u.ratio(1, 3)? {
            *u.choose(&[1, 2, 4, 8, 16, 32, 3])?
        } else {
            0
        };
        let unit = u64::from(self.limits.logical_sector_bytes);
        let blocks = SECTORS * 512 / unit;
        let mut offset = u.int_in_range(0..=blocks)? * unit;
        let mut len = (u.int_in_range(0..=24)? * unit) as u32;
        if u.ratio(1, 10)? {
            offset = offset.wrapping_add_signed(i64::from(u.arbitrary::<i16>()?));
        }
        if u.ratio(1, 10)? {
            len = len.wrapping_add_signed(u.int_in_range(-600..=600)?) & 0x7fff;
        }
        if command == 0 && u.ratio(1, 40)? {
            len = u.arbitrary()?;
        }
        if command == 3 && u.ratio(7, 8)? {
            (offset, len) = (0, 0);
        }
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(1);
        let extended = self.mode == Mode::Extended;
        let question = match extended && command == 7 && u.arbitrary()? {
            true => Some(question(u, len)?),
            false => None,
        };
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        // Flag 32 says that a payload follows; here, mostly where there is one.
        let flags = match extended && command == 1 && len > 0 {
            true => flags | 32,
            false if extended => flags & !32,
            false => flags,
        };
        let flags = match question {
            Some(_) => flags | 32,
            None => flags,
        };
        self.to_send.extend(magic.to_be_bytes());
        self.to_send.extend(flags.to_be_bytes());
        self.to_send.extend(command.to_be_bytes());
        self.to_send.extend(cookie.to_be_bytes());
        self.to_send.extend(offset.to_be_bytes());
        match extended {
            true => {
                let payload = question.as_ref().map(|(bytes, _)| bytes.len() as u64);
                let field = payload.unwrap_or(u64::from(len));
                self.to_send.extend(field.to_be_bytes());
            }
            false => self.to_send.extend(len.to_be_bytes()),
        }
        let flags = if extended { flags & !32 } else { flags };
        if let Some((bytes, _)) = &question {
            self.to_send.extend(bytes);
        }
        if command == 1 {
            self.to_send
                .extend((0..u64::from(len)).map(|i| byte(offset.wrapping_add(i))));
        }
        if self.junk {
            return Ok(());
        }
        if command == 2 {
            self.leaving = true;
            return Ok(());
        }
        let mut errors = self.errors(command, flags, offset, len);
        let mut ids = self.selected.clone();
        if let Some((_, asked)) = question {
            ids = asked.unwrap_or_default();
            let known = ids.iter().all(|id| self.selected.contains(id));
            let once = (1..ids.len()).all(|n| !ids[..n].contains(&ids[n]));
            if ids.is_empty() || !known || !once {
                errors.push(22);
            }
        }
        if command == 1 && (errors.is_empty() || errors == [5]) {
            self.written[0] += u64::from(len);
        }
        self.zeroed |= command == 6;
        let wanted = Wanted {
            command,
            offset,
            len,
            errors,
            ids,
            told: Vec::new(),
        };
        self.wanted.insert(cookie, wanted);
        Ok(())
    }

    /// Everything that is wrong with a request, as errors of the protocol.
    fn errors(&self, command: u16, flags: u16, offset: u64, len: u32) -> Vec<u32> {
        const EPERM: u32 = 1;
        const EIO: u32 = 5;
        const EINVAL: u32 = 22;
        const ENOSPC: u32 = 28;
        let l = &self.limits;
        let mut errors = Vec::new();
        let (known, allowed) = match command {
            0 => (true, if self.mode.has_chunks() { 4 } else { 0 }),
            1 | 3 => (true, 0),
            4 => (l.discard_granularity_bytes > 0 && !l.read_only, 0),
            6 if l.write_zeroes => (!l.read_only, 2 | 16),
            6 => (!l.read_only, 2),
            7 => (!self.selected.is_empty(), 8),
            _ => (false, 0),
        };
        let writes = matches!(command, 1 | 4 | 6);
        if writes && l.read_only {
            errors.push(EPERM);
        }
        if !known || flags & !(allowed | 1) != 0 {
            errors.push(EINVAL);
        }
        if command == 3 {
            if offset != 0 || len != 0 {
                errors.push(EINVAL);
            }
            return errors;
        }
        let end = offset.checked_add(u64::from(len));
        if end.is_none_or(|e| e > SECTORS * 512) {
            errors.push(if matches!(command, 1 | 6) {
                ENOSPC
            } else {
                EINVAL
            });
        }
        if (command == 0 && len > 32 << 20) || (command == 7 && len == 0) {
            errors.push(EINVAL);
        }
        if errors.is_empty() && len > 0 && command != 7 {
            let (unit, end) = (u64::from(l.logical_sector_bytes), offset + u64::from(len));
            // A trim leaves blocks alone that it has only a part of; other commands need them whole.
            let (first, last) = match command {
                4 => (offset.next_multiple_of(unit), end / unit * unit),
                _ => (offset / unit * unit, end.next_multiple_of(unit)),
            };
            if first < last && first < BAD.end * 512 && BAD.start * 512 < last {
                errors.push(EIO);
            }
        }
        errors
    }

    /// The client sends up to `n` bytes; returns how many the socket took.
    fn send(&mut self, n: usize) -> usize {
        let bytes: Vec<u8> = self.to_send.iter().copied().take(n).collect();
        let sent = match self.client.write(&bytes) {
            Ok(sent) => sent,
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => bytes.len(),
        };
        self.to_send.drain(..sent);
        sent
    }

    fn ended(&mut self, end: SourceEnd) {
        self.over = true;
        match end {
            SourceEnd::Closed => assert!(self.leaving || self.junk, "nobody left"),
            SourceEnd::Broken(why) => assert!(self.junk, "a good client is refused: {why}"),
        }
    }

    fn pull(&mut self, room: usize) {
        let room = room.min(self.depth - self.at_device.len());
        if self.over || room == 0 {
            return;
        }
        let mut out = Vec::new();
        let result = self.source.pull(room, &mut out);
        assert!(out.len() <= room, "more than asked for");
        for r in &out {
            assert!(!(self.limits.read_only && r.op.is_write()));
            if r.op == Op::Write {
                let stays = (r.scratch & 0xffff) + (r.scratch >> 16);
                self.written[1] += r.sectors * 512 - stays;
            }
        }
        self.at_device.extend(out);
        self.source.woken();
        if let Err(end) = result {
            self.ended(end);
        }
    }

    fn complete(&mut self, n: usize, pick: usize) {
        let mut done = Vec::new();
        for i in 0..n {
            let at = pick.wrapping_add(i) % self.at_device.len();
            done.push(self.device.execute(self.at_device.swap_remove(at)));
        }
        self.source.complete(&mut done);
        assert!(done.is_empty());
    }

    fn push(&mut self) {
        self.source.woken();
        if let Err(end) = self.source.push() {
            self.ended(end);
        }
    }

    fn receive(&mut self) {
        let mut some = [0; 16 << 10];
        while let Ok(n) = self.client.read(&mut some) {
            if n == 0 {
                break;
            }
            self.received.extend(&some[..n]);
        }
        let mut at = 0;
        while let Some(n) = self.reply(at) {
            at += n;
        }
        self.received.drain(..at);
    }

    /// Looks at the reply at `at`; returns its length if all of it is here.
    fn reply(&mut self, at: usize) -> Option<usize> {
        let b = &self.received[at..];
        let magic = b.first_chunk::<4>()?;
        let word = |at: usize| u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let (cookie, error, data, len) = match u32::from_be_bytes(*magic) {
            0x6744_6698 if b.len() >= 16 => {
                let cookie = u64::from(word(8)) << 32 | u64::from(word(12));
                let wanted = self.wanted.get(&cookie);
                let is_read = wanted.is_some_and(|w| w.command == 0);
                assert!(!(self.mode.has_chunks() && is_read), "a read needs a chunk");
                assert_ne!(self.mode, Mode::Extended, "a simple reply");
                let bytes = match wanted {
                    Some(w) if is_read && word(4) == 0 => w.len as usize,
                    _ => 0,
                };
                let data = b.get(16..16 + bytes)?;
                (cookie, word(4), data, 16 + bytes)
            }
            magic @ (0x668e_33ef | 0x6e8a_278c)
                if b.len() >= 32 || (magic == 0x668e_33ef && b.len() >= 20) =>
            {
                let extended = magic == 0x6e8a_278c;
                let agreed = if extended {
                    Mode::Extended
                } else {
                    Mode::Structured
                };
                assert_eq!(self.mode, agreed, "a chunk that was not negotiated");
                let cookie = u64::from(word(8)) << 32 | u64::from(word(12));
                let wanted = self.wanted.get(&cookie);
                let (head, bytes) = match extended {
                    true => {
                        let offset = u64::from(word(16)) << 32 | u64::from(word(20));
                        assert!(wanted.is_none_or(|w| w.offset == offset));
                        assert_eq!(word(24), 0);
                        (32, word(28) as usize)
                    }
                    false => (20, word(16) as usize),
                };
                let kind = word(4) & 0xffff;
                let last = word(4) >> 16 == 1;
                assert!(
                    last || [0x0005, 0x0006].contains(&word(4)),
                    "one chunk for each reply, but for a status"
                );
                let payload = b.get(head..head + bytes)?;
                let (error, data) = match kind {
                    0 => (0, payload),
                    1 => {
                        let offset = u64::from(word(head)) << 32 | u64::from(word(head + 4));
                        assert!(wanted.is_none_or(|w| w.offset == offset));
                        (0, &payload[8..])
                    }
                    5 | 6 => {
                        assert_eq!(kind == 6, extended);
                        check_extents(payload, wanted, extended);
                        let id = word(head);
                        if let Some(w) = self.wanted.get_mut(&cookie) {
                            w.told.push(id);
                            let over = w.told.len() == w.ids.len();
                            assert_eq!(last, over, "a chunk for each context");
                            assert!(w.ids.contains(&id), "a context that isn't asked for");
                            let twice = &w.told[..w.told.len() - 1];
                            assert!(!twice.contains(&id), "a context twice");
                            if !last {
                                assert!(w.errors.is_empty(), "success of {w:?}");
                                return Some(head + bytes);
                            }
                        }
                        (0, &payload[..0])
                    }
                    0x8001 => (word(head), &payload[..0]),
                    _ => panic!("a chunk of kind {kind:#x}"),
                };
                (cookie, error, data, head + bytes)
            }
            0x6744_6698 | 0x668e_33ef | 0x6e8a_278c => return None,
            other => panic!("a reply starts with {other:#x}"),
        };
        let Some(wanted) = self.wanted.remove(&cookie) else {
            assert!(self.junk, "an answer to nothing, or the second one");
            return Some(len);
        };
        if error != 0 {
            assert!(
                wanted.errors.contains(&error),
                "error {error} for {wanted:?}"
            );
            return Some(len);
        }
        assert!(wanted.errors.is_empty(), "success of {wanted:?}");
        if wanted.command == 0 {
            assert_eq!(data.len(), wanted.len as usize);
            for (at, got) in (wanted.offset..).zip(data) {
                assert_eq!(*got, byte(at), "{wanted:?}");
            }
        }
        Some(len)
    }

    /// Everything that is under way comes to its end.
    fn end(&mut self) {
        let hang_up = self.junk || self.leaving;
        for _ in 0..100_000 {
            let mut moved = self.send(usize::MAX) > 0;
            if hang_up && self.to_send.is_empty() {
                let _ = self.client.shutdown(std::net::Shutdown::Write);
            }
            let before = (self.at_device.len(), self.received.len(), self.wanted.len());
            self.pull(16);
            moved |= !self.at_device.is_empty();
            self.complete(self.at_device.len(), 0);
            self.push();
            self.receive();
            moved |= before != (self.at_device.len(), self.received.len(), self.wanted.len());
            if !moved && (self.over || !hang_up) && self.to_send.is_empty() {
                break;
            }
            if self.over && self.junk {
                break;
            }
        }
        assert!(self.at_device.is_empty());
        if hang_up {
            assert!(self.over, "the client is gone, and the source stays");
        }
        if !self.junk {
            assert!(self.wanted.is_empty(), "no answer to {:?}", self.wanted);
            assert!(self.received.is_empty(), "half a reply");
            let [asked, written] = self.written;
            assert!(
                asked == written || (self.zeroed && asked < written),
                "{asked} bytes asked for and {written} written"
            );
        }
    }
}

/// The payload of a question about `len` bytes, and the contexts that it names; `None` if it isn't well-formed.
fn question(u: &mut Unstructured<'_>, len: u32) -> Result<(Vec<u8>, Option<Vec<u32>>)> {
    let mut bytes = u64::from(len).to_be_bytes().to_vec();
    let mut ids = Vec::new();
    for _ in 0..*u.choose(&[1, 1, 2, 2, 0, 3, 40])? {
        ids.push(*u.choose(&[1u32, 2, 1, 2, 3, 0, 1 << 24])?);
    }
    bytes.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
    let odd = u.ratio(1, 10)?;
    if odd {
        bytes.truncate(u.int_in_range(1..=bytes.len())?);
    }
    let whole = bytes.len() >= 12 && (bytes.len() - 8).is_multiple_of(4);
    ids.truncate(bytes.len().saturating_sub(8) / 4);
    Ok((bytes, whole.then_some(ids)))
}

fn check_extents(payload: &[u8], wanted: Option<&Wanted>, extended: bool) {
    let (first, each) = if extended { (8, 16) } else { (4, 8) };
    assert!(payload.len() >= first + each && (payload.len() - first).is_multiple_of(each));
    let word = |at: usize| {
        u64::from(u32::from_be_bytes([
            payload[at],
            payload[at + 1],
            payload[at + 2],
            payload[at + 3],
        ]))
    };
    if extended {
        assert_eq!(word(4) as usize, (payload.len() - first) / each);
    }
    // The upper half of an extended length is 0 on a disk of this size.
    let low = if extended { 4 } else { 0 };
    let lengths = (first..payload.len()).step_by(each);
    let total: u64 = lengths.map(|at| word(at + low)).sum();
    if let Some(w) = wanted {
        assert!(w.command == 7 && total > 0 && total <= u64::from(w.len));
    }
}
