//! Places of data and parity, written a second time from md's documentation, so that the array's own
//! computation of them is checked.

/// Sectors of a block: the unit of parity.
pub const BLOCK_SECTORS: u64 = 8;

/// Layout of an array.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of members.
    pub members: usize,
    /// Sectors of a chunk.
    pub chunk: u64,
    /// md's number of the layout: with bit 0 set, parity moves up; with bit 1 set, data begins
    /// after parity.
    pub layout: u32,
    /// Chunks on each member.
    pub rows: u64,
}

impl Shape {
    /// Sectors used on each member.
    pub fn member_sectors(&self) -> u64 {
        self.rows * self.chunk
    }

    /// Sectors of the array.
    pub fn sectors(&self) -> u64 {
        self.member_sectors() * (self.members as u64 - 1)
    }

    /// The member with the parity of a sector of the members.
    pub fn parity(&self, member_sector: u64) -> usize {
        let turn = (member_sector / self.chunk) as usize % self.members;
        match self.layout & 1 {
            0 => self.members - 1 - turn,
            _ => turn,
        }
    }

    /// The member with data block `index` at a sector of the members.
    pub fn data(&self, member_sector: u64, index: usize) -> usize {
        let parity = self.parity(member_sector);
        if self.layout & 2 != 0 {
            return (parity + 1 + index) % self.members;
        }
        let mut others = (0..self.members).filter(|&m| m != parity);
        others.nth(index).unwrap_or(parity)
    }

    /// The sectors of the array whose XOR is the parity at a sector of the members, each with its member.
    pub fn column(&self, member_sector: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let shape = *self;
        let (row, inside) = (member_sector / self.chunk, member_sector % self.chunk);
        (0..self.members - 1).map(move |index| {
            let chunk = row * (shape.members as u64 - 1) + index as u64;
            (
                shape.data(member_sector, index),
                chunk * shape.chunk + inside,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_members_as_mdadm_draws_them() {
        let rows = |layout| -> Vec<Vec<Option<u64>>> {
            let shape = Shape {
                members: 4,
                chunk: 8,
                layout,
                rows: 4,
            };
            let row = |r: u64| {
                let mut on = vec![None; 4];
                shape
                    .column(r * 8)
                    .for_each(|(member, sector)| on[member] = Some(sector / 8));
                on
            };
            (0..4).map(row).collect()
        };
        let s = |text: &str| -> Vec<Vec<Option<u64>>> {
            let rows = text.split('/');
            rows.map(|r| r.split_whitespace().map(|w| w.parse().ok()).collect())
                .collect()
        };
        assert_eq!(rows(0), s("0 1 2 P / 3 4 P 5 / 6 P 7 8 / P 9 10 11"));
        assert_eq!(rows(1), s("P 0 1 2 / 3 P 4 5 / 6 7 P 8 / 9 10 11 P"));
        assert_eq!(rows(2), s("0 1 2 P / 4 5 P 3 / 8 P 6 7 / P 9 10 11"));
        assert_eq!(rows(3), s("P 0 1 2 / 5 P 3 4 / 7 8 P 6 / 9 10 11 P"));
    }
}
