//! Which parts of an array hold data, as its members say.

use super::{Device, Raid5};
use pvblk_block::{Error, Extent, ExtentKind};

/// Sectors that a member is asked for at a time, unless a piece is longer.
const ASKED_SECTORS: u64 = 8192;

/// What a member has said.
struct Told {
    device: Device,
    /// Where its data begins.
    data_sectors: u64,
    /// In sectors of the device, in order.
    extents: Vec<Extent>,
    /// The first that counts for what comes.
    at: usize,
}

impl Raid5 {
    /// Appends extents that cover the range in order. What is on no member, and so has to be calculated, counts as data.
    pub(super) fn find_extents(
        &self,
        sector: u64,
        sectors: u64,
        out: &mut Vec<Extent>,
    ) -> Result<(), Error> {
        let mut members = self.told();
        let first = out.len();
        let end = sector + sectors;
        for piece in self.shared.geometry.pieces(sector, sectors) {
            let (at, len) = (piece.array_sector, piece.sectors);
            let Some(member) = &mut members[piece.place.member] else {
                Extent::push(out, first, at, at + len, ExtentKind::Data);
                continue;
            };
            let from = member.data_sectors + piece.place.member_sector;
            if !member.covers(from, len) {
                // Of what is left of the range, no member has more than this.
                member.ask(from, len.max(ASKED_SECTORS.min(end - at)))?;
            }
            member.each(from, len, |extent| {
                let begin = at + (extent.sector - from);
                Extent::push(out, first, begin, begin + extent.sectors, extent.kind);
            });
        }
        Ok(())
    }

    /// By role.
    fn told(&self) -> Vec<Option<Told>> {
        let core = self.shared.core.lock();
        let devices = self.shared.devices.lock();
        let told = |(slot, data_sectors): (usize, u64)| {
            Some(Told {
                device: devices.get(slot)?.clone()?,
                data_sectors,
                extents: Vec::new(),
                at: 0,
            })
        };
        core.homes().map(|home| home.and_then(told)).collect()
    }
}

impl Told {
    fn covers(&self, from: u64, len: u64) -> bool {
        let begin = self.extents.get(self.at).map(|e| e.sector);
        let end = self.extents.last().map(|e| e.sector + e.sectors);
        begin.is_some_and(|begin| begin <= from) && end.is_some_and(|end| from + len <= end)
    }

    fn ask(&mut self, from: u64, sectors: u64) -> Result<(), Error> {
        let end = self.device.device.capacity_sectors();
        let sectors = sectors.min(end.saturating_sub(from));
        self.extents.clear();
        self.at = 0;
        self.device.device.extents(from, sectors, &mut self.extents)
    }

    /// Calls with the parts of the range, which is covered.
    fn each(&mut self, from: u64, len: u64, mut tell: impl FnMut(Extent)) {
        while let Some(extent) = self.extents.get(self.at) {
            let (begin, end) = (extent.sector, extent.sector + extent.sectors);
            let (some, some_end) = (begin.max(from), end.min(from + len));
            if some < some_end {
                tell(Extent {
                    sector: some,
                    sectors: some_end - some,
                    kind: extent.kind,
                });
            }
            if end > from + len {
                return;
            }
            self.at += 1;
        }
    }
}
