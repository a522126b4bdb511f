use super::*;
use crate::testing::{Named, assembled, change, disks, get, junk, put, random_array, superblock};
use crate::{
    Consistency, LogArea, SUPER_BYTES, find_newest, ppl_signature, sleepy, write_superblocks,
};

fn added(assembly: &mut Assembly, disk: &Named, force: bool) -> Result<u32, Error> {
    add_spare(assembly, &disk.0, &disk.1, force, &mut sleepy())?;
    let last = assembly.spares.last().expect("a spare");
    Ok(last.superblock.dev_number)
}

#[test]
fn a_spare_has_all_but_a_place() {
    for consistency in [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl] {
        let disks = disks(6);
        random_array(&disks[..4], consistency, true);
        for disk in &disks[..4] {
            change(disk, |sb| sb.events = 7);
        }
        for disk in &disks[4..] {
            put(&disk.1, 0, &junk(3 << 20));
        }
        let mut array = assembled(&disks[..4]).expect("an array");
        assert_eq!(added(&mut array, &disks[4], false).ok(), Some(4));
        assert_eq!(added(&mut array, &disks[5], false).ok(), Some(5));
        let (member, spare) = (superblock(&disks[0]), superblock(&disks[4]));
        assert_eq!((spare.role(), spare.events), (Role::Spare, 7));
        assert_eq!(spare.policy(), member.policy());
        assert_eq!(spare.roles, member.roles, "theirs didn't change");
        assert_ne!(spare.device_uuid, superblock(&disks[5]).device_uuid);
        let geometry = spare.check(disks[4].1.capacity_sectors());
        assert_eq!(geometry.ok(), Some(array.geometry));
        match spare.policy() {
            Policy::Resync => {}
            Policy::Ppl(log) => {
                let area = get(&disks[4].1, log.sector, log.sectors as usize * 512);
                let newest = find_newest(&area, ppl_signature(&spare.set_uuid));
                assert_eq!(newest.map(|n| n.header.entries.len()), Ok(0));
                assert!(area[4096..].iter().all(|&b| b == 0));
            }
            Policy::Bitmap { sector } => {
                let page = get(&disks[4].1, sector, 4096);
                let header = BitmapHeader::parse(&page).expect("a bitmap");
                assert!(header.is_current(7) && page[256] & 1 == 1);
            }
        }
        let array = assembled(&disks).expect("an array");
        let names: Vec<&str> = array.spares.iter().map(|m| &m.name[..]).collect();
        assert_eq!((array.failed(), names), (None, vec!["m4", "m5"]));
    }
}

/// With mdadm's own ids the bytes are mdadm's: an array of three members and a spare got another one.
#[test]
fn spares_are_those_of_mdadm() {
    let mut bytes = [0; SUPER_BYTES];
    bytes[..512].copy_from_slice(include_bytes!("testdata/spare-added.super"));
    let theirs = Superblock::parse(&bytes).expect("a superblock");
    let like = Superblock {
        dev_number: 0,
        device_uuid: [1; 16],
        ..theirs.clone()
    };
    let device = pvblk_volume::open("mem:24M").expect("memory");
    let idle = &mut sleepy();
    let made = make_spare("x", &device, &like, &[0, 1, 2, 3], None, false, idle).expect("a spare");
    let ours = Superblock {
        device_uuid: theirs.device_uuid,
        ..made.superblock
    };
    assert!(ours.encode() == theirs.encode());
    assert_eq!(theirs.role(), Role::Spare);
}

#[test]
fn numbers_are_nobody_elses() {
    let disks = disks(8);
    let mut array = random_array(&disks[..4], Consistency::Ppl, true);
    // One was thrown out, one has no number yet but is at hand, and one is being rebuilt.
    for member in array.members.iter_mut().flatten() {
        member.superblock.roles[4] = Role::Faulty;
        member.superblock.roles[6] = Role::Active(2);
    }
    assert_eq!(added(&mut array, &disks[4], false).ok(), Some(5));
    assert_eq!(added(&mut array, &disks[5], false).ok(), Some(7));
    // Where the table ends it gets longer, on the spare only.
    for member in array.members.iter_mut().flatten() {
        member.superblock.roles.truncate(8);
    }
    assert_eq!(added(&mut array, &disks[6], false).ok(), Some(8));
    let sb = superblock(&disks[6]);
    assert_eq!((sb.roles.len(), sb.role()), (9, Role::Spare));
    // The log reaches to the next area.
    let log = LogArea {
        sector: 9,
        sectors: 2048,
    };
    for member in array.members.iter_mut().flatten() {
        member.superblock.roles = vec![Role::Active(2); 128];
        let [a, b] = ((log.sector - 8) as u16).to_le_bytes();
        member.superblock.bitmap_or_ppl[..2].copy_from_slice(&[a, b]);
    }
    let error = added(&mut array, &disks[7], false).expect_err("no room");
    let text = error.to_string();
    assert!(
        text.contains("m7: the table of devices is full: there is room for 128"),
        "{text}"
    );
    assert!(get(&disks[7].1, 0, 1 << 20).iter().all(|&b| b == 0));
}

#[test]
fn after_hundreds_of_devices_numbers_are_used_again() {
    let disks = disks(6);
    let mut array = random_array(&disks[..4], Consistency::Ppl, true);
    let mut roles = vec![Role::Faulty; 256];
    (0..4).for_each(|n| roles[n] = Role::Active(n as u16));
    roles[200] = Role::Spare;
    for member in array.members.iter_mut().flatten() {
        member.superblock.set_roles(roles.clone());
    }
    let mut add = |disk| added(&mut array, disk, false).expect("a spare");
    assert_eq!((add(&disks[4]), add(&disks[5])), (200, 4));
}

#[test]
fn devices_in_use_are_refused() {
    let others = disks(4);
    random_array(&others, Consistency::Ppl, true);
    let mine = disks(5);
    let mut array = random_array(&mine[..4], Consistency::Ppl, true);
    let mut refused = |disk: &Named, force: bool, what: &str| {
        let error = added(&mut array, disk, force).expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    refused(&others[1], false, "m1 is a member of array \"host:test\" (");
    refused(&mine[1], false, "m1 is m1 already, or a copy of it");
    refused(&mine[1], true, "m1 is m1 already");
    let small = (
        "small".into(),
        pvblk_volume::open("mem:2M").expect("memory"),
    );
    refused(
        &small,
        true,
        "small has 4096 sectors, and a member of this array needs 6144",
    );
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m");
    std::fs::write(&path, vec![0; 3 << 20]).expect("a file");
    let spec = format!("file:{},ro", path.display());
    let file = ("file".into(), pvblk_volume::open(&spec).expect("a file"));
    refused(&file, true, "file is read-only");
    added(&mut array, &others[1], true).expect("by force");

    // A member that isn't at hand, though the array knows it.
    let mut array = assembled(&mine[..3]).expect("degraded");
    let error = added(&mut array, &mine[3], false).expect_err("a member");
    assert!(
        error
            .to_string()
            .contains("m3 is a member of this array, at place 3"),
        "{error}"
    );
    added(&mut array, &mine[3], true).expect("by force");
    let like = superblock(&mine[0]);
    let idle = &mut sleepy();
    let at_hand = make_spare("m1", &mine[1].1, &like, &[1], None, true, idle);
    assert!(
        at_hand
            .err()
            .expect("a member")
            .to_string()
            .contains("at place 1")
    );
}

/// A failed member can be recovered.
#[test]
fn former_members_are_taken_back() {
    let disks = disks(4);
    random_array(&disks, Consistency::Bitmap, true);
    let mut array = assembled(&disks[..3]).expect("degraded");
    write_superblocks(&mut array, true, 5, &mut sleepy()).expect("written");
    let array = assembled(&disks).expect("degraded");
    assert!(array.notes[0].contains("m3 is stale"));
    let mut array = assembled(&disks[..3]).expect("degraded");
    assert_eq!(added(&mut array, &disks[3], false).ok(), Some(4));
    let array = assembled(&disks).expect("degraded");
    assert_eq!((array.failed(), array.spares.len()), (Some(3), 1));
    assert_eq!(array.notes[2], "m3 will be rebuilt for place 3");
    // It is a spare now, and can be made one again.
    let mut array = assembled(&disks[..3]).expect("degraded");
    assert_eq!(added(&mut array, &disks[3], false).ok(), Some(4));
}
