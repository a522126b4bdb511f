//! A host that only stores attached connections, and a front end that can send any bytes.
#![allow(dead_code, reason = "every test file uses another part of it")]

use parking_lot::Mutex;
use pvblk_backend::{BlkifQueueParts, Fence, Pressure};
use pvblk_block::{
    BlockDevice, Capabilities, Capacity, DeviceEvent, DeviceQueue, Error, ErrorKind, EventHub,
    Limits, QueueContext,
};
use pvblk_client::dial::{SocketType, dial};
use pvblk_export::local::LocalServer;
use pvblk_export::xenbus::{Attachment, DiskHost, Ended};
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::blkif::grant::{GRANT_ENTRY_SIZE, GrantEntry};
use pvblk_protocol::local::Frame;
use pvblk_protocol::xenbus::{BackendOffers, Change};
use pvblk_sys::{EventFd, PAGE_SIZE, Poller, Region, create_sealed, fdpass};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A disk of changing size without data.
#[derive(Default)]
pub struct FakeDevice {
    pub capacity: Capacity,
    pub events: EventHub,
}

impl FakeDevice {
    pub fn resize(&self, sectors: u64) {
        self.capacity.set(sectors);
        self.events.raise(DeviceEvent::Resized { sectors });
    }
}

impl BlockDevice for FakeDevice {
    fn describe(&self) -> String {
        "fake".into()
    }
    fn limits(&self) -> Limits {
        Limits {
            volatile_cache: true,
            ..Limits::default()
        }
    }
    fn capacity_sectors(&self) -> u64 {
        self.capacity.sectors()
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Err(Error::new(ErrorKind::Unsupported, "never read"))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

/// One attached connection.
pub struct AttachedConnection {
    pub front: String,
    pub queues: Vec<BlkifQueueParts>,
    pub ended: Ended,
}

type OnDetached = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct HostState {
    pub device: Arc<FakeDevice>,
    pub attached: Mutex<Vec<AttachedConnection>>,
    pub attaches: AtomicUsize,
    pub detaches: AtomicUsize,
    /// If set, keep `done` until [`HostState::release`].
    pub hold: AtomicBool,
    pub refuse: AtomicBool,
    pub fence: Arc<Fence>,
    held: Mutex<Vec<OnDetached>>,
}

impl HostState {
    pub fn release(&self) {
        let held: Vec<OnDetached> = self.held.lock().drain(..).collect();
        held.into_iter().for_each(|done| done());
    }
}

pub struct FakeHost {
    pub state: Arc<HostState>,
    pub offers: BackendOffers,
}

impl DiskHost for FakeHost {
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>> {
        (disk == "a").then(|| Arc::clone(&self.state.device) as _)
    }
    fn fence(&self, _: &str) -> Option<Arc<Fence>> {
        Some(Arc::clone(&self.state.fence))
    }
    fn offers(&self) -> BackendOffers {
        self.offers
    }
    fn pressure(&self) -> Arc<Pressure> {
        Arc::new(Pressure::new(0))
    }
    fn attach(
        &self,
        _disk: &str,
        front: &str,
        queues: Vec<BlkifQueueParts>,
        ended: Ended,
    ) -> Result<Box<dyn Attachment>, Error> {
        if self.state.refuse.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Exhausted, "no worker is left"));
        }
        self.state.attached.lock().push(AttachedConnection {
            front: front.into(),
            queues,
            ended,
        });
        self.state.attaches.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(FakeAttachment(Arc::clone(&self.state))))
    }
}

struct FakeAttachment(Arc<HostState>);

impl Attachment for FakeAttachment {
    fn detach(&mut self, done: OnDetached) {
        self.0.detaches.fetch_add(1, Ordering::Relaxed);
        self.0.attached.lock().clear();
        if self.0.hold.load(Ordering::Relaxed) {
            self.0.held.lock().push(done);
        } else {
            // From another thread, as workers do.
            std::thread::spawn(done);
        }
    }
}

pub struct Fixture {
    pub dir: tempfile::TempDir,
    pub server: LocalServer,
    pub state: Arc<HostState>,
}

impl Fixture {
    pub fn new(offers: BackendOffers) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let state = Arc::new(HostState::default());
        state.device.capacity.set(2048);
        let host = FakeHost {
            state: Arc::clone(&state),
            offers,
        };
        let server = LocalServer::bind(&dir.path().join("s"), Arc::new(host)).unwrap();
        Fixture { dir, server, state }
    }

    pub fn attached(&self) -> usize {
        self.state.attaches.load(Ordering::Relaxed)
    }

    pub fn detached(&self) -> usize {
        self.state.detaches.load(Ordering::Relaxed)
    }
}

pub fn offers(queues: u32, pages: usize) -> BackendOffers {
    BackendOffers {
        max_queues: Some(queues),
        max_ring: RingSize::from_pages(pages),
        ..BackendOffers::default()
    }
}

/// Waits for another thread's action, at most a minute.
pub fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !f() {
        assert!(Instant::now() < end, "{what} didn't happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A front end that sends any message in any order.
pub struct Raw {
    pub socket: OwnedFd,
    pub file: OwnedFd,
    pub memory: Region,
}

pub const RAW_FRAMES: u32 = 64;

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
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        self.frame(&Frame::Channel { port }, &[a.as_fd(), b.as_fd()]);
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
