//! Arrays of members that are made for them.

use pvblk_block::BlockDevice;
use pvblk_raid5::{AssembleOptions, Assembly, CreateOptions, assemble, create, prepare, sleepy};
use std::sync::Arc;

/// An array that is ready to be served: a new one, or the one that is there.
pub fn prepared(
    members: Vec<(String, Arc<dyn BlockDevice>)>,
    new: Option<&CreateOptions>,
) -> Assembly {
    prepared_with(members, new, &AssembleOptions::default())
}

/// The same, assembled so.
pub fn prepared_with(
    members: Vec<(String, Arc<dyn BlockDevice>)>,
    new: Option<&CreateOptions>,
    assembling: &AssembleOptions,
) -> Assembly {
    if let Some(how) = new {
        create(members.clone(), how, &mut sleepy()).unwrap();
    }
    let mut assembly = assemble(members, assembling, &mut sleepy()).unwrap();
    prepare(&mut assembly, assembling, &mut |_, _| {}, &mut sleepy()).unwrap();
    assembly
}
