use super::*;

const SIZE: usize = 8 << 20;

/// The formats found in an image with only these bytes written.
fn image(at: usize, bytes: &[u8]) -> Option<String> {
    image_of(SIZE, &[(at, bytes)])
}

fn image_of(size: usize, parts: &[(usize, &[u8])]) -> Option<String> {
    let mut all = vec![0; size];
    for (at, bytes) in parts {
        all[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    let end = size - END_BYTES.min(size);
    named(&find(
        &all[..START_BYTES.min(size)],
        &all[end..],
        size as u64,
    ))
}

#[test]
fn nothing_is_nothing() {
    assert_eq!(image(0, &[]), None);
    for size in [0, 1, 511, 512, 513, 4096, 100_000] {
        assert_eq!(image_of(size, &[]), None);
    }
}

#[test]
fn random_bytes_are_hardly_anything() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..50 {
        let mut all = vec![0; 512 << 10];
        rng.fill(&mut all);
        let end = all.len() - END_BYTES;
        assert_eq!(find(&all[..START_BYTES], &all[end..], all.len() as u64), []);
    }
}

#[test]
fn each_mark_is_found_where_it_belongs() {
    for (at, bytes, what) in [
        (0, &b"XFSB"[..], "an XFS file system"),
        (0x10040, b"_BHRfS_M", "a btrfs file system"),
        (3, b"NTFS    ", "an NTFS file system"),
        (82, b"FAT32   ", "a FAT file system"),
        (0x8001, b"CD001", "an ISO 9660 file system"),
        (0, b"hsqs", "a squashfs file system"),
        (4086, b"SWAPSPACE2", "swap space"),
        (65526, b"SWAPSPACE2", "swap space"),
        (512, b"LABELONE", "an LVM physical volume"),
        (0, b"LUKS\xba\xbe\0\x02", "a LUKS volume"),
        (512, b"EFI PART", "a GUID partition table"),
        (SIZE - 512, b"EFI PART", "a GUID partition table"),
        (0, b"QFI\xfb\0\0\0\x03", "a qcow2 image"),
        (SIZE - 512, b"conectix", "a VHD image"),
        (
            4096,
            b"\xfc\x4e\x2b\xa9\x01\0\0\0",
            "a member of an md array",
        ),
        (0, b"\xfc\x4e\x2b\xa9\x01\0\0\0", "a member of an md array"),
        (
            SIZE - 8192,
            b"\xfc\x4e\x2b\xa9\x01\0\0\0",
            "a member of an md array",
        ),
        (
            SIZE - 65536,
            b"\xfc\x4e\x2b\xa9\0\0\0\0",
            "a member of an md array",
        ),
        (
            SIZE - 65536,
            b"\xa9\x2b\x4e\xfc\0\0\0\0",
            "a member of an md array",
        ),
        (
            192 << 10,
            b"\x0c\xb1\xba\0\0\0\0\0",
            "a member of a ZFS pool",
        ),
        (
            255 << 10,
            b"\0\0\0\0\0\xba\xb1\x0c",
            "a member of a ZFS pool",
        ),
    ] {
        assert_eq!(image(at, bytes).as_deref(), Some(what), "{at:#x}");
        assert_eq!(image(at + 8, bytes), None, "{what} elsewhere");
    }
}

#[test]
fn short_marks_have_to_make_sense() {
    let ext = |log: u8| image_of(SIZE, &[(1048, &[log]), (1080, &[0x53, 0xef])]);
    assert_eq!(ext(2).as_deref(), Some("an ext2, ext3 or ext4 file system"));
    assert_eq!(ext(9), None);
    let mut partition = [0; 66];
    (partition[64], partition[65]) = (0x55, 0xaa);
    assert_eq!(
        image(446, &partition),
        None,
        "a boot sector without partitions"
    );
    (partition[4], partition[9], partition[13]) = (0x83, 8, 8);
    assert_eq!(
        image(446, &partition).as_deref(),
        Some("an MBR partition table")
    );
    partition[16] = 0x12;
    assert_eq!(image(446, &partition), None, "code, and no table");
    // A version that md doesn't have.
    assert_eq!(image(4096, b"\xfc\x4e\x2b\xa9\x07\0\0\0"), None);
}

#[test]
fn several_are_all_named() {
    let two = image_of(
        SIZE,
        &[(0, b"XFSB"), (512, b"EFI PART"), (SIZE - 512, b"EFI PART")],
    );
    let text = "an XFS file system and a GUID partition table";
    assert_eq!(two.as_deref(), Some(text));
}

#[test]
fn containers_are_told_by_their_first_page() {
    for magic in MAGICS.iter().filter(|m| m.container) {
        let At::Start(at) = magic.at else {
            panic!("{}", magic.what);
        };
        assert!(at + magic.bytes.len() <= 512);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let container = || container_in(file.reopen().unwrap());
    assert_eq!(container(), None);
    std::fs::write(file.path(), b"QFI\xfb\0\0\0\x01").unwrap();
    assert_eq!(container().unwrap().what, "a QCOW image");
    std::fs::write(file.path(), b"XFSB").unwrap();
    assert_eq!(container(), None, "that is what a disk holds");
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(container_in(File::open(folder.path()).unwrap()), None);
}
