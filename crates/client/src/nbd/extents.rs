//! Block status of an export (`base:allocation`), asked over a connection of its own, on threads that may wait.

use super::connect::{Connected, connect_with_context};
use super::link::Link;
use parking_lot::Mutex;
use pvblk_block::{Error, Extent, ExtentKind, SECTOR};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Mode, ReplyHead, STATE_HOLE, STATE_ZERO, chunk, u32_at, u64_at};
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes of one question: the first, and the most. A question grows while the answers are short.
const FIRST_WINDOW: u64 = 64 << 20;
const LONGEST_WINDOW: u64 = 1 << 30;
/// The most with extended headers.
const LONGEST_EXTENDED: u64 = 1 << 40;
/// Most extents of an answer for the next question to be longer, and those from which on it is shorter.
const FEW: usize = 64;
const MANY: usize = 8192;
/// Most bytes of an answer.
const LONGEST_ANSWER: u32 = 4 << 20;
/// Time for which an answer holds, if nothing was written here meanwhile: others may write too.
const FRESH: Duration = Duration::from_secs(1);
/// Pause after a failure, in which everything counts as data.
const PAUSE: Duration = Duration::from_secs(30);

/// Asks for block status, one question at a time.
#[derive(Default)]
pub(super) struct Asker(Mutex<State>);

#[derive(Default)]
struct State {
    session: Option<Session>,
    /// Nothing is asked before this time.
    not_before: Option<Instant>,
    last: Option<Answer>,
}

/// A connection with the context selected.
struct Session {
    connection: Connected,
    context: u32,
    window: u64,
    next: u64,
}

/// Extents that the server told, in sectors, one behind the other.
struct Answer {
    at: Instant,
    /// [`Link::writes`] before the question: a write that was at the server then, and ends later, may not be told of.
    writes: u64,
    range: Range<u64>,
    extents: Vec<Extent>,
}

impl Asker {
    /// Adds extents that cover `from..to` (sectors), in order. Sectors that the server doesn't tell of are data.
    pub fn extents(&self, link: &Link, from: u64, to: u64, out: &mut Vec<Extent>) {
        let first = out.len();
        let mut state = self.0.lock();
        let mut at = from;
        while at < to {
            let writes = link.writes();
            let holds = |a: &Answer| {
                a.range.contains(&at) && a.at.elapsed() < FRESH && writes == Some(a.writes)
            };
            if !state.last.as_ref().is_some_and(holds) {
                state.last = match state.ask(link, at) {
                    Ok(answer) => Some(answer),
                    Err(why) => {
                        if let Some(why) = why {
                            tracing::warn!("{}: block status: {why}", link.uri);
                        }
                        Extent::push(out, first, at, to, ExtentKind::Data);
                        return;
                    }
                };
            }
            let Some(answer) = &state.last else { return };
            for e in &answer.extents {
                let (lo, hi) = (e.sector.max(at), (e.sector + e.sectors).min(to));
                Extent::push(out, first, lo, hi, e.kind);
            }
            at = answer.range.end.min(to);
        }
    }
}

impl State {
    /// One question from sector `at` on. The error is `None` if it was told before.
    fn ask(&mut self, link: &Link, at: u64) -> Result<Answer, Option<String>> {
        if self.not_before.is_some_and(|t| Instant::now() < t) {
            return Err(None);
        }
        self.not_before = None;
        // A connection may have ended since the last question.
        let fresh = self.session.is_none();
        let result = match self.try_once(link, at) {
            Err(_) if !fresh => self.try_once(link, at),
            result => result,
        };
        result.map_err(|why| {
            self.not_before = Some(Instant::now() + PAUSE);
            Some(why)
        })
    }

    fn try_once(&mut self, link: &Link, at: u64) -> Result<Answer, String> {
        let mut session = match self.session.take() {
            Some(session) => session,
            None => Session::open(link).map_err(|e| e.to_string())?,
        };
        let writes = link.writes().unwrap_or_default();
        let end = link.capacity.sectors().min(at + session.window / SECTOR);
        if at >= end {
            return Err("a question behind the end".into());
        }
        let begin = Instant::now();
        let extents = session.ask(at..end)?;
        match extents.len() {
            n if n <= FEW => session.window = (session.window * 2).min(session.longest()),
            n if n >= MANY => session.window = (session.window / 2).max(FIRST_WINDOW),
            _ => {}
        }
        self.session = Some(session);
        let reached = extents.last().map_or(at, |e| e.sector + e.sectors);
        if reached <= at {
            return Err("an answer that tells of no sector".into());
        }
        Ok(Answer {
            at: begin,
            writes,
            range: at..reached,
            extents,
        })
    }
}

impl Session {
    fn open(link: &Link) -> Result<Session, Error> {
        let (connection, context) = connect_with_context(&link.uri, &link.config)?;
        let context =
            context.ok_or_else(|| Error::protocol("the server has no base:allocation"))?;
        Ok(Session {
            connection,
            context,
            window: FIRST_WINDOW,
            next: 1,
        })
    }

    /// Asks for a range of sectors; extents from its first sector on, at least one.
    fn ask(&mut self, range: Range<u64>) -> Result<Vec<Extent>, String> {
        let cookie = self.next;
        self.next += 1;
        let (offset, len) = (range.start * SECTOR, (range.end - range.start) * SECTOR);
        let (number, mode) = (7, self.connection.terms.mode);
        self.send(proto::request_header(mode, 0, number, cookie, offset, len).as_bytes())?;
        let mut found = None;
        loop {
            let mut head = [0; proto::EXTENDED_BYTES];
            let mut got = mode.shortest_reply();
            self.receive(&mut head[..got])?;
            if proto::reply_head(&head[..got], mode)?.is_none() {
                self.receive(&mut head[got..proto::CHUNK_BYTES])?;
                got = proto::CHUNK_BYTES;
            }
            let (kind, last, bytes) = match proto::reply_head(&head[..got], mode)? {
                Some((
                    ReplyHead::Chunk {
                        cookie: c,
                        kind,
                        last,
                        len,
                        ..
                    },
                    _,
                )) if c == cookie => (kind, last, len),
                Some((ReplyHead::Simple { cookie: c, error }, _)) if c == cookie && error != 0 => {
                    return Err(proto::error_text(error).into());
                }
                _ => return Err("a reply to nothing that was asked".into()),
            };
            if bytes > LONGEST_ANSWER {
                return Err(format!("an answer of {bytes} bytes"));
            }
            let mut payload = vec![0; bytes as usize];
            self.receive(&mut payload)?;
            match kind {
                k if k == self.descriptors().0 && found.is_none() => {
                    found = Some(self.parse(&payload, &range)?);
                }
                chunk::NONE if bytes == 0 && last => {}
                k if proto::is_error(k) && bytes >= 6 => {
                    let error = proto::error_of_chunk(&payload)?;
                    return Err(proto::error_text(error).into());
                }
                k => return Err(format!("a chunk of type {k} with {bytes} bytes")),
            }
            if last {
                return found.ok_or_else(|| "an answer without extents".into());
            }
        }
    }

    /// Most bytes of one question.
    fn longest(&self) -> u64 {
        match self.connection.terms.mode {
            Mode::Extended => LONGEST_EXTENDED,
            _ => LONGEST_WINDOW,
        }
    }

    /// The type of chunk that has block status, the bytes before its descriptors, and those of one.
    fn descriptors(&self) -> (u16, usize, usize) {
        match self.connection.terms.mode {
            Mode::Extended => (chunk::BLOCK_STATUS_EXT, 8, 16),
            _ => (chunk::BLOCK_STATUS, 4, 8),
        }
    }

    /// Extents of a chunk's payload, cut to the range.
    fn parse(&self, payload: &[u8], range: &Range<u64>) -> Result<Vec<Extent>, String> {
        let (_, first, each) = self.descriptors();
        let count = payload.len().saturating_sub(first) / each;
        let told = match each {
            16 if payload.len() >= first => u32_at(payload, 4) as usize,
            _ => count,
        };
        if count == 0 || count != told || payload.len() != first + count * each {
            return Err(format!("block status of {} bytes", payload.len()));
        }
        if u32_at(payload, 0) != self.context {
            return Err("block status of another context".into());
        }
        let mut out = Vec::new();
        let (mut at, end) = (range.start * SECTOR, range.end * SECTOR);
        for d in payload[first..].chunks(each) {
            let (len, flags) = match each {
                16 => (u64_at(d, 0), u64_at(d, 8)),
                _ => (u64::from(u32_at(d, 0)), u64::from(u32_at(d, 4))),
            };
            if len == 0 || at >= end {
                return Err("an extent without length, or behind the end".into());
            }
            let to = at.saturating_add(len).min(end);
            let kind = match flags as u32 & (STATE_HOLE | STATE_ZERO) {
                f if f == STATE_HOLE | STATE_ZERO => ExtentKind::Hole,
                STATE_ZERO => ExtentKind::Zero,
                // A hole that may read as anything has to be copied like data.
                _ => ExtentKind::Data,
            };
            add(&mut out, range.start, at, to, kind);
            at = to;
        }
        // A last sector that is told in part, or in parts of which none covers it, is data.
        let reached = out.last().map_or(range.start, |e| e.sector + e.sectors);
        if reached < at.div_ceil(SECTOR) {
            Extent::push(&mut out, 0, reached, at.div_ceil(SECTOR), ExtentKind::Data);
        }
        Ok(out)
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            match self.connection.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(format!("asking: {e}")),
            }
        }
        Ok(())
    }

    fn receive(&mut self, mut bytes: &mut [u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            match self.connection.stream.read(bytes) {
                Ok(0) => return Err("the server hung up".into()),
                Ok(n) => bytes = &mut bytes[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return Err("the server doesn't answer".into());
                }
                Err(e) => return Err(format!("receiving: {e}")),
            }
        }
        Ok(())
    }
}

/// Adds bytes `from..to`. A sector that is data in part is data.
fn add(out: &mut Vec<Extent>, start: u64, from: u64, to: u64, kind: ExtentKind) {
    let reached = out.last().map_or(start, |e| e.sector + e.sectors);
    if kind == ExtentKind::Data {
        return Extent::push(out, 0, reached, to.div_ceil(SECTOR), kind);
    }
    let (first, end) = (from.div_ceil(SECTOR).max(reached), to / SECTOR);
    if first < end {
        Extent::push(out, 0, reached, first, ExtentKind::Data);
        Extent::push(out, 0, first, end, kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_that_begin_or_end_within_a_sector_are_data_there() {
        let mut out = Vec::new();
        for (from, to, kind) in [
            (4096, 4196, ExtentKind::Data),
            (4196, 8200, ExtentKind::Hole),
            (8200, 8300, ExtentKind::Zero),
            (8300, 9000, ExtentKind::Zero),
            (9000, 9100, ExtentKind::Data),
        ] {
            add(&mut out, 8, from, to, kind);
        }
        let told: Vec<_> = out.iter().map(|e| (e.sector, e.sectors, e.kind)).collect();
        let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
        assert_eq!(told, [(8, 1, data), (9, 7, hole), (16, 2, data)]);
    }
}
