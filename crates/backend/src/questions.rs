//! Questions to a disk's device, one at a time.

use parking_lot::{Condvar, Mutex};
use pvblk_block::{BlockDevice, DiskThreads, Error, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Longest wait of a question for the one before it.
const TURN: Duration = Duration::from_secs(5);
/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(60);
/// Most threads that ask one disk, so that a disk that hangs can't take all connections of the control
/// socket.
const ASKERS: usize = 4;

/// The turn to ask: the state that one question finds must hold until it is answered.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    state: Mutex<QuestionState>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct QuestionState {
    /// A question is being answered.
    busy: bool,
    askers: usize,
    closed: bool,
}

impl Questions {
    /// Asks a question, as [`crate::Disk::ask`].
    pub fn ask(
        self: &Arc<Questions>,
        device: &Arc<dyn BlockDevice>,
        aside: &DiskThreads,
        question: &str,
    ) -> Option<Result<String, Error>> {
        if let Err(e) = self.enter() {
            return Some(Err(e));
        }
        let (tell, answer) = sync_channel(1);
        let (turn, device, question) = (
            Turn(Arc::clone(self)),
            Arc::clone(device),
            question.to_owned(),
        );
        let job = move || {
            let found = device.ask(&question);
            // The order matters: a thread that has the answer may ask the next question.
            drop((turn, device));
            let _ = tell.send(found);
        };
        let told = match aside.run(Box::new(job)) {
            Ok(()) => answer.recv_timeout(ANSWER),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        };
        self.state.lock().askers -= 1;
        let why = match told {
            Ok(found) => return found,
            Err(RecvTimeoutError::Timeout) => {
                "no answer after 60 s: its medium may hang; what was asked for may still be done"
            }
            Err(RecvTimeoutError::Disconnected) => "the question failed: see the server's log",
        };
        Some(Err(Error::new(ErrorKind::Exhausted, why)))
    }

    fn enter(&self) -> Result<(), Error> {
        let busy = |why| Err(Error::new(ErrorKind::Exhausted, why));
        let deadline = Instant::now() + TURN;
        let mut state = self.state.lock();
        if state.askers >= ASKERS {
            return busy("4 questions to it wait already: its medium may hang");
        }
        state.askers += 1;
        while state.busy && !state.closed {
            if self.free.wait_until(&mut state, deadline).timed_out() && state.busy {
                state.askers -= 1;
                return busy("another question to it takes long: try again later");
            }
        }
        if state.closed {
            state.askers -= 1;
            return Err(Error::config("the server is stopping"));
        }
        state.busy = true;
        Ok(())
    }

    /// Refuses questions from now on; false if the one that is being answered takes longer than `patience`.
    pub fn close(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.state.lock();
        state.closed = true;
        self.free.notify_all();
        while state.busy {
            if self.free.wait_until(&mut state, deadline).timed_out() {
                return !state.busy;
            }
        }
        true
    }
}

/// Gives the turn back, also when the device panics.
struct Turn(Arc<Questions>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.state.lock().busy = false;
        self.0.free.notify_all();
    }
}
