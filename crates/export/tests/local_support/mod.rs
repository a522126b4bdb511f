//! Disks in memory behind a real back end, and a front end that can send any bytes.
#![allow(
    dead_code,
    unused_imports,
    reason = "every test file uses another part of it"
)]

use parking_lot::Mutex;
use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Pressure, Service};
use pvblk_block::trace::Tracing;
use pvblk_client::dial::{SocketType, dial};
use pvblk_client::rings::FrontParts;
use pvblk_export::local::LocalServer;
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::blkif::grant::{GRANT_ENTRY_SIZE, GrantEntry};
use pvblk_protocol::blkif::wire::{OP_WRITE, RequestHeader, Segment};
use pvblk_protocol::local::Frame;
use pvblk_protocol::xenbus::{BackendOffers, Change};
use pvblk_sys::{EventFd, PAGE_SIZE, Poller, Region, create_sealed, fdpass};
use pvblk_testing::wait;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[path = "../ram_support/mod.rs"]
mod ram_support;

pub use ram_support::*;

/// A server of disk a, of 2048 sectors.
pub struct Fixture {
    pub dir: tempfile::TempDir,
    pub server: LocalServer,
    pub ram: Arc<Ram>,
    pub service: Arc<Service>,
}

/// A service of disk a.
pub fn service(ram: &Arc<Ram>) -> Arc<Service> {
    let device = Arc::new(RamDevice(Arc::clone(ram)));
    let disk = Arc::new(Disk::new("a", device, Tracing::off()));
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    let backend = Backend::start(&options).unwrap();
    Service::new(backend, Disks::new(vec![disk]), Arc::new(Pressure::new(0)))
}

impl Fixture {
    pub fn new(offers: BackendOffers) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let ram = Ram::new(2048);
        let service = service(&ram);
        let server = LocalServer::bind(&dir.path().join("s"), &service, offers).unwrap();
        Fixture {
            dir,
            server,
            ram,
            service,
        }
    }

    /// Queues of front ends that were served so far.
    pub fn served(&self) -> usize {
        self.ram.opened.load(Ordering::Acquire)
    }

    /// Those of them that have ended.
    pub fn ended(&self) -> usize {
        self.ram.closed.load(Ordering::Acquire)
    }

    /// Has a front end write to the disk, with the write kept at the device.
    pub fn keep_a_write(&self, parts: &mut FrontParts) {
        let granter = &parts.granter;
        self.ram.hold.store(true, Ordering::Release);
        let header = RequestHeader {
            operation: OP_WRITE,
            nr_segments: 1,
            ..RequestHeader::default()
        };
        let segment = Segment {
            gref: granter.grant(granter.first_data_frame(), true).unwrap(),
            first_sect: 0,
            last_sect: 7,
            pad: 0,
        };
        let queue = &mut parts.queues[0];
        queue.ring.put_rw(&header, &[segment]);
        queue.ring.publish();
        queue.channel.notify();
        wait("the write is at the device", || {
            self.ram.held.load(Ordering::Acquire) == 1
        });
    }

    /// The device completes what it has.
    pub fn release(&self) {
        self.ram.hold.store(false, Ordering::Release);
    }
}

pub fn offers(queues: u32, pages: usize) -> BackendOffers {
    BackendOffers {
        max_queues: Some(queues),
        max_ring: RingSize::from_pages(pages),
        ..BackendOffers::default()
    }
}

/// True if the descriptor is readable.
pub fn poll_once(fd: BorrowedFd<'_>) -> bool {
    let poller = Poller::new().unwrap();
    poller.add(fd, 0, false).unwrap();
    let mut events = Vec::new();
    poller.wait(&mut events, Some(WAIT)).unwrap();
    !events.is_empty()
}

/// A front end that sends any message in any order.
pub struct Raw {
    pub socket: OwnedFd,
    pub file: OwnedFd,
    pub memory: Region,
    /// By which it notifies the server, and is notified.
    events: Mutex<Vec<[EventFd; 2]>>,
}

pub const RAW_FRAMES: u32 = 64;

/// Keys of one ring, in what [`Raw::prepare`] granted.
pub const RINGS: [(&str, &str); 4] = [
    ("ring-ref", "8"),
    ("event-channel", "1"),
    ("protocol", "x86_64-abi"),
    ("state", "3"),
];

impl Raw {
    /// Connects to the socket and sends nothing. The memory has the grant table in frame 0.
    pub fn new(f: &Fixture) -> Raw {
        let end = Instant::now() + Duration::from_secs(60);
        let bytes = RAW_FRAMES as usize * PAGE_SIZE;
        let file = create_sealed("raw", bytes as u64).unwrap();
        let memory = Region::shared(file.as_fd(), 0, bytes, true).unwrap();
        Raw {
            socket: dial(f.server.path(), SocketType::SEQPACKET, end).unwrap(),
            file,
            memory,
            events: Mutex::default(),
        }
    }

    pub fn bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        // The server may have closed already: that is a result, not an error.
        let _ = fdpass::send(self.socket.as_fd(), bytes, fds);
    }

    pub fn frame(&self, frame: &Frame, fds: &[BorrowedFd<'_>]) {
        self.bytes(&frame.encode().unwrap(), fds);
    }

    pub fn hello(&self) {
        self.frame(
            &Frame::Hello {
                disk: "a".into(),
                front: "raw".into(),
            },
            &[],
        );
    }

    pub fn memory(&self) {
        self.memory_of(self.file.as_fd(), 0, 1);
    }

    pub fn memory_of(&self, file: BorrowedFd<'_>, table_first: u32, table_frames: u32) {
        self.frame(
            &Frame::Memory {
                table_first,
                table_frames,
            },
            &[file],
        );
    }

    pub fn channel(&self, port: u32) {
        let [a, b] = [(); 2].map(|()| EventFd::new().unwrap());
        self.frame(&Frame::Channel { port }, &[a.as_fd(), b.as_fd()]);
        self.events.lock().push([a, b]);
    }

    /// Notifies the server over all channels.
    pub fn kick(&self) {
        self.events
            .lock()
            .iter()
            .for_each(|[to_server, _]| to_server.notify());
    }

    pub fn write(&self, keys: &[(&str, &str)]) {
        let changes = keys.iter().map(|(k, v)| Change::set(*k, v)).collect();
        self.frame(&Frame::Write(changes), &[]);
    }

    pub fn grant(&self, gref: u32, frame: u32, read_only: bool) {
        let at = gref as usize * GRANT_ENTRY_SIZE;
        let flags = GrantEntry { frame, read_only }.encode_flags(0);
        let memory = &self.memory;
        memory.atomic_u32(at + 4).store(frame, Ordering::Relaxed);
        memory.atomic_u32(at).store(flags, Ordering::Release);
    }

    /// Sends HELLO, memory, channel 1, and grants frame 9 as reference 8.
    pub fn prepare(&self) {
        self.hello();
        self.memory();
        self.channel(1);
        self.grant(8, 9, false);
    }

    /// The server's next message; `None` when it has closed.
    pub fn next(&self) -> Option<Frame> {
        let poller = Poller::new().unwrap();
        poller.add(self.socket.as_fd(), 0, false).unwrap();
        let mut events = Vec::new();
        poller
            .wait(&mut events, Some(Duration::from_secs(60)))
            .unwrap();
        assert!(!events.is_empty(), "the server says nothing");
        let mut bytes = vec![0; 65536];
        let mut got = fdpass::recv(self.socket.as_fd(), &mut bytes, false);
        // The reset is reported once, before the last messages.
        if matches!(&got, Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset) {
            got = fdpass::recv(self.socket.as_fd(), &mut bytes, false);
        }
        match got {
            Ok((0, _)) | Err(_) => None,
            Ok((n, _)) => Some(Frame::decode(&bytes[..n]).unwrap()),
        }
    }

    /// Reads until `key` has this value.
    pub fn until(&self, key: &str, value: &str) {
        loop {
            match self.next() {
                Some(Frame::Write(changes)) => {
                    if changes.contains(&Change::set(key, value)) {
                        return;
                    }
                }
                other => panic!("{other:?} while waiting for {key}={value}"),
            }
        }
    }

    /// Reads until the server refuses, by an ERROR message or an `error` key.
    pub fn refusal(&self) -> String {
        loop {
            match self.next() {
                Some(Frame::Error(text)) => return text,
                Some(Frame::Write(changes)) => {
                    let error = changes.into_iter().find(|c| c.key == "error");
                    if let Some(text) = error.and_then(|c| c.value) {
                        return text;
                    }
                }
                None => return "closed".into(),
                other => panic!("{other:?} from a back end"),
            }
        }
    }
}
