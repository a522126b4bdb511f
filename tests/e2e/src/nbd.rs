//! A small NBD client that sees every reply, for tests of what replies guarantee.

use crate::Stop;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;

/// A command without data from the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Answer with data.
    Read = 0,
    /// Write the data that follows.
    Write = 1,
    /// Make completed writes durable.
    Flush = 3,
    /// Discard the data.
    Trim = 4,
}

/// A connection in the transmission phase.
pub struct Connection {
    stream: UnixStream,
    /// Size of the export in bytes.
    pub size_bytes: u64,
}

/// A reply: which request, and its error (0: none).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The cookie of the request.
    pub cookie: u64,
    /// The error number of the protocol.
    pub error: u32,
}

impl Connection {
    /// Connects to an export.
    pub fn open(socket: &Path, export: &str) -> Result<Connection, Stop> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut hello = [0; 18];
        stream.read_exact(&mut hello)?;
        if &hello[..8] != b"NBDMAGIC" || &hello[8..16] != OPTION_MAGIC {
            return Stop::fail(format!("not a new-style NBD server: {hello:?}"));
        }
        // Fixed new style, and no padding after the export's data.
        stream.write_all(&3u32.to_be_bytes())?;
        let name = export.as_bytes();
        let mut option = Vec::new();
        option.extend(OPTION_MAGIC);
        option.extend(OPTION_GO.to_be_bytes());
        option.extend((name.len() as u32 + 6).to_be_bytes());
        option.extend((name.len() as u32).to_be_bytes());
        option.extend(name);
        option.extend(0u16.to_be_bytes());
        stream.write_all(&option)?;
        let size_bytes = go_replies(&mut stream)?;
        Ok(Connection { stream, size_bytes })
    }

    /// Changes the longest time to wait for an answer, which is 30 s.
    pub fn patience(&self, limit: Duration) -> Result<(), Stop> {
        Ok(self.stream.set_read_timeout(Some(limit))?)
    }

    /// Sends a request.
    pub fn send(
        &mut self,
        command: Command,
        cookie: u64,
        offset: u64,
        data: &[u8],
    ) -> io::Result<()> {
        self.send_any(command, cookie, offset, data.len() as u32, data)
    }

    fn send_any(
        &mut self,
        command: Command,
        cookie: u64,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> io::Result<()> {
        let mut request = Vec::with_capacity(28 + data.len());
        request.extend(REQUEST_MAGIC.to_be_bytes());
        request.extend(0u16.to_be_bytes());
        request.extend((command as u16).to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)
    }

    /// Reads, while no other request is in flight.
    pub fn read(&mut self, cookie: u64, offset: u64, bytes: usize) -> Result<Vec<u8>, Stop> {
        self.send_any(Command::Read, cookie, offset, bytes as u32, &[])?;
        match self.receive()? {
            Some(reply) if reply.error == 0 && reply.cookie == cookie => {
                let mut data = vec![0; bytes];
                self.stream.read_exact(&mut data)?;
                Ok(data)
            }
            other => Stop::fail(format!("a read was answered with {other:?}")),
        }
    }

    /// Sends a read without waiting for its reply.
    pub fn send_read(&mut self, cookie: u64, offset: u64, bytes: u32) -> io::Result<()> {
        self.send_any(Command::Read, cookie, offset, bytes, &[])
    }

    /// Sends a request that carries no data, about `len` bytes.
    pub fn ask(&mut self, command: Command, cookie: u64, offset: u64, len: u32) -> io::Result<()> {
        self.send_any(command, cookie, offset, len, &[])
    }

    /// The data of a read whose reply has no error.
    pub fn receive_data(&mut self, len: usize) -> Result<Vec<u8>, Stop> {
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Sends bytes that need not be a request.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// The next reply; `None` when the server has closed the connection.
    pub fn receive(&mut self) -> Result<Option<Reply>, Stop> {
        let mut reply = [0; 16];
        let mut have = 0;
        while have < reply.len() {
            match self.stream.read(&mut reply[have..]) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => return Stop::fail("the connection closed inside a reply"),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset && have == 0 => {
                    return Ok(None);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Stop::fail(format!("no reply: {e}")),
            }
        }
        if be32(&reply[..4]) != REPLY_MAGIC {
            return Stop::fail(format!("not a reply: {reply:02x?}"));
        }
        Ok(Some(Reply {
            error: be32(&reply[4..8]),
            cookie: be64(&reply[8..]),
        }))
    }
}

/// Reads the replies to GO up to its acknowledgement; returns the export's size.
fn go_replies(stream: &mut UnixStream) -> Result<u64, Stop> {
    let mut size_bytes = None;
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        let (magic, kind, len) = (be64(&head[..8]), be32(&head[12..16]), be32(&head[16..]));
        if magic != OPTION_REPLY_MAGIC || len > 4096 {
            return Stop::fail(format!("not an option reply: {head:02x?}"));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        match kind {
            REPLY_ACK => break,
            REPLY_INFO if data.len() >= 12 && data[..2] == [0, 0] => {
                size_bytes = Some(be64(&data[2..10]));
            }
            REPLY_INFO => {}
            other => {
                let text = String::from_utf8_lossy(&data);
                return Stop::fail(format!("the server refused the export: {other:#x} {text}"));
            }
        }
    }
    size_bytes.ok_or_else(|| Stop::Fail("the server didn't tell the export's size".into()))
}

fn be32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |v, &b| v << 8 | u32::from(b))
}

fn be64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |v, &b| v << 8 | u64::from(b))
}
