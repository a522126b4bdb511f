use super::*;
use crate::testing::{
    assembled, change, disks, forced, options, put, random_array, rebuilding, without,
};
use crate::{BadBlock, Consistency, add_spare, create, sleepy};

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

    let empty = crate::testing::disks(3);
    refused(&empty, "m0: not a member of an md array");
    put(&disks[0].1, 8, &[0; 512]);
    refused(&disks, "m0: not a member of an md array");
    let small = pvblk_volume::open("mem:4k").expect("a device");
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
    assert!(assembly.spares[0].is_spare());
    assert_eq!(
        assembly.notes,
        [
            "m3 is a spare",
            "the array is degraded: no member at place 3",
            "m3 will be rebuilt for place 3"
        ]
    );
}

/// The device that is being recovered, as `name at place: sectors`.
fn incoming(assembly: &Assembly) -> Option<String> {
    let i = assembly.incoming.as_ref()?;
    let (name, has) = (&i.member.name, i.recovered_sectors);
    Some(format!("{name} at {}: {has}", i.place))
}

#[test]
fn a_member_that_is_rebuilt_is_on_its_way() {
    let disks = array();
    change(&disks[3], |sb| {
        sb.feature_map |= Feature::RECOVERY_OFFSET.0;
        sb.recovery_offset_sectors = 645;
    });
    // The first device of the list isn't the one to believe if others are as new.
    for turn in 0..4 {
        let mut disks = disks.clone();
        disks.rotate_left(turn);
        let assembly = assembled(&disks).expect("an array");
        assert_eq!(assembly.failed(), Some(3));
        assert_eq!(incoming(&assembly).as_deref(), Some("m3 at 3: 640"));
        assert_eq!(
            assembly.notes,
            [
                "m3 is being rebuilt: 640 of 2048 sectors are",
                "the array is degraded: no member at place 3"
            ]
        );
        assert!(assembly.spares.is_empty());
    }
    // It lags, as any may; or too far behind; or was thrown out.
    change(&disks[3], |sb| sb.events = 9);
    let assembly = assembled(&disks).expect("an array");
    assert!(incoming(&assembly).is_some() && !assembly.dirty);
    change(&disks[3], |sb| sb.events = 8);
    assert_eq!(incoming(&assembled(&disks).expect("an array")), None);
    // Half of a member isn't taken by force either.
    change(&disks[2], |sb| sb.events = 8);
    let error = forced(&disks[1..]).err().expect("half of one");
    assert!(
        error.to_string().contains("2 of them are usable"),
        "{error}"
    );
    assert_eq!(forced(&disks).expect("an array").failed(), Some(3));
    change(&disks[2], |sb| sb.events = 10);
    change(&disks[3], |sb| sb.events = 10);
    change(&disks[0], |sb| {
        sb.events = 11;
        sb.roles[3] = Role::Faulty;
    });
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(incoming(&assembly), None);
    assert!(assembly.notes[0].contains("m3 is stale (events 10, newest 11): it was thrown out"));
    // All of it is rebuilt.
    change(&disks[0], |sb| sb.roles[3] = Role::Active(3));
    change(&disks[3], |sb| sb.recovery_offset_sectors = 2048);
    let assembly = assembled(&disks).expect("an array");
    assert_eq!((assembly.failed(), incoming(&assembly)), (None, None));
    // It is the newest, and says dirty.
    change(&disks[3], |sb| {
        sb.recovery_offset_sectors = 8;
        sb.events = 11;
        sb.resync_offset_sectors = 80;
    });
    change(&disks[0], |sb| sb.events = 10);
    let assembly = assembled(&disks).expect("an array");
    assert!(assembly.dirty && assembly.events() == 11);
    assert_eq!(assembly.in_sync_sectors(), 80);
}

#[test]
fn a_replacement_is_on_its_way() {
    let disks = rebuilding(Consistency::Ppl, 1, 160, true);
    let assembly = assembled(&disks).expect("an array");
    assert_eq!((assembly.failed(), assembly.dirty), (None, false));
    assert_eq!(incoming(&assembly).as_deref(), Some("m4 at 1: 160"));
    assert_eq!(
        assembly.notes,
        ["m4 is to replace m1: 160 of 2048 sectors are copied"]
    );
    // Without the member it is just rebuilt, as far as it is.
    let assembly = assembled(&without(&disks, &[1])).expect("an array");
    assert_eq!(assembly.failed(), Some(1));
    assert_eq!(incoming(&assembly).as_deref(), Some("m4 at 1: 160"));
    assert!(assembly.notes[0].contains("m4 was to replace a member that isn't there"));
    // It has all, but wasn't the member yet.
    change(&disks[4], |sb| sb.recovery_offset_sectors = 2048);
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(incoming(&assembly).as_deref(), Some("m4 at 1: 2048"));
    assert_eq!(places(&assembly)[1], Some("m1"));
    let assembly = assembled(&without(&disks, &[1])).expect("an array");
    assert_eq!((assembly.failed(), incoming(&assembly)), (None, None));
    assert_eq!(places(&assembly)[1], Some("m4"));
    assert!(assembly.notes[0].contains("m4 takes the place"));
    change(&disks[4], |sb| {
        sb.feature_map &= !Feature::RECOVERY_OFFSET.0
    });
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(incoming(&assembly).as_deref(), Some("m4 at 1: 2048"));
    // It isn't one any more, so both are the member.
    change(&disks[4], |sb| sb.feature_map &= !Feature::REPLACEMENT.0);
    refused(&disks, "m1 and m4 are both at place 1");
}

#[test]
fn one_at_a_time_is_rebuilt() {
    let disks = rebuilding(Consistency::Ppl, 1, 160, true);
    // Another replacement, and then the place that it is for is empty, so that it comes first.
    change(&disks[3], |sb| {
        sb.feature_map |= Feature::RECOVERY_OFFSET.0;
        sb.recovery_offset_sectors = 80;
    });
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(incoming(&assembly).as_deref(), Some("m3 at 3: 80"));
    assert_eq!((assembly.failed(), assembly.spares.len()), (Some(3), 1));
    assert!(!assembly.spares[0].is_spare());
    assert_eq!(
        assembly.notes[1],
        "m4 was being rebuilt, 160 of 2048 sectors are, and is left out: m3 comes first"
    );

    // So md leaves an array when the member that was being replaced is gone: a spare too is recovered for its
    // place. The device with more data comes first.
    let mut disks = rebuilding(Consistency::Ppl, 1, 160, true);
    let mut made = assembled(&disks).expect("an array");
    let (_, m5) = crate::testing::disks(1).remove(0);
    add_spare(&mut made, "m5", &m5, false, &mut sleepy()).expect("a spare");
    disks.push(("m5".into(), m5));
    for disk in &disks {
        change(disk, |sb| {
            sb.roles[1] = Role::Spare;
            sb.roles[5] = Role::Active(1);
        });
    }
    change(&disks[5], |sb| {
        sb.feature_map |= Feature::RECOVERY_OFFSET.0;
        sb.recovery_offset_sectors = 80;
    });
    let assembly = assembled(&without(&disks, &[1])).expect("an array");
    assert_eq!(incoming(&assembly).as_deref(), Some("m4 at 1: 160"));
    assert!(
        assembly.notes[1].contains("m5 was being rebuilt, 80 of 2048 sectors are, and is left out")
    );
    // The place has a member, and none is to be replaced.
    for disk in &disks {
        change(disk, |sb| {
            sb.roles[1] = Role::Active(1);
            sb.roles[4] = Role::Spare;
        });
    }
    let assembly = assembled(&without(&disks, &[4])).expect("an array");
    assert_eq!(incoming(&assembly), None);
    assert!(assembly.notes[0].contains("and is left out: m1 has place 1 of the array"));
}

#[test]
fn what_is_rebuilt_has_to_be_usable() {
    let rebuilt = || rebuilding(Consistency::Ppl, 1, 160, false);
    let left_out = |disks: &[(String, Arc<dyn BlockDevice>)], what: &str| {
        let assembly = assembled(&without(disks, &[1])).expect("an array");
        assert_eq!((assembly.failed(), incoming(&assembly)), (Some(1), None));
        assert!(assembly.notes[0].contains(what), "{:?}", assembly.notes);
    };
    let disks = rebuilt();
    assert!(incoming(&assembled(&disks).expect("an array")).is_some());
    change(&disks[4], |sb| sb.feature_map |= Feature::RECOVERY_BITMAP.0);
    left_out(&disks, "left out: feature 0x80: a rebuild guided by");
    let disks = rebuilt();
    change(&disks[4], |sb| sb.data_size_sectors += 8);
    left_out(
        &disks,
        "left out: data ends at sector 6152, the device at 6144",
    );
    let disks = rebuilt();
    change(&disks[4], |sb| sb.chunk_sectors = 64);
    left_out(&disks, "left out: it disagrees about the array's shape");
    let disks = rebuilt();
    change(&disks[4], |sb| {
        sb.feature_map |= Feature::BAD_BLOCKS.0;
        let area = sb.bad_block_log().expect("an area");
        put(&disks[4].1, area.sector, &[1; 4096]);
    });
    left_out(&disks, "left out: the bad block log isn't empty");
    // A copy of the member it replaces, with another id.
    let disks = rebuilding(Consistency::Ppl, 1, 160, true);
    change(&disks[4], |sb| sb.dev_number = 1);
    refused(&disks, "m1 and m4 have the same number in the array, 1");
}

#[test]
fn spares_that_cannot_be_used_are_left_out() {
    let disks = crate::testing::disks(6);
    let mut made = random_array(&disks[..4], Consistency::Ppl, true);
    for (name, disk) in &disks[4..] {
        add_spare(&mut made, name, disk, true, &mut sleepy()).expect("a spare");
    }
    let names = || {
        let assembly = assembled(&disks).expect("an array");
        assert_eq!((assembly.failed(), incoming(&assembly)), (None, None));
        let spares = assembly.spares.iter();
        let names: Vec<String> = spares.map(|m| m.name.clone()).collect();
        (names.join(" "), assembly.notes.join("\n"))
    };
    let all = ("m4 m5".into(), "m4 is a spare\nm5 is a spare".into());
    assert_eq!(names(), all);
    // The writes that they have missed don't matter.
    for disk in &disks[..4] {
        change(disk, |sb| sb.events = 100);
    }
    assert_eq!(names(), all);
    change(&disks[5], |sb| sb.dev_number = 4);
    assert_eq!(names().0, "m4");
    assert!(
        names()
            .1
            .contains("m5 is left out: it is a spare with the same number as m4")
    );
    change(&disks[5], |sb| sb.dev_number = 5);
    for disk in &disks[..4] {
        change(disk, |sb| sb.roles[5] = Role::Faulty);
    }
    assert_eq!(names().0, "m4");
    assert!(
        names()
            .1
            .contains("m5 is left out: it says that it is a spare, and")
    );
    change(&disks[5], |sb| sb.dev_number = u32::MAX);
    assert!(
        names()
            .1
            .contains("m5 is left out, since it can't be a spare: no room for its number")
    );
    change(&disks[4], |sb| sb.data_offset_sectors += 8);
    assert_eq!(names().0, "");
    assert!(
        names()
            .1
            .contains("m4 is left out, since it can't be a spare: data ends")
    );
}

#[test]
fn bad_blocks_are_refused_and_old_bytes_are_none() {
    let disks = crate::testing::disks(4);
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
