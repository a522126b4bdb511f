//! Target `nbd_handshake`: the negotiation fed with any bytes in any pieces.
//!
//! The pieces make no difference; replies are well-formed and in order, and every option gets what it must get:
//! any number of replies of its own and then exactly one that ends it.

use crate::nbd_device::{PatternDisk, SECTORS};
use arbitrary::{Result, Unstructured};
use pvblk_backend::{Disk, Disks};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Limits};
use pvblk_export::nbd::{Handshake, Negotiated, Step};
use pvblk_protocol::nbd::{Mode, tflag};
use std::sync::Arc;

const IHAVEOPT: &[u8; 8] = b"IHAVEOPT";
const REPLY: [u8; 8] = 0x0003_e889_0455_65a9u64.to_be_bytes();

enum End {
    More,
    Done(Box<Negotiated>),
    Aborted,
    Refused,
}

/// Feeds all bytes; returns what was sent, how it ended, and the bytes fed.
fn feed(table: &Disks, bytes: &[u8], mut piece: impl FnMut() -> usize) -> (Vec<u8>, End, usize) {
    let mut handshake = Handshake::new(table);
    let mut sent = handshake.take_output();
    let mut fed = 0;
    while fed < bytes.len() {
        let n = piece().clamp(1, bytes.len() - fed);
        let mut step = handshake.feed(&bytes[fed..fed + n]);
        fed += n;
        loop {
            let output = handshake.take_output();
            assert!(output.len() < 64 << 10, "unbounded output");
            sent.extend(output);
            match step {
                Ok(Step::Output) => step = handshake.feed(&[]),
                _ => break,
            }
        }
        let end = match step {
            Ok(Step::More | Step::Output) => continue,
            Ok(Step::Done(n)) => End::Done(n),
            Ok(Step::StartTls) => panic!("TLS where there is none"),
            Ok(Step::Aborted) => End::Aborted,
            Err(_) => End::Refused,
        };
        assert!(handshake.feed(b"x").is_err(), "it goes on after its end");
        return (sent, end, fed);
    }
    (sent, End::More, fed)
}

pub fn nbd_handshake(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok((bytes, pieces)) = input(&mut u) else {
        return;
    };
    let device: Arc<dyn BlockDevice> = Arc::new(PatternDisk::new(Limits::default()));
    let disk = |name: &str| Arc::new(Disk::new(name, Arc::clone(&device), Tracing::off()));
    let table = Disks::new(vec![disk("disk"), disk("other")]);
    let (whole, end, fed) = feed(&table, &bytes, || usize::MAX);
    let mut next = pieces.iter().cycle();
    let piece = || next.next().map_or(1, |&n| usize::from(n));
    let (cut, end_cut, fed_cut) = feed(&table, &bytes, piece);
    assert!(fed_cut <= fed);
    assert_eq!(cut, whole, "the pieces make a difference");
    assert_eq!(
        std::mem::discriminant(&end),
        std::mem::discriminant(&end_cut)
    );
    if let (End::Done(a), End::Done(b)) = (&end, &end_cut) {
        assert_eq!(a.export, b.export);
        let rest = &bytes[fed_cut - b.leftover.len()..];
        assert_eq!(a.leftover, rest, "bytes lost at the end");
        assert_eq!(b.leftover, bytes[fed_cut - b.leftover.len()..fed_cut]);
    }
    check(&bytes, &whole, &end);
}

/// Any bytes, or options that are mostly good.
fn input(u: &mut Unstructured<'_>) -> Result<(Vec<u8>, Vec<u16>)> {
    let pieces = (0..u.int_in_range(1..=6)?)
        .map(|_| u.int_in_range(1..=600))
        .collect::<Result<Vec<u16>>>()?;
    if u.ratio(1, 4)? {
        let rest = u.bytes(u.len())?;
        return Ok((rest.to_vec(), pieces));
    }
    let mut bytes = u.int_in_range(0..=3u32)?.to_be_bytes().to_vec();
    while !u.is_empty() {
        let kind = *u.choose(&[1u32, 2, 3, 5, 6, 6, 7, 8, 8, 9, 9, 10, 10, 11, 99])?;
        let name: &[u8] = u.choose(&[&b"disk"[..], b"other", b"", b"nobody", b"\xff"])?;
        let payload = match kind {
            1 => name.to_vec(),
            6 | 7 => {
                let mut p = (name.len() as u32).to_be_bytes().to_vec();
                p.extend(name);
                let infos: Vec<u16> = u.arbitrary()?;
                p.extend((infos.len() as u16).to_be_bytes());
                p.extend(infos.iter().flat_map(|i| (i % 5).to_be_bytes()));
                p
            }
            9 | 10 => {
                let mut p = (name.len() as u32).to_be_bytes().to_vec();
                p.extend(name);
                let queries: &[&[u8]] = &[
                    b"base:allocation",
                    b"base:",
                    b"x-pvblk:cache",
                    b"x-pvblk:",
                    b"qemu:x",
                    b"",
                ];
                let n = *u.choose(&[0u32, 1, 2, 3, 64, 65])?;
                p.extend(n.to_be_bytes());
                for _ in 0..n {
                    let q = u.choose(queries)?;
                    p.extend((q.len() as u32).to_be_bytes());
                    p.extend(*q);
                }
                p
            }
            _ if u.ratio(1, 8)? => u.bytes(3)?.to_vec(),
            _ => Vec::new(),
        };
        bytes.extend(IHAVEOPT);
        bytes.extend(kind.to_be_bytes());
        let lie = if u.ratio(1, 16)? {
            u.int_in_range(-2..=2)?
        } else {
            0i32
        };
        bytes.extend(
            (payload.len() as u32)
                .wrapping_add_signed(lie)
                .to_be_bytes(),
        );
        bytes.extend(payload);
    }
    Ok((bytes, pieces))
}

fn word(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Walks over what the client sent and what it got.
fn check(input: &[u8], output: &[u8], end: &End) {
    assert_eq!(&output[..18], b"NBDMAGICIHAVEOPT\0\x03");
    let mut out = &output[18..];
    let Some((_, mut rest)) = input.split_first_chunk::<4>() else {
        return;
    };
    let fixed = input[3] & 1 != 0;
    let (mut structured, mut extended) = (false, false);
    while let Some((header, after)) = rest.split_first_chunk::<16>() {
        let (option, len) = (word(header, 8), word(header, 12) as usize);
        if &header[..8] != IHAVEOPT || after.len() < len || out.is_empty() {
            break;
        }
        rest = &after[len..];
        if option == 1 {
            // The old way: no reply but the disk's size and flags.
            let End::Done(n) = end else { break };
            assert!(!extended, "the old way after extended headers");
            assert_eq!(out[..8], (SECTORS * 512).to_be_bytes());
            assert_eq!(out[8..10], n.transmission_flags.to_be_bytes());
            assert_eq!(out.len(), if n.no_zeroes { 10 } else { 134 });
            return;
        }
        assert!(fixed, "a reply to a client that doesn't understand it");
        // One reply ends it: an acknowledgement or an error.
        let last = loop {
            assert!(out.len() >= 20 && out[..8] == REPLY, "a malformed reply");
            let (to, kind, len) = (word(out, 8), word(out, 12), word(out, 16) as usize);
            assert_eq!(to, option, "a reply to something else");
            assert!(len <= 8192 && out.len() >= 20 + len);
            out = &out[20 + len..];
            if kind == 1 || kind >= 1 << 31 {
                break kind;
            }
            let expected = match option {
                3 => kind == 2,
                6 | 7 => kind == 3,
                9 | 10 => kind == 4 && (structured || extended),
                _ => false,
            };
            assert!(expected, "reply {kind} to option {option}");
        };
        let known = [2, 3, 6, 7, 8, 9, 10, 11].contains(&option);
        assert!(known || last >= 1 << 31, "success of an unknown option");
        structured |= option == 8 && last == 1;
        extended |= option == 11 && last == 1;
        if (option == 2 || option == 7) && last == 1 {
            match end {
                End::Aborted => assert_eq!(option, 2),
                End::Done(n) => {
                    let mode = match (structured, extended) {
                        (_, true) => Mode::Extended,
                        (true, false) => Mode::Structured,
                        _ => Mode::Simple,
                    };
                    assert_eq!((option, n.mode), (7, mode));
                    assert!(n.mode.has_chunks() || n.contexts.is_empty());
                    let by_payload = n.transmission_flags & tflag::BLOCK_STATUS_PAYLOAD != 0;
                    let may = n.mode == Mode::Extended && !n.contexts.is_empty();
                    assert_eq!(by_payload, may);
                    assert_eq!(n.leftover, rest);
                }
                _ => panic!("the negotiation goes on after its end"),
            }
            break;
        }
    }
    assert!(out.is_empty(), "replies to nothing");
}
