//! The asking side.

use super::rpc::{Request, Response, RpcError};
use super::{ASK, ERROR, LONGEST_QUESTION, MEMORY, OK, TRACE};
use anyhow::{Context, Result, anyhow, bail};
use pvblk_block::error_line;
use pvblk_client::dial::{SocketType, dial};
use pvblk_trace::blktrace::Reader;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time for a server to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest time for a disk to answer: it may have to write to members of an array.
pub const ASK_PATIENCE: Duration = Duration::from_secs(60);
/// Longest answer in bytes: counters of 10,000 disks are some 10 MiB.
const LONGEST_ANSWER: u64 = 64 << 20;

/// Asks a disk of the server at `path`; both texts are JSON.
pub fn ask(path: &Path, disk: &str, question: &str) -> Result<String> {
    ask_line(path, &format!("{ASK}{disk} {question}"), || {
        format!("asking disk {disk}")
    })
}

/// Asks the server at `path` about its memory; both texts are JSON.
pub fn ask_memory(path: &Path, question: &str) -> Result<String> {
    ask_line(path, &format!("{MEMORY}{question}"), || {
        "asking about memory".into()
    })
}

fn ask_line(path: &Path, line: &str, what: impl Fn() -> String) -> Result<String> {
    let failed = || format!("{}: {}", path.display(), what());
    let (_socket, input) = open(path, line, &what)?;
    let mut answer = String::new();
    let mut input = input.take(LONGEST_ANSWER);
    input.read_line(&mut answer).with_context(failed)?;
    if !answer.ends_with('\n') {
        bail!("{}: the answer is cut off", path.display());
    }
    Ok(answer)
}

/// Asks, and reads the first line of the answer.
fn open(
    path: &Path,
    line: &str,
    what: impl Fn() -> String,
) -> Result<(UnixStream, BufReader<UnixStream>)> {
    let name = path.display().to_string();
    if line.len() >= LONGEST_QUESTION || line.contains('\n') {
        bail!("{name}: a question is one line of less than {LONGEST_QUESTION} bytes");
    }
    let failed = || format!("{name}: {}", what());
    let socket = connect(path, ASK_PATIENCE).with_context(failed)?;
    let input = begin(&name, &socket, line).with_context(failed)??;
    Ok((socket, input))
}

/// Sends the first line, and reads that of the answer; what follows it is in the reader. The inner error says that the server refused.
fn begin(
    name: &str,
    socket: &UnixStream,
    line: &str,
) -> std::io::Result<Result<BufReader<UnixStream>>> {
    send(socket, line)?;
    let mut input = BufReader::with_capacity(1 << 16, socket.try_clone()?);
    let accepted = accepted(name, &mut input)?;
    Ok(accepted.map(|()| input))
}

/// Sends a line. A server that is none of ours may have hung up: that is no error here, since the bytes that it sent before tell.
fn send(mut socket: &UnixStream, line: &str) -> std::io::Result<()> {
    match socket.write_all(format!("{line}\n").as_bytes()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        end => end,
    }
}

fn connect(path: &Path, patience: Duration) -> Result<UnixStream> {
    let socket: UnixStream = dial(path, SocketType::STREAM, Instant::now() + PATIENCE)?.into();
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(patience))?;
    Ok(socket)
}

/// The error about a server that isn't ours.
fn another_kind(name: &str) -> anyhow::Error {
    anyhow!("{name}: this is no control socket: give --control's of the server")
}

/// True for what a server that isn't ours does to a reader of lines.
fn is_of_another_kind(e: &std::io::Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::ConnectionReset | ErrorKind::InvalidData
    )
}

/// The first line of an answer.
fn accepted(name: &str, input: &mut impl BufRead) -> std::io::Result<Result<()>> {
    let mut answer = String::new();
    match input.read_line(&mut answer) {
        Err(e) if is_of_another_kind(&e) => {}
        end => _ = end?,
    }
    Ok(match answer.trim_end() {
        OK => Ok(()),
        other => Err(match other.strip_prefix(ERROR) {
            Some(why) => anyhow!("{name}: {why}"),
            None => another_kind(name),
        }),
    })
}

/// A connection that speaks JSON-RPC, one request after another.
pub struct Client {
    name: String,
    input: BufReader<UnixStream>,
    next: u64,
    /// The last call had a response.
    answered: bool,
}

/// Longest response in bytes: a page of disks with all their exports.
const LONGEST_RESPONSE: u64 = 64 << 20;

impl Client {
    /// Connects to the server at `path`; a call may take `patience`.
    pub fn connect(path: &Path, patience: Duration) -> Result<Client> {
        let name = path.display().to_string();
        let socket = connect(path, patience).map_err(|e| {
            anyhow!(
                "{} (--control unix:PATH names another socket)",
                error_line(&*e)
            )
        })?;
        Ok(Client::on(name, BufReader::new(socket)))
    }

    fn on(name: String, input: BufReader<UnixStream>) -> Client {
        Client {
            name,
            input,
            next: 1,
            answered: true,
        }
    }

    /// True if the last call had a response, be it an error: the connection goes on.
    pub fn is_open(&self) -> bool {
        self.answered
    }

    /// The connection itself: another thread ends a stream by shutting it down.
    pub fn socket(&self) -> Result<UnixStream> {
        self.input.get_ref().try_clone().context("a socket")
    }

    /// Calls a method.
    pub fn call<T: DeserializeOwned>(&mut self, method: &str, params: Value) -> Result<T> {
        let result = match self.request(method, params)? {
            Ok(result) => result,
            Err(refused) => bail!("{}: {}", self.name, refused.message),
        };
        let failed = || format!("{}: {method}", self.name);
        serde_json::from_value(result).with_context(failed)
    }

    /// Calls a method; the inner error is the server's.
    pub fn request(&mut self, method: &str, params: Value) -> Result<Result<Value, RpcError>> {
        let failed = || format!("{}: {method}", self.name);
        let id = Value::from(self.next);
        self.next += 1;
        self.answered = false;
        let request = Request {
            jsonrpc: "2.0".into(),
            id: Some(id.clone()),
            method: method.to_owned(),
            params,
        };
        let line = serde_json::to_string(&request).with_context(failed)?;
        if line.len() >= LONGEST_QUESTION {
            bail!(
                "{}: a request has at most {LONGEST_QUESTION} bytes",
                self.name
            );
        }
        send(self.input.get_ref(), &line).with_context(failed)?;
        let mut text = String::new();
        let mut bounded = (&mut self.input).take(LONGEST_RESPONSE);
        match bounded.read_line(&mut text) {
            Err(e) if is_of_another_kind(&e) => return Err(another_kind(&self.name)),
            read => _ = read.with_context(failed)?,
        }
        if text.is_empty() {
            bail!("{}: the server ended the connection", self.name);
        }
        if let Some(why) = text.trim_end().strip_prefix(ERROR) {
            bail!("{}: {why}: it is of an earlier version", self.name);
        }
        let is_object = text.starts_with('{');
        let response: Response = match serde_json::from_str(&text) {
            Err(_) if !is_object => return Err(another_kind(&self.name)),
            response => response.with_context(failed)?,
        };
        self.answered = true;
        if let Some(error) = response.error {
            return Ok(Err(error));
        }
        if response.id != id {
            bail!("{}: an answer to another request", self.name);
        }
        Ok(Ok(response.result.unwrap_or(Value::Null)))
    }

    /// The connection after a method whose answer is followed by lines; a read waits for `patience` at most.
    pub fn lines(self, patience: Duration) -> Result<BufReader<UnixStream>> {
        let set = self.input.get_ref().set_read_timeout(Some(patience));
        set.with_context(|| self.name.clone())?;
        Ok(self.input)
    }

    /// Calls a method whose answer is followed by lines, as long as the server has some.
    pub fn stream(mut self, method: &str, params: Value) -> Result<impl BufRead> {
        self.call::<Value>(method, params)?;
        // A quiet server has none.
        self.input.get_ref().set_read_timeout(None)?;
        Ok(self.input)
    }
}

/// A trace of a running server.
pub struct Stream {
    name: String,
    socket: UnixStream,
    reader: Option<Reader<BufReader<UnixStream>>>,
}

impl Stream {
    /// Asks the server at `path` for what happens from now on, to one request in `every`.
    pub fn open(path: &Path, every: u32) -> Result<Stream> {
        let name = path.display().to_string();
        let failed = || format!("{name}: asking for a trace");
        let socket = connect(path, PATIENCE).with_context(failed)?;
        let input = match every {
            // As earlier versions understand it.
            1 => begin(&name, &socket, TRACE).with_context(failed)??,
            _ => {
                let input = socket.try_clone().with_context(failed)?;
                let input = BufReader::with_capacity(1 << 16, input);
                let mut client = Client::on(name.clone(), input);
                client.call::<Value>(TRACE, json!({"every": every}))?;
                client.input
            }
        };
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

    /// Wants nothing after now. Earlier events still come, and then the end.
    pub fn finish(&self) {
        // A server that is gone has ended the stream already.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_another_kind_is_told_by_its_greeting_also_when_it_has_hung_up() {
        for greeting in [&b"NBDMAGIC"[..], b"\xff\xfe\n", b""] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(greeting).unwrap();
            drop(theirs);
            let begun = begin("s", &ours, TRACE).expect("no error of the socket");
            let told = begun.expect_err("none of ours").to_string();
            assert!(told.contains("this is no control socket"), "{told}");
        }
    }

    #[test]
    fn a_call_tells_a_server_of_another_kind() {
        for greeting in [&b"NBDMAGIC"[..], b"\xff\xfe\n", b"220 mail\r\n"] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(greeting).unwrap();
            drop(theirs);
            let mut client = Client::on("s".into(), BufReader::new(ours));
            let told = client.request("disk.list", Value::Null).unwrap_err();
            let told = told.to_string();
            assert!(told.contains("this is no control socket"), "{told}");
        }
    }

    #[test]
    fn the_reader_of_an_answer_has_the_bytes_that_follow_its_first_line() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(format!("{OK}\nmore").as_bytes()).unwrap();
        drop(theirs);
        let mut input = begin("s", &ours, TRACE).unwrap().unwrap();
        let mut rest = String::new();
        input.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "more");
    }
}
