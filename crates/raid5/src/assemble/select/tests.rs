use super::*;
use crate::testing::{disks, options};
use crate::{Consistency, Feature, add_spare, create, read_superblock, sleepy};

/// Three members, clean, of one event, and a spare.
fn candidates() -> Vec<Candidate> {
    let disks = disks(4);
    let members = disks[..3].to_vec();
    let mut assembly =
        create(members, &options(Consistency::Ppl), &mut sleepy()).expect("an array");
    let (name, device) = &disks[3];
    add_spare(&mut assembly, name, device, false, &mut sleepy()).expect("a spare");
    let candidate = |(name, device): &(String, _)| Candidate {
        name: name.clone(),
        superblock: read_superblock(name, device, &mut sleepy()).expect("a superblock"),
    };
    let mut all: Vec<Candidate> = disks.iter().map(candidate).collect();
    all.iter_mut().for_each(|c| c.superblock.events = 20);
    all
}

fn chosen(candidates: &[Candidate]) -> (Vec<&str>, Vec<String>, Vec<usize>) {
    let selection = select(candidates, false).expect("a selection");
    let name = |n: &usize| candidates[*n].name.as_str();
    (
        selection.taken.iter().map(name).collect(),
        selection.left_out.into_iter().map(|(_, why)| why).collect(),
        selection.absent.iter().map(|a| a.place).collect(),
    )
}

/// The others' superblocks say that this member is out.
fn throw_out(candidates: &mut [Candidate], n: usize) {
    for (m, c) in candidates.iter_mut().enumerate() {
        if m != n {
            c.superblock.roles[n] = Role::Faulty;
            c.superblock.events += 2;
        }
    }
}

#[test]
fn members_and_spares_are_taken_in_any_order() {
    let mut all = candidates();
    assert_eq!(chosen(&all), (vec!["m0", "m1", "m2", "m3"], vec![], vec![]));
    all.reverse();
    assert_eq!(chosen(&all), (vec!["m3", "m2", "m1", "m0"], vec![], vec![]));
    let only_spare = [all[0].clone()];
    let error = select(&only_spare, false).expect_err("no member");
    assert!(
        error.to_string().contains("only spares of it: m3"),
        "{error}"
    );
    assert!(select(&[], false).is_err());
}

#[test]
fn a_stale_member_is_left_out_by_name_and_isnt_absent() {
    let mut all = candidates();
    throw_out(&mut all, 1);
    let (taken, left, absent) = chosen(&all);
    assert_eq!(taken, ["m0", "m2", "m3"]);
    assert!(
        left[0].starts_with(
            "m1 is left out, since it is stale: it was thrown out of the array after "
        ) && left[0].ends_with("(events 20, newest 22)"),
        "{left:?}"
    );
    assert!(absent.is_empty());
    // Taken by force; the rules for a list say then if it is used.
    let forced = select(&all, true).expect("a selection");
    assert_eq!(forced.taken, [0, 1, 2, 3]);
    // Its file is gone, and the others know that they are without it.
    all.remove(1);
    assert_eq!(chosen(&all).2, [0usize; 0]);

    // One that was thrown out in the very last event doesn't come back either.
    let mut all = candidates();
    throw_out(&mut all, 1);
    all[1].superblock.events = 21;
    assert_eq!(chosen(&all).0, ["m0", "m2", "m3"]);

    // One event behind is what a power cut leaves; two are a member that missed something.
    let mut all = candidates();
    all[2].superblock.events = 19;
    assert_eq!(chosen(&all).0.len(), 4);
    all[2].superblock.events = 18;
    let (taken, left, absent) = chosen(&all);
    assert_eq!((taken, absent), (vec!["m0", "m1", "m3"], vec![]));
    assert!(left[0].contains("it missed changes"), "{left:?}");
}

#[test]
fn a_member_that_the_others_count_on_is_absent() {
    let mut all = candidates();
    all.remove(0);
    assert_eq!(chosen(&all), (vec!["m1", "m2", "m3"], vec![], vec![0]));
    let selection = select(&all, false).expect("a selection");
    assert_eq!(
        selection.absent,
        [Absent {
            place: 0,
            number: 0
        }]
    );
    all.remove(0);
    assert_eq!(chosen(&all).2, [0, 1]);
}

#[test]
fn two_that_claim_one_place_are_refused_with_both_names() {
    let mut all = candidates();
    let copy = Candidate {
        name: "copy".into(),
        ..all[1].clone()
    };
    all.push(copy);
    let refused = |all: &[Candidate]| select(all, false).expect_err("refused").to_string();
    assert!(
        refused(&all).starts_with("m1 and copy are the same member, or one is a copy"),
        "{}",
        refused(&all)
    );
    // Another device, as fresh: two halves of the array went their own ways.
    all[4].superblock.device_uuid = [7; 16];
    assert!(
        refused(&all).starts_with("m1 and copy are both at place 1"),
        "{}",
        refused(&all)
    );
}

#[test]
fn an_older_copy_is_left_out_by_name() {
    for at in [0, 4] {
        let mut all = candidates();
        let mut old = Candidate {
            name: "backup".into(),
            ..all[1].clone()
        };
        old.superblock.events = 12;
        all.insert(at, old);
        let (taken, left, absent) = chosen(&all);
        assert_eq!(taken, ["m0", "m1", "m2", "m3"]);
        assert_eq!(
            left,
            ["backup is left out: it is an older copy of m1 (events 12, and 20)"]
        );
        assert!(absent.is_empty());
    }
}

/// While m3 replaces m0, place 0 has two devices.
#[test]
fn a_replacement_doesnt_stand_for_the_member_until_it_is_whole() {
    let mut all = candidates();
    for c in &mut all {
        c.superblock.roles.resize(4, Role::Spare);
        c.superblock.roles[3] = Role::Active(0);
    }
    let sb = &mut all[3].superblock;
    sb.feature_map |= Feature::RECOVERY_OFFSET.0 | Feature::REPLACEMENT.0;
    sb.recovery_offset_sectors = 8;
    assert_eq!(chosen(&all), (vec!["m0", "m1", "m2", "m3"], vec![], vec![]));
    let mut without = all.clone();
    without.remove(0);
    assert_eq!(chosen(&without).2, [0]);
    without[2].superblock.recovery_offset_sectors = without[2].superblock.size_sectors;
    assert_eq!(chosen(&without).2, [0usize; 0]);
    all.remove(3);
    assert_eq!(chosen(&all).2, [0usize; 0]);
}

#[test]
fn nonsense_in_a_superblock_is_bounded() {
    let mut all = candidates();
    for c in &mut all {
        c.superblock.raid_disks = u32::MAX;
    }
    assert_eq!(chosen(&all).0.len(), 4);
}
