//! Plans by tables, and every plan of a stripe of four members, carried out on bytes.

#[path = "plan_every_tests.rs"]
mod every;

use super::*;
use crate::core::members::Incoming;
use crate::{Layout, LogArea, STRIPE_BYTES};
use pvblk_block::{Buffer, Op, Region, Request, RequestFlags};
use std::ops::Range;
use std::sync::Arc;

const LOG: Policy = Policy::Ppl(LogArea {
    sector: 16,
    sectors: 2048,
});

/// An array of some members, with chunks of one block, so that each stripe has its parity elsewhere.
struct Array {
    geometry: Geometry,
    policy: Policy,
    members: Members,
    unsynced: Unsynced,
}

impl Array {
    fn new(count: u32, policy: Policy) -> Array {
        let slots = (0..count as usize).map(Some).collect();
        Array {
            geometry: Geometry::new(count, 8, Layout::LeftAsymmetric, 1024).expect("a geometry"),
            policy,
            members: Members::new(slots, None),
            unsynced: Unsynced::default(),
        }
    }

    fn without(mut self, role: usize) -> Array {
        self.members.lose(role);
        self
    }

    /// Moves the positions of the incoming device.
    fn comes(&mut self, change: impl FnOnce(&mut Incoming)) {
        let mut incoming = self.members.incoming().expect("one");
        change(&mut incoming);
        self.members = self.members.with(incoming);
    }

    fn view(&self) -> View<'_> {
        View {
            geometry: &self.geometry,
            policy: self.policy,
            members: &self.members,
            unsynced: &self.unsynced,
        }
    }

    /// The plan for writes of some sectors of some blocks of stripe 0, whose parity is the last member's, and whose block N is member N's.
    fn write(&self, valid: u64, blocks: &[(usize, Range<u64>)]) -> Plan {
        let waiting = blocks.iter().map(|(index, of)| piece(true, *index, of));
        self.view()
            .serve(&record(valid), &waiting.collect::<Vec<_>>())
    }
}

fn record(valid: u64) -> Record {
    Record {
        valid,
        ..Record::default()
    }
}

fn piece(write: bool, index: usize, sectors: &Range<u64>) -> Piece {
    Piece {
        request: 0,
        write,
        stripe: 0,
        index,
        offset: sectors.start,
        sectors: sectors.end - sectors.start,
        skip: 0,
    }
}

/// A stripe whose parity may be wrong.
fn unsynced(stripe: u64) -> Unsynced {
    Unsynced(std::iter::once(stripe..stripe + 1).collect())
}

fn whole(blocks: Range<usize>) -> Vec<(usize, Range<u64>)> {
    blocks.map(|index| (index, 0..8)).collect()
}

/// A whole block's write by a request of its own.
fn of_request(op: Op, flags: RequestFlags, index: usize) -> BatchPiece {
    let mut request = Request::new(op, 0, 8, 0);
    request.flags = flags;
    if op == Op::Write {
        let memory = Arc::new(Region::anonymous(STRIPE_BYTES).expect("memory"));
        request
            .buffers
            .extend(Buffer::new(&memory, 0, STRIPE_BYTES));
    }
    BatchPiece {
        piece: piece(true, index, &(0..8)),
        request: Arc::new(request),
        member: index,
    }
}

#[test]
fn fewer_reads_decide_and_ties_reconstruct() {
    let eight = Array::new(8, Policy::Resync);
    for (blocks, mode, reads) in [
        (1, Mode::Modify, 0b1000_0001),
        (2, Mode::Modify, 0b1000_0011),
        (3, Mode::Reconstruct, 0b0111_1000),
        (4, Mode::Reconstruct, 0b0111_0000),
        (6, Mode::Reconstruct, 0b0100_0000),
        (7, Mode::Reconstruct, 0),
    ] {
        let plan = eight.write(0, &whole(0..blocks));
        assert_eq!((plan.mode, plan.reads), (mode, reads), "{blocks} blocks");
        assert_eq!(plan.blocks(), (0, blocks));
    }
    // Two reads each.
    let four = Array::new(4, Policy::Resync);
    let plan = four.write(0, &whole(0..1));
    assert_eq!((plan.mode, plan.reads), (Mode::Reconstruct, 0b0110));
    // Valid pages aren't read.
    let plan = four.write(0b1001, &whole(0..1));
    assert_eq!((plan.mode, plan.reads), (Mode::Modify, 0));
}

#[test]
fn a_block_that_is_written_in_parts_is_read_unless_they_cover_it() {
    let array = Array::new(4, Policy::Resync);
    let reads = |parts: &[(u64, u64)]| {
        let parts: Vec<_> = parts.iter().map(|(from, to)| (0, *from..*to)).collect();
        array.write(0, &[parts, whole(1..3)].concat()).reads
    };
    assert_eq!(reads(&[(0, 8)]), 0);
    assert_eq!(reads(&[(0, 7)]), 1);
    assert_eq!(reads(&[(1, 8)]), 1);
    assert_eq!(reads(&[(0, 3), (5, 8)]), 1);
    assert_eq!(reads(&[(4, 8), (0, 5)]), 0);
}

#[test]
fn parity_that_may_be_wrong_is_made_from_all_data() {
    let mut array = Array::new(8, Policy::Resync);
    array.unsynced = unsynced(0);
    let plan = array.write(0, &whole(0..1));
    assert_eq!((plan.mode, plan.reads), (Mode::Reconstruct, 0b0111_1110));
    array.unsynced.done_before(1);
    assert_eq!(array.write(0, &whole(0..1)).mode, Mode::Modify);
}

#[test]
fn without_a_member() {
    let degraded = |role| Array::new(4, Policy::Resync).without(role);
    // Its block isn't written: only read-modify-write can do without it.
    let plan = degraded(1).write(0, &whole(0..1));
    assert_eq!((plan.mode, plan.reads), (Mode::Modify, 0b1001));
    // It is written whole: its old data isn't needed.
    let plan = degraded(1).write(0, &whole(1..2));
    assert_eq!((plan.mode, plan.reads), (Mode::Reconstruct, 0b0101));
    assert_eq!((plan.compute, plan.missing), (None, Some(1)));
    // It is written in part: the rest is calculated from all others.
    let plan = degraded(1).write(0, &[(1, 0..7)]);
    assert_eq!((plan.mode, plan.reads), (Mode::Reconstruct, 0b1101));
    assert_eq!(plan.compute, Some(1));
    // Its page has it.
    let plan = degraded(1).write(0b0010, &[(1, 0..7)]);
    assert_eq!((plan.mode, plan.reads), (Mode::Reconstruct, 0b0101));
    assert_eq!(plan.compute, None);
    // Nobody has parity.
    let plan = degraded(3).write(0, &[(0, 0..8), (1, 0..7)]);
    assert_eq!((plan.mode, plan.reads), (Mode::NoParity, 0b0010));
    let array = degraded(3);
    let mut writes = Vec::new();
    let note = |role, slot| writes.push((role, slot));
    array.view().writes(&record(0), &plan, note);
    assert_eq!(writes, [(0, 0), (1, 1)]);
}

#[test]
fn an_absent_members_block_is_written_alone() {
    let all: &[_] = &whole(0..3);
    let touched = |array: &Array, blocks: &[(usize, Range<u64>)]| array.write(0, blocks).touched;
    assert_eq!(touched(&Array::new(4, Policy::Resync), all), 0b111);
    let array = Array::new(4, Policy::Resync).without(1);
    assert_eq!(touched(&array, all), 0b010);
    assert_eq!(touched(&array, &[(0, 0..8), (2, 0..8)]), 0b101);
    // Until superblocks on disk say that the device which is rebuilt has it.
    let mut array = array;
    array.members.take_in(Incoming::new(4, 1, 0, false));
    array.comes(|incoming| (incoming.begun, incoming.done) = (1, 1));
    assert_eq!(touched(&array, all), 0b010);
    array.comes(|incoming| incoming.committed = 1);
    assert_eq!(touched(&array, all), 0b111);
}

#[test]
fn a_logs_entry_names_neighbours() {
    let array = Array::new(8, LOG);
    let touched = |array: &Array, blocks: &[usize]| {
        let blocks: Vec<_> = blocks.iter().map(|b| (*b, 0..8)).collect();
        array.write(0, &blocks).touched
    };
    assert_eq!(touched(&array, &[0, 2, 3]), 0b0000_0001);
    assert_eq!(touched(&array, &[3, 2, 6]), 0b0000_1100);
    assert_eq!(touched(&array, &[0, 1, 2, 3, 4, 5, 6]), 0b0111_1111);
    // Without parity there is no entry.
    assert_eq!(touched(&array.without(7), &[0, 2]), 0b0000_0101);
    let bitmap = Array::new(8, Policy::Bitmap { sector: 16 });
    assert_eq!(touched(&bitmap, &[0, 2]), 0b0000_0101);
}

#[test]
fn a_plan_takes_the_pieces_that_it_was_made_for() {
    let array = Array::new(4, LOG);
    let write = |index| piece(true, index, &(0..8));
    let read = |index| piece(false, index, &(0..8));
    let plan = array.write(0, &[(0, 0..8), (2, 0..8)]);
    let taken = [write(0), write(1), write(2), read(0)].map(|p| plan.takes(&p));
    assert_eq!(taken, [true, false, false, false]);
    // Reads that wait go first, all of them.
    let waiting = [write(0), read(1), read(2)];
    let plan = array.view().serve(&record(0b0100), &waiting);
    assert_eq!((plan.mode, plan.reads), (Mode::Read, 0b0010));
    assert_eq!(waiting.iter().filter(|p| plan.takes(p)).count(), 2);
    let fix = array.view().fix(&Record {
        bad: 1,
        ..record(0)
    });
    assert!(!waiting.iter().any(|p| fix.expect("a plan").takes(p)));
}

#[test]
fn a_block_can_be_calculated_if_all_others_are_good() {
    let array = Array::new(4, LOG);
    let read = |array: &Array| {
        let waiting = [piece(false, 0, &(0..8))];
        array.view().serve(&record(0), &waiting)
    };
    let can = |array: &Array, bad, plan: &Plan| {
        let record = Record { bad, ..record(0) };
        array.view().can_fix(&record, plan, 0)
    };
    let plan = read(&array);
    assert!(can(&array, 0, &plan) && can(&array, 0b0001, &plan));
    assert!(!can(&array, 0b0010, &plan), "another one is bad, too");
    let fix = array.view().fix(&Record {
        bad: 1,
        ..record(0)
    });
    assert!(!can(&array, 0, &fix.expect("a plan")), "one by one");
    let degraded = Array::new(4, LOG).without(1);
    assert!(!can(&degraded, 0, &plan), "a member is missing");
    assert!(!can(&array, 0, &read(&degraded)), "one was missing");
    let mut other = Array::new(4, LOG);
    other.unsynced = unsynced(0);
    assert!(!can(&other, 0, &plan), "parity may be wrong");
    // The block that is being rebuilt isn't there, although its stripe has begun.
    let mut rebuilt = Array::new(4, LOG).without(1);
    rebuilt.members.take_in(Incoming::new(4, 1, 0, false));
    rebuilt.comes(|incoming| incoming.begun = 1);
    let plan = rebuilt.view().rebuild(&record(0)).expect("a plan");
    assert!(!can(&rebuilt, 0, &plan));
    // The member that is replaced is there.
    let mut replaced = Array::new(4, LOG);
    replaced.members.take_in(Incoming::new(4, 1, 0, false));
    let plan = replaced.view().rebuild(&record(0)).expect("a plan");
    assert!(can(&replaced, 0, &plan));
}

#[test]
fn nothing_is_fixed_or_compared_without_a_member() {
    let bad = Record {
        bad: 1,
        ..record(0)
    };
    let array = Array::new(4, LOG);
    assert!(array.view().fix(&bad).is_some() && array.view().check(&bad).is_some());
    assert!(array.view().rebuild(&bad).is_none(), "nobody is rebuilt");
    let array = array.without(2);
    assert!(array.view().fix(&bad).is_none() && array.view().check(&bad).is_none());
}

#[test]
fn data_is_borrowed_if_the_whole_stripe_is_stable() {
    let stable = RequestFlags::STABLE_BUFFERS;
    let of = |flags: [RequestFlags; 3]| {
        let pieces = flags.iter().enumerate();
        let pieces = pieces.map(|(index, flags)| of_request(Op::Write, *flags, index));
        pieces.collect::<Vec<_>>()
    };
    let array = Array::new(4, LOG);
    let plan = array.write(0, &whole(0..3));
    let borrows = |array: &Array, plan: &Plan, pieces: &[BatchPiece], may| {
        let calculation = array.view().calculation(&record(0), plan, pieces, may);
        assert!(!calculation.hole);
        calculation.borrows
    };
    assert!(borrows(&array, &plan, &of([stable; 3]), true));
    assert!(!borrows(&array, &plan, &of([stable; 3]), false));
    let copied = of([stable, RequestFlags::empty(), stable]);
    assert!(!borrows(&array, &plan, &copied, true));
    // Two of three blocks.
    let plan = array.write(0, &whole(0..2));
    assert!(!borrows(&array, &plan, &of([stable; 3])[..2], true));
    // There is no parity to make.
    let array = array.without(3);
    let plan = array.write(0, &whole(0..3));
    assert!(!borrows(&array, &plan, &of([stable; 3]), true));
}

#[test]
fn a_hole_is_a_whole_stripe_of_zeros() {
    let of = |ops: [(Op, RequestFlags); 3]| {
        let pieces = ops.iter().enumerate();
        let pieces = pieces.map(|(index, (op, flags))| of_request(*op, *flags, index));
        pieces.collect::<Vec<_>>()
    };
    let is_hole = |array: &Array, pieces: &[BatchPiece]| {
        let plan = array.write(0, &whole(0..pieces.len()));
        let view = array.view();
        view.calculation(&record(0), &plan, pieces, true).hole
    };
    let zeroes = (Op::WriteZeroes, RequestFlags::empty());
    let discard = (Op::Discard, RequestFlags::empty());
    let kept = (Op::WriteZeroes, RequestFlags::NO_UNMAP);
    let array = Array::new(4, LOG);
    assert!(is_hole(&array, &of([zeroes, discard, zeroes])));
    assert!(!is_hole(&array, &of([zeroes, kept, zeroes])));
    assert!(!is_hole(&array, &of([zeroes; 3])[..2]));
    assert!(!is_hole(&array.without(3), &of([zeroes; 3])));
}

#[test]
fn a_log_has_partial_parity_of_a_part_of_a_stripe() {
    let logs = |array: &Array, blocks: usize| {
        let plan = array.write(0, &whole(0..blocks));
        let calculation = array.view().calculation(&record(0), &plan, &[], false);
        (calculation.logged, calculation.partial)
    };
    let array = Array::new(4, LOG);
    assert_eq!(logs(&array, 2), (true, true));
    assert_eq!(logs(&array, 3), (true, false));
    assert_eq!(logs(&array.without(3), 2), (false, false));
    assert_eq!(logs(&Array::new(4, Policy::Resync), 2), (false, false));
}
