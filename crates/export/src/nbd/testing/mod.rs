//! For tests: a small device in memory, and a rig that drives a source as a worker does, against a raw client.

mod device;

use super::block_status;
use super::shares::DiskShare;
use super::stream::Stream;
use super::{NbdConfig, NbdSource, Negotiated};
pub use device::{MemDevice, Rng, pattern};
use pvblk_backend::{Backend, BackendOptions, Disk, Disks, RequestSource, Service, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Completion, Queue, QueueContext, Readiness, Request};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Command, Contexts, Mode, cflag, chunk, tflag, u32_at, u64_at};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A service of these disks with one worker.
pub fn service(disks: Vec<Arc<Disk>>) -> Arc<Service> {
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    let backend = Backend::start(&options).unwrap();
    Service::new(backend, Disks::new(disks), Arc::default())
}

/// A service of `device` under the name `disk`.
pub fn service_of(device: &Arc<MemDevice>) -> Arc<Service> {
    let disk = Disk::new("disk", Arc::clone(device) as _, Tracing::off());
    service(vec![Arc::new(disk)])
}

/// One reply, as a client understands it.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub data: Vec<u8>,
}

/// A source, its queue, and the client's end of the socket, all on one thread.
pub struct Rig {
    pub source: NbdSource,
    pub client: Option<UnixStream>,
    pub end: Option<SourceEnd>,
    queue: Queue,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    may_pull: bool,
    pub in_flight_most: usize,
    mode: Mode,
    next_cookie: u64,
    /// Reads by cookie, whose simple replies have data.
    reads: HashMap<u64, u32>,
    /// Offsets by cookie, which extended replies repeat.
    offsets: HashMap<u64, u64>,
    got: Vec<u8>,
    /// Payloads of block status chunks whose reply goes on.
    before: Vec<u8>,
    /// The client doesn't read.
    pub stalled: bool,
    /// Or it reads so much at a time.
    pub reads_at_most: Option<usize>,
    /// First sector and sectors of the requests with data.
    pub pulled: Vec<(u64, u64)>,
    /// Most bytes of requests in one pull.
    pub most_pulled: u64,
    /// Most bytes that one push sent.
    pub most_passed: u64,
}

pub const MODES: [Mode; 3] = [Mode::Simple, Mode::Structured, Mode::Extended];

pub fn negotiated(device: Arc<dyn BlockDevice>, mode: Mode) -> Negotiated {
    let payload = match mode {
        Mode::Extended => tflag::BLOCK_STATUS_PAYLOAD,
        _ => 0,
    };
    let contexts = match mode.has_chunks() {
        true => block_status::contexts(&*device),
        false => Contexts::default(),
    };
    Negotiated {
        export: "disk".into(),
        transmission_flags: proto::transmission_flags(&device.limits(), mode) | payload,
        device,
        mode,
        contexts,
        no_zeroes: true,
        leftover: Vec::new(),
    }
}

impl Rig {
    pub fn new(device: &Arc<MemDevice>, mode: Mode, config: &NbdConfig) -> Rig {
        Rig::with_share(device, mode, config, DiskShare::alone())
    }

    pub fn with_share(
        device: &Arc<MemDevice>,
        mode: Mode,
        config: &NbdConfig,
        share: Arc<DiskShare>,
    ) -> Rig {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::clone(device) as _;
        let n = negotiated(Arc::clone(&device), mode);
        let socket = Arc::new(server.into());
        let source = NbdSource::with_share(
            "test",
            "disk",
            Stream::Plain(socket),
            n,
            config,
            share,
            None,
        );
        let queue = Queue::open(&device, &QueueContext::new(source.depth())).unwrap();
        Rig {
            source,
            client: Some(client),
            end: None,
            queue,
            batch: Vec::new(),
            done: Vec::new(),
            may_pull: true,
            in_flight_most: 0,
            mode,
            next_cookie: 100,
            reads: HashMap::new(),
            offsets: HashMap::new(),
            got: Vec::new(),
            before: Vec::new(),
            stalled: false,
            reads_at_most: None,
            pulled: Vec::new(),
            most_pulled: 0,
            most_passed: 0,
        }
    }

    pub fn plain(device: &Arc<MemDevice>) -> Rig {
        Rig::new(device, Mode::Simple, &NbdConfig::default())
    }

    /// One round of a worker, and of the client's receiving. True if anything moved.
    pub fn step(&mut self) -> bool {
        let mut want = PollFlags::empty();
        if self.end.is_none() && self.source.wants_read() {
            want |= PollFlags::IN;
        }
        if self.source.wants_write() {
            want |= PollFlags::OUT;
        }
        let mut moved = false;
        if !want.is_empty() {
            let fd = self.source.wait_fd().unwrap();
            let mut fds = [PollFd::from_borrowed_fd(fd, want)];
            rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap();
            if !fds[0].revents().is_empty() {
                self.source.woken();
                self.may_pull = true;
                moved = true;
            }
        }
        let room = self.source.depth() as usize - self.queue.in_flight();
        if self.end.is_none() && self.may_pull && room > 0 {
            self.may_pull = !self.source.poll_is_syscall();
            if let Err(end) = self.source.pull(room, &mut self.batch) {
                self.end = Some(end);
            }
            moved |= !self.batch.is_empty();
            let with_data = self.batch.iter().filter(|r| r.op.has_data());
            let pulled: Vec<_> = with_data.map(|r| (r.sector, r.sectors)).collect();
            let bytes = pulled.iter().map(|(_, n)| n * 512).sum();
            self.most_pulled = self.most_pulled.max(bytes);
            self.pulled.extend(pulled);
            self.queue.submit(&mut self.batch);
        }
        self.in_flight_most = self.in_flight_most.max(self.queue.in_flight());
        moved |= self.queue.poll(&mut self.done) > 0;
        self.source.complete(&mut self.done);
        let before = self.source.passed();
        if let Err(end) = self.source.push() {
            self.end.get_or_insert(end);
        }
        self.most_passed = self.most_passed.max(self.source.passed() - before);
        if self.end.is_some() {
            self.source.deadline();
        }
        if self.end.is_none()
            && self.queue.in_flight() < self.source.depth() as usize
            && self.source.arm() == Readiness::Ready
        {
            self.may_pull = true;
            moved = true;
        }
        moved | self.client_receive() | (self.queue.in_flight() > 0)
    }

    fn client_receive(&mut self) -> bool {
        let (Some(mut client), false) = (self.client.as_ref(), self.stalled) else {
            return false;
        };
        let mut piece = [0; 65536];
        let most = self.reads_at_most.unwrap_or(piece.len());
        match client.read(&mut piece[..most]) {
            Ok(n) => {
                self.got.extend_from_slice(&piece[..n]);
                n > 0
            }
            Err(_) => false,
        }
    }

    /// Steps until nothing moves.
    pub fn settle(&mut self) {
        for _ in 0..1_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the source never comes to rest");
    }

    /// Sends bytes while the worker works.
    pub fn send(&mut self, mut bytes: &[u8]) {
        let mut stuck = 0;
        while !bytes.is_empty() {
            let mut client = self.client.as_ref().unwrap();
            match client.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    stuck += 1;
                    assert!(stuck < 1_000_000, "the source stopped reading");
                }
                Err(e) => panic!("{e}"),
            }
            self.step();
        }
    }

    /// The bytes of a request; its cookie is the next number.
    pub fn encode(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> (u64, Vec<u8>) {
        let flags = match (self.mode, Command::from(command)) {
            (Mode::Extended, Command::Write) => flags | cflag::PAYLOAD_LEN,
            _ => flags,
        };
        self.encode_long(command, flags, offset, u64::from(len))
    }

    /// As [`Rig::encode`], with any flags and a length of 64 bits.
    pub fn encode_long(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u64,
    ) -> (u64, Vec<u8>) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        if Command::from(command) == Command::Read {
            self.reads.insert(cookie, len as u32);
        }
        let magic = match self.mode {
            Mode::Extended => proto::EXTENDED_REQUEST_MAGIC,
            _ => proto::REQUEST_MAGIC,
        };
        let mut b = magic.to_be_bytes().to_vec();
        self.offsets.insert(cookie, offset);
        b.extend(flags.to_be_bytes());
        b.extend(command.to_be_bytes());
        b.extend(cookie.to_be_bytes());
        b.extend(offset.to_be_bytes());
        match self.mode {
            Mode::Extended => b.extend(len.to_be_bytes()),
            _ => b.extend((len as u32).to_be_bytes()),
        }
        (cookie, b)
    }

    /// Sends a request and waits for its reply.
    pub fn call(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> Reply {
        let (cookie, mut bytes) = self.encode(command, flags, offset, len);
        bytes.extend_from_slice(payload);
        self.send(&bytes);
        let reply = self.reply();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    /// The next complete reply.
    pub fn reply(&mut self) -> Reply {
        let mut rounds = 0;
        loop {
            if let Some(r) = self.take_reply() {
                return r;
            }
            assert!(self.step() || rounds < 3, "no reply comes: {:?}", self.end);
            rounds += 1;
            assert!(rounds < 10_000_000, "no reply comes");
        }
    }

    pub fn take_reply(&mut self) -> Option<Reply> {
        let b = &self.got;
        if b.len() < 16 {
            return None;
        }
        let magic = u32_at(b, 0);
        if magic == proto::SIMPLE_REPLY_MAGIC {
            assert_ne!(self.mode, Mode::Extended, "a simple reply");
            let (error, cookie) = (u32_at(b, 4), u64_at(b, 8));
            let read = self.reads.get(&cookie).copied();
            assert!(
                !(self.mode.has_chunks() && read.is_some()),
                "a simple reply to a read"
            );
            let len = if error == 0 { read.unwrap_or(0) } else { 0 } as usize;
            if b.len() < 16 + len {
                return None;
            }
            let data = b[16..16 + len].to_vec();
            self.got.drain(..16 + len);
            return Some(Reply {
                cookie,
                error,
                data,
            });
        }
        let (want, head) = match self.mode {
            Mode::Simple => panic!("a structured reply that was not negotiated"),
            Mode::Structured => (proto::STRUCTURED_REPLY_MAGIC, 20),
            Mode::Extended => (proto::EXTENDED_REPLY_MAGIC, 32),
        };
        assert_eq!(magic, want);
        if b.len() < head {
            return None;
        }
        let (kind, cookie) = (u32_at(b, 4), u64_at(b, 8));
        let len = match self.mode {
            Mode::Extended => {
                assert_eq!(Some(&u64_at(b, 16)), self.offsets.get(&cookie));
                u64_at(b, 24) as usize
            }
            _ => u32_at(b, 16) as usize,
        };
        let is_status = [chunk::BLOCK_STATUS, chunk::BLOCK_STATUS_EXT].contains(&(kind as u16));
        if b.len() < head + len {
            return None;
        }
        let mut payload = std::mem::take(&mut self.before);
        payload.extend(self.got.drain(..head + len).skip(head));
        if kind >> 16 == 0 {
            assert!(is_status, "one chunk but for block status");
            self.before = payload;
            return self.take_reply();
        }
        assert_eq!(kind >> 16, u32::from(chunk::FLAG_DONE));
        let (error, data) = match kind as u16 {
            chunk::NONE => (0, payload),
            chunk::OFFSET_DATA => (0, payload[8..].to_vec()),
            chunk::BLOCK_STATUS if self.mode == Mode::Structured => (0, payload),
            chunk::BLOCK_STATUS_EXT if self.mode == Mode::Extended => (0, payload),
            chunk::ERROR => {
                let text = &payload[6..];
                assert_eq!(
                    usize::from(u16::from_be_bytes([payload[4], payload[5]])),
                    text.len()
                );
                (u32_at(&payload, 0), Vec::new())
            }
            other => panic!("chunk type {other}"),
        };
        Some(Reply {
            cookie,
            error,
            data,
        })
    }

    /// True if no bytes of a further reply are here.
    pub fn nothing_more(&mut self) -> bool {
        self.settle();
        self.got.is_empty()
    }

    /// Sets the size of the server's send buffer, to force partial sends.
    pub fn narrow_socket(&mut self) {
        let fd = self.source.wait_fd().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(fd.as_fd(), 1).unwrap();
    }
}
