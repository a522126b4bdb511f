//! Replies that wait to be sent, and sending them in as few calls as possible.

use super::slots::Slots;
use super::window::Window;
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{CHUNK_BYTES, chunk};
use pvblk_sys::socket::{Part, SendList};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes sent at a time: a worker's other lanes wait for it.
const MOST_AT_ONCE: usize = 256 << 10;
/// While other disks have work on the same worker. A fifth more CPU for large replies, which is why it isn't always so.
const IN_COMPANY: usize = 64 << 10;

/// Longest head: a chunk header and an offset.
const HEAD: usize = CHUNK_BYTES + 8;

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

/// The replies of one connection, in the order in which they are sent.
pub(super) struct Outbox {
    queue: VecDeque<Reply>,
    /// Bytes of the first reply that are sent.
    sent: usize,
    /// Bytes sent since the connection began.
    passed: u64,
    /// Replies with a body of their own.
    descriptions: usize,
    structured: bool,
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
    pub(super) fn new(structured: bool, window: Option<Window>) -> Outbox {
        Outbox {
            queue: VecDeque::new(),
            sent: 0,
            passed: 0,
            descriptions: 0,
            structured,
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

    fn push(&mut self, head: &[u8], body: Body, body_len: usize) {
        let mut reply = Reply {
            head: [0; HEAD],
            head_len: head.len() as u8,
            body,
            len: head.len() + body_len,
        };
        reply.head[..head.len()].copy_from_slice(head);
        if let Some(w) = &mut self.window {
            w.count(reply.len);
        }
        self.queue.push_back(reply);
    }

    /// Success without data.
    #[inline]
    pub(super) fn done(&mut self, cookie: u64) {
        self.push(&proto::simple_reply(cookie, 0), Body::None, 0);
    }

    /// Success of a read of no bytes, which a client with structured replies expects as a chunk.
    pub(super) fn no_data(&mut self, cookie: u64) {
        if self.structured {
            self.push(&proto::last_chunk(chunk::NONE, cookie, 0), Body::None, 0);
        } else {
            self.done(cookie);
        }
    }

    /// Success of a read, with the data of `slot`.
    #[inline]
    pub(super) fn data(&mut self, cookie: u64, offset: u64, len: u32, slot: u32) {
        if self.structured {
            let mut head = [0; HEAD];
            head[..CHUNK_BYTES].copy_from_slice(&proto::last_chunk(
                chunk::OFFSET_DATA,
                cookie,
                len + 8,
            ));
            head[CHUNK_BYTES..].copy_from_slice(&offset.to_be_bytes());
            self.push(&head, Body::Slot(slot), len as usize);
        } else {
            self.push(
                &proto::simple_reply(cookie, 0),
                Body::Slot(slot),
                len as usize,
            );
        }
    }

    /// An error ([`proto::err`]).
    pub(super) fn error(&mut self, cookie: u64, error: u32) {
        if !self.structured {
            self.push(&proto::simple_reply(cookie, error), Body::None, 0);
            return;
        }
        let text = proto::error_text(error);
        let payload = 6 + text.len();
        let mut head = [0; CHUNK_BYTES + 6];
        head[..CHUNK_BYTES].copy_from_slice(&proto::last_chunk(
            chunk::ERROR,
            cookie,
            payload as u32,
        ));
        head[CHUNK_BYTES..CHUNK_BYTES + 4].copy_from_slice(&error.to_be_bytes());
        head[CHUNK_BYTES + 4..].copy_from_slice(&(text.len() as u16).to_be_bytes());
        self.push(&head, Body::Text(text), text.len());
    }

    /// Block status, as a chunk's payload. Only for structured replies.
    pub(super) fn block_status(&mut self, cookie: u64, payload: Vec<u8>) {
        let len = payload.len();
        let head = proto::last_chunk(chunk::BLOCK_STATUS, cookie, len as u32);
        self.descriptions += 1;
        self.push(&head, Body::Bytes(payload), len);
    }

    /// Sends what the socket takes, at most [`MOST_AT_ONCE`]. `freed` is called with each slot whose data are through.
    pub(super) fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        slots: &mut Slots,
        mut freed: impl FnMut(&mut Slots, u32),
    ) -> io::Result<Sent> {
        if let (Some(w), false) = (&mut self.window, self.queue.is_empty()) {
            w.apply(fd);
        }
        let mut left = self.most;
        while !self.queue.is_empty() {
            if left == 0 {
                return Ok(Sent::Part);
            }
            let list = self.list(slots, left);
            let offered = list.bytes();
            let n = match list.send(fd) {
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
            list.push(Part::Bytes(&reply.head[..reply.head_len as usize]));
            match &reply.body {
                Body::None => {}
                Body::Text(text) => list.push(Part::Bytes(text.as_bytes())),
                Body::Bytes(bytes) => list.push(Part::Bytes(bytes)),
                Body::Slot(slot) => {
                    let data = slots.get(*slot).data();
                    data.iter().for_each(|b| list.push(Part::Buffer(b, 0)));
                }
            }
            if list.is_full() {
                break;
            }
        }
        list
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
