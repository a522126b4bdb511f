//! Answers, and how they begin on the wire.

use crate::events::Events;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

macro_rules! statuses {
    ($($name:ident = $number:literal $text:literal,)*) => {
        /// Status of an answer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Status {
            $($name = $number,)*
        }

        impl Status {
            fn text(self) -> &'static str {
                match self {
                    $(Status::$name => $text,)*
                }
            }
        }
    };
}

statuses! {
    Ok = 200 "OK",
    NotModified = 304 "Not Modified",
    BadRequest = 400 "Bad Request",
    Unauthorized = 401 "Unauthorized",
    Forbidden = 403 "Forbidden",
    NotFound = 404 "Not Found",
    NoSuchMethod = 405 "Method Not Allowed",
    BodyTooLarge = 413 "Content Too Large",
    HeadTooLarge = 431 "Request Header Fields Too Large",
    NotImplemented = 501 "Not Implemented",
    Unavailable = 503 "Service Unavailable",
}

/// An answer whose body is known.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: Status,
    pub content_type: &'static str,
    /// Readers may keep it, and ask whether it is the same; else they mustn't keep it.
    pub(super) etag: Option<String>,
    pub(super) is_compressed: bool,
    pub body: Cow<'static, [u8]>,
}

impl Response {
    pub fn new(status: Status, content_type: &'static str, body: Vec<u8>) -> Response {
        Response {
            status,
            content_type,
            etag: None,
            is_compressed: false,
            body: body.into(),
        }
    }

    /// One line of text.
    pub fn line(status: Status, line: &str) -> Response {
        let body = format!("{line}\n").into_bytes();
        Response::new(status, "text/plain; charset=utf-8", body)
    }
}

/// The work that writes a body.
pub type Written = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;
/// The work that sends events, until [`Events::is_over`] or there are no more.
pub type Streamed = Box<dyn FnOnce(&mut Events<'_>) -> io::Result<()> + Send>;

/// An answer in one of its forms.
pub enum Answer {
    Whole(Response),
    /// A body that is made while it is sent, after its content type.
    Written(&'static str, Written),
    /// A stream of Server-Sent Events.
    Events(Streamed),
}

/// The last part of a head: how long the body is.
pub(super) enum Length {
    Bytes(usize),
    /// Unknown: the body comes in chunks.
    Chunks,
    /// Unknown: the body ends with the connection.
    Close,
    /// There is no body, and nothing would tell its length.
    Nothing,
}

/// Headers of every answer. Scripts and styles come from this server only, nobody shows its pages in theirs, and no other origin reads what it says.
const ALWAYS: &str = "Content-Security-Policy: default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'\r\n\
    X-Content-Type-Options: nosniff\r\n\
    X-Frame-Options: DENY\r\n\
    Referrer-Policy: no-referrer\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n";

/// The head of an answer.
pub(super) fn head(response: &Response, length: &Length, is_kept: bool) -> String {
    let number = response.status as u16;
    let mut head = format!(
        "HTTP/1.1 {number} {}\r\nDate: {}\r\n{ALWAYS}",
        response.status.text(),
        date(SystemTime::now())
    );
    let mut line = |text: std::fmt::Arguments<'_>| {
        // Writing to a text doesn't fail.
        let _ = write!(head, "{text}\r\n");
    };
    match response.status {
        Status::NoSuchMethod => line(format_args!("Allow: GET, HEAD, POST")),
        Status::Unauthorized => line(format_args!("WWW-Authenticate: Bearer")),
        Status::Unavailable => line(format_args!("Retry-After: 1")),
        _ => {}
    }
    match &response.etag {
        Some(etag) => line(format_args!(
            "ETag: {etag}\r\nCache-Control: no-cache\r\nVary: Accept-Encoding"
        )),
        None => line(format_args!("Cache-Control: no-store")),
    }
    if response.is_compressed {
        line(format_args!("Content-Encoding: gzip"));
    }
    if !matches!(length, Length::Nothing) {
        line(format_args!("Content-Type: {}", response.content_type));
    }
    match length {
        Length::Bytes(bytes) => line(format_args!("Content-Length: {bytes}")),
        Length::Chunks => line(format_args!("Transfer-Encoding: chunked")),
        Length::Close | Length::Nothing => {}
    }
    if !is_kept {
        line(format_args!("Connection: close"));
    }
    head + "\r\n"
}

/// A moment in the form of HTTP's headers.
fn date(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let secs = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d: Duration| d.as_secs());
    let (days, of_day) = (secs / 86_400, secs % 86_400);
    // Years that begin in March: the day that comes every four years is their last one.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12;
    let year = year + era * 400 + u64::from(month < 2);
    format!(
        "{}, {day:02} {} {year} {:02}:{:02}:{:02} GMT",
        DAYS[(days % 7) as usize],
        MONTHS[month as usize],
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (secs, text) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_782_399, "Mon, 28 Feb 2000 23:59:59 GMT"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 GMT"),
            (1_798_761_599, "Thu, 31 Dec 2026 23:59:59 GMT"),
        ] {
            assert_eq!(
                date(SystemTime::UNIX_EPOCH + Duration::from_secs(secs)),
                text
            );
        }
    }

    #[test]
    fn answers_say_what_readers_may_do_with_them() {
        let mut response = Response::line(Status::Unavailable, "later");
        let text = head(&response, &Length::Bytes(6), false);
        assert!(
            text.starts_with("HTTP/1.1 503 Service Unavailable\r\nDate: "),
            "{text}"
        );
        for line in [
            "Content-Security-Policy: default-src 'self';",
            "X-Content-Type-Options: nosniff\r\n",
            "Cache-Control: no-store\r\n",
            "Retry-After: 1\r\n",
            "Content-Length: 6\r\n",
            "Connection: close\r\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(text.ends_with("\r\n\r\n") && text.matches("\r\n\r\n").count() == 1);
        response.etag = Some("\"1\"".into());
        let text = head(&response, &Length::Nothing, true);
        assert!(
            text.contains("ETag: \"1\"\r\nCache-Control: no-cache\r\n"),
            "{text}"
        );
        assert!(
            !text.contains("\nContent-Type") && !text.contains("Content-Length"),
            "{text}"
        );
    }
}
