//! One connection as a device's queue, and the next one after it.

use super::OnReconnect;
use super::connect::Connected;
use super::hello::Terms;
use super::inbox::Inbox;
use super::kept::{Entry, EntryKind, Keeping, Kept, Log};
use super::link::{Link, Next, Seat, hang_up};
use super::slot::{Place, Slot, zero};
use super::stream::Stream;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, DeviceQueue, Error, Readiness, Request, Status};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Command, ReplyHead, chunk, u32_at, u64_at};
use pvblk_sys::Poller;
use pvblk_sys::socket::{self, Part};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Receives of one poll; more stay readable.
const RECEIVES: usize = 8;
/// Chunks of one read's reply. A server that needs more is playing with us.
const MOST_PARTS: usize = 1024;

/// Tokens of the queue's poller.
const SOCKET: u64 = 0;
const BELL: u64 = 1;

/// The kind of the next bytes on the stream.
#[derive(Clone, Copy)]
enum Expect {
    Head,
    /// The understood part of a chunk's payload.
    Fixed {
        id: u32,
        kind: u16,
        last: bool,
        len: u32,
        fixed: usize,
    },
    /// Data of a read, from byte `at` of it to before byte `end`.
    Data {
        id: u32,
        at: usize,
        end: usize,
        last: bool,
    },
}

pub(super) struct NbdQueue {
    name: String,
    /// `None` while the server is away, and when the volume was given up.
    stream: Option<Stream>,
    /// Number of the connections that this one is of.
    generation: u64,
    gone: bool,
    /// Holds the connection's socket and the seat's bell: a descriptor that also tells when there is room to send.
    poller: Poller,
    waits_for_room: bool,
    terms: Terms,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots whose commands are to be sent, in order, and bytes of the first one that were.
    outgoing: VecDeque<u32>,
    sent: usize,
    /// Requests that wait for the server, in order.
    backlog: VecDeque<Box<Request>>,
    /// Requests that were started on this queue.
    submissions: u64,
    inbox: Inbox,
    expect: Expect,
    done: Vec<Completion>,
    link: Arc<Link>,
    seat: Arc<Seat>,
    tracer: Tracer,
}

impl NbdQueue {
    pub(super) fn new(
        name: String,
        link: &Arc<Link>,
        seat: &Arc<Seat>,
        depth: u32,
        tracer: Tracer,
    ) -> Result<NbdQueue, Error> {
        let os = |e| Error::os(format!("{name}: waiting for its socket"), e);
        let poller = Poller::new().map_err(os)?;
        poller.add(seat.bell.as_fd(), BELL, false).map_err(os)?;
        let depth = depth as usize;
        let mut queue = NbdQueue {
            name,
            stream: None,
            generation: 0,
            gone: false,
            poller,
            waits_for_room: false,
            terms: link.terms,
            slots: (0..depth).map(|_| Slot::new()).collect(),
            free: (0..depth as u32).rev().collect(),
            outgoing: VecDeque::with_capacity(depth),
            sent: 0,
            backlog: VecDeque::new(),
            submissions: 0,
            inbox: Inbox::new(),
            expect: Expect::Head,
            done: Vec::with_capacity(depth),
            link: Arc::clone(link),
            seat: Arc::clone(seat),
            tracer,
        };
        queue.look();
        Ok(queue)
    }

    /// The volume's kept writes, and this queue's own, if any are kept.
    fn kept(&self) -> Option<(&Kept, &Log)> {
        Some((self.link.kept.as_ref()?, self.seat.log.as_ref()?))
    }

    /// Nothing is on the way in either direction: another queue may have the connection.
    fn is_idle(&self) -> bool {
        let between = matches!(self.expect, Expect::Head) && self.inbox.is_empty();
        between && self.free.len() == self.slots.len() && self.outgoing.is_empty()
    }

    fn start(&mut self, request: Box<Request>) {
        let id = self.slot();
        let stamp = match &self.link.kept {
            Some(kept) if request.op.is_write() => kept.stamp(),
            _ => 0,
        };
        self.submissions += 1;
        let slot = &mut self.slots[id as usize];
        (slot.stamp, slot.order) = (stamp, self.submissions);
        match slot.start(id, request, &self.terms) {
            Ok(()) => {
                self.flush_covers(id);
                self.outgoing.push_back(id);
            }
            Err(status) => self.finish(id, status),
        }
    }

    /// Requests for which there is no connection now.
    #[cold]
    fn submit_later(&mut self, batch: &mut Vec<Box<Request>>) {
        for request in batch.drain(..) {
            if self.gone {
                let status = Status::IoError;
                self.done.push(Completion { request, status });
                continue;
            }
            self.backlog.push_back(request);
        }
        self.look();
    }

    /// A free slot.
    fn slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::new());
            self.slots.len() as u32 - 1
        })
    }

    /// Notes what the slot's command covers, if it is a flush.
    fn flush_covers(&mut self, id: u32) {
        let slot = &mut self.slots[id as usize];
        if let (Command::Flush, Some(kept)) = (slot.command, &self.link.kept) {
            kept.positions(&mut slot.positions);
        }
    }

    fn finish(&mut self, id: u32, status: Status) {
        let slot = &mut self.slots[id as usize];
        slot.place = Place::Free;
        self.free.push(id);
        if let Some(request) = slot.request.take() {
            if request.op.is_write()
                && let Some(kept) = &self.link.kept
            {
                kept.write_ended();
            }
            self.done.push(Completion { request, status });
        }
    }

    /// Sends what there is room for.
    fn send(&mut self) -> Result<(), String> {
        if let Some(Err(e)) = self.stream.as_ref().map(Stream::flush_now)
            && e.kind() != io::ErrorKind::WouldBlock
        {
            return Err(format!("sending: {e}"));
        }
        while let (false, Some(stream)) = (self.outgoing.is_empty(), &self.stream) {
            let parts = parts(&self.outgoing, &self.slots, self.sent);
            match stream.send(parts) {
                Ok(n) => self.advance(n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(format!("sending: {e}")),
            }
        }
        Ok(())
    }

    fn advance(&mut self, mut n: usize) {
        while let Some(&id) = self.outgoing.front() {
            let slot = &mut self.slots[id as usize];
            let left = command_bytes(slot) - self.sent;
            if n < left {
                self.sent += n;
                return;
            }
            n -= left;
            self.sent = 0;
            slot.place = Place::Sent;
            if let Some(request) = &slot.request {
                self.tracer.request(Phase::Issue, request);
            }
            self.outgoing.pop_front();
        }
    }

    fn receive(&mut self) -> Result<(), String> {
        for _ in 0..RECEIVES {
            let Some(stream) = &self.stream else {
                return Ok(());
            };
            let wanted = match self.expect {
                Expect::Data { id, at, end, .. } => {
                    let slot = &self.slots[id as usize];
                    let buffers = slot.request.as_ref().map(|r| &r.buffers[..]);
                    // Only data up to the buffers' end: what follows it isn't theirs.
                    buffers
                        .filter(|_| end == slot.len as usize)
                        .map(|b| (b, at, end - at))
                }
                _ => None,
            };
            let received = self.inbox.receive(stream, wanted);
            let (direct, more) = received.map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => "the server hung up".to_owned(),
                _ => format!("receiving: {e}"),
            })?;
            if let (true, Expect::Data { at, .. }) = (direct > 0, &mut self.expect) {
                *at += direct;
            }
            self.parse()?;
            if !more {
                break;
            }
        }
        Ok(())
    }

    /// Works through what is in the inbox.
    fn parse(&mut self) -> Result<(), String> {
        loop {
            match self.expect {
                Expect::Head => {
                    let bytes = self.inbox.bytes();
                    let Some((head, len)) = proto::reply_head(bytes, self.terms.mode)? else {
                        return Ok(());
                    };
                    self.inbox.skip(len);
                    self.head(head)?;
                }
                Expect::Fixed {
                    id,
                    kind,
                    last,
                    len,
                    fixed,
                } => {
                    if self.inbox.bytes().len() < fixed {
                        return Ok(());
                    }
                    self.expect = Expect::Head;
                    self.chunk(id, kind, last, len, fixed)?;
                    self.inbox.skip(fixed);
                }
                Expect::Data { id, at, end, last } => {
                    let slot = &self.slots[id as usize];
                    let n = match &slot.request {
                        Some(r) => self.inbox.copy_to(&r.buffers, at, end),
                        None => 0,
                    };
                    if at + n < end {
                        let at = at + n;
                        self.expect = Expect::Data { id, at, end, last };
                        return Ok(());
                    }
                    self.expect = Expect::Head;
                    if last {
                        self.answered(id)?;
                    }
                }
            }
        }
    }

    /// The slot that a reply is for.
    fn slot_of(&self, cookie: u64) -> Result<u32, String> {
        let id = cookie as u32;
        match self.slots.get(id as usize) {
            Some(s) if s.place == Place::Sent && s.generation == (cookie >> 32) as u32 => Ok(id),
            _ => Err(format!(
                "a reply to cookie {cookie:#x}, which is not in flight"
            )),
        }
    }

    fn head(&mut self, head: ReplyHead) -> Result<(), String> {
        match head {
            ReplyHead::Simple { cookie, error } => {
                let id = self.slot_of(cookie)?;
                let slot = &mut self.slots[id as usize];
                let reads = slot.command == Command::Read;
                if reads && self.terms.mode.has_chunks() {
                    return Err(
                        "a simple reply to a read, though structured ones were agreed on".into(),
                    );
                }
                if !slot.parts.is_empty() || slot.error != 0 {
                    return Err("a simple reply in the middle of a structured one".into());
                }
                slot.error = error;
                if reads && error == 0 {
                    let end = slot.len as usize;
                    slot.note(0, end as u64);
                    let last = true;
                    self.expect = Expect::Data {
                        id,
                        at: 0,
                        end,
                        last,
                    };
                    return Ok(());
                }
                self.answered(id)
            }
            ReplyHead::Chunk {
                cookie,
                kind,
                last,
                offset,
                len,
            } => {
                let id = self.slot_of(cookie)?;
                let slot = &self.slots[id as usize];
                if let Some(offset) = offset.filter(|&at| at != slot.offset()) {
                    return Err(format!(
                        "a reply for byte {offset} to the request at byte {}",
                        slot.offset()
                    ));
                }
                // A read's length has 32 bits.
                let most = match slot.command {
                    Command::Read => slot.len as u32,
                    _ => 0,
                };
                let fixed = proto::chunk_fixed_part(kind, len, most)?;
                self.expect = Expect::Fixed {
                    id,
                    kind,
                    last,
                    len,
                    fixed,
                };
                Ok(())
            }
        }
    }

    /// A chunk whose understood part is at the inbox's front.
    fn chunk(
        &mut self,
        id: u32,
        kind: u16,
        last: bool,
        len: u32,
        fixed: usize,
    ) -> Result<(), String> {
        let payload = &self.inbox.bytes()[..fixed];
        let slot = &mut self.slots[id as usize];
        match kind {
            chunk::NONE if !last => return Err("an empty chunk that is not the last".into()),
            chunk::NONE => {}
            chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
                let bytes = match kind {
                    chunk::OFFSET_DATA => len - 8,
                    _ => u32_at(payload, 8),
                };
                let from = u64_at(payload, 0).checked_sub(slot.offset());
                let range = from.and_then(|f| Some((f, f.checked_add(u64::from(bytes))?)));
                let reads = slot.command == Command::Read && slot.parts.len() < MOST_PARTS;
                let Some((from, to)) = range.filter(|&(f, t)| reads && slot.note(f, t)) else {
                    return Err(format!(
                        "data of {bytes} bytes at byte {}, which the request at byte {} of {} didn't ask for or has already",
                        u64_at(payload, 0),
                        slot.offset(),
                        slot.len
                    ));
                };
                let (at, end) = (from as usize, to as usize);
                if kind == chunk::OFFSET_DATA {
                    self.expect = Expect::Data { id, at, end, last };
                    return Ok(());
                }
                if let Some(r) = &slot.request {
                    zero(r, at, end);
                }
            }
            _ => {
                let error = proto::error_of_chunk(payload)?;
                if slot.error == 0 {
                    slot.error = error;
                }
            }
        }
        if last { self.answered(id) } else { Ok(()) }
    }

    /// A command's reply is complete.
    fn answered(&mut self, id: u32) -> Result<(), String> {
        let slot = &mut self.slots[id as usize];
        self.link.note_answer();
        if slot.error != 0 {
            let status = proto::status_of(slot.error);
            if let (None, Some(kept)) = (&slot.request, &self.link.kept) {
                // The writes that it was to cover stay, and the next flush covers them.
                kept.flushed();
            }
            self.finish(id, status);
            return Ok(());
        }
        if slot.command == Command::Read && !slot.is_whole() {
            return Err(format!(
                "a read of {} bytes at byte {} was answered without all of its data",
                slot.len,
                slot.offset()
            ));
        }
        if self.link.kept.is_some() {
            self.keep(id)?;
        }
        if self.slots[id as usize].next(id, &self.terms) {
            self.flush_covers(id);
            self.outgoing.push_back(id);
            return self.send();
        }
        self.finish(id, Status::Ok);
        Ok(())
    }

    /// Keeps an answered write, or drops what an answered flush covers. An error: the answer comes too late.
    fn keep(&mut self, id: u32) -> Result<(), String> {
        let slot = &self.slots[id as usize];
        let Some((kept, log)) = self.kept() else {
            return Ok(());
        };
        let (stamp, offset, len) = (slot.stamp, slot.offset(), slot.len);
        let range = |kind| Entry {
            stamp,
            offset,
            len,
            kind,
        };
        let keeping = match (slot.command, &slot.request) {
            (Command::Write | Command::WriteZeroes, Some(_)) if slot.is_stable() => {
                kept.range(log, self.generation, range(EntryKind::Stable))
            }
            (Command::Write, Some(r)) => {
                kept.data(log, self.generation, (stamp, offset, len), &r.buffers)
            }
            (Command::WriteZeroes, Some(_)) => {
                let kind = EntryKind::Zeroes(slot.flags());
                kept.range(log, self.generation, range(kind))
            }
            (Command::Flush, of) => {
                if !kept.cover(log, self.generation, &slot.positions) {
                    return Err("the connection is over".into());
                }
                if of.is_none() {
                    kept.flushed();
                }
                return Ok(());
            }
            _ => return Ok(()),
        };
        match keeping {
            Keeping::Kept => {}
            Keeping::Full => self.slots[id as usize].flush_after = true,
            Keeping::Sealed => return Err("the connection is over".into()),
        }
        if self.link.kept.as_ref().is_some_and(Kept::wants_flush) {
            let id = self.slot();
            self.slots[id as usize].start_flush(id, self.terms.mode);
            self.flush_covers(id);
            self.outgoing.push_back(id);
            return self.send();
        }
        Ok(())
    }

    /// The connection broke: requests wait for the next one, or fail.
    #[cold]
    fn lost(&mut self, why: &str) {
        if let Some(stream) = self.stream.take() {
            // An answer that was overtaken by the loss of another connection is no news.
            hang_up(&stream.socket);
            let _ = self.poller.remove(stream.fd());
        }
        self.park();
        let name = &self.name;
        let why = match self.link.config.on_reconnect {
            // The log's line begins with the volume.
            OnReconnect::Resend => why.to_owned(),
            OnReconnect::Fail => format!("{name}: {why}"),
        };
        self.link.lost(self.generation, &why);
        self.look();
    }

    /// Takes all requests off the connection that is over, in the order of their submission.
    fn park(&mut self) {
        self.outgoing.clear();
        self.sent = 0;
        self.inbox.clear();
        self.expect = Expect::Head;
        let mut parked = Vec::new();
        self.free.clear();
        for (id, slot) in (0u32..).zip(&mut self.slots) {
            slot.place = Place::Free;
            self.free.push(id);
            if let Some(request) = slot.request.take() {
                parked.push((slot.order, request));
            }
        }
        self.free.reverse();
        parked.sort_by_key(|(order, _)| *order);
        for (_, request) in parked.into_iter().rev() {
            self.backlog.push_front(request);
        }
    }

    /// Goes on with the next connection, if there is one.
    #[cold]
    fn look(&mut self) {
        debug_assert!(self.stream.is_none());
        match self.seat.take() {
            Some(Next::Connected(c, generation)) => self.attach(c, generation),
            Some(Next::Gone) => {
                self.gone = true;
                for request in self.backlog.drain(..) {
                    let status = Status::IoError;
                    self.done.push(Completion { request, status });
                }
            }
            None => {}
        }
    }

    fn attach(&mut self, c: Connected, generation: u64) {
        if let Err(e) = self.poller.add(c.stream.fd(), SOCKET, false) {
            let why = format!("{}: waiting for its socket: {e}", self.name);
            return self.link.lost(generation, &why);
        }
        self.waits_for_room = false;
        self.stream = Some(c.stream);
        self.terms = c.terms;
        self.generation = generation;
        for request in std::mem::take(&mut self.backlog) {
            self.start(request);
        }
        if let Err(why) = self.send() {
            self.lost(&why);
        }
    }
}

/// Bytes of a slot's command on the wire.
fn command_bytes(slot: &Slot) -> usize {
    let payload = match slot.command {
        Command::Write => slot.len as usize,
        _ => 0,
    };
    slot.head.as_bytes().len() + payload
}

/// The bytes to be sent, in order, without the first `skip` bytes.
fn parts<'a>(
    outgoing: &'a VecDeque<u32>,
    slots: &'a [Slot],
    skip: usize,
) -> impl Iterator<Item = Part<'a>> {
    let all = outgoing.iter().flat_map(|&id| {
        let slot = &slots[id as usize];
        let data = match (&slot.request, slot.command) {
            (Some(r), Command::Write) => &r.buffers[..],
            _ => &[],
        };
        let data = data.iter().map(|b| Part::Buffer(b, 0));
        std::iter::once(Part::Bytes(slot.head.as_bytes())).chain(data)
    });
    socket::skip_bytes(all, skip)
}

impl DeviceQueue for NbdQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        if self.stream.is_none() {
            return self.submit_later(batch);
        }
        for request in batch.drain(..) {
            self.start(request);
        }
        if let Err(why) = self.send() {
            self.lost(&why);
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        if self.stream.is_none() {
            if self.seat.news.load(Ordering::Acquire) {
                self.look();
            }
        } else if let Err(why) = self.send().and_then(|()| self.receive()) {
            self.lost(&why);
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        let full =
            !self.outgoing.is_empty() || self.stream.as_ref().is_some_and(Stream::has_unsent);
        if full != self.waits_for_room
            && let Some(stream) = &self.stream
        {
            if let Err(e) = self.poller.set(stream.fd(), SOCKET, true, full) {
                self.lost(&format!("waiting for its socket: {e}"));
            }
            self.waits_for_room = full;
        }
        let news = match &self.stream {
            None => self.seat.news.load(Ordering::Acquire),
            Some(stream) => stream.has_data(),
        };
        match self.done.is_empty() && !news {
            true => Readiness::Wait(None),
            false => Readiness::Ready,
        }
    }

    fn woken(&mut self) {
        if self.stream.is_none() {
            self.look();
        } else if self.is_idle()
            && let Err(why) = self.receive()
        {
            // Nobody polls a queue without requests.
            self.lost(&why);
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        let idle = self.is_idle();
        let own = self.stream.take().map(|stream| {
            let terms = self.terms;
            (Connected { stream, terms }, self.generation)
        });
        if let Some((c, _)) = &own {
            let _ = self.poller.remove(c.stream.fd());
        }
        let kept = self.link.kept.as_ref().filter(|_| !idle);
        kept.map(Kept::flushed);
        let leaves = self.link.leave(&self.seat, own, idle);
        // Politeness only: a command half sent would be taken for its beginning.
        if let (true, Some(c)) = (self.outgoing.is_empty(), leaves) {
            let bye = proto::request_header(c.terms.mode, 0, 2, 0, 0, 0);
            let bye = [Part::Bytes(bye.as_bytes())].into_iter();
            let _ = c.stream.send(bye);
        }
    }
}
