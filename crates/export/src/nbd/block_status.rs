//! `NBD_CMD_BLOCK_STATUS`: a chunk for each context.

use pvblk_block::{BlockDevice, CacheState, Error, Extent, ExtentKind, SECTOR};
use pvblk_protocol::nbd::{
    Context, Contexts, Mode, STATE_CACHED, STATE_DIRTY, STATE_HOLE, STATE_ZERO,
};

/// Most extents of one context in a reply; a client asks again for the rest.
const MAX_EXTENTS: usize = 1024;
/// Sectors (512 B) that the device is asked about at first, so that a fragmented one fills bounded memory: 4 MiB, or 1024 extents of 4 KiB.
const WINDOW: u64 = 8192;

/// The bounds of one context's part of a reply, in sectors. The protocol lets a reply describe less than was asked.
struct Bounds {
    /// After an answer of one extent or two the device is asked about twice as much, up to this: a file in memory looks through all of its
    /// pages up to the next hole for each question, however little it is about. Where a disk in few pieces becomes one in many, an answer has
    /// at most an extent for each 4 KiB of it.
    widest: u64,
    /// All questions of a reply: others wait for their turn.
    most: u64,
}

impl Bounds {
    fn of(context: Context, mode: Mode) -> Bounds {
        match (context, mode) {
            // 1 GiB and 16 GiB: 24 questions at most for data without holes.
            (Context::Allocation, Mode::Extended) => Bounds {
                widest: 256 * WINDOW,
                most: 4096 * WINDOW,
            },
            // 64 MiB and 1 GiB. Each page of a cache is looked up.
            _ => Bounds {
                widest: 16 * WINDOW,
                most: 256 * WINDOW,
            },
        }
    }
}

/// The contexts that a device has something to say about.
pub(super) fn contexts(device: &dyn BlockDevice) -> Contexts {
    let mut all = Contexts::from_iter([Context::Allocation]);
    if device.capabilities().cached.is_some() {
        all.add(Context::Cache);
    }
    all
}

/// Asks the device, and says its answer in the context's flags.
fn ask(
    device: &dyn BlockDevice,
    context: Context,
    sector: u64,
    sectors: u64,
) -> Result<Vec<Extent<u32>>, Error> {
    fn flags<K>(all: Vec<Extent<K>>, of: impl Fn(K) -> u32) -> Vec<Extent<u32>> {
        let one = |e: Extent<K>| Extent {
            sector: e.sector,
            sectors: e.sectors,
            kind: of(e.kind),
        };
        all.into_iter().map(one).collect()
    }
    match context {
        Context::Allocation => {
            let mut found = Vec::new();
            device.extents(sector, sectors, &mut found)?;
            Ok(flags(found, |kind| match kind {
                ExtentKind::Data => 0,
                ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
                ExtentKind::Zero => STATE_ZERO,
            }))
        }
        Context::Cache => {
            let mut found = Vec::new();
            if let Some(cache) = device.capabilities().cached {
                cache.cached(sector, sectors, &mut found);
            }
            Ok(flags(found, |state| match state {
                CacheState::Absent => 0,
                CacheState::Clean => STATE_CACHED,
                CacheState::Dirty => STATE_CACHED | STATE_DIRTY,
            }))
        }
    }
}

/// The payload of a block status chunk for `len` bytes from byte `offset`, of which `one` extent or some
/// are described: always at least one, from the start without a gap, and none past the end.
pub(super) fn describe(
    device: &dyn BlockDevice,
    context: Context,
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
    let mut payload = context.id().to_be_bytes().to_vec();
    if mode == Mode::Extended {
        // The number of descriptors, when it is known.
        payload.extend_from_slice(&[0; 4]);
    }
    // The extent that may still grow, as length in sectors and state.
    let mut open: Option<(u64, u32)> = None;
    let mut written = 0;
    let (mut at, end) = (sector, sector + sectors);
    let bounds = Bounds::of(context, mode);
    let end = end.min(at.saturating_add(bounds.most));
    let mut width = WINDOW;
    'all: while at < end {
        let window = width.min(end - at);
        let found = ask(device, context, at, window)?;
        width = match found.len() {
            0..=2 => (2 * width).min(bounds.widest),
            _ => WINDOW,
        };
        let from = at;
        for e in &found {
            // The device's answer is cut to the question, and a gap in it counts as data.
            let stop = e.sector.saturating_add(e.sectors).min(from + window);
            if stop <= at {
                continue;
            }
            for (sectors, state) in [
                (e.sector.saturating_sub(at), 0),
                (stop - at.max(e.sector), e.kind),
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

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::{
        Capabilities, DeviceQueue, ErrorKind, EventHub, Extents, Limits, QueueContext,
    };
    use pvblk_protocol::nbd as proto;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// 4 GiB: data, then 4 KiB of data and of hole in turns. Counts questions, and the most extents of one answer.
    struct Mixed {
        data_sectors: u64,
        questions: AtomicU64,
        most: AtomicU64,
        events: EventHub,
    }

    impl Mixed {
        fn new(data_sectors: u64) -> Mixed {
            Mixed {
                data_sectors,
                questions: AtomicU64::new(0),
                most: AtomicU64::new(0),
                events: EventHub::default(),
            }
        }
    }

    impl BlockDevice for Mixed {
        fn describe(&self) -> String {
            "data and holes".into()
        }

        fn limits(&self) -> Limits {
            Limits::default()
        }

        fn capacity_sectors(&self) -> u64 {
            8 << 20
        }

        fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
            Err(Error::new(ErrorKind::Config, "it has none"))
        }

        fn events(&self) -> &EventHub {
            &self.events
        }

        fn capabilities(&self) -> Capabilities<'_> {
            Capabilities {
                extents: Some(self),
                ..Capabilities::none()
            }
        }
    }

    impl Extents for Mixed {
        fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
            self.questions.fetch_add(1, Ordering::Relaxed);
            let (mut at, end) = (sector, sector + sectors);
            while at < end {
                let (stop, kind) = match at.checked_sub(self.data_sectors) {
                    None => (self.data_sectors, ExtentKind::Data),
                    Some(past) if past / 8 % 2 == 0 => (at + 8 - past % 8, ExtentKind::Data),
                    Some(past) => (at + 8 - past % 8, ExtentKind::Hole),
                };
                let sectors = stop.min(end) - at;
                out.push(Extent {
                    sector: at,
                    sectors,
                    kind,
                });
                at += sectors;
            }
            self.most.fetch_max(out.len() as u64, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn long_data_need_few_questions_and_many_holes_little_memory() {
        let asked = |device: &Mixed, mode, len| -> (usize, u64, u64) {
            let base = Context::Allocation;
            let payload = describe(device, base, 0, len, false, mode).unwrap();
            let [questions, most] =
                [&device.questions, &device.most].map(|n| n.load(Ordering::Relaxed));
            let extents = match mode {
                Mode::Extended => (payload.len() - 8) / 16,
                _ => (payload.len() - 4) / 8,
            };
            (extents, questions, most)
        };
        for (mode, widest, questions) in [
            // 1 GiB of 4 GiB: 4, 8, 16 and 32 MiB, then 64 MiB each.
            (Mode::Structured, 16 * WINDOW, 20),
            // All of it: 4 to 512 MiB, three times 1 GiB, and the rest.
            (Mode::Extended, 256 * WINDOW, 12),
        ] {
            let len = (4 << 30) - 4096;
            let whole = asked(&Mixed::new(8 << 20), mode, len);
            assert_eq!(whole, (1, questions, 1), "{mode:?}");
            // From 512 MiB on it is in pieces: the window that meets them has at most one for each 4 KiB.
            let (extents, _, most) = asked(&Mixed::new(1 << 20), mode, len);
            assert_eq!(extents, MAX_EXTENTS);
            assert!(most <= widest / 8, "{most}");
            // In pieces from the begin.
            let (extents, questions, most) = asked(&Mixed::new(0), mode, len);
            assert_eq!((extents, questions, most), (MAX_EXTENTS, 2, 1024));
        }
    }

    /// A reply covers 16 GiB of a disk of 64 GiB with extended headers, and as much as it always did without.
    #[test]
    fn a_reply_may_be_about_more_than_a_length_of_32_bits() {
        for (mode, most) in [(Mode::Extended, 16u64 << 30), (Mode::Structured, 1 << 30)] {
            let device = Mixed::new(128 << 20);
            let base = Context::Allocation;
            let payload = describe(&device, base, 512, 64 << 30, false, mode).unwrap();
            let told = match mode {
                Mode::Extended => proto::u64_at(&payload, 8),
                _ => u64::from(proto::u32_at(&payload, 4)),
            };
            assert_eq!(told, most, "{mode:?}");
            assert!(device.questions.load(Ordering::Relaxed) <= 24);
        }
    }
}
