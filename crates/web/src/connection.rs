//! One connection: its requests, one after another.

use crate::events::Events;
use crate::files;
use crate::head::{self, Head, Refusal};
use crate::limits::Limits;
use crate::out::{Chunks, Out};
use crate::request::{Method, Request};
use crate::response::{self, Answer, Length, Response, Status};
use crate::server::{Seat, Shared};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Answers until the client ends, breaks the protocol, is too slow, or the server stops.
pub(super) fn run(shared: &Shared, seat: &Seat) -> io::Result<()> {
    let mut input = Input {
        socket: &seat.socket,
        limits: &shared.settings.limits,
        bytes: Vec::new(),
    };
    while !shared.is_stopping() {
        seat.rests();
        if !input.begins()? {
            break;
        }
        seat.works();
        let (request, head) = match input.request()? {
            Ok(read) => read,
            Err(refusal) => {
                let response = Response::line(refusal.status, &refusal.why);
                whole(shared, &seat.socket, &response, Method::Get, false)?;
                // Unread bytes would make the system drop the answer.
                return input.drain();
            }
        };
        let is_kept = head.is_kept && !shared.is_stopping();
        let answer = answer(shared, &request);
        match answer {
            Answer::Whole(response) => {
                whole(shared, &seat.socket, &response, request.method, is_kept)?
            }
            Answer::Written(content_type, write) => {
                let response = Response::new(Status::Ok, content_type, Vec::new());
                let length = match head.takes_chunks {
                    true => Length::Chunks,
                    false => Length::Close,
                };
                let mut out = Out::answer(&seat.socket, &shared.settings.limits);
                out.write_all(response::head(&response, &length, is_kept).as_bytes())?;
                if request.method != Method::Head {
                    let mut chunks = Chunks::new(out, head.takes_chunks);
                    write(&mut chunks)?;
                    chunks.finish()?;
                }
            }
            Answer::Events(stream) => {
                let Some(_place) = shared.stream() else {
                    let most = shared.settings.limits.streams;
                    let why = format!("{most} readers follow events already: end one of them");
                    let response = Response::line(Status::Unavailable, &why);
                    whole(shared, &seat.socket, &response, request.method, is_kept)?;
                    if is_kept {
                        continue;
                    }
                    return input.drain();
                };
                let response = Response::new(Status::Ok, "text/event-stream", Vec::new());
                let mut out = Out::answer(&seat.socket, &shared.settings.limits);
                out.write_all(response::head(&response, &Length::Close, false).as_bytes())?;
                if request.method == Method::Head {
                    return Ok(());
                }
                return stream(&mut Events::new(
                    &seat.socket,
                    &shared.stopping,
                    &shared.settings.limits,
                )?);
            }
        }
        if !is_kept {
            return input.drain();
        }
    }
    Ok(())
}

fn answer(shared: &Shared, request: &Request) -> Answer {
    // An old client without the header is no browser.
    if let Some(host) = request.header("host")
        && !shared.settings.hosts.allows(host)
    {
        let why = format!(
            "{} is no name of this server: ask for its address, or start it with --web-host NAME",
            host.escape_debug()
        );
        return Answer::Whole(Response::line(Status::Forbidden, &why));
    }
    if let Some(answer) = shared.site.answer(request) {
        return answer;
    }
    Answer::Whole(match files::find(request) {
        Some(_) if !request.is_reading() => {
            Response::line(Status::NoSuchMethod, "this is read by GET")
        }
        Some(response) => response,
        None => Response::line(Status::NotFound, "there is nothing at this path"),
    })
}

fn whole(
    shared: &Shared,
    socket: &UnixStream,
    response: &Response,
    method: Method,
    is_kept: bool,
) -> io::Result<()> {
    let length = match response.status {
        Status::NotModified => Length::Nothing,
        _ => Length::Bytes(response.body.len()),
    };
    let mut out = Out::answer(socket, &shared.settings.limits);
    let mut bytes = response::head(response, &length, is_kept).into_bytes();
    let body = match method {
        Method::Head => &[],
        _ => &*response.body,
    };
    if body.len() <= 4096 {
        // One packet.
        bytes.extend(body);
        return out.write_all(&bytes);
    }
    out.write_all(&bytes)?;
    out.write_all(body)
}

/// Bytes of requests.
struct Input<'a> {
    socket: &'a UnixStream,
    limits: &'a Limits,
    /// Those that were read and not yet used.
    bytes: Vec<u8>,
}

impl Input<'_> {
    /// Waits for the first byte of a request; false if there comes none.
    fn begins(&mut self) -> io::Result<bool> {
        if !self.bytes.is_empty() {
            return Ok(true);
        }
        match self.read(Instant::now() + self.limits.idle) {
            Err(e) if e.kind() == ErrorKind::TimedOut => Ok(false),
            read => read.map(|n| n > 0),
        }
    }

    /// The request whose first byte is there.
    fn request(&mut self) -> io::Result<Result<(Request, Head), Refusal>> {
        let deadline = Instant::now() + self.limits.request;
        let (mut head, length) = loop {
            match head::parse(&self.bytes, self.limits) {
                Ok(Some(found)) => break found,
                Ok(None) => self.more(deadline)?,
                Err(refusal) => return Ok(Err(refusal)),
            }
        };
        let end = length + head.body;
        if head.expects && self.bytes.len() < end {
            Out::answer(self.socket, self.limits).write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        while self.bytes.len() < end {
            self.more(deadline)?;
        }
        let rest = self.bytes.split_off(end);
        let body = self.bytes.split_off(length);
        self.bytes = rest;
        let request = Request {
            method: head.method,
            path: std::mem::take(&mut head.path),
            query: std::mem::take(&mut head.query),
            headers: std::mem::take(&mut head.headers),
            body,
        };
        Ok(Ok((request, head)))
    }

    /// Reads on; the end is an error.
    fn more(&mut self, deadline: Instant) -> io::Result<()> {
        match self.read(deadline)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    fn read(&mut self, deadline: Instant) -> io::Result<usize> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.socket
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let mut piece = [0; 4096];
            match (&mut &*self.socket).read(&mut piece) {
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                read => {
                    let n = read?;
                    self.bytes.extend(&piece[..n]);
                    return Ok(n);
                }
            }
        }
    }

    /// Ends the connection after its last answer: a client that still sends is heard out, for a moment and a little.
    fn drain(&mut self) -> io::Result<()> {
        self.socket.shutdown(std::net::Shutdown::Write)?;
        let deadline = Instant::now() + Duration::from_secs(1).min(self.limits.request);
        for _ in 0..16 {
            self.bytes.clear();
            if self.read(deadline).is_ok_and(|n| n > 0) {
                continue;
            }
            break;
        }
        Ok(())
    }
}
