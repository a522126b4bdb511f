use super::*;
use crate::nbd::testing::{MemDevice, service_of};
use pvblk_testing::wait;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};

/// A server whose connections are served by a real back end; tells how each ended.
fn serve(addr: &str, config: NbdConfig) -> (NbdServer, Arc<MemDevice>, Receiver<SourceEnd>) {
    let device = MemDevice::sized(1 << 20);
    let service = service_of(&device);
    let (tell, ends) = channel();
    let told = Arc::new(move |disk: &str, _: &str, end| {
        assert_eq!(disk, "disk");
        let _ = tell.send(end);
    });
    let server = NbdServer::telling(&addr.parse().unwrap(), config, &service, told).unwrap();
    (server, device, ends)
}

fn unix_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("pvblk-nbd-{}-server-{name}", std::process::id()))
}

fn exact(s: &mut impl Read, n: usize) -> Vec<u8> {
    let mut b = vec![0; n];
    s.read_exact(&mut b).unwrap();
    b
}

/// Negotiates the export the old way: 18 bytes of greeting, 10 of answer.
fn negotiate_old(s: &mut (impl Read + Write)) {
    exact(s, 18);
    s.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk")
        .unwrap();
    assert_eq!(exact(s, 10)[..8], (1u64 << 20).to_be_bytes());
}

fn read_request(cookie: u64) -> Vec<u8> {
    let mut b = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
    b.extend(cookie.to_be_bytes());
    b.extend(4096u64.to_be_bytes());
    b.extend(4096u32.to_be_bytes());
    b
}

#[test]
fn connections_are_served_over_both_families() {
    let path = unix_path("both");
    let (unix, device, ends) = serve(&format!("unix:{}", path.display()), NbdConfig::default());
    device.data.lock()[4096..8192].fill(0x5a);
    let mut s = UnixStream::connect(&path).unwrap();
    negotiate_old(&mut s);
    s.write_all(&read_request(9)).unwrap();
    assert_eq!(exact(&mut s, 16)[8..], 9u64.to_be_bytes());
    assert_eq!(exact(&mut s, 4096), [0x5a; 4096]);
    assert_eq!(unix.connections(), 1);
    drop(s);
    assert!(matches!(
        ends.recv_timeout(Duration::from_secs(60)).unwrap(),
        SourceEnd::Closed
    ));
    wait("the connection is off the list", || unix.connections() == 0);
    drop(unix);
    assert!(!path.exists());

    let (tcp, _device, _ends) = serve("tcp:127.0.0.1:0", NbdConfig::default());
    let NbdAddr::Tcp { host, port } = tcp.local_addr() else {
        panic!("not TCP");
    };
    let mut s = TcpStream::connect((host.as_str(), port)).unwrap();
    negotiate_old(&mut s);
    s.write_all(&read_request(10)).unwrap();
    assert_eq!(exact(&mut s, 16 + 4096)[8..16], 10u64.to_be_bytes());
}

#[test]
fn stopping_answers_what_was_sent_and_closes() {
    let path = unix_path("stop");
    let (mut server, _device, ends) =
        serve(&format!("unix:{}", path.display()), NbdConfig::default());
    let mut served = UnixStream::connect(&path).unwrap();
    negotiate_old(&mut served);
    served.write_all(&read_request(0)).unwrap();
    exact(&mut served, 16 + 4096);
    let mut negotiating = UnixStream::connect(&path).unwrap();
    exact(&mut negotiating, 18);
    for cookie in 0..10 {
        served.write_all(&read_request(cookie)).unwrap();
    }
    server.stop();
    assert!(matches!(
        ends.recv_timeout(Duration::from_secs(60)).unwrap(),
        SourceEnd::Closed
    ));
    let mut rest = Vec::new();
    served.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 10 * (16 + 4096));
    assert_eq!(negotiating.read(&mut [0; 8]).unwrap(), 0);
    assert!(UnixStream::connect(&path).is_err());
    wait("the list is empty", || server.connections() == 0);
}

#[test]
fn a_client_that_never_reads_does_not_stop_the_stop() {
    let path = unix_path("deaf");
    let (mut server, _device, ends) =
        serve(&format!("unix:{}", path.display()), NbdConfig::default());
    let mut s = UnixStream::connect(&path).unwrap();
    negotiate_old(&mut s);
    s.set_nonblocking(true).unwrap();
    let mut last = Instant::now();
    while last.elapsed() < Duration::from_millis(200) {
        if s.write(&read_request(1)).is_ok() {
            last = Instant::now();
        }
    }
    let begun = Instant::now();
    server.stop();
    assert!(begun.elapsed() >= LINGER);
    // Its lane is detached by those who serve it; here it ends with its client.
    drop(s);
    ends.recv_timeout(Duration::from_secs(60)).unwrap();
}

#[test]
fn surplus_clients_are_cut() {
    let path = unix_path("surplus");
    let config = NbdConfig {
        max_handshakes: 2,
        handshake_timeout: Duration::from_secs(600),
        ..NbdConfig::default()
    };
    let (server, _device, _ends) = serve(&format!("unix:{}", path.display()), config);
    let mut served = UnixStream::connect(&path).unwrap();
    negotiate_old(&mut served);
    // Once it is answered it doesn't count as negotiating any more.
    served.write_all(&read_request(0)).unwrap();
    exact(&mut served, 16 + 4096);
    let mut slow = [(); 2].map(|()| greeted(&path));
    let newest = greeted(&path);
    assert_eq!(slow[0].read(&mut [0; 8]).unwrap(), 0);
    drop((slow, newest));
    wait("they are gone", || server.connections() == 1);
    served.write_all(&read_request(1)).unwrap();
    exact(&mut served, 16 + 4096);
}

/// A client that was greeted and hasn't answered.
fn greeted(path: &Path) -> UnixStream {
    let mut s = UnixStream::connect(path).unwrap();
    exact(&mut s, 18);
    s
}

#[test]
fn slow_clients_are_cut() {
    let path = unix_path("slow");
    let config = NbdConfig {
        handshake_timeout: Duration::from_millis(300),
        ..NbdConfig::default()
    };
    let (server, _device, _ends) = serve(&format!("unix:{}", path.display()), config);
    let mut slow = [(); 2].map(|()| greeted(&path));
    // A byte now and then doesn't help.
    wait("it is cut", || slow[0].write_all(&[0]).is_err());
    assert_eq!(slow[1].read(&mut [0; 8]).unwrap(), 0);
    wait("the slow ones are gone", || server.connections() == 0);
}
