//! Every plan of a stripe of four members: each subset of its blocks written whole, partly or not, each absent member, each side of the rebuild's
//! cursor, each subset of pages that are valid, with a log and without. The plans are carried out on bytes, and parity is looked at.

use super::*;
use crate::core::work::StripeWork;
use crate::head_pages::{Block, HeadPages};
use crate::words::{LogBlocks, Partial};
use crate::xor_of;

const COUNT: usize = 4;
const DATA: usize = 3;
/// Slot of the device that is rebuilt.
const SPARE: usize = 4;

/// Some members of an array: who is absent, and how far a device is that is rebuilt for a role.
#[derive(Clone, Copy, Debug, Default)]
struct Present {
    absent: Option<usize>,
    rebuilds: Option<usize>,
    begun: bool,
    committed: bool,
}

/// All of them. One that replaces a working member counts as well.
fn all_present() -> Vec<Present> {
    let mut all = vec![Present::default()];
    for role in 0..COUNT {
        let absent = Some(role);
        all.push(Present {
            absent,
            ..Present::default()
        });
        for (begun, committed) in [(false, false), (true, false), (true, true)] {
            for absent in [None, absent] {
                all.push(Present {
                    absent,
                    rebuilds: Some(role),
                    begun,
                    committed,
                });
            }
        }
    }
    all
}

/// One stripe, its pages, and the blocks of the devices.
struct Stripe {
    array: Array,
    record: Record,
    pages: HeadPages,
    /// The block of each slot.
    devices: Vec<Block>,
    /// The data that it should have.
    data: Vec<Block>,
    /// Memory of requests, and how much of it is used.
    memory: Arc<Region>,
    used: usize,
    context: String,
}

fn fill(rng: &mut fastrand::Rng) -> Block {
    let mut block = [0; STRIPE_BYTES];
    rng.fill(&mut block);
    block
}

fn sum<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Block {
    let blocks: Vec<&[u8]> = blocks.into_iter().map(|b| &b[..]).collect();
    let mut sum = [0; STRIPE_BYTES];
    xor_of(&mut sum, &blocks);
    sum
}

/// A request's data.
fn bytes(piece: &BatchPiece) -> Vec<u8> {
    piece.request.buffers[0].to_vec()
}

/// Makes stripes, with the same memory.
struct Maker {
    rng: fastrand::Rng,
    memory: Arc<Region>,
    /// Of one stripe after the other.
    pages: Arc<Region>,
    junk: Block,
    made: u64,
}

impl Maker {
    fn new() -> Maker {
        let mut rng = fastrand::Rng::with_seed(pvblk_testing::seed());
        let memory = Region::anonymous(64 << 10).expect("memory");
        Maker {
            junk: fill(&mut rng),
            rng,
            memory: Arc::new(memory),
            pages: Arc::new(Region::anonymous(COUNT * STRIPE_BYTES).expect("memory")),
            made: 0,
        }
    }

    /// A stripe whose parity is right, or may not be, by `unsynced`; the pages of `valid` have its contents, all others have junk.
    fn stripe(&mut self, policy: Policy, who: Present, valid: u64, unsynced: bool) -> Stripe {
        // Parity is on each role in turn.
        let stripe = self.made % COUNT as u64;
        self.made += 1;
        let mut array = Array::new(COUNT as u32, policy);
        if let Some(role) = who.absent {
            array = array.without(role);
        }
        if let Some(role) = who.rebuilds {
            array.members.take_in(Incoming::new(SPARE, role, 0, false));
            if who.begun {
                array.comes(|incoming| incoming.begun = stripe + 1);
            }
            if who.committed {
                array.comes(|incoming| {
                    (incoming.done, incoming.committed) = (stripe + 1, stripe + 1);
                });
            }
        }
        let data: Vec<Block> = (0..DATA).map(|_| fill(&mut self.rng)).collect();
        let mut made = Stripe {
            array,
            record: Record {
                stripe,
                valid,
                bad: 0,
            },
            pages: HeadPages::new(Arc::clone(&self.pages), 0),
            devices: vec![self.junk; COUNT + 1],
            data,
            memory: Arc::clone(&self.memory),
            used: 0,
            context: format!(
                "stripe {stripe}, valid {valid:#b}, unsynced {unsynced}, {policy:?}, {who:?}"
            ),
        };
        let contents = made.contents();
        for (role, block) in contents.iter().enumerate() {
            for slot in made.homes(role) {
                made.devices[slot] = *block;
            }
        }
        if unsynced {
            made.array.unsynced = super::unsynced(stripe);
            let parity = made.parity();
            for slot in made.homes(parity) {
                made.devices[slot][7] ^= 1;
            }
        }
        for (role, block) in contents.iter().enumerate() {
            let is_valid = valid & bit(role) != 0;
            let home = made.homes(role).first().copied();
            let there = home.map_or(*block, |slot| made.devices[slot]);
            made.set_page(role, if is_valid { &there } else { &self.junk });
        }
        made
    }

    /// A request for a part of a block, cut into one piece or two; a whole block's data may be promised to be stable.
    fn pieces(
        &mut self,
        stripe: &mut Stripe,
        write: bool,
        index: usize,
        sectors: Range<u64>,
    ) -> Vec<BatchPiece> {
        let cut = match self.rng.bool() {
            true => sectors.start,
            false => self.rng.u64(sectors.start..sectors.end),
        };
        let parts = [sectors.start..cut, cut..sectors.end];
        let parts = parts.into_iter().filter(|p| !p.is_empty());
        let flags = match self.rng.bool() {
            true => RequestFlags::STABLE_BUFFERS,
            false => RequestFlags::empty(),
        };
        parts
            .map(|part| stripe.piece(write, flags, index, &part, &mut self.rng))
            .collect()
    }
}

impl Stripe {
    fn parity(&self) -> usize {
        self.array.geometry.stripe_parity(self.record.stripe)
    }

    fn role(&self, index: usize) -> usize {
        self.array.geometry.stripe_data(self.record.stripe, index)
    }

    /// The blocks that the roles should have.
    fn contents(&self) -> Vec<Block> {
        let mut roles = vec![sum(&self.data); COUNT];
        for (index, block) in self.data.iter().enumerate() {
            roles[self.role(index)] = *block;
        }
        roles
    }

    /// The devices that should have a role's block.
    fn homes(&self, role: usize) -> Vec<usize> {
        let members = &self.array.members;
        let spare = members
            .incoming_of(role)
            .filter(|i| self.record.stripe < i.begun);
        let all = members.slots()[role]
            .into_iter()
            .chain(spare.map(|i| i.slot));
        all.collect()
    }

    fn page(&mut self, role: usize) -> Block {
        let mut block = [0; STRIPE_BYTES];
        self.pages.read(role, &mut block);
        block
    }

    fn set_page(&mut self, role: usize, block: &Block) {
        let page = self.pages.buffer(role).expect("a page");
        page.write(0, block);
    }

    /// A request of its own for a part of a block, with random data.
    fn piece(
        &mut self,
        write: bool,
        flags: RequestFlags,
        index: usize,
        of: &Range<u64>,
        rng: &mut fastrand::Rng,
    ) -> BatchPiece {
        let len = (of.end - of.start) as usize * 512;
        let op = if write { Op::Write } else { Op::Read };
        let mut request = Request::new(op, 0, of.end - of.start, 0);
        request.flags = flags;
        request.buffers = Buffer::new(&self.memory, self.used, len)
            .into_iter()
            .collect();
        self.memory.write(self.used, &fill(rng)[..len]);
        self.used += len;
        BatchPiece {
            piece: piece(write, index, of),
            request: Arc::new(request),
            member: self.role(index),
        }
    }

    /// Reads that a plan asks for, and its calculation.
    fn calculate(&mut self, plan: &Plan, pieces: Vec<BatchPiece>) -> StripeWork {
        assert_eq!(
            plan.reads & self.record.valid,
            0,
            "{}: a page that is valid would be lost",
            self.context
        );
        for role in bits(plan.reads) {
            assert_ne!(
                self.array.members.missing(self.record.stripe),
                Some(role),
                "{}",
                self.context
            );
            let slot = self.array.members.reads(role);
            let block = self.devices[slot.expect("a device to read")];
            self.set_page(role, &block);
            self.record.valid |= bit(role);
        }
        let view = self.array.view();
        let calculation = view.calculation(&self.record, plan, &pieces, true);
        let mut work = StripeWork {
            flying: 0,
            pages: self.pages.clone(),
            pieces,
            calculation,
            partial: calculation.partial.then(|| {
                let mut blocks = LogBlocks::default();
                let rest = calculation.unchanged();
                Partial::of(&self.pages, rest, &mut blocks).expect("memory")
            }),
            mismatch: false,
            sums: None,
            computed: None,
        };
        work.run();
        self.record.calculated(&calculation);
        work
    }

    /// The writes of a plan.
    fn write(&mut self, plan: &Plan, work: &StripeWork) -> Vec<usize> {
        let mut writes = Vec::new();
        let note = |role, slot| writes.push((role, slot));
        self.array.view().writes(&self.record, plan, note);
        for (role, slot) in &writes {
            let borrowed = work
                .pieces
                .iter()
                .find(|p| work.calculation.borrows && p.member == *role);
            self.devices[*slot] = match borrowed {
                Some(piece) => bytes(piece).try_into().expect("a block"),
                None => self.page(*role),
            };
        }
        writes.into_iter().map(|(_, slot)| slot).collect()
    }

    /// Serves pieces until none is left.
    fn serve(&mut self, mut pieces: Vec<BatchPiece>) {
        let mut rounds = 0;
        while !pieces.is_empty() {
            let waiting: Vec<_> = pieces.iter().map(|p| p.piece).collect();
            let plan = self.array.view().serve(&self.record, &waiting);
            let taken = |p: &mut BatchPiece| plan.takes(&p.piece);
            let taken: Vec<_> = pieces.extract_if(.., taken).collect();
            assert!(
                !taken.is_empty() && rounds < COUNT,
                "{}: no end",
                self.context
            );
            rounds += 1;
            self.round(&plan, taken);
        }
    }

    /// A round of requests, and all that has to be right after it.
    fn round(&mut self, plan: &Plan, taken: Vec<BatchPiece>) {
        let context = self.context.clone();
        let unwritten: Vec<Block> = (0..DATA)
            .filter(|i| plan.touched & bit(*i) == 0)
            .map(|i| self.data[i])
            .collect();
        let work = self.calculate(plan, taken);
        if let Some(partial) = &work.partial {
            let partial = partial.buffer().to_vec();
            assert!(partial == sum(&unwritten), "{context}: partial parity");
        }
        let alone = self.array.members.uncommitted(self.record.stripe);
        for BatchPiece { piece, member, .. } in &work.pieces {
            let is_alone = plan.touched.count_ones() == 1 || !piece.write;
            assert!(alone != Some(*member) || is_alone, "{context}: not alone");
        }
        if work.calculation.logged {
            let (first, count) = plan.blocks();
            let run = ((1 << count) - 1) << first;
            assert_eq!(plan.touched, run, "{context}: no neighbours");
        }
        for piece in &work.pieces {
            let bytes = bytes(piece);
            let at = piece.piece.offset as usize * 512;
            let block = &mut self.data[piece.piece.index][at..at + bytes.len()];
            match piece.piece.write {
                true => block.copy_from_slice(&bytes),
                false => assert!(*block == bytes, "{context}: read"),
            }
        }
        let written = self.write(plan, &work);
        match plan.mode.writes() {
            true => self.assert_right(),
            false => assert!(written.is_empty(), "{context}: a read writes"),
        }
    }

    /// All blocks of the devices and all valid pages are right. Of a block that has no device the others tell.
    fn assert_right(&mut self) {
        let contents = self.contents();
        for (role, block) in contents.iter().enumerate() {
            for slot in self.homes(role) {
                assert!(
                    self.devices[slot] == *block,
                    "{}: role {role} on slot {slot}",
                    self.context
                );
            }
            if self.record.valid & bit(role) != 0 {
                assert!(
                    self.page(role) == *block,
                    "{}: page of role {role}",
                    self.context
                );
            }
        }
    }
}

/// Calls for all members, all subsets of valid pages, and with a log and without.
fn for_all(mut each: impl FnMut(Policy, Present, u64)) {
    for who in all_present() {
        for valid in 0..1 << COUNT {
            for policy in [LOG, Policy::Resync] {
                each(policy, who, valid);
            }
        }
    }
}

#[test]
fn parity_is_right_after_every_plan() {
    let mut maker = Maker::new();
    let mut plans = 0;
    for_all(|policy, who, valid| {
        for parts in 0..3usize.pow(DATA as u32) {
            for unsynced in [false, true] {
                if unsynced && who.absent.is_some() {
                    // Parity that isn't known to be right ends with a member.
                    continue;
                }
                let mut stripe = maker.stripe(policy, who, valid, unsynced);
                let mut pieces = Vec::new();
                for index in 0..DATA {
                    let sectors = match parts / 3usize.pow(index as u32) % 3 {
                        0 => continue,
                        1 => 2..5,
                        _ => 0..8,
                    };
                    pieces.extend(maker.pieces(&mut stripe, true, index, sectors));
                }
                stripe.context.push_str(&format!(", parts {parts}"));
                maker.rng.shuffle(&mut pieces);
                stripe.serve(pieces);
                plans += 1;
            }
        }
    });
    assert_eq!(plans, (29 * 27 + 13 * 27) * 16 * 2);
}

#[test]
fn reads_are_right_with_every_plan() {
    let mut maker = Maker::new();
    for_all(|policy, who, valid| {
        for blocks in 1..1u64 << DATA {
            let mut stripe = maker.stripe(policy, who, valid, false);
            let mut pieces = Vec::new();
            for index in bits(blocks) {
                let sectors = if maker.rng.bool() { 0..8 } else { 3..7 };
                pieces.extend(maker.pieces(&mut stripe, false, index, sectors));
            }
            stripe.serve(pieces);
            stripe.assert_right();
        }
    });
}

#[test]
fn a_bad_block_is_right_after_it_is_fixed() {
    let mut maker = Maker::new();
    for_all(|policy, who, valid| {
        for bad in 0..COUNT {
            let mut stripe = maker.stripe(policy, who, valid & !bit(bad), false);
            stripe.record.bad = bit(bad);
            let Some(plan) = stripe.array.view().fix(&stripe.record) else {
                let missing = stripe.array.members.missing(stripe.record.stripe);
                assert!(missing.is_some());
                continue;
            };
            let homes = stripe.homes(bad);
            homes
                .iter()
                .for_each(|slot| stripe.devices[*slot] = maker.junk);
            let work = stripe.calculate(&plan, Vec::new());
            assert_eq!(stripe.write(&plan, &work), homes);
            stripe.assert_right();
        }
    });
}

#[test]
fn the_incoming_devices_block_is_right_after_a_rebuild() {
    let mut maker = Maker::new();
    for_all(|policy, who, valid| {
        let mut stripe = maker.stripe(policy, who, valid, false);
        // The stripe has begun before its batch runs.
        let after = stripe.record.stripe + 1;
        if who.rebuilds.is_some() {
            stripe
                .array
                .comes(|incoming| incoming.begun = incoming.begun.max(after));
        }
        let Some(plan) = stripe.array.view().rebuild(&stripe.record) else {
            assert!(who.rebuilds.is_none());
            return;
        };
        stripe.devices[SPARE] = maker.junk;
        // Its own block isn't read, as it isn't there: the member's is, or all others are.
        let role = who.rebuilds.expect("a role");
        if who.absent.is_some() {
            assert_eq!(plan.reads & bit(role), 0);
        }
        let work = stripe.calculate(&plan, Vec::new());
        assert_eq!(stripe.write(&plan, &work), [SPARE]);
        stripe.assert_right();
    });
}

#[test]
fn a_check_finds_wrong_parity_and_makes_it_right() {
    let mut maker = Maker::new();
    for_all(|policy, who, valid| {
        for spoiled in [false, true] {
            let mut stripe = maker.stripe(policy, who, valid, spoiled);
            let Some(plan) = stripe.array.view().check(&stripe.record) else {
                continue;
            };
            // The data on the members counts.
            stripe.record.valid = 0;
            let work = stripe.calculate(&plan, Vec::new());
            assert_eq!(work.mismatch, spoiled, "{}", stripe.context);
            let parity = stripe.parity();
            assert_eq!(stripe.write(&plan, &work), stripe.homes(parity));
            stripe.assert_right();
        }
    });
}
