//! Block status: asked of the device on threads of the disk's own, as a medium may take its time.

use crate::nbd::block_status;
use crate::nbd::shares::{DiskShare, Questions};
use parking_lot::Mutex;
use pvblk_backend::LaneWaker;
use pvblk_block::{BlockDevice, Error};
use pvblk_protocol::nbd::{Contexts, Mode, NbdRequest, cflag};
use std::collections::VecDeque;
use std::sync::Arc;

/// The payloads of an answer's chunks.
type Described = Result<Vec<Vec<u8>>, Error>;

/// A question: its range is the request's.
#[derive(Clone, Copy)]
pub(super) struct Question {
    pub request: NbdRequest,
    pub contexts: Contexts,
}

/// Where the answer to a question will be.
type Place = Arc<Mutex<Option<Described>>>;

/// The questions of one connection. One at a time is asked.
pub(super) struct Statuses {
    device: Arc<dyn BlockDevice>,
    mode: Mode,
    /// The disk's threads and what wakes the connection's lane; without them, questions are asked at once.
    aside: Option<(Arc<Questions>, LaneWaker)>,
    waiting: VecDeque<Question>,
    /// The one that is asked, and the place of its answer.
    asked: Option<(Question, Place)>,
}

/// The outcome of a question.
pub(super) enum Answer {
    /// The device's answer to this request.
    Described(NbdRequest, Described),
    /// There is no thread to ask this request's question.
    NoThread(NbdRequest),
}

impl Statuses {
    pub(super) fn new(device: Arc<dyn BlockDevice>, mode: Mode) -> Statuses {
        Statuses {
            device,
            mode,
            aside: None,
            waiting: VecDeque::new(),
            asked: None,
        }
    }

    /// From now on questions are asked on the disk's threads, if it has some.
    pub(super) fn bind(&mut self, share: &DiskShare, waker: &LaneWaker) {
        let questions = share.questions.as_ref();
        self.aside = questions.map(|q| (Arc::clone(q), waker.clone()));
    }

    /// Questions that are asked or wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + usize::from(self.asked.is_some())
    }

    /// Asks a question, or lets it wait for the one before. Returns the answer only where the device was asked at once, which took its time.
    pub(super) fn ask(&mut self, q: Question) -> Option<Answer> {
        if self.aside.is_none() {
            let described = describe(&*self.device, &q, self.mode);
            return Some(Answer::Described(q.request, described));
        }
        self.waiting.push_back(q);
        self.ask_next()
    }

    /// An answer, if one has come; the next question is asked. To be called again until there is none.
    pub(super) fn take(&mut self) -> Option<Answer> {
        if let Some((q, place)) = &self.asked {
            let described = place.lock().take()?;
            let answer = Answer::Described(q.request, described);
            self.asked = None;
            return Some(answer);
        }
        self.ask_next()
    }

    /// Asks the next question, if none is asked. `None` also when it was asked.
    fn ask_next(&mut self) -> Option<Answer> {
        let (questions, waker) = self.aside.as_ref()?;
        if self.asked.is_some() {
            return None;
        }
        let q = self.waiting.pop_front()?;
        let place = Place::default();
        let (device, mode, waker) = (Arc::clone(&self.device), self.mode, waker.clone());
        let theirs = Arc::clone(&place);
        let job = move || {
            let described = describe(&*device, &q, mode);
            *theirs.lock() = Some(described);
            waker.wake();
        };
        if !questions.ask(Box::new(job)) {
            return Some(Answer::NoThread(q.request));
        }
        self.asked = Some((q, place));
        None
    }
}

fn describe(device: &dyn BlockDevice, q: &Question, mode: Mode) -> Described {
    let r = &q.request;
    let one = r.flags & cflag::REQ_ONE != 0;
    let of = |context| block_status::describe(device, context, r.offset, r.len, one, mode);
    q.contexts.iter().map(of).collect()
}
