//! From bytes to requests: what is taken, what is refused, what has to wait.

use super::{Expect, NbdSource};
use crate::nbd::check::{self, Verdict};
use crate::nbd::receive::MOST_AT_ONCE;
use crate::nbd::slots::Edges;
use pvblk_backend::{BufferPool, SourceEnd};
use pvblk_block::{Buffer, Op, Request, SECTOR};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Command, NbdRequest, REQUEST_BYTES, err};
use std::io;
use std::os::fd::AsFd;

impl NbdSource {
    /// Takes requests out of the inbox until `out` has `target` or the inbox has no more.
    pub(super) fn parse(
        &mut self,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) -> Result<(), SourceEnd> {
        self.held_up = false;
        while out.len() < target && self.left > 0 && !self.leaving {
            match self.expect {
                Expect::Header => {
                    let Some(header) = self.inbox.header() else {
                        break;
                    };
                    let r = proto::parse_request(header).map_err(|e| {
                        self.broken(format_args!(
                            "a request starts with {:#x}, which is no request",
                            e.0
                        ))
                    })?;
                    if !self.admit(&r, target, out)? {
                        self.held_up = true;
                        break;
                    }
                }
                Expect::Payload { slot, filled } => {
                    let s = self.slots.get(slot);
                    let filled = filled + self.inbox.copy_to(s.data(), filled);
                    if filled < s.len as usize {
                        self.expect = Expect::Payload { slot, filled };
                        break;
                    }
                    self.expect = Expect::Header;
                    self.slots.get_mut(slot).view.clear();
                    self.issue(slot, target, out);
                }
                Expect::Refused {
                    left,
                    cookie,
                    error,
                } => {
                    let left = left - self.inbox.skip(left);
                    if left > 0 {
                        self.expect = Expect::Refused {
                            left,
                            cookie,
                            error,
                        };
                        break;
                    }
                    self.expect = Expect::Header;
                    self.outbox.error(cookie, error);
                }
            }
            if std::mem::take(&mut self.described) {
                // It asked the device, here and now: other lanes of the worker first.
                break;
            }
            if self.cut.is_some() {
                // One at a time: later requests wait until this one is cut up.
                break;
            }
        }
        Ok(())
    }

    /// Takes the request at the inbox's front; false (and nothing changes) if it has to wait.
    fn admit(
        &mut self,
        r: &NbdRequest,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) -> Result<bool, SourceEnd> {
        if self.slots.is_full() || self.outbox.len() >= 2 * self.depth as usize {
            return Ok(false);
        }
        if r.command == Command::BlockStatus && self.is_full_of_statuses() {
            return Ok(false);
        }
        self.terms.size_bytes = self.device.capacity_sectors().saturating_mul(SECTOR);
        let mut verdict = check::check(r, &self.terms);
        let edges = Edges::of(r.offset, r.len, self.limits.logical_sector_bytes);
        if verdict == Verdict::Run {
            let bytes = match r.command {
                Command::Read | Command::Write => r.len as usize + edges.bytes(),
                Command::WriteZeroes => self.scratch_bytes(Op::WriteZeroes, r, edges),
                Command::Cache => self.scratch_bytes(Op::Read, r, edges),
                _ => 0,
            };
            if bytes > 0 && !self.take_memory(bytes) {
                if self.may_wait(bytes) {
                    return Ok(false);
                }
                verdict = Verdict::Refuse(err::ENOMEM);
            }
        }
        self.inbox.skip(REQUEST_BYTES);
        let is_write = r.command == Command::Write;
        let is_stored = is_write && verdict == Verdict::Run;
        self.inbox.expect_like(if is_stored { r.len } else { 0 });
        match verdict {
            Verdict::Disconnect => self.leaving = true,
            Verdict::Refuse(error) if is_write && r.len > 0 => {
                self.expect = Expect::Refused {
                    left: r.len as usize,
                    cookie: r.cookie,
                    error,
                };
            }
            Verdict::Refuse(error) => self.outbox.error(r.cookie, error),
            Verdict::Nothing if r.command == Command::Read => self.outbox.no_data(r.cookie),
            Verdict::Nothing => self.outbox.done(r.cookie),
            Verdict::Run => self.run(r, edges, target, out),
        }
        Ok(true)
    }

    /// Memory for a request, in `scratch`. Where the disk's budget has no room, the connection is woken when there is some.
    fn take_memory(&mut self, bytes: usize) -> bool {
        let mut taken = self.pool.take(bytes, &mut self.scratch);
        if !taken && self.pool.is_short_of_budget() {
            self.short = true;
            if let Some(waiter) = &self.waiter {
                self.share.memory.wait(waiter);
                // Some may have come back before it was on the list.
                taken = self.pool.take(bytes, &mut self.scratch);
            }
        }
        if taken && std::mem::take(&mut self.short) {
            // There may be room for the next one, too.
            self.share.memory.pass_on();
        }
        taken
    }

    /// True if memory that wasn't to be had will be.
    fn may_wait(&self, bytes: usize) -> bool {
        if self.pool.is_short_of_budget() {
            return self.share.memory.may_hold(BufferPool::claimed_for(bytes));
        }
        self.pool.used_pages() > 0
    }

    /// One receive call.
    pub(super) fn receive(&mut self) -> Result<(), SourceEnd> {
        let (buffers, filled, missing): (&[Buffer], _, _) = match self.expect {
            Expect::Payload { slot, filled } => {
                let s = self.slots.get(slot);
                (s.data(), filled, s.len as usize - filled)
            }
            _ => (&[], 0, 0),
        };
        let fd = self.socket.as_fd();
        self.more_received = false;
        match self.inbox.receive(fd, buffers, filled, missing) {
            Ok((_, 0)) => {
                if self.inbox.len() > 0 || !matches!(self.expect, Expect::Header) {
                    return Err(self.broken("the client closed in the middle of a request"));
                }
                self.leaving = true;
            }
            Ok((direct, n)) => {
                self.received += n as u64;
                self.more_received = n == MOST_AT_ONCE;
                if let Expect::Payload { filled, .. } = &mut self.expect {
                    *filled += direct;
                }
            }
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            Err(e) => return Err(self.lost(e)),
        }
        self.inbox_gauge.set(self.inbox.capacity() as u64);
        Ok(())
    }

    /// True if bytes are here that `parse` could work on.
    pub(super) fn has_input(&self) -> bool {
        match self.expect {
            Expect::Header => self.inbox.header().is_some(),
            _ => self.inbox.len() > 0,
        }
    }
}
