//! The client against servers' answers, byte by byte. Real servers are in the tests of `pvblk-export`.

use super::*;
use pvblk_block::{Buffer, Op, Queue, Request, Status};
use pvblk_protocol::nbd::{
    self as proto, Mode, chunk, last_chunk, simple_reply, transmission_flags,
};
use std::io::{Read, Write};
use std::time::Instant;

/// An export of 1 MiB.
fn terms(mode: Mode) -> Terms {
    let limits = Limits::default();
    let (min_block, preferred_block, max_block) = proto::block_sizes(&limits);
    Terms {
        size_bytes: 1 << 20,
        flags: transmission_flags(&limits, mode),
        mode,
        min_block,
        preferred_block,
        max_block,
    }
}

fn chunk_header(kind: u16, cookie: u64, len: u32) -> Vec<u8> {
    let head = last_chunk(Mode::Structured, kind, cookie, 4096, len);
    head.as_bytes().to_vec()
}

/// The chunk of a read's data.
fn data(cookie: u64, offset: u64, len: usize, last: bool) -> Vec<u8> {
    let mut b = chunk_header(chunk::OFFSET_DATA, cookie, 8 + len as u32);
    b[5] = u8::from(last);
    b.extend(offset.to_be_bytes());
    b.extend(vec![7; len]);
    b
}

fn hole(cookie: u64, offset: u64, len: u32, last: bool) -> Vec<u8> {
    let mut b = chunk_header(chunk::OFFSET_HOLE, cookie, 12);
    b[5] = u8::from(last);
    b.extend(offset.to_be_bytes());
    b.extend(len.to_be_bytes());
    b
}

/// The outcome of a read of 4 KiB at byte 4096 that is answered with `answer(cookie)`, in pieces of `piece` bytes.
fn answered(
    mode: Mode,
    piece: usize,
    answer: impl Fn(u64) -> Vec<u8>,
) -> (Status, Option<String>, Vec<u8>) {
    let (mut server, socket) = UnixStream::pair().unwrap();
    let client = Arc::new(NbdClient::agreed(socket.into(), terms(mode)));
    let device: Arc<dyn BlockDevice> = Arc::clone(&client) as _;
    let mut queue = Queue::open(&device, &QueueContext::new(16)).unwrap();
    let buffer = Buffer::anonymous(4096).unwrap();
    buffer.write(0, &[1; 4096]);
    queue.submit(&mut vec![Request::with_buffers(
        Op::Read,
        8,
        vec![buffer.clone()],
        0,
    )]);
    let mut request = [0; 28];
    server.read_exact(&mut request).unwrap();
    let cookie = proto::u64_at(&request, 8);
    let mut done = Vec::new();
    for piece in answer(cookie).chunks(piece) {
        // A client that found a mistake may have hung up already.
        let _ = server.write_all(piece);
        queue.poll(&mut done);
        if !done.is_empty() {
            break; // nobody reads what comes after
        }
    }
    drop(server);
    let start = Instant::now();
    while done.is_empty() {
        queue.poll(&mut done);
        assert!(start.elapsed().as_secs() < 60, "the read is stuck");
    }
    (done[0].status, client.failure(), buffer.to_vec())
}

#[test]
fn answers_in_any_pieces_are_put_together() {
    for piece in [1, 7, 100, 5000] {
        let (status, failure, got) = answered(Mode::Structured, piece, |c| {
            let mut b = data(c, 6144, 2048, false);
            b.extend(hole(c, 4096, 1024, false));
            b.extend(data(c, 5120, 1024, false));
            b.extend(chunk_header(chunk::NONE, c, 0));
            b
        });
        assert_eq!((status, failure), (Status::Ok, None));
        assert!(got[..1024].iter().all(|&b| b == 0) && got[1024..].iter().all(|&b| b == 7));
        let (status, failure, got) = answered(Mode::Simple, piece, |c| {
            let mut b = simple_reply(c, 0).to_vec();
            b.extend([9; 4096]);
            b
        });
        assert_eq!((status, failure), (Status::Ok, None));
        assert!(got.iter().all(|&b| b == 9));
        let (status, failure, _) = answered(Mode::Structured, piece, |c| {
            let mut b = chunk_header(chunk::ERROR, c, 8);
            b.extend([0, 0, 0, 28, 0, 2, b'n', b'o']);
            b
        });
        assert_eq!((status, failure), (Status::NoSpace, None));
    }
}

#[test]
fn an_answer_that_makes_no_sense_ends_the_connection() {
    type Answer = Box<dyn Fn(u64) -> Vec<u8>>;
    let cases: Vec<(Mode, &str, Answer)> = vec![
        (Mode::Structured, "hung up", Box::new(|_| Vec::new())),
        (
            Mode::Structured,
            "starts with 0x01010101",
            Box::new(|_| vec![1; 20]),
        ),
        (
            Mode::Structured,
            "not in flight",
            Box::new(|c| data(c + 1, 4096, 4096, true)),
        ),
        (
            Mode::Structured,
            "not in flight",
            Box::new(|c| data(c + (1 << 32), 4096, 4096, true)),
        ),
        (
            Mode::Structured,
            "a simple reply to a read",
            Box::new(|c| simple_reply(c, 0).to_vec()),
        ),
        (
            Mode::Simple,
            "was not negotiated",
            Box::new(|c| data(c, 4096, 4096, true)),
        ),
        (
            Mode::Structured,
            "didn't ask for",
            Box::new(|c| data(c, 4095, 16, true)),
        ),
        (
            Mode::Structured,
            "didn't ask for",
            Box::new(|c| data(c, 8000, 4096, true)),
        ),
        (
            Mode::Structured,
            "didn't ask for",
            Box::new(|c| hole(c, 4096, 0, true)),
        ),
        (
            Mode::Structured,
            "didn't ask for",
            Box::new(|c| hole(c, u64::MAX, u32::MAX, true)),
        ),
        (
            Mode::Structured,
            "type 1 with 8 bytes",
            Box::new(|c| data(c, 4096, 0, true)),
        ),
        (
            Mode::Structured,
            "type 1 with 4105 bytes",
            Box::new(|c| data(c, 4096, 4097, true)),
        ),
        (
            Mode::Structured,
            "has already",
            Box::new(|c| [data(c, 4096, 16, false), data(c, 4100, 16, true)].concat()),
        ),
        (
            Mode::Structured,
            "without all of its data",
            Box::new(|c| data(c, 4096, 4095, true)),
        ),
        (
            Mode::Structured,
            "without all of its data",
            Box::new(|c| chunk_header(0, c, 0)),
        ),
        (
            Mode::Structured,
            "not the last",
            Box::new(|c| {
                let mut b = chunk_header(0, c, 0);
                b[5] = 0;
                b
            }),
        ),
        (
            Mode::Structured,
            "type 5",
            Box::new(|c| chunk_header(chunk::BLOCK_STATUS, c, 12)),
        ),
        (
            Mode::Structured,
            "without an error",
            Box::new(|c| {
                let mut b = chunk_header(chunk::ERROR, c, 6);
                b.extend([0; 6]);
                b
            }),
        ),
    ];
    for (mode, says, answer) in cases {
        let (status, failure, _) = answered(mode, 4096, answer);
        assert_eq!(status, Status::IoError, "{says}");
        let why = failure.unwrap_or_default();
        assert!(why.contains(says), "{says}: {why}");
    }
}

/// With any bytes at all, the read ends, and nothing panics.
#[test]
fn random_bytes_do_no_harm() {
    let mut rng = fastrand::Rng::with_seed(pvblk_testing::seed_or(0x0bad_b17e));
    // Numbers of any size below a power of two.
    let power = |rng: &mut fastrand::Rng, bits: u64| {
        let below = 1 << rng.u64(..bits);
        rng.u64(..below)
    };
    for _ in 0..500 {
        let mode = [Mode::Simple, Mode::Structured][rng.usize(..2)];
        let plan: Vec<(u64, u64, u64)> = (0..4)
            .map(|_| (rng.u64(..6), power(&mut rng, 14), power(&mut rng, 13)))
            .collect();
        let (status, failure, _) = answered(mode, 1 + rng.usize(..64), |c| {
            let mut b = Vec::new();
            for &(kind, at, len) in &plan {
                match kind {
                    0 => b.extend(data(c, at, len as usize, len % 2 == 0)),
                    1 => b.extend(hole(c, at, len as u32, at % 2 == 0)),
                    2 => b.extend(simple_reply(c, at as u32 % 3)),
                    3 => b.extend(chunk_header(at as u16, c, len as u32)),
                    4 => b.extend(at.to_be_bytes()),
                    _ => b.extend(data(c, 4096, 4096, true)),
                }
            }
            b
        });
        assert!(failure.is_some() || status != Status::Invalid || mode == Mode::Simple);
    }
}
