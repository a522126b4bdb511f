//! [`Lines`]: lines on their way to a writer that may block.

use super::bound::{Bound, PER_SECOND};
use parking_lot::{Condvar, Mutex};
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that wait at most; as many are with the thread.
const MOST_WAITING: usize = 256 << 10;
/// Shortest interval at which the number of lines that were left out is told.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// Time to wait when a standard error is full that another process made non-blocking.
const RETRY: Duration = Duration::from_millis(10);

/// Lines on their way to a writer that may block.
pub(super) struct Lines {
    state: Mutex<LogState>,
    /// Signalled when there are lines to write.
    came: Condvar,
    /// Nothing waits any more.
    gone: Condvar,
    /// Makes a line of a text.
    notice: fn(&str) -> Vec<u8>,
}

struct LogState {
    waiting: Vec<u8>,
    /// Lines that found no room since the last ones that did were taken.
    dropped: u64,
    bound: Bound,
    /// Lines beyond the bound that weren't told of yet.
    left_out: u64,
    writing: bool,
    /// Somebody waits for the end.
    ending: bool,
}

impl LogState {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.dropped == 0
    }
}

impl Lines {
    /// Starts the thread, which lives as long as the process.
    pub fn start(
        to: impl Write + Send + 'static,
        notice: fn(&str) -> Vec<u8>,
    ) -> io::Result<Arc<Lines>> {
        let lines = Arc::new(Lines {
            state: Mutex::new(LogState {
                waiting: Vec::new(),
                dropped: 0,
                bound: Bound::new(Instant::now()),
                left_out: 0,
                writing: false,
                ending: false,
            }),
            came: Condvar::new(),
            gone: Condvar::new(),
            notice,
        });
        let ours = Arc::clone(&lines);
        let thread = std::thread::Builder::new().name("pvblk-log".into());
        thread.stack_size(128 << 10).spawn(move || ours.run(to))?;
        Ok(lines)
    }

    /// Adds whole lines, so many.
    pub fn put(&self, bytes: &[u8], lines: u64) {
        self.add(&mut self.state.lock(), bytes, lines);
    }

    /// Adds a line that a peer may have caused, unless there were too many.
    pub fn put_bounded(&self, bytes: &[u8], lines: u64) {
        let mut state = self.state.lock();
        if !state.bound.admit(bytes.len(), Instant::now()) {
            state.left_out += lines;
            drop(state);
            self.came.notify_one();
            return;
        }
        self.add(&mut state, bytes, lines);
    }

    fn add(&self, state: &mut LogState, bytes: &[u8], lines: u64) {
        if state.waiting.len() + bytes.len() > MOST_WAITING {
            state.dropped += lines;
            return;
        }
        state.waiting.extend_from_slice(bytes);
        self.came.notify_one();
    }

    fn run(&self, mut to: impl Write) {
        let mut taken = Vec::new();
        let mut told_at: Option<Instant> = None;
        loop {
            let mut state = self.state.lock();
            state.writing = false;
            if state.is_empty() && state.left_out == 0 {
                self.gone.notify_all();
            }
            let left_out = loop {
                let due = told_at.map(|at| at + TOLD_AFTER);
                let is_due = state.ending || due.is_none_or(|due| due <= Instant::now());
                if state.left_out > 0 && is_due {
                    told_at = Some(Instant::now());
                    break std::mem::take(&mut state.left_out);
                }
                if !state.is_empty() {
                    break 0;
                }
                match due.filter(|_| state.left_out > 0) {
                    Some(due) => drop(self.came.wait_until(&mut state, due)),
                    None => self.came.wait(&mut state),
                }
            };
            std::mem::swap(&mut state.waiting, &mut taken);
            let dropped = std::mem::take(&mut state.dropped);
            state.writing = true;
            drop(state);
            write(&mut to, &taken);
            if dropped > 0 {
                let text = format!(
                    "{dropped} lines of the log were dropped: standard error was not read for a while"
                );
                write(&mut to, &(self.notice)(&text));
            }
            if left_out > 0 {
                let kib = PER_SECOND >> 10;
                let text = format!(
                    "{left_out} lines of the log were left out: more than {kib} KiB a second"
                );
                write(&mut to, &(self.notice)(&text));
            }
            taken.clear();
        }
    }

    /// Waits until all is written, up to `limit`; true if it is.
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        state.ending = true;
        self.came.notify_one();
        let mut written = true;
        while written && (!state.is_empty() || state.left_out > 0 || state.writing) {
            written = !self.gone.wait_until(&mut state, deadline).timed_out();
        }
        state.ending = false;
        written
    }
}

/// Writes all bytes; those that can't be written any more are dropped.
fn write(to: &mut impl Write, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return,
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::bound::BURST;
    use super::*;
    use std::io::ErrorKind;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    /// A reader that reads only when the test asks it to.
    struct Pipe(SyncSender<Vec<u8>>);

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(1000);
            let sent = self.0.send(bytes[..n].to_vec());
            sent.map(|()| n).map_err(|_| ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn notice(text: &str) -> Vec<u8> {
        format!("pvblk: {text}\n").into_bytes()
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    fn read_until(from: &Receiver<Vec<u8>>, end: &str) -> String {
        let mut all = Vec::new();
        while !all.ends_with(end.as_bytes()) {
            all.extend(from.recv_timeout(PATIENCE).expect("more"));
        }
        String::from_utf8(all).unwrap()
    }

    #[test]
    fn who_does_not_read_holds_up_nobody_and_is_told_what_was_dropped() {
        let (pipe, read) = sync_channel(0);
        let lines = Lines::start(Pipe(pipe), notice).unwrap();
        lines.put(b"first\n", 1);
        assert_eq!(read_until(&read, "first\n"), "first\n");
        assert!(lines.flush(PATIENCE));
        // The lines aren't read. The thread takes the first one and waits for the reader; the others wait, or are dropped.
        let count = 3 * MOST_WAITING / 100;
        let put = |n: usize| lines.put(format!("{n:099}\n").as_bytes(), 1);
        put(0);
        let begin = Instant::now();
        while !lines.state.lock().is_empty() {
            assert!(begin.elapsed() < PATIENCE, "the thread takes no line");
            std::thread::yield_now();
        }
        (1..count).for_each(put);
        assert!(lines.state.lock().waiting.len() <= MOST_WAITING);
        assert!(!lines.flush(Duration::from_millis(10)));
        let told = read_until(&read, "for a while\n");
        let all: Vec<&str> = told.lines().collect();
        let (last, whole) = all.split_last().unwrap();
        for (n, line) in whole.iter().enumerate() {
            assert_eq!(**line, format!("{n:099}"));
        }
        let dropped: usize = last.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(whole.len() + dropped, count);
        assert!(dropped >= count - 2 * MOST_WAITING / 100 - 2, "{dropped}");
        assert!(lines.flush(PATIENCE));
        // And it goes on as before.
        lines.put(b"again\n", 1);
        assert_eq!(read_until(&read, "again\n"), "again\n");
        assert!(lines.flush(PATIENCE));
    }

    #[test]
    fn a_reader_that_is_gone_is_no_reason_to_wait() {
        let (pipe, read) = sync_channel(0);
        let lines = Lines::start(Pipe(pipe), notice).unwrap();
        drop(read);
        lines.put(b"nobody\n", 1);
        assert!(lines.flush(PATIENCE));
    }

    #[test]
    fn a_flood_is_cut_and_told_and_the_users_own_lines_are_not() {
        let (pipe, read) = sync_channel(1 << 20);
        let lines = Lines::start(Pipe(pipe), notice).unwrap();
        let line = [b'x'; 99];
        let line = [&line[..], b"\n"].concat();
        let count = 4 * BURST / line.len();
        for _ in 0..count {
            // The reader keeps up, so that nothing is dropped.
            lines.put_bounded(&line, 1);
            if lines.state.lock().waiting.len() > MOST_WAITING / 2 {
                assert!(lines.flush(PATIENCE));
            }
        }
        lines.put(b"mine\n", 1);
        assert!(lines.flush(PATIENCE));
        let all: Vec<u8> = read.try_iter().flatten().collect();
        let text = String::from_utf8(all).unwrap();
        let whole = text.lines().filter(|l| l.starts_with('x')).count();
        let told = text.lines().filter(|l| l.contains("left out"));
        let left_out = told.map(|l| l.split(' ').nth(1).unwrap().parse::<usize>().unwrap());
        assert_eq!(whole + left_out.sum::<usize>(), count);
        assert!(whole >= BURST / line.len() && whole < count, "{whole}");
        assert!(text.contains("mine\n"));
    }
}
