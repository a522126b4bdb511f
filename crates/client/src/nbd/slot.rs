//! A request in flight, and the command that is on the wire for it.

use super::hello::Terms;
use super::kept::Positions;
use pvblk_block::{Op, Request, RequestFlags, SECTOR, Status};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Command, Mode, RequestHeader, cflag, tflag};

/// Most bytes of one command without data, so that its length fits into 32 bits and no server chokes on it.
const MOST_WITHOUT_DATA: u64 = 1 << 30;
/// The same with extended headers: for the whole of any disk that there is.
const MOST_EXTENDED: u64 = 1 << 50;

/// Where a slot's command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Free,
    /// Waits to be sent, or is being sent.
    Waiting,
    /// With the server.
    Sent,
}

/// One request in flight.
pub(super) struct Slot {
    pub request: Option<Box<Request>>,
    pub place: Place,
    pub head: RequestHeader,
    pub command: Command,
    /// Changes with each command, so that an answer to an earlier one is known as such.
    pub generation: u32,
    /// Length of the command's range in bytes.
    pub len: u64,
    /// Bytes of the request that were done before it.
    done: u64,
    /// Parts of a read's data that came, as ranges of its bytes.
    pub parts: Vec<(u32, u32)>,
    /// The first error of the answer.
    pub error: u32,
    /// Number of the request's submission, over all queues.
    pub stamp: u64,
    /// The same in its queue.
    pub order: u64,
    /// A flush has to complete after the request before it is answered.
    pub flush_after: bool,
    /// A flush: the kept writes that it covers.
    pub positions: Positions,
}

impl Slot {
    pub(super) fn new() -> Slot {
        Slot {
            request: None,
            place: Place::Free,
            head: proto::request_header(Mode::Simple, 0, 3, 0, 0, 0),
            command: Command::Flush,
            generation: 0,
            len: 0,
            done: 0,
            parts: Vec::new(),
            error: 0,
            stamp: 0,
            order: 0,
            flush_after: false,
            positions: Positions::new(),
        }
    }

    /// A flush that is no request's.
    pub(super) fn start_flush(&mut self, id: u32, mode: Mode) {
        self.put(id, mode, Command::Flush, (0, 3), 0, 0);
    }

    /// Takes a request. An error is its status: there is nothing to send.
    pub(super) fn start(
        &mut self,
        id: u32,
        request: Box<Request>,
        terms: &Terms,
    ) -> Result<(), Status> {
        self.done = 0;
        self.flush_after = false;
        let (op, flags) = (request.op, request.flags);
        self.request = Some(request);
        match op {
            // Nothing is volatile where there is no flush.
            Op::Flush if !terms.has(tflag::SEND_FLUSH) => return Err(Status::Ok),
            Op::Discard if flags.contains(RequestFlags::SECURE) => return Err(Status::Unsupported),
            _ => {}
        }
        self.encode(id, terms);
        Ok(())
    }

    /// Makes the command for what is not done yet.
    fn encode(&mut self, id: u32, terms: &Terms) {
        let Some(r) = &self.request else { return };
        let (command, number) = match r.op {
            Op::Read => (Command::Read, 0),
            Op::Write => (Command::Write, 1),
            Op::Flush => (Command::Flush, 3),
            Op::Discard => (Command::Trim, 4),
            Op::WriteZeroes => (Command::WriteZeroes, 6),
        };
        let left = r.sectors * SECTOR - self.done;
        let len = if r.op.has_data() {
            left // checked against the limits
        } else {
            left.min(match terms.mode {
                Mode::Extended => MOST_EXTENDED,
                _ => MOST_WITHOUT_DATA,
            })
        };
        let mut flags = 0;
        if r.op.is_write() && r.flags.contains(RequestFlags::FUA) && terms.has(tflag::SEND_FUA) {
            flags |= cflag::FUA;
        }
        if r.op == Op::WriteZeroes && r.flags.contains(RequestFlags::NO_UNMAP) {
            flags |= cflag::NO_HOLE;
        }
        let offset = r.sector * SECTOR + self.done;
        self.put(id, terms.mode, command, (flags, number), offset, len);
    }

    fn put(
        &mut self,
        id: u32,
        mode: Mode,
        command: Command,
        (flags, number): (u16, u16),
        offset: u64,
        len: u64,
    ) {
        self.generation = self.generation.wrapping_add(1);
        let cookie = u64::from(self.generation) << 32 | u64::from(id);
        self.head = proto::request_header(mode, flags, number, cookie, offset, len);
        self.command = command;
        self.len = len;
        self.parts.clear();
        self.error = 0;
        self.place = Place::Waiting;
    }

    /// The command was answered without an error: makes the next one, or tells that there is none.
    pub(super) fn next(&mut self, id: u32, terms: &Terms) -> bool {
        let Some(r) = &self.request else {
            return false;
        };
        let flushed = self.command == Command::Flush;
        if flushed || r.op == Op::Read {
            return false;
        }
        self.done += self.len;
        if self.done < r.sectors * SECTOR {
            self.encode(id, terms);
            return true;
        }
        // FUA by hand, for servers without it.
        let fua = r.flags.contains(RequestFlags::FUA) && !terms.has(tflag::SEND_FUA);
        if (fua || self.flush_after) && terms.has(tflag::SEND_FLUSH) {
            self.put(id, terms.mode, Command::Flush, (0, 3), 0, 0);
            return true;
        }
        false
    }

    /// True if the command is stable at the server when it is answered.
    pub(super) fn is_stable(&self) -> bool {
        self.flags() & cflag::FUA != 0
    }

    /// Flags of the command.
    pub(super) fn flags(&self) -> u16 {
        self.head.flags()
    }

    /// First byte of the command on the export.
    pub(super) fn offset(&self) -> u64 {
        self.head.offset()
    }

    /// Notes that bytes `from..to` of a read came. False if they came before or are none of it.
    pub(super) fn note(&mut self, from: u64, to: u64) -> bool {
        if from >= to || to > self.len {
            return false;
        }
        let (from, to) = (from as u32, to as u32);
        let fresh = self.parts.iter().all(|&(a, b)| to <= a || b <= from);
        self.parts.push((from, to));
        fresh
    }

    /// True if all of a read's data came.
    pub(super) fn is_whole(&self) -> bool {
        let came: u32 = self.parts.iter().map(|(a, b)| b - a).sum();
        u64::from(came) == self.len
    }
}

/// Zeroes bytes `at..end` of a request's data.
pub(super) fn zero(request: &Request, mut at: usize, mut end: usize) {
    for b in &request.buffers {
        let n = b.len();
        if at < n.min(end)
            && let Some(piece) = b.slice(at, n.min(end) - at)
        {
            piece.zero();
        }
        (at, end) = (at.saturating_sub(n), end.saturating_sub(n));
    }
}
