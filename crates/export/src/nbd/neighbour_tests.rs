//! Two disks on one worker: clients of one of them do harm, and those of the other don't notice. With real sockets, lanes and threads.

use super::*;
use crate::nbd::Shares;
use crate::nbd::testing::{MemDevice, pattern, service};
use pvblk_backend::Budget;
use pvblk_block::Limits;
use pvblk_block::trace::Tracing;
use pvblk_testing::wait;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};

const READ: u16 = 0;
const WRITE: u16 = 1;
const STATUS: u16 = 7;
const MIB: usize = 1 << 20;
/// A bound for what hangs; nothing is expected to take as long.
const HANG: Duration = Duration::from_secs(60);

struct Scene {
    path: PathBuf,
    devices: [Arc<MemDevice>; 2],
    disks: Vec<Arc<Disk>>,
    server: NbdServer,
    ends: Receiver<SourceEnd>,
}

fn scene(name: &str, config: NbdConfig, limits: Limits) -> Scene {
    let path = std::env::temp_dir().join(format!("pvblk-nbd-{}-{name}", std::process::id()));
    let devices = [0, 1].map(|_| MemDevice::with(64 * MIB, limits));
    let total = Budget::total(64 << 20);
    let disk = |name: &str, device: &Arc<MemDevice>| {
        let memory = Budget::of_owner(&total, 48 << 20, 32 << 20);
        let disk = Disk::new(name, Arc::clone(device) as _, Tracing::off());
        Arc::new(disk.with_memory(memory))
    };
    let disks = vec![disk("bad", &devices[0]), disk("good", &devices[1])];
    let service = service(disks.clone());
    let (tell, ends) = channel();
    let told = Arc::new(move |_: &str, _: &str, end| drop(tell.send(end)));
    let addr = format!("unix:{}", path.display()).parse().unwrap();
    let server = NbdServer::telling(&addr, config, &service, told).unwrap();
    Scene {
        path,
        devices,
        disks,
        server,
        ends,
    }
}

struct Client {
    s: UnixStream,
    next: u64,
}

fn option(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut b = b"IHAVEOPT".to_vec();
    b.extend(kind.to_be_bytes());
    b.extend((payload.len() as u32).to_be_bytes());
    b.extend(payload);
    b
}

impl Scene {
    fn connect(&self) -> UnixStream {
        let mut s = UnixStream::connect(&self.path).unwrap();
        s.set_read_timeout(Some(HANG)).unwrap();
        s.set_write_timeout(Some(HANG)).unwrap();
        s.read_exact(&mut [0; 18]).unwrap();
        s.write_all(&3u32.to_be_bytes()).unwrap();
        s
    }

    /// With structured replies and block status; the error reply's text if there is one.
    fn try_client(&self, export: &str) -> Result<Client, String> {
        let mut s = self.connect();
        let name = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes()].concat();
        let query = b"\0\0\0\x01\0\0\0\x0fbase:allocation";
        for (kind, payload) in [
            (8, vec![]),
            (10, [&name[..], query].concat()),
            (7, [&name[..], &[0, 0]].concat()),
        ] {
            s.write_all(&option(kind, &payload)).unwrap();
            loop {
                let mut head = [0; 20];
                s.read_exact(&mut head).unwrap();
                let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
                let mut body = vec![0; word(16) as usize];
                s.read_exact(&mut body).unwrap();
                match word(12) {
                    1 => break,
                    kind if kind >> 31 == 1 => return Err(String::from_utf8(body).unwrap()),
                    _ => {}
                }
            }
        }
        Ok(Client { s, next: 1 })
    }

    fn client(&self, export: &str) -> Client {
        self.try_client(export).unwrap()
    }
}

impl Client {
    fn ask(&mut self, command: u16, offset: u64, len: u32, payload: &[u8]) -> u64 {
        let cookie = self.next;
        self.next += 1;
        let mut b = 0x2560_9513u32.to_be_bytes().to_vec();
        b.extend([0, 0]);
        b.extend(command.to_be_bytes());
        b.extend(cookie.to_be_bytes());
        b.extend(offset.to_be_bytes());
        b.extend(len.to_be_bytes());
        b.extend(payload);
        self.s.write_all(&b).unwrap();
        cookie
    }

    /// The next reply: its cookie, its error and its data.
    fn reply(&mut self) -> (u64, u32, Vec<u8>) {
        let mut head = [0; 16];
        self.s.read_exact(&mut head).unwrap();
        let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        if word(0) == 0x6744_6698 {
            return (cookie, word(4), vec![]);
        }
        let mut len = [0; 4];
        self.s.read_exact(&mut len).unwrap();
        let mut body = vec![0; u32::from_be_bytes(len) as usize];
        self.s.read_exact(&mut body).unwrap();
        match word(4) as u16 {
            0x8001 => (
                cookie,
                u32::from_be_bytes(body[..4].try_into().unwrap()),
                vec![],
            ),
            1 => (cookie, 0, body.split_off(8)),
            _ => (cookie, 0, body),
        }
    }

    fn call(&mut self, command: u16, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
        let cookie = self.ask(command, offset, len, payload);
        let (to, error, data) = self.reply();
        assert_eq!((to, error), (cookie, 0));
        data
    }
}

#[test]
fn a_block_status_that_hangs_holds_up_nothing_else() {
    let scene = scene("status", NbdConfig::default(), Limits::default());
    let mut good = scene.client("good");
    let mut bad: Vec<_> = (0..4).map(|_| scene.client("bad")).collect();
    scene.devices[0].hang_extents.store(true, Ordering::Relaxed);
    for c in &mut bad {
        for _ in 0..8 {
            c.ask(STATUS, 0, 1 << 20, &[]);
        }
        // Other requests of the same connection go on.
        assert_eq!(c.call(READ, 4096, 512, &[]).len(), 512);
    }
    assert_eq!(good.call(STATUS, 0, 4096, &[]).len(), 12);
    for i in 0..200 {
        assert_eq!(good.call(READ, i * 4096, 4096, &[]).len(), 4096);
    }
    // One of the disk's threads is left for others.
    let (tell, told) = channel();
    let job = Box::new(move || tell.send(()).unwrap());
    assert!(scene.disks[0].aside().run(job).is_ok());
    told.recv_timeout(HANG).unwrap();
    // One leaves in the middle of it.
    drop(bad.pop());
    assert!(scene.ends.try_recv().is_err());
    scene.devices[0]
        .hang_extents
        .store(false, Ordering::Relaxed);
    for c in &mut bad {
        let mut cookies: Vec<_> = (0..8)
            .map(|_| {
                let (cookie, error, data) = c.reply();
                assert_eq!((error, data.len()), (0, 12));
                cookie
            })
            .collect();
        cookies.sort_unstable();
        assert_eq!(cookies, (1..=8).collect::<Vec<_>>());
    }
    scene.ends.recv_timeout(HANG).unwrap();
}

/// 32 clients that ask for all they can and read nothing; a write of each is stuck, too.
#[test]
fn clients_that_read_nothing_hold_a_bounded_memory_and_go() {
    let config = NbdConfig {
        stall_timeout: Duration::from_secs(1),
        ..NbdConfig::default()
    };
    let scene = scene("deaf", config, Limits::default());
    let mut deaf: Vec<_> = (0..32).map(|_| scene.client("bad")).collect();
    for c in &mut deaf {
        for _ in 0..64 {
            c.ask(READ, 0, 1 << 20, &[]);
        }
    }
    let memory = scene.disks[0].memory();
    wait("they take what they may", || memory.used() > 16 << 20);
    let mut good = scene.client("good");
    // The neighbour gets its floor: a request of the largest size.
    let data = pattern(32 * MIB, 9);
    good.call(WRITE, 0, 32 << 20, &data);
    assert!(good.call(READ, 0, 32 << 20, &[]) == data);
    assert!(memory.used() <= 48 << 20);
    for _ in 0..32 {
        let end = scene.ends.recv_timeout(HANG).unwrap();
        let SourceEnd::Broken(why) = end else {
            panic!("{end:?}")
        };
        assert!(
            why.to_string().contains("took none of its replies"),
            "{why}"
        );
    }
    wait("all is given back", || memory.used() == 0);
    assert!(good.call(READ, 0, 4096, &[]) == data[..4096]);
}

/// Connections that wait for memory are woken when others give it back.
#[test]
fn all_who_wait_for_memory_get_it_in_the_end() {
    let scene = scene("wait", NbdConfig::default(), Limits::default());
    let mut clients: Vec<_> = (0..12).map(|_| scene.client("bad")).collect();
    for c in &mut clients {
        for _ in 0..4 {
            c.ask(READ, 0, 16 << 20, &[]);
        }
    }
    std::thread::scope(|s| {
        for c in &mut clients {
            s.spawn(|| {
                for _ in 0..4 {
                    assert_eq!(c.reply().2.len(), 16 << 20);
                }
            });
        }
    });
    assert!(scene.disks[0].memory().used() <= 48 << 20);
}

/// Bytes of one block, written by many connections at the same time, each its own: none gets lost.
#[test]
fn parts_of_one_block_are_written_by_many_at_once() {
    let limits = Limits {
        logical_sector_bytes: 4096,
        ..Limits::default()
    };
    let scene = scene("parts", NbdConfig::default(), limits);
    let mut clients: Vec<_> = (0..8).map(|_| scene.client("bad")).collect();
    std::thread::scope(|s| {
        for (n, c) in clients.iter_mut().enumerate() {
            s.spawn(move || {
                for round in 1..=20u8 {
                    for at in (n..512).step_by(8) {
                        c.ask(WRITE, 4090 + at as u64, 1, &[round]);
                    }
                    if n == 0 {
                        // And whole blocks beside them.
                        c.ask(WRITE, 8192, 4096, &[round; 4096]);
                    }
                    for _ in 0..64 + usize::from(n == 0) {
                        assert_eq!(c.reply().1, 0);
                    }
                }
            });
        }
    });
    let data = scene.devices[0].data.lock();
    assert_eq!(data[4090..4602], [20; 512]);
    assert!(
        data[..4090]
            .iter()
            .chain(&data[4602..8192])
            .all(|&b| b == 0)
    );
    assert_eq!(data[8192..12288], [20; 4096]);
}

#[test]
fn connections_are_counted_for_each_disk_and_for_all() {
    let config = NbdConfig {
        shares: Arc::new(Shares::new(3, 5)),
        ..NbdConfig::default()
    };
    let scene = scene("count", config, Limits::default());
    let mut bad: Vec<_> = (0..3).map(|_| scene.client("bad")).collect();
    let e = scene.try_client("bad").err().unwrap();
    assert!(e.contains("disk bad has 3 NBD connections"), "{e}");
    let _good: Vec<_> = (0..2).map(|_| scene.client("good")).collect();
    let e = scene.try_client("good").err().unwrap();
    assert!(e.contains("the server has 5 NBD connections"), "{e}");
    bad.pop();
    wait("there is a place again", || {
        scene.try_client("good").is_ok()
    });
}

#[test]
fn idle_negotiations_keep_nobody_out() {
    let config = NbdConfig {
        max_handshakes: 4,
        handshake_timeout: HANG,
        ..NbdConfig::default()
    };
    let scene = scene("idle", config, Limits::default());
    let mut idle: Vec<_> = (0..20).map(|_| scene.connect()).collect();
    let mut good = scene.client("good");
    assert_eq!(good.call(READ, 0, 512, &[]).len(), 512);
    // The oldest ones went.
    assert_eq!(idle[0].read(&mut [0]).unwrap(), 0);
    wait("only so many are left", || scene.server.connections() <= 5);
}

#[test]
fn a_flood_of_negotiations_meets_only_itself() {
    let (a, _b) = UnixStream::pair().unwrap();
    let socket = Arc::new(OwnedFd::from(a));
    let mut live = HashMap::new();
    let mut add = |id: u64, peer: Peer, negotiating: bool| {
        let socket = Arc::downgrade(&socket);
        live.insert(
            id,
            Connection {
                socket,
                peer,
                negotiating,
            },
        );
        surplus(&live)
    };
    assert_eq!(add(1, Peer::Process(1000, 7), false), None);
    assert_eq!(add(2, Peer::Process(1000, 8), true), Some(2));
    assert_eq!(add(3, Peer::Host(1), true), Some(2));
    assert_eq!(add(4, Peer::Host(2), true), Some(2));
    assert_eq!(add(5, Peer::Host(2), true), Some(4));
    assert_eq!(add(6, Peer::Unknown, true), Some(4));
}

#[test]
fn threads_of_negotiations_are_counted_while_they_exist() {
    let path = std::env::temp_dir().join(format!("pvblk-nbd-{}-threads", std::process::id()));
    // As the end of a connection that hangs: threads stay where their negotiations are over.
    let device = MemDevice::with(MIB, Limits::default());
    let shut = device.door.lock();
    let disk = Disk::new("bad", Arc::clone(&device) as _, Tracing::off());
    let service = service(vec![Arc::new(disk)]);
    let config = NbdConfig {
        max_handshakes: 2,
        ..NbdConfig::default()
    };
    let addr = format!("unix:{}", path.display()).parse().unwrap();
    let server = NbdServer::bind(&addr, config, &service).unwrap();
    let most = 2 * THREADS_EACH;
    const CLIENTS: usize = 12;
    let clients: Vec<UnixStream> = (0..CLIENTS)
        .map(|n| {
            let mut s = UnixStream::connect(&path).unwrap();
            s.set_read_timeout(Some(HANG)).unwrap();
            // Flags, and the export by its name; nobody waits for the answers.
            let go = option(7, b"\0\0\0\x03bad\0\0");
            s.write_all(&[&3u32.to_be_bytes()[..], &go].concat())
                .unwrap();
            if n < most {
                wait("it is served", || {
                    device.entered.load(Ordering::Acquire) > n as u64
                });
            }
            s
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(device.entered.load(Ordering::Acquire), most as u64);
    assert!(server.shared.threads.load(Ordering::Acquire) <= most);
    drop(shut);
    wait("they end", || {
        device.passed.load(Ordering::Acquire) >= most as u64
    });
    drop(clients);
    wait("no thread is left", || {
        server.shared.threads.load(Ordering::Acquire) == 0
    });
}
