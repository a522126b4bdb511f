use super::*;
use crate::raid5::testing::{assembled, change, disks, forced, options, put, random_array};
use crate::raid5::{BadBlock, Consistency, create, sleepy};

/// Four members, clean, of one event.
fn array() -> Vec<(String, Arc<dyn BlockDevice>)> {
    let disks = disks(4);
    create(disks.clone(), &options(Consistency::Ppl), &mut sleepy()).expect("an array");
    for disk in &disks {
        change(disk, |sb| sb.events = 10);
    }
    disks
}

fn refused(disks: &[(String, Arc<dyn BlockDevice>)], what: &str) {
    let error = assembled(disks).err().expect(what).to_string();
    assert!(error.contains(what), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

fn places(assembly: &Assembly) -> Vec<Option<&str>> {
    let members = assembly.members.iter();
    members
        .map(|m| m.as_ref().map(|m| m.name.as_str()))
        .collect()
}

#[test]
fn members_come_in_any_order() {
    let mut disks = array();
    disks.swap(0, 3);
    disks.swap(1, 2);
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(
        places(&assembly),
        [Some("m0"), Some("m1"), Some("m2"), Some("m3")]
    );
    assert_eq!(assembly.failed(), None);
    assert!(!assembly.dirty && assembly.notes.is_empty());
    assert_eq!(assembly.events(), 10);
    assert!(matches!(assembly.policy(), Policy::Ppl(_)));

    disks.pop();
    let assembly = assembled(&disks).expect("degraded");
    assert_eq!(assembly.failed(), Some(0));
    assert_eq!(
        assembly.notes,
        ["the array is degraded: no member at place 0"]
    );
    disks.pop();
    refused(
        &disks,
        "2 of them are usable, and 3 are needed; missing at 0, 1",
    );
}

/// One event behind is what a cut between two superblocks leaves; two are a member that missed something.
#[test]
fn stale_members_stay_out() {
    let disks = array();
    change(&disks[1], |sb| sb.events = 9);
    assert_eq!(assembled(&disks).expect("an array").failed(), None);
    change(&disks[1], |sb| sb.events = 8);
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(assembly.failed(), Some(1));
    assert!(assembly.notes[0].contains("m1 is stale (events 8, newest 10)"));
    // A stale one's opinion of the shape is of no interest.
    change(&disks[1], |sb| sb.chunk_sectors = 64);
    assert_eq!(assembled(&disks).expect("an array").failed(), Some(1));
    change(&disks[2], |sb| sb.events = 7);
    refused(&disks, "m2 is stale (events 7, newest 10)");
}

#[test]
fn who_was_thrown_out_does_not_come_back() {
    let disks = array();
    for disk in [&disks[0], &disks[2], &disks[3]] {
        change(disk, |sb| {
            sb.roles[1] = Role::Faulty;
            sb.events = 11;
        });
    }
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(assembly.failed(), Some(1));
    assert!(assembly.notes[0].contains("m1 is stale (events 10, newest 11): it was thrown out"));
    // It is enough that one of them says so.
    for disk in [&disks[0], &disks[2]] {
        change(disk, |sb| {
            sb.roles[1] = Role::Active(1);
            sb.events = 10;
        });
    }
    assert_eq!(assembled(&disks).expect("an array").failed(), Some(1));
}

#[test]
fn force_takes_the_freshest_of_the_stale() {
    let disks = array();
    change(&disks[2], |sb| sb.events = 4);
    change(&disks[1], |sb| sb.events = 6);
    change(&disks[0], |sb| sb.events = 5);
    refused(&disks, "1 of them are usable");
    let assembly = forced(&disks).expect("an array");
    assert_eq!(
        places(&assembly),
        [Some("m0"), Some("m1"), None, Some("m3")]
    );
    let taken = |n: &&String| n.contains("by force");
    assert_eq!(assembly.notes.iter().filter(taken).count(), 2);
    // Where nobody has to be forced, nobody is.
    change(&disks[1], |sb| sb.events = 10);
    change(&disks[0], |sb| sb.events = 10);
    assert_eq!(forced(&disks).expect("an array").failed(), Some(2));
}

#[test]
fn the_newest_says_whether_it_is_dirty() {
    let disks = array();
    change(&disks[2], |sb| {
        sb.events = 11;
        sb.resync_offset_sectors = 0;
    });
    let assembly = assembled(&disks).expect("an array");
    assert!(assembly.dirty);
    assert_eq!(assembly.in_sync_sectors(), 0);
    // Stopping was cut off: by then all was on the members.
    change(&disks[1], |sb| sb.events = 12);
    change(&disks[3], |sb| sb.events = 12);
    change(&disks[0], |sb| sb.events = 12);
    let assembly = assembled(&disks).expect("an array");
    assert!(!assembly.dirty);
    change(&disks[2], |sb| {
        sb.events = 12;
        sb.resync_offset_sectors = 64;
    });
    let assembly = assembled(&disks).expect("an array");
    assert!(assembly.dirty);
    assert_eq!(assembly.in_sync_sectors(), 64);
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let disks = array();
    let other = array();
    let mut mixed = disks.clone();
    mixed[2] = ("x".into(), other[2].1.clone());
    refused(&mixed, "x of \"host:test\"");
    let mut twice = disks.clone();
    twice[2] = disks[1].clone();
    refused(&twice, "m1 and m1 are the same member");
    change(&disks[2], |sb| sb.dev_number = 1);
    refused(&disks, "m1 and m2 are both at place 1");
    refused(&[], "name them");

    let empty = crate::raid5::testing::disks(3);
    refused(&empty, "m0: not a member of an md array");
    put(&disks[0].1, 8, &[0; 512]);
    refused(&disks, "m0: not a member of an md array");
    let small = crate::open("mem:4k").expect("a device");
    refused(&[("small".into(), small)], "small: 8 sectors are too few");
}

#[test]
fn shapes_must_agree() {
    let disks = array();
    change(&disks[1], |sb| sb.layout = 0);
    refused(&disks, "m1 and m0 disagree about the array's shape");
    let disks = array();
    change(&disks[1], |sb| {
        sb.feature_map = 0;
        sb.bitmap_or_ppl = [0; 4];
    });
    refused(&disks, "disagree");
    let disks = array();
    change(&disks[1], |sb| sb.feature_map |= Feature::RESHAPE.0);
    refused(&disks, "m1: feature 0x4: a reshape is under way");
    change(&disks[0], |sb| sb.level = 6);
    refused(&disks, "m0: RAID level 6");
}

#[test]
fn spares_and_rebuilt_members_wait() {
    let disks = array();
    change(&disks[3], |sb| sb.roles[3] = Role::Spare);
    refused(&disks[3..], "only spares");
    for disk in &disks[..3] {
        change(disk, |sb| sb.roles[3] = Role::Spare);
    }
    let assembly = assembled(&disks).expect("an array");
    assert_eq!((assembly.failed(), assembly.spares.len()), (Some(3), 1));

    let disks = array();
    change(&disks[3], |sb| {
        sb.feature_map |= Feature::RECOVERY_OFFSET.0;
        sb.recovery_offset_sectors = 640;
    });
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(assembly.failed(), Some(3));
    assert!(assembly.notes[0].contains("m3 is being rebuilt, 640 of 2048 sectors are"));
}

#[test]
fn bad_blocks_are_refused_and_old_bytes_are_none() {
    let disks = crate::raid5::testing::disks(4);
    random_array(&disks, Consistency::Ppl, true);
    assembled(&disks).expect("what was there before means nothing");
    let mut log = [0xff; 4096];
    log[..8].copy_from_slice(&(1000u64 << 10 | 16).to_le_bytes());
    change(&disks[1], |sb| {
        sb.feature_map |= Feature::BAD_BLOCKS.0;
        let area = sb.bad_block_log().expect("an area");
        put(&disks[1].1, area.sector, &log);
        let bad = BadBlock {
            sector: 1000,
            sectors: 16,
        };
        assert_eq!(sb.bad_blocks(&log).next(), Some(bad));
    });
    refused(
        &disks,
        "m1: the bad block log isn't empty (16 sectors at 1000)",
    );
    change(&disks[1], |sb| {
        let area = sb.bad_block_log().expect("an area");
        put(&disks[1].1, area.sector, &[0xff; 4096]);
    });
    assembled(&disks).expect("an empty log");
}
