//! Parity that is made right later, and the bitmap that says where.

use super::*;
use crate::testing::{
    Named, assembled, change, dirty, disks, get, prepared, prepared_with, put, random_array, spoil,
    superblock, wrong_stripes,
};
use crate::{BitmapHeader, Consistency, NO_OFFSET, PAGE_BYTES, sleepy};

fn later(disks: &[Named]) -> Assembly {
    let options = AssembleOptions {
        resync_later: true,
        ..AssembleOptions::default()
    };
    prepared_with(disks, &options).expect("prepared")
}

fn offset(disk: &Named) -> u64 {
    superblock(disk).resync_offset_sectors
}

#[test]
fn all_but_the_first_stripe_is_left_for_later() {
    for consistency in [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl] {
        let disks = disks(4);
        let made = random_array(&disks, consistency, false);
        let sectors = made.geometry.member_sectors();
        for _ in 0..2 {
            // The second time it goes on there.
            let assembly = later(&disks);
            assert_eq!(assembly.unsynced, std::slice::from_ref(&(8..sectors)));
            assert!(!assembly.dirty);
            let wrong: Vec<u64> = (1..made.geometry.stripes()).collect();
            assert_eq!(wrong_stripes(&assembly), wrong, "the first is made right");
            assert_eq!(offset(&disks[2]), 8);
        }
        assert!(assembled(&disks).expect("an array").dirty);
        let assembly = prepared(&disks, false).expect("prepared");
        assert!(wrong_stripes(&assembly).is_empty() && assembly.unsynced.is_empty());
        assert_eq!(offset(&disks[2]), NO_OFFSET);
        assert!(later(&disks).unsynced.is_empty());
    }
}

/// The superblocks' record of the rest, and its use by the next start.
#[test]
fn the_rest_is_remembered() {
    for (consistency, while_dirty) in [
        (Consistency::Resync, 0),
        (Consistency::Bitmap, 0),
        (Consistency::Ppl, 800),
    ] {
        let disks = disks(4);
        random_array(&disks, consistency, false);
        let mut assembly = later(&disks);
        let sectors = assembly.geometry.member_sectors();
        let now = 8..800;
        let mut queues = Disks::open(&assembly).expect("disks");
        let done = std::slice::from_ref(&now);
        resync(&assembly, &mut queues, done, &mut |_, _| {}, &mut sleepy()).expect("done");
        assembly.unsynced = vec![800..1600, 1800..sectors];
        write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect("written");
        assert!(assembly.dirty);
        assert_eq!(offset(&disks[1]), while_dirty, "{consistency:?}");
        let found = assembled(&disks).expect("an array");
        assert_eq!(found.in_sync_sectors(), while_dirty);
        write_superblocks(&mut assembly, true, 6, &mut sleepy()).expect("written");
        assert!(!assembly.dirty);
        assert_eq!(offset(&disks[1]), 800, "{consistency:?}");
        let mut steps = Vec::new();
        let mut assembly = assembled(&disks).expect("an array");
        assert!(assembly.dirty && assembly.in_sync_sectors() == 800);
        let mut progress = |_, of| steps.push(of);
        let options = AssembleOptions::default();
        prepare(&mut assembly, &options, &mut progress, &mut sleepy()).expect("prepared");
        // The bitmap's chunk is all of it, and the map's have 128 sectors.
        let all = match consistency {
            Consistency::Bitmap => sectors,
            Consistency::Resync => sectors - 768,
            Consistency::Ppl => sectors - 800,
        };
        assert_eq!(steps.first(), Some(&all), "{consistency:?}");
        assert!(wrong_stripes(&assembly).is_empty());
    }
}

/// Degraded there is nothing that could be made right.
#[test]
fn nothing_is_left_of_a_degraded_array() {
    let disks = disks(4);
    random_array(&disks, Consistency::Ppl, true);
    dirty(&disks);
    let assembly = later(&disks[..3]);
    assert!(assembly.unsynced.is_empty() && assembly.failed() == Some(3));
    assert_eq!(offset(&disks[0]), NO_OFFSET);
}

#[test]
fn ranges_become_whole_stripes() {
    let whole = |ranges: &[Range<u64>]| rounded(ranges.iter().cloned(), STRIPE_SECTORS, 80);
    assert_eq!(whole(&[]), []);
    assert_eq!(whole(&[3..3, 9..10, 17..24, 33..80]), [8..24, 32..80]);
    assert_eq!(whole(&[0..1, 8..9, 79..80]), [0..16, 72..80]);
}

/// An array whose bitmap has chunks of 64 KiB, 16 stripes, with those of some stripes set.
fn marked(disks: &[Named], stripes: &[u64]) -> u64 {
    random_array(disks, Consistency::Bitmap, false);
    let made = prepared(disks, false).expect("prepared");
    let sb = superblock(&disks[0]);
    let Policy::Bitmap { sector } = sb.policy() else {
        panic!("a bitmap");
    };
    let header = BitmapHeader {
        chunk_bytes: 64 << 10,
        sync_size_sectors: made.geometry.member_sectors(),
        events: sb.events,
        ..BitmapHeader::new(sb.set_uuid)
    };
    let mut bitmap = WriteIntent::new(header, false);
    for stripe in stripes {
        let _ = bitmap.start_write(stripe * 8, 8).expect("room");
    }
    for (_, disk) in disks {
        put(disk, sector, bitmap.area());
    }
    sector
}

fn bits(disk: &Named, sector: u64) -> [u8; 2] {
    let page = get(&disk.1, sector, PAGE_BYTES);
    [page[256], page[257]]
}

#[test]
fn the_bitmap_is_kept_track_of() {
    let disks = disks(4);
    let sector = marked(&disks, &[3, 40, 200]);
    let made = assembled(&disks).expect("an array");
    for stripe in [3, 40, 100] {
        spoil(&made, stripe);
    }
    dirty(&disks);
    let mut assembly = later(&disks);
    assert_eq!(assembly.unsynced, [8..128, 256..384, 1536..1664]);
    assert_eq!(wrong_stripes(&assembly), [3, 40, 100], "only the first");
    assert_eq!(
        (bits(&disks[1], sector), offset(&disks[1])),
        ([0b101, 0b10000], 8)
    );

    // As the core does it: a write, and one of the ranges made right. Bits stay while it is dirty.
    let bitmap = assembly.bitmap.as_mut().expect("a bitmap");
    let _ = bitmap.start_write(128, 8).expect("room");
    bitmap.end_write(128, 8, true);
    write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect("written");
    assert_eq!(
        (bits(&disks[1], sector), offset(&disks[1])),
        ([0b111, 0b10000], 0)
    );
    let ranges = std::slice::from_ref(&(8..128));
    let mut queues = Disks::open(&assembly).expect("disks");
    resync(
        &assembly,
        &mut queues,
        ranges,
        &mut |_, _| {},
        &mut sleepy(),
    )
    .expect("done");
    assembly.unsynced.remove(0);
    let bitmap = assembly.bitmap.as_mut().expect("a bitmap");
    bitmap.resynced(8..128);
    write_superblocks(&mut assembly, true, 6, &mut sleepy()).expect("written");
    for disk in &disks {
        assert_eq!((bits(disk, sector), offset(disk)), ([0b100, 0b10000], 256));
        let header = BitmapHeader::parse(&get(&disk.1, sector, PAGE_BYTES)).expect("a bitmap");
        assert_eq!(
            (header.events, header.events_cleared),
            (assembly.events(), assembly.events())
        );
    }
    let bitmap = assembly.bitmap.as_ref().expect("a bitmap");
    assert!(bitmap.pages().all(|page| !bitmap.is_unwritten(page)));

    // Another start does the rest.
    let assembly = prepared(&disks, false).expect("prepared");
    assert_eq!(wrong_stripes(&assembly), [100], "nothing said so");
    assert!(assembly.bitmap.as_ref().expect("a bitmap").is_clean());
    assert_eq!(
        (bits(&disks[1], sector), offset(&disks[1])),
        ([0, 0], NO_OFFSET)
    );
}

#[test]
fn bits_stay_while_a_member_is_missing() {
    let disks = disks(4);
    let sector = marked(&disks, &[40]);
    let mut assembly = prepared(&disks[..3], false).expect("degraded");
    let events = superblock(&disks[0]).events;
    let bitmap = assembly.bitmap.as_mut().expect("a bitmap");
    let _ = bitmap.start_write(0, 8).expect("room");
    bitmap.end_write(0, 8, true);
    write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect("written");
    write_superblocks(&mut assembly, true, 5, &mut sleepy()).expect("written");
    assert_eq!(bits(&disks[2], sector), [0b101, 0]);
    let header = BitmapHeader::parse(&get(&disks[2].1, sector, PAGE_BYTES)).expect("a bitmap");
    assert_eq!((header.events, header.events_cleared), (events + 2, 0));
    // The next start knows these sectors as missed by a member.
    let assembly = prepared(&disks[..3], false).expect("degraded");
    let bitmap = assembly.bitmap.as_ref().expect("a bitmap");
    let ranges: Vec<_> = bitmap.dirty_ranges().collect();
    assert_eq!(ranges, [0..128, 256..384]);
    assert!(assembly.unsynced.is_empty());
}

#[test]
fn bitmaps_are_made_alike() {
    let disks = disks(4);
    let sector = marked(&disks, &[]);
    let events = prepared(&disks, false).expect("prepared").events();
    // Of one member it is damaged: the others' is written to all.
    put(&disks[0].1, sector, &[7; 512]);
    let assembly = prepared(&disks, false).expect("prepared");
    assert_eq!(
        (assembly.events(), bits(&disks[0], sector)),
        (events + 1, [0, 0])
    );
    assert!(assembly.bitmap.as_ref().expect("a bitmap").is_clean());
    // None is current, but the array is clean: no bit is needed, and none stays.
    for disk in &disks {
        change(disk, |sb| sb.events += 5);
    }
    let assembly = prepared(&disks, false).expect("prepared");
    assert!(assembly.notes.is_empty() && assembly.unsynced.is_empty());
    assert_eq!(bits(&disks[3], sector), [0, 0]);
    assert!(assembly.bitmap.as_ref().expect("a bitmap").is_clean());
    // And there is none.
    for (_, disk) in &disks {
        put(disk, sector, &[7; 512]);
    }
    let error = prepared(&disks, false).err().expect("refused").to_string();
    assert!(error.contains("no member has the bitmap"), "{error}");
}
