//! Arrays of members that are made for them.

use pvblk_block::BlockDevice;
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, CreateOptions, Geometry, Raid5, assemble, create, prepare,
    sleepy,
};
use std::sync::Arc;

/// A new array, with the first sector of its members' data.
pub fn started(
    members: Vec<(String, Arc<dyn BlockDevice>)>,
    how: &CreateOptions,
    options: &ArrayOptions,
) -> (Arc<Raid5>, u64, Geometry) {
    let made = create(members.clone(), how, &mut sleepy()).unwrap();
    let data = made.newest().data_offset_sectors;
    drop(made);
    let assembling = AssembleOptions::default();
    let mut assembly = assemble(members, &assembling, &mut sleepy()).unwrap();
    prepare(&mut assembly, &assembling, &mut |_, _| {}, &mut sleepy()).unwrap();
    let geometry = assembly.geometry;
    (Raid5::start(assembly, options).unwrap(), data, geometry)
}
