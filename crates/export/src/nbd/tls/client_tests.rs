//! Our own client over TLS, against our own server.

use super::*;
use pvblk_block::{BlockDevice, Buffer, Completion, Extent, ExtentKind, Op, Queue};
use pvblk_block::{QueueContext, Readiness, Request, Status};
use pvblk_client::nbd::{NbdClient, NbdClientConfig, NbdUri};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::path::Path;

/// A client's directory of credentials.
fn folder(trusted: &Authority, client: Option<&Signed>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("ca-cert.pem", &trusted.certificate);
    if let Some(client) = client {
        write("client-cert.pem", &client.certificate);
        write("client-key.pem", &client.key);
    }
    folder
}

fn uri(socket: &Path, folder: &Path, more: &str) -> NbdUri {
    let (socket, folder) = (socket.display(), folder.display());
    let text = format!("nbds+unix:///disk?socket={socket}&tls-certificates={folder}{more}");
    text.parse().unwrap()
}

/// Runs requests to their end, sleeping as a worker does.
fn run(queue: &mut Queue, mut batch: Vec<Box<Request>>) -> Vec<Completion> {
    queue.submit(&mut batch);
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.poll(&mut done);
        if queue.in_flight() == 0 || queue.arm() == Readiness::Ready {
            continue;
        }
        let fd = queue.wait_fd().unwrap();
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        let minute = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let woken = rustix::event::poll(&mut fds, Some(&minute)).unwrap();
        assert!(woken > 0, "nobody wakes the queue");
        queue.woken();
    }
    assert!(done.iter().all(|c| c.status == Status::Ok));
    done
}

#[test]
fn our_client_reads_what_it_wrote() {
    let device = MemDevice::sized(8 << 20);
    let bed = Bed::new(&device, Vec::new());
    let vm1 = bed.authority.client("vm1", Time::Now);
    let folder = folder(&bed.authority, Some(&vm1));
    let uri = uri(&bed.socket, folder.path(), "");
    let client = NbdClient::connect(&uri, NbdClientConfig::default()).unwrap();
    let client: Arc<dyn BlockDevice> = Arc::new(client);
    let mut queue = Queue::open(&client, &QueueContext::new(64)).unwrap();
    let data = pattern(8 << 20, 5);
    // Sizes that are a part of a message, one, and many; one at a time and all together.
    for (len, together) in [
        (512, 1),
        (4096, 64),
        (16 << 10, 64),
        (1 << 20, 8),
        (4 << 20, 2),
    ] {
        let ranges: Vec<usize> = (0..data.len() / len).collect();
        device.data.lock().fill(0);
        for some in ranges[..ranges.len().min(256)].chunks(together) {
            for op in [Op::Write, Op::Read] {
                let one = |&n: &usize| {
                    let buffer = Buffer::anonymous(len.next_multiple_of(4096)).unwrap();
                    let buffer = buffer.slice(0, len).unwrap();
                    if op == Op::Write {
                        buffer.write(0, &data[n * len..][..len]);
                    }
                    let sector = (n * len / 512) as u64;
                    Request::with_buffers(op, sector, vec![buffer], n as u64)
                };
                for done in run(&mut queue, some.iter().map(one).collect()) {
                    let n = done.request.tag as usize;
                    let back = done.request.buffers[0].to_vec();
                    assert!(back == data[n * len..][..len], "{len}: request {n}");
                }
            }
        }
        let written = ranges.len().min(256) * len;
        assert!(device.data.lock()[..written] == data[..written], "{len}");
    }
    let mut found = Vec::new();
    device.data.lock()[4 << 20..].fill(0);
    client.extents(0, 16384, &mut found).unwrap();
    let last: &Extent = found.last().unwrap();
    assert_eq!((last.sector, last.kind), (8192, ExtentKind::Hole));
    run(&mut queue, vec![Request::new(Op::Flush, 0, 0, 0)]);
}

#[test]
fn our_client_trusts_nobody_else() {
    let device = MemDevice::sized(1 << 20);
    let bed = Bed::new(&device, Vec::new());
    let vm1 = bed.authority.client("vm1", Time::Now);
    let connect = |folder: &tempfile::TempDir, more| {
        let uri = uri(&bed.socket, folder.path(), more);
        let made = NbdClient::connect(&uri, NbdClientConfig::default());
        made.err().map(|e| e.to_string())
    };
    let good = folder(&bed.authority, Some(&vm1));
    assert_eq!(connect(&good, ""), None);
    assert_eq!(connect(&good, "&tls-hostname=127.0.0.1"), None);
    let stranger = Authority::default();
    let other = connect(&folder(&stranger, Some(&vm1)), "").unwrap();
    assert!(other.contains("certificate"), "{other}");
    let other = connect(&good, "&tls-hostname=nbd.example").unwrap();
    assert!(other.contains("not valid for name"), "{other}");
    let none = connect(&folder(&bed.authority, None), "").unwrap();
    assert!(none.contains("CertificateRequired"), "{none}");
    let empty = tempfile::tempdir().unwrap();
    let missing = connect(&empty, "").unwrap();
    assert!(missing.contains("ca-cert.pem"), "{missing}");
    for e in [other, none, missing] {
        assert!(!e.contains('\n'), "{e}");
    }
    // In the clear it is told to use TLS.
    let plain = NbdUri::new(NbdAddr::Unix(bed.socket.clone()), "disk");
    let made = NbdClient::connect(&plain, NbdClientConfig::default());
    let e = made.err().unwrap().to_string();
    assert!(e.contains("nbds+unix://"), "{e}");
}

/// A server without TLS isn't spoken to.
#[test]
fn our_client_needs_the_tls_that_it_was_told_of() {
    let device = MemDevice::sized(1 << 20);
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("nbd");
    let address = NbdAddr::Unix(socket.clone());
    let service = service_of(&device);
    let _server = NbdServer::bind(&address, NbdConfig::default(), &service).unwrap();
    let authority = Authority::default();
    let folder = folder(&authority, None);
    let uri = uri(&socket, folder.path(), "");
    let made = NbdClient::connect(&uri, NbdClientConfig::default());
    let e = made.err().unwrap().to_string();
    assert!(e.contains("the server has no TLS"), "{e}");
}
