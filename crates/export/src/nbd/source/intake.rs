//! From bytes to requests: what is taken, what is refused, what has to wait.

use super::{Expect, NbdSource};
use crate::nbd::check::{self, Verdict};
use crate::nbd::proto::{self, Command, NbdRequest, REQUEST_BYTES, err};
use pvblk_backend::SourceEnd;
use pvblk_block::{Buffer, Request, SECTOR};
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
        while out.len() < target && !self.leaving {
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
                    let filled = filled + self.inbox.copy_to(&s.buffers, filled);
                    if filled < s.len as usize {
                        self.expect = Expect::Payload { slot, filled };
                        break;
                    }
                    self.expect = Expect::Header;
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
        self.terms.size_bytes = self.device.capacity_sectors().saturating_mul(SECTOR);
        let mut verdict = check::check(r, &self.terms);
        let has_data = matches!(r.command, Command::Read | Command::Write);
        if verdict == Verdict::Run && has_data && !self.pool.take(r.len as usize, &mut self.scratch)
        {
            if self.pool.used_pages() > 0 {
                return Ok(false);
            }
            verdict = Verdict::Refuse(err::ENOMEM);
        }
        self.inbox.skip(REQUEST_BYTES);
        let is_write = r.command == Command::Write;
        let is_stored = is_write && verdict == Verdict::Run;
        self.inbox.expect_like(if is_stored { r.len } else { 0 });
        match verdict {
            Verdict::Disconnect => self.leaving = true,
            Verdict::Break => {
                return Err(self.broken(format_args!(
                    "a write of {} bytes, more than {}",
                    r.len,
                    proto::MAX_PAYLOAD
                )));
            }
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
            Verdict::Run => self.run(r, target, out),
        }
        Ok(true)
    }

    /// One receive call.
    pub(super) fn receive(&mut self) -> Result<(), SourceEnd> {
        let (buffers, filled, missing): (&[Buffer], _, _) = match self.expect {
            Expect::Payload { slot, filled } => {
                let s = self.slots.get(slot);
                (&s.buffers, filled, s.len as usize - filled)
            }
            _ => (&[], 0, 0),
        };
        let fd = self.socket.as_fd();
        match self.inbox.receive(fd, buffers, filled, missing) {
            Ok((_, 0)) => {
                if self.inbox.len() > 0 || !matches!(self.expect, Expect::Header) {
                    return Err(self.broken("the client closed in the middle of a request"));
                }
                self.leaving = true;
            }
            Ok((direct, _)) => {
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
