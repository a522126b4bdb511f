//! [`Lines`]: what a client of the control socket sends.

use super::LONGEST_QUESTION;
use super::server::PATIENCE;
use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads lines of bounded length. A line that has begun must be there soon; between lines a client may rest.
pub(super) struct Lines {
    socket: Arc<UnixStream>,
    bytes: Vec<u8>,
    /// No line end is before this place.
    seen: usize,
}

impl Lines {
    pub fn new(socket: &Arc<UnixStream>) -> Lines {
        Lines {
            socket: Arc::clone(socket),
            bytes: Vec::new(),
            seen: 0,
        }
    }

    /// The first line, or what is wrong with it: its end is there soon, or the client closes its side after it.
    pub fn first(&mut self) -> io::Result<Result<String, String>> {
        self.line(Some(Instant::now() + PATIENCE))
            .map(|line| line.unwrap_or_else(|| Ok(String::new())))
    }

    /// The next line; `None`: there is none any more. After an error nothing that comes makes sense.
    pub fn next(&mut self) -> io::Result<Option<Result<String, String>>> {
        self.line(None)
    }

    /// True if a line that is too long begins as a request does.
    pub fn is_json(&self) -> bool {
        self.bytes.first() == Some(&b'{')
    }

    fn line(&mut self, deadline: Option<Instant>) -> io::Result<Option<Result<String, String>>> {
        let mut deadline = deadline;
        loop {
            let end = self.bytes[self.seen..].iter().position(|&b| b == b'\n');
            if let Some(end) = end
                .map(|e| e + self.seen)
                .filter(|&e| e <= LONGEST_QUESTION)
            {
                let rest = self.bytes.split_off(end + 1);
                let line = std::mem::replace(&mut self.bytes, rest);
                self.seen = 0;
                return Ok(Some(text(&line)));
            }
            self.seen = self.bytes.len();
            if self.seen > LONGEST_QUESTION {
                let why = format!("a question has at most {LONGEST_QUESTION} bytes");
                return Ok(Some(Err(why)));
            }
            if self.seen > 0 && deadline.is_none() {
                deadline = Some(Instant::now() + PATIENCE);
            }
            // All of it together, however it comes in.
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            let left = left.map(|d| d.max(Duration::from_micros(1)));
            self.socket.set_read_timeout(left)?;
            let mut piece = [0; 4096];
            let n = match (&*self.socket).read(&mut piece) {
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                read => read?,
            };
            if n == 0 {
                let last = std::mem::take(&mut self.bytes);
                self.seen = 0;
                return Ok((!last.is_empty()).then(|| text(&last)));
            }
            self.bytes.extend(&piece[..n]);
        }
    }
}

fn text(line: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(line).map_err(|_| "the question isn't UTF-8".to_owned())?;
    Ok(text.trim_end().to_owned())
}
