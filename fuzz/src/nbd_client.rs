//! Target `nbd_client`: our client against a server that answers honestly, wrongly, or with anything.
//!
//! Always: no panic, each request completes exactly once. As long as the server is honest: what is read is what it sent,
//! errors are its own, and nothing stays unanswered. Once it isn't: everything ends when it hangs up.

use crate::nbd_device::{SECTORS, pattern};
use arbitrary::{Result, Unstructured};
use pvblk_block::{BlockDevice, Buffer, Op, Queue, QueueContext, Request, Status};
use pvblk_client::nbd::{NbdClient, NbdClientConfig};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

const REPLY: u64 = 0x0003_e889_0455_65a9;
const STRUCTURED: u32 = 8;
const EXTENDED: u32 = 11;
const GO: u32 = 7;
const DEPTH: usize = 8;

/// A request as the server took it.
struct Taken {
    command: u16,
    cookie: u64,
    offset: u64,
    len: u32,
}

struct Play {
    queue: Queue,
    server: UnixStream,
    /// Bytes from the client that aren't a whole request yet.
    bytes: Vec<u8>,
    taken: Vec<Taken>,
    /// By tag: the buffer's slot, and whether the server refused it.
    in_flight: BTreeMap<u64, Buffer>,
    next: u64,
    /// 0: simple replies, 1: structured ones, 2: extended headers.
    mode: u8,
    refused: bool,
    tampered: bool,
}

pub fn nbd_client(data: &[u8]) {
    let _ = play(&mut Unstructured::new(data));
}

fn option(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[u8]) {
    out.extend(REPLY.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((payload.len() as u32).to_be_bytes());
    out.extend(payload);
}

/// The bytes of an honest server until the transmission phase.
fn greeting(mode: u8, flags: u16, blocks: Option<[u32; 3]>) -> Vec<u8> {
    let mut out = b"NBDMAGICIHAVEOPT".to_vec();
    out.extend(3u16.to_be_bytes());
    let answer = |has| if has { 1 } else { 0x8000_0001 };
    option(&mut out, EXTENDED, answer(mode == 2), &[]);
    if mode < 2 {
        option(&mut out, STRUCTURED, answer(mode == 1), &[]);
    }
    let mut info = vec![0, 0];
    info.extend((SECTORS * 512).to_be_bytes());
    info.extend(flags.to_be_bytes());
    option(&mut out, GO, 3, &info);
    if let Some(blocks) = blocks {
        let mut info = vec![0, 3];
        blocks.iter().for_each(|b| info.extend(b.to_be_bytes()));
        option(&mut out, GO, 3, &info);
    }
    option(&mut out, GO, 1, &[]);
    out
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let (client, mut server) = UnixStream::pair().expect("sockets");
    let mode = [0, 1, 0, 2][usize::from(u.arbitrary::<u8>()? & 3)];
    let flags = 1 | *u.choose(&[0u16, 4, 4 | 8, 4 | 8 | 32, 2, 0x100])?;
    let blocks = *u.choose(&[None, Some([1, 4096, 1 << 25]), Some([512, 4096, 8192])])?;
    let mut hello = greeting(mode, flags, blocks);
    let mut honest = true;
    for _ in 0..u.int_in_range(0..=3)? {
        if u.ratio(1, 3)? {
            honest = false;
            let at = u.int_in_range(0..=hello.len() - 1)?;
            hello[at] = u.arbitrary()?;
        }
    }
    server.write_all(&hello).expect("a short greeting");
    if !honest {
        // Nothing more comes: the client must not wait for ever.
        let _ = server.shutdown(std::net::Shutdown::Write);
    }
    let met = NbdClient::over(client, "disk", NbdClientConfig::default());
    let device = match met {
        Ok(device) => Arc::new(device),
        Err(e) => {
            assert!(!honest, "an honest server is refused: {e}");
            return Ok(());
        }
    };
    if !honest {
        return Ok(());
    }
    // The client's options: a header for each form that it asks for, one with the name and one wish for information.
    let forms = if mode == 2 { 1 } else { 2 };
    let mut asked = vec![0; 4 + 16 * forms + 16 + 4 + 4 + 2 + 2];
    server.read_exact(&mut asked).expect("the client's options");
    server.set_nonblocking(true).expect("sockets");
    let device: Arc<dyn BlockDevice> = device;
    let mut play = Play {
        queue: Queue::open(&device, &QueueContext::new(DEPTH as u32)).expect("a queue"),
        server,
        bytes: Vec::new(),
        taken: Vec::new(),
        in_flight: BTreeMap::new(),
        next: 0,
        mode,
        refused: false,
        tampered: false,
    };
    let result = (0..200).try_for_each(|_| play.step(u));
    play.end();
    result
}

impl Play {
    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=9)? {
            0..=2 => self.submit(u)?,
            3 | 4 => self.poll(),
            5..=7 => {
                self.take();
                if !self.taken.is_empty() {
                    let at = u.int_in_range(0..=self.taken.len() - 1)?;
                    let error = if u.ratio(1, 8)? { 5 } else { 0 };
                    let cut = u.int_in_range(0..=4)?;
                    self.answer(at, error, cut);
                }
            }
            8 => drop(self.queue.arm()),
            _ if u.ratio(1, 8)? => {
                self.tampered = true;
                let n = u.int_in_range(1..=48)?;
                let _ = self.server.write_all(u.bytes(n)?);
            }
            _ => {}
        }
        Ok(())
    }

    fn submit(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        if self.in_flight.len() == DEPTH {
            return Ok(());
        }
        let limits = *self.queue.limits();
        let op = *u.choose(&[Op::Read, Op::Read, Op::Write, Op::Flush])?;
        let unit = limits.sectors_per_block();
        let most = u64::from(limits.max_sectors).min(16) / unit * unit;
        let sectors = (u.int_in_range(1..=most.max(unit))? / unit * unit).max(unit);
        let at = u.int_in_range(0..=SECTORS - sectors)? / unit * unit;
        let buffer = Buffer::anonymous(sectors as usize * 512).expect("memory");
        let request = if op == Op::Flush {
            Request::new(op, 0, 0, self.next)
        } else {
            for i in 0..sectors {
                let bytes = if op == Op::Write {
                    pattern(at + i)
                } else {
                    [0; 512]
                };
                buffer.write(i as usize * 512, &bytes);
            }
            Request::with_buffers(op, at, vec![buffer.clone()], self.next)
        };
        self.in_flight.insert(self.next, buffer);
        self.next += 1;
        self.queue.submit(&mut vec![request]);
        Ok(())
    }

    fn poll(&mut self) {
        let mut done = Vec::new();
        self.queue.woken();
        self.queue.poll(&mut done);
        for c in done {
            let r = &c.request;
            let buffer = self.in_flight.remove(&r.tag).expect("completed twice");
            if self.tampered {
                continue;
            }
            let refused_here = matches!(c.status, Status::ReadOnly | Status::Unsupported);
            let reason = c.status == Status::Ok || self.refused || refused_here;
            assert!(reason, "{:?} without a reason: {r:?}", c.status);
            if c.status == Status::Ok && r.op == Op::Read {
                let data = buffer.to_vec();
                for (i, got) in data.chunks(512).enumerate() {
                    assert_eq!(got, pattern(r.sector + i as u64), "sector {i} of {r:?}");
                }
            }
        }
    }

    /// The server takes what the client sent.
    fn take(&mut self) {
        let mut some = [0; 16 << 10];
        while let Ok(n) = self.server.read(&mut some) {
            if n == 0 {
                break;
            }
            self.bytes.extend(&some[..n]);
        }
        let word =
            |b: &[u8], at: usize| u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let long = |b: &[u8], at: usize| u64::from(word(b, at)) << 32 | u64::from(word(b, at + 4));
        let (head, magic) = match self.mode {
            2 => (32, 0x21e4_1c71),
            _ => (28, 0x2560_9513),
        };
        while self.bytes.len() >= head {
            let b = &self.bytes;
            assert_eq!(word(b, 0), magic, "no request");
            let command = (word(b, 4) & 0xffff) as u16;
            let (cookie, offset, len) = (long(b, 8), long(b, 16), word(b, head - 4));
            if self.mode == 2 {
                assert_eq!(word(b, 24), 0, "longer than the disk");
                assert_eq!(word(b, 4) >> 21 & 1 == 1, command == 1, "a payload");
            }
            let payload = if command == 1 { len as usize } else { 0 };
            if self.bytes.len() < head + payload {
                break;
            }
            for (i, sector) in self.bytes[head..head + payload].chunks(512).enumerate() {
                assert_eq!(sector, pattern(offset / 512 + i as u64), "wrong data sent");
            }
            assert!(
                offset + u64::from(len) <= SECTORS * 512,
                "outside the export"
            );
            self.bytes.drain(..head + payload);
            self.taken.push(Taken {
                command,
                cookie,
                offset,
                len,
            });
        }
    }

    /// An honest answer, in one chunk or two.
    fn answer(&mut self, at: usize, error: u32, cut: u32) {
        let t = self.taken.swap_remove(at);
        self.refused |= error != 0;
        let data: Vec<u8> = (0..u64::from(t.len) / 512)
            .flat_map(|i| pattern(t.offset / 512 + i))
            .collect();
        let mut out = Vec::new();
        let to = (self.mode == 2, t.cookie, t.offset);
        if self.mode == 2 && t.command != 0 && error == 0 {
            chunk(&mut out, 1, 0, to, &[]);
        } else if self.mode == 0 || (self.mode == 1 && t.command != 0) {
            out.extend(0x6744_6698u32.to_be_bytes());
            out.extend(error.to_be_bytes());
            out.extend(t.cookie.to_be_bytes());
            if t.command == 0 && error == 0 {
                out.extend(data);
            }
        } else if error != 0 {
            chunk(&mut out, 1, 0x8001, to, &[&error.to_be_bytes(), &[0, 0]]);
        } else {
            let cut = (cut as usize * 512).min(data.len());
            for (from, part) in [(0, &data[..cut]), (cut, &data[cut..])] {
                if !part.is_empty() {
                    let place = (t.offset + from as u64).to_be_bytes();
                    chunk(&mut out, 0, 1, to, &[&place, part]);
                }
            }
            chunk(&mut out, 1, 0, to, &[]);
        }
        // At most a few replies of 8 KiB are under way: they fit the socket.
        let _ = self.server.write_all(&out);
    }

    fn end(&mut self) {
        if self.tampered {
            let _ = self.server.shutdown(std::net::Shutdown::Both);
        }
        for _ in 0..10_000 {
            if self.in_flight.is_empty() {
                return;
            }
            if !self.tampered {
                self.take();
                while !self.taken.is_empty() {
                    self.answer(0, 0, 1);
                }
            }
            self.poll();
        }
        panic!("{} requests never end", self.in_flight.len());
    }
}

/// `to`: whether headers are extended, the request's cookie and its offset.
fn chunk(out: &mut Vec<u8>, flags: u16, kind: u16, to: (bool, u64, u64), parts: &[&[u8]]) {
    let (extended, cookie, offset) = to;
    let magic: u32 = if extended { 0x6e8a_278c } else { 0x668e_33ef };
    out.extend(magic.to_be_bytes());
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    let len: usize = parts.iter().map(|p| p.len()).sum();
    if extended {
        out.extend(offset.to_be_bytes());
        out.extend((len as u64).to_be_bytes());
    } else {
        out.extend((len as u32).to_be_bytes());
    }
    parts.iter().for_each(|p| out.extend(*p));
}
