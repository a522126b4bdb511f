//! The array while it serves: given requests and completions of member I/O, it returns the member I/O to
//! start and the requests that are done. It does no I/O itself and knows no threads.
//! docs/decisions/0009-raid5.md has the rules.
//!
//! Each piece of work has a runner: the queue that does its I/O. The runner is a queue whose own request
//! needs the work, since a queue without requests in flight isn't stepped.

mod away;
mod head;
mod intent;
mod kick;
mod log;
mod members;
mod meta;
mod pages;
mod plan;
mod queue;
mod round;
mod slots;
mod state;
mod streams;
pub(super) mod stripes;
mod sync;
mod tally;
mod waiters;
mod work;
mod zero;

pub(super) use away::{Kicked, TICKS};
pub use queue::WritePath;
pub(super) use state::{MemberNow, State};
pub use sync::{Action, SyncNow};
pub(super) use work::Work;
pub(super) use zero::Ability;

use crate::{Geometry, Policy, STRIPE_SECTORS, Superblock, WriteIntent};
use away::Ages;
use head::Heads;
use intent::Intents;
use log::Logs;
use members::{Incoming, Members};
use meta::Meta;
use pages::{Pages, segments};
use pvblk_block::{Buffer, Completion, Error, Op, Request, RequestFlags, Status, trace};
use queue::Queues;
use slots::{Slot, Slots, Unsynced};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use sync::Sync;

/// Names an I/O when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Token(usize);

/// Member I/O to start.
#[derive(Debug)]
pub(super) struct MemberIo {
    /// The queue that does it.
    pub runner: usize,
    /// Slot of the device.
    pub slot: usize,
    pub op: Op,
    pub fua: bool,
    /// First sector of the device.
    pub sector: u64,
    pub data: Data,
    pub token: Token,
    /// If it is for a request that traces follow: the sector of the array.
    pub cause: Option<u64>,
}

/// Memory that an I/O reads into or writes.
#[derive(Debug)]
pub(super) enum Data {
    /// Nothing: a flush.
    None,
    /// One piece of memory, which is the usual case.
    One(Buffer),
    /// The buffers of several requests.
    Some(Vec<Buffer>),
    /// None, and a block of zeros is written.
    Zeros,
}

impl Data {
    fn of(buffer: Option<Buffer>) -> Data {
        buffer.map_or(Data::None, Data::One)
    }

    pub fn buffers(&self) -> &[Buffer] {
        match self {
            Data::None | Data::Zeros => &[],
            Data::One(buffer) => std::slice::from_ref(buffer),
            Data::Some(buffers) => buffers,
        }
    }

    /// Moves it behind other buffers.
    pub fn append_to(self, buffers: &mut Vec<Buffer>) {
        match self {
            Data::None | Data::Zeros => {}
            Data::One(buffer) => buffers.push(buffer),
            Data::Some(mut some) => buffers.append(&mut some),
        }
    }
}

/// The purpose of an I/O.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// A piece of a request that goes to the member as it is: a read, or a flush.
    Direct(Direct),
    /// A member's page of a head is read.
    HeadRead { head: usize, member: usize },
    /// A head's page is written.
    HeadWrite(usize),
    /// A member's log is written.
    Log(usize),
    /// Members are flushed, so that this member's log may be written over.
    LogFlush(usize),
    /// Superblocks are written.
    Meta,
    /// A page of the write-intent bitmap is written.
    Intent(usize),
    /// Members are flushed, so that bits may go.
    SweepFlush,
    /// Members are flushed, so that superblocks may tell how far all stripes are.
    SyncFlush(u64),
    /// Members are flushed, or a log is emptied, so that superblocks may name a device that was kicked.
    KickFlush,
    /// Nobody waits for it any more: its member was kicked. The device may still do it.
    Abandoned,
}

#[derive(Clone, Copy, Debug)]
struct Direct {
    request: usize,
    /// First sector of the array, length, and bytes of the request's data before it.
    sector: u64,
    sectors: u64,
    skip: usize,
}

/// A request that computations may read while the core holds it. It stays in its box, which goes back to the
/// submitter.
#[allow(clippy::redundant_allocation)]
type Shared = Arc<Box<Request>>;

/// A request that isn't done.
struct Active {
    request: Shared,
    owner: usize,
    /// Pieces that aren't done, and one more while it is taken apart.
    left: usize,
    failed: bool,
    /// Stripes that are zeroed when its pieces are done.
    zeroes: Range<u64>,
}

/// A part of a request that lies in one block of a stripe.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: usize,
    write: bool,
    stripe: u64,
    /// Data block of the stripe.
    index: usize,
    /// First sector in the block, and length.
    offset: u64,
    sectors: u64,
    /// Bytes of the request's data before it.
    skip: usize,
}

impl Piece {
    /// Length in bytes.
    fn len(&self) -> usize {
        debug_assert!(self.offset + self.sectors <= STRIPE_SECTORS);
        (self.sectors * 512) as usize
    }
}

/// The parts of an array.
pub(super) struct Setup {
    pub geometry: Geometry,
    /// By role; `None`: missing.
    pub members: Vec<Option<(Superblock, Ability)>>,
    /// A device that becomes the member of a role; its superblock says how far it is.
    pub incoming: Option<(usize, Superblock, Ability)>,
    /// Stripes whose parity isn't known to be right.
    pub unsynced: Vec<Range<u64>>,
    pub bitmap: Option<WriteIntent>,
    pub heads: usize,
    pub path: WritePath,
    /// Largest logical sector of the members, in bytes.
    pub unit_bytes: usize,
    /// Members have arms: it takes long to go from one place to another.
    pub rotational: bool,
    /// The superblocks on disk say dirty already.
    pub dirty: bool,
}

/// Counters of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rounds of stripes that were written.
    pub rounds: u64,
    /// Those of whole stripes.
    pub whole: u64,
    /// Blocks of 4 KiB that were read for them.
    pub prereads: u64,
}

impl std::ops::Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            rounds: self.rounds + other.rounds,
            whole: self.whole + other.whole,
            prereads: self.prereads + other.prereads,
        }
    }
}

/// See the module's documentation.
pub(super) struct Core {
    geometry: Geometry,
    policy: Policy,
    members: Members,
    slots: Slots,
    unsynced: Unsynced,
    /// Two members failed: nothing works any more.
    broken: bool,
    pages: Pages,
    heads: Heads,
    queues: Queues,
    counts: Counts,
    logs: Logs,
    intents: Intents,
    meta: Meta,
    sync: Option<Sync>,
    /// Of the last check or repair: sectors of members whose parity was wrong, as md's `mismatch_cnt`.
    mismatch_sectors: u64,
    /// Why the last rebuild didn't end.
    trouble: Option<String>,
    /// The last recovery that ended: place, sectors, and whether by the bitmap.
    recovered: Option<(usize, u64, bool)>,
    syncs: u64,
    takeovers: u64,
    active: Vec<Option<Active>>,
    free_active: Vec<usize>,
    purposes: Vec<Option<Purpose>>,
    free_purposes: Vec<usize>,
    /// The slot of each I/O, by token.
    places: Vec<usize>,
    ages: Ages,
    /// Lists of pieces to be used again.
    spare_pieces: Vec<Vec<work::RoundPiece>>,
    /// Writes that wait until the superblocks say dirty.
    undirtied: VecDeque<usize>,
    /// Heads whose stripes are written when the superblocks name a kicked member.
    unnamed: Vec<usize>,
    /// Requests taken, ever.
    taken: u64,
    /// I/O to start.
    pub ios: Vec<MemberIo>,
    /// Work to do.
    pub works: Vec<Work>,
    /// Requests that are done, with their owners.
    pub done: Vec<(usize, Completion)>,
    /// Done, but a member was kicked and the superblocks don't say so yet.
    held: Vec<(usize, Completion)>,
}

impl Core {
    pub fn new(setup: Setup) -> Result<Core, Error> {
        let members = setup.members.len();
        let mut present = setup.members.iter().flatten();
        let Some((first, _)) = present.next() else {
            return Err(Error::config("raid5: no member is there"));
        };
        let policy = first.policy();
        if setup.members.iter().filter(|s| s.is_none()).count() > 1 {
            return Err(Error::config("raid5: more than one member is missing"));
        }
        let by_role = setup.members.iter().enumerate();
        let by_role = by_role.map(|(role, m)| m.as_ref().map(|_| role)).collect();
        let slot = |m: &Option<(Superblock, Ability)>| m.as_ref().map(|(s, a)| Slot::new(s, *a));
        let mut all: Vec<_> = setup.members.iter().map(slot).collect();
        let mut superblocks: Vec<_> = setup.members.into_iter().map(|m| Some(m?.0)).collect();
        let incoming = setup.incoming.map(|(role, superblock, ability)| {
            all.push(Some(Slot::new(&superblock, ability)));
            let stripes = superblock.recovered_sectors() / STRIPE_SECTORS;
            let by_bitmap = superblock.is_recovered_by_bitmap() && setup.bitmap.is_some();
            superblocks.push(Some(superblock));
            Incoming::new(members, role, stripes, by_bitmap)
        });
        let slots = Slots {
            all,
            ..Slots::default()
        };
        let count = members;
        let members = Members::new(by_role, incoming);
        Ok(Core {
            geometry: setup.geometry,
            policy,
            unsynced: Unsynced(setup.unsynced),
            broken: false,
            pages: Pages::new(setup.heads, count)?,
            heads: Heads::new(setup.heads, setup.rotational),
            queues: Queues::new(setup.heads, setup.path, setup.rotational),
            counts: Counts::default(),
            logs: Logs::new(&setup.geometry, &superblocks, policy)?,
            intents: Intents::new(setup.bitmap)?,
            meta: Meta::new(superblocks, members.failed(), setup.dirty, setup.unit_bytes)?,
            members,
            slots,
            sync: None,
            mismatch_sectors: 0,
            trouble: None,
            recovered: None,
            syncs: 0,
            takeovers: 0,
            active: Vec::new(),
            free_active: Vec::new(),
            purposes: Vec::new(),
            free_purposes: Vec::new(),
            places: Vec::new(),
            ages: Ages::default(),
            spare_pieces: Vec::new(),
            undirtied: VecDeque::new(),
            unnamed: Vec::new(),
            taken: 0,
            ios: Vec::new(),
            works: Vec::new(),
            done: Vec::new(),
            held: Vec::new(),
        })
    }

    pub fn failed(&self) -> Option<usize> {
        self.members.failed()
    }

    /// Devices by role.
    pub fn slots_by_role(&self) -> &[Option<usize>] {
        self.members.slots()
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The slots that were freed since the last call.
    pub fn take_gone(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.slots.gone)
    }

    /// True if the owner has requests that aren't done.
    pub fn has_active(&self, owner: usize) -> bool {
        let runs = |h: &head::Head| h.round.as_ref().is_some_and(|r| r.runner == owner);
        self.active.iter().flatten().any(|a| a.owner == owner)
            || self.held.iter().any(|(o, _)| *o == owner)
            || (!self.broken && self.meta.kick_waits_for(owner))
            || self.heads.all.iter().any(runs)
    }

    /// Nothing works any more.
    pub fn give_up(&mut self) {
        self.break_off();
    }

    /// Takes a request. [`Core::unplug`] follows when the batch is complete.
    pub fn submit(&mut self, owner: usize, request: Box<Request>) {
        let op = request.op;
        let is_secure = op == Op::Discard && request.flags.contains(RequestFlags::SECURE);
        self.taken += 1;
        let entry = Active {
            request: Arc::new(request),
            owner,
            left: 1,
            failed: false,
            zeroes: 0..0,
        };
        let id = match self.free_active.pop() {
            Some(id) => id,
            None => {
                self.active.push(None);
                self.active.len() - 1
            }
        };
        self.active[id] = Some(entry);
        if self.broken {
            self.fail_piece(id);
            return;
        }
        match op {
            Op::Read => self.read(id),
            Op::Flush => self.flush(id),
            _ if is_secure => {
                self.refuse(id);
                return;
            }
            _ if self.meta.is_dirty() => self.write(id),
            _ => {
                self.undirtied.push_back(id);
                self.mark_dirty(owner);
                return;
            }
        }
        self.piece_done(id);
    }

    fn fail_request(&mut self, id: usize) {
        if let Some(active) = &mut self.active[id] {
            active.failed = true;
        }
    }

    fn fail_piece(&mut self, id: usize) {
        self.fail_request(id);
        self.piece_done(id);
    }

    /// One piece of a request is done.
    fn piece_done(&mut self, id: usize) {
        let Some(active) = &mut self.active[id] else {
            return;
        };
        active.left -= 1;
        if active.left > 0 || (active.goes_on() && self.zero_more(id)) {
            return;
        }
        let Some(active) = self.active[id].take() else {
            return;
        };
        self.free_active.push(id);
        // Work that is done holds no request any more.
        let Some(request) = Arc::into_inner(active.request) else {
            debug_assert!(false, "a request is done while something works on it");
            return;
        };
        let status = match active.failed {
            true => Status::IoError,
            false => Status::Ok,
        };
        let completion = Completion { request, status };
        // Also reads are held: their queue may be the one that writes the superblocks.
        match self.meta.is_kicking() && !self.broken {
            true => self.held.push((active.owner, completion)),
            false => self.done.push((active.owner, completion)),
        }
    }

    fn add_pieces(&mut self, id: usize, count: usize) {
        if let Some(active) = &mut self.active[id] {
            active.left += count;
        }
    }

    fn owner(&self, id: usize) -> usize {
        self.active[id].as_ref().map_or(0, |a| a.owner)
    }

    fn range(&self, id: usize) -> (u64, u64) {
        let request = self.active[id].as_ref().map(|a| &a.request);
        request.map_or((0, 0), |r| (r.sector, r.sectors))
    }

    fn is_fua(&self, id: usize) -> bool {
        let active = self.active[id].as_ref();
        active.is_some_and(|a| a.request.flags.contains(RequestFlags::FUA))
    }

    /// Reads from the members, in pieces of a chunk; pieces on a failed member are computed.
    fn read(&mut self, id: usize) {
        let (sector, sectors) = self.range(id);
        let pieces = self.geometry.pieces(sector, sectors);
        for piece in pieces {
            let skip = ((piece.array_sector - sector) * 512) as usize;
            self.add_pieces(id, 1);
            let end = piece.place.member_sector + piece.sectors;
            let slot = self.members.reads_directly(piece.place.member, end);
            let (Some(slot), Some(active)) = (slot, &self.active[id]) else {
                self.in_blocks(id, false, piece.array_sector, piece.sectors, skip);
                self.piece_done(id);
                continue;
            };
            let mut buffers = Vec::new();
            let len = (piece.sectors * 512) as usize;
            segments(&active.request, skip, len, |b| buffers.push(b));
            let direct = Direct {
                request: id,
                sector: piece.array_sector,
                sectors: piece.sectors,
                skip,
            };
            let runner = active.owner;
            self.start(
                runner,
                Purpose::Direct(direct),
                (slot, Op::Read, false),
                piece.place.member_sector,
                Data::Some(buffers),
            );
        }
    }

    fn write(&mut self, id: usize) {
        let (sector, sectors) = self.range(id);
        let op = self.active[id].as_ref().map(|a| a.request.op);
        if op != Some(Op::Write) {
            self.zero(id);
            return;
        }
        self.note_write(sector, sectors);
        self.in_blocks(id, true, sector, sectors, 0);
    }

    /// Hands a range to the heads of its stripes, block by block.
    fn in_blocks(&mut self, request: usize, write: bool, sector: u64, sectors: u64, skip: usize) {
        let end = sector + sectors;
        let mut at = sector;
        while at < end {
            let slot = self.geometry.slot(at);
            let some = (STRIPE_SECTORS - slot.offset_sectors).min(end - at);
            self.add_pieces(request, 1);
            let piece = Piece {
                request,
                write,
                stripe: slot.stripe,
                index: slot.index,
                offset: slot.offset_sectors,
                sectors: some,
                skip: skip + ((at - sector) * 512) as usize,
            };
            self.put_piece(piece);
            at += some;
        }
    }

    fn put_piece(&mut self, piece: Piece) {
        match piece.write && self.queues.path == WritePath::StripeQueue {
            true => self.enqueue(piece),
            false => self.place(piece),
        }
    }

    /// Flushes all members, for the writes that completed before.
    fn flush(&mut self, id: usize) {
        let runner = self.owner(id);
        for slot in self.slots.volatile() {
            self.add_pieces(id, 1);
            let direct = Direct {
                request: id,
                sector: 0,
                sectors: 0,
                skip: 0,
            };
            self.start(
                runner,
                Purpose::Direct(direct),
                (slot, Op::Flush, false),
                0,
                Data::None,
            );
        }
    }

    /// I/O on a device; `sector` is of its data, but for superblocks, logs and bitmaps.
    fn start(
        &mut self,
        runner: usize,
        purpose: Purpose,
        (slot, op, fua): (usize, Op, bool),
        sector: u64,
        data: Data,
    ) {
        let token = match self.free_purposes.pop() {
            Some(token) => token,
            None => {
                self.purposes.push(None);
                self.places.push(0);
                self.purposes.len() - 1
            }
        };
        self.purposes[token] = Some(purpose);
        self.places[token] = slot;
        self.ages.begin(token);
        let base = match purpose {
            Purpose::Meta | Purpose::Log(_) | Purpose::Intent(_) | Purpose::KickFlush => 0,
            _ if op == Op::Flush => 0,
            _ => self.slots.all[slot].as_ref().map_or(0, |s| s.data_sectors),
        };
        let cause = match trace::is_on() {
            true => self.cause(purpose),
            false => None,
        };
        self.ios.push(MemberIo {
            runner,
            slot,
            op,
            fua,
            sector: base + sector,
            data,
            token: Token(token),
            cause,
        });
    }

    /// A sector of the followed request that an I/O is for.
    #[cold]
    fn cause(&self, purpose: Purpose) -> Option<u64> {
        let head = match purpose {
            Purpose::Direct(direct) => {
                return self.is_followed(direct.request).then_some(direct.sector);
            }
            Purpose::HeadRead { head, .. } | Purpose::HeadWrite(head) => head,
            Purpose::Log(log) => self.logs.first_head(log)?,
            _ => return None,
        };
        let round = self.heads.all[head].round.as_ref()?;
        let mut pieces = round.pieces.iter().map(|p| &p.piece);
        let piece = pieces.find(|piece| self.is_followed(piece.request))?;
        Some(self.range(piece.request).0 + piece.skip as u64 / 512)
    }

    fn is_followed(&self, id: usize) -> bool {
        self.active[id].as_ref().is_some_and(|a| a.request.followed)
    }

    /// I/O that was started has ended. [`Core::unplug`] follows.
    pub fn ended(&mut self, runner: usize, token: Token, ok: bool) {
        let Some(purpose) = self.purposes[token.0].take() else {
            debug_assert!(false, "an I/O ended twice");
            return;
        };
        self.free_purposes.push(token.0);
        self.io_ended(purpose, self.places[token.0], ok, runner);
    }

    fn io_ended(&mut self, purpose: Purpose, slot: usize, ok: bool, runner: usize) {
        // Data that can't be read may be computed and written; the write shows if the member works.
        let is_read = match purpose {
            Purpose::HeadRead { .. } => true,
            Purpose::Direct(direct) => direct.sectors > 0,
            Purpose::Abandoned => return,
            _ => false,
        };
        if !ok && !is_read {
            self.kick(slot, runner);
        }
        match purpose {
            Purpose::Direct(direct) => self.direct_ended(&direct, ok),
            Purpose::HeadRead { head, member } => self.head_read(head, member, slot, ok, runner),
            Purpose::HeadWrite(head) => self.head_written(head),
            Purpose::Log(log) => self.log_written(log),
            Purpose::LogFlush(log) => self.log_flushed(log),
            Purpose::Meta => self.meta_written(),
            Purpose::Intent(page) => self.intent_written(page),
            Purpose::SweepFlush => self.sweep_flushed(),
            Purpose::SyncFlush(id) => self.sync_flushed(id),
            Purpose::KickFlush | Purpose::Abandoned => {}
        }
        if self.meta.kick.goes_first() {
            self.go_on_kicking(runner);
        }
    }

    fn direct_ended(&mut self, direct: &Direct, ok: bool) {
        let id = direct.request;
        if self.broken {
            self.fail_piece(id);
            return;
        }
        // A flush of a member that is kicked now is of no more interest.
        if !ok && direct.sectors > 0 {
            self.in_blocks(id, false, direct.sector, direct.sectors, direct.skip);
        }
        self.piece_done(id);
    }
}
