use super::*;
use crate::{Layout, Superblock};

fn geometry() -> Geometry {
    Geometry::new(4, 128, Layout::LeftAsymmetric, 45056).expect("a geometry")
}

fn set_uuid(bytes: &[u8; 512]) -> [u8; 16] {
    let mut whole = [0; 4096];
    whole[..512].copy_from_slice(bytes);
    let sb = Superblock::parse(&whole).expect("a superblock");
    sb.set_uuid
}

#[test]
fn an_empty_log_is_that_of_mdadm() {
    let uuid = set_uuid(include_bytes!("testdata/ppl-created.super"));
    let bytes = include_bytes!("testdata/ppl-created.log");
    let ours = PplHeader::empty(ppl_signature(&uuid));
    assert!(ours.encode() == *bytes);
    assert_eq!(PplHeader::parse(bytes, ours.signature), Ok(ours));
}

#[test]
fn a_log_of_the_kernel_is_read_and_made_again() {
    let uuid = set_uuid(include_bytes!("testdata/ppl-running.super"));
    let bytes = include_bytes!("testdata/ppl-running.log");
    let signature = ppl_signature(&uuid);
    let header = PplHeader::parse(bytes, signature).expect("a log");
    assert!(header.encode()[..] == bytes[..4096]);
    let [entry] = header.entries[..] else {
        panic!("{header:?}");
    };
    assert_eq!((entry.data_sector, entry.data_bytes), (1040, 4096));
    let partial_parity: &[u8; 4096] = bytes[4096..].try_into().expect("a block");
    assert_eq!(entry.check(partial_parity), Ok(()));
    // The same write, logged by us, is the same log.
    let geometry = geometry();
    let slot = geometry.slot(entry.data_sector);
    let mut batch = Batch::new(geometry, signature, header.generation, 1, 1 << 17);
    let added = batch.add(slot.stripe, slot.index, 1, Some(partial_parity));
    assert_eq!((added, batch.header()), (Ok(()), &header));
    assert_eq!(batch.pp_bytes(), 4096);
}

#[test]
fn damage_and_other_arrays_are_found() {
    let good = PplHeader {
        signature: 5,
        generation: 6,
        entries: vec![
            PplEntry {
                data_sector: 1,
                pp_bytes: 2,
                data_bytes: 3,
                parity_member: 4,
                checksum: 5,
            };
            PPL_MAX_ENTRIES
        ],
    };
    let bytes = good.encode();
    assert_eq!(PplHeader::parse(&bytes, 5), Ok(good));
    for at in 0..PPL_HEADER_BYTES {
        let mut damaged = bytes;
        damaged[at] ^= 1;
        let parsed = PplHeader::parse(&damaged, 5);
        assert!(matches!(parsed, Err(PplError::Checksum { .. })), "{at}");
    }
    let other = PplHeader::parse(&bytes, 6);
    assert_eq!(other, Err(PplError::Signature { found: 5, ours: 6 }));
    let mut many = bytes;
    many[528] = 149;
    let sum = checksum(&many);
    many[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(PplHeader::parse(&many, 5), Err(PplError::Entries(149)));
    assert_eq!(PplHeader::parse(&bytes[..4095], 5), Err(PplError::Short));
}

#[test]
fn areas_are_as_large_as_mdadm_makes_them() {
    assert_eq!(single_log_sectors(128), 8 + 256);
    assert_eq!(single_log_sectors(1024), 8 + 1024);
    assert!(!tells_multiple(527) && tells_multiple(528) && tells_multiple(2048));
    assert_eq!(log_space_bytes(2048), 128 << 10);
    assert_eq!(log_space_bytes(8 + 256), 128 << 10);
    assert_eq!(log_space_bytes(8 + 256 + 7), 128 << 10);
    assert_eq!(log_space_bytes(16), 4096);
    assert_eq!(log_space_bytes(7), 0);
}

#[test]
fn stripes_join_when_they_follow_in_a_row() {
    let g = geometry();
    let new = || Batch::new(g, 1, 1, g.stripe_parity(0), 1 << 20);
    let entries = |adds: &[(u64, usize, usize)]| {
        let mut batch = new();
        for &(stripe, first, blocks) in adds {
            let pp = (blocks < 3).then_some(&[0; STRIPE_BYTES]);
            batch.add(stripe, first, blocks, pp).expect("room");
        }
        let sizes = batch.header().entries.iter();
        sizes
            .map(|e| (e.data_sector, e.data_bytes / 4096, e.pp_bytes / 4096))
            .collect::<Vec<_>>()
    };
    assert_eq!(entries(&[(0, 0, 1), (1, 0, 1), (2, 0, 1)]), [(0, 3, 3)]);
    assert_eq!(entries(&[(0, 1, 2), (1, 1, 2)]), [(128, 4, 2)]);
    assert_eq!(entries(&[(4, 0, 3), (5, 0, 3)]), [(32, 6, 0)]);
    // A hole, the same again, backwards, other blocks, as many others, whole and in part, another row of the same parity member.
    assert_eq!(entries(&[(0, 0, 1), (2, 0, 1)]).len(), 2);
    assert_eq!(entries(&[(0, 0, 1), (0, 0, 1)]).len(), 2);
    assert_eq!(entries(&[(1, 0, 1), (0, 0, 1)]).len(), 2);
    assert_eq!(entries(&[(0, 0, 1), (1, 0, 2)]).len(), 2);
    assert_eq!(entries(&[(0, 0, 1), (1, 1, 1)]).len(), 2);
    assert_eq!(entries(&[(0, 0, 3), (1, 0, 2)]).len(), 2);
    assert_eq!(entries(&[(15, 0, 1), (64, 0, 1)]).len(), 2);
}

#[test]
fn a_batch_says_when_it_is_full() {
    let g = geometry();
    let pp = [3; STRIPE_BYTES];
    let mut batch = Batch::new(g, 1, 1, g.stripe_parity(0), 2 * 4096);
    assert!(batch.is_empty());
    assert_eq!(batch.add(0, 0, 1, Some(&pp)), Ok(()));
    assert_eq!(batch.add(1, 0, 1, Some(&pp)), Ok(()));
    let before = batch.header().clone();
    assert_eq!(batch.add(2, 0, 1, Some(&pp)), Err(Full));
    assert_eq!(batch.header(), &before);
    // Whole stripes take no room.
    assert_eq!(batch.add(2, 0, 3, None), Ok(()));

    let mut batch = Batch::new(g, 1, 1, g.stripe_parity(0), 1 << 30);
    for n in 0..PPL_MAX_ENTRIES {
        assert_eq!(batch.add(n as u64 % 2 * 4, 0, 1, Some(&pp)), Ok(()), "{n}");
    }
    assert_eq!(batch.add(0, 0, 1, Some(&pp)), Err(Full));
    assert_eq!(batch.add(5, 0, 1, Some(&pp)), Ok(()), "it joins the last");
    assert_eq!(batch.header().entries.len(), PPL_MAX_ENTRIES);
}

#[test]
fn the_newest_of_several_logs_counts() {
    let log = |generation: u64, blocks: u32| {
        let header = PplHeader {
            signature: 9,
            generation,
            entries: vec![PplEntry {
                data_sector: 0,
                pp_bytes: blocks * 4096,
                data_bytes: 0,
                parity_member: 0,
                checksum: 0,
            }],
        };
        let mut bytes = header.encode().to_vec();
        bytes.resize(4096 + blocks as usize * 4096, 0xaa);
        bytes
    };
    let find = |logs: &[Vec<u8>]| {
        let mut area = logs.concat();
        area.extend([0; 4096]);
        find_newest(&area, 9).map(|n| (n.offset_sectors, n.header.generation))
    };
    assert_eq!(find(&[log(4, 0)]), Ok((0, 4)));
    assert_eq!(find(&[log(4, 2), log(5, 0), log(6, 1)]), Ok((32, 6)));
    // md began anew at the start: the logs after it are older.
    assert_eq!(find(&[log(7, 2), log(5, 0), log(6, 1)]), Ok((0, 7)));
    assert_eq!(find(&[log(7, 2), log(8, 0), log(6, 1)]), Ok((24, 8)));
    let mut damaged = log(5, 0);
    damaged[1000] ^= 1;
    assert_eq!(find(&[log(4, 2), damaged.clone(), log(6, 1)]), Ok((0, 4)));
    assert!(matches!(find(&[damaged]), Err(PplError::Checksum { .. })));
    // A log that says it goes beyond the area ends the search.
    assert_eq!(
        find_newest(&log(4, 100)[..4096], 9).map(|n| n.offset_sectors),
        Ok(0)
    );
}
