//! Writes to each sector of the array, and the contents that it may have.

use super::device::SECTOR;

/// A write to a sector.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: u64,
    begin: u64,
    /// It was acknowledged.
    end: Option<u64>,
    /// It was flushed since then, or had FUA.
    stable: bool,
}

impl Write {
    /// True if a write that began at this time is a later one for everybody.
    fn is_before(&self, begin: u64) -> bool {
        self.end.is_some_and(|end| end < begin)
    }
}

/// All writes to the array.
pub struct History {
    sectors: Vec<Vec<Write>>,
}

/// A sector's contents with this value.
pub fn sector_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(SECTOR / 8)
}

/// The value of a sector; `None`: it is torn.
fn value_of(sector: &[u8]) -> Option<u64> {
    let value: [u8; 8] = sector[..8].try_into().expect("eight bytes");
    let alike = sector[8..] == sector[..sector.len() - 8];
    alike.then(|| u64::from_le_bytes(value))
}

impl History {
    /// An array with these values.
    pub fn new(values: impl Iterator<Item = u64>) -> History {
        let first = |value| {
            vec![Write {
                value,
                begin: 0,
                end: Some(0),
                stable: true,
            }]
        };
        History {
            sectors: values.map(first).collect(),
        }
    }

    pub fn begin(&mut self, sector: u64, value: u64, now: u64) {
        self.sectors[sector as usize].push(Write {
            value,
            begin: now,
            end: None,
            stable: false,
        });
    }

    /// The write that began then is acknowledged.
    pub fn end(&mut self, sector: u64, begin: u64, now: u64, fua: bool) {
        let writes = &mut self.sectors[sector as usize];
        let write = writes.iter_mut().find(|write| write.begin == begin);
        let write = write.expect("a write");
        (write.end, write.stable) = (Some(now), fua);
    }

    /// A flush that began then has ended.
    pub fn flushed(&mut self, begin: u64) {
        for write in self.sectors.iter_mut().flatten() {
            write.stable |= write.is_before(begin);
        }
    }

    fn is_one(&self, sector: u64, bytes: &[u8], supersedes: impl Fn(&Write) -> bool) -> bool {
        let writes = &self.sectors[sector as usize];
        let newer: Vec<u64> = writes
            .iter()
            .filter(|w| supersedes(w))
            .map(|w| w.begin)
            .collect();
        let is_current = |write: &&Write| !newer.iter().any(|begin| write.is_before(*begin));
        let found = value_of(bytes);
        let mut current = writes.iter().filter(is_current);
        current.any(|write| Some(write.value) == found)
    }

    /// True if a power cut may leave this.
    pub fn survives(&self, sector: u64, bytes: &[u8]) -> bool {
        self.is_one(sector, bytes, |write| write.stable)
    }

    /// True if a read that began then may find this.
    pub fn is_read(&self, sector: u64, bytes: &[u8], begin: u64) -> bool {
        self.is_one(sector, bytes, |write| write.is_before(begin))
    }

    /// True if a sector has been written and that isn't stable.
    pub fn is_open(&self, sector: u64) -> bool {
        self.sectors[sector as usize]
            .iter()
            .any(|write| !write.stable)
    }

    /// The writes of a sector, for messages.
    pub fn text(&self, sector: u64, bytes: &[u8]) -> String {
        let found = value_of(bytes);
        format!("{found:x?} of {:x?}", self.sectors[sector as usize])
    }
}
