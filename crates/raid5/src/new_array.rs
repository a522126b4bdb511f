//! Makes an array of devices: writes the metadata that [`NewArray`] describes.

use super::assemble::{Assembly, Member, read_superblock};
use super::bitmap::{BitmapHeader, PAGE_BYTES, WriteIntent};
use super::blocking::{Blocking, Idle};
use super::create::{Consistency, NewArray};
use super::geometry::Layout;
use super::identity::{now_secs, uuid_text};
use super::ppl::{PPL_HEADER_BYTES, PplHeader, ppl_signature};
use super::sums::erase_sums;
use super::superblock::{Kept, Policy, SUPER_SECTOR, Superblock};
use crate::found;
use pvblk_block::{BlockDevice, Error, ExtentKind};
use std::sync::Arc;

/// Options for a new array.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// As it is to be written, usually `host:name`; at most 31 bytes.
    pub name: String,
    /// Order in which members hold parity.
    pub layout: Layout,
    /// Sectors of a chunk.
    pub chunk_sectors: u32,
    /// Means by which the array survives a crash.
    pub consistency: Consistency,
    /// Sectors to use on each member; `None`: as many as there are.
    pub size_sectors: Option<u64>,
    /// Bytes of a member for each bit of the write-intent bitmap; `None`: 64 MiB, or more.
    pub bitmap_chunk_bytes: Option<u64>,
    /// Without a bitmap: keep a private map, so that a member which was away over a restart is brought up to date.
    pub private_map: bool,
    /// Keep a sum of each block, so that a block that isn't what was written is found and calculated. Needs the private map.
    pub checksums: bool,
    /// All parity is right already, as it is when all members hold zeros.
    pub assume_clean: bool,
    /// Overwrites contents of the devices: another array, a file system, partitions.
    pub force: bool,
    /// The array's id; those of the members follow from it.
    pub set_uuid: [u8; 16],
    /// Seconds since 1970.
    pub created_secs: u64,
}

impl CreateOptions {
    /// md's usual shape (left-symmetric, chunks of 512 KiB), with a partial parity log, of now and with a random id.
    pub fn new(name: impl Into<String>) -> CreateOptions {
        let mut set_uuid = [0; 16];
        fastrand::fill(&mut set_uuid);
        CreateOptions {
            name: name.into(),
            layout: Layout::default(),
            chunk_sectors: 1024,
            consistency: Consistency::Ppl,
            size_sectors: None,
            bitmap_chunk_bytes: None,
            private_map: true,
            checksums: false,
            assume_clean: false,
            force: false,
            set_uuid,
            created_secs: now_secs(),
        }
    }
}

/// The devices of a new array, each with the user's name of it.
#[derive(Default)]
pub struct NewMembers {
    /// By place. One may be missing.
    pub members: Vec<Option<(String, Arc<dyn BlockDevice>)>>,
    /// Spares, onto which a member that fails is recovered.
    pub spares: Vec<(String, Arc<dyn BlockDevice>)>,
}

impl From<Vec<(String, Arc<dyn BlockDevice>)>> for NewMembers {
    fn from(members: Vec<(String, Arc<dyn BlockDevice>)>) -> NewMembers {
        NewMembers {
            members: members.into_iter().map(Some).collect(),
            spares: Vec::new(),
        }
    }
}

/// Writes the metadata of a new array, and none of its data. The order of the devices is that of the places.
///
/// The array is clean if that was to be assumed, or if all devices report holes where data goes: parity of
/// zeros is zeros. Otherwise it is dirty, and [`super::prepare`] computes all parity. With a member missing
/// it is clean, whatever the others hold: that member's data is then defined by parity.
pub fn create(
    devices: impl Into<NewMembers>,
    options: &CreateOptions,
    idle: &mut Idle<'_>,
) -> Result<Assembly, Error> {
    let NewMembers { members, spares } = devices.into();
    if options.checksums && (!options.private_map || options.consistency == Consistency::Bitmap) {
        return Err(Error::config(
            "checksums need the private map, which arrays with a write-intent bitmap don't have: take a partial parity log",
        ));
    }
    let missing = members.iter().filter(|m| m.is_none()).count();
    if missing > 1 {
        return Err(Error::config(format!(
            "{missing} members are missing: of a new array one can be, no more"
        )));
    }
    let missing = members.iter().position(Option::is_none);
    for (name, device) in members.iter().flatten().chain(&spares) {
        check_device(name, device, options, idle)?;
    }
    let size = |m: &(String, Arc<dyn BlockDevice>)| m.1.capacity_sectors();
    // In place of the one that is missing one that doesn't matter.
    let first = members.iter().flatten().map(size).next().unwrap_or(0);
    let sizes: Vec<u64> = members
        .iter()
        .map(|m| m.as_ref().map_or(first, size))
        .collect();
    let mut new = NewArray {
        set_uuid: options.set_uuid,
        name: &options.name,
        created_secs: options.created_secs,
        layout: options.layout,
        chunk_sectors: options.chunk_sectors,
        device_sectors: &sizes,
        size_sectors: options.size_sectors,
        consistency: options.consistency,
        checksums: options.checksums,
        clean: options.assume_clean || missing.is_some(),
    };
    let sb = new.build()?.superblock(0, [0; 16]);
    if new.size_sectors.is_none() {
        // By default the size is that which all devices have, spares included.
        let smallest = spares.iter().map(size).min().unwrap_or(u64::MAX);
        let room = smallest.saturating_sub(sb.data_offset_sectors);
        new.size_sectors = (room < sb.size_sectors).then_some(room);
    }
    if !new.clean {
        let mut all = members.iter().flatten();
        new.clean = all.all(|(_, d)| is_empty(d, sb.data_offset_sectors, sb.size_sectors));
    }
    let mut created = new.build()?;
    if let Some(bytes) = options.bitmap_chunk_bytes {
        created.set_bitmap_chunk(bytes)?;
    }
    if let Some(place) = missing {
        created.leave_out(place);
    }
    for spare in &spares {
        created.add_spare(size(spare))?;
    }
    let mut ids = fastrand::Rng::with_seed(u64::from_le_bytes(std::array::from_fn(|n| {
        options.set_uuid[n] ^ options.set_uuid[n + 8]
    })));
    // A missing member has missed everything.
    let all = !new.clean || missing.is_some();
    let private = || {
        let sectors = created.geometry().member_sectors();
        let header = BitmapHeader::private(options.set_uuid, sectors)?;
        sb.private_map().filter(|_| options.private_map)?;
        Some(match options.checksums {
            true => header.with_sums(),
            false => header,
        })
    };
    let header = created.bitmap().cloned().or_else(private);
    let has_sums = header.as_ref().is_some_and(BitmapHeader::has_sums);
    if options.checksums && !(has_sums && created.superblock(0, [0; 16]).sums_area().is_some()) {
        return Err(Error::config(
            "members of this size have no room for checksums: the largest have 60 TiB",
        ));
    }
    let bitmap = header.map(|header| WriteIntent::new(header, all));
    let mut written = Vec::new();
    let spares = spares.into_iter().map(Some);
    for (number, device) in members.into_iter().chain(spares).enumerate() {
        let mut uuid = [0; 16];
        ids.fill(&mut uuid);
        let Some((name, device)) = device else {
            written.push(None);
            continue;
        };
        let mut superblock = created.superblock(number, uuid);
        let kept = bitmap.as_ref().map(|bitmap| bitmap.header().kept());
        superblock.set_updated(options.created_secs, kept.unwrap_or(Kept::Nothing));
        if let Some(area) = superblock.sums_area().filter(|_| has_sums) {
            let mut disk = Blocking::open(&device)?;
            erase_sums(&mut disk, area, idle)?;
            disk.flush(idle)?;
        }
        write_member(&device, &superblock, bitmap.as_ref(), idle)?;
        written.push(Some(Member {
            device,
            name,
            superblock,
        }));
    }
    let spares = written.split_off(sizes.len());
    Ok(Assembly {
        spares: spares.into_iter().flatten().collect(),
        ..Assembly::new(created.geometry(), written, !new.clean)
    })
}

fn check_device(
    name: &str,
    device: &Arc<dyn BlockDevice>,
    options: &CreateOptions,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    if device.limits().read_only {
        return Err(Error::config(format!("{name} is read-only")));
    }
    match read_superblock(name, device, idle) {
        Ok(old) if !options.force => Err(Error::config(format!(
            "{name} is a member of array {:?} ({}); to lose that, use --force",
            old.name(),
            uuid_text(&old.set_uuid)
        ))),
        // The device has no superblock, or one of an unknown format. A device that can't be read can't be
        // written either, and that error is returned.
        _ if options.force => Ok(()),
        _ => ask_first(name, device, idle),
    }
}

/// Refuses a device that holds something.
pub(super) fn ask_first(
    name: &str,
    device: &Arc<dyn BlockDevice>,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    match found::on_device(device, idle) {
        Ok(Some(what)) => Err(Error::config(format!(
            "{name} holds {what}; to lose that, use --force"
        ))),
        _ => Ok(()),
    }
}

/// True if a device says that these sectors read as zeros.
fn is_empty(device: &Arc<dyn BlockDevice>, sector: u64, sectors: u64) -> bool {
    let mut extents = Vec::new();
    let told = device.extents(sector, sectors, &mut extents);
    told.is_ok() && extents.iter().all(|e| e.kind != ExtentKind::Data)
}

/// Writes the metadata of a device. Log and bitmap, or private map, come first: a device with a superblock is
/// complete.
pub(super) fn write_member(
    device: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    bitmap: Option<&WriteIntent>,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let mut disk = Blocking::open(device)?;
    if let Policy::Ppl(log) = sb.policy() {
        let mut area = vec![0; log.sectors as usize * 512];
        let header = PplHeader::empty(ppl_signature(&sb.set_uuid));
        area[..PPL_HEADER_BYTES].copy_from_slice(&header.encode());
        disk.write(log.sector, &area, idle)?;
    }
    match (sb.bitmap_sector(), bitmap, sb.private_map()) {
        (Some(sector), Some(bitmap), _) => disk.write(sector, bitmap.area(), idle)?,
        // An old map on this device would be taken for the array's at the next start.
        (_, None, Some(map)) => disk.write(map.sector, &[0; PAGE_BYTES], idle)?,
        _ => {}
    }
    // Old metadata behind the roles goes, as far as nothing else is there.
    disk.write(SUPER_SECTOR, &sb.encode()[..sb.room_bytes()], idle)
}

#[cfg(test)]
#[path = "new_array_tests.rs"]
mod tests;
