//! Random requests against a model, and random bytes. `PVBLK_SEED` repeats a run.

use super::*;
use crate::nbd::testing::{MODES, MemDevice, Rig, Rng, pattern};
use pvblk_protocol::nbd::{Mode, cflag, err};
use std::collections::HashMap;
use std::io::Write;

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZEROES: u16 = 6;
const MIB: usize = 1 << 20;

#[test]
fn random_requests_agree_with_a_model() {
    let mut rng = Rng::from_env(0x5eed);
    for round in 0..24 {
        let mode = MODES[round % 3];
        let limits = Limits {
            max_sectors: [65536, 8, 88, 24][round % 4],
            max_segments: [8192, 1, 11, 2][round % 4],
            logical_sector_bytes: [512, 512, 4096][round % 3],
            optimal_bytes: [0, 0, 196_608, 1 << 20, 65536][round % 5],
            write_zeroes: round % 4 != 3,
            ..Limits::default()
        };
        let block = limits.logical_sector_bytes as usize;
        let size = 2 * MIB as u64;
        let device = MemDevice::with(size as usize, limits);
        let config = NbdConfig {
            depth: 1 + rng.below(40) as u32,
            ..NbdConfig::default()
        };
        let mut rig = Rig::new(&device, mode, &config);
        if round % 3 == 0 {
            rig.narrow_socket();
        }
        let mut model = vec![0u8; size as usize];
        let mut expected = HashMap::new();
        for _ in 0..40 {
            let mut bytes = Vec::new();
            // Zeros that are written step by step may be overtaken by later requests.
            let alone = rng.below(4) == 0;
            while alone && !expected.is_empty() {
                check_reply(&mut rig, &mut expected);
            }
            let count = if alone { 1 } else { 1 + rng.below(30) };
            for _ in 0..count {
                let most = [8, 64, 600, 1400][rng.below(4) as usize];
                let mut len = (1 + rng.below(most)) * 512;
                let mut offset = rng.below(size / 512) * 512;
                if rng.below(3) == 0 {
                    // Parts of blocks at either end or both.
                    offset = (offset + rng.below(1000)).min(size - 1);
                    len = 1 + rng.below(len);
                }
                let all = [READ, READ, WRITE, WRITE, TRIM, ZEROES, FLUSH];
                let mut command = if alone {
                    ZEROES
                } else {
                    all[rng.below(7) as usize]
                };
                let whole = (offset | len).is_multiple_of(block as u64);
                if command == ZEROES && !alone && !(whole && limits.write_zeroes) {
                    command = WRITE;
                }
                let (offset, len) = if command == FLUSH {
                    (0, 0)
                } else {
                    (offset, len)
                };
                let flags = if rng.below(4) == 0 { cflag::FUA } else { 0 };
                let (cookie, header) = rig.encode(command, flags, offset, len as u32);
                bytes.extend(header);
                let payload = pattern(len as usize, rng.below(256) as u8);
                if command == WRITE {
                    bytes.extend(&payload);
                }
                let range = offset as usize..(offset + len) as usize;
                let want = match (offset + len <= size, command) {
                    (false, WRITE | ZEROES) => (err::ENOSPC, vec![]),
                    (false, _) => (err::EINVAL, vec![]),
                    (true, READ) => (0, model[range].to_vec()),
                    (true, WRITE) => {
                        model[range].copy_from_slice(&payload);
                        (0, vec![])
                    }
                    (true, FLUSH) => (0, vec![]),
                    (true, TRIM) => {
                        let from = range.start.next_multiple_of(block);
                        let until = (range.end / block * block).max(from);
                        model[from..until].fill(0);
                        (0, vec![])
                    }
                    (true, _) => {
                        model[range].fill(0);
                        (0, vec![])
                    }
                };
                expected.insert(cookie, want);
            }
            // In pieces of any size.
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let n = (1 + rng.below(100_000) as usize).min(rest.len());
                rig.send(&rest[..n]);
                rest = &rest[n..];
                if rng.below(4) == 0 {
                    config.pressure.squeeze();
                }
            }
            if alone || rng.below(3) == 0 {
                while !expected.is_empty() {
                    check_reply(&mut rig, &mut expected);
                }
                assert!(*device.data.lock() == model);
            }
        }
        while !expected.is_empty() {
            check_reply(&mut rig, &mut expected);
        }
        assert!(rig.nothing_more());
        assert!(*device.data.lock() == model);
        assert_eq!(rig.source.memory.pool().used_pages(), 0);
    }
}

fn check_reply(rig: &mut Rig, expected: &mut HashMap<u64, (u32, Vec<u8>)>) {
    let r = rig.reply();
    let want = expected
        .remove(&r.cookie)
        .expect("a reply to a request of ours");
    assert!(
        (r.error, &r.data) == (want.0, &want.1),
        "{}: {} {}",
        r.cookie,
        r.error,
        want.0
    );
}

#[test]
fn random_bytes_never_panic() {
    let mut rng = Rng::from_env(99);
    for _ in 0..300 {
        let device = MemDevice::sized(MIB);
        let mut rig = Rig::new(&device, Mode::Structured, &NbdConfig::default());
        let mut bytes = Vec::new();
        for _ in 0..rng.below(20) {
            let command = rng.below(10) as u16;
            let flags = rng.power(17) as u16;
            let offset = rng.power(63);
            let len = rng.power(33) as u32;
            bytes.extend(rig.encode(command, flags, offset, len).1);
            bytes.extend(pattern(rng.below(2000) as usize / 512 * 512, 4));
        }
        let mut client = rig.client.take().unwrap();
        let _ = client.write(&bytes);
        drop(client);
        rig.settle();
        assert!(rig.end.is_some());
    }
}
