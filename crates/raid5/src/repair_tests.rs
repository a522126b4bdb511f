use super::*;
use crate::testing::Failing;
use crate::testing::{
    Named, Power, assembled, change, contents, data, dirty, disks, get, prepared, put,
    random_array, roles, spoil, superblock, without, wrong_stripes,
};
use crate::{
    Batch, BitmapHeader, Blocking, Consistency, PplHeader, Role, log_space_bytes, ppl_signature,
    sleepy, xor_of,
};
use pvblk_block::{Op, Request};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[test]
fn a_new_array_of_anything_gets_its_parity() {
    for consistency in [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl] {
        let disks = disks(4);
        let made = random_array(&disks, consistency, false);
        assert_eq!(wrong_stripes(&made).len() as u64, made.geometry.stripes());
        let before = contents(&made);
        let mut assembly = assembled(&disks).expect("an array");
        let mut steps = vec![(0, made.geometry.member_sectors())];
        let mut progress = |done, of| steps.push((done, of));
        let options = AssembleOptions::default();
        prepare(&mut assembly, &options, &mut progress, &mut sleepy()).expect("prepared");
        assert!(!assembly.dirty);
        assert!(steps.len() > 2 && steps.is_sorted(), "{steps:?}");
        let (done, of) = steps[steps.len() - 1];
        assert_eq!(done, of);
        let found = assembled(&disks).expect("an array");
        assert!(!found.dirty && wrong_stripes(&found).is_empty());
        assert!(contents(&found) == before);
        assert_eq!(found.events(), 1);
        // A clean array stays as it is.
        let same = prepared(&disks, false).expect("prepared");
        assert_eq!(same.events(), 1);
    }
}

#[test]
fn an_interrupted_resync_goes_on_where_it_was() {
    let disks = disks(4);
    let made = random_array(&disks, Consistency::Ppl, false);
    for disk in &disks {
        change(disk, |sb| sb.resync_offset_sectors = 160);
    }
    let all: Vec<u64> = (0..20).collect();
    prepared(&disks, false).expect("prepared");
    assert_eq!(wrong_stripes(&made), all);
    // The part behind the offset was never right, whatever a log says.
    for disk in &disks {
        change(disk, |sb| sb.resync_offset_sectors = 160);
    }
    let error = prepared(&disks[1..], false).err().expect("refused");
    assert!(
        error.to_string().contains("no member at place 0"),
        "{error}"
    );
    prepared(&disks[1..], true).expect("forced");
}

#[test]
fn dirty_degraded_and_no_log_is_refused() {
    for consistency in [Consistency::Resync, Consistency::Bitmap] {
        let disks = disks(4);
        random_array(&disks, consistency, false);
        let error = prepared(&disks[..3], false).err().expect("refused");
        let text = error.to_string();
        assert!(
            text.contains("no member at place 3") && text.contains("force"),
            "{text}"
        );
        assert!(!text.contains('\n'));
        assert_eq!(superblock(&disks[0]).events, 0, "nothing was written");
        let assembly = prepared(&disks[..3], true).expect("forced");
        assert_eq!(assembly.failed(), Some(3));
        assert!(!assembled(&disks[..3]).expect("an array").dirty);
    }
}

#[test]
fn the_bitmap_says_what_is_resynced() {
    let disks = disks(4);
    let made = random_array(&disks, Consistency::Bitmap, false);
    prepared(&disks, false).expect("prepared");
    for stripe in [3, 40, 200] {
        spoil(&made, stripe);
    }
    dirty(&disks);
    // Chunks of 64 KiB, 16 stripes; the third is marked.
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
    let _ = bitmap.start_write(40 * 8, 8).expect("room");
    for (_, disk) in &disks {
        put(disk, sector, bitmap.page(0));
    }
    let assembly = prepared(&disks, false).expect("prepared");
    assert!(assembly.notes.is_empty(), "{:?}", assembly.notes);
    assert_eq!(wrong_stripes(&assembly), [3, 200]);
    let after = BitmapHeader::parse(&get(&disks[1].1, sector, 4096)).expect("a bitmap");
    assert!(after.events == assembly.events() && after.events_cleared == assembly.events());
    assert!(
        get(&disks[1].1, sector, 4096)[256..]
            .iter()
            .all(|&b| b == 0)
    );

    // One that is too old can't be believed.
    dirty(&disks);
    for disk in &disks {
        change(disk, |sb| sb.events += 5);
    }
    let assembly = prepared(&disks, false).expect("prepared");
    assert!(assembly.notes[0].contains("no bitmap is current"));
    assert!(wrong_stripes(&assembly).is_empty());
}

/// The write of a log and then of any part of its blocks, cut off. Returns the contents that must still be
/// there: all blocks that weren't written, in the order of `contents`, and `None` for the others. Blocks that
/// aren't recovered aren't written.
pub(super) fn cut_write(disks: &[Named], rng: &mut fastrand::Rng) -> Vec<Option<Vec<u8>>> {
    let assembly = assembled(disks).expect("an array");
    let g = assembly.geometry;
    let before = contents(&assembly);
    let mut expected: Vec<Option<Vec<u8>>> = before.iter().cloned().map(Some).collect();
    let at = |stripe: u64, index: usize| stripe as usize * g.data_members() + index;
    let uuid = assembly.newest().set_uuid;
    let member = |place| At::home(&assembly, place).and_then(|at| at.of(&assembly));
    for place in 0..g.members() {
        let owner = member(place).expect("a member");
        let Policy::Ppl(log) = owner.superblock.policy() else {
            panic!("a log");
        };
        let space = log_space_bytes(log.sectors);
        let mut batch = Batch::new(g, ppl_signature(&uuid), 7, place, space);
        let mut partial = Vec::new();
        let mut written = Vec::new();
        for stripe in (0..g.stripes()).filter(|&s| g.stripe_parity(s) == place) {
            let first = rng.usize(0..g.data_members());
            let blocks = rng.usize(1..=g.data_members() - first);
            let mut pp = [0; STRIPE_BYTES];
            let rest = (0..g.data_members()).filter(|i| !(first..first + blocks).contains(i));
            let rest: Vec<&[u8]> = rest.map(|i| &before[at(stripe, i)][..]).collect();
            xor_of(&mut pp, &rest);
            let pp = (blocks < g.data_members()).then_some(&pp);
            if rng.u32(0..3) > 0 || batch.add(stripe, first, blocks, pp).is_err() {
                continue;
            }
            partial.extend(pp.into_iter().flatten());
            written.push((stripe, first..first + blocks));
        }
        put(
            &owner.device,
            log.sector,
            &[&batch.header().encode()[..], &partial].concat(),
        );
        for (stripe, blocks) in written {
            let parity = g.data_members();
            for index in blocks.chain([parity]) {
                let to = match index == parity {
                    true => g.stripe_parity(stripe),
                    false => g.stripe_data(stripe, index),
                };
                if index != parity {
                    expected[at(stripe, index)] = None;
                }
                if rng.bool() && !is_missing(&assembly, to, stripe * STRIPE_SECTORS) {
                    let to = member(to).expect("a member");
                    let mut new = [0; STRIPE_BYTES];
                    rng.fill(&mut new);
                    let sector = to.superblock.data_offset_sectors + stripe * STRIPE_SECTORS;
                    put(&to.device, sector, &new);
                }
            }
        }
    }
    for disk in disks {
        change(disk, |sb| sb.resync_offset_sectors = 0);
    }
    expected
}

pub(super) fn check(disks: &[Named], expected: &[Option<Vec<u8>>], context: &str) {
    let assembly = assembled(disks).expect("an array");
    assert!(!assembly.dirty, "{context}");
    if assembly.failed().is_none() {
        assert!(wrong_stripes(&assembly).is_empty(), "{context}");
    }
    for (n, (found, expected)) in contents(&assembly).iter().zip(expected).enumerate() {
        if let Some(expected) = expected {
            assert!(found == expected, "{context}, block {n}");
        }
    }
    for at in At::all(&assembly) {
        let member = at.of(&assembly).expect("a member");
        let Policy::Ppl(log) = member.superblock.policy() else {
            panic!("a log");
        };
        let area = get(&member.device, log.sector, log.sectors as usize * 512);
        let uuid = member.superblock.set_uuid;
        let header = PplHeader::parse(&area, ppl_signature(&uuid)).expect("a log");
        assert_eq!(header.entries, [], "{context}");
        assert!(area[4096..].iter().all(|&b| b == 0), "{context}");
    }
}

/// With all members or with any one missing, and wherever the repair itself is cut off, blocks that weren't
/// being written stay.
#[test]
fn the_log_closes_the_write_hole() {
    let seed = pvblk_testing::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let disks = disks(4);
    for round in 0..12 {
        random_array(&disks, Consistency::Ppl, false);
        prepared(&disks, false).expect("prepared");
        let expected = cut_write(&disks, &mut rng);
        let lost = rng.usize(0..=4);
        let left = without(&disks, &[lost]);
        let context = format!("seed {seed}, round {round}, lost {lost}");
        // Cut off again and again, later each time.
        let mut cuts = 0;
        for writes in [
            0, 1, 3, 10, 30, 100, 101, 102, 103, 104, 105, 110, 120, 130, 140, 150,
        ] {
            let power = Power::writes(writes + rng.u64(0..3));
            let cut = prepared(&power.supply(&left), false);
            cuts += u32::from(cut.is_err() && power.left() == 0);
        }
        let assembly = prepared(&left, false).expect(&context);
        assert!(cuts > 1, "{context}: {cuts} cuts");
        assert_eq!(assembly.failed().is_some(), lost < 4);
        check(&left, &expected, &context);
    }
}

#[test]
fn a_log_that_was_cut_off_names_nothing() {
    let mut rng = fastrand::Rng::with_seed(4);
    let disks = disks(4);
    random_array(&disks, Consistency::Ppl, false);
    prepared(&disks, false).expect("prepared");
    let log = match superblock(&disks[0]).policy() {
        Policy::Ppl(log) => log,
        other => panic!("{other:?}"),
    };
    let expected = cut_write(&disks, &mut rng);
    // Of m1's log the header is torn, of m2's the partial parity of its first entry. So nothing of theirs was begun; here it
    // was, and stays as it is.
    put(&disks[1].1, log.sector + 2, &[7; 512]);
    put(&disks[2].1, log.sector + 8, &[7; 512]);
    let assembly = prepared(&disks, false).expect("prepared");
    let notes = assembly.notes.join("\n");
    assert!(
        notes.contains("m1: its partial parity log is passed over"),
        "{notes}"
    );
    assert!(
        notes.contains("m2: an entry of its partial parity log is passed over"),
        "{notes}"
    );
    assert!(notes.contains("made right from the logs"), "{notes}");
    let wrong = wrong_stripes(&assembly);
    let of = |place| {
        wrong
            .iter()
            .filter(|&&s| assembly.geometry.stripe_parity(s) == place)
            .count()
    };
    assert!(of(1) > 0 && of(0) == 0 && of(3) == 0, "{wrong:?}");
    // With no log that says anything, parity may never have been made: all of it is.
    dirty(&disks);
    let assembly = prepared(&disks, false).expect("prepared");
    assert!(wrong_stripes(&assembly).is_empty());
    drop(expected);
    // Degraded there is nothing to be made, and md starts too.
    dirty(&disks);
    assert_eq!(
        prepared(&disks[1..], false).expect("degraded").failed(),
        Some(0)
    );
}

#[test]
fn a_missing_member_is_stale_from_the_start() {
    let disks = disks(4);
    random_array(&disks, Consistency::Bitmap, true);
    prepared(&disks[..3], false).expect("prepared");
    assert_eq!(superblock(&disks[0]).events, 2);
    assert_eq!(roles(&disks[0])[3], Role::Faulty);
    let sector = match superblock(&disks[0]).policy() {
        Policy::Bitmap { sector } => sector,
        other => panic!("{other:?}"),
    };
    let page = get(&disks[0].1, sector, 4096);
    let header = BitmapHeader::parse(&page).expect("a bitmap");
    // The writes that it misses are marked from here on, and the event from which on is known.
    assert_eq!((header.events, header.events_cleared), (2, 0));
    assert_eq!(page[256] & 1, 0, "nothing so far");
    // The member comes back, and the superblocks say so.
    let assembly = assembled(&disks).expect("an array");
    assert_eq!(assembly.failed(), Some(3));
    assert!(assembly.notes[0].contains("m3 is stale (events 0, newest 2)"));
    // Once is enough.
    prepared(&disks, false).expect("prepared");
    assert_eq!(superblock(&disks[0]).events, 2);
}

#[test]
fn superblocks_agree_after_a_start() {
    let disks = disks(4);
    random_array(&disks, Consistency::Ppl, true);
    change(&disks[2], |sb| sb.events = 1);
    prepared(&disks, false).expect("prepared");
    for disk in &disks {
        let sb = superblock(disk);
        assert_eq!((sb.events, sb.is_clean()), (2, true));
    }
}

/// Wherever it is cut, no member is left behind.
#[test]
fn a_cut_between_superblocks_makes_nobody_stale() {
    let disks = disks(4);
    for (lagging, count) in [
        (None, 4),
        (Some(3), 4),
        (Some(0), 4),
        (None, 3),
        (Some(1), 3),
    ] {
        for writes in 1..20 {
            random_array(&disks, Consistency::Ppl, true);
            for disk in &disks {
                change(disk, |sb| sb.events = 10);
            }
            if let Some(n) = lagging {
                change(&disks[n], |sb| sb.events = 9);
            }
            let power = Power::writes(writes);
            let powered = power.supply(&disks[..count]);
            let mut assembly = assembled(&powered).expect("an array");
            let done = write_superblocks(&mut assembly, false, 5, &mut sleepy());
            let found = assembled(&disks[..count]).expect("an array");
            let context = format!("{lagging:?} of {count}, {writes} writes");
            assert_eq!(found.present().count(), count, "{context}");
            if done.is_ok() {
                assert!(found.dirty, "{context}");
            }
        }
    }
}

#[test]
fn superblocks_say_when_and_how() {
    let disks = disks(4);
    random_array(&disks, Consistency::Bitmap, true);
    let mut assembly = assembled(&disks).expect("an array");
    let sector = match assembly.policy() {
        Policy::Bitmap { sector } => sector,
        other => panic!("{other:?}"),
    };
    for (n, clean) in [false, true, true, false].into_iter().enumerate() {
        let now = 1000 + n as u64;
        write_superblocks(&mut assembly, clean, now, &mut sleepy()).expect("written");
        assert_eq!(assembly.dirty, !clean);
        for disk in &disks {
            let sb = superblock(disk);
            assert_eq!(
                (sb.events, sb.utime, sb.is_clean()),
                (n as u64 + 1, now, clean)
            );
            let page = get(&disk.1, sector, 4096);
            let header = BitmapHeader::parse(&page).expect("a bitmap");
            assert!(header.events == sb.events && header.is_current(sb.events));
            assert_eq!(page[256] & 1 == 0, clean);
        }
    }
}

#[test]
fn a_member_that_cannot_be_written_is_thrown_out() {
    let disks = disks(4);
    random_array(&disks, Consistency::Ppl, true);
    let mut mixed = disks.clone();
    mixed[1] = Power::writes(0).supply(&disks[1..2]).remove(0);
    // It can be read as long as there is power.
    let power = Power::writes(1);
    mixed[1] = power.supply(&disks[1..2]).remove(0);
    let mut assembly = assembled(&mixed).expect("an array");
    let m1 = assembly.members[1].as_ref().expect("m1");
    let _ = Blocking::open(&m1.device).and_then(|mut d| d.write(1, &[0; 512], &mut sleepy()));
    write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect("written");
    assert_eq!(assembly.failed(), Some(1));
    assert!(assembly.notes[0].contains("m1 is thrown out: failing: writing"));
    for n in [0, 2, 3] {
        assert_eq!(roles(&disks[n])[1], Role::Faulty);
    }
    let (old, new) = (superblock(&disks[1]).events, superblock(&disks[0]).events);
    assert!(old + 1 < new, "{old}, {new}: md would take it");
    let found = assembled(&disks).expect("an array");
    assert_eq!(found.failed(), Some(1));

    // A second one is too much.
    let powerless = Power::writes(2).supply(&disks);
    let mut assembly = assembled(&powerless).expect("an array");
    for member in assembly.present() {
        let device = &member.device;
        let _ = Blocking::open(device).and_then(|mut d| d.write(1, &[0; 512], &mut sleepy()));
    }
    let result = write_superblocks(&mut assembly, true, 5, &mut sleepy());
    assert!(result.is_err());
}

/// A member is thrown out, and then another one fails a write for a moment: the next try gets as far ahead of the first one as the first try would have.
#[test]
fn a_second_try_leaves_a_member_behind_for_good() {
    let disks = disks(4);
    random_array(&disks, Consistency::Resync, true);
    let mut mixed = disks.clone();
    let is_write = |request: &Request| request.op == Op::Write;
    mixed[1].1 = Failing::over(&disks[1].1, Arc::new(is_write));
    let writes = AtomicU64::new(0);
    let second = move |request: &Request| is_write(request) && writes.fetch_add(1, Relaxed) == 1;
    mixed[2].1 = Failing::over(&disks[2].1, Arc::new(second));
    let mut assembly = assembled(&mixed).expect("an array");
    write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect_err("two failed");
    assert_eq!(assembly.failed(), Some(1));
    write_superblocks(&mut assembly, false, 5, &mut sleepy()).expect("written");
    let (old, new) = (superblock(&disks[1]).events, superblock(&disks[0]).events);
    assert!(old + 1 < new, "{old}, {new}: md would take it");
    assert_eq!(superblock(&disks[2]).events, new);
}

#[test]
fn read_only_members_are_refused() {
    let disks = disks(3);
    random_array(&disks, Consistency::Ppl, true);
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m");
    std::fs::write(&path, get(&disks[0].1, 0, 3 << 20)).expect("a file");
    let mut disks = disks;
    let spec = format!("file:{},ro", path.display());
    disks[0] = ("file".into(), pvblk_volume::open(&spec).expect("a file"));
    let before = data(
        assembled(&disks)
            .expect("an array")
            .present()
            .next()
            .expect("m"),
        8,
    );
    let error = prepared(&disks, false).err().expect("refused");
    assert!(error.to_string().contains("file is read-only"), "{error}");
    assert_eq!(before.len(), 4096);
}
