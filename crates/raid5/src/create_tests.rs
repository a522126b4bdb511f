use super::*;
use crate::{LogArea, Policy, WriteIntent};

fn real(bytes: &[u8; 512]) -> Superblock {
    let mut whole = [0; SUPER_BYTES];
    whole[..512].copy_from_slice(bytes);
    Superblock::parse(&whole).expect("a superblock")
}

fn like<'a>(sb: &Superblock, name: &'a str, consistency: Consistency) -> NewArray<'a> {
    NewArray {
        set_uuid: sb.set_uuid,
        name,
        created_secs: sb.ctime,
        layout: Layout::from_md(sb.layout).expect("a layout"),
        chunk_sectors: sb.chunk_sectors,
        device_sectors: &[24 << 11; 4],
        size_sectors: None,
        consistency,
        checksums: false,
        clean: true,
    }
}

/// With mdadm's own ids and time, the bytes are mdadm's.
#[test]
fn superblocks_are_those_of_mdadm() {
    let theirs = real(include_bytes!("testdata/ppl-created.super"));
    let created = like(&theirs, "host:vol0", Consistency::Ppl)
        .build()
        .expect("an array");
    let ours = created.superblock(2, theirs.device_uuid);
    assert_eq!(ours, theirs);
    assert!(ours.encode() == theirs.encode());
    assert_eq!(created.geometry().rows(), 352);

    // This one was written to and stopped: the kernel counted two events.
    let theirs = real(include_bytes!("testdata/bitmap-stopped.super"));
    let created = like(&theirs, "host:vol0", Consistency::Bitmap)
        .build()
        .expect("an array");
    let ours = Superblock {
        events: 2,
        utime: theirs.utime,
        ..created.superblock(0, theirs.device_uuid)
    };
    assert_eq!(ours, theirs);
    let header = BitmapHeader::parse(include_bytes!("testdata/bitmap-stopped.header"));
    let ours = BitmapHeader {
        events: 2,
        events_cleared: 1,
        ..created.bitmap().expect("a bitmap").clone()
    };
    assert_eq!(Ok(ours), header);
}

/// A member that is missing, and a spare.
#[test]
fn those_of_incomplete_arrays_and_spares_too() {
    let theirs = real(include_bytes!("testdata/missing.super"));
    let mut created = like(&theirs, "host:vol0", Consistency::Ppl)
        .build()
        .expect("an array");
    created.leave_out(2);
    let ours = created.superblock(3, theirs.device_uuid);
    assert_eq!(ours, theirs);
    assert!(ours.encode() == theirs.encode());

    let theirs = real(include_bytes!("testdata/spare.super"));
    let mut created = NewArray {
        device_sectors: &[24 << 11; 3],
        ..like(&theirs, "host:vol0", Consistency::Ppl)
    }
    .build()
    .expect("an array");
    assert_eq!(created.add_spare(24 << 11).ok(), Some(3));
    let ours = created.superblock(3, theirs.device_uuid);
    assert_eq!(ours, theirs);
    assert!(ours.encode() == theirs.encode());

    // As large as the others, and as many as there is room for.
    let error = created.add_spare((24 << 11) - 1).expect_err("too small");
    assert!(error.to_string().contains("it needs 49152"), "{error}");
    for number in 4..1920 {
        assert_eq!(created.add_spare(24 << 11).ok(), Some(number));
    }
    let last = created.superblock(1919, theirs.device_uuid);
    assert_eq!(
        (last.role(), last.written_bytes()),
        (Role::Spare, SUPER_BYTES)
    );
    last.check(24 << 11).expect("nothing overlaps");
    let error = created.add_spare(24 << 11).expect_err("too many");
    assert!(
        error.to_string().contains("there is room for 1920"),
        "{error}"
    );
}

/// Where mdadm puts data, by hand: 24 sectors, bitmap or log, headroom of a thousandth (a power of two part of 128 MiB, and two chunks
/// at least), rounded up to 1 MiB.
#[test]
fn data_starts_where_mdadm_puts_it() {
    const MIB: u64 = 2048;
    const TIB: u64 = MIB << 20;
    let offset = |consistency, device_mib: u64, chunk_sectors| {
        let devices = [device_mib * MIB; 3];
        let array = NewArray {
            set_uuid: [1; 16],
            name: "a",
            created_secs: 0,
            layout: Layout::default(),
            chunk_sectors,
            device_sectors: &devices,
            size_sectors: None,
            consistency,
            checksums: false,
            clean: true,
        };
        array.data_offset_sectors(device_mib * MIB) / MIB
    };
    use Consistency::{Bitmap, Ppl, Resync};
    assert_eq!(offset(Resync, 24, 128), 1);
    assert_eq!(offset(Ppl, 24, 128), 2);
    // 1 GiB: headroom 1 MiB; with large chunks twice as much as two of them.
    assert_eq!(offset(Bitmap, 1024, 1024), 2);
    assert_eq!(offset(Ppl, 1024, 1024), 3);
    assert_eq!(offset(Resync, 24, 8192), 9);
    // 100 GiB: 64 MiB. 1 TiB: 128 MiB, and no more beyond; mdadm(8) users know it as 129 and 132 MiB.
    assert_eq!(offset(Bitmap, 100 << 10, 1024), 65);
    assert_eq!(offset(Bitmap, 1 << 20, 1024), 129);
    assert_eq!(offset(Bitmap, 16 * (TIB / MIB), 1024), 129);
    assert_eq!(offset(Ppl, 16 * (TIB / MIB), 1024), 130);
}

#[test]
fn bitmaps_get_larger_chunks_when_they_must() {
    const GIB: u64 = 1 << 21;
    assert_eq!(bitmap_chunk_bytes(GIB), Some(64 << 20));
    assert_eq!(bitmap_chunk_bytes(7 * GIB), Some(64 << 20));
    // 128 KiB hold a million bits: 64 TiB of 64 MiB.
    assert_eq!(bitmap_chunk_bytes(60 << 31), Some(64 << 20));
    assert_eq!(bitmap_chunk_bytes(70 << 31), Some(128 << 20));
    assert_eq!(bitmap_chunk_bytes(1 << 42), None);
    for shift in 15..41 {
        let size_sectors = (1u64 << shift) + 12345;
        let header = BitmapHeader {
            chunk_bytes: bitmap_chunk_bytes(size_sectors).expect("enough"),
            sync_size_sectors: size_sectors,
            ..BitmapHeader::new([0; 16])
        };
        let space = bitmap_space_sectors(size_sectors).max(8);
        assert!(header.area_bytes() as u64 / 512 <= space, "{shift}");
    }
}

#[test]
fn whatever_is_made_is_accepted() {
    let seed = pvblk_testing::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..500 {
        let members = rng.usize(3..=64);
        let devices: Vec<u64> = (0..members)
            .map(|_| rng.u64((20 << 11)..(40 << 11)) << rng.u32(0..24))
            .collect();
        let consistency = [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl];
        let mut uuid = [0; 16];
        rng.fill(&mut uuid);
        let new = NewArray {
            set_uuid: uuid,
            name: "host:array",
            created_secs: rng.u64(0..1 << 40),
            layout: Layout::ALL[rng.usize(0..4)],
            chunk_sectors: 8 << rng.u32(0..=10),
            device_sectors: &devices,
            size_sectors: None,
            consistency: consistency[rng.usize(0..3)],
            checksums: false,
            clean: rng.bool(),
        };
        let created = match new.build() {
            Ok(created) => created,
            // The first member may be so much larger than another that nothing is left there.
            Err(e) => {
                assert!(e.to_string().contains("take larger members"), "{e}");
                continue;
            }
        };
        for member in [0, members - 1] {
            let sb = created.superblock(member, uuid);
            let back = Superblock::parse(&sb.encode()).expect("a superblock");
            assert_eq!(back, sb, "seed {seed}");
            assert_eq!(back.role(), Role::Active(member as u16), "seed {seed}");
            assert_eq!(back.is_clean(), new.clean, "seed {seed}");
            let checked = back.check(devices[member]);
            assert_eq!(checked, Ok(created.geometry()), "seed {seed}");
            match (back.policy(), new.consistency) {
                (Policy::Resync, Consistency::Resync) => {}
                (Policy::Ppl(log), Consistency::Ppl) => {
                    let expected = LogArea {
                        sector: 16,
                        sectors: 2048,
                    };
                    assert_eq!(log, expected);
                }
                (Policy::Bitmap { sector: 16 }, Consistency::Bitmap) => {
                    let header = created.bitmap().expect("a bitmap");
                    let bitmap = WriteIntent::new(header.clone(), !new.clean);
                    assert_eq!(bitmap.is_clean(), new.clean);
                    header
                        .check(&uuid, &created.geometry(), back.bitmap_room_sectors())
                        .expect("it fits");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn wishes_that_cannot_be_are_refused() {
    let refuse = |device_sectors: &[u64], chunk_sectors, name: &str, what: &str| {
        let new = NewArray {
            set_uuid: [0; 16],
            name,
            created_secs: 0,
            layout: Layout::default(),
            chunk_sectors,
            device_sectors,
            size_sectors: None,
            consistency: Consistency::Ppl,
            checksums: false,
            clean: true,
        };
        let error = new.build().expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let gib = 1 << 21;
    refuse(&[], 128, "a", "0 members");
    refuse(&[gib; 2], 128, "a", "2 members");
    refuse(&[gib; 65], 128, "a", "65 members");
    refuse(&[gib, gib, 100], 128, "a", "take larger members");
    refuse(&[4096; 3], 128, "a", "take larger members");
    refuse(&[gib; 3], 100, "a", "power of two");
    refuse(&[gib; 3], 0, "a", "power of two");
    refuse(
        &[gib; 3],
        128,
        "a name that is longer than a superblock",
        "31 bytes",
    );
    refuse(&[gib; 3], 128, "a\0b", "31 bytes");
}
