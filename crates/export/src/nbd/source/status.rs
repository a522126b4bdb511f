//! Block status: asked of the device on threads of the disk's own, as a medium may take its time.

use super::NbdSource;
use crate::nbd::block_status;
use crate::nbd::shares::Questions;
use parking_lot::Mutex;
use pvblk_backend::LaneWaker;
use pvblk_block::Error;
use pvblk_protocol::nbd::{NbdRequest, cflag, err};
use std::collections::VecDeque;
use std::sync::Arc;

/// Questions of one connection that wait, and answers that aren't sent yet. More hold the connection up.
const MOST: usize = 16;

type Answer = Arc<Mutex<Option<Result<Vec<u8>, Error>>>>;

/// The questions of one connection. One at a time is asked.
#[derive(Default)]
pub(super) struct Statuses {
    waiting: VecDeque<NbdRequest>,
    /// Its cookie, and where its answer will be.
    asked: Option<(u64, Answer)>,
}

impl Statuses {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.asked.is_none()
    }
}

impl NbdSource {
    /// True if one more question has to wait in the socket.
    pub(super) fn is_full_of_statuses(&self) -> bool {
        let here = self.statuses.waiting.len() + usize::from(self.statuses.asked.is_some());
        here + self.outbox.descriptions() >= MOST
    }

    pub(super) fn block_status(&mut self, r: &NbdRequest) {
        if let (Some(questions), Some(waker)) = (&self.share.questions, &self.waker) {
            let (questions, waker) = (Arc::clone(questions), waker.clone());
            self.statuses.waiting.push_back(*r);
            return self.ask_next(&questions, &waker);
        }
        self.described = true;
        let answer = describe(&*self.device, r);
        self.describe_to(r.cookie, answer);
    }

    /// Takes the answer, if it has come, and asks the next question.
    pub(super) fn take_answers(&mut self) {
        let Some((cookie, answer)) = &self.statuses.asked else {
            return;
        };
        let Some(answer) = answer.lock().take() else {
            return;
        };
        let cookie = *cookie;
        self.statuses.asked = None;
        self.busy = true;
        self.describe_to(cookie, answer);
        if let (Some(questions), Some(waker)) = (&self.share.questions, &self.waker) {
            let (questions, waker) = (Arc::clone(questions), waker.clone());
            self.ask_next(&questions, &waker);
        }
    }

    fn ask_next(&mut self, questions: &Arc<Questions>, waker: &LaneWaker) {
        while self.statuses.asked.is_none()
            && let Some(r) = self.statuses.waiting.pop_front()
        {
            let answer = Answer::default();
            let place = Arc::clone(&answer);
            let (device, waker) = (Arc::clone(&self.device), waker.clone());
            let job = move || {
                let described = describe(&*device, &r);
                *place.lock() = Some(described);
                waker.wake();
            };
            if questions.ask(Box::new(job)) {
                self.statuses.asked = Some((r.cookie, answer));
            } else {
                self.outbox.error(r.cookie, err::ENOMEM);
            }
        }
    }

    fn describe_to(&mut self, cookie: u64, answer: Result<Vec<u8>, Error>) {
        if self.dead {
            return;
        }
        match answer {
            Ok(payload) => self.outbox.block_status(cookie, payload),
            Err(e) => {
                tracing::warn!("{}: block status: {e}", self.name);
                self.outbox.error(cookie, err::EIO);
            }
        }
    }
}

fn describe(device: &dyn pvblk_block::BlockDevice, r: &NbdRequest) -> Result<Vec<u8>, Error> {
    let one = r.flags & cflag::REQ_ONE != 0;
    block_status::describe(device, r.offset, r.len, one)
}
