//! The devices of a new array.

use super::device::SECTOR;
use super::history::sector_of;
use super::{DATA_SECTORS, value};
use crate::core::membership::Device;
use crate::core::slots::Slot;
use crate::core::zero::Ability;
use crate::words::Room;
use crate::{Geometry, STRIPE_BYTES, STRIPE_SECTORS, xor_into};

/// Devices as the core knows them.
pub fn devices_of(count: usize, volatile: bool, zeroes: bool, room: Room) -> Vec<Device> {
    let slot = |_| Slot {
        data_sectors: DATA_SECTORS,
        log_sector: 0,
        log_sectors: DATA_SECTORS,
        ability: Ability { volatile, zeroes },
        corrected: 0,
    };
    let device = |n| Device::new(slot(n), n as u32, room, room.segments);
    (0..count).map(device).collect()
}

/// The devices of an array whose sectors have these values.
pub fn contents(geometry: &Geometry) -> Vec<Vec<u8>> {
    let bytes = (DATA_SECTORS + geometry.member_sectors()) as usize * SECTOR;
    let mut members = vec![vec![0; bytes]; geometry.members()];
    for stripe in 0..geometry.stripes() {
        let at = (DATA_SECTORS + geometry.stripe_member_sector(stripe)) as usize * SECTOR;
        let mut parity = vec![0; STRIPE_BYTES];
        for index in 0..geometry.data_members() {
            let first = geometry.stripe_array_sector(stripe, index);
            let sectors = first..first + STRIPE_SECTORS;
            let data: Vec<u8> = sectors.flat_map(|s| sector_of(value(0, s))).collect();
            xor_into(&mut parity, &[&data]);
            members[geometry.stripe_data(stripe, index)][at..at + STRIPE_BYTES]
                .copy_from_slice(&data);
        }
        members[geometry.stripe_parity(stripe)][at..at + STRIPE_BYTES].copy_from_slice(&parity);
    }
    members
}
