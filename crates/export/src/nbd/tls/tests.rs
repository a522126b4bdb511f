//! A server with TLS, and clients of another kind: rustls's blocking ones.

use super::{Clients, Credentials, Tls};
use crate::nbd::testing::{MemDevice, pattern, service_of};
use crate::nbd::{NbdConfig, NbdServer, Rights, Rule, Rules, Who};
use parking_lot::Mutex;
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{NbdAddr, opt, rep, tflag, u32_at, u64_at};
use pvblk_testing::certs::{Authority, Signed, Time};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Secured = StreamOwned<ClientConnection, UnixStream>;

/// A server of one disk, and its authority.
struct Bed {
    authority: Authority,
    credentials: Arc<Mutex<Credentials>>,
    tls: Arc<Tls>,
    socket: PathBuf,
    _server: NbdServer,
    _folder: tempfile::TempDir,
}

fn credentials(authority: &Authority) -> Credentials {
    let server = authority.server();
    Credentials {
        certificate: server.certificate.into_bytes(),
        key: server.key.into_bytes(),
        authorities: Some(authority.certificate.clone().into_bytes()),
        revoked: None,
    }
}

impl Bed {
    fn new(device: &Arc<MemDevice>, rules: Vec<Rule>) -> Bed {
        let authority = Authority::default();
        let credentials = Arc::new(Mutex::new(credentials(&authority)));
        let read = Arc::clone(&credentials);
        let read = move || Ok(read.lock().clone());
        let tls = Tls::new(true, Clients::MustHaveCertificates, Box::new(read)).unwrap();
        let tls = Arc::new(tls);
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nbd");
        let config = NbdConfig {
            tls: Some(Arc::clone(&tls)),
            rules: Rules::new(rules),
            ..NbdConfig::default()
        };
        let address = NbdAddr::Unix(socket.clone());
        let server = NbdServer::bind(&address, config, &service_of(device)).unwrap();
        Bed {
            authority,
            credentials,
            tls,
            socket,
            _server: server,
            _folder: folder,
        }
    }

    /// A connection after `NBD_OPT_STARTTLS`.
    fn connect(&self) -> UnixStream {
        let mut plain = UnixStream::connect(&self.socket).unwrap();
        plain
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let mut hello = [0; 18];
        plain.read_exact(&mut hello).unwrap();
        plain.write_all(&3u32.to_be_bytes()).unwrap();
        send_option(&mut plain, opt::STARTTLS, b"").unwrap();
        assert_eq!(reply(&mut plain).unwrap().0, rep::ACK);
        plain
    }

    /// The same, with TLS whose handshake has not begun.
    fn secure(&self, trusted: &Authority, client: Option<&Signed>) -> Secured {
        let mut roots = RootCertStore::empty();
        let root = CertificateDer::from_pem_slice(trusted.certificate.as_bytes()).unwrap();
        roots.add(root).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match client {
            None => config.with_no_client_auth(),
            Some(client) => {
                let chain = CertificateDer::from_pem_slice(client.certificate.as_bytes());
                let key = PrivateKeyDer::from_pem_slice(client.key.as_bytes()).unwrap();
                let chain = vec![chain.unwrap()];
                config.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let name = "localhost".try_into().unwrap();
        let session = ClientConnection::new(Arc::new(config), name).unwrap();
        StreamOwned::new(session, self.connect())
    }

    /// A client with a certificate of this name, and the transmission flags of the disk.
    fn client(&self, name: &str) -> io::Result<(Secured, u16)> {
        let client = self.authority.client(name, Time::Now);
        go(self.secure(&self.authority, Some(&client)))
    }
}

fn send_option(to: &mut impl Write, option: u32, payload: &[u8]) -> io::Result<()> {
    let mut bytes = proto::IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    to.write_all(&bytes)
}

/// An option reply: its type and payload.
fn reply(from: &mut impl Read) -> io::Result<(u32, Vec<u8>)> {
    let mut head = [0; 20];
    from.read_exact(&mut head)?;
    let mut payload = vec![0; u32_at(&head, 16) as usize];
    from.read_exact(&mut payload)?;
    Ok((u32_at(&head, 12), payload))
}

/// Asks for the disk.
fn go(mut client: Secured) -> io::Result<(Secured, u16)> {
    let mut payload = 4u32.to_be_bytes().to_vec();
    payload.extend(b"disk\0\0");
    send_option(&mut client, opt::GO, &payload)?;
    let mut flags = 0;
    loop {
        match reply(&mut client)? {
            (rep::ACK, _) => return Ok((client, flags)),
            (rep::INFO, info) if info[..2] == [0, 0] => {
                flags = u16::from_be_bytes([info[10], info[11]]);
            }
            (rep::INFO, _) => {}
            (kind, _) => return Err(io::Error::other(format!("refused: {kind:#x}"))),
        }
    }
}

fn request(command: u16, cookie: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = proto::REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend((len as u32).to_be_bytes());
    bytes
}

/// A simple reply: its cookie and error.
fn answer(from: &mut impl Read) -> io::Result<(u64, u32)> {
    let mut head = [0; 16];
    from.read_exact(&mut head)?;
    Ok((u64_at(&head, 8), u32_at(&head, 4)))
}

#[test]
fn data_go_in_and_come_back_in_all_sizes() {
    let device = MemDevice::sized(1 << 20);
    let bed = Bed::new(&device, Vec::new());
    let (mut client, _) = bed.client("vm1").unwrap();
    for (n, len) in [1, 511, 4096, 16 << 10, (16 << 10) + 1, 65_537, 300_000]
        .into_iter()
        .enumerate()
    {
        let data = pattern(len, n as u8);
        let mut bytes = request(1, n as u64, 100, len);
        bytes.extend(&data);
        client.write_all(&bytes).unwrap();
        assert_eq!(answer(&mut client).unwrap(), (n as u64, 0), "{len}");
        client.write_all(&request(0, 7, 100, len)).unwrap();
        assert_eq!(answer(&mut client).unwrap(), (7, 0), "{len}");
        let mut back = vec![0; len];
        client.read_exact(&mut back).unwrap();
        assert!(back == data, "{len}");
    }
    // Many in flight, more than the socket takes: replies come while requests go.
    let many = 64;
    let all: Vec<u8> = (0..many).flat_map(|n| request(0, n, 0, 65_536)).collect();
    client.write_all(&all).unwrap();
    let mut left: Vec<u64> = (0..many).collect();
    let mut data = vec![0; 65_536];
    while !left.is_empty() {
        let (cookie, error) = answer(&mut client).unwrap();
        assert_eq!(error, 0);
        left.retain(|&n| n != cookie);
        client.read_exact(&mut data).unwrap();
    }
    client.write_all(&request(2, 0, 0, 0)).unwrap();
    // The end is told.
    assert_eq!(client.read(&mut data).unwrap(), 0);
}

#[test]
fn clients_are_who_their_certificates_say() {
    let device = MemDevice::sized(1 << 20);
    let rule = |name: &str, rights| Rule {
        who: Who::Certificate(name.to_owned()),
        disk: Some("disk".to_owned()),
        rights,
    };
    let rules = vec![
        rule("vm1", Rights::ReadWrite),
        rule("backup", Rights::ReadOnly),
    ];
    let bed = Bed::new(&device, rules);
    let (_, flags) = bed.client("vm1").unwrap();
    assert_eq!(flags & tflag::READ_ONLY, 0);
    let (mut backup, flags) = bed.client("backup").unwrap();
    assert_ne!(flags & tflag::READ_ONLY, 0);
    let mut write = request(1, 1, 0, 512);
    write.extend([1; 512]);
    backup.write_all(&write).unwrap();
    assert_eq!(answer(&mut backup).unwrap(), (1, proto::err::EPERM));
    let other = bed.client("vm2").unwrap_err().to_string();
    assert!(other.contains("0x80000006"), "{other}");
    // Without a certificate, with an old one, and with another authority's.
    let stranger = Authority::default();
    for wrong in [
        None,
        Some(bed.authority.client("vm1", Time::Past)),
        Some(stranger.client("vm1", Time::Now)),
        Some(bed.authority.server()),
    ] {
        let refused = go(bed.secure(&bed.authority, wrong.as_ref()));
        assert!(refused.is_err());
    }
    // A client that trusts another authority goes.
    assert!(go(bed.secure(&stranger, None)).is_err());
}

#[test]
fn credentials_are_read_again() {
    let device = MemDevice::sized(1 << 20);
    let bed = Bed::new(&device, Vec::new());
    let before = bed.tls.config();
    *bed.credentials.lock() = credentials(&Authority::default());
    // They are fresh still.
    assert!(Arc::ptr_eq(&before, &bed.tls.config()));
    let age = |tls: &Tls| tls.now.lock().looked = Instant::now() - super::FRESH;
    age(&bed.tls);
    let after = bed.tls.config();
    assert!(!Arc::ptr_eq(&before, &after));
    // Those that are of no use are not taken.
    bed.credentials.lock().key = b"nonsense".to_vec();
    age(&bed.tls);
    assert!(Arc::ptr_eq(&after, &bed.tls.config()));
}

#[test]
fn useless_credentials_are_told() {
    let authority = Authority::default();
    let good = credentials(&authority);
    for (why, bad) in [
        (
            "there is none",
            Credentials {
                authorities: None,
                ..good.clone()
            },
        ),
        (
            "has none in PEM",
            Credentials {
                certificate: b"x".to_vec(),
                ..good.clone()
            },
        ),
        (
            "certificate and key",
            Credentials {
                key: credentials(&authority).key,
                ..good.clone()
            },
        ),
    ] {
        let read = move || Ok(bad.clone());
        let made = Tls::new(true, Clients::MustHaveCertificates, Box::new(read));
        let e = made.unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    }
}

#[test]
fn nonsense_instead_of_tls_ends_the_connection() {
    let device = MemDevice::sized(1 << 20);
    let bed = Bed::new(&device, Vec::new());
    for bytes in [
        &[0; 64][..],
        b"GET / HTTP/1.1\r\n\r\n",
        &[22, 3, 1, 255, 255],
    ] {
        let mut client = bed.connect();
        client.write_all(bytes).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).unwrap();
        assert!(rest.len() < 64, "{rest:?}");
    }
    let (mut client, _) = bed.client("vm1").unwrap();
    client.sock.write_all(&[23, 3, 3, 0, 20]).unwrap();
    client.sock.write_all(&[9; 20]).unwrap();
    assert!(answer(&mut client).is_err());
}

#[path = "client_tests.rs"]
mod client_tests;
