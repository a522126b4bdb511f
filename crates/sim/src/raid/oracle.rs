//! What each sector of the array may hold, from what its users were told and nothing else.

use super::shape::{BLOCK_SECTORS, Shape};
use super::stamp::{self, Bytes, FOREIGN, ZEROS};
use std::collections::BTreeSet;

/// A write to a sector, or what was there before all writes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: u64,
    /// When it was acknowledged; failed writes never are.
    done: Option<u64>,
}

#[derive(Clone, Debug)]
struct Cell {
    /// In order of submission, which is the order of effect too: writes in flight don't meet.
    history: Vec<Entry>,
    /// The newest that a power cut can't undo.
    durable: usize,
    /// The newest that was acknowledged.
    done: usize,
    /// Instead of the first entry, it may hold anything.
    any: bool,
    /// A write is in flight.
    busy: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Oracle {
    cells: Vec<Cell>,
    /// Sectors with more than one version that a power cut could leave.
    unsettled: BTreeSet<u64>,
    /// Those of them that were written while all members were there.
    whole: BTreeSet<u64>,
    clock: u64,
}

impl Oracle {
    /// An array of zeros, or of what nobody knows.
    pub fn new(sectors: u64, any: bool) -> Oracle {
        let cell = Cell {
            history: vec![Entry {
                name: ZEROS,
                done: Some(0),
            }],
            durable: 0,
            done: 0,
            any,
            busy: false,
        };
        Oracle {
            cells: vec![cell; sectors as usize],
            unsettled: BTreeSet::new(),
            whole: BTreeSet::new(),
            clock: 0,
        }
    }

    /// A moment later than all before.
    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// True if no write is in flight there.
    pub fn is_free(&self, sector: u64, sectors: u64) -> bool {
        (sector..sector + sectors).all(|s| !self.cells[s as usize].busy)
    }

    /// Write `id` is submitted, to an array that does without a member already, or not.
    pub fn submitted(&mut self, sector: u64, sectors: u64, id: u64, degraded: bool) {
        for s in sector..sector + sectors {
            let cell = &mut self.cells[s as usize];
            cell.busy = true;
            cell.history.push(Entry {
                name: id,
                done: None,
            });
            self.unsettled.insert(s);
            if !degraded {
                self.whole.insert(s);
            }
        }
    }

    /// Another device is becoming the missing member: from now on its blocks may be written together with others.
    pub fn rebuilding(&mut self) {
        self.whole.extend(&self.unsettled);
    }

    /// Write `id` is acknowledged.
    pub fn acknowledged(&mut self, sector: u64, sectors: u64, id: u64, fua: bool) {
        let now = self.now();
        for s in sector..sector + sectors {
            let cell = &mut self.cells[s as usize];
            cell.busy = false;
            if let Some(at) = cell.history.iter().rposition(|e| e.name == id) {
                cell.history[at].done = Some(now);
                cell.done = cell.done.max(at);
                if fua {
                    cell.settle(at);
                }
            }
            if cell.is_settled() {
                self.unsettled.remove(&s);
                self.whole.remove(&s);
            }
        }
    }

    /// A write failed: it may have happened, or not.
    pub fn failed(&mut self, sector: u64, sectors: u64) {
        for s in sector..sector + sectors {
            self.cells[s as usize].busy = false;
        }
    }

    /// A discard was acknowledged that did nothing there.
    pub fn untouched(&mut self, sector: u64, sectors: u64) {
        for s in sector..sector + sectors {
            let cell = &mut self.cells[s as usize];
            cell.busy = false;
            cell.history.pop();
            if cell.is_settled() {
                self.unsettled.remove(&s);
                self.whole.remove(&s);
            }
        }
    }

    /// A flush that was submitted at `since` is acknowledged.
    pub fn flushed(&mut self, since: u64) {
        let cells = &mut self.cells;
        self.unsettled.retain(|&s| {
            let cell = &mut cells[s as usize];
            let covered = |e: &Entry| e.done.is_some_and(|d| d <= since);
            if let Some(at) = cell.history.iter().rposition(covered) {
                cell.settle(at);
            }
            !cell.is_settled()
        });
        self.whole.retain(|s| self.unsettled.contains(s));
    }

    /// What is remembered of a read when it is submitted.
    pub fn floors(&self, sector: u64, sectors: u64) -> Vec<usize> {
        let cells = &self.cells[sector as usize..(sector + sectors) as usize];
        cells.iter().map(|c| c.done).collect()
    }

    /// A read with these floors found `bytes` on `sector`.
    pub fn check_read(&self, sector: u64, floor: usize, bytes: &Bytes) -> Result<(), String> {
        self.check(sector, floor, bytes, "reads as")
    }

    fn check(&self, sector: u64, floor: usize, bytes: &Bytes, how: &str) -> Result<(), String> {
        let cell = &self.cells[sector as usize];
        let name = stamp::name(bytes, sector);
        let known = cell.history[floor..].iter().any(|e| e.name == name);
        if known || (cell.any && floor == 0) {
            return Ok(());
        }
        let old = cell.history[..floor].iter().any(|e| e.name == name);
        let call = |n: u64| match n {
            n if n & FOREIGN != 0 => format!("what was there ({n:x})"),
            n => n.to_string(),
        };
        let may: Vec<_> = cell.history[floor..].iter().map(|e| call(e.name)).collect();
        Err(format!(
            "sector {sector} {how} {}{}; it may hold {}",
            stamp::describe(bytes, sector),
            if old { ", which was overwritten" } else { "" },
            may.join(" or ")
        ))
    }

    /// The array was started after a power cut, and `sector` holds this: so it does from now on.
    pub fn settle(&mut self, sector: u64, bytes: &Bytes) -> Result<(), String> {
        let durable = self.cells[sector as usize].durable;
        self.check(sector, durable, bytes, "comes back as")?;
        let cell = &mut self.cells[sector as usize];
        let name = stamp::name(bytes, sector);
        cell.history.clear();
        cell.history.push(Entry {
            name,
            done: Some(0),
        });
        (cell.durable, cell.done, cell.any) = (0, 0, false);
        self.unsettled.remove(&sector);
        self.whole.remove(&sector);
        Ok(())
    }

    /// `sector` was found on the members, while nothing is in flight.
    pub fn check_raw(&self, sector: u64, bytes: &Bytes) -> Result<(), String> {
        let floor = self.cells[sector as usize].done;
        self.check(sector, floor, bytes, "is on the members as")
    }

    /// The power went: nothing is in flight, and everything that isn't durable may be undone.
    pub fn cut(&mut self) {
        for cell in &mut self.cells {
            cell.busy = false;
            cell.any &= cell.durable == 0;
            cell.history.drain(..cell.durable);
            // What was acknowledged and not flushed may be undone, and no later flush brings it back.
            cell.history[1..].iter_mut().for_each(|e| e.done = None);
            (cell.durable, cell.done) = (0, 0);
        }
    }

    /// The array was started after a power cut without member `missing`. What was changing in a stripe can't be computed for it:
    /// parity and data of the others needn't fit each other. A log saves the blocks that weren't changing themselves, and those
    /// that were while the member was missing already: they are changed alone.
    /// Before sector `from` of the members, it is rebuilt. Returns of how many sectors nothing is known.
    pub fn degraded(&mut self, shape: &Shape, missing: usize, log: bool, from: u64) -> u64 {
        let mut count = 0;
        for at in from..shape.member_sectors() {
            let Some((_, sector)) = shape.column(at).find(|&(m, _)| m == missing) else {
                continue;
            };
            let column_changes = shape.column(at).any(|(_, s)| self.unsettled.contains(&s));
            let block = sector - sector % BLOCK_SECTORS;
            let mut block = self.whole.range(block..block + BLOCK_SECTORS);
            if column_changes && (!log || block.next().is_some()) {
                self.cells[sector as usize].any = true;
                count += 1;
            }
        }
        count
    }
}

impl Cell {
    fn settle(&mut self, at: usize) {
        if at > self.durable {
            self.durable = at;
        }
    }

    fn is_settled(&self) -> bool {
        self.durable + 1 == self.history.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(oracle: &Oracle, id: u64) -> bool {
        let bytes = match id {
            0 => [0; 512],
            id => stamp::make(id, 3, false),
        };
        let floor = oracle.cells[3].durable;
        oracle.check(3, floor, &bytes, "is").is_ok()
    }

    #[test]
    fn only_what_a_flush_covers_is_sure() {
        let mut o = Oracle::new(8, false);
        o.submitted(2, 2, 1, false);
        assert!(!o.is_free(3, 1) && may(&o, 0) && may(&o, 1) && !may(&o, 2));
        o.acknowledged(2, 2, 1, false);
        let since = o.now();
        o.submitted(3, 1, 2, false);
        o.acknowledged(3, 1, 2, false);
        assert!(may(&o, 0) && may(&o, 1) && may(&o, 2));
        assert!(
            o.check_read(3, o.floors(3, 1)[0], &stamp::make(1, 3, false))
                .is_err()
        );
        o.flushed(since);
        assert!(!may(&o, 0) && may(&o, 1) && may(&o, 2));
        o.submitted(3, 1, 3, false);
        o.acknowledged(3, 1, 3, true);
        assert!(!may(&o, 2) && may(&o, 3));
        o.submitted(3, 1, 4, false);
        o.failed(3, 1);
        o.cut();
        assert!(may(&o, 3) && may(&o, 4));
        // A flush after the cut says nothing of writes before it.
        o.submitted(5, 1, 9, false);
        o.acknowledged(5, 1, 9, false);
        o.cut();
        let since = o.now();
        o.flushed(since);
        assert_eq!(o.cells[5].durable, 0);
        o.settle(3, &stamp::make(3, 3, false)).unwrap();
        assert!(may(&o, 3) && !may(&o, 4) && !o.unsettled.contains(&3));
    }
}
