//! Each way of a batch through its log, by one thread.

use super::*;
use crate::{
    Geometry, Layout, PPL_HEADER_BYTES, PPL_MAX_ENTRIES, PplHeader, STRIPE_BYTES, ppl_signature,
};
use pvblk_block::Buffer;

/// The record of a stripe: the number of its batch among those that came to logs.
#[derive(Default, Debug)]
pub struct Stripe {
    pub arrival: u64,
}

impl Record for Stripe {
    type Pages = ();
}

pub type Stripes = Table<Stripe, ()>;
type Duties = LogErrands<Stripe>;
/// A stripe's token, and its part in a unit.
type Stable = (Token<Waiting, Stripe>, Part);

pub const MEMBERS: u32 = 4;
/// Stripes of a row, which are those of a chunk.
pub const ROW: u64 = 8;
pub const ROWS: u64 = 8;
pub const ALL: usize = MEMBERS as usize - 1;
const WIDE: Room = Room {
    bytes: 1 << 20,
    segments: 1000,
};

pub fn format() -> LogFormat {
    let chunk = ROW as u32 * 8;
    let sectors = ROWS * u64::from(chunk);
    let geometry = Geometry::new(MEMBERS, chunk, Layout::LeftSymmetric, sectors);
    LogFormat {
        geometry: geometry.expect("a geometry"),
        signature: ppl_signature(&[7; 16]),
    }
}

pub fn owner(queue: usize) -> Owner {
    Owner::new(queue as u16 + 1).expect("a number")
}

pub fn parity_of(stripe: u64) -> usize {
    format().geometry.stripe_parity(stripe)
}

/// A page of these bytes, as partial parity that isn't copied.
pub fn page(byte: u8) -> Partial {
    let page = Buffer::anonymous(STRIPE_BYTES).expect("memory");
    page.write(0, &[byte; STRIPE_BYTES]);
    Partial::Page(page)
}

/// The entry of a stripe that changes from its first block on.
fn entry(stripe: u64, blocks: usize, byte: u8) -> LogEntry {
    LogEntry {
        stripe,
        stripes: 1,
        first: 0,
        blocks,
        partial: (blocks < ALL).then(|| page(byte)),
    }
}

/// A unit as recovery reads it: stripe, first block and number of blocks. Checks the sums of partial parity.
pub fn read_unit(buffers: &[Buffer], log: usize) -> (u64, usize, Vec<(u64, usize, usize)>) {
    let geometry = format().geometry;
    let mut bytes = vec![0; PPL_HEADER_BYTES];
    buffers[0].read(0, &mut bytes);
    let header = PplHeader::parse(&bytes, format().signature).expect("a header");
    let mut parity = Vec::new();
    for buffer in &buffers[1..] {
        let mut bytes = vec![0; buffer.len()];
        buffer.read(0, &mut bytes);
        parity.append(&mut bytes);
    }
    let mut stripes = Vec::new();
    let mut end = 0;
    for (at, entry) in header.entries_at() {
        let (at, len) = (at as usize, entry.pp_bytes as usize);
        end = at + len;
        assert_eq!(crc32c::crc32c(&parity[at..end]), entry.checksum);
        assert_eq!(entry.parity_member as usize, log);
        let data = entry.data_bytes as usize / STRIPE_BYTES;
        let count = match len {
            0 => data / ALL,
            _ => len / STRIPE_BYTES,
        };
        let stripe = geometry.stripe_of(entry.data_sector);
        let first =
            (0..ALL).find(|i| geometry.stripe_array_sector(stripe, *i) == entry.data_sector);
        let first = first.expect("the begin of a block");
        let more = (stripe..).take(count);
        stripes.extend(more.map(|stripe| (stripe, first, data / count)));
    }
    assert_eq!(end, parity.len(), "no bytes but those of entries");
    assert!(stripes.is_sorted());
    (header.generation, header.entries.len(), stripes)
}

/// Stripes and logs for the tests that go step by step.
struct Small {
    stripes: Stripes,
    logs: Logs<Stripe>,
    epoch: Epoch,
    places: Vec<Place>,
    log_places: Vec<Place>,
    duties: Duties,
}

impl Small {
    fn new() -> Small {
        let (stripes, places) = Table::new((ROW * ROWS) as usize, 1, Stripe::default);
        let (logs, log_places) = Logs::new(format(), 500).expect("memory");
        Small {
            stripes,
            logs,
            epoch: Epoch::default(),
            places,
            log_places,
            duties: Duties::default(),
        }
    }

    /// A batch of a queue that is closed and waits.
    fn waiting(&mut self, queue: usize, stripe: u64) -> Token<Waiting, Stripe> {
        let place = self.places.pop().expect("a place");
        let arrival = self
            .stripes
            .arrive(stripe as usize, owner(queue), place, ());
        let Arrival::Claimed(token, arrived) = arrival else {
            panic!("stripe {stripe} has an owner");
        };
        self.places.push(arrived.place);
        let Looked::Open(open) = self.stripes.look(token, &self.epoch) else {
            panic!("words are stopped");
        };
        let closed = self.stripes.close(open, &mut Vec::new());
        self.stripes.wait(closed, &self.epoch).0
    }

    fn send(
        &mut self,
        token: Token<Waiting, Stripe>,
        entry: LogEntry,
    ) -> Option<LogToken<Claimed, Stripe>> {
        let place = self.log_places.pop().expect("a place");
        self.logs.arrive(place, LogBatch { token, entry })
    }

    /// A batch that writes the first block of its stripe arrives at its log.
    fn arrive(&mut self, queue: usize, stripe: u64) -> Option<LogToken<Claimed, Stripe>> {
        let token = self.waiting(queue, stripe);
        self.send(token, entry(stripe, 1, stripe as u8))
    }

    fn begin(&mut self, token: LogToken<Claimed, Stripe>, room: Room) -> LogStep<Stripe> {
        self.logs.begin(token, room, &self.epoch, &mut self.duties)
    }

    fn write(&mut self, token: LogToken<Claimed, Stripe>, room: Room) -> Writing<Stripe> {
        match self.begin(token, room) {
            LogStep::Write(writing) => writing,
            other => panic!("{other:?}"),
        }
    }

    fn written(&mut self, writing: Writing<Stripe>) {
        self.logs.written(writing, &mut self.duties);
    }

    /// The answers that are there: parts of units, and stripes of batches that are sent back.
    fn answers(&mut self) -> Vec<Result<Stable, u64>> {
        let answers = std::mem::take(&mut self.duties.answers).into_iter();
        let each = |answer: Answer<Stripe>| match answer {
            Answer::Stable { token, part, .. } => Ok((token, part)),
            Answer::Again { entry, .. } => Err(entry.stripe),
        };
        answers.map(each).collect()
    }

    fn stable(&mut self) -> Vec<Stable> {
        let answers = self.answers().into_iter();
        answers.map(|answer| answer.expect("stable")).collect()
    }

    fn sent_back(&mut self) -> Vec<u64> {
        let answers = self.answers().into_iter();
        let back = |answer: Result<Stable, u64>| answer.expect_err("sent back");
        answers.map(back).collect()
    }

    /// Writes the stripe of a part.
    fn done(&mut self, (token, part): Stable, volatile: bool) {
        let closed = self.stripes.resume(token);
        let duties = &mut self.duties;
        self.logs.done(part, volatile, &self.epoch, duties);
        let freed = self.stripes.release(closed, &self.epoch);
        freed.expect("nobody came");
    }

    fn stop(&self) -> Stop {
        self.epoch.stop(owner(8)).expect("nobody kicks")
    }

    fn drained(&self, stop: &Stop) -> bool {
        !self.logs.is_in_flight(&mut self.logs.in_flight(stop))
    }

    fn phase(&self, log: usize) -> Phase {
        self.logs.peek(log).phase()
    }

    /// The log that the last step handed over.
    fn yours(&mut self, queue: usize) -> LogToken<Claimed, Stripe> {
        let token = self.duties.yours.pop().expect("handed over");
        assert!(self.duties.yours.is_empty());
        assert_eq!(token.owner(), owner(queue));
        token
    }
}

#[test]
fn a_log_is_busy_until_the_stripes_of_its_unit_are_written() {
    let mut small = Small::new();
    let log = parity_of(3);
    let token = small.arrive(0, 3).expect("the log was free");
    assert!(small.arrive(1, 4).is_none(), "it has a writer");
    let other = small.arrive(2, ROW).expect("another log");
    assert_eq!((token.at(), small.phase(log)), (log, Phase::Claimed));
    let writing = small.write(token, WIDE);
    assert_eq!((writing.at(), small.phase(log)), (log, Phase::Closed));
    assert_eq!(read_unit(writing.buffers(), log).2, [(3, 0, 1), (4, 0, 1)]);
    assert!(small.answers().is_empty(), "nothing is stable yet");
    small.written(writing);
    let mut parts = small.stable();
    assert_eq!(small.phase(log), Phase::Closed);
    let stop = small.stop();
    assert!(!small.drained(&stop));
    small.done(parts.pop().expect("two"), false);
    assert!(!small.drained(&stop) && small.duties.tell.is_empty());
    small.done(parts.pop().expect("two"), false);
    assert_eq!(small.duties.tell, [owner(8)], "the stop waits for it");
    assert_eq!(small.phase(log), Phase::Free);
    let LogStep::Held(_) = small.begin(other, WIDE) else {
        panic!("the stop wasn't seen");
    };
    assert!(small.drained(&stop));
    small.epoch.go_on(stop);
}

#[test]
fn batches_that_arrive_after_the_unit_are_in_the_next() {
    let mut small = Small::new();
    let token = small.arrive(0, 3).expect("free");
    let writing = small.write(token, WIDE);
    for (queue, stripe) in [(2, 5), (1, 4)] {
        assert!(small.arrive(queue, stripe).is_none());
    }
    small.written(writing);
    let part = small.stable().pop().expect("one");
    small.done(part, false);
    let token = small.yours(2);
    let writing = small.write(token, WIDE);
    let (generation, entries, stripes) = read_unit(writing.buffers(), parity_of(3));
    assert_eq!((generation, entries), (3, 1));
    assert_eq!(stripes, [(4, 0, 1), (5, 0, 1)]);
    small.written(writing);
    for part in small.stable() {
        small.done(part, false);
    }
    assert_eq!(small.phase(parity_of(3)), Phase::Free);
}

#[test]
fn a_full_log_leaves_the_others_for_the_next_unit() {
    let mut small = Small::new();
    let two = Room {
        bytes: 2 * STRIPE_BYTES as u64,
        segments: 100,
    };
    let mut token = small.arrive(0, 7).expect("free");
    // One of a whole stripe needs no room, but may not go past the others.
    for stripe in [6, 2, 1] {
        assert!(small.arrive(1, stripe).is_none());
    }
    let whole = small.waiting(2, 0);
    assert!(small.send(whole, entry(0, ALL, 0)).is_none());
    let log = parity_of(7);
    for (unit, next) in [
        (vec![(6, 0, 1), (7, 0, 1)], Some(1)),
        (vec![(0, 0, ALL), (1, 0, 1), (2, 0, 1)], None),
    ] {
        let writing = small.write(token, two);
        assert_eq!(read_unit(writing.buffers(), log).2, unit);
        small.written(writing);
        for part in small.stable() {
            small.done(part, false);
        }
        match next {
            Some(queue) => token = small.yours(queue),
            None => break,
        }
    }
    assert_eq!(small.phase(log), Phase::Free);
}

#[test]
fn rooms_hold_what_their_bounds_say() {
    let entries = |count: usize, blocks| -> Vec<LogEntry> {
        (0..count as u64).map(|n| entry(n, blocks, 0)).collect()
    };
    let holds = |blocks: u64, segments, entries: &[LogEntry]| {
        let bytes = blocks * STRIPE_BYTES as u64 + 1;
        Room { bytes, segments }.holds(entries.iter())
    };
    let parts = entries(200, 1);
    assert_eq!(holds(64, 1000, &parts), 64);
    assert_eq!(holds(64, 33, &parts), 32);
    assert_eq!(holds(1000, 1000, &parts), PPL_MAX_ENTRIES);
    assert_eq!(holds(0, 0, &parts), 1);
    let whole = entries(200, ALL);
    assert_eq!(holds(0, 1, &whole), PPL_MAX_ENTRIES);
}

#[test]
fn the_writer_has_a_batch_in_its_unit() {
    let mut small = Small::new();
    let old = small.waiting(0, 3);
    let stop = small.stop();
    small.epoch.go_on(stop);
    let token = small.send(old, entry(3, 1, 0)).expect("free");
    assert!(small.arrive(1, 4).is_none());
    assert!(matches!(small.begin(token, WIDE), LogStep::Left));
    assert_eq!(small.sent_back(), [3]);
    let token = small.yours(1);
    let writing = small.write(token, WIDE);
    let (_, _, stripes) = read_unit(writing.buffers(), parity_of(4));
    assert_eq!(stripes, [(4, 0, 1)]);
    // A batch that is alone and old leaves the log free.
    small.written(writing);
    let part = small.stable().pop().expect("one");
    small.done(part, false);
    let old = small.waiting(0, 6);
    let stop = small.stop();
    small.epoch.go_on(stop);
    let token = small.send(old, entry(6, 1, 0)).expect("free");
    assert!(matches!(small.begin(token, WIDE), LogStep::Left));
    assert_eq!(small.sent_back(), [6]);
    assert_eq!(small.phase(parity_of(6)), Phase::Free);
}

#[test]
fn batches_of_before_a_stop_are_sent_back_after_it() {
    let mut small = Small::new();
    let token = small.arrive(0, 3).expect("free");
    let stop = small.stop();
    assert!(!small.drained(&stop), "it may not have seen the stop");
    let LogStep::Held(held) = small.begin(token, WIDE) else {
        panic!("the stop wasn't seen");
    };
    assert_eq!(small.duties.tell, [owner(8)]);
    assert!(small.drained(&stop) && small.answers().is_empty());
    small.epoch.go_on(stop);
    assert!(small.arrive(1, 5).is_none());
    let token = small.logs.go_on(held);
    assert!(matches!(small.begin(token, WIDE), LogStep::Left));
    assert_eq!(small.sent_back(), [3]);
    let token = small.yours(1);
    let writing = small.write(token, WIDE);
    small.written(writing);
    let part = small.stable().pop().expect("one");
    assert_eq!(part.0.epoch(), 2);
    small.done(part, false);
}

#[test]
fn a_log_that_fails_sends_its_unit_back_in_a_stop() {
    let mut small = Small::new();
    let token = small.arrive(0, 3).expect("free");
    assert!(small.arrive(1, 4).is_none());
    let writing = small.write(token, WIDE);
    let duties = &mut small.duties;
    let stop = small.logs.failed(writing, &small.epoch, duties);
    let stop = stop.expect("it is the first to see it");
    assert_eq!(small.epoch.look(), Seen::Stopped(owner(0)));
    assert_eq!(small.sent_back(), [3, 4]);
    assert_eq!(small.duties.tell, [owner(0)]);
    assert_eq!(small.phase(parity_of(3)), Phase::Free);
    small.epoch.go_on(stop);
    // Another queue has seen it first, and somebody has arrived.
    let token = small.arrive(1, 5).expect("free");
    let writing = small.write(token, WIDE);
    let stop = small.stop();
    let late = small.logs.in_flight(&stop);
    let old = small.logs.failed(writing, &small.epoch, &mut small.duties);
    assert_eq!(old.expect_err("stopped"), owner(8));
    assert!(!small.logs.is_in_flight(&mut { late }));
    small.epoch.go_on(stop);
}

#[test]
fn members_are_flushed_before_a_log_is_written_over() {
    let mut small = Small::new();
    for volatile in [false, true] {
        let token = small.arrive(0, 3).expect("free");
        assert!(small.arrive(0, 4).is_none());
        let writing = small.write(token, WIDE);
        small.written(writing);
        let mut parts = small.stable().into_iter();
        // One of them is enough.
        small.done(parts.next().expect("two"), volatile);
        small.done(parts.next().expect("two"), false);
    }
    let token = small.arrive(0, 5).expect("free");
    let LogStep::Flush(flushing) = small.begin(token, WIDE) else {
        panic!("stripes are in caches");
    };
    assert_eq!(flushing.at(), parity_of(5));
    assert!(small.arrive(1, 6).is_none());
    let (step, stop) = small
        .logs
        .flush_failed(flushing, &small.epoch, &mut small.duties);
    let LogStep::Held(held) = step else {
        panic!("{step:?}")
    };
    assert_eq!(small.duties.tell, [owner(0)]);
    small.epoch.go_on(stop.expect("the first to see it"));
    let token = small.logs.go_on(held);
    assert!(matches!(small.begin(token, WIDE), LogStep::Left));
    assert_eq!(small.sent_back(), [5, 6]);
    // They aren't flushed yet, and those who arrive meanwhile are in the unit.
    let token = small.arrive(1, 1).expect("free");
    let LogStep::Flush(flushing) = small.begin(token, WIDE) else {
        panic!("stripes are in caches");
    };
    assert!(small.arrive(2, 2).is_none());
    let (logs, duties) = (&small.logs, &mut small.duties);
    let LogStep::Write(writing) = logs.flushed(flushing, WIDE, &small.epoch, duties) else {
        panic!("nobody kicks");
    };
    let (_, _, stripes) = read_unit(writing.buffers(), parity_of(1));
    assert_eq!(stripes, [(1, 0, 1), (2, 0, 1)]);
}

#[test]
fn a_stop_that_begins_during_the_flush_holds_the_log() {
    let mut small = Small::new();
    let token = small.arrive(0, 3).expect("free");
    let writing = small.write(token, WIDE);
    small.written(writing);
    let part = small.stable().pop().expect("one");
    small.done(part, true);
    let token = small.arrive(0, 5).expect("free");
    let LogStep::Flush(flushing) = small.begin(token, WIDE) else {
        panic!("the stripe is in a cache");
    };
    let stop = small.stop();
    assert!(!small.drained(&stop));
    let (logs, duties) = (&small.logs, &mut small.duties);
    let step = logs.flushed(flushing, WIDE, &small.epoch, duties);
    let LogStep::Held(held) = step else {
        panic!("{step:?}");
    };
    assert!(small.drained(&stop));
    assert_eq!(small.duties.tell, [owner(8)]);
    small.epoch.go_on(stop);
    let token = small.logs.go_on(held);
    assert!(matches!(small.begin(token, WIDE), LogStep::Left));
    assert_eq!(small.sent_back(), [5]);
}

#[test]
fn an_array_that_has_stopped_gets_all_batches_back() {
    let mut small = Small::new();
    let token = small.arrive(0, 3).expect("free");
    assert!(small.arrive(1, 4).is_none());
    let _stop = small.stop();
    let LogStep::Held(held) = small.begin(token, WIDE) else {
        panic!("the stop wasn't seen");
    };
    let token = small.logs.go_on(held);
    let duties = &mut small.duties;
    small.logs.refuse(token, &small.epoch, duties);
    assert_eq!(small.sent_back(), [3, 4]);
    assert_eq!(small.phase(parity_of(3)), Phase::Free);
}

#[test]
fn parity_is_summed_from_partial_parity() {
    let memory = PageMemory::new(MEMBERS as usize);
    let mut rng = pvblk_testing::random();
    let mut set = memory.make(1).expect("memory").pop().expect("one");
    let pages = set.pages();
    let mut blocks = LogBlocks::default();
    let parity = 1;
    // All members but the parity's, those that change, and whether old parity is among the rest.
    for (touched, modifies) in [
        (0b0001, true),
        (0b0001, false),
        (0b0101, true),
        (0b1100, false),
    ] {
        let data = 0b1101;
        let all: Vec<Vec<u8>> = (0..MEMBERS)
            .map(|_| (0..STRIPE_BYTES).map(|_| rng.u8(..)).collect())
            .collect();
        let put = |member: usize, bytes: &[u8]| {
            pages.buffer(member).expect("a page").write(0, bytes);
        };
        let sum = |of: u64, but: u8| -> Vec<u8> {
            let each = |at: usize| {
                let members = (0..MEMBERS as usize).filter(|m| of & (1 << m) != 0);
                members.fold(but, |sum, m| sum ^ all[m][at])
            };
            (0..STRIPE_BYTES).map(each).collect()
        };
        (0..MEMBERS as usize).for_each(|member| put(member, &all[member]));
        put(parity, &sum(data, 0));
        let rest = match modifies {
            true => touched | 1 << parity,
            false => data & !touched,
        };
        let partial = Partial::of(pages, rest, &mut blocks).expect("memory");
        let is_page = matches!(partial, Partial::Page(_));
        assert_eq!(is_page, rest.count_ones() == 1, "one page isn't copied");
        // New contents: each byte of the blocks that change has all bits changed.
        for member in (0..MEMBERS as usize).filter(|m| touched & (1 << m) != 0) {
            let changed: Vec<u8> = all[member].iter().map(|byte| !byte).collect();
            put(member, &changed);
        }
        partial.make_parity(pages, parity, touched);
        let mut found = vec![0; STRIPE_BYTES];
        pages.buffer(parity).expect("a page").read(0, &mut found);
        let odd = touched.count_ones() % 2 == 1;
        assert!(found == sum(data, if odd { 0xff } else { 0 }));
        if let Partial::Sum(block) = partial {
            blocks.put(block);
        }
    }
}
