//! A small HTTP client, over TCP and Unix sockets: one request for each connection.

use crate::Stop;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);

/// A server's address.
#[derive(Clone, Debug)]
pub enum Place {
    Tcp(u16),
    Unix(PathBuf),
}

/// The answer to a request.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Result<Value, Stop> {
        Ok(serde_json::from_slice(&self.body)?)
    }
}

trait Socket: Read + Write + Send {}
impl<T: Read + Write + Send> Socket for T {}

impl Place {
    /// The place that a server says it listens at, in a line such as `page and metrics on http://127.0.0.1:80/`.
    pub fn told(lines: &[String]) -> Result<Place, Stop> {
        let told = lines
            .iter()
            .find_map(|l| l.split_once("page and metrics on "));
        let Some((_, place)) = told else {
            return Stop::fail(format!("no place is told: {lines:?}"));
        };
        let place = place.trim();
        if let Some(path) = place.strip_prefix("unix:") {
            return Ok(Place::Unix(Path::new(path).into()));
        }
        let port = place.trim_end_matches('/').rsplit(':').next();
        let port = port.and_then(|p| p.parse().ok());
        port.map(Place::Tcp)
            .ok_or_else(|| Stop::Fail(format!("no port in {place}")))
    }

    fn connect(&self) -> Result<Box<dyn Socket>, Stop> {
        Ok(match self {
            Place::Tcp(port) => {
                let socket = TcpStream::connect(("127.0.0.1", *port))?;
                socket.set_read_timeout(Some(HANG))?;
                Box::new(socket)
            }
            Place::Unix(path) => {
                let socket = UnixStream::connect(path)?;
                socket.set_read_timeout(Some(HANG))?;
                Box::new(socket)
            }
        })
    }

    /// Sends `GET PATH`, with these headers, each with its line end.
    pub fn get_with(&self, path: &str, headers: &str) -> Result<Answer, Stop> {
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        ))
    }

    pub fn get(&self, path: &str) -> Result<Answer, Stop> {
        self.get_with(path, "")
    }

    /// Sends `POST PATH` with JSON.
    pub fn post(&self, path: &str, body: &Value, headers: &str) -> Result<Answer, Stop> {
        let body = body.to_string();
        let length = body.len();
        self.send(&format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        ))
    }

    /// Sends a whole request that asks to close the connection.
    pub fn send(&self, request: &str) -> Result<Answer, Stop> {
        let mut socket = self.connect()?;
        socket.write_all(request.as_bytes())?;
        let mut bytes = Vec::new();
        socket.read_to_end(&mut bytes)?;
        let wrong = || Stop::Fail(format!("no answer: {}", String::from_utf8_lossy(&bytes)));
        let end = bytes
            .windows(4)
            .position(|w| w == b"\r\n\r\n")
            .ok_or_else(wrong)?;
        let headers = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let status = headers.split(' ').nth(1).and_then(|s| s.parse().ok());
        let mut body = bytes[end + 4..].to_vec();
        if headers
            .to_ascii_lowercase()
            .contains("transfer-encoding: chunked")
        {
            body = unchunked(&body).ok_or_else(wrong)?;
        }
        Ok(Answer {
            status: status.ok_or_else(wrong)?,
            headers,
            body,
        })
    }

    /// Follows Server-Sent Events; each item is the data of one.
    pub fn follow(&self, path: &str) -> Result<impl Iterator<Item = String> + Send + use<>, Stop> {
        let mut socket = self.connect()?;
        write!(socket, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        let mut lines = BufReader::new(socket).lines().map_while(Result::ok);
        match lines.next() {
            Some(line) if line.contains(" 200 ") => {}
            other => return Stop::fail(format!("{path}: {other:?}")),
        }
        Ok(lines.filter_map(|l| l.strip_prefix("data: ").map(str::to_owned)))
    }
}

/// A body without the frames of its chunks.
fn unchunked(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|w| w == b"\r\n")?;
        let length = std::str::from_utf8(&rest[..end]).ok()?;
        let length = usize::from_str_radix(length, 16).ok()?;
        rest = &rest[end + 2..];
        body.extend(rest.get(..length)?);
        rest = rest.get(length + 2..)?;
        if length == 0 {
            return Some(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_put_together() {
        assert_eq!(
            unchunked(b"3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n").unwrap(),
            b"abc0123456789"
        );
        assert_eq!(unchunked(b"0\r\n\r\n").unwrap(), b"");
        assert!(unchunked(b"3\r\nab").is_none());
    }

    #[test]
    fn places_are_found_in_the_log() {
        let told = |line: &str| Place::told(&["x".into(), line.to_owned()]).unwrap();
        assert!(matches!(
            told("page and metrics on http://127.0.0.1:8080/"),
            Place::Tcp(8080)
        ));
        assert!(
            matches!(told("page and metrics on unix:/a b"), Place::Unix(p) if p == Path::new("/a b"))
        );
    }
}
