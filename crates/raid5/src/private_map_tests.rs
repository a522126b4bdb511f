use super::*;
use crate::bitmap::PAGE_BYTES;
use crate::testing::{
    Named, assembled, disks, get, options, prepared, random_array, superblock, without,
};
use crate::{Consistency, CreateOptions, add_spare, create, sleepy};

fn has_map(disk: &Named) -> bool {
    let superblock = superblock(disk);
    let map = superblock.private_map().expect("room");
    let page = get(&disk.1, map.sector, PAGE_BYTES);
    let header = BitmapHeader::parse(&page).ok();
    header.is_some_and(|h| h.is_private() && h.is_current(superblock.events))
        && superblock.keeps_map()
}

#[test]
fn a_map_is_kept_from_now_on_or_no_more() {
    for consistency in [Consistency::Ppl, Consistency::Resync] {
        let disks = disks(3);
        let how = CreateOptions {
            private_map: false,
            ..options(consistency)
        };
        create(disks.clone(), &how, &mut sleepy()).expect("an array");
        let mut assembly = prepared(&disks, false).expect("prepared");
        assert!(assembly.bitmap.is_none() && !has_map(&disks[0]));
        assert!(set_private_map(&mut assembly, true, &mut sleepy()).expect("kept"));
        assert!(!set_private_map(&mut assembly, true, &mut sleepy()).expect("kept before"));
        assert!(disks.iter().all(has_map));
        // The next start finds it, with nothing marked.
        let mut assembly = prepared(&disks, false).expect("prepared");
        let map = assembly.bitmap.as_ref().expect("a map");
        assert!(map.header().is_private() && map.is_clean());
        assert!(set_private_map(&mut assembly, false, &mut sleepy()).expect("erased"));
        assert!(!disks.iter().any(has_map));
        let assembly = prepared(&disks, false).expect("prepared");
        assert!(assembly.bitmap.is_none());
        assert!(!superblock(&disks[0]).keeps_map());
    }
}

/// A spare that has one from before doesn't bring it back.
#[test]
fn a_spare_has_a_map_as_long_as_the_array_has() {
    let mut all = disks(4);
    let spare = all.pop().expect("four");
    let how = options(Consistency::Ppl);
    create(all.clone(), &how, &mut sleepy()).expect("an array");
    let mut assembly = prepared(&all, false).expect("prepared");
    let add = |assembly: &mut Assembly| {
        let (name, device) = &spare;
        add_spare(assembly, name, device, true, &mut sleepy()).expect("added");
    };
    add(&mut assembly);
    assert!(has_map(&spare));
    set_private_map(&mut assembly, false, &mut sleepy()).expect("erased");
    assert!(!has_map(&spare));
    assembly.spares.clear();
    set_private_map(&mut assembly, true, &mut sleepy()).expect("kept");
    add(&mut assembly);
    assert!(has_map(&spare));
    assembly.spares.clear();
    set_private_map(&mut assembly, false, &mut sleepy()).expect("erased");
    assert!(has_map(&spare), "nobody named it");
    let spare_is_named = disks_and(&all, &spare);
    let mut assembly = prepared(&spare_is_named, false).expect("prepared");
    assert!(!set_private_map(&mut assembly, false, &mut sleepy()).expect("erased"));
    assert!(!has_map(&spare));
}

fn disks_and(disks: &[Named], other: &Named) -> Vec<Named> {
    disks.iter().chain([other]).cloned().collect()
}

/// Nobody knows what the missing one lacks.
#[test]
fn a_map_of_a_degraded_array_marks_all() {
    let disks = disks(4);
    let how = CreateOptions {
        private_map: false,
        ..options(Consistency::Ppl)
    };
    create(disks.clone(), &how, &mut sleepy()).expect("an array");
    let left = without(&disks, &[2]);
    let mut assembly = prepared(&left, false).expect("prepared");
    set_private_map(&mut assembly, true, &mut sleepy()).expect("kept");
    let assembly = prepared(&left, false).expect("prepared");
    let map = assembly.bitmap.as_ref().expect("a map");
    assert!(map.marks().all(|is_set| is_set));
}

#[test]
fn an_array_with_a_bitmap_needs_none() {
    let disks = disks(3);
    random_array(&disks, Consistency::Bitmap, true);
    let mut assembly = prepared(&disks, false).expect("prepared");
    let refused = set_private_map(&mut assembly, true, &mut sleepy());
    let refused = refused.expect_err("two of them").to_string();
    assert!(refused.contains("needs no map"), "{refused}");
    assert!(!assembled(&disks).expect("an array").newest().keeps_map());
}

/// The chunks are 64 KiB and more, and few enough for a page.
#[test]
fn the_chunks_of_a_map_fit_its_page() {
    let chunk = |sectors| {
        let header = BitmapHeader::private([7; 16], sectors)?;
        assert!(header.area_bytes() == PAGE_BYTES && header.is_private());
        assert_eq!(BitmapHeader::parse(&header.encode()), Ok(header.clone()));
        Some(header.chunk_bytes)
    };
    let gib = 1 << 21;
    assert_eq!(chunk(1), Some(64 << 10));
    assert_eq!(chunk(gib / 4), Some(64 << 10));
    assert_eq!(chunk(100 * gib), Some(32 << 20));
    assert_eq!(chunk(1024 * gib), Some(64 << 20));
    assert_eq!(chunk(2048 * gib), Some(128 << 20));
    assert_eq!(chunk(61_440 * gib), Some(2 << 30));
    assert_eq!(chunk(61_441 * gib), None);
}
