//! Small arrays in memory, and disks that lose power.

#[path = "../tests/support/failing.rs"]
mod failing;

use super::{
    AssembleOptions, Assembly, Blocking, Consistency, CreateOptions, Feature, Layout, Member, Role,
    STRIPE_BYTES, STRIPE_SECTORS, SUPER_SECTOR, Superblock, add_spare, assemble, create, prepare,
    sleepy, xor_into,
};
pub use failing::Failing;
use parking_lot::Mutex;
use pvblk_block::{BlockDevice, Error, Op, Request};
use pvblk_volume::{MemSpec, MemVolume};
use std::sync::Arc;

pub type Named = (String, Arc<dyn BlockDevice>);

/// Disks of 3 MiB, named `m0` and so on: with a log, 1 MiB of it is data.
pub fn disks(count: usize) -> Vec<Named> {
    (0..count)
        .map(|n| {
            let disk = MemVolume::open(&MemSpec::new(3 << 20)).expect("memory");
            let disk: Arc<dyn BlockDevice> = Arc::new(disk);
            (format!("m{n}"), disk)
        })
        .collect()
}

/// Chunks of 16 KiB.
pub fn options(consistency: Consistency) -> CreateOptions {
    CreateOptions {
        layout: Layout::LeftSymmetric,
        chunk_sectors: 32,
        consistency,
        ..CreateOptions::new("host:test")
    }
}

/// Fills the disks with random bytes and makes an array of them.
pub fn random_array(disks: &[Named], consistency: Consistency, assume_clean: bool) -> Assembly {
    let mut bytes = vec![0; 3 << 20];
    for (_, disk) in disks {
        fastrand::fill(&mut bytes);
        put(disk, 0, &bytes);
    }
    let options = CreateOptions {
        assume_clean,
        force: true,
        ..options(consistency)
    };
    create(disks.to_vec(), &options, &mut sleepy()).expect("an array")
}

pub fn assembled(disks: &[Named]) -> Result<Assembly, Error> {
    assemble(disks.to_vec(), &AssembleOptions::default(), &mut sleepy())
}

pub fn forced(disks: &[Named]) -> Result<Assembly, Error> {
    assemble(
        disks.to_vec(),
        &AssembleOptions {
            force: true,
            ..AssembleOptions::default()
        },
        &mut sleepy(),
    )
}

pub fn put(disk: &Arc<dyn BlockDevice>, sector: u64, bytes: &[u8]) {
    let mut disk = Blocking::open(disk).expect("a queue");
    disk.write(sector, bytes, &mut sleepy()).expect("written");
}

pub fn get(disk: &Arc<dyn BlockDevice>, sector: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    let mut disk = Blocking::open(disk).expect("a queue");
    disk.read(sector, &mut data, &mut sleepy()).expect("read");
    data
}

/// The superblock that is on a disk.
pub fn superblock((name, disk): &Named) -> Superblock {
    super::read_superblock(name, disk, &mut sleepy()).expect("a superblock")
}

/// Changes the superblock that is on a disk.
pub fn change(disk: &Named, how: impl FnOnce(&mut Superblock)) {
    let mut sb = superblock(disk);
    how(&mut sb);
    put(&disk.1, SUPER_SECTOR, &sb.encode());
}

/// The contents of a member's data area.
pub fn data(member: &Member, sectors: u64) -> Vec<u8> {
    let offset = member.superblock.data_offset_sectors;
    get(&member.device, offset, sectors as usize * 512)
}

/// Stripes whose parity is wrong; all members must be there.
pub fn wrong_stripes(assembly: &Assembly) -> Vec<u64> {
    let sectors = assembly.geometry.member_sectors();
    let mut sum = vec![0; sectors as usize * 512];
    for member in assembly.present() {
        xor_into(&mut sum, &[&data(member, sectors)]);
    }
    let stripes = sum.chunks(STRIPE_BYTES).enumerate();
    let wrong = stripes.filter(|(_, s)| s.iter().any(|&b| b != 0));
    wrong.map(|(n, _)| n as u64).collect()
}

/// All data of the array, with that of a missing member computed. A device that is recovered counts as far as
/// it is.
pub fn contents(assembly: &Assembly) -> Vec<Vec<u8>> {
    let g = assembly.geometry;
    let sectors = g.member_sectors();
    let mut members: Vec<Option<Vec<u8>>> = assembly
        .members
        .iter()
        .map(|m| m.as_ref().map(|m| data(m, sectors)))
        .collect();
    if let Some(missing) = assembly.failed() {
        let mut sum = vec![0; sectors as usize * 512];
        members
            .iter()
            .flatten()
            .for_each(|m| xor_into(&mut sum, &[m]));
        if let Some(incoming) = assembly.incoming.as_ref().filter(|i| i.place == missing) {
            let rebuilt = data(&incoming.member, incoming.recovered_sectors);
            sum[..rebuilt.len()].copy_from_slice(&rebuilt);
        }
        members[missing] = Some(sum);
    }
    let mut blocks = Vec::new();
    for stripe in 0..g.stripes() {
        for index in 0..g.data_members() {
            let member = members[g.stripe_data(stripe, index)].as_ref();
            let at = stripe as usize * STRIPE_BYTES;
            blocks.push(member.expect("a member")[at..at + STRIPE_BYTES].to_vec());
        }
    }
    blocks
}

pub fn roles(disk: &Named) -> Vec<Role> {
    superblock(disk).roles[..4].to_vec()
}

/// Five disks: an array of four with its parity right, and the last is being rebuilt for a place, of which it has so many sectors; the rest of it
/// is junk. Unless it `replaces` the member there, that is called faulty.
pub fn rebuilding(
    consistency: Consistency,
    place: usize,
    recovered: u64,
    replaces: bool,
) -> Vec<Named> {
    let disks = disks(5);
    random_array(&disks[..4], consistency, false);
    let mut assembly = assembled(&disks[..4]).expect("an array");
    let options = AssembleOptions::default();
    prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).expect("prepared");
    put(&disks[4].1, 0, &junk(3 << 20));
    add_spare(&mut assembly, "m4", &disks[4].1, true, &mut sleepy()).expect("a spare");
    let member = assembly.members[place].as_ref().expect("a member");
    let offset = member.superblock.data_offset_sectors;
    put(&disks[4].1, offset, &data(member, recovered));
    for disk in &disks {
        change(disk, |sb| {
            sb.roles[4] = Role::Active(place as u16);
            if !replaces {
                sb.roles[place] = Role::Faulty;
            }
        });
    }
    change(&disks[4], |sb| {
        sb.feature_map |= Feature::RECOVERY_OFFSET.0;
        if replaces {
            sb.feature_map |= Feature::REPLACEMENT.0;
        }
        sb.recovery_offset_sectors = recovered;
    });
    disks
}

pub fn junk(bytes: usize) -> Vec<u8> {
    let mut junk = vec![0; bytes];
    fastrand::fill(&mut junk);
    junk
}

/// All but some of the disks.
pub fn without(disks: &[Named], gone: &[usize]) -> Vec<Named> {
    let left = (0..disks.len()).filter(|n| !gone.contains(n));
    left.map(|n| disks[n].clone()).collect()
}

/// Assembles and prepares.
pub fn prepared_with(disks: &[Named], options: &AssembleOptions) -> Result<Assembly, Error> {
    let mut assembly = assemble(disks.to_vec(), options, &mut sleepy())?;
    prepare(&mut assembly, options, &mut |_, _| {}, &mut sleepy())?;
    Ok(assembly)
}

pub fn prepared(disks: &[Named], force: bool) -> Result<Assembly, Error> {
    let options = AssembleOptions {
        force,
        ..AssembleOptions::default()
    };
    prepared_with(disks, &options)
}

/// Makes superblocks say that the array wasn't stopped in order.
pub fn dirty(disks: &[Named]) {
    for disk in disks {
        change(disk, |sb| sb.resync_offset_sectors = 0);
    }
}

/// Makes parity of a stripe wrong.
pub fn spoil(assembly: &Assembly, stripe: u64) {
    let place = assembly.geometry.stripe_parity(stripe);
    let member = assembly.members[place].as_ref().expect("a member");
    let sector = member.superblock.data_offset_sectors + stripe * STRIPE_SECTORS;
    let mut byte = get(&member.device, sector, 512);
    byte[99] ^= 1;
    put(&member.device, sector, &byte);
}

/// Power for several disks: `writes` writes reach them, and no request after those.
pub struct Power(Mutex<u64>);

impl Power {
    pub fn writes(count: u64) -> Arc<Power> {
        Arc::new(Power(Mutex::new(count)))
    }

    pub fn left(&self) -> u64 {
        *self.0.lock()
    }

    /// The disks, supplied by this power.
    pub fn supply(self: &Arc<Power>, disks: &[Named]) -> Vec<Named> {
        let supplied = |(name, disk): &Named| {
            let power = Arc::clone(self);
            let fails = Arc::new(move |request: &Request| {
                let mut left = power.0.lock();
                let is_off = *left == 0;
                *left -= u64::from(!is_off && request.op == Op::Write);
                is_off
            });
            (name.clone(), Failing::over(disk, fails))
        };
        disks.iter().map(supplied).collect()
    }
}
