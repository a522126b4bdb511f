//! Failures of two members, step by step. Without caches no flush shows the second one.

use super::common::{Common, Setup};
use super::kick::Change;
use super::queue::{Errand, Mail, QueueCore};
use super::world::devices_of;
use super::{Action, MemberIo};
use crate::core::members::{Incoming, Members};
use crate::core::slots::Unsynced;
use crate::words::{Chunks, Owner, Room};
use crate::{Geometry, Layout, LogArea, Policy, STRIPE_BYTES, STRIPE_SECTORS};
use pvblk_block::{Buffer, Op, Request, Status};
use std::sync::Arc;

pub const MEMBERS: usize = 4;
pub const STRIPES: u64 = 8;

const A_LOG: Policy = Policy::Ppl(LogArea {
    sector: 0,
    sectors: 64,
});

/// An array without a log, whose stripes are rows, and two queues.
pub struct Array {
    pub common: Arc<Common>,
    pub queues: [QueueCore; 2],
}

impl Array {
    fn new(volatile: bool, dirty: bool) -> Array {
        let members = Members::new((0..MEMBERS).map(Some).collect(), None);
        Array::of(members, volatile, dirty)
    }

    /// With a bitmap, of which these chunks are set. A stripe is a chunk.
    pub fn with_bits(members: Members, set: &[u64]) -> Array {
        let is_set = |stripe: u64| set.contains(&stripe);
        let chunks = Chunks::new(3, (0..STRIPES).map(is_set));
        Array::with(members, (true, true), Some(chunks))
    }

    /// With a device more than there are members.
    fn of(members: Members, volatile: bool, dirty: bool) -> Array {
        Array::with(members, (volatile, dirty), None)
    }

    /// With a log, and bits in memory, all of which are clear. A stripe is a chunk.
    pub fn with_marks(members: Members) -> Array {
        let chunks = Chunks::new(3, (0..STRIPES).map(|_| false));
        Array::made(members, (true, true), A_LOG, Some(chunks), (8, 2))
    }

    /// With chunks of four stripes; a device takes so many blocks in one write.
    pub fn with_chunks(widest: usize, dirty: bool) -> Array {
        let members = Members::new((0..MEMBERS).map(Some).collect(), None);
        Array::made(members, (false, dirty), Policy::Resync, None, (32, widest))
    }

    /// With a log, and chunks of four stripes. Devices have caches.
    pub fn with_log_and_chunks() -> Array {
        let members = Members::new((0..MEMBERS).map(Some).collect(), None);
        Array::made(members, (true, true), A_LOG, None, (32, 16))
    }

    fn with(members: Members, state: (bool, bool), chunks: Option<Chunks>) -> Array {
        let policy = match chunks {
            Some(_) => Policy::Bitmap { sector: 0 },
            None => Policy::Resync,
        };
        Array::made(members, state, policy, chunks, (8, 2))
    }

    fn made(
        members: Members,
        (volatile, dirty): (bool, bool),
        policy: Policy,
        chunks: Option<Chunks>,
        (chunk, segments): (u32, usize),
    ) -> Array {
        let sectors = STRIPES * STRIPE_SECTORS;
        let geometry = Geometry::new(MEMBERS as u32, chunk, Layout::LeftSymmetric, sectors);
        let room = Room {
            bytes: STRIPE_BYTES as u64,
            segments,
        };
        let common = Common::new(Setup {
            geometry: geometry.expect("a geometry"),
            policy,
            devices: devices_of(MEMBERS + 1, volatile, false, room),
            members,
            unsynced: Unsynced::default(),
            dirty,
            chunks,
            in_memory: matches!(policy, Policy::Ppl(_)),
            has_sums: false,
            unsummed: Vec::new(),
            limited: false,
            rotational: false,
            most_read_errors: 20,
            words: 8,
            sets: 8,
            queues: 2,
            parts: 8,
            signature: 7,
        });
        let common = common.expect("memory");
        let open = |number| {
            let owner = Owner::new(number).expect("a number");
            QueueCore::open(&common, owner).expect("room for it")
        };
        Array {
            queues: [open(1), open(2)],
            common,
        }
    }

    /// All that a queue can do by itself; its I/O.
    pub fn go(&mut self, queue: usize) -> Vec<MemberIo> {
        let queue = &mut self.queues[queue];
        let mut steps = 0;
        while queue.step() || !queue.works.is_empty() {
            for mut work in std::mem::take(&mut queue.works) {
                work.run();
                queue.worked(&mut work);
            }
            steps += 1;
            assert!(steps < 1000, "no end: {queue:?}");
        }
        std::mem::take(&mut queue.ios)
    }

    /// A write of a whole stripe, and its first I/O.
    pub fn submit(&mut self, queue: usize, stripe: u64) -> Vec<MemberIo> {
        let row = self.common.geometry.row_sectors();
        let data = Buffer::anonymous(row as usize * 512).expect("memory");
        let request = Request::with_buffers(Op::Write, stripe * row, vec![data], stripe);
        self.queues[queue].submit(request);
        self.go(queue)
    }

    /// The same, if it needs no reads.
    pub fn write(&mut self, queue: usize, stripe: u64) -> Vec<MemberIo> {
        let ios = self.submit(queue, stripe);
        assert_eq!(
            ios.iter().filter(|io| io.op == Op::Write).count(),
            ios.len()
        );
        ios
    }

    /// I/O ends; that of one slot fails.
    pub fn end(&mut self, queue: usize, ios: Vec<MemberIo>, fails: usize) {
        for io in ios {
            self.queues[queue].ended(io.token, io.slot != fails);
        }
        assert_eq!(self.go(queue).len(), 0);
    }

    pub fn deliver(&mut self, from: usize) {
        for (to, mail) in std::mem::take(&mut self.queues[from].mail) {
            self.queues[usize::from(to.number()) - 1].receive(mail);
        }
        assert_eq!(self.go(1 - from).len(), 0);
    }

    /// Statuses of the requests of a queue that are done.
    pub fn done(&mut self, queue: usize) -> Vec<Status> {
        let done = std::mem::take(&mut self.queues[queue].done);
        done.into_iter().map(|done| done.status).collect()
    }
}

pub fn names(failed: u64) -> Errand {
    Errand::Name {
        dirty: true,
        failed,
        change: None,
    }
}

#[test]
fn no_member_is_named_if_two_have_failed_writes() {
    let mut array = Array::new(false, true);
    let first = array.write(0, 0);
    let second = array.write(1, 1);
    array.end(0, first, 0);
    // The kick waits for the other queue's stripe.
    assert!(array.queues[0].errands.is_empty() && array.done(0).is_empty());
    array.end(1, second, 1);
    assert_eq!(array.done(1), []);
    array.deliver(1);
    assert!(
        array.queues[0].errands.is_empty(),
        "superblocks name a member"
    );
    assert!(array.common.membership().broken);
    array.deliver(0);
    assert_eq!(array.done(0), [Status::IoError]);
    assert_eq!(array.done(1), [Status::IoError]);
}

#[test]
fn the_end_of_an_older_stop_acknowledges_nothing() {
    let mut array = Array::new(false, true);
    let ios = array.write(0, 0);
    array.end(0, ios, 0);
    assert_eq!(array.queues[0].errands.len(), 1);
    array.queues[0].named(0);
    assert_eq!(array.go(0).len(), 0);
    assert_eq!(array.done(0), [Status::Ok]);
    let late = std::mem::take(&mut array.queues[0].mail);
    assert!(matches!(late[..], [(_, Mail::GoOn)]));
    // The other queue has seen the new epoch before the mail, and another member fails its write. That stripe's parity is the first one's, so
    // that nothing is read.
    let ios = array.write(1, 3);
    assert!(ios.iter().all(|io| io.slot != 0));
    let fails = ios[0].slot;
    array.queues[1]
        .todo
        .extend(late.into_iter().map(|(_, mail)| mail));
    for io in ios {
        array.queues[1].ended(io.token, io.slot != fails);
    }
    assert!(array.queues[1].kick.is_some() && array.queues[1].done.is_empty());
    // It takes the mail, then its own kick goes on.
    array.go(1);
    assert!(array.common.membership().broken);
    assert_eq!(array.done(1), [Status::IoError]);
}

#[test]
fn a_flush_that_two_members_fail_fails() {
    let mut array = Array::new(true, true);
    array.queues[0].submit(Request::new(Op::Flush, 0, 0, 0));
    for io in array.go(0) {
        array.queues[0].ended(io.token, io.slot > 1);
    }
    assert_eq!(array.go(0).len(), 0);
    assert!(array.common.membership().broken);
    assert_eq!(array.done(0), [Status::IoError]);
}

/// A flush needs no word, so a stop doesn't wait for it.
#[test]
fn a_member_that_fails_while_superblocks_are_written_stays_until_they_name_it() {
    let mut array = Array::new(true, false);
    let row = array.common.geometry.row_sectors();
    let data = Buffer::anonymous(row as usize * 512).expect("memory");
    array.queues[0].submit(Request::with_buffers(Op::Write, 0, vec![data], 0));
    let flushes = array.go(0);
    array.end(0, flushes, MEMBERS);
    assert_eq!(array.queues[0].errands, [names(0)]);
    array.queues[1].submit(Request::new(Op::Flush, 0, 0, 0));
    let flushes = array.go(1);
    array.end(1, flushes, 2);
    array.queues[0].named(0);
    let writes = array.go(0);
    assert!(writes.iter().any(|io| io.slot == 2), "it isn't named");
    array.end(0, writes, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    let mail = std::mem::take(&mut array.queues[0].mail);
    mail.into_iter()
        .for_each(|(_, mail)| array.queues[1].receive(mail));
    let flushes = array.go(1);
    assert_eq!(array.done(1), [], "the member that failed isn't named");
    assert!(flushes.iter().all(|io| io.slot != 2));
    array.end(1, flushes, MEMBERS);
    assert_eq!(array.queues[1].errands, [names(1 << 2)]);
    array.queues[1].named(0);
    array.go(1);
    assert_eq!(array.done(1), [Status::Ok]);
    assert_eq!(array.common.missing(), Some(2));
}

/// A block that its member can't read is calculated and written there; with the next failure the member's time is up.
#[test]
fn a_block_that_a_member_cannot_read_is_calculated_and_written() {
    let mut array = Array::new(false, true);
    let data = Buffer::anonymous(4096).expect("memory");
    array.queues[0].submit(Request::with_buffers(Op::Read, 0, vec![data], 0));
    let ios = array.go(0);
    let slot = ios[0].slot;
    array.queues[0].ended(ios[0].token, false);
    let ios = array.go(0);
    assert_eq!((ios.len(), ios[0].slot), (1, slot), "it is read once more");
    array.queues[0].ended(ios[0].token, false);
    let others = array.go(0);
    assert!(others.len() == MEMBERS - 1 && others.iter().all(|io| io.slot != slot));
    others
        .iter()
        .for_each(|io| array.queues[0].ended(io.token, true));
    let fix = array.go(0);
    assert_eq!((fix.len(), fix[0].slot, fix[0].op), (1, slot, Op::Write));
    assert_eq!(array.done(0), []);
    array.end(0, fix, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    assert_eq!(
        (array.common.corrected(slot), array.common.missing()),
        (1, None)
    );
}

/// A member that keeps failing to read is kicked, though its blocks can be calculated.
#[test]
fn a_member_that_fails_too_many_reads_is_kicked() {
    let mut array = Array::new(false, true);
    let most = 20;
    for turn in 0..=most {
        // Pages of stripes at rest would have the block.
        array.common.give_way();
        let data = Buffer::anonymous(4096).expect("memory");
        array.queues[0].submit(Request::with_buffers(Op::Read, 0, vec![data], 0));
        let mut ios = array.go(0);
        let slot = ios[0].slot;
        // Both reads fail; the calculated block is written.
        while array.done(0).is_empty() && array.queues[0].errands.is_empty() {
            for io in std::mem::take(&mut ios) {
                let ok = io.slot != slot || io.op != Op::Read;
                array.queues[0].ended(io.token, ok);
            }
            ios = array.go(0);
        }
        assert_eq!(array.queues[0].errands.is_empty(), turn < most, "{turn}");
    }
    assert_eq!(array.queues[0].errands.len(), 1);
    array.queues[0].named(0);
    let others = array.go(0);
    assert_eq!(
        others.len(),
        MEMBERS - 1,
        "it is calculated from the others"
    );
    array.end(0, others, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    assert!(array.common.missing().is_some());
}

/// A stripe can't be rebuilt, since another member can't read: the device is left out before anybody counts on it.
#[test]
fn a_rebuild_that_cannot_be_done_leaves_its_device_out() {
    let slots = (0..MEMBERS).map(|role| (role != 0).then_some(role));
    let incoming = Incoming::new(MEMBERS, 0, 0, false);
    let mut array = Array::of(Members::new(slots.collect(), Some(incoming)), false, true);
    array.queues[0]
        .start_sync(Action::Recover)
        .expect("it begins");
    array.queues[0].allow_stripes(1);
    let ios = array.go(0);
    assert_eq!(ios.len(), MEMBERS - 1);
    for io in &ios {
        array.queues[0].ended(io.token, io.slot != 2);
    }
    assert_eq!(array.go(0).len(), 0);
    assert_eq!(array.queues[0].errands, [names(1 << MEMBERS)]);
    // Its block isn't read meanwhile.
    let data = Buffer::anonymous(4096).expect("memory");
    array.queues[1].submit(Request::with_buffers(Op::Read, 0, vec![data], 0));
    assert!(array.go(1).iter().all(|io| io.slot != MEMBERS));
    array.queues[0].named(0);
    array.go(0);
    let end = array.queues[0].take_synced().expect("it has ended");
    assert!(end.early.is_some() && end.done_sectors == 0, "{end:?}");
    assert!(array.common.recovered().is_none() && array.common.missing() == Some(0));
    assert!(!array.common.is_broken());
}

/// A working member and a device that replaces it, which holds all stripes.
fn replaced(dirty: bool) -> Array {
    let slots = (0..MEMBERS).map(Some).collect();
    let incoming = Incoming::new(MEMBERS, 0, 8, false);
    let mut array = Array::of(Members::new(slots, Some(incoming)), false, dirty);
    array.queues[0]
        .start_sync(Action::Recover)
        .expect("it begins");
    assert_eq!(
        array.queues[0].errands,
        [Errand::Recovered {
            slot: MEMBERS,
            stripes: 8
        }]
    );
    array.queues[0].errands.clear();
    array
}

/// The others' superblocks know neither the device that was to take over nor the member before it.
#[test]
fn a_takeover_that_superblocks_fail_leaves_no_member() {
    let mut array = replaced(true);
    array.queues[0].sync_told(0);
    array.go(0);
    let takes_over = Errand::Name {
        dirty: true,
        failed: 0,
        change: Some(Change::TakesOver),
    };
    assert_eq!(array.queues[0].errands, [takes_over]);
    array.queues[0].named(1 << MEMBERS);
    array.go(0);
    assert_eq!(array.common.missing(), Some(0));
    assert!(array.common.recovered().is_none() && !array.common.is_broken());
}

/// A device fails a superblock while another queue's stop is past its look at failures: it is named by a stop of its own.
#[test]
fn a_device_that_fails_while_another_stop_ends_is_named_by_the_next() {
    let mut array = replaced(false);
    let row = array.common.geometry.row_sectors();
    let data = Buffer::anonymous(row as usize * 512).expect("memory");
    array.queues[1].submit(Request::with_buffers(Op::Write, 0, vec![data], 0));
    assert_eq!(array.go(1).len(), 0);
    assert_eq!(array.queues[1].errands, [names(0)]);
    array.queues[0].sync_told(1 << MEMBERS);
    array.go(0);
    assert_eq!(array.queues[0].errands, []);
    array.queues[1].named(0);
    let writes = array.go(1);
    assert_eq!(writes.len(), MEMBERS + 1);
    // The next stop waits for them.
    array.deliver(1);
    array.end(1, writes, MEMBERS + 1);
    array.deliver(1);
    assert_eq!(array.queues[0].errands, [names(1 << MEMBERS)]);
}

/// The device behind the members arrives for a role.
fn arrives(array: &mut Array, queue: usize, role: usize) -> Vec<MemberIo> {
    let room = array.common.membership().room;
    let device = devices_of(MEMBERS + 1, false, false, room).pop();
    let device = Arc::new(device.expect("devices"));
    array.queues[queue].take_in(MEMBERS, role, device, false);
    array.go(queue)
}

/// A queue that hasn't seen the stop in which a member was thrown out finds words stopped again.
#[test]
fn nothing_is_read_from_a_member_that_was_thrown_out() {
    let mut array = Array::new(false, true);
    array.queues[1].throw_out(1);
    assert_eq!(array.go(1).len(), 0);
    assert_eq!(array.queues[1].errands.pop(), Some(names(0b10)));
    array.queues[1].named(0);
    array.go(1);
    assert_eq!(array.common.missing(), Some(1));
    arrives(&mut array, 1, 1);
    assert!(array.queues[1].kick.is_some());
    let geometry = array.common.geometry;
    let stripe = (0..8).find(|stripe| geometry.stripe_data(*stripe, 0) == 1);
    let sector = geometry.stripe_array_sector(stripe.expect("its data"), 0);
    let block = Buffer::anonymous(STRIPE_BYTES).expect("memory");
    array.queues[0].submit(Request::with_buffers(Op::Read, sector, vec![block], 0));
    let ios = array.go(0);
    assert!(ios.iter().all(|io| io.slot != 1), "it reads old data");
}

/// The order alone would leave the array degraded, and the failure too; both would end it.
#[test]
fn a_member_is_not_thrown_out_when_another_one_fails() {
    let mut array = Array::new(true, true);
    array.queues[0].throw_out(1);
    let flushes = array.go(0);
    // It stays, so its cache is needed.
    assert!(flushes.iter().any(|io| io.slot == 1));
    array.end(0, flushes, 2);
    assert_eq!(array.queues[0].errands.pop(), Some(names(0b100)));
    array.queues[0].named(0);
    array.go(0);
    assert_eq!(array.common.missing(), Some(2));
    assert!(!array.common.is_broken() && array.queues[0].is_idle());
}

#[test]
fn a_device_whose_superblock_fails_is_not_taken_in() {
    let mut array = Array::new(false, true);
    array.queues[0].throw_out(3);
    array.go(0);
    array.queues[0].errands.clear();
    array.queues[0].named(0);
    array.go(0);
    for (failed, is_in) in [(0b10000, false), (0, true)] {
        arrives(&mut array, 0, 3);
        let change = Some(Change::TakesIn { slot: 4, role: 3 });
        let errand = array.queues[0].errands.pop();
        assert_eq!(
            errand,
            Some(Errand::Name {
                dirty: true,
                failed: 0,
                change
            })
        );
        array.queues[0].named(failed);
        array.go(0);
        assert_eq!(array.queues[0].is_taken_in(), Some(is_in));
        assert_eq!(array.common.recovered(), is_in.then_some((3, 0)));
        assert_eq!(array.queues[0].uses(4), is_in);
    }
    let device = array.common.devices().0[4].clone();
    array.queues[0].take_in(4, 3, device, false);
    assert_eq!(
        array.queues[0].is_taken_in(),
        Some(true),
        "it is in already"
    );
}
