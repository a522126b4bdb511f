use super::*;
use crate::testing::{
    Named, assembled, disks, get, junk, options, prepared, put, roles, superblock, wrong_stripes,
};
use crate::{BitmapHeader, Role, find_newest, sleepy};

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

/// `m0` and so on; one is missing, and the last are spares.
fn incomplete(disks: &[Named], missing: usize, spares: usize) -> NewMembers {
    let (members, spares) = disks.split_at(disks.len() - spares);
    let members = members.iter().enumerate();
    NewMembers {
        members: members
            .map(|(n, d)| (n != missing).then(|| d.clone()))
            .collect(),
        spares: spares.to_vec(),
    }
}

#[test]
fn one_member_can_be_missing() {
    for consistency in [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl] {
        let disks = disks(5);
        for (_, disk) in &disks {
            put(disk, 0, &junk(3 << 20));
        }
        let options = CreateOptions {
            force: true,
            ..options(consistency)
        };
        let mut idle = sleepy();
        let made = create(incomplete(&disks, 0, 1), &options, &mut idle).expect("an array");
        // The missing member's data is defined by parity, so parity is right.
        assert!(!made.dirty && made.failed() == Some(0));
        let found = assembled(&disks[1..]).expect("an array");
        assert!(!found.dirty && found.failed() == Some(0));
        assert_eq!(found.geometry, made.geometry);
        assert_eq!(
            found.notes,
            [
                "m4 is a spare",
                "the array is degraded: no member at place 0",
                "m4 will be rebuilt for place 0"
            ]
        );
        for (disk, made) in disks[1..].iter().zip(made.present().chain(&made.spares)) {
            assert_eq!(superblock(disk), made.superblock);
        }
        assert_eq!(
            (superblock(&disks[4]).dev_number, roles(&disks[1])[0]),
            (4, Role::Spare)
        );
        // It can be served.
        let found = prepared(&disks[1..], false).expect("prepared");
        assert_eq!((found.failed(), found.events()), (Some(0), 0));
        if let Some(bitmap) = found.bitmap {
            assert!(!bitmap.is_clean(), "it missed everything");
        }
    }
    let disks = disks(5);
    let mut two = incomplete(&disks, 0, 1);
    two.members[2] = None;
    let error = create(two, &options(Consistency::Ppl), &mut sleepy()).err();
    let error = error.expect("refused").to_string();
    assert!(error.contains("2 members are missing"), "{error}");
}

#[test]
fn spares_are_as_large_as_members() {
    let mut disks = disks(5);
    disks[4].1 = pvblk_volume::open("mem:2600k").expect("memory");
    let all = || incomplete(&disks, 9, 1);
    let usual = options(Consistency::Ppl);
    let made = create(all(), &usual, &mut sleepy()).expect("an array");
    assert_eq!(made.geometry.member_sectors(), 1088, "what the spare has");
    assert!(!made.dirty && made.failed().is_none());
    assert_eq!(assembled(&disks).expect("an array").spares.len(), 1);
    let larger = CreateOptions {
        size_sectors: Some(2048),
        force: true,
        ..usual
    };
    let error = create(all(), &larger, &mut sleepy()).err();
    let error = error.expect("refused").to_string();
    assert!(
        error.contains("raid5 spare of 5200 sectors: it needs 6144"),
        "{error}"
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
