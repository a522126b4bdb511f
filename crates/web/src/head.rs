//! The line and the headers of a request.

use crate::limits::Limits;
use crate::query;
use crate::request::Method;
use crate::response::Status;
use httparse::{EMPTY_HEADER, Error};

/// A request before its body.
#[derive(Debug, PartialEq, Eq)]
pub struct Head {
    pub method: Method,
    pub path: String,
    pub query: Vec<(String, String)>,
    pub headers: Vec<(String, String)>,
    /// Bytes of its body.
    pub body: usize,
    /// The connection takes another request afterwards.
    pub is_kept: bool,
    /// The reader understands bodies in chunks.
    pub takes_chunks: bool,
    /// The client sends the body once it is told to.
    pub expects: bool,
}

/// The answer to a request that isn't carried out: one line that says why.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: Status,
    pub why: String,
}

impl Refusal {
    pub fn new(status: Status, why: impl Into<String>) -> Refusal {
        let why = why.into();
        Refusal { status, why }
    }
}

/// The head and its length in bytes; `None`: it isn't complete.
pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Option<(Head, usize)>, Refusal> {
    let bad = |why: &str| Refusal::new(Status::BadRequest, why);
    let too_large = || {
        Refusal::new(
            Status::HeadTooLarge,
            "the request's line and headers are too large",
        )
    };
    let mut headers = vec![EMPTY_HEADER; limits.headers];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= limits.head_bytes => length,
        Ok(httparse::Status::Partial) if bytes.len() < limits.head_bytes => return Ok(None),
        Ok(_) | Err(Error::TooManyHeaders) => return Err(too_large()),
        Err(e) => return Err(bad(&format!("not an HTTP/1 request: {e}"))),
    };
    let takes_chunks = request.version == Some(1);
    let method = match request.method {
        Some("GET") => Method::Get,
        Some("HEAD") => Method::Head,
        Some("POST") => Method::Post,
        _ => {
            return Err(Refusal::new(
                Status::NoSuchMethod,
                "the methods are GET, HEAD and POST",
            ));
        }
    };
    let target = request.path.unwrap_or_default();
    if !target.starts_with('/') {
        return Err(bad("the target of a request is a path that begins with /"));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let query = query::decode(query).map_err(|why| bad(&why))?;
    let mut head = Head {
        method,
        path: path.to_owned(),
        query,
        headers: Vec::with_capacity(request.headers.len()),
        body: 0,
        is_kept: takes_chunks,
        takes_chunks,
        expects: false,
    };
    let (mut hosts, mut length_of_body) = (0, None);
    for header in request.headers.iter() {
        let name = header.name.to_ascii_lowercase();
        let value = std::str::from_utf8(header.value).map_err(|_| bad("a header isn't UTF-8"))?;
        let value = value.trim();
        match name.as_str() {
            "host" => hosts += 1,
            "content-length" => {
                let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
                let number = value
                    .parse()
                    .ok()
                    .filter(|_| digits && length_of_body.is_none());
                length_of_body = Some(
                    number.ok_or_else(|| bad("Content-Length is no number, or is there twice"))?,
                );
            }
            "transfer-encoding" => {
                let why = "a body comes with its Content-Length, not in chunks";
                return Err(Refusal::new(Status::NotImplemented, why));
            }
            "connection" => {
                let mut words = value.split(',').map(str::trim);
                head.is_kept &= !words.any(|w| w.eq_ignore_ascii_case("close"));
            }
            "expect" => head.expects = value.eq_ignore_ascii_case("100-continue"),
            _ => {}
        }
        head.headers.push((name, value.to_owned()));
    }
    if hosts > 1 || (hosts == 0 && takes_chunks) {
        return Err(bad("a request has one header Host"));
    }
    head.body = length_of_body.unwrap_or(0);
    if head.body > limits.body_bytes {
        let why = format!("a body has at most {} bytes", limits.body_bytes);
        return Err(Refusal::new(Status::BodyTooLarge, why));
    }
    Ok(Some((head, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Option<Head>, Refusal> {
        let parsed = parse(text.as_bytes(), &Limits::default());
        parsed.map(|found| found.map(|(head, _)| head))
    }

    fn refused(text: &str) -> Status {
        match parsed(text) {
            Err(Refusal { status, .. }) => status,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn a_head_is_read_as_it_was_meant() {
        let text =
            "POST /api/disk.add?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX-Y:  z \r\n\r\n{}";
        let (head, length) = parse(text.as_bytes(), &Limits::default()).unwrap().unwrap();
        assert_eq!(length, text.len() - 2);
        assert_eq!(
            (head.method, head.path.as_str(), head.body),
            (Method::Post, "/api/disk.add", 2)
        );
        assert_eq!(head.query, [("a".to_owned(), "b".to_owned())]);
        assert!(head.is_kept && head.takes_chunks && !head.expects);
        assert!(head.headers.contains(&("x-y".to_owned(), "z".to_owned())));
        let old = parsed("GET / HTTP/1.0\r\n\r\n").unwrap().unwrap();
        assert!(!old.is_kept && !old.takes_chunks);
        let last = parsed("GET / HTTP/1.1\r\nhost: x\r\nconnection: a, Close\r\n\r\n");
        assert!(!last.unwrap().unwrap().is_kept);
        for part in ["", "G", "GET / HTTP/1.1\r\nHost: x\r\n"] {
            assert_eq!(parsed(part), Ok(None), "{part:?}");
        }
    }

    #[test]
    fn requests_that_two_readers_could_read_differently_are_refused() {
        let with = |headers: &str| refused(&format!("POST / HTTP/1.1\r\n{headers}\r\n\r\n"));
        for headers in [
            "X: y",
            "Host: a\r\nHost: b",
            "Host: a\r\nContent-Length: 1\r\nContent-Length: 1",
            "Host: a\r\nContent-Length: +1",
            "Host: a\r\nContent-Length: 1, 1",
            "Host: a\r\nContent-Length: ",
            "Host: a\r\nContent-Length: 99999999999999999999999",
            "Host: a\r\nContent-Length : 1",
            "Host: a\r\nX: \u{0}",
        ] {
            assert_eq!(with(headers), Status::BadRequest, "{headers:?}");
        }
        assert_eq!(
            with("Host: a\r\nTransfer-Encoding: chunked"),
            Status::NotImplemented
        );
        assert_eq!(
            with("Host: a\r\nContent-Length: 16385"),
            Status::BodyTooLarge
        );
        assert_eq!(
            refused("GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n"),
            Status::BadRequest
        );
        assert_eq!(
            refused("GET /?a=%x HTTP/1.1\r\nHost: a\r\n\r\n"),
            Status::BadRequest
        );
        assert_eq!(
            refused("DELETE / HTTP/1.1\r\nHost: a\r\n\r\n"),
            Status::NoSuchMethod
        );
        assert_eq!(refused("\u{16}\u{3}\u{1}"), Status::BadRequest);
    }

    #[test]
    fn a_head_is_bounded() {
        let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(9000));
        assert_eq!(refused(&long), Status::HeadTooLarge);
        assert_eq!(refused(&long[..8192]), Status::HeadTooLarge);
        assert_eq!(parsed(&long[..8191]), Ok(None));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        assert_eq!(refused(&many), Status::HeadTooLarge);
    }
}
