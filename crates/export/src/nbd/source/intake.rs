//! From bytes to requests: what is taken, what is refused, what has to wait.

use super::NbdSource;
use super::incoming::Next;
use super::status::{Answer, Question};
use crate::nbd::check::{self, Verdict};
use crate::nbd::reply::ReplyTo;
use crate::nbd::slots::Edges;
use pvblk_backend::{RateLimit, SourceEnd, ratelimited};
use pvblk_block::{Request, SECTOR};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{BadRequest, Command, Contexts, MAX_PAYLOAD, NbdRequest, err};
use std::io;

/// Questions about block status of one connection that wait, and answers that aren't sent yet. More hold the connection up.
const STATUSES: usize = 16;

impl NbdSource {
    /// Takes requests out of the inbox until `out` has `target` or the inbox has no more.
    pub(super) fn parse(
        &mut self,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) -> Result<(), SourceEnd> {
        self.held_up = false;
        while out.len() < target && self.issuer.may_take_more() && !self.leaving {
            match self.incoming.next(&self.slots) {
                Next::Header(r) => {
                    if !self.admit(&r, target, out) {
                        self.held_up = true;
                        break;
                    }
                }
                Next::Data(slot) => {
                    self.slots.get_mut(slot).view.clear();
                    self.issuer.issue(&mut self.slots, slot, target, out);
                }
                Next::Question { request, payload } => {
                    self.question(&request, &payload[..request.payload as usize]);
                }
                Next::Dropped {
                    cookie,
                    offset,
                    error,
                } => self.outbox.error(ReplyTo { cookie, offset }, error),
                Next::Garbage(BadRequest::Magic(magic)) => {
                    let what =
                        format_args!("a request starts with {magic:#x}, which is no request");
                    return Err(self.broken(what));
                }
                Next::Garbage(BadRequest::Payload(bytes)) => {
                    let what = format_args!(
                        "a request with {bytes} bytes of payload, more than {MAX_PAYLOAD}"
                    );
                    return Err(self.broken(what));
                }
                Next::Nothing => break,
            }
            if std::mem::take(&mut self.described) {
                break;
            }
            if self.issuer.is_cutting() {
                // One at a time: later requests wait until this one is cut up.
                break;
            }
        }
        Ok(())
    }

    /// Takes the request at the inbox's front; false (and nothing changes) if it has to wait.
    fn admit(&mut self, r: &NbdRequest, target: usize, out: &mut Vec<Box<Request>>) -> bool {
        if self.slots.is_full() || self.outbox.len() >= 2 * self.issuer.depth() as usize {
            return false;
        }
        if r.command == Command::BlockStatus && self.is_full_of_statuses() {
            return false;
        }
        self.terms.size_bytes = self.device.capacity_sectors().saturating_mul(SECTOR);
        let mut verdict = check::check(r, &self.terms);
        let edges = Edges::of(r.offset, r.len, self.limits.logical_sector_bytes);
        if verdict == Verdict::Run {
            let bytes = self.memory_of(r, edges);
            if bytes > 0 && !self.memory.take(bytes) {
                if self.memory.may_wait(bytes) {
                    return false;
                }
                verdict = Verdict::Refuse(err::ENOMEM);
            }
        }
        let is_stored = verdict == Verdict::Run;
        self.incoming
            .take_header(if is_stored { r.payload } else { 0 });
        match verdict {
            Verdict::Disconnect => self.leaving = true,
            Verdict::Refuse(error) if r.payload > 0 => self.incoming.expect_refused(r, error),
            Verdict::Question => self.incoming.expect_question(r),
            Verdict::Refuse(error) => self.outbox.error(r.into(), error),
            Verdict::Nothing if r.command == Command::Read => self.outbox.no_data(r.into()),
            Verdict::Nothing => self.outbox.done(r.into()),
            Verdict::Run => self.run(r, edges, target, out),
        }
        true
    }

    /// One receive call.
    pub(super) fn receive(&mut self) -> Result<(), SourceEnd> {
        match self.incoming.receive(&mut self.stream, &self.slots) {
            Ok(0) if self.incoming.is_midway() => {
                return Err(self.broken("the client closed in the middle of a request"));
            }
            Ok(0) => self.leaving = true,
            Ok(_) => {}
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            Err(e) => return Err(self.lost(e)),
        }
        Ok(())
    }

    /// True if one more question about block status has to wait in the socket.
    fn is_full_of_statuses(&self) -> bool {
        self.statuses.len() + self.outbox.descriptions() >= STATUSES
    }

    /// A question about block status with a payload, which names the range's length and some of the contexts.
    fn question(&mut self, r: &NbdRequest, payload: &[u8]) {
        let Some((len, contexts)) = proto::parse_question(payload, self.terms.contexts) else {
            return self.outbox.error(r.into(), err::EINVAL);
        };
        let range = NbdRequest {
            len,
            payload: 0,
            ..*r
        };
        match check::check(&range, &self.terms) {
            Verdict::Run => self.block_status(&range, contexts),
            _ => self.outbox.error(r.into(), err::EINVAL),
        }
    }

    pub(super) fn block_status(&mut self, r: &NbdRequest, contexts: Contexts) {
        let question = Question {
            request: *r,
            contexts,
        };
        if let Some(answer) = self.statuses.ask(question) {
            // It may have taken long, here and now: other lanes of the worker first.
            self.described = true;
            self.tell_status(answer);
        }
    }

    /// Takes answers to questions about block status that have come.
    pub(super) fn take_answers(&mut self) {
        while let Some(answer) = self.statuses.take() {
            self.rest.disturb(true);
            self.tell_status(answer);
        }
    }

    fn tell_status(&mut self, answer: Answer) {
        if self.dead {
            return;
        }
        match answer {
            Answer::Described(r, Ok(all)) => self.outbox.block_status((&r).into(), all),
            Answer::Described(r, Err(e)) => {
                let limit = RateLimit::of(&self.device.describe(), "block status");
                ratelimited!(warn, limit, "{}: block status: {e}", self.name);
                self.outbox.error((&r).into(), err::EIO);
            }
            Answer::NoThread(r) => self.outbox.error((&r).into(), err::ENOMEM),
        }
    }
}
