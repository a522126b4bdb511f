//! Servers that make no sense, and the client's answers to them; real servers are in tests/vhost_client.rs.

use super::config::{CONFIG_BYTES, Terms, wanted};
use super::*;
use pvblk_protocol::vhost_user::{Header, flags, message};
use pvblk_protocol::virtio::MOST_PIECES;
use pvblk_protocol::virtio::Offer;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use zerocopy::FromBytes;

fn space_of(limits: Limits) -> (u64, [u8; CONFIG_BYTES]) {
    let offer = Offer::new(limits, 4);
    let space = offer.config(9000);
    (offer.features(), space[..CONFIG_BYTES].try_into().unwrap())
}

#[test]
fn our_own_offer_is_understood() {
    let limits = Limits {
        logical_sector_bytes: 4096,
        physical_sector_bytes: 16384,
        volatile_cache: true,
        ..Limits::default()
    };
    let (offered, space) = space_of(limits);
    let terms = Terms::new(wanted(offered).unwrap(), &space, 256).unwrap();
    let small = Terms::new(wanted(offered).unwrap(), &space, 4).unwrap();
    assert_eq!(small.limits.max_segments, 1);
    assert_eq!(terms.sectors, 9000);
    let seen = terms.limits;
    assert_eq!(
        (seen.logical_sector_bytes, seen.physical_sector_bytes),
        (4096, 16384)
    );
    assert!(seen.volatile_cache && seen.write_zeroes && !seen.read_only);
    assert_eq!(seen.discard_granularity_bytes, 4096);
    assert!(terms.has_event_index() && seen.max_segments > 1 && seen.max_sectors >= 256);
}

#[test]
fn what_we_cannot_do_without_is_named() {
    let (offered, mut space) = space_of(Limits::default());
    for bit in [32, 28, 30] {
        let e = wanted(offered & !(1 << bit)).unwrap_err().to_string();
        assert!(e.contains("doesn't offer") && !e.contains('\n'), "{e}");
    }
    space[20..24].copy_from_slice(&520u32.to_le_bytes());
    let e = Terms::new(offered, &space, 256).unwrap_err().to_string();
    assert!(e.contains("520"), "{e}");
    space[20..24].copy_from_slice(&512u32.to_le_bytes());
    space[8..12].copy_from_slice(&1024u32.to_le_bytes());
    let e = Terms::new(offered, &space, 256).unwrap_err().to_string();
    assert!(e.contains("1024"), "{e}");
}

/// qemu-storage-daemon offers a limit of segments' sizes, and says 0; others offer none at all.
#[test]
fn a_limit_of_0_or_that_is_not_offered_is_none() {
    let (offered, mut space) = space_of(Limits::default());
    space[8..16].fill(0);
    let without = offered & !(1 << 1 | 1 << 2);
    for features in [
        offered,
        offered | 1 << 1,
        offered | 1 << 1 | 1 << 2,
        without,
    ] {
        let terms = Terms::new(features, &space, 256).unwrap();
        let seen = (terms.segment_bytes, terms.limits.max_segments);
        assert_eq!(seen, (1 << 20, MOST_PIECES as u32 / 2), "{features:#x}");
    }
    // One that is offered holds.
    space[8..12].copy_from_slice(&65536u32.to_le_bytes());
    space[12..16].copy_from_slice(&20u32.to_le_bytes());
    let terms = Terms::new(offered | 1 << 1 | 1 << 2, &space, 256).unwrap();
    assert_eq!(
        (terms.segment_bytes, terms.limits.max_segments),
        (65536, 10)
    );
}

/// The answer to a request of that number; `None`: the connection ends.
type Answer = Box<dyn Fn(u32) -> Option<Vec<u8>> + Send>;

/// A server that answers with whatever `say` makes of a question.
fn liar(say: Answer) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("liar");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let Ok((mut socket, _)) = listener.accept() else {
            return;
        };
        let mut head = [0; 12];
        while socket.read_exact(&mut head).is_ok() {
            let head = Header::read_from_bytes(&head).unwrap();
            let mut body = vec![0; head.size as usize];
            let _ = socket.read_exact(&mut body);
            let Some(answer) = say(head.request) else {
                return;
            };
            let _ = socket.write_all(&answer);
        }
    });
    (dir, path)
}

#[test]
fn a_server_that_makes_no_sense_is_refused_in_one_line() {
    let good = |request: u32, payload: &[u8]| message(request, flags::REPLY, payload);
    let offered = space_of(Limits::default()).0;
    let told: [(&str, Answer); 5] = [
        ("closed the connection", Box::new(|_| None)),
        ("no number", Box::new(move |r| Some(good(r, &[1, 2, 3])))),
        (
            "one to request 77",
            Box::new(move |_| Some(good(77, &[0; 8]))),
        ),
        (
            "bytes",
            Box::new(|r| Some(message(r, flags::REPLY, &[0; 2000]))),
        ),
        (
            "another kind",
            Box::new(move |r| {
                let number = if r == 1 { offered } else { 0 };
                Some(good(r, &number.to_le_bytes()))
            }),
        ),
    ];
    for (why, say) in told {
        let (_dir, path) = liar(say);
        let e = VhostClient::connect(&path, &VhostClientConfig::default());
        let e = e.err().expect("it must be refused").to_string();
        assert!(e.contains(why) && !e.contains('\n'), "{e}");
    }
}

#[test]
fn settings_are_checked_before_anything_is_asked() {
    for (queues, entries) in [(0, 64), (65, 64), (1, 3), (1, 100), (1, 2048)] {
        let config = VhostClientConfig {
            queues,
            entries,
            ..VhostClientConfig::default()
        };
        let e = VhostClient::connect(Path::new("/nonexistent"), &config);
        let e = e.err().expect("it must be refused").to_string();
        assert!(e.contains("queue"), "{e}");
    }
}
