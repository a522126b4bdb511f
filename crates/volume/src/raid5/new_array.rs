//! Making an array out of devices: what [`NewArray`] works out is written.

use super::assemble::{Assembly, Member, read_superblock, uuid_text};
use super::bitmap::WriteIntent;
use super::blocking::{Blocking, Idle};
use super::create::{Consistency, NewArray};
use super::geometry::Layout;
use super::ppl::{PPL_HEADER_BYTES, PplHeader, ppl_signature};
use super::superblock::{Policy, SUPER_SECTOR, Superblock};
use pvblk_block::{BlockDevice, Error, ExtentKind};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// What is wanted.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// As it is to be written, usually `host:name`; at most 31 bytes.
    pub name: String,
    /// The layout.
    pub layout: Layout,
    /// Chunk size.
    pub chunk_sectors: u32,
    /// What happens after a crash.
    pub consistency: Consistency,
    /// Sectors to use on each member; `None`: as many as there are.
    pub size_sectors: Option<u64>,
    /// All parity is right already, as it is when all members hold zeros.
    pub assume_clean: bool,
    /// Write over the superblocks of another array.
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
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        CreateOptions {
            name: name.into(),
            layout: Layout::default(),
            chunk_sectors: 1024,
            consistency: Consistency::Ppl,
            size_sectors: None,
            assume_clean: false,
            force: false,
            set_uuid,
            created_secs: now.map_or(0, |d| d.as_secs()),
        }
    }
}

/// Writes the metadata of a new array, and none of its data. The order of the devices is that of the places.
///
/// The array is clean if that was to be assumed, or if all devices say that they hold nothing where data goes: parity of zeros is
/// zeros. If not it is dirty, and [`super::prepare`] calculates all parity.
pub fn create(
    devices: Vec<(String, Arc<dyn BlockDevice>)>,
    options: &CreateOptions,
    idle: &mut Idle<'_>,
) -> Result<Assembly, Error> {
    for (name, device) in &devices {
        check_device(name, device, options, idle)?;
    }
    let sizes: Vec<u64> = devices.iter().map(|(_, d)| d.capacity_sectors()).collect();
    let mut new = NewArray {
        set_uuid: options.set_uuid,
        name: &options.name,
        created_secs: options.created_secs,
        layout: options.layout,
        chunk_sectors: options.chunk_sectors,
        device_sectors: &sizes,
        size_sectors: options.size_sectors,
        consistency: options.consistency,
        clean: options.assume_clean,
    };
    let mut created = new.build()?;
    if !new.clean {
        let sb = created.superblock(0, [0; 16]);
        new.clean = devices
            .iter()
            .all(|(_, d)| is_empty(d, sb.data_offset_sectors, sb.size_sectors));
        created = new.build()?;
    }
    let mut ids = fastrand::Rng::with_seed(u64::from_le_bytes(std::array::from_fn(|n| {
        options.set_uuid[n] ^ options.set_uuid[n + 8]
    })));
    let bitmap = created
        .bitmap()
        .map(|h| WriteIntent::new(h.clone(), !new.clean));
    let mut members = Vec::new();
    for (place, (name, device)) in devices.into_iter().enumerate() {
        let mut uuid = [0; 16];
        ids.fill(&mut uuid);
        let superblock = created.superblock(place, uuid);
        write_member(&device, &superblock, bitmap.as_ref(), idle)?;
        members.push(Some(Member {
            device,
            name,
            superblock,
        }));
    }
    Ok(Assembly {
        geometry: created.geometry(),
        members,
        spares: Vec::new(),
        dirty: !new.clean,
        notes: Vec::new(),
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
            "{name} is a member of array {:?} ({}); to lose that, use force",
            old.name(),
            uuid_text(&old.set_uuid)
        ))),
        // No superblock, or one of nothing we know. What can't be read can't be written either, and says so then.
        _ => Ok(()),
    }
}

/// Whether a device says that it reads as zeros there.
fn is_empty(device: &Arc<dyn BlockDevice>, sector: u64, sectors: u64) -> bool {
    let mut extents = Vec::new();
    let told = device.extents(sector, sectors, &mut extents);
    told.is_ok() && extents.iter().all(|e| e.kind != ExtentKind::Data)
}

/// Log or bitmap first: what has a superblock is complete.
fn write_member(
    device: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    bitmap: Option<&WriteIntent>,
    idle: &mut Idle<'_>,
) -> Result<(), Error> {
    let mut disk = Blocking::open(device)?;
    match (sb.policy(), bitmap) {
        (Policy::Ppl(log), _) => {
            let mut area = vec![0; log.sectors as usize * 512];
            let header = PplHeader::empty(ppl_signature(&sb.set_uuid));
            area[..PPL_HEADER_BYTES].copy_from_slice(&header.encode());
            disk.write(log.sector, &area, idle)?;
        }
        (Policy::Bitmap { sector }, Some(bitmap)) => {
            let pages = bitmap.pages();
            let area: Vec<u8> = pages.flat_map(|p| bitmap.page(p).to_vec()).collect();
            disk.write(sector, &area, idle)?;
        }
        _ => {}
    }
    disk.write(SUPER_SECTOR, &sb.encode(), idle)
}

#[cfg(test)]
#[path = "new_array_tests.rs"]
mod tests;
