//! [`Asker`]: questions to arrays and caches, which may hang.

use super::super::backing::Backing;
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest time that a reading waits for answers.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time after which one more thread asks, if questions wait.
const PAUSE: Duration = Duration::from_millis(50);
/// Most threads, those that wait for disks that hang included.
const THREADS: usize = 16;

/// A question to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Question {
    Array,
    Cache,
}

impl Question {
    fn text(self) -> Value {
        match self {
            Question::Array => json!({"raid": "detail"}),
            Question::Cache => json!({"cache": "counters"}),
        }
    }
}

pub type Asked = (String, Question);

/// Asks, and doesn't ask again what hasn't been answered.
#[derive(Default)]
pub struct Asker {
    /// Questions on their way.
    asking: Mutex<HashSet<Asked>>,
    threads: AtomicUsize,
}

/// The questions of one reading.
#[derive(Default)]
struct Round {
    state: Mutex<RoundState>,
    came: Condvar,
}

#[derive(Default)]
struct RoundState {
    queue: VecDeque<Asked>,
    /// Number of questions that have no answer yet.
    left: usize,
    answers: Vec<(Asked, Value)>,
}

impl Asker {
    /// The answers that come in time, and the number of the others.
    pub fn ask(
        self: &Arc<Asker>,
        backing: &Arc<dyn Backing>,
        mut questions: Vec<Asked>,
    ) -> (Vec<(Asked, Value)>, u64) {
        let all = questions.len();
        {
            let asking = self.asking.lock();
            questions.retain(|q| !asking.contains(q));
        }
        let round = Arc::new(Round::default());
        let deadline = Instant::now() + PATIENCE;
        let mut state = round.state.lock();
        state.left = questions.len();
        state.queue = questions.into();
        while state.left > 0 && Instant::now() < deadline {
            // One thread is enough as long as answers come; each pause adds one.
            if !state.queue.is_empty() {
                self.start(backing, &round);
            }
            let pause = deadline.min(Instant::now() + PAUSE);
            while state.left > 0 && !round.came.wait_until(&mut state, pause).timed_out() {}
        }
        state.queue.clear();
        let answers = std::mem::take(&mut state.answers);
        let unanswered = all - answers.len();
        (answers, unanswered as u64)
    }

    fn start(self: &Arc<Asker>, backing: &Arc<dyn Backing>, round: &Arc<Round>) {
        let place = Place(Arc::clone(self));
        if self.threads.fetch_add(1, Ordering::AcqRel) >= THREADS {
            return;
        }
        let (backing, round) = (Arc::clone(backing), Arc::clone(round));
        let thread = std::thread::Builder::new().name("pvblk-web-ask".into());
        // Without a thread there is no answer, and the reading tells so.
        let _ = thread.spawn(move || place.0.run(&*backing, &round, &place));
    }

    fn run(&self, backing: &dyn Backing, round: &Round, _place: &Place) {
        let mut state = round.state.lock();
        while let Some(asked) = state.queue.pop_front() {
            drop(state);
            self.asking.lock().insert(asked.clone());
            let params = json!({"name": asked.0, "question": asked.1.text()});
            let answer = backing.call("disk.ask", params);
            self.asking.lock().remove(&asked);
            state = round.state.lock();
            state.left -= 1;
            state
                .answers
                .extend(answer.ok().map(|value| (asked, value)));
            round.came.notify_all();
        }
    }
}

/// A place among the threads.
struct Place(Arc<Asker>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::backing::Streamed;
    use super::super::Snapshot;
    use super::*;
    use crate::control::rpc::RpcError;
    use pvblk_trace::live::HopsReport;
    use std::time::Duration;

    /// Disks whose names begin with `h` hang until they are let go.
    #[derive(Default)]
    struct Disks {
        hang: Mutex<bool>,
        went_on: Condvar,
        asked: AtomicUsize,
    }

    impl Disks {
        fn new() -> Arc<Disks> {
            let disks = Disks::default();
            *disks.hang.lock() = true;
            Arc::new(disks)
        }

        fn let_go(&self) {
            *self.hang.lock() = false;
            self.went_on.notify_all();
        }
    }

    impl Backing for Disks {
        fn call(&self, _: &str, params: Value) -> Result<Value, RpcError> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let name = params["name"].as_str().unwrap_or_default();
            let mut hang = self.hang.lock();
            while *hang && name.starts_with('h') {
                self.went_on.wait(&mut hang);
            }
            match name.starts_with('e') {
                true => Err(RpcError::new(1, "no")),
                false => Ok(params),
            }
        }

        fn stream(&self, _: &str, _: Value) -> Result<Streamed, RpcError> {
            Err(RpcError::new(1, "no"))
        }

        fn follow(
            &self,
            _: u32,
            _: &mut dyn FnMut(Option<HopsReport>) -> bool,
        ) -> Result<(), RpcError> {
            Err(RpcError::new(1, "no"))
        }

        fn snapshot(&self) -> Result<Snapshot, String> {
            Err("no".into())
        }

        fn is_there(&self) -> Result<(), String> {
            Ok(())
        }
    }

    fn questions(names: &[&str]) -> Vec<Asked> {
        names
            .iter()
            .map(|n| ((*n).to_owned(), Question::Array))
            .collect()
    }

    #[test]
    fn disks_that_hang_are_left_out_and_not_asked_again() {
        let (asker, disks) = (Arc::new(Asker::default()), Disks::new());
        let backing: Arc<dyn Backing> = disks.clone();
        let names = ["a", "h1", "b", "h2", "e", "c"];
        let (answers, unanswered) = asker.ask(&backing, questions(&names));
        let mut found: Vec<&str> = answers.iter().map(|((n, _), _)| n.as_str()).collect();
        found.sort_unstable();
        assert_eq!((found, unanswered), (vec!["a", "b", "c"], 3));
        let before = disks.asked.load(Ordering::SeqCst);
        let (answers, unanswered) = asker.ask(&backing, questions(&names));
        assert_eq!((answers.len(), unanswered), (3, 3));
        assert_eq!(disks.asked.load(Ordering::SeqCst) - before, 4);
        disks.let_go();
        // Their late answers are nobody's; they are asked again.
        let begin = Instant::now();
        while asker.ask(&backing, questions(&names)).1 > 1 {
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
    }

    #[test]
    fn threads_that_hang_are_bounded() {
        let (asker, disks) = (Arc::new(Asker::default()), Disks::new());
        let backing: Arc<dyn Backing> = disks.clone();
        for round in 0..4 {
            let names: Vec<String> = (0..10).map(|n| format!("h{round}-{n}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            assert_eq!(asker.ask(&backing, questions(&names)).1, 10);
        }
        assert!(disks.asked.load(Ordering::SeqCst) <= THREADS);
        disks.let_go();
    }
}
