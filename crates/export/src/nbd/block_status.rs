//! `NBD_CMD_BLOCK_STATUS` for the context `base:allocation`.

use pvblk_block::{BlockDevice, Error, Extent, ExtentKind, SECTOR};
use pvblk_protocol::nbd::{BASE_ALLOCATION_ID, Mode, STATE_HOLE, STATE_ZERO};

/// Most extents of one reply; a client asks again for the rest.
const MAX_EXTENTS: usize = 1024;
/// Sectors (512 B) that the device is asked about at once, so that a fragmented one fills bounded memory: 4 MiB, or 1024 extents of 4 KiB.
const WINDOW: u64 = 8192;
/// Windows of one reply: others wait for their turn. The protocol lets a reply describe less than was asked.
const MAX_WINDOWS: u64 = 256;

fn state(kind: ExtentKind) -> u32 {
    match kind {
        ExtentKind::Data => 0,
        ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
        ExtentKind::Zero => STATE_ZERO,
    }
}

/// The payload of a block status chunk for `len` bytes from byte `offset`, of which `one` extent or some
/// are described: always at least one, from the start without a gap, and none past the end.
pub(super) fn describe(
    device: &dyn BlockDevice,
    offset: u64,
    len: u64,
    one: bool,
    mode: Mode,
) -> Result<Vec<u8>, Error> {
    // Sectors that are described in part say the same of all their bytes.
    let sector = offset / SECTOR;
    let sectors = (offset + len).div_ceil(SECTOR) - sector;
    let mut room = Room {
        before: offset % SECTOR,
        left: len,
        mode,
    };
    let most = if one { 1 } else { MAX_EXTENTS };
    let mut payload = BASE_ALLOCATION_ID.to_be_bytes().to_vec();
    if mode == Mode::Extended {
        // The number of descriptors, when it is known.
        payload.extend_from_slice(&[0; 4]);
    }
    let mut found: Vec<Extent> = Vec::new();
    // The extent that may still grow, as length in sectors and state.
    let mut open: Option<(u64, u32)> = None;
    let mut written = 0;
    let (mut at, end) = (sector, sector + sectors);
    let end = end.min(at.saturating_add(WINDOW * MAX_WINDOWS));
    'all: while at < end {
        let window = WINDOW.min(end - at);
        found.clear();
        device.extents(at, window, &mut found)?;
        let from = at;
        for e in &found {
            // The device's answer is cut to the question, and a gap in it counts as data.
            let stop = e.sector.saturating_add(e.sectors).min(from + window);
            if stop <= at {
                continue;
            }
            for (sectors, state) in [
                (e.sector.saturating_sub(at), 0),
                (stop - at.max(e.sector), state(e.kind)),
            ] {
                if !add(
                    &mut payload,
                    &mut room,
                    &mut open,
                    &mut written,
                    sectors,
                    state,
                    most,
                ) {
                    break 'all;
                }
            }
            at = stop;
        }
        if !add(
            &mut payload,
            &mut room,
            &mut open,
            &mut written,
            from + window - at,
            0,
            most,
        ) {
            break 'all;
        }
        at = from + window;
    }
    if let Some(last) = open {
        put(&mut payload, &mut room, last);
    }
    if mode == Mode::Extended {
        let count = (payload.len() - 8) / 16;
        payload[4..8].copy_from_slice(&(count as u32).to_be_bytes());
    }
    Ok(payload)
}

/// Joins `sectors` of `state` to the open extent or starts a new one; false if there is no room for it.
fn add(
    payload: &mut Vec<u8>,
    room: &mut Room,
    open: &mut Option<(u64, u32)>,
    written: &mut usize,
    sectors: u64,
    state: u32,
    most: usize,
) -> bool {
    if sectors == 0 {
        return true;
    }
    match open {
        Some((len, kind)) if *kind == state => {
            *len += sectors;
            return true;
        }
        Some(_) if *written + 1 == most => return false,
        Some(last) => {
            put(payload, room, *last);
            *written += 1;
        }
        None => {}
    }
    *open = Some((sectors, state));
    true
}

/// The part of the request that isn't described yet.
struct Room {
    /// Bytes of the first sector before the request.
    before: u64,
    /// Bytes of the request.
    left: u64,
    mode: Mode,
}

fn put(payload: &mut Vec<u8>, room: &mut Room, (sectors, state): (u64, u32)) {
    let bytes = sectors * SECTOR - std::mem::take(&mut room.before);
    let bytes = bytes.min(room.left);
    room.left -= bytes;
    if room.mode == Mode::Extended {
        payload.extend_from_slice(&bytes.to_be_bytes());
        payload.extend_from_slice(&u64::from(state).to_be_bytes());
        return;
    }
    // At most the request's length, which has 32 bits.
    payload.extend_from_slice(&(bytes as u32).to_be_bytes());
    payload.extend_from_slice(&state.to_be_bytes());
}
