//! Lines on standard error, which never hold up a server, even if their reader stops reading.
//!
//! A command writes the lines itself. A server ([`detach`]) gives them to a thread. If they aren't read, a
//! bounded number of bytes waits, further lines are dropped, and their number is printed when the reader
//! reads again.

use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Bytes that wait at most; as many are with the thread.
const MOST_WAITING: usize = 256 << 10;
/// Longest wait for the reader at the end of the process.
const LAST_LINES: Duration = Duration::from_secs(2);
/// Time to wait when a standard error is full that another process made non-blocking.
const RETRY: Duration = Duration::from_millis(10);

static SERVER: OnceLock<Arc<Lines>> = OnceLock::new();

/// Prints a line.
pub fn line(text: fmt::Arguments<'_>) {
    put(format!("{text}\n").as_bytes());
}

/// Prints whole lines.
pub fn put(lines: &[u8]) {
    match SERVER.get() {
        Some(server) => server.put(lines),
        None => {
            let _ = io::stderr().write_all(lines);
        }
    }
}

/// Gives all lines from now on to a thread of their own, the only one that waits for the reader of standard
/// error. Messages of panics go the same way.
pub fn detach() -> io::Result<()> {
    if SERVER.get().is_some() {
        return Ok(());
    }
    let lines = Lines::start(io::stderr())?;
    let _ = SERVER.set(lines);
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        // Empty unless RUST_BACKTRACE asks for it.
        let trace = std::backtrace::Backtrace::capture();
        line(format_args!("thread '{name}' {panic}\n{trace}"));
    }));
    Ok(())
}

/// Waits until all that was printed is read, for a while, when it is dropped at the end of the process.
pub struct LastLines;

impl Drop for LastLines {
    fn drop(&mut self) {
        if let Some(server) = SERVER.get() {
            server.flush(LAST_LINES);
        }
    }
}

/// Where `tracing` writes to: each event with one call.
pub struct Writer;

impl Write for Writer {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        put(event);
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines on their way to a writer that may block.
struct Lines {
    state: Mutex<LogState>,
    /// Signalled when there are lines to write.
    came: Condvar,
    /// Nothing waits any more.
    gone: Condvar,
}

#[derive(Default)]
struct LogState {
    waiting: Vec<u8>,
    /// Lines that found no room since the last ones that did were taken.
    dropped: u64,
    writing: bool,
}

impl LogState {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.dropped == 0
    }
}

impl Lines {
    /// Starts the thread, which lives as long as the process.
    fn start(to: impl Write + Send + 'static) -> io::Result<Arc<Lines>> {
        let lines = Arc::new(Lines {
            state: Mutex::default(),
            came: Condvar::new(),
            gone: Condvar::new(),
        });
        let ours = Arc::clone(&lines);
        let thread = std::thread::Builder::new().name("pvblk-log".into());
        thread.stack_size(128 << 10).spawn(move || ours.run(to))?;
        Ok(lines)
    }

    fn put(&self, lines: &[u8]) {
        let mut state = self.state.lock();
        if state.waiting.len() + lines.len() > MOST_WAITING {
            let count = lines.iter().filter(|&&b| b == b'\n').count();
            state.dropped += count as u64;
            return;
        }
        state.waiting.extend_from_slice(lines);
        drop(state);
        self.came.notify_one();
    }

    fn run(&self, mut to: impl Write) {
        let mut taken = Vec::new();
        loop {
            let mut state = self.state.lock();
            state.writing = false;
            if state.is_empty() {
                self.gone.notify_all();
            }
            while state.is_empty() {
                self.came.wait(&mut state);
            }
            std::mem::swap(&mut state.waiting, &mut taken);
            let dropped = std::mem::take(&mut state.dropped);
            state.writing = true;
            drop(state);
            write(&mut to, &taken);
            if dropped > 0 {
                let text = format!(
                    "pvblk: {dropped} lines of the log were dropped: standard error was not read for a while\n"
                );
                write(&mut to, text.as_bytes());
            }
            taken.clear();
        }
    }

    /// Waits until all is written, up to `limit`; true if it is.
    fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        while !state.is_empty() || state.writing {
            if self.gone.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
        true
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
    use super::*;
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
        let lines = Lines::start(Pipe(pipe)).unwrap();
        lines.put(b"first\n");
        assert_eq!(read_until(&read, "first\n"), "first\n");
        assert!(lines.flush(PATIENCE));
        // The lines aren't read. The thread takes the first one and waits for the reader; the others wait, or are dropped.
        let count = 3 * MOST_WAITING / 100;
        let put = |n: usize| lines.put(format!("{n:099}\n").as_bytes());
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
        lines.put(b"again\n");
        assert_eq!(read_until(&read, "again\n"), "again\n");
        assert!(lines.flush(PATIENCE));
    }

    #[test]
    fn a_reader_that_is_gone_is_no_reason_to_wait() {
        let (pipe, read) = sync_channel(0);
        let lines = Lines::start(Pipe(pipe)).unwrap();
        drop(read);
        lines.put(b"nobody\n");
        assert!(lines.flush(PATIENCE));
    }
}
