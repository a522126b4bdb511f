//! The asking side.

use super::{ERROR, OK, TRACE};
use anyhow::{Context, Result, bail};
use pvblk_export::socket_file::{SocketType, dial};
use pvblk_trace::blktrace::Reader;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A trace of a running server.
pub struct Stream {
    name: String,
    socket: UnixStream,
    reader: Option<Reader<BufReader<UnixStream>>>,
}

impl Stream {
    /// Asks the server at `path` for what happens from now on.
    pub fn open(path: &Path) -> Result<Stream> {
        let name = path.display().to_string();
        let socket: UnixStream = dial(path, SocketType::STREAM, Instant::now() + PATIENCE)?.into();
        let failed = || format!("{name}: asking for a trace");
        socket.set_nonblocking(false).with_context(failed)?;
        socket
            .set_read_timeout(Some(PATIENCE))
            .with_context(failed)?;
        writeln!(&socket, "{TRACE}").with_context(failed)?;
        let mut input = BufReader::with_capacity(1 << 16, socket.try_clone().with_context(failed)?);
        let mut answer = String::new();
        input.read_line(&mut answer).with_context(failed)?;
        match answer.trim_end() {
            OK => {}
            other => match other.strip_prefix(ERROR) {
                Some(why) => bail!("{name}: {why}"),
                None => bail!("{name}: this is no control socket: give --control's of the server"),
            },
        }
        // A quiet disk has no events.
        socket.set_read_timeout(None).with_context(failed)?;
        Ok(Stream {
            reader: Some(Reader::new(name.clone(), input)),
            name,
            socket,
        })
    }

    /// The server's socket.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the records come out; once.
    pub fn reader(&mut self) -> Option<Reader<BufReader<UnixStream>>> {
        self.reader.take()
    }

    /// Wants nothing after now. What happened before still comes, and then the end.
    pub fn finish(&self) {
        // A server that is gone has ended the stream already.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}
