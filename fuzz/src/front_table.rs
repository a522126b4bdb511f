//! The front end's grant table and its requests, as an honest back end reads them.

use pvblk_client::rings::Granter;
use pvblk_sys::{PAGE_SIZE, Region};
use std::sync::{Arc, Mutex};

/// Frames of the front end's memory.
pub const FRAMES: usize = 256;

/// A grant table of a few entries.
pub struct Table {
    memory: Arc<Region>,
    first: u32,
    entries: Mutex<Vec<Option<(u32, bool)>>>,
}

impl Table {
    /// A table of `grants` entries over `memory`, whose data begins at frame `first`.
    pub fn new(memory: Region, first: u32, grants: usize) -> Table {
        Table {
            memory: Arc::new(memory),
            first,
            entries: Mutex::new(vec![None; grants]),
        }
    }

    /// True if nothing is granted.
    pub fn is_empty(&self) -> bool {
        let entries = self.entries.lock().expect("one thread");
        entries.iter().all(Option::is_none)
    }
}

impl Granter for Table {
    fn memory(&self) -> &Arc<Region> {
        &self.memory
    }
    fn first_data_frame(&self) -> u32 {
        self.first
    }
    fn grant(&self, frame: u32, read_only: bool) -> Option<u32> {
        assert!(
            frame >= self.first && (frame as usize) < FRAMES,
            "not a data frame"
        );
        let mut entries = self.entries.lock().expect("one thread");
        let free = entries.iter().position(Option::is_none)?;
        entries[free] = Some((frame, read_only));
        Some(free as u32 + 8)
    }
    fn end(&self, gref: u32) {
        let mut entries = self.entries.lock().expect("one thread");
        assert!(
            entries[gref as usize - 8].take().is_some(),
            "a grant ended twice"
        );
    }
}

/// A request as the back end sees it.
pub struct Seen {
    /// Echoed in the answer.
    pub id: u64,
    /// The answer's operation.
    pub echo: u8,
    pub sector: u64,
    /// Segments: reference, first and last sector.
    pub segments: Vec<[u8; 8]>,
}

impl Table {
    /// Offset in the memory of a segment's first byte, and whether it is read-only.
    pub fn resolve(&self, raw: &[u8; 8]) -> Option<(usize, bool)> {
        let gref = u32::from_ne_bytes([raw[0], raw[1], raw[2], raw[3]]);
        let entries = self.entries.lock().expect("one thread");
        let index = gref.checked_sub(8)? as usize;
        let (frame, read_only) = (*entries.get(index)?)?;
        let fits = raw[4] <= raw[5] && raw[5] <= 7;
        fits.then_some((
            frame as usize * PAGE_SIZE + usize::from(raw[4]) * 512,
            read_only,
        ))
    }

    /// Reads an entry as a back end does; `None` if it isn't well-formed.
    pub fn read(&self, memory: &Region, e: &[u8; 112]) -> Option<Seen> {
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| e[at + i]));
        let mut segments = Vec::new();
        let mut echo = e[0];
        match e[0] {
            0..=3 => {
                let count = usize::from(e[1]);
                let least = usize::from(e[0] < 2);
                if !(least..=11).contains(&count) {
                    return None;
                }
                segments.extend((0..count).map(|i| std::array::from_fn(|k| e[24 + i * 8 + k])));
            }
            5 => {}
            6 => {
                echo = e[1];
                let count = usize::from(u16::from_ne_bytes([e[2], e[3]]));
                let page = [e[28], e[29], e[30], e[31], 0, 7, 0, 0];
                let (at, _) = self.resolve(&page)?;
                if echo > 1 || !(1..=256).contains(&count) {
                    return None;
                }
                for i in 0..count {
                    let mut raw = [0; 8];
                    memory.read(at + i * 8, &mut raw);
                    segments.push(raw);
                }
            }
            _ => return None,
        }
        let good = segments.iter().all(|raw| self.resolve(raw).is_some());
        good.then_some(Seen {
            id: word(8),
            echo,
            sector: word(16),
            segments,
        })
    }
}
