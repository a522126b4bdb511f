//! Replies that wait to be sent, and sending them in as few calls as possible.

use super::slots::Slots;
use super::stream::Stream;
use super::window::Window;
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{EXTENDED_BYTES, Mode, NbdRequest, chunk};
use pvblk_protocol::tls::{Gather, MOST_ENCRYPTED};
use pvblk_sys::socket::{Part, SendList};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

/// Bytes sent at a time: a worker's other lanes wait for it.
const MOST_AT_ONCE: usize = 256 << 10;
/// While other disks have work on the same worker. A fifth more CPU for large replies, which is why it isn't always so.
const IN_COMPANY: usize = 64 << 10;

/// Longest head: a chunk header and an offset.
const HEAD: usize = EXTENDED_BYTES + 8;

enum Body {
    None,
    Text(&'static str),
    Bytes(Vec<u8>),
    /// The data of this slot's buffers.
    Slot(u32),
}

struct Reply {
    head: [u8; HEAD],
    head_len: u8,
    body: Body,
    /// Bytes in all.
    len: usize,
}

impl Reply {
    /// Its bytes in order.
    #[inline]
    fn parts<'a>(&'a self, slots: &'a Slots, mut take: impl FnMut(Part<'a>)) {
        take(Part::Bytes(&self.head[..self.head_len as usize]));
        match &self.body {
            Body::None => {}
            Body::Text(text) => take(Part::Bytes(text.as_bytes())),
            Body::Bytes(bytes) => take(Part::Bytes(bytes)),
            Body::Slot(slot) => {
                let data = slots.get(*slot).data();
                data.iter().for_each(|b| take(Part::Buffer(b, 0)));
            }
        }
    }
}

/// The request that a reply is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyTo {
    pub cookie: u64,
    /// First byte of its range.
    pub offset: u64,
}

impl From<&NbdRequest> for ReplyTo {
    fn from(r: &NbdRequest) -> ReplyTo {
        ReplyTo {
            cookie: r.cookie,
            offset: r.offset,
        }
    }
}

/// The replies of one connection, in the order in which they are sent.
pub(super) struct Outbox {
    queue: VecDeque<Reply>,
    /// Bytes of the first reply that are sent.
    sent: usize,
    /// Bytes sent since the connection began.
    passed: u64,
    /// Replies with a body of their own.
    descriptions: usize,
    mode: Mode,
    /// Bytes sent at a time.
    most: usize,
    /// Of a Unix socket; TCP sizes its own.
    window: Option<Window>,
}

/// The outcome of [`Outbox::send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// Everything is sent.
    All,
    /// The socket is full.
    Full,
    /// As much as may be sent at a time; there is more.
    Part,
}

impl Outbox {
    pub(super) fn new(mode: Mode, window: Option<Window>) -> Outbox {
        Outbox {
            queue: VecDeque::new(),
            sent: 0,
            passed: 0,
            descriptions: 0,
            mode,
            most: MOST_AT_ONCE,
            window,
        }
    }

    /// Other disks have work on the same worker, or not.
    pub(super) fn in_company(&mut self, company: bool) {
        self.most = if company { IN_COMPANY } else { MOST_AT_ONCE };
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Block statuses that aren't sent yet.
    pub(super) fn descriptions(&self) -> usize {
        self.descriptions
    }

    /// Bytes sent since the connection began: they tell whether the client reads.
    pub(super) fn passed(&self) -> u64 {
        self.passed
    }

    /// `more` belongs to the head: the first bytes of a chunk's payload.
    #[inline]
    fn push(&mut self, head: &[u8], more: &[u8], body: Body, body_len: usize) {
        let (first, len) = (head.len(), head.len() + more.len());
        let mut reply = Reply {
            head: [0; HEAD],
            head_len: len as u8,
            body,
            len: len + body_len,
        };
        reply.head[..first].copy_from_slice(head);
        reply.head[first..len].copy_from_slice(more);
        if let Some(w) = &mut self.window {
            w.count(reply.len);
        }
        self.queue.push_back(reply);
    }

    /// A reply of one chunk whose payload is `more` and the body.
    #[inline]
    fn chunk(&mut self, kind: u16, to: ReplyTo, more: &[u8], body: Body, body_len: usize) {
        let len = (more.len() + body_len) as u32;
        let head = proto::last_chunk(self.mode, kind, to.cookie, to.offset, len);
        self.push(head.as_bytes(), more, body, body_len);
    }

    /// Success without data.
    #[inline]
    pub(super) fn done(&mut self, to: ReplyTo) {
        match self.mode {
            Mode::Extended => self.chunk(chunk::NONE, to, &[], Body::None, 0),
            _ => self.push(&proto::simple_reply(to.cookie, 0), &[], Body::None, 0),
        }
    }

    /// Success of a read of no bytes, which a client with structured replies expects as a chunk.
    pub(super) fn no_data(&mut self, to: ReplyTo) {
        match self.mode.has_chunks() {
            true => self.chunk(chunk::NONE, to, &[], Body::None, 0),
            false => self.done(to),
        }
    }

    /// Success of a read, with the data of `slot`.
    #[inline]
    pub(super) fn data(&mut self, to: ReplyTo, len: u32, slot: u32) {
        let (body, len) = (Body::Slot(slot), len as usize);
        if self.mode.has_chunks() {
            self.chunk(chunk::OFFSET_DATA, to, &to.offset.to_be_bytes(), body, len);
        } else {
            self.push(&proto::simple_reply(to.cookie, 0), &[], body, len);
        }
    }

    /// An error ([`proto::err`]).
    pub(super) fn error(&mut self, to: ReplyTo, error: u32) {
        if !self.mode.has_chunks() {
            self.push(&proto::simple_reply(to.cookie, error), &[], Body::None, 0);
            return;
        }
        let text = proto::error_text(error);
        let mut more = [0; 6];
        more[..4].copy_from_slice(&error.to_be_bytes());
        more[4..].copy_from_slice(&(text.len() as u16).to_be_bytes());
        self.chunk(chunk::ERROR, to, &more, Body::Text(text), text.len());
    }

    /// Block status: the payload of each context's chunk. Only for clients with chunks.
    pub(super) fn block_status(&mut self, to: ReplyTo, payloads: Vec<Vec<u8>>) {
        let kind = match self.mode {
            Mode::Extended => chunk::BLOCK_STATUS_EXT,
            _ => chunk::BLOCK_STATUS,
        };
        let mut left = payloads.len();
        for payload in payloads {
            left -= 1;
            let header = if left == 0 {
                proto::last_chunk
            } else {
                proto::next_chunk
            };
            let len = payload.len();
            let head = header(self.mode, kind, to.cookie, to.offset, len as u32);
            self.descriptions += 1;
            self.push(head.as_bytes(), &[], Body::Bytes(payload), len);
        }
    }

    /// Sends what the socket takes, at most [`MOST_AT_ONCE`]. `freed` is called with each slot whose data are through.
    pub(super) fn send(
        &mut self,
        stream: &mut Stream,
        slots: &mut Slots,
        mut freed: impl FnMut(&mut Slots, u32),
    ) -> io::Result<Sent> {
        if let (Some(w), false) = (&mut self.window, self.queue.is_empty()) {
            w.apply(stream.fd());
        }
        if stream.has_unsent() {
            match stream.flush() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Sent::Full),
                flushed => flushed?,
            }
        }
        let mut left = match stream {
            Stream::Plain(_) => self.most,
            Stream::Tls(_) => self.most.min(MOST_ENCRYPTED),
        };
        while !self.queue.is_empty() {
            if left == 0 {
                return Ok(Sent::Part);
            }
            let (offered, sent) = match stream {
                Stream::Plain(socket) => {
                    let list = self.list(slots, left);
                    (list.bytes(), list.send(socket.as_fd()))
                }
                Stream::Tls(tls) => tls.send_parts(self.sent, left, |all| self.gather(slots, all)),
            };
            let n = match sent {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Sent::Full),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            self.passed += n as u64;
            self.advance(n, |slot| freed(slots, slot));
            if n < offered {
                return Ok(Sent::Full);
            }
            left -= n;
        }
        Ok(Sent::All)
    }

    /// The bytes that are left to be sent, in order, as many as go with one call.
    #[inline]
    fn list<'a>(&'a self, slots: &'a Slots, most: usize) -> SendList<'a> {
        let mut list = SendList::new(self.sent, most);
        for reply in &self.queue {
            reply.parts(slots, |part| list.push(part));
            if list.is_full() {
                break;
            }
        }
        list
    }

    /// The same bytes, one after another.
    fn gather(&self, slots: &Slots, all: &mut Gather<'_>) {
        for reply in &self.queue {
            reply.parts(slots, |part| all.push(part));
            if all.is_full() {
                break;
            }
        }
    }

    fn advance(&mut self, mut n: usize, mut freed: impl FnMut(u32)) {
        while let Some(first) = self.queue.front() {
            let left = first.len - self.sent;
            if n < left {
                self.sent += n;
                return;
            }
            n -= left;
            self.sent = 0;
            match self.queue.pop_front().map(|r| r.body) {
                Some(Body::Slot(slot)) => freed(slot),
                Some(Body::Bytes(_)) => self.descriptions -= 1,
                _ => {}
            }
        }
    }

    /// Drops everything: the client is gone.
    pub(super) fn clear(&mut self, freed: impl FnMut(u32)) {
        self.sent = 0;
        let all = self.queue.iter().map(|r| r.len).sum();
        self.advance(all, freed);
    }
}
