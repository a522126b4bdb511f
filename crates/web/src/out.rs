//! Writing to a reader that may be slow.

use crate::limits::Limits;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Bytes of a chunk.
const CHUNK: usize = 64 << 10;

/// The socket, until a deadline.
pub(super) struct Out<'a> {
    socket: &'a UnixStream,
    deadline: Instant,
    progress: Duration,
}

impl<'a> Out<'a> {
    /// For one answer.
    pub fn answer(socket: &'a UnixStream, limits: &Limits) -> Out<'a> {
        Out {
            socket,
            deadline: Instant::now() + limits.answer,
            progress: limits.progress,
        }
    }
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let patience = left.min(self.progress);
        self.socket
            .set_write_timeout(Some(patience.max(Duration::from_millis(1))))?;
        // A piece: the system takes some of it or nothing in that time.
        let piece = &bytes[..bytes.len().min(CHUNK)];
        match (&mut &*self.socket).write(piece) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A body in chunks; [`Chunks::finish`] ends it.
pub(super) struct Chunks<W: Write> {
    out: W,
    buffer: Vec<u8>,
    /// False: the end of the connection ends the body.
    is_framed: bool,
}

impl<W: Write> Chunks<W> {
    pub fn new(out: W, is_framed: bool) -> Chunks<W> {
        Chunks {
            out,
            buffer: Vec::with_capacity(CHUNK),
            is_framed,
        }
    }

    fn send(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        if self.is_framed {
            write!(self.out, "{:x}\r\n", self.buffer.len())?;
            self.buffer.extend(b"\r\n");
        }
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Sends the rest and the end.
    pub fn finish(mut self) -> io::Result<()> {
        self.send()?;
        match self.is_framed {
            true => self.out.write_all(b"0\r\n\r\n"),
            false => Ok(()),
        }
    }
}

impl<W: Write> Write for Chunks<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Two bytes are left for the end of a chunk.
        let room = CHUNK - 2 - self.buffer.len();
        let taken = bytes.len().min(room);
        self.buffer.extend(&bytes[..taken]);
        if taken == room {
            self.send()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_cut_and_ended() {
        let mut sent = Vec::new();
        let mut chunks = Chunks::new(&mut sent, true);
        chunks.write_all(&[b'a'; CHUNK]).unwrap();
        chunks.write_all(b"bc").unwrap();
        chunks.finish().unwrap();
        let text = String::from_utf8(sent).unwrap();
        assert!(text.starts_with("fffe\r\naaa"), "{}", &text[..20]);
        assert!(
            text.ends_with("a\r\n4\r\naabc\r\n0\r\n\r\n"),
            "{}",
            &text[text.len() - 30..]
        );
        let mut sent = Vec::new();
        let mut plain = Chunks::new(&mut sent, false);
        plain.write_all(b"bc").unwrap();
        plain.finish().unwrap();
        assert_eq!(sent, b"bc");
        let mut sent = Vec::new();
        Chunks::new(&mut sent, true).finish().unwrap();
        assert_eq!(sent, b"0\r\n\r\n");
    }
}
