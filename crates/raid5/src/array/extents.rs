//! Extents of an array that hold data, from those of its members.

use super::shared::Shared;
use pvblk_block::{BlockDevice, Error, Extent, ExtentKind};
use std::sync::Arc;

/// Sectors that a member is asked for at a time, unless a piece is longer.
const ASKED_SECTORS: u64 = 8192;

/// Extents that a member has reported.
struct ReportedExtents {
    device: Arc<dyn BlockDevice>,
    /// Where its data begins.
    data_sectors: u64,
    /// In sectors of the device, in order.
    extents: Vec<Extent>,
    /// Index of the first extent that counts for the rest of the range.
    at: usize,
}

impl Shared {
    /// Appends extents that cover the range in order. A block that is on no member, and so has to be
    /// computed, counts as data.
    pub(super) fn find_extents(
        &self,
        sector: u64,
        sectors: u64,
        out: &mut Vec<Extent>,
    ) -> Result<(), Error> {
        let mut members = self.reported();
        let first = out.len();
        let end = sector + sectors;
        for piece in self.control.geometry.pieces(sector, sectors) {
            let (at, len) = (piece.array_sector, piece.sectors);
            let Some(member) = &mut members[piece.place.member] else {
                Extent::push(out, first, at, at + len, ExtentKind::Data);
                continue;
            };
            let from = member.data_sectors + piece.place.member_sector;
            if !member.covers(from, len) {
                // No member has more than this of the rest of the range.
                member.ask(from, len.max(ASKED_SECTORS.min(end - at)))?;
            }
            member.each(from, len, |extent| {
                let begin = at + (extent.sector - from);
                Extent::push(out, first, begin, begin + extent.sectors, extent.kind);
            });
        }
        Ok(())
    }

    /// Reported extents by role.
    fn reported(&self) -> Vec<Option<ReportedExtents>> {
        let reported = |(device, data_sectors)| ReportedExtents {
            device,
            data_sectors,
            extents: Vec::new(),
            at: 0,
        };
        let homes = self.homes().into_iter();
        homes.map(|home| home.map(reported)).collect()
    }
}

impl ReportedExtents {
    fn covers(&self, from: u64, len: u64) -> bool {
        let begin = self.extents.get(self.at).map(|e| e.sector);
        let end = self.extents.last().map(|e| e.sector + e.sectors);
        begin.is_some_and(|begin| begin <= from) && end.is_some_and(|end| from + len <= end)
    }

    fn ask(&mut self, from: u64, sectors: u64) -> Result<(), Error> {
        let end = self.device.capacity_sectors();
        let sectors = sectors.min(end.saturating_sub(from));
        self.extents.clear();
        self.at = 0;
        self.device.extents(from, sectors, &mut self.extents)
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
