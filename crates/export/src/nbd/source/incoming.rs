//! Bytes from the client: headers of requests, data of writes, and data of refused writes, which are dropped.

use crate::nbd::receive::{Inbox, MOST_AT_ONCE};
use crate::nbd::slots::Slots;
use crate::nbd::stream::Stream;
use pvblk_block::Buffer;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_protocol::nbd::{BadRequest, LONGEST_QUESTION, Mode, NbdRequest, parse_request};
use std::io;

/// The kind of the next bytes.
enum Expect {
    Header,
    /// The payload of the write in `slot`, of which `filled` bytes are here.
    Payload {
        slot: u32,
        filled: usize,
    },
    /// The payload of this question about block status, of which `filled` bytes are here.
    Question {
        request: NbdRequest,
        payload: [u8; LONGEST_QUESTION],
        filled: usize,
    },
    /// The payload of a refused request: `left` bytes to drop, then this reply.
    Refused {
        left: usize,
        cookie: u64,
        offset: u64,
        error: u32,
    },
}

/// The next item that the received bytes make.
pub(super) enum Next {
    /// A request's header. It stays until [`Incoming::take_header`].
    Header(NbdRequest),
    /// All data of the write in this slot are in its buffers.
    Data(u32),
    /// A question about block status and its payload.
    Question {
        request: NbdRequest,
        payload: [u8; LONGEST_QUESTION],
    },
    /// The payload of a refused request is dropped: its reply is due.
    Dropped {
        cookie: u64,
        offset: u64,
        error: u32,
    },
    /// A header that the stream can't go on after.
    Garbage(BadRequest),
    /// Not enough for any of these.
    Nothing,
}

/// See the module's documentation.
pub(super) struct Incoming {
    mode: Mode,
    inbox: Inbox,
    gauge: Gauge,
    expect: Expect,
    received: u64,
    /// The last receive took all it may at a time, or left data that the socket can't tell of.
    more: bool,
}

impl Incoming {
    /// Starts with bytes that came with the handshake.
    pub(super) fn new(name: &str, mode: Mode, first: Vec<u8>) -> Incoming {
        Incoming {
            mode,
            inbox: Inbox::new(first),
            gauge: Gauge::new(format!("{name}: inbox"), MemoryKind::Heap, 128 << 10),
            expect: Expect::Header,
            received: 0,
            more: false,
        }
    }

    /// Looks at the bytes that are here; moves data into the buffers of `slots`, or drops it.
    #[inline]
    pub(super) fn next(&mut self, slots: &Slots) -> Next {
        match &mut self.expect {
            Expect::Header => match parse_request(self.inbox.bytes(), self.mode) {
                Ok(Some(r)) => Next::Header(r),
                Ok(None) => Next::Nothing,
                Err(bad) => Next::Garbage(bad),
            },
            Expect::Payload { slot, filled } => {
                let s = slots.get(*slot);
                *filled += self.inbox.copy_to(s.data(), *filled);
                if *filled < s.len as usize {
                    return Next::Nothing;
                }
                let slot = *slot;
                self.expect = Expect::Header;
                Next::Data(slot)
            }
            Expect::Question {
                request,
                payload,
                filled,
            } => {
                let missing = &mut payload[*filled..request.payload as usize];
                let n = missing.len().min(self.inbox.len());
                missing[..n].copy_from_slice(&self.inbox.bytes()[..n]);
                *filled += self.inbox.skip(n);
                if *filled < request.payload as usize {
                    return Next::Nothing;
                }
                let (request, payload) = (*request, *payload);
                self.expect = Expect::Header;
                Next::Question { request, payload }
            }
            Expect::Refused {
                left,
                cookie,
                offset,
                error,
            } => {
                *left -= self.inbox.skip(*left);
                if *left > 0 {
                    return Next::Nothing;
                }
                let (cookie, offset, error) = (*cookie, *offset, *error);
                self.expect = Expect::Header;
                Next::Dropped {
                    cookie,
                    offset,
                    error,
                }
            }
        }
    }

    /// Takes the header that [`Incoming::next`] gave. `stored`: bytes of data that follow and are kept.
    #[inline]
    pub(super) fn take_header(&mut self, stored: u32) {
        self.inbox.skip(self.mode.request_bytes());
        self.inbox.expect_like(stored);
    }

    /// Data for the write in this slot follow.
    #[inline]
    pub(super) fn expect_data(&mut self, slot: u32) {
        self.expect = Expect::Payload { slot, filled: 0 };
    }

    /// The payload of a question about block status follows; it has at most [`LONGEST_QUESTION`] bytes.
    pub(super) fn expect_question(&mut self, r: &NbdRequest) {
        self.expect = Expect::Question {
            request: *r,
            payload: [0; LONGEST_QUESTION],
            filled: 0,
        };
    }

    /// The payload of a refused request follows.
    pub(super) fn expect_refused(&mut self, r: &NbdRequest, error: u32) {
        self.expect = Expect::Refused {
            left: r.payload as usize,
            cookie: r.cookie,
            offset: r.offset,
            error,
        };
    }

    /// True while data of a write are missing.
    pub(super) fn lacks_data(&self) -> bool {
        matches!(self.expect, Expect::Payload { .. })
    }

    /// Bytes received since the connection began: they tell whether the client sends.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// True if bytes are here that [`Incoming::next`] could make something of.
    #[inline]
    pub(super) fn has_input(&self) -> bool {
        match self.expect {
            Expect::Header => self.inbox.len() >= self.mode.request_bytes(),
            _ => self.inbox.len() > 0,
        }
    }

    /// True if the socket probably has more than the last receive took.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.more
    }

    /// True if the stream may not end here.
    pub(super) fn is_midway(&self) -> bool {
        self.inbox.len() > 0 || !matches!(self.expect, Expect::Header)
    }

    /// One receive call, of at most [`MOST_AT_ONCE`] bytes. Data of a large write go straight into its buffers. Returns how many; 0 at the end of the stream.
    pub(super) fn receive(&mut self, stream: &mut Stream, slots: &Slots) -> io::Result<usize> {
        let (buffers, filled, missing): (&[Buffer], _, _) = match self.expect {
            Expect::Payload { slot, filled } => {
                let s = slots.get(slot);
                (s.data(), filled, s.len as usize - filled)
            }
            _ => (&[], 0, 0),
        };
        self.more = false;
        let got = self.inbox.receive(stream, buffers, filled, missing);
        if let Ok((direct, n)) = got {
            self.received += n as u64;
            self.more = n == MOST_AT_ONCE || stream.has_data();
            if let Expect::Payload { filled, .. } = &mut self.expect {
                *filled += direct;
            }
        }
        self.gauge.set(self.inbox.capacity() as u64);
        got.map(|(_, n)| n)
    }

    /// Gives memory back that isn't needed.
    pub(super) fn release(&mut self) {
        self.inbox.release();
        self.gauge.set(self.inbox.capacity() as u64);
    }

    #[cfg(test)]
    pub(super) fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }
}
