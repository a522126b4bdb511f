//! Target `raid5_metadata`: members of arrays that anybody may have written. Whatever is read can be written again and is the
//! same, what is accepted lies on the device, and no log has parity written where it doesn't belong.

use arbitrary::{Result, Unstructured};
use pvblk_raid5::{
    BITMAP_HEADER_BYTES, Batch, BitmapHeader, Consistency, Feature, Geometry, Health, Layout,
    NewArray, PPL_HEADER_BYTES, Policy, PplEntry, PplError, PplHeader, STRIPE_BYTES, SUPER_BYTES,
    Superblock, WriteIntent, find_newest, ppl_signature,
};

pub fn raid5_metadata(data: &[u8]) {
    // Each once as it is, and once with all in order that would end the reading early.
    let mut block = [0; SUPER_BYTES];
    let len = data.len().min(SUPER_BYTES);
    block[..len].copy_from_slice(&data[..len]);
    superblock(&block);
    mend_superblock(&mut block);
    superblock(&block);

    bitmap(data);
    let mut area = data.to_vec();
    area.resize(data.len().max(8192), 0);
    area[..8].copy_from_slice(b"bitm\x04\0\0\0");
    bitmap(&area);

    raw_log(data);
    let _ = logs(&mut Unstructured::new(data));
}

/// A log with the signature that it says, and with its checksum made right.
fn raw_log(data: &[u8]) {
    let mut page = data.to_vec();
    page.resize(data.len().max(PPL_HEADER_BYTES), 0);
    let signature = u32::from_le_bytes([page[512], page[513], page[514], page[515]]);
    page[530] = 0;
    page[531] = 0;
    let (found, counted) = match PplHeader::parse(&page, signature) {
        Err(PplError::Checksum { found, counted }) => (found, counted),
        other => return drop(other),
    };
    assert_ne!(found, counted);
    page[532..536].copy_from_slice(&counted.to_le_bytes());
    match PplHeader::parse(&page, signature) {
        Ok(header) => {
            let again = PplHeader::parse(&header.encode(), signature);
            assert_eq!(again, Ok(header));
            let newest = find_newest(&page, signature).expect("the first is good");
            assert!(newest.offset_sectors * 512 < page.len() as u64);
        }
        Err(e) => assert!(matches!(e, PplError::Entries(149..)), "{e}"),
    }
}

fn superblock(bytes: &[u8; SUPER_BYTES]) {
    let sb = match Superblock::parse(bytes) {
        Ok(sb) => sb,
        Err(e) => return assert_eq!(e.to_string().lines().count(), 1),
    };
    assert!(sb.encode() == *bytes, "written as it was read");
    let _ = (sb.role(), sb.name(), sb.recovered_sectors());
    for device_sectors in [0, 1 << 16, 1 << 40, u64::MAX] {
        let geometry = match sb.check(device_sectors) {
            Ok(geometry) => geometry,
            Err(e) => {
                assert_eq!(e.to_string().lines().count(), 1);
                continue;
            }
        };
        let last = geometry.locate(geometry.capacity_sectors() - 1);
        assert!(last.member_sector < sb.size_sectors);
        assert!(sb.data_offset_sectors + sb.size_sectors <= device_sectors);
        if let Policy::Ppl(log) = sb.policy() {
            assert!(log.sector + log.sectors <= device_sectors);
        }
        if let Some(log) = sb.bad_block_log() {
            assert!(log.sector + log.sectors <= device_sectors);
        } else {
            assert!(!sb.has(Feature::BAD_BLOCKS));
        }
        let _ = sb.bitmap_room_sectors();
    }
    let _ = sb.check_bad_blocks(bytes);
}

/// Magic, version, place, padding, a plausible table and the checksum, which is the sum of all words.
fn mend_superblock(bytes: &mut [u8; SUPER_BYTES]) {
    bytes[..8].copy_from_slice(&[0xfc, 0x4e, 0x2b, 0xa9, 1, 0, 0, 0]);
    bytes[12..16].fill(0);
    bytes[144..152].copy_from_slice(&8u64.to_le_bytes());
    bytes[224..256].fill(0);
    let max_dev = u16::from_le_bytes([bytes[220], bytes[221]]) % 1921;
    bytes[220..224].copy_from_slice(&u32::from(max_dev).to_le_bytes());
    bytes[216..220].fill(0);
    let counted = bytes[..256 + 2 * usize::from(max_dev)].chunks(4);
    let sum: u64 = counted
        .map(|w| w.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
        .sum();
    let folded = (sum & 0xffff_ffff) + (sum >> 32);
    bytes[216..220].copy_from_slice(&(folded as u32).to_le_bytes());
}

fn bitmap(area: &[u8]) {
    let header = match BitmapHeader::parse(area) {
        Ok(header) => header,
        Err(e) => return assert_eq!(e.to_string().lines().count(), 1),
    };
    assert!(header.encode()[..] == area[..BITMAP_HEADER_BYTES]);
    assert!(header.area_bytes() as u64 >= 256 + header.bits() / 8);
    let from = header.events;
    let Ok(mut bitmap) = WriteIntent::load(area, header.is_current(0), from) else {
        return assert!(header.area_bytes() > area.len());
    };
    let mut at = 0;
    for range in bitmap.dirty_ranges() {
        assert!(range.start < range.end && at <= range.start);
        assert!(range.end <= header.sync_size_sectors);
        at = range.end;
    }
    if let Some(intent) = bitmap.start_write(header.sync_size_sectors - 1, 1) {
        assert!(intent.pages().all(|p| bitmap.is_unwritten(p)));
        bitmap.end_write(header.sync_size_sectors - 1, 1, true);
    }
    bitmap.resynced(0..header.sync_size_sectors);
    assert_eq!(bitmap.dirty_ranges().next(), None);
    let health = Health {
        events: header.events_cleared,
        degraded: false,
    };
    bitmap.sweep(health);
    bitmap.sweep(health);
    assert!(bitmap.is_clean());
}

/// A log of arbitrary entries, and one that we write, on an array of arbitrary shape.
fn logs(u: &mut Unstructured) -> Result<()> {
    let signature = ppl_signature(&u.arbitrary()?);
    let layout = *u.choose(&Layout::ALL)?;
    let (members, chunk_shift) = (u.int_in_range(3..=64)?, u.int_in_range(3..=13)?);
    let member_sectors = u.int_in_range(8..=1u64 << 40)?;
    let Ok(g) = Geometry::new(members, 1 << chunk_shift, layout, member_sectors) else {
        return Ok(());
    };
    created(u, g.layout(), members as usize, 1 << chunk_shift)?;

    let mut batch = Batch::new(g, signature, u.arbitrary()?, 0, 1 << 17);
    let block = [u.arbitrary()?; STRIPE_BYTES];
    let mut partial = Vec::new();
    let mut stripe = u.int_in_range(0..=g.stripes() - 1)?;
    for _ in 0..u.int_in_range(0..=8)? {
        stripe = (stripe + u.int_in_range(0..=2)?) % g.stripes();
        let first = u.int_in_range(0..=g.data_members() - 1)?;
        let blocks = u.int_in_range(1..=g.data_members() - first)?;
        let part = (blocks < g.data_members()).then_some(&block);
        if g.stripe_parity(stripe) == 0 && batch.add(stripe, first, blocks, part).is_ok() {
            partial.extend(part.into_iter().flatten());
        }
    }
    for (at, entry) in batch.header().entries_at() {
        let at = at as usize;
        let own = &partial[at..at + entry.pp_bytes as usize];
        assert_eq!(entry.check(own), Ok(()));
        let plan = entry.plan(&g, 0, |_, _| false).expect("our own entry");
        assert_eq!(plan.left_alone, 0);
        let blocks: usize = plan.repairs.iter().map(|r| r.data_members.len()).sum();
        assert_eq!(blocks * STRIPE_BYTES, entry.data_bytes as usize);
    }
    let mut area = batch.header().encode().to_vec();
    area.extend(&partial);
    let found = find_newest(&area, signature).expect("our own log");
    assert_eq!(&found.header, batch.header());

    // The rest of the input is entries.
    let mut header = batch.header().clone();
    header.entries.clear();
    while !u.is_empty() && header.entries.len() < 148 {
        header.entries.push(PplEntry {
            data_sector: u.int_in_range(0..=g.capacity_sectors())? & !u.int_in_range(0..=7)?,
            pp_bytes: u.arbitrary::<u16>()?.into(),
            data_bytes: u.arbitrary::<u32>()? & 0x3f_ffff,
            parity_member: u.int_in_range(0..=members)?,
            checksum: u.arbitrary()?,
        });
        if let Some(entry) = header.entries.last_mut().filter(|e| e.checksum & 3 != 0) {
            entry.pp_bytes &= !4095;
            entry.data_bytes &= !4095;
            let row = g
                .locate(entry.data_sector.min(g.capacity_sectors() - 1))
                .row;
            entry.parity_member = g.parity_member(row) as u32;
        }
    }
    let bytes = header.encode();
    assert_eq!(PplHeader::parse(&bytes, signature).as_ref(), Ok(&header));
    for entry in &header.entries {
        foreign(&g, entry);
    }
    Ok(())
}

fn foreign(g: &Geometry, entry: &PplEntry) {
    let log = entry.parity_member as usize;
    let Ok(plan) = entry.plan(g, log, |member, _| member == 1) else {
        return;
    };
    let row = g.locate(entry.data_sector).row;
    let mut places = Vec::new();
    for repair in &plan.repairs {
        assert_eq!(g.stripe_row(repair.member_sector / 8), row);
        assert_eq!(repair.parity_member, g.parity_member(row));
        assert!(!repair.data_members.contains(&repair.parity_member));
        assert!(!repair.data_members.contains(&1));
        assert!(!repair.data_members.is_empty());
        let at = repair.partial_parity.unwrap_or(0);
        assert!(at == 0 || at + 4096 <= u64::from(entry.pp_bytes));
        places.push(repair.member_sector);
    }
    places.sort_unstable();
    let blocks = places.len();
    places.dedup();
    assert_eq!(blocks, places.len(), "a block repaired twice");
}

/// Metadata that we make is accepted.
fn created(u: &mut Unstructured, layout: Layout, members: usize, chunk_sectors: u32) -> Result<()> {
    let device_sectors = vec![u.int_in_range(0..=1u64 << 44)?; members];
    let consistency = [Consistency::Resync, Consistency::Bitmap, Consistency::Ppl];
    let new = NewArray {
        set_uuid: u.arbitrary()?,
        name: "host:name",
        created_secs: 0,
        layout,
        chunk_sectors,
        device_sectors: &device_sectors,
        size_sectors: None,
        consistency: *u.choose(&consistency)?,
        checksums: false,
        clean: u.arbitrary()?,
    };
    if let Ok(created) = new.build() {
        let sb = created.superblock(members - 1, u.arbitrary()?);
        let back = Superblock::parse(&sb.encode());
        assert_eq!(back.as_ref(), Ok(&sb));
        assert_eq!(sb.check(device_sectors[0]), Ok(created.geometry()));
    }
    Ok(())
}

/// Metadata of a small array with each policy: seeds for the fuzzer.
pub fn samples() -> Vec<(&'static str, Vec<u8>)> {
    let all = [
        ("resync", Consistency::Resync),
        ("bitmap", Consistency::Bitmap),
        ("ppl", Consistency::Ppl),
    ];
    let mut samples = Vec::new();
    for (name, consistency) in all {
        let new = NewArray {
            set_uuid: [9; 16],
            name: "host:name",
            created_secs: 1 << 30,
            layout: Layout::LeftSymmetric,
            chunk_sectors: 128,
            device_sectors: &[1 << 16; 4],
            size_sectors: None,
            consistency,
            checksums: false,
            clean: false,
        };
        let Ok(created) = new.build() else { continue };
        samples.push((name, created.superblock(1, [1; 16]).encode().to_vec()));
        if let Some(header) = created.bitmap() {
            let bitmap = WriteIntent::new(header.clone(), true);
            samples.push(("bits", bitmap.page(0).to_vec()));
        }
    }
    samples
}
