//! A server with small bounds, and readers of all kinds. Times here are bounds for hangs, or the server's own deadlines.

use pvblk_web::{Answer, Hosts, Limits, Request, Response, Server, Settings, Site, Status};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);

/// Answers by the path; counts streams of events that have ended.
#[derive(Default)]
struct Echo {
    ended: Arc<AtomicUsize>,
}

impl Site for Echo {
    fn answer(&self, request: &Request) -> Option<Answer> {
        match request.path.as_str() {
            "/echo" => {
                let text = format!(
                    "{:?} {:?}",
                    request.query,
                    String::from_utf8_lossy(&request.body)
                );
                Some(Answer::Whole(Response::line(Status::Ok, &text)))
            }
            "/large" => Some(Answer::Written(
                "text/plain",
                Box::new(|out| {
                    for _ in 0..1024 {
                        out.write_all(&[b'x'; 32 << 10])?;
                    }
                    Ok(())
                }),
            )),
            "/events" => {
                let ended = Arc::clone(&self.ended);
                Some(Answer::Events(Box::new(move |events| {
                    let mut number = 0;
                    let result = loop {
                        number += 1;
                        let sent = events.send(&format!("{{\"n\":{number}}}"));
                        match sent.and_then(|()| events.is_over()) {
                            Ok(false) => std::thread::sleep(Duration::from_millis(5)),
                            end => break end.map(drop),
                        }
                    };
                    ended.fetch_add(1, Ordering::SeqCst);
                    result
                })))
            }
            _ => None,
        }
    }
}

struct Scene {
    address: SocketAddr,
    ended: Arc<AtomicUsize>,
    server: Option<Server>,
}

impl Scene {
    fn new(limits: Limits) -> Scene {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let site = Echo::default();
        let ended = Arc::clone(&site.ended);
        let hosts = Hosts::default();
        let settings = Settings { hosts, limits };
        let server = Server::start(listener, "here".into(), Arc::new(site), settings).unwrap();
        Scene {
            address,
            ended,
            server: Some(server),
        }
    }

    fn connect(&self) -> Reader {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(HANG)).unwrap();
        socket.set_write_timeout(Some(HANG)).unwrap();
        Reader {
            socket,
            bytes: Vec::new(),
        }
    }

    /// The whole answer of a connection that ends after it.
    fn ask(&self, request: &str) -> String {
        let mut reader = self.connect();
        reader.say(request);
        reader.rest()
    }
}

struct Reader {
    socket: TcpStream,
    bytes: Vec<u8>,
}

impl Reader {
    fn say(&mut self, text: &str) {
        // A server that has enough hangs up.
        let _ = self.socket.write_all(text.as_bytes());
    }

    /// Reads until `end` is there.
    fn until(&mut self, end: &str) -> String {
        loop {
            let found = self
                .bytes
                .windows(end.len())
                .position(|w| w == end.as_bytes());
            if let Some(at) = found {
                let rest = self.bytes.split_off(at + end.len());
                return String::from_utf8(std::mem::replace(&mut self.bytes, rest)).unwrap();
            }
            let mut piece = [0; 4096];
            let n = self.socket.read(&mut piece).unwrap();
            assert!(
                n > 0,
                "the end before {end:?}: {}",
                String::from_utf8_lossy(&self.bytes)
            );
            self.bytes.extend(&piece[..n]);
        }
    }

    /// Asks once more; false if the connection has ended.
    fn takes_answer(mut self) -> bool {
        self.say(&format!("GET /echo {GET}Connection: close\r\n\r\n"));
        self.rest().contains("200 OK")
    }

    /// Reads to the end of the connection.
    fn rest(mut self) -> String {
        match self.socket.read_to_end(&mut self.bytes) {
            Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{e}"),
            _ => String::from_utf8_lossy(&self.bytes).into_owned(),
        }
    }
}

const GET: &str = "HTTP/1.1\r\nHost: localhost\r\n";

#[test]
fn requests_of_one_connection_are_answered_in_their_order() {
    let scene = Scene::new(Limits::default());
    let mut reader = scene.connect();
    reader.say(&format!(
        "GET /echo?a=1 {GET}\r\nPOST /echo {GET}Content-Length: 3\r\n\r\nabcHEAD /echo {GET}\r\nGET /none {GET}\r\n"
    ));
    let first = reader.until("[(\"a\", \"1\")] \"\"\n");
    assert!(
        first.starts_with("HTTP/1.1 200 OK\r\n") && !first.contains("Connection: close"),
        "{first}"
    );
    reader.until("[] \"abc\"\n");
    let head = reader.until("\r\n\r\n");
    assert!(head.contains("Content-Length: 6\r\n"), "{head}");
    assert!(reader.until("\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert_eq!(reader.until("\n"), "there is nothing at this path\n");
    // Piece by piece, and with a body that waits to be asked for.
    for byte in format!("POST /echo {GET}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n").bytes()
    {
        reader.socket.write_all(&[byte]).unwrap();
    }
    assert_eq!(reader.until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    reader.say("hi");
    reader.until("[] \"hi\"\n");
    reader.say(&format!("GET / {GET}Connection: close\r\n\r\n"));
    let last = reader.rest();
    assert!(
        last.contains("Content-Type: text/html") && last.contains("Connection: close"),
        "{last}"
    );
}

#[test]
fn a_foreign_name_and_broken_requests_are_refused() {
    let scene = Scene::new(Limits::default());
    for (request, status, why) in [
        (
            "GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".to_owned(),
            403,
            "is no name of this server",
        ),
        (format!("BREW / {GET}\r\n"), 405, "GET, HEAD and POST"),
        (
            format!("POST / {GET}Connection: close\r\n\r\n"),
            405,
            "read by GET",
        ),
        (
            format!("POST / {GET}Transfer-Encoding: chunked\r\n\r\n"),
            501,
            "Content-Length",
        ),
        (
            format!("POST / {GET}Content-Length: 99999\r\n\r\n"),
            413,
            "16384 bytes",
        ),
        (
            format!("GET / {GET}X: {}\r\n\r\n", "y".repeat(9000)),
            431,
            "too large",
        ),
        (
            "\x16\x03\x01\x02\x00".to_owned(),
            400,
            "not an HTTP/1 request",
        ),
        ("SSH-2.0-x\r\n".to_owned(), 400, "not an HTTP/1 request"),
    ] {
        let said = scene.ask(&request);
        assert!(
            said.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request:?}: {said}"
        );
        assert!(
            said.contains(why) && said.contains("default-src 'self'"),
            "{request:?}: {said}"
        );
    }
}

#[test]
fn a_large_body_comes_in_chunks_or_until_the_end() {
    let scene = Scene::new(Limits::default());
    let old = scene.ask("GET /large HTTP/1.0\r\n\r\n");
    let body = old.split_once("\r\n\r\n").unwrap().1;
    assert_eq!(body.len(), 32 << 20);
    let new = scene.ask(&format!("GET /large {GET}Connection: close\r\n\r\n"));
    assert!(new.contains("Transfer-Encoding: chunked") && new.ends_with("\r\n0\r\n\r\n"));
    let body = new.split_once("\r\n\r\n").unwrap().1;
    assert_eq!(body.matches('x').count(), 32 << 20);
}

#[test]
fn slow_readers_and_writers_are_let_go() {
    let limits = Limits {
        request: Duration::from_millis(300),
        idle: Duration::from_millis(300),
        progress: Duration::from_millis(300),
        ..Limits::default()
    };
    let scene = Scene::new(limits);
    // Says nothing at all.
    assert_eq!(scene.connect().rest(), "");
    // Says a little all the time: the whole request has its time.
    let mut slow = scene.connect();
    let begin = Instant::now();
    while slow.socket.write_all(b"G").is_ok() && begin.elapsed() < HANG {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(begin.elapsed() < HANG);
    // Takes nothing: 32 MiB don't fit into any socket's buffers.
    let mut deaf = scene.connect();
    deaf.say(&format!("GET /large {GET}\r\n"));
    deaf.until("\r\n\r\n");
    let gone = |reader: &Reader| {
        let begin = Instant::now();
        loop {
            // The server's side is closed: what is sent is answered by a reset.
            match (&reader.socket).write(b"x") {
                Err(_) => return,
                Ok(_) => assert!(begin.elapsed() < HANG),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    gone(&deaf);
    // So with events.
    let mut deaf = scene.connect();
    deaf.say(&format!("GET /events {GET}\r\n"));
    deaf.until("\"n\":3}\n\n");
    drop(deaf);
    let begin = Instant::now();
    while scene.ended.load(Ordering::SeqCst) == 0 {
        assert!(begin.elapsed() < HANG);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn connections_and_streams_are_bounded() {
    let limits = Limits {
        connections: 4,
        streams: 2,
        ..Limits::default()
    };
    let scene = Scene::new(limits);
    let follow = || {
        let mut reader = scene.connect();
        reader.say(&format!("GET /events {GET}\r\n"));
        let head = reader.until("\r\n\r\n");
        assert!(
            head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"),
            "{head}"
        );
        reader
    };
    let (mut a, b) = (follow(), follow());
    let third = scene.ask(&format!("GET /events {GET}Connection: close\r\n\r\n"));
    assert!(
        third.starts_with("HTTP/1.1 503") && third.contains("2 readers follow events already"),
        "{third}"
    );
    // A reader has its answer before the server counts its connection as at rest, or as gone; until then there is no room for another one.
    let answered = || {
        let begin = Instant::now();
        loop {
            let mut reader = scene.connect();
            reader.say(&format!("GET /echo {GET}\r\n"));
            let head = reader.until("\r\n\r\n");
            if head.starts_with("HTTP/1.1 200") {
                reader.until("\"\"\n");
                return reader;
            }
            assert!(head.starts_with("HTTP/1.1 503"), "{head}");
            assert!(begin.elapsed() < HANG, "no room for a reader");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // One that rests makes room. Which one the server saw rest first, it doesn't tell.
    let resting = [answered(), answered()];
    let _fifth = answered();
    let open = resting.map(Reader::takes_answer);
    assert_eq!(open.iter().filter(|open| **open).count(), 1, "{open:?}");
    a.until("\"n\":2}\n\n");
    // The place of a stream that has ended is free.
    drop(b);
    let begin = Instant::now();
    while scene.ended.load(Ordering::SeqCst) == 0 {
        assert!(begin.elapsed() < HANG);
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut again = follow();
    again.until("\"n\":1}\n\n");
}

#[test]
fn a_stop_ends_streams_and_connections_that_rest() {
    let mut scene = Scene::new(Limits::default());
    let mut follower = scene.connect();
    follower.say(&format!("GET /events {GET}\r\n"));
    follower.until("\"n\":1}\n\n");
    let resting = scene.connect();
    let begin = Instant::now();
    scene.server = None;
    assert!(begin.elapsed() < HANG);
    assert_eq!(resting.rest(), "");
    follower.rest();
    assert_eq!(scene.ended.load(Ordering::SeqCst), 1);
    assert!(TcpStream::connect(scene.address).is_err());
}
