use super::*;
use crate::{Geometry, Layout};

const CHUNK: u64 = 8;

/// A header for so many chunks of 4 KiB, the last of them half.
fn header(chunks: u64) -> BitmapHeader {
    BitmapHeader {
        chunk_bytes: 4096,
        sync_size_sectors: chunks * CHUNK - 4,
        ..BitmapHeader::new([7; 16])
    }
}

fn health(events: u64) -> Health {
    Health {
        events,
        degraded: false,
    }
}

/// Writes a page, at once and well.
fn write(bitmap: &mut WriteIntent, page: usize) -> Vec<u8> {
    let write = bitmap.begin_page(page).expect("no other write");
    let bytes = bitmap.page(page).to_vec();
    bitmap.end_page(write, true);
    bytes
}

fn ranges(bitmap: &WriteIntent) -> Vec<(u64, u64)> {
    let ranges = bitmap.dirty_ranges();
    ranges.map(|r| (r.start, r.end)).collect()
}

fn settled(chunks: u64) -> WriteIntent {
    let mut bitmap = WriteIntent::new(header(chunks), false);
    for page in bitmap.pages() {
        write(&mut bitmap, page);
    }
    bitmap
}

#[test]
fn what_md_wrote_is_read_and_written_back() {
    // mdadm 4.4 on Linux 6.12.101; written to, and stopped.
    let bytes = include_bytes!("../testdata/bitmap-stopped.header");
    let header = BitmapHeader::parse(bytes).expect("a header");
    assert_eq!(header.encode()[..], bytes[..256]);
    assert_eq!((header.events, header.events_cleared), (2, 1));
    assert_eq!((header.bits(), header.area_bytes()), (1, 4096));
    assert_eq!(
        (header.chunk_bytes, header.sync_size_sectors),
        (64 << 20, 47104)
    );
    let geometry = Geometry::new(4, 128, Layout::RightSymmetric, 47104).expect("a geometry");
    assert_eq!(header.check(&header.uuid, &geometry, 8), Ok(()));
    assert_eq!(header.check(&[0; 16], &geometry, 8), Err(BitmapError::Uuid));
    let room = header.check(&header.uuid, &geometry, 7);
    assert_eq!(
        room,
        Err(BitmapError::NoRoom {
            sectors: 8,
            room: 7
        })
    );
    let other = Geometry::new(4, 128, Layout::RightSymmetric, 46000).expect("a geometry");
    assert!(matches!(
        header.check(&header.uuid, &other, 8),
        Err(BitmapError::OtherSize { .. })
    ));
}

#[test]
fn headers_that_cannot_be_honoured_are_named() {
    let refuse = |at: usize, value: u32, what: &str| {
        let mut bytes = header(100).encode();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = BitmapHeader::parse(&bytes).expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(error.lines().count(), 1);
    };
    refuse(0, 1, "not its magic");
    refuse(4, 3, "byte order");
    refuse(4, 5, "clustered");
    refuse(4, 6, "lockless");
    refuse(4, 7, "unknown");
    refuse(52, 4097, "power of two");
    refuse(52, 256, "power of two");
    refuse(52, 0, "power of two");
    refuse(44, 0x4000_0000, "too much");
    let none = BitmapHeader {
        sync_size_sectors: 0,
        ..header(1)
    };
    assert!(BitmapHeader::parse(&none.encode()).is_err());
    assert_eq!(BitmapHeader::parse(&[0; 255]), Err(BitmapError::Short));
    let area = header(100_000).encode();
    let short = WriteIntent::load(&area, true, 0);
    assert!(matches!(short, Err(BitmapError::Short)));
}

#[test]
fn a_bitmap_is_current_at_its_events_and_one_ahead() {
    let at = |events, state| BitmapHeader {
        events,
        state,
        ..header(1)
    };
    assert!(at(5, 0).is_current(5));
    assert!(at(6, 0).is_current(5));
    assert!(!at(4, 0).is_current(5));
    assert!(!at(7, 0).is_current(5));
    assert!(!at(5, 2).is_current(5));
    assert!(at(0, 0).is_current(0));
}

#[test]
fn a_bit_is_on_disk_before_its_write() {
    let mut bitmap = settled(40_000);
    let first = bitmap.start_write(30_719 * CHUNK, 16).expect("counted");
    // The last chunk of page 0 and the first of page 1: the header takes the room of 2048 bits.
    assert_eq!(first.pages().collect::<Vec<_>>(), [0, 1]);
    assert!(!bitmap.is_durable(&first));
    // Another write to the same chunk waits for the same pages.
    let second = bitmap.start_write(30_719 * CHUNK + 4, 1).expect("counted");
    assert_eq!(second.pages().collect::<Vec<_>>(), [0]);
    let page = write(&mut bitmap, 0);
    assert_eq!(page[4095], 0x80);
    assert!(bitmap.is_durable(&second) && !bitmap.is_durable(&first));
    assert_eq!(write(&mut bitmap, 1)[0], 1);
    assert!(bitmap.is_durable(&first));
    // Now a write there needs nothing.
    let third = bitmap.start_write(30_719 * CHUNK, 16).expect("counted");
    assert_eq!(third, Intent::default());
    assert!(bitmap.is_durable(&third));
}

#[test]
fn a_bit_set_during_a_page_write_needs_another() {
    let mut bitmap = settled(100);
    let first = bitmap.start_write(0, 8).expect("counted");
    let writing = bitmap.begin_page(0).expect("no other write");
    let second = bitmap.start_write(8, 8).expect("counted");
    assert_eq!(bitmap.begin_page(0), None, "one write at a time");
    bitmap.end_page(writing, true);
    assert!(bitmap.is_durable(&first) && !bitmap.is_durable(&second));
    assert!(bitmap.is_unwritten(0));
    let writing = bitmap.begin_page(0).expect("no other write");
    bitmap.end_page(writing, false);
    assert!(!bitmap.is_durable(&second), "that one failed");
    write(&mut bitmap, 0);
    assert!(bitmap.is_durable(&second) && !bitmap.is_unwritten(0));
}

#[test]
fn bits_go_two_sweeps_after_the_last_write() {
    let mut bitmap = settled(100);
    bitmap.start_write(0, 8).expect("counted");
    write(&mut bitmap, 0);
    for _ in 0..5 {
        assert_eq!(bitmap.sweep(health(0)), [] as [usize; 0], "in use");
    }
    bitmap.end_write(0, 8, true);
    assert_eq!(bitmap.sweep(health(0)), [] as [usize; 0]);
    // Used again in between: two more.
    bitmap.start_write(0, 8).expect("counted");
    bitmap.end_write(0, 8, true);
    assert_eq!(bitmap.sweep(health(0)), [] as [usize; 0]);
    assert_eq!(bitmap.sweep(health(0)), [0]);
    assert!(bitmap.is_clean());
    assert_eq!(write(&mut bitmap, 0)[256], 0);
}

#[test]
fn events_are_on_disk_before_a_bit_goes() {
    let mut bitmap = settled(100);
    bitmap.start_write(0, 8).expect("counted");
    write(&mut bitmap, 0);
    bitmap.end_write(0, 8, true);
    bitmap.sweep(health(9));
    assert_eq!(bitmap.sweep(health(9)), [0], "first the counter");
    assert_eq!(bitmap.header().events_cleared, 9);
    assert_eq!(
        bitmap.sweep(health(9)),
        [] as [usize; 0],
        "not written so far"
    );
    let page = write(&mut bitmap, 0);
    assert_eq!((page[32], page[256]), (9, 1));
    assert_eq!(bitmap.sweep(health(9)), [0]);
    assert_eq!(write(&mut bitmap, 0)[256], 0);

    let intent = bitmap.set_events(10);
    assert!(!bitmap.is_durable(&intent));
    assert_eq!(write(&mut bitmap, 0)[24], 10);
    assert!(bitmap.is_durable(&intent));
}

#[test]
fn nothing_goes_while_degraded_or_needed() {
    let mut bitmap = settled(100);
    bitmap.start_write(0, 16).expect("counted");
    write(&mut bitmap, 0);
    bitmap.end_write(0, 8, true);
    bitmap.end_write(8, 8, false);
    let degraded = Health {
        events: 3,
        degraded: true,
    };
    for _ in 0..5 {
        assert_eq!(bitmap.sweep(degraded), [] as [usize; 0]);
    }
    assert_eq!(bitmap.header().events_cleared, 0);
    // Complete again: the one that reached all goes, the other has to be resynchronised.
    for _ in 0..5 {
        bitmap.sweep(health(4));
        write(&mut bitmap, 0);
    }
    assert_eq!(bitmap.page(0)[256], 0b10);
    assert_eq!(ranges(&bitmap), [(8, 16)]);
    bitmap.resynced(9..16);
    bitmap.resynced(8..15);
    assert!(bitmap.dirty_ranges().next().is_some(), "only a part");
    bitmap.resynced(8..16);
    assert_eq!(bitmap.dirty_ranges().next(), None);
    for _ in 0..3 {
        bitmap.sweep(health(4));
    }
    assert!(bitmap.is_clean());
}

#[test]
fn what_was_set_is_dirty_after_a_start() {
    let mut bitmap = settled(100);
    for (chunk, chunks) in [(0, 2), (5, 1), (98, 2)] {
        let sectors = (chunks * CHUNK).min(100 * CHUNK - 4 - chunk * CHUNK);
        bitmap.start_write(chunk * CHUNK, sectors).expect("counted");
    }
    let area: Vec<u8> = bitmap.pages().flat_map(|p| write(&mut bitmap, p)).collect();
    let load = |current, from| WriteIntent::load(&area, current, from).expect("a bitmap");
    assert_eq!(ranges(&load(true, 0)), [(0, 16), (40, 48), (784, 796)]);
    assert_eq!(ranges(&load(true, 17)), [(40, 48), (784, 796)]);
    assert_eq!(ranges(&load(true, 47)), [(40, 48), (784, 796)]);
    assert_eq!(ranges(&load(true, u64::MAX)), []);
    assert_eq!(ranges(&load(false, 0)), [(0, 796)]);
    assert!(load(false, 0).is_unwritten(0) && !load(true, 0).is_unwritten(0));
    // Bits without need go by sweeping alone.
    let mut clean = load(true, u64::MAX);
    clean.sweep(health(0));
    clean.sweep(health(0));
    assert!(clean.is_clean());
    // The end of the last chunk, which isn't whole.
    let mut all = load(false, 0);
    all.resynced(0..796);
    assert_eq!(ranges(&all), []);
    assert_eq!(all.page(0), load(false, 0).page(0));
}

#[test]
fn an_orderly_end_keeps_what_is_needed() {
    let mut bitmap = settled(100);
    let _ = bitmap.start_write(0, 8).expect("room");
    bitmap.end_write(0, 8, false);
    let _ = bitmap.start_write(8, 8).expect("room");
    bitmap.end_write(8, 8, true);
    let _ = bitmap.start_write(16, 8).expect("room");
    bitmap.renew(7);
    assert_eq!(bitmap.header().events_cleared, 0);
    assert_eq!(bitmap.page(0)[256], 0b111);
    bitmap.clear_unneeded();
    assert_eq!(bitmap.header().events_cleared, 7);
    assert_eq!(bitmap.page(0)[256], 0b101, "needed, and being written");
    assert!(bitmap.is_unwritten(0));
    assert_eq!(bitmap.area()[..PAGE_BYTES], *bitmap.page(0));
    bitmap.all_written();
    assert!(!bitmap.is_unwritten(0));
    let loaded = WriteIntent::load(bitmap.area(), true, 0).expect("a bitmap");
    assert_eq!(ranges(&loaded), [(0, 8), (16, 24)]);
    // One that is too old and is written whole is current.
    let mut old = header(3);
    old.state = 2;
    let mut bitmap = WriteIntent::new(old, true);
    bitmap.renew(9);
    assert!(bitmap.header().is_current(9));
}

/// The first stripe is made right before all others, so the range after it counts for all of its
/// chunk.
#[test]
fn the_first_stripe_does_not_hold_its_chunk_up() {
    let big = BitmapHeader {
        chunk_bytes: 64 << 10,
        ..header(100)
    };
    let mut all = WriteIntent::new(big, true);
    all.resynced(9..800);
    assert_eq!(ranges(&all), [(0, 128)]);
    all.resynced(8..127);
    assert_eq!(ranges(&all), [(0, 128)]);
    all.resynced(8..128);
    assert_eq!(ranges(&all), []);
}

#[test]
fn too_many_writers_have_to_wait() {
    let mut bitmap = settled(3);
    for _ in 0..COUNT - 2 {
        assert!(bitmap.start_write(8, 8).is_some());
    }
    assert_eq!(bitmap.start_write(0, 16), None);
    assert_eq!(bitmap.counters[0], 0, "nothing was changed");
    bitmap.end_write(8, 8, true);
    assert!(bitmap.start_write(0, 16).is_some());
}

/// Any order of writes, sweeps, page writes and crashes against the bits that must be on disk.
#[test]
fn no_crash_loses_a_dirty_chunk() {
    for seed in pvblk_testing::seeds(1, 20) {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Around the edge of the first page.
        const FIRST: u64 = 30_720 - 20;
        let chunks = 30_720 + 20;
        let mut bitmap = settled(chunks);
        let mut disk: Vec<u8> = bitmap
            .pages()
            .flat_map(|p| bitmap.page(p).to_vec())
            .collect();
        let mut waiting: Vec<(u64, u64, Intent)> = Vec::new();
        let mut issued: Vec<(u64, u64)> = Vec::new();
        let mut writing: Vec<(PageWrite, Vec<u8>)> = Vec::new();
        let mut must_stay = vec![false; chunks as usize];
        let mut state = health(1);
        let on_disk = |disk: &[u8], chunk: u64| {
            let (byte, mask) = bit(chunk as usize);
            disk[byte] & mask != 0
        };
        for _ in 0..1500 {
            match rng.u32(0..12) {
                0..=2 => {
                    let sector = (FIRST + rng.u64(0..35)) * CHUNK + rng.u64(0..8);
                    let sectors = rng.u64(1..20);
                    if let Some(intent) = bitmap.start_write(sector, sectors) {
                        waiting.push((sector, sectors, intent));
                    }
                }
                3..=4 if !issued.is_empty() => {
                    let (sector, sectors) = issued.swap_remove(rng.usize(0..issued.len()));
                    let everywhere = !state.degraded && rng.u32(0..20) > 0;
                    bitmap.end_write(sector, sectors, everywhere);
                    if !everywhere {
                        let last = (sector + sectors - 1) / CHUNK;
                        (sector / CHUNK..=last).for_each(|c| must_stay[c as usize] = true);
                    }
                }
                5..=6 => {
                    let page = rng.usize(0..2);
                    if let Some(write) = bitmap.begin_page(page) {
                        writing.push((write, bitmap.page(page).to_vec()));
                    }
                }
                7..=8 if !writing.is_empty() => {
                    let (write, bytes) = writing.swap_remove(rng.usize(0..writing.len()));
                    let ok = rng.u32(0..10) > 0;
                    if ok || rng.bool() {
                        let at = write.page * PAGE_BYTES;
                        let before = disk.clone();
                        disk[at..at + PAGE_BYTES].copy_from_slice(&bytes);
                        let gone = (0..chunks).any(|c| on_disk(&before, c) && !on_disk(&disk, c));
                        let header = BitmapHeader::parse(&before).expect("a header");
                        // Nothing was cleared after a member left with an older counter than this.
                        assert!(!gone || header.events_cleared > 0, "seed {seed}");
                    }
                    bitmap.end_page(write, ok);
                }
                9 => {
                    for page in bitmap.sweep(state) {
                        assert!(bitmap.is_unwritten(page), "seed {seed}");
                    }
                }
                10 if rng.u32(0..10) == 0 => {
                    state.degraded = !state.degraded;
                    state.events += 1;
                    bitmap.set_events(state.events);
                }
                11 if !state.degraded && rng.u32(0..10) == 0 => {
                    bitmap.resynced(0..chunks * CHUNK);
                    must_stay.fill(false);
                }
                _ => {}
            }
            let ready = |w: &(u64, u64, Intent)| bitmap.is_durable(&w.2);
            issued.extend(waiting.iter().filter(|w| ready(w)).map(|w| (w.0, w.1)));
            waiting.retain(|w| !bitmap.is_durable(&w.2));
            // After a crash now, the writes under way and those that a member missed are found.
            let after = WriteIntent::load(&disk, true, 0).expect("a bitmap");
            let dirty: Vec<_> = after.dirty_ranges().collect();
            for &(sector, sectors) in &issued {
                let end = (sector + sectors).min(chunks * CHUNK - 4);
                let found = dirty.iter().any(|d| d.start <= sector && end <= d.end);
                assert!(found, "seed {seed}: {sector} is being written");
            }
            for chunk in (FIRST..chunks).filter(|&c| must_stay[c as usize]) {
                assert!(on_disk(&disk, chunk), "seed {seed}: chunk {chunk}");
            }
        }
        // Left alone, it becomes clean.
        for (write, _) in writing {
            bitmap.end_page(write, false);
        }
        for (sector, sectors, _) in waiting {
            bitmap.end_write(sector, sectors, true);
        }
        for (sector, sectors) in issued {
            bitmap.end_write(sector, sectors, true);
        }
        bitmap.resynced(0..chunks * CHUNK);
        state.degraded = false;
        for _ in 0..4 {
            bitmap.sweep(state);
            let fresh: Vec<Vec<u8>> = bitmap.pages().map(|p| write(&mut bitmap, p)).collect();
            disk = fresh.concat();
        }
        assert!(bitmap.is_clean(), "seed {seed}");
        assert!((0..chunks).all(|c| !on_disk(&disk, c)), "seed {seed}");
    }
}
