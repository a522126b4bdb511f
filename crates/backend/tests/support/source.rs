//! A source that the test feeds.

use parking_lot::Mutex;
use pvblk_backend::{Pulled, RequestSource, SourceEnd};
use pvblk_block::{Buffer, Completion, Error, Op, Readiness, Request, RequestFlags, Status};
use pvblk_sys::EventFd;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Default)]
struct State {
    waiting: VecDeque<Box<Request>>,
    end: Option<SourceEnd>,
    answers: Vec<(u64, Status)>,
    pulled: usize,
}

/// The test's side.
#[derive(Clone)]
pub struct Feed {
    state: Arc<Mutex<State>>,
    panics: Arc<AtomicBool>,
    event: Arc<EventFd>,
    pushes: Arc<AtomicU64>,
}

/// The back end's side.
pub struct FeedSource {
    feed: Feed,
    disk: String,
    depth: u32,
}

/// A source of this depth, and its feed.
pub fn source(depth: u32) -> (Feed, Box<FeedSource>) {
    let feed = Feed {
        state: Arc::default(),
        panics: Arc::default(),
        event: Arc::new(EventFd::new().expect("an eventfd")),
        pushes: Arc::default(),
    };
    let source = FeedSource {
        feed: feed.clone(),
        disk: String::new(),
        depth,
    };
    (feed, Box::new(source))
}

impl Feed {
    /// A write of one sector, its tag the same number.
    pub fn write(&self, sector: u64, flags: RequestFlags) {
        let data = Buffer::anonymous(512).expect("memory");
        let mut request = Request::with_buffers(Op::Write, sector, vec![data], sector);
        request.flags = flags;
        self.send(request);
    }

    /// Sends a flush.
    pub fn flush(&self, tag: u64, flags: RequestFlags) {
        let mut request = Request::new(Op::Flush, 0, 0, tag);
        request.flags = flags;
        self.send(request);
    }

    /// Sends any request.
    pub fn send(&self, request: Box<Request>) {
        self.state.lock().waiting.push_back(request);
        self.event.notify();
    }

    /// Makes the worker's own code panic from now on when it asks what the source waits for.
    pub fn panic_in_the_worker(&self) {
        self.panics.store(true, Ordering::Release);
        self.event.notify();
    }

    /// Ends the source once everything sent was pulled.
    pub fn end(&self, why: SourceEnd) {
        self.state.lock().end = Some(why);
        self.event.notify();
    }

    /// A broken peer.
    pub fn break_off(&self) {
        self.end(SourceEnd::Broken(Error::protocol("broken by the test")));
    }

    /// Tags and statuses of the completed requests, in order.
    pub fn answers(&self) -> Vec<(u64, Status)> {
        self.state.lock().answers.clone()
    }

    /// Number of completed requests.
    pub fn answered(&self) -> usize {
        self.state.lock().answers.len()
    }

    /// Requests that the back end took.
    pub fn pulled(&self) -> usize {
        self.state.lock().pulled
    }

    /// True once the back end was told of the end.
    pub fn end_is_seen(&self) -> bool {
        self.state.lock().end.is_none()
    }

    /// Waits until the back end has stepped this source at least twice from here on: everything that can be
    /// done with the present requests is done. Not for a source that has ended or has as many requests in
    /// flight as it may.
    #[track_caller]
    pub fn settle(&self) {
        let from = self.pushes.load(Ordering::Acquire);
        pvblk_testing::wait("the back end looks at this source", || {
            // It may be asleep.
            self.event.notify();
            self.pushes.load(Ordering::Acquire) >= from + 3
        });
    }
}

impl RequestSource for FeedSource {
    fn describe(&self) -> String {
        format!("feed of {}", self.disk)
    }

    fn served_as(&mut self, disk: &str) {
        self.disk = disk.to_owned();
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let mut state = self.feed.state.lock();
        let n = room.min(state.waiting.len());
        out.extend(state.waiting.drain(..n));
        state.pulled += n;
        if n == 0
            && let Some(end) = state.end.take()
        {
            return Err(end);
        }
        let order = RequestFlags::BARRIER | RequestFlags::PREFLUSH;
        let ordered = out.iter().any(|r| r.flags.intersects(order));
        Ok(Pulled {
            ordered,
            ..Pulled::default()
        })
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        let mut state = self.feed.state.lock();
        let answers = done.drain(..).map(|c| (c.request.tag, c.status));
        state.answers.extend(answers);
    }

    fn push(&mut self) -> Result<usize, SourceEnd> {
        self.feed.pushes.fetch_add(1, Ordering::Release);
        Ok(0)
    }

    fn arm(&mut self) -> Readiness {
        let state = self.feed.state.lock();
        if state.waiting.is_empty() && state.end.is_none() {
            Readiness::Wait(None)
        } else {
            Readiness::Ready
        }
    }

    fn wants_read(&self) -> bool {
        assert!(!self.feed.panics.load(Ordering::Acquire), "planted");
        true
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.feed.event.as_fd())
    }

    fn woken(&mut self) {
        self.feed.event.drain();
    }
}
