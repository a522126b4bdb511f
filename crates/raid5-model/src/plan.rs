//! Planning and calculation of a batch: pure functions of a stripe and of the members.

use crate::bound::Bound;
use crate::bug::Bug;
use crate::state::{
    BLOCKS, Entry, MEMBERS, NONE, PARITY, SECTORS, State, Stripe, Value, WRITES, value,
};

/// Both sectors of a block.
const WHOLE: u8 = 0b11;
/// All data blocks of a stripe.
const ALL: u8 = 0b11;

/// The place that has a block of a stripe; parity is the last block.
pub fn place(bound: &Bound, stripe: usize, block: usize) -> usize {
    let parity = bound.parity[stripe] as usize;
    match block {
        PARITY => parity,
        _ => (0..MEMBERS)
            .filter(|m| *m != parity)
            .nth(block)
            .unwrap_or(0),
    }
}

/// The block that a place has of a stripe.
pub fn block(bound: &Bound, stripe: usize, at: usize) -> usize {
    (0..=PARITY)
        .find(|b| place(bound, stripe, *b) == at)
        .unwrap_or(PARITY)
}

/// The means by which parity is calculated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    NoParity,
    /// From old parity, and old and new data of the blocks that change.
    Modify,
    /// From all data.
    Reconstruct,
}

/// A batch as it would be if it were closed now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Blocks of each write.
    pub batch: [u8; WRITES],
    /// Sectors of each block that are written.
    pub cover: [u8; BLOCKS],
    pub touched: u8,
    pub mode: Mode,
    /// Blocks that have to be read, as a mask.
    pub need: u8,
    /// The missing block, whose old contents are calculated.
    pub missing: Option<usize>,
}

/// The data block of a stripe that has to be written alone now, if there is one.
pub fn alone(bound: &Bound, bug: Option<Bug>, state: &State, stripe: usize) -> Option<usize> {
    let at = state.members.uncommitted(stripe)?;
    let b = block(bound, stripe, at);
    (b != PARITY && bug != Some(Bug::MissingWithOthers)).then_some(b)
}

/// Plans a batch of the first `requests` of the list.
pub fn plan(
    bound: &Bound,
    bug: Option<Bug>,
    state: &State,
    stripe: usize,
    requests: usize,
) -> Plan {
    let s = &state.stripes[stripe];
    let missing = (0..=PARITY).find(|b| {
        let at = place(bound, stripe, *b);
        state.members.device(at, stripe).is_none()
    });
    let alone = (s.alone != NONE).then_some(s.alone as usize);
    let mut batch = [0; WRITES];
    for &w in s.list[..requests]
        .iter()
        .filter(|w| (**w as usize) < WRITES)
    {
        batch[w as usize] = state.writes[w as usize].left;
    }
    // A block that a power cut would leave to be calculated is written alone: only parity changes then.
    if let Some(b) = alone
        && batch.iter().any(|blocks| blocks & (1 << b) != 0)
    {
        batch.iter_mut().for_each(|blocks| *blocks &= 1 << b);
    }
    let mut cover = [0; BLOCKS];
    for (w, blocks) in batch.iter().enumerate() {
        let sectors = bound.writes[w].map_or(0, |shape| shape.sectors);
        for (b, cover) in cover.iter_mut().enumerate() {
            *cover |= if blocks & (1 << b) != 0 { sectors } else { 0 };
        }
    }
    let mask = |f: &dyn Fn(u8) -> bool| {
        let some = cover.iter().enumerate().filter(|(_, c)| f(**c));
        some.fold(0u8, |m, (b, _)| m | 1 << b)
    };
    let touched = mask(&|c| c != 0);
    let whole = match bug {
        Some(Bug::PartialTakenForWhole) => touched,
        _ => mask(&|c| c == WHOLE),
    };
    let parity = 1u8 << PARITY;
    let (mode, need) = match missing {
        Some(PARITY) => (Mode::NoParity, touched & !whole),
        Some(b) if touched & (1 << b) == 0 => (Mode::Modify, touched | parity),
        // The rest of it must be known, and is calculated from all others.
        Some(b) if whole & (1 << b) == 0 => (Mode::Reconstruct, (ALL | parity) & !(1 << b)),
        Some(b) => (Mode::Reconstruct, ALL & !(whole | 1 << b)),
        None if bound.modify && whole != ALL => (Mode::Modify, touched | parity),
        None => (Mode::Reconstruct, ALL & !whole),
    };
    Plan {
        batch,
        cover,
        touched,
        mode,
        need,
        missing,
    }
}

/// Takes the data of a batch's writes and calculates parity and partial parity from what was read.
pub fn calculate(bound: &Bound, bug: Option<Bug>, s: &mut Stripe, plan: &Plan) {
    for sector in 0..SECTORS {
        let mut old: [Value; BLOCKS + 1] = [0; BLOCKS + 1];
        for (b, old) in old.iter_mut().enumerate() {
            *old = s.reads[b][sector];
        }
        if let Some(b) = plan.missing.filter(|b| *b != PARITY) {
            old[b] = (0..=PARITY)
                .filter(|o| *o != b)
                .fold(0, |sum, o| sum ^ old[o]);
        }
        let mut new = old;
        for &w in s.list.iter().filter(|w| (**w as usize) < WRITES) {
            let (w, shape) = (w as usize, bound.writes[w as usize]);
            let covers = shape.is_some_and(|shape| shape.sectors & (1 << sector) != 0);
            for b in (0..BLOCKS).filter(|b| covers && plan.batch[w] & (1 << b) != 0) {
                new[b] = value(b, w as u8 + 1);
            }
        }
        let sum = |of: &[Value; BLOCKS + 1], mask: u8| {
            (0..BLOCKS)
                .filter(|b| mask & (1 << b) != 0)
                .fold(0, |sum, b| sum ^ of[b])
        };
        let partial = match plan.mode {
            Mode::NoParity => 0,
            Mode::Modify => old[PARITY] ^ sum(&old, plan.touched),
            Mode::Reconstruct => sum(&old, ALL & !plan.touched),
        };
        new[PARITY] = partial ^ sum(&new, plan.touched);
        for (b, new) in new.iter().enumerate() {
            let written = b == PARITY || plan.touched & (1 << b) != 0;
            s.new[b][sector] = if written { *new } else { 0 };
        }
        s.partial[sector] = match bug {
            Some(Bug::PartialParityIsParity) => new[PARITY],
            _ => partial,
        };
    }
    s.touched = plan.touched;
    s.batch = plan.batch;
    s.calculated = plan.batch;
    let mut shapes = bound.writes.iter().zip(plan.batch);
    s.fua = shapes.any(|(shape, blocks)| blocks != 0 && shape.is_some_and(|s| s.fua));
    // Blocks that were read aren't needed any more; equal states are to look equal.
    s.reads = [[0; SECTORS]; BLOCKS + 1];
    (s.valid, s.need, s.round) = (0, 0, 0);
}

/// The entry of a stripe's batch for its log.
pub fn entry(s: &Stripe) -> Entry {
    Entry {
        touched: s.touched,
        partial: s.partial,
    }
}

/// The place whose log a stripe's batch has to be in; `None`: parity is missing, so there is none.
pub fn log_of(bound: &Bound, state: &State, stripe: usize) -> Option<usize> {
    let at = place(bound, stripe, PARITY);
    state.members.device(at, stripe).map(|_| at)
}

/// The device that a place's log is on. A device that is recovered has the logs of its stripes as well.
pub fn log_device(bug: Option<Bug>, state: &State, at: usize) -> Option<usize> {
    let m = &state.members;
    if at as u8 == m.failed {
        let there = m.incoming && bug != Some(Bug::LogNotOnIncoming);
        return there.then_some(crate::state::SPARE);
    }
    if at as u8 == m.swapped {
        return Some(crate::state::SPARE);
    }
    Some(at)
}

/// Devices that a batch's block goes to.
pub fn targets(
    bound: &Bound,
    bug: Option<Bug>,
    state: &State,
    stripe: usize,
    b: usize,
) -> Option<usize> {
    let at = place(bound, stripe, b);
    let device = state.members.device(at, stripe)?;
    let incoming = at as u8 == state.members.failed;
    if incoming && bug == Some(Bug::CursorNotRespected) {
        return None;
    }
    Some(device)
}

/// Blocks of a stripe that a batch writes, parity last.
pub fn written(s: &Stripe, parity: bool) -> impl Iterator<Item = usize> + use<> {
    let touched = s.touched;
    (0..=PARITY).filter(move |b| match *b {
        PARITY => parity,
        b => touched & (1 << b) != 0,
    })
}

/// The longest run of requests, from the first on, that can be calculated from what was read; 0: none.
pub fn ready(bound: &Bound, bug: Option<Bug>, state: &State, stripe: usize) -> usize {
    let s = &state.stripes[stripe];
    let len = s.list.iter().filter(|l| **l != NONE).count();
    let fits = |n: &usize| plan(bound, bug, state, stripe, *n).need & !s.valid == 0;
    (1..=len).rev().find(fits).unwrap_or(0)
}
