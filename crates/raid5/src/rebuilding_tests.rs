//! Starts of arrays in which a member is being rebuilt.

use super::tests::{check, cut_write};
use super::*;
use crate::testing::{
    Named, Power, assembled, change, contents, data, dirty, get, junk, prepared, put, rebuilding,
    roles, spoil, superblock, without, wrong_stripes,
};
use crate::{Blocking, Consistency, Role, sleepy};

const SECTORS: u64 = 2048;

fn incoming_sectors(assembly: &Assembly) -> Option<u64> {
    assembly.incoming.as_ref().map(|i| i.recovered_sectors)
}

/// Recovered data is there, the rest isn't, whatever was being written and wherever the repair is cut off.
#[test]
fn the_log_knows_what_is_rebuilt() {
    let seed = pvblk_testing::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    for round in 0..8 {
        let place = rng.usize(0..4);
        let rebuilt = [0, SECTORS, 8 * rng.u64(1..256)][rng.usize(0..3)].min(SECTORS - 8);
        let disks = without(
            &rebuilding(Consistency::Ppl, place, rebuilt, false),
            &[place],
        );
        let context = format!("seed {seed}, round {round}, {rebuilt} of place {place}");
        let expected = cut_write(&disks, &mut rng);
        let offset = superblock(&disks[3]).data_offset_sectors;
        let rest = || {
            get(
                &disks[3].1,
                offset + rebuilt,
                (SECTORS - rebuilt) as usize * 512,
            )
        };
        let before = rest();
        let mut cuts = 0;
        for writes in [
            0, 1, 3, 10, 30, 60, 100, 101, 102, 103, 104, 105, 110, 120, 130,
        ] {
            let power = Power::writes(writes + rng.u64(0..3));
            let cut = prepared(&power.supply(&disks), false);
            cuts += u32::from(cut.is_err() && power.left() == 0);
        }
        assert!(cuts > 1, "{context}: {cuts} cuts");
        let assembly = prepared(&disks, false).expect(&context);
        assert_eq!(assembly.failed(), Some(place), "{context}");
        assert_eq!(incoming_sectors(&assembly), Some(rebuilt), "{context}");
        assert!(
            rest() == before,
            "{context}: what isn't rebuilt is written to"
        );
        check(&disks, &expected, &context);
        // Where all is there, parity is right.
        let i = assembly.incoming.as_ref().expect("one");
        let mut sum = data(&i.member, rebuilt);
        for member in assembly.present() {
            xor_into(&mut sum, &[&data(member, rebuilt)]);
        }
        assert!(sum.iter().all(|&b| b == 0), "{context}");
    }
}

#[test]
fn a_replacement_begins_again_after_a_crash() {
    for (place, gone) in [(1, &[][..]), (2, &[2])] {
        // Wherever it is cut off: as soon as the array is clean again the replacement has nothing.
        let mut cuts = 0;
        for writes in (0..30).chain([1000]) {
            let disks = without(&rebuilding(Consistency::Ppl, place, 160, true), gone);
            let last = disks.len() - 1;
            dirty(&disks);
            let power = Power::writes(writes);
            let cut = prepared(&power.supply(&disks), false);
            let found = assembled(&disks).expect("an array");
            let has = incoming_sectors(&found);
            assert_eq!(found.failed(), gone.first().copied());
            match &cut {
                Err(_) => cuts += 1,
                Ok(_) => assert!(!found.dirty),
            }
            assert!(
                has == Some(0) || (found.dirty && has == Some(160)),
                "{writes}"
            );
            let assembly = prepared(&disks, false).expect("prepared");
            assert_eq!(incoming_sectors(&assembly), Some(0));
            let again = "m4 begins again: the array wasn't stopped in order".to_string();
            assert_eq!(assembly.notes.contains(&again), has == Some(160));
            let sb = superblock(&disks[last]);
            assert_eq!(
                (sb.recovery_offset_sectors, sb.events),
                (0, assembly.events())
            );
            assert!(sb.has(Feature::RECOVERY_OFFSET));
            assert_eq!(sb.has(Feature::REPLACEMENT), gone.is_empty());
        }
        assert!(cuts > 10, "{cuts}");
    }
}

#[test]
fn what_is_clean_goes_on_where_it_was() {
    for consistency in [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl] {
        let disks = rebuilding(consistency, 1, 160, true);
        let events = superblock(&disks[0]).events;
        let assembly = prepared(&disks, false).expect("prepared");
        assert_eq!(incoming_sectors(&assembly), Some(160));
        // Nothing has to be said, but that a spare's bitmap or map isn't the array's.
        assert_eq!(assembly.events(), events + 1);
        // Without the member that it is to replace it isn't a replacement.
        let left = without(&disks, &[1]);
        let before = contents(&assembled(&disks).expect("an array"));
        let assembly = prepared(&left, false).expect("prepared");
        assert_eq!(
            (assembly.failed(), incoming_sectors(&assembly)),
            (Some(1), Some(160))
        );
        let sb = superblock(&disks[4]);
        assert!(sb.has(Feature::RECOVERY_OFFSET) && !sb.has(Feature::REPLACEMENT));
        assert_eq!((sb.role(), sb.events), (Role::Active(1), events + 3));
        assert_eq!(roles(&disks[0])[1], Role::Faulty);
        assert!(contents(&assembly) == before);
        // The member comes back too late.
        let assembly = assembled(&disks).expect("an array");
        assert_eq!(
            (assembly.failed(), incoming_sectors(&assembly)),
            (Some(1), Some(160))
        );
    }
}

/// One that has everything takes the place of a member that isn't there. That member's log is lost, if it had one.
#[test]
fn a_whole_replacement_is_the_member() {
    let disks = rebuilding(Consistency::Ppl, 1, SECTORS, true);
    let left = without(&disks, &[1]);
    let assembly = prepared(&left, false).expect("prepared");
    assert!(assembly.failed().is_none() && assembly.incoming.is_none());
    assert!(wrong_stripes(&assembly).is_empty());
    let sb = superblock(&disks[4]);
    assert!(!sb.has(Feature::RECOVERY_OFFSET) && !sb.has(Feature::REPLACEMENT));
    assert_eq!(
        (sb.role(), roles(&disks[4])[1]),
        (Role::Active(1), Role::Faulty)
    );
    assert_eq!(
        assembled(&disks).expect("an array").members[1]
            .as_ref()
            .map(|m| &m.name[..]),
        Some("m4")
    );

    let disks = rebuilding(Consistency::Ppl, 1, SECTORS, true);
    let left = without(&disks, &[1]);
    let assembly = assembled(&left).expect("an array");
    let mut rng = fastrand::Rng::with_seed(3);
    cut_write(&left, &mut rng);
    let spoilt = (0..256).find(|&s| assembly.geometry.stripe_parity(s) == 1);
    spoil(&assembly, spoilt.expect("a stripe"));
    let assembly = prepared(&left, false).expect("prepared");
    assert!(wrong_stripes(&assembly).is_empty());
    // With another member missing the data can't be known.
    let disks = rebuilding(Consistency::Ppl, 1, SECTORS, true);
    dirty(&disks);
    let error = prepared(&without(&disks, &[1, 3]), false)
        .err()
        .expect("refused");
    assert!(
        error.to_string().contains("no member at place 3"),
        "{error}"
    );
    prepared(&without(&disks, &[3]), false).expect("with the member");
}

/// By force: the recovered part isn't checked again, so its stripes have to be right.
#[test]
fn forced_starts_make_parity_right_of_what_is_rebuilt() {
    for consistency in [Consistency::Resync, Consistency::Bitmap] {
        let disks = rebuilding(consistency, 2, 160, false);
        let left = without(&disks, &[2]);
        let offset = superblock(&disks[0]).data_offset_sectors;
        put(&disks[0].1, offset, &junk(400 * 512));
        let before = contents(&assembled(&left).expect("an array"));
        dirty(&left);
        // A bitmap that is too old: all may be wrong.
        for disk in &left {
            change(disk, |sb| sb.events += 5);
        }
        let error = prepared(&left, false).err().expect("refused");
        assert!(
            error.to_string().contains("no member at place 2"),
            "{error}"
        );
        let assembly = prepared(&left, true).expect("forced");
        assert_eq!(incoming_sectors(&assembly), Some(160));
        let i = assembly.incoming.as_ref().expect("one");
        let mut sum = data(&i.member, 160);
        for member in assembly.present() {
            xor_into(&mut sum, &[&data(member, 160)]);
        }
        assert!(sum.iter().all(|&b| b == 0));
        let after = contents(&assembly);
        let blocks = 160 / STRIPE_SECTORS as usize * 3;
        assert!(after[..blocks] == before[..blocks], "its data is kept");
    }
}

/// Wherever the writing of superblocks is cut off, no device is left behind.
#[test]
fn a_cut_between_superblocks_leaves_none_behind() {
    for (replaces, gone) in [(true, &[][..]), (true, &[1]), (false, &[1])] {
        for lags in [false, true] {
            for writes in 1..20 {
                let disks = rebuilding(Consistency::Ppl, 1, 160, replaces);
                if lags {
                    change(&disks[4], |sb| sb.events -= 1);
                }
                let disks = without(&disks, gone);
                let power = Power::writes(writes);
                let mut assembly = assembled(&power.supply(&disks)).expect("an array");
                let done = write_superblocks(&mut assembly, false, 5, &mut sleepy());
                let found = assembled(&disks).expect("an array");
                let context = format!("{replaces} {gone:?} {lags} {writes}");
                assert_eq!(found.failed(), gone.first().copied(), "{context}");
                assert_eq!(incoming_sectors(&found), Some(160), "{context}");
                if done.is_ok() {
                    assert!(found.dirty && !superblocks::differ(&found), "{context}");
                }
            }
        }
    }
}

/// A disk that can be read but not written any more.
fn worn(disk: &Named) -> Named {
    Power::writes(1)
        .supply(std::slice::from_ref(disk))
        .remove(0)
}

fn wear_out(member: &crate::Member) {
    let mut disk = Blocking::open(&member.device).expect("a queue");
    disk.write(1, &[0; 512], &mut sleepy())
        .expect("the last write");
}

#[test]
fn what_cannot_be_written_is_given_up() {
    for replaces in [true, false] {
        let gone: &[usize] = if replaces { &[] } else { &[1] };
        let mut disks = without(&rebuilding(Consistency::Ppl, 1, 160, replaces), gone);
        let last = disks.len() - 1;
        let good = disks[last].clone();
        disks[last] = worn(&good);
        let mut assembly = assembled(&disks).expect("an array");
        wear_out(&assembly.incoming.as_ref().expect("one").member);
        write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect("written");
        assert!(assembly.incoming.is_none());
        assert_eq!(assembly.failed(), gone.first().copied());
        let note = assembly.notes.last().expect("a note");
        assert!(
            note.contains("m4 is thrown out: failing: writing"),
            "{note}"
        );
        let (old, new) = (superblock(&good), superblock(&disks[0]));
        assert_eq!(new.roles[4], Role::Faulty);
        assert!(old.events + 1 < new.events, "md would take it");
        disks[last] = good;
        let found = assembled(&disks).expect("an array");
        assert!(found.incoming.is_none() && found.failed() == gone.first().copied());
    }
    // The same when a replacement is to begin again.
    let mut disks = rebuilding(Consistency::Ppl, 1, 160, true);
    dirty(&disks);
    disks[4] = worn(&disks[4]);
    let options = AssembleOptions::default();
    let mut assembly = assembled(&disks).expect("an array");
    wear_out(&assembly.incoming.as_ref().expect("one").member);
    prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).expect("prepared");
    assert!(assembly.incoming.is_none() && assembly.failed().is_none());
}

#[test]
fn a_replacement_outlives_its_member() {
    let mut disks = rebuilding(Consistency::Bitmap, 1, 160, true);
    let good = disks[1].clone();
    disks[1] = worn(&good);
    let mut assembly = assembled(&disks).expect("an array");
    wear_out(assembly.members[1].as_ref().expect("m1"));
    write_superblocks(&mut assembly, true, 5, &mut sleepy()).expect("written");
    assert_eq!(
        (assembly.failed(), incoming_sectors(&assembly)),
        (Some(1), Some(160))
    );
    let sb = superblock(&disks[4]);
    assert!(sb.has(Feature::RECOVERY_OFFSET) && !sb.has(Feature::REPLACEMENT));
    assert_eq!((sb.roles[1], sb.roles[4]), (Role::Faulty, Role::Active(1)));
    disks[1] = good;
    let found = assembled(&disks).expect("an array");
    assert_eq!(
        (found.failed(), incoming_sectors(&found)),
        (Some(1), Some(160))
    );
}

#[test]
fn it_has_to_be_writable() {
    let mut disks = rebuilding(Consistency::Ppl, 1, 160, true);
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m");
    std::fs::write(&path, get(&disks[4].1, 0, 3 << 20)).expect("a file");
    let spec = format!("file:{},ro", path.display());
    disks[4] = ("file".into(), pvblk_volume::open(&spec).expect("a file"));
    let error = prepared(&disks, false).err().expect("refused");
    assert!(error.to_string().contains("file is read-only"), "{error}");
}

/// A spare has a number that the table may not have: the table grows.
#[test]
fn the_table_of_roles_grows() {
    let disks = without(&rebuilding(Consistency::Ppl, 1, 160, false), &[1]);
    let mut assembly = assembled(&disks).expect("an array");
    let incoming = assembly.incoming.as_mut().expect("one");
    let sb = &mut incoming.member.superblock;
    sb.set_role(200, Role::Active(1)).expect("room");
    sb.set_role(4, Role::Spare).expect("room");
    sb.dev_number = 200;
    assert!(incoming.member.superblock.roles.len() > 200);
    write_superblocks(&mut assembly, true, 5, &mut sleepy()).expect("written");
    for disk in &disks {
        let sb = superblock(disk);
        assert_eq!((sb.roles.len(), sb.roles[200]), (201, Role::Active(1)));
    }
    let found = assembled(&disks).expect("an array");
    assert_eq!(incoming_sectors(&found), Some(160));
}
