//! Disks in memory behind a real back end, and a front end that can send anything.
#![allow(dead_code, reason = "every test file uses another part of it")]

use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Service};
use pvblk_block::trace::Tracing;
use pvblk_export::vhost_user::{Listen, VhostLimits, VhostServer};
use pvblk_protocol::vhost_user::{
    Code, Header, MemoryRegion, SingleRegion, VringAddr, VringState, features, flags, message,
};
use pvblk_protocol::virtio::Driver;
use pvblk_sys::{EventFd, PAGE_SIZE, PollEvent, Poller, Region, fdpass};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

pub mod kept;
#[path = "../ram_support/mod.rs"]
mod ram_support;

pub use ram_support::*;

/// Two disks, a and b, of 2048 sectors, and their server.
pub struct Bed {
    pub server: VhostServer,
    pub a: Arc<Ram>,
    pub b: Arc<Ram>,
    service: Arc<Service>,
    limits: VhostLimits,
    listens: Vec<Listen>,
    dir: TempDir,
}

impl Bed {
    pub fn new() -> Bed {
        Bed::with(2, None)
    }

    pub fn with(workers: usize, most_unallocated: Option<u64>) -> Bed {
        Bed::at(tempfile::tempdir().unwrap(), workers, most_unallocated)
    }

    /// The server that comes next at the sockets of one that has ended; its disks are new.
    pub fn after(self) -> Bed {
        drop(self.server);
        Bed::at(self.dir, 2, None)
    }

    fn at(dir: TempDir, workers: usize, most_unallocated: Option<u64>) -> Bed {
        let (a, b) = (Ram::new(2048), Ram::new(2048));
        let disk = |name: &str, ram: &Arc<Ram>| {
            let device = Arc::new(RamDevice(Arc::clone(ram)));
            Arc::new(Disk::new(name, device, Tracing::off()))
        };
        let options = BackendOptions {
            workers,
            ..BackendOptions::default()
        };
        let backend = Backend::start(&options).unwrap();
        let disks = Disks::new(vec![disk("a", &a), disk("b", &b)]);
        let service = Service::new(backend, disks, Arc::default());
        let limits = VhostLimits {
            queues: 4,
            unallocated: most_unallocated,
        };
        let listens: Vec<Listen> = ["a", "b"]
            .map(|disk| Listen {
                disk: disk.into(),
                path: dir.path().join(disk),
            })
            .into();
        let server = VhostServer::bind(&listens, &service, limits).unwrap();
        Bed {
            server,
            a,
            b,
            service,
            limits,
            listens,
            dir,
        }
    }

    /// Another server of the same disks.
    pub fn restart(&mut self) {
        self.server.stop();
        self.server = VhostServer::bind(&self.listens, &self.service, self.limits).unwrap();
    }

    pub fn path(&self, disk: &str) -> std::path::PathBuf {
        self.dir.path().join(disk)
    }

    pub fn front(&self, disk: &str) -> Front {
        Front::connect(&self.path(disk))
    }

    /// A front end that has negotiated everything and runs `queues` of 64.
    pub fn guest(&self, disk: &str, queues: u16) -> Front {
        let mut front = self.front(disk);
        front.negotiate();
        front.add_memory();
        for i in 0..queues {
            front.start(i, 0);
        }
        front
    }
}

/// Bytes of one queue's memory: each has a region of its own.
pub const QUEUE_MEMORY: usize = 1 << 20;
/// Guest address of the first queue's.
pub const GUEST: u64 = 1 << 30;
/// The same in the front end's own addresses.
pub const USER: u64 = 1 << 40;
pub const ENTRIES: u16 = 64;

pub struct Front {
    pub socket: UnixStream,
    pub memory: Arc<OwnedFd>,
    pub drivers: Vec<Driver>,
    pub kicks: Vec<EventFd>,
    pub calls: Vec<EventFd>,
    pub errs: Vec<EventFd>,
    pub taken: u64,
}

impl Front {
    /// Connects to the next server, as QEMU does when the last one is gone: the guest goes on with all it has.
    pub fn reconnect(&mut self, path: &std::path::Path) {
        self.socket = UnixStream::connect(path).unwrap();
        self.socket.set_read_timeout(Some(WAIT)).unwrap();
    }

    pub fn connect(path: &std::path::Path) -> Front {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        let memory =
            memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, 4 * QUEUE_MEMORY as u64).unwrap();
        let region = |i: usize| {
            let at = (i * QUEUE_MEMORY) as u64;
            Arc::new(Region::guarded(memory.as_fd(), at, QUEUE_MEMORY).unwrap())
        };
        let drivers = (0..4)
            .map(|i| Driver::new(region(i), GUEST + (i * QUEUE_MEMORY) as u64, ENTRIES, true))
            .collect();
        let events = || (0..4).map(|_| EventFd::new().unwrap()).collect();
        Front {
            socket,
            memory: Arc::new(memory),
            drivers,
            kicks: events(),
            calls: events(),
            errs: events(),
            taken: 0,
        }
    }

    pub fn send(&self, code: u32, flag: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        // The server may have ended the connection already; what comes back tells.
        let _ = fdpass::send(self.socket.as_fd(), &message(code, flag, payload), fds);
    }

    /// The next answer: its code, payload and descriptors; `None` if the server closed.
    pub fn answer(&self) -> Option<(u32, Vec<u8>, Vec<OwnedFd>)> {
        let mut fds = Vec::new();
        let mut take = |len: usize| {
            let mut all = Vec::new();
            while all.len() < len {
                let mut bytes = vec![0; len - all.len()];
                match fdpass::recv(self.socket.as_fd(), &mut bytes, true) {
                    Ok((0, _)) => return None,
                    Ok((n, more)) => {
                        fds.extend(more);
                        all.extend_from_slice(&bytes[..n]);
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                    Err(e) => panic!("no answer: {e}"),
                }
            }
            Some(all)
        };
        let head = Header::read_from_bytes(&take(12)?).unwrap();
        assert_eq!(head.flags, flags::VERSION | flags::REPLY);
        let body = take(head.size as usize)?;
        Some((head.request, body, fds))
    }

    /// Asks for something that has an answer of its own.
    pub fn ask(&self, code: Code, payload: &[u8]) -> Vec<u8> {
        self.send(code as u32, 0, payload, &[]);
        let (got, body, _) = self.answer().unwrap_or_else(|| panic!("{code}: closed"));
        assert_eq!(got, code as u32);
        body
    }

    /// Tells something and wants to know whether it worked; `None` if the server closed.
    pub fn tell(&self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<bool> {
        self.send(code as u32, flags::NEED_REPLY, payload, fds);
        let (got, body, _) = self.answer()?;
        assert_eq!(got, code as u32);
        Some(body == [0; 8])
    }

    /// Tells something that must work.
    pub fn must(&self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.tell(code, payload, fds), Some(true), "{code}");
    }

    pub fn negotiate(&mut self) {
        let u64_of = |b: Vec<u8>| u64::from_le_bytes(b.try_into().unwrap());
        let offered = u64_of(self.ask(Code::GetFeatures, &[]));
        let protocol = u64_of(self.ask(Code::GetProtocolFeatures, &[]));
        assert_eq!(protocol, features::OFFERED);
        self.send(
            Code::SetProtocolFeatures as u32,
            0,
            &protocol.to_le_bytes(),
            &[],
        );
        self.must(Code::SetOwner, &[], &[]);
        self.taken = offered;
        self.must(Code::SetFeatures, &offered.to_le_bytes(), &[]);
    }

    pub fn region(&self, index: u64) -> MemoryRegion {
        let at = index * QUEUE_MEMORY as u64;
        MemoryRegion {
            guest_address: GUEST + at,
            size: QUEUE_MEMORY as u64,
            user_address: USER + at,
            file_offset: at,
        }
    }

    pub fn single(&self, index: u64) -> SingleRegion {
        SingleRegion {
            padding: 0,
            region: self.region(index),
        }
    }

    pub fn add_memory(&self) {
        for i in 0..4 {
            self.must(
                Code::AddMemReg,
                self.single(i).as_bytes(),
                &[self.memory.as_fd()],
            );
        }
    }

    pub fn state(index: u16, num: u32) -> Vec<u8> {
        VringState {
            index: index.into(),
            num,
        }
        .as_bytes()
        .to_vec()
    }

    pub fn place(&self, index: u16) -> VringAddr {
        let (descriptor, available, used) = self.drivers[usize::from(index)].addresses();
        let user = |at: u64| at - GUEST + USER;
        VringAddr {
            index: index.into(),
            flags: 0,
            descriptor: user(descriptor),
            used: user(used),
            available: user(available),
            log: 0,
        }
    }

    /// Starts a ring as QEMU does.
    pub fn start(&self, index: u16, base: u16) {
        let i = usize::from(index);
        self.must(Code::SetVringNum, &Front::state(index, ENTRIES.into()), &[]);
        self.must(Code::SetVringBase, &Front::state(index, base.into()), &[]);
        self.must(Code::SetVringAddr, self.place(index).as_bytes(), &[]);
        let which = u64::from(index).to_le_bytes();
        self.must(Code::SetVringKick, &which, &[self.kicks[i].as_fd()]);
        self.must(Code::SetVringCall, &which, &[self.calls[i].as_fd()]);
        self.must(Code::SetVringErr, &which, &[self.errs[i].as_fd()]);
        self.must(Code::SetVringEnable, &Front::state(index, 1), &[]);
    }

    /// Makes the chain at `head` available and kicks if that is asked for.
    pub fn submit(&mut self, queue: u16, head: u16) {
        let i = usize::from(queue);
        let before = self.drivers[i].available();
        self.drivers[i].make_available(head);
        if self.drivers[i].needs_kick(before) {
            self.kicks[i].notify();
        }
    }

    /// Waits for a used chain, sleeping on the call as a guest does.
    pub fn wait_used(&mut self, queue: u16) -> (u32, u32) {
        let i = usize::from(queue);
        let deadline = Instant::now() + WAIT;
        let poller = Poller::new().unwrap();
        poller.add(self.calls[i].as_fd(), 0, false).unwrap();
        loop {
            self.drivers[i].want_calls(true);
            if let Some(used) = self.drivers[i].used() {
                return used;
            }
            let mut events: Vec<PollEvent> = Vec::new();
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "no used chain and no call on queue {queue}"
            );
            poller.wait(&mut events, Some(left)).unwrap();
            self.calls[i].drain();
        }
    }

    /// One request on its own: status, and the data of a read.
    pub fn io(
        &mut self,
        queue: u16,
        kind: u32,
        sector: u64,
        data: &[u8],
        read: usize,
    ) -> (u8, Vec<u8>) {
        let driver = &self.drivers[usize::from(queue)];
        let offset = driver.data_offset();
        driver.region().write(offset, data);
        let at = driver.at(offset);
        let mut pieces = Vec::new();
        if !data.is_empty() {
            pieces.push((at, data.len() as u32, false));
        }
        if read > 0 {
            driver.region().write(offset, &vec![0xee; read]);
            pieces.push((at, read as u32, true));
        }
        driver.build(0, kind, sector, &pieces, true);
        self.submit(queue, 0);
        let (head, written) = self.wait_used(queue);
        assert_eq!(head, 0);
        let driver = &self.drivers[usize::from(queue)];
        let status = driver.status(0);
        assert_eq!(written, if read > 0 { read as u32 + 1 } else { written });
        let mut got = vec![0; read];
        driver.region().read(offset, &mut got);
        (status, got)
    }

    pub fn write(&mut self, queue: u16, sector: u64, data: &[u8]) {
        assert_eq!(self.io(queue, 1, sector, data, 0).0, 0);
    }

    pub fn read(&mut self, queue: u16, sector: u64, len: usize) -> Vec<u8> {
        let (status, data) = self.io(queue, 0, sector, &[], len);
        assert_eq!(status, 0);
        data
    }

    /// True if the server ended the connection.
    pub fn is_closed(&self) -> bool {
        self.answer().is_none()
    }
}

pub const PAGE: u64 = PAGE_SIZE as u64;
