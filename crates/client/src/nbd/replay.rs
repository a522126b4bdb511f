//! Writing what was kept to a server that may have lost it, before anybody else uses the connection.

use super::connect::Connected;
use super::kept::{Entry, EntryKind, Held, Kept, Plant};
use super::stream::Stream;
use pvblk_block::SECTOR;
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Command, Mode, ReplyHead, cflag};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::time::Duration;

/// Most bytes of a write of the replay, so that neighbouring writes go together.
const LONGEST: u64 = 1 << 20;
/// Most commands without their replies. The replies fit any socket, so a server never waits for us while we send.
const WINDOW: usize = 64;
/// Most bytes of a write-zeroes.
const ZEROES: u64 = 1 << 30;
/// Period in which a replay looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(200);

/// Newest contents of a range.
#[derive(Clone, Copy)]
struct Piece<'a> {
    end: u64,
    kind: PieceKind<'a>,
}

#[derive(Clone, Copy)]
enum PieceKind<'a> {
    Data(&'a [u8]),
    Zeroes(u16),
    Stable,
}

/// Contents that the kept writes leave on the export: for each byte the newest, by first byte.
#[derive(Default)]
struct Newest<'a>(BTreeMap<u64, Piece<'a>>);

impl<'a> Newest<'a> {
    fn of(held: &'a [Held], backwards: bool) -> Newest<'a> {
        let mut all: Vec<(Entry, &[u8])> = held.iter().flat_map(Held::entries).collect();
        all.sort_by_key(|(e, _)| (e.stamp, e.offset));
        if backwards {
            all.reverse();
        }
        let mut newest = Newest::default();
        for (e, bytes) in all {
            newest.put(e, bytes);
        }
        newest
    }

    fn put(&mut self, e: Entry, bytes: &'a [u8]) {
        let (start, end) = (e.offset, e.offset + e.len);
        let kind = match e.kind {
            EntryKind::Data(at) => PieceKind::Data(&bytes[at..at + e.len as usize]),
            EntryKind::Zeroes(flags) => PieceKind::Zeroes(flags),
            EntryKind::Stable => PieceKind::Stable,
        };
        // The piece that begins before it may reach into it, and past it.
        if let Some((&at, &before)) = self.0.range(..start).next_back()
            && before.end > start
        {
            self.0.insert(at, cut(before, at, at, start));
            if before.end > end {
                self.0.insert(end, cut(before, at, end, before.end));
            }
        }
        let covered: Vec<u64> = self.0.range(start..end).map(|(&at, _)| at).collect();
        for at in covered {
            if let Some(piece) = self.0.remove(&at)
                && piece.end > end
            {
                self.0.insert(end, cut(piece, at, end, piece.end));
            }
        }
        self.0.insert(start, Piece { end, kind });
    }
}

/// The part `from..to` of a piece that begins at `at`.
fn cut(piece: Piece<'_>, at: u64, from: u64, to: u64) -> Piece<'_> {
    let kind = match piece.kind {
        PieceKind::Data(bytes) => PieceKind::Data(&bytes[(from - at) as usize..(to - at) as usize]),
        other => other,
    };
    Piece { end: to, kind }
}

/// Writes all that is held, and flushes. Waits for the server until `stopped`, which is asked now and then. Errors say why it isn't done.
pub(super) fn replay(
    kept: &Kept,
    connection: &Connected,
    stopped: &dyn Fn() -> bool,
) -> Result<(), String> {
    let held = kept.held();
    let newest = Newest::of(&held, kept.has(Plant::OutOfOrder));
    if newest.0.is_empty() || kept.has(Plant::NoReplay) {
        return Ok(());
    }
    let mut wire = Wire::new(connection, stopped)?;
    let mut run: Run<'_> = Run::default();
    let most = u64::from(connection.terms.max_block).min(LONGEST);
    // Only a size that the user told us to take is smaller.
    let bytes = connection.terms.size_bytes / SECTOR * SECTOR;
    for (&at, piece) in &newest.0 {
        if at >= bytes {
            break;
        }
        let piece = cut(*piece, at, at, piece.end.min(bytes));
        match piece.kind {
            PieceKind::Data(mut bytes) => {
                let mut at = at;
                while !bytes.is_empty() {
                    if !run.takes(at, most) {
                        run.send(&mut wire)?;
                    }
                    let n = bytes.len().min((most - run.len) as usize);
                    run.add(at, &bytes[..n]);
                    bytes = &bytes[n..];
                    at += n as u64;
                }
            }
            PieceKind::Zeroes(flags) => {
                let mut at = at;
                while at < piece.end {
                    let n = (piece.end - at).min(ZEROES);
                    wire.command(flags, Command::WriteZeroes, at, n, &[])?;
                    at += n;
                }
            }
            PieceKind::Stable => {}
        }
    }
    run.send(&mut wire)?;
    wire.wait(0)?;
    if kept.has(Plant::NoFlush) {
        return Ok(());
    }
    wire.command(0, Command::Flush, 0, 0, &[])?;
    wire.wait(0)
}

/// Data of neighbouring pieces that is written at once.
#[derive(Default)]
struct Run<'a> {
    at: u64,
    len: u64,
    parts: Vec<&'a [u8]>,
}

impl<'a> Run<'a> {
    fn takes(&self, at: u64, most: u64) -> bool {
        self.parts.is_empty() || (self.at + self.len == at && self.len < most)
    }

    fn add(&mut self, at: u64, bytes: &'a [u8]) {
        if self.parts.is_empty() {
            self.at = at;
        }
        self.len += bytes.len() as u64;
        self.parts.push(bytes);
    }

    fn send(&mut self, wire: &mut Wire<'_>) -> Result<(), String> {
        if !self.parts.is_empty() {
            wire.command(0, Command::Write, self.at, self.len, &self.parts)?;
        }
        self.parts.clear();
        self.len = 0;
        Ok(())
    }
}

/// Commands one behind the other over a socket that blocks.
struct Wire<'a> {
    stream: Stream,
    mode: Mode,
    stopped: &'a dyn Fn() -> bool,
    next: u64,
    /// Cookies of commands that aren't answered.
    waiting: VecDeque<u64>,
}

impl<'a> Wire<'a> {
    fn new(c: &'a Connected, stopped: &'a dyn Fn() -> bool) -> Result<Wire<'a>, String> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&*c.stream.socket, which, Some(LOOK)).map_err(|e| e.to_string())?;
        }
        Ok(Wire {
            stream: c.stream.clone(),
            mode: c.terms.mode,
            stopped,
            next: 1,
            waiting: VecDeque::new(),
        })
    }

    fn command(
        &mut self,
        flags: u16,
        command: Command,
        offset: u64,
        len: u64,
        data: &[&[u8]],
    ) -> Result<(), String> {
        self.wait(WINDOW - 1)?;
        let number = match command {
            Command::Write => 1,
            Command::Flush => 3,
            _ => 6,
        };
        // Of a write's flags only this one outlives it: the flush is ours.
        let flags = flags & cflag::NO_HOLE;
        let cookie = self.next;
        self.next += 1;
        self.waiting.push_back(cookie);
        let head = proto::request_header(self.mode, flags, number, cookie, offset, len);
        self.send(head.as_bytes())?;
        data.iter().try_for_each(|part| self.send(part))
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) => self.again(e)?,
            }
        }
        Ok(())
    }

    fn receive(&mut self, mut bytes: &mut [u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            match self.stream.read(bytes) {
                Ok(0) => return Err("the server hung up during the replay".into()),
                Ok(n) => bytes = &mut bytes[n..],
                Err(e) => self.again(e)?,
            }
        }
        Ok(())
    }

    /// Errors unless the call is to be tried again after this error.
    fn again(&self, e: io::Error) -> Result<(), String> {
        match e.kind() {
            _ if (self.stopped)() => Err("it doesn't answer what was written before".into()),
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
            _ => Err(format!("replaying: {e}")),
        }
    }

    /// Waits until at most `most` commands aren't answered.
    fn wait(&mut self, most: usize) -> Result<(), String> {
        while self.waiting.len() > most {
            let mut head = [0; proto::EXTENDED_BYTES];
            let short = self.mode.shortest_reply();
            self.receive(&mut head[..short])?;
            let found = match proto::reply_head(&head[..short], self.mode)? {
                Some(found) => found,
                None => {
                    let head = &mut head[..proto::CHUNK_BYTES];
                    self.receive(&mut head[short..])?;
                    proto::reply_head(head, self.mode)?.ok_or("a reply without an end")?
                }
            };
            let (cookie, error, last) = match found.0 {
                ReplyHead::Simple { cookie, error } => (cookie, error, true),
                ReplyHead::Chunk {
                    cookie,
                    kind,
                    last,
                    len,
                    ..
                } => {
                    let mut payload = vec![0; proto::chunk_fixed_part(kind, len, 0)?];
                    self.receive(&mut payload)?;
                    let error = match proto::is_error(kind) {
                        true => proto::error_of_chunk(&payload)?,
                        false => 0,
                    };
                    (cookie, error, last)
                }
            };
            let at = self.waiting.iter().position(|&c| c == cookie);
            let at = at.ok_or("a reply to a cookie that isn't in flight")?;
            if error != 0 {
                let text = proto::error_text(error);
                return Err(format!(
                    "the server refuses a write that it had answered before it went away: {text}"
                ));
            }
            if last {
                self.waiting.remove(at);
            }
        }
        Ok(())
    }
}
