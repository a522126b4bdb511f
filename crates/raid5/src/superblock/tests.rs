use super::*;

/// A superblock that md wrote: mdadm 4.4 on Linux 6.12.101, four members of 24 MiB, chunks of 64 KiB. md writes 512 bytes.
fn real(bytes: &[u8; 512]) -> [u8; SUPER_BYTES] {
    let mut whole = [0; SUPER_BYTES];
    whole[..512].copy_from_slice(bytes);
    whole
}

const MEMBER_SECTORS: u64 = 24 << 11;

fn created() -> Superblock {
    let bytes = real(include_bytes!("../testdata/ppl-created.super"));
    Superblock::parse(&bytes).expect("a superblock")
}

#[test]
fn what_md_wrote_is_read_and_written_back() {
    let running = include_bytes!("../testdata/ppl-running.super");
    let bitmap = include_bytes!("../testdata/bitmap-stopped.super");
    let rebuilding = include_bytes!("../testdata/rebuilding.super");
    let bad = include_bytes!("../testdata/bad-blocks.super");
    let missing = include_bytes!("../testdata/missing.super");
    for bytes in [running, bitmap, rebuilding, bad, missing] {
        let bytes = real(bytes);
        let sb = Superblock::parse(&bytes).expect("a superblock");
        assert!(sb.encode() == bytes);
        assert_eq!(sb.written_bytes(), 512);
        assert_eq!(sb.name(), "host:vol0");
        let geometry = sb.check(MEMBER_SECTORS).expect("supported");
        assert_eq!((geometry.members(), geometry.chunk_sectors()), (4, 128));
        assert_eq!(geometry.member_sectors(), sb.size_sectors);
    }

    let sb = created();
    assert_eq!(sb.role(), Role::Active(2));
    assert_eq!((sb.data_offset_sectors, sb.size_sectors), (4096, 45056));
    assert!(sb.is_clean() && sb.has(Feature::PPL));
    let log = |sector, sectors| LogArea { sector, sectors };
    assert_eq!(sb.policy(), Policy::Ppl(log(16, 2048)));
    assert_eq!(sb.bad_block_log(), Some(log(2064, 8)));

    // A running array is dirty, and the kernel turned PPL into multiple PPLs.
    let sb = Superblock::parse(&real(running)).expect("a superblock");
    assert!(!sb.is_clean() && !sb.has(Feature::PPL) && sb.has(Feature::MULTIPLE_PPLS));
    assert_eq!(sb.policy(), Policy::Ppl(log(16, 2048)));
    let geometry = sb.check(MEMBER_SECTORS).expect("supported");
    assert_eq!(geometry.layout(), Layout::LeftAsymmetric);

    let sb = Superblock::parse(&real(bitmap)).expect("a superblock");
    assert_eq!(sb.policy(), Policy::Bitmap { sector: 16 });
    assert_eq!((sb.bitmap_room_sectors(), sb.events), (8, 2));

    // mdadm makes the last member a spare, which gets another number than its place.
    let sb = Superblock::parse(&real(rebuilding)).expect("a superblock");
    assert_eq!((sb.dev_number, sb.role()), (4, Role::Active(3)));
    assert_eq!(sb.roles[3], Role::Spare);
    assert_eq!(
        (sb.policy(), sb.recovered_sectors()),
        (Policy::Resync, 2304)
    );
}

#[test]
fn events_that_cannot_be_counted_on_are_refused() {
    let most = Superblock {
        events: MOST_EVENTS - 1,
        ..created()
    };
    assert!(most.check(MEMBER_SECTORS).is_ok());
    for events in [MOST_EVENTS, u64::MAX] {
        let sb = Superblock {
            events,
            ..created()
        };
        let refused = sb.check(MEMBER_SECTORS);
        assert!(
            matches!(refused, Err(SuperblockError::Shape(_))),
            "{events}"
        );
    }
}

#[test]
fn bad_blocks_are_read_and_refused() {
    let bytes = real(include_bytes!("../testdata/bad-blocks.super"));
    let sb = Superblock::parse(&bytes).expect("a superblock");
    assert!(sb.has(Feature::BAD_BLOCKS));
    let mut log = [0xff; 4096];
    assert_eq!(sb.check_bad_blocks(&log), Ok(()));
    log[..8].copy_from_slice(&((1000u64 << 10) | 16).to_le_bytes());
    log[8..16].copy_from_slice(&((5u64 << 10) | 0x3ff).to_le_bytes());
    let bad = |sector, sectors| BadBlock { sector, sectors };
    let all: Vec<BadBlock> = sb.bad_blocks(&log).collect();
    assert_eq!(all, [bad(1000, 16), bad(5, 1023)]);
    let refused = sb.check_bad_blocks(&log);
    assert_eq!(refused, Err(SuperblockError::BadBlocks(bad(1000, 16))));
    let shifted = Superblock {
        bblog_shift: 3,
        ..sb
    };
    assert_eq!(shifted.bad_blocks(&log).next(), Some(bad(8000, 128)));
}

/// The bytes of a good superblock with a change, and the checksum made right.
fn changed(change: impl FnOnce(&mut [u8; SUPER_BYTES])) -> [u8; SUPER_BYTES] {
    let mut bytes = created().encode();
    change(&mut bytes);
    let max_dev = u32::from_le_bytes(bytes[220..224].try_into().expect("four bytes"));
    let sum = checksum(&bytes, max_dev.min(MAX_ROLES));
    bytes[216..220].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn what_is_no_superblock_is_refused() {
    let parse = |change: fn(&mut [u8; SUPER_BYTES])| Superblock::parse(&changed(change));
    use SuperblockError as E;
    assert!(matches!(parse(|b| b[0] = 0), Err(E::Magic(_))));
    assert_eq!(parse(|b| b[4] = 2), Err(E::Version(2)));
    assert_eq!(parse(|b| b[221] = 0xff), Err(E::MaxDev(0xff80)));
    assert_eq!(parse(|b| b[144] = 0), Err(E::Place(0)));
    assert_eq!(parse(|b| b[12] = 1), Err(E::Padding));
    assert_eq!(parse(|b| b[255] = 1), Err(E::Padding));
    // Every byte that counts is in the checksum; the bytes after the roles aren't.
    let good = created().encode();
    for at in 0..SUPER_BYTES {
        let mut bytes = good;
        bytes[at] ^= 0x40;
        let parsed = Superblock::parse(&bytes);
        assert_eq!(parsed.is_ok(), at >= 512, "byte {at}");
    }
    // A half word at the end, and one word less.
    for max_dev in [127, 126, 0, 1920] {
        let sb = Superblock {
            roles: vec![Role::Active(3); max_dev],
            ..created()
        };
        let back = Superblock::parse(&sb.encode()).expect("a superblock");
        assert_eq!(back.roles, sb.roles);
    }
}

#[test]
fn checksums_are_folded_once() {
    // 0xffffffff twice and 2: 0x2_0000_0000 in 64 bits, folded to 2.
    let mut bytes = [0; SUPER_BYTES];
    bytes[..8].fill(0xff);
    bytes[8] = 2;
    bytes[216..220].fill(0xee);
    assert_eq!(checksum(&bytes, 0), 2);
    bytes[256] = 5;
    bytes[257] = 1;
    assert_eq!(checksum(&bytes, 1), 2 + 0x105);
}

#[test]
fn what_cannot_be_honoured_is_named() {
    let refuse = |change: fn(&mut Superblock), what: &str| {
        let mut sb = created();
        change(&mut sb);
        let sb = Superblock::parse(&sb.encode()).expect("a superblock");
        let error = sb.check(MEMBER_SECTORS).expect_err(what).to_string();
        assert!(error.contains(what), "{what:?} isn't in {error:?}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    refuse(|s| s.level = 6, "level 6");
    refuse(|s| s.level = -1, "level -1");
    refuse(|s| s.layout = 4, "layout 4 (parity-first)");
    refuse(|s| s.layout = 99, "layout 99 (unknown)");
    refuse(|s| s.feature_map |= 4, "reshape");
    refuse(|s| s.feature_map |= 32, "reshape");
    refuse(|s| s.feature_map |= 64, "reshape");
    refuse(|s| s.feature_map |= 128, "guided by the bitmap");
    refuse(|s| s.feature_map |= 256, "clustered");
    refuse(|s| s.feature_map |= 512, "journal");
    refuse(|s| s.feature_map |= 4096, "RAID-0");
    refuse(|s| s.feature_map |= 0x6000, "unknown features 0x6000");
    refuse(|s| s.feature_map |= 1, "exclude each other");
    refuse(|s| s.feature_map |= 2048, "exclude each other");
    refuse(|s| s.raid_disks = 2, "3 to 64");
    refuse(|s| s.raid_disks = 65, "3 to 64");
    refuse(|s| s.raid_disks = 3, "place 0x3, outside");
    refuse(|s| s.chunk_sectors = 100, "power of two");
    refuse(|s| s.size_sectors += 1, "number of chunks");
    refuse(|s| s.size_sectors = 0, "holds no chunk");
    refuse(|s| s.size_sectors += 128, "used size");
    refuse(
        |s| s.roles[7..9].fill(Role::Active(1)),
        "three members at place 1",
    );
    refuse(|s| s.roles[7] = Role::Unknown(0xfff0), "place 0xfff0");
    refuse(|s| s.data_size_sectors += 1, "the device at 49152");
    refuse(|s| s.data_size_sectors = u64::MAX, "the device at 49152");
    refuse(|s| s.data_offset_sectors = 2000, "overlap");
    refuse(
        |s| {
            s.data_offset_sectors = 8;
            s.feature_map = 0;
            s.bblog_size_sectors = 0;
        },
        "data and superblock overlap",
    );
    refuse(|s| s.bitmap_or_ppl = [0, 0, 0, 8], "log and superblock");
    refuse(
        |s| s.bitmap_or_ppl = [0xf0, 0xff, 0, 8],
        "end of the device",
    );
    refuse(|s| s.bitmap_or_ppl = [8, 0, 8, 0], "too small");
    refuse(|s| s.bblog_offset_sectors = 2055, "overlap");
    refuse(
        |s| {
            s.feature_map |= 8;
            s.bblog_offset_sectors = 0;
        },
        "not where",
    );
    refuse(
        |s| {
            s.feature_map |= 8;
            s.bblog_size_sectors = 9;
        },
        "more than 8",
    );
    // Before the start is nowhere, however large the device.
    for before in [-9, i32::MIN] {
        let sb = Superblock {
            bblog_offset_sectors: before,
            ..created()
        };
        assert!(sb.check(u64::MAX).is_err());
    }
    // A device that is cut short, and one that is longer than needed.
    assert!(created().check(MEMBER_SECTORS - 1).is_err());
    assert!(created().check(MEMBER_SECTORS + 1).is_ok());
}

#[test]
fn a_device_without_a_role_is_a_spare() {
    let role = |number| {
        let sb = Superblock {
            dev_number: number,
            ..created()
        };
        sb.role()
    };
    assert_eq!(role(3), Role::Active(3));
    assert_eq!(role(4), Role::Spare);
    assert_eq!(role(128), Role::Spare);
    assert_eq!(role(u32::MAX), Role::Spare);
    for number in 0..=u16::MAX {
        assert_eq!(Role::of(number).number(), number);
    }
}

#[test]
fn a_replacement_has_the_same_place() {
    let md = real(include_bytes!("../testdata/replacing.super"));
    let sb = Superblock::parse(&md).expect("a superblock");
    sb.check(MEMBER_SECTORS).expect("supported");
    assert!(sb.has(Feature::REPLACEMENT) && sb.has(Feature::RECOVERY_OFFSET));
    assert_eq!((sb.role(), sb.recovered_sectors()), (Role::Active(1), 2304));
    assert_eq!((sb.roles[1], sb.roles[4]), (Role::Active(1), sb.role()));
    assert_eq!((sb.roles[3], sb.is_clean()), (Role::Spare, true));
    assert!(sb.encode() == md);

    let mut sb = created();
    sb.roles[7] = Role::Active(1);
    sb.feature_map |= Feature::REPLACEMENT.0 | Feature::RECOVERY_OFFSET.0;
    sb.recovery_offset_sectors = 640;
    let sb = Superblock::parse(&sb.encode()).expect("a superblock");
    sb.check(MEMBER_SECTORS).expect("supported");
    assert_eq!(sb.recovered_sectors(), 640);
}

#[test]
fn tables_grow_as_far_as_there_is_room() {
    let mut sb = created();
    let last = sb.rest.len() - 1;
    sb.rest[last] = 7;
    let before = sb.encode();
    sb.set_role(9, Role::Active(1)).expect("room");
    assert_eq!((sb.roles.len(), sb.roles[9]), (128, Role::Active(1)));
    sb.set_role(9, Role::Spare).expect("room");
    assert!(sb.encode() == before);
    sb.set_role(128, Role::Faulty).expect("room");
    assert_eq!((sb.roles.len(), sb.written_bytes()), (129, 1024));
    let back = Superblock::parse(&sb.encode()).expect("a superblock");
    assert_eq!(back, sb);
    assert_eq!(back.rest.len() + 2 * 129 + 256, SUPER_BYTES);
    assert_eq!(back.encode()[4095], 7, "it stays where it was");
    let mut shorter = back.clone();
    shorter.set_roles(sb.roles[..128].to_vec());
    assert!(shorter.encode() == before);

    // 4 KiB, unless a bitmap, a log or the data begin before.
    assert_eq!(sb.set_role(1919, Role::Spare), Ok(()));
    assert_eq!(
        sb.set_role(1920, Role::Spare),
        Err(SuperblockError::Full(1920))
    );
    let mut sb = Superblock {
        feature_map: Feature::BITMAP.0,
        bitmap_or_ppl: 2u32.to_le_bytes(),
        ..created()
    };
    let full = Err(SuperblockError::Full(384));
    assert_eq!((sb.room_bytes(), sb.most_roles()), (1024, 384));
    assert_eq!(sb.set_role(384, Role::Spare), full);
    assert_eq!(sb.set_role(u32::MAX, Role::Spare), full);
    assert_eq!(sb.roles.len(), 128);
    assert_eq!(sb.set_role(383, Role::Spare), Ok(()));
    sb.check(MEMBER_SECTORS).expect("nothing overlaps");
}
