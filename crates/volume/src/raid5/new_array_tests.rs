use super::*;
use crate::raid5::testing::{assembled, disks, get, options, put, superblock, wrong_stripes};
use crate::raid5::{BitmapHeader, Role, find_newest, sleepy};

#[test]
fn empty_disks_make_a_clean_array() {
    for consistency in [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl] {
        let disks = disks(4);
        let made = create(disks.clone(), &options(consistency), &mut sleepy()).expect("an array");
        assert!(!made.dirty);
        assert!(wrong_stripes(&made).is_empty());
        let found = assembled(&disks).expect("an array");
        assert!(!found.dirty && found.failed().is_none() && found.notes.is_empty());
        assert_eq!(found.geometry, made.geometry);
        for (place, (disk, made)) in disks.iter().zip(made.present()).enumerate() {
            let sb = superblock(disk);
            assert_eq!(sb, made.superblock);
            assert_eq!(sb.role(), Role::Active(place as u16));
            match (consistency, sb.policy()) {
                (Consistency::Resync, Policy::Resync) => {}
                (Consistency::Ppl, Policy::Ppl(log)) => {
                    let area = get(&disk.1, log.sector, log.sectors as usize * 512);
                    let newest = find_newest(&area, ppl_signature(&sb.set_uuid));
                    assert_eq!(newest.map(|n| n.header.entries.len()), Ok(0));
                }
                (Consistency::Bitmap, Policy::Bitmap { sector }) => {
                    let area = get(&disk.1, sector, 4096);
                    let header = BitmapHeader::parse(&area).expect("a bitmap");
                    assert!(header.is_current(sb.events));
                    let bitmap = WriteIntent::load(&area, true, 0).expect("a bitmap");
                    assert!(bitmap.is_clean());
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn disks_with_data_make_a_dirty_one() {
    let disks = disks(3);
    // Before the data of the array it doesn't matter.
    put(&disks[1].1, 100, &[1; 512]);
    let made = create(disks.clone(), &options(Consistency::Ppl), &mut sleepy());
    let made = made.expect("an array");
    assert!(!made.dirty);
    let offset = superblock(&disks[0]).data_offset_sectors;
    put(&disks[1].1, offset + 77, &[1; 512]);
    let again = CreateOptions {
        force: true,
        ..options(Consistency::Bitmap)
    };
    let made = create(disks.clone(), &again, &mut sleepy()).expect("an array");
    assert!(made.dirty);
    assert!(assembled(&disks).expect("an array").dirty);
    let assumed = CreateOptions {
        assume_clean: true,
        ..again
    };
    assert!(
        !create(disks, &assumed, &mut sleepy())
            .expect("an array")
            .dirty
    );
}

#[test]
fn wishes_are_checked_before_anything_is_written() {
    let disks = disks(3);
    let refuse = |options: &CreateOptions, what: &str| {
        let made = create(disks.clone(), options, &mut sleepy());
        let error = made.err().expect(what).to_string();
        assert!(error.contains(what), "{error}");
    };
    let usual = options(Consistency::Ppl);
    let most = CreateOptions {
        size_sectors: Some(2048),
        ..usual.clone()
    };
    let more = CreateOptions {
        size_sectors: Some(2080),
        ..usual.clone()
    };
    refuse(&more, "the smallest has 2048 for data");
    for (_, disk) in &disks {
        assert!(get(disk, 0, 3 << 20).iter().all(|&b| b == 0));
    }
    let made = create(disks.clone(), &most, &mut sleepy()).expect("an array");
    assert_eq!(made.geometry.member_sectors(), 2048);
    refuse(&usual, "m0 is a member of array \"host:test\" (");
    let less = CreateOptions {
        size_sectors: Some(1000),
        force: true,
        ..usual
    };
    let made = create(disks.clone(), &less, &mut sleepy()).expect("an array");
    assert_eq!(made.geometry.member_sectors(), 992, "whole chunks");
    assert_eq!(assembled(&disks).expect("an array").geometry, made.geometry);
}
