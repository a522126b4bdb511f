//! [`Events`]: Server-Sent Events to one reader.

use crate::limits::Limits;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause of a sender until its reader may have taken something.
const PAUSE: Duration = Duration::from_millis(5);

/// A stream of events to one reader.
pub struct Events<'a> {
    /// It doesn't block.
    socket: &'a UnixStream,
    stopping: &'a AtomicBool,
    /// Bytes that the reader hasn't taken.
    left: Vec<u8>,
    /// When the oldest byte in `left` was put there; if there is none, when the last one was taken.
    since: Instant,
    progress: Duration,
    sign_of_life: Duration,
}

impl<'a> Events<'a> {
    pub(super) fn new(
        socket: &'a UnixStream,
        stopping: &'a AtomicBool,
        limits: &Limits,
    ) -> io::Result<Events<'a>> {
        socket.set_nonblocking(true)?;
        Ok(Events {
            socket,
            stopping,
            left: Vec::new(),
            since: Instant::now(),
            progress: limits.progress,
            sign_of_life: limits.sign_of_life,
        })
    }

    /// Sends one event, and waits until the system has taken it. An error means that the reader is gone, or hasn't taken all of it
    /// in the time of [`Limits::progress`].
    pub fn send(&mut self, data: &str) -> io::Result<()> {
        self.offer(data)?;
        while !self.push()? {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Sends one event without a wait: the rest of it goes with [`Events::is_taken`].
    pub fn offer(&mut self, data: &str) -> io::Result<()> {
        self.begin();
        for line in data.split(['\n', '\r']) {
            self.left.extend(b"data: ");
            self.left.extend(line.as_bytes());
            self.left.push(b'\n');
        }
        self.put(b"\n")
    }

    /// True if there is room for another event: the reader has taken those before.
    pub fn is_taken(&mut self) -> io::Result<bool> {
        self.push()
    }

    /// True if the reader is gone, or the server stops. To be asked a few times a second.
    pub fn is_over(&mut self) -> io::Result<bool> {
        if self.stopping.load(Ordering::Acquire) {
            return Ok(true);
        }
        let mut bytes = [0; 64];
        match (&mut &*self.socket).read(&mut bytes) {
            Ok(0) => return Ok(true),
            // Nothing that it says now matters.
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        if self.push()? && self.since.elapsed() >= self.sign_of_life {
            self.begin();
            self.put(b":\n\n")?;
        }
        Ok(false)
    }

    /// Starts the time of bytes that are put into an empty `left`. Bytes behind others share the time of those, so that a
    /// reader that takes a byte now and then gets no more of it.
    fn begin(&mut self) {
        if self.left.is_empty() {
            self.since = Instant::now();
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.left.extend(bytes);
        self.push().map(drop)
    }

    /// Writes what there is room for; true if that is all.
    fn push(&mut self) -> io::Result<bool> {
        let is_idle = self.left.is_empty();
        while !self.left.is_empty() {
            match (&mut &*self.socket).write(&self.left) {
                Ok(n) => {
                    self.left.drain(..n);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return match self.since.elapsed() < self.progress {
                        true => Ok(false),
                        false => Err(ErrorKind::TimedOut.into()),
                    };
                }
                Err(e) => return Err(e),
            }
        }
        if !is_idle {
            self.since = Instant::now();
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_trickles_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stopping = AtomicBool::new(false);
        let limits = Limits {
            progress: Duration::from_millis(300),
            ..Limits::default()
        };
        let mut events = Events::new(&ours, &stopping, &limits).unwrap();
        // It would take this event in 10 seconds at best.
        let long = "x".repeat(8 << 20);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut some = [0; 8 << 10];
                while !over.load(Ordering::Acquire) && theirs.read(&mut some).is_ok() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            let sent = events.send(&long);
            over.store(true, Ordering::Release);
            ours.shutdown(std::net::Shutdown::Both).unwrap();
            assert_eq!(sent.unwrap_err().kind(), ErrorKind::TimedOut);
        });
    }
}
