//! The stripe queue (seed 004): writes wait here, without pages, until their stripe is whole or nothing more is to be expected.
//!
//! A queue is of one stripe. It is idle, on exactly one list, or held by its stripe's head, and then on none: the seed's rule
//! ("when the count is non-zero the queue is not on a list"). Reads never come here.

use super::plan::{bit, sectors_of};
use super::streams::Streams;
use super::tally::Tally;
use super::waiters::Waiters;
use super::{Core, Piece};
use pvblk_block::Error;
use pvblk_block::planted::{Plant, has};
use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasherDefault;
use std::str::FromStr;

/// Queues for each stripe head: the seed's `STRIPE_QUEUE_SIZE`.
const QUEUES_PER_HEAD: usize = 2;
/// Rounds of writes after which a partial write waits no longer, whatever else there is.
const PATIENCE: u64 = 2048;
/// The path by which writes go to stripe heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WritePath {
    /// Writes go to the heads at once, as in md: a write that needs reads waits in its head.
    #[default]
    Direct,
    /// Through the stripe queue.
    StripeQueue,
}

impl fmt::Display for WritePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WritePath::Direct => "direct",
            WritePath::StripeQueue => "stripe-queue",
        })
    }
}

impl FromStr for WritePath {
    type Err = Error;

    fn from_str(text: &str) -> Result<WritePath, Error> {
        match text {
            "direct" => Ok(WritePath::Direct),
            "stripe-queue" => Ok(WritePath::StripeQueue),
            _ => Err(Error::config(format!(
                "write path {text:?}: it is direct or stripe-queue"
            ))),
        }
    }
}

/// Where a queue is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Idle,
    /// Its stripe is written whole, which needs no reads.
    Hi,
    /// It may read.
    Lo,
    /// It would have to read, and waits.
    Delayed,
    /// The stripe's head has the queue's pieces.
    Held,
}

#[derive(Default)]
struct Queue {
    stripe: u64,
    pieces: Vec<Piece>,
    /// Whose request came first.
    owner: usize,
    /// Data blocks that are written, and those that are written whole.
    to_write: u64,
    overwrite: u64,
    place: Place,
    /// Rounds of writes that had ended when it began to wait.
    since: u64,
    /// Neighbours on its list.
    before: Option<usize>,
    after: Option<usize>,
}

/// First and last of a list.
#[derive(Clone, Copy, Default)]
struct List {
    first: Option<usize>,
    last: Option<usize>,
}

/// All stripe queues.
pub(super) struct Queues {
    pub path: WritePath,
    all: Vec<Queue>,
    limit: usize,
    free: Vec<usize>,
    by_stripe: HashMap<u64, usize, BuildHasherDefault<super::head::Spread>>,
    lists: [List; 3],
    /// Pieces that found no free queue.
    waiting: Waiters,
    /// No stripe queue was free; until an eighth is, no stripe gets a new one.
    blocked: bool,
    /// No head was free; until a quarter is, no queue gets one, so that neighbours go together.
    starved: bool,
    /// Those that wait for more.
    waits: Tally,
    streams: Streams,
    /// The last stripe that got a head to read.
    read_last: u64,
    /// Rounds of writes that run, and how many have ended.
    pub writing: Tally,
    pub ended: u64,
}

impl Queues {
    pub fn new(heads: usize, path: WritePath, rotational: bool) -> Queues {
        let mut queues = Queues {
            path,
            all: Vec::new(),
            limit: 0,
            free: Vec::new(),
            by_stripe: HashMap::default(),
            lists: [List::default(); 3],
            waiting: Waiters::default(),
            blocked: false,
            starved: false,
            waits: Tally::new(rotational),
            streams: Streams::default(),
            read_last: 0,
            writing: Tally::new(rotational),
            ended: 0,
        };
        queues.set_heads(heads);
        queues
    }

    /// So many heads there are from now on. Queues that are in use stay until they are idle.
    pub fn set_heads(&mut self, heads: usize) {
        self.limit = heads * QUEUES_PER_HEAD;
        let len = self.all.len();
        self.all.resize_with(len.max(self.limit), Queue::default);
        self.free.extend(len..self.all.len());
    }

    fn active(&self) -> usize {
        self.by_stripe.len()
    }

    fn get(&mut self, stripe: u64) -> Option<usize> {
        if let Some(&queue) = self.by_stripe.get(&stripe) {
            return Some(queue);
        }
        if self.blocked || self.active() >= self.limit {
            self.blocked = true;
            return None;
        }
        let queue = self.free.pop()?;
        self.by_stripe.insert(stripe, queue);
        let mut pieces = std::mem::take(&mut self.all[queue].pieces);
        pieces.clear();
        self.all[queue] = Queue {
            stripe,
            pieces,
            ..Queue::default()
        };
        Some(queue)
    }

    fn list(place: Place) -> Option<usize> {
        match place {
            Place::Hi => Some(0),
            Place::Lo => Some(1),
            Place::Delayed => Some(2),
            Place::Idle | Place::Held => None,
        }
    }

    fn first(&self, place: Place) -> Option<usize> {
        Queues::list(place).and_then(|l| self.lists[l].first)
    }

    /// Off its list, if it is on one, and onto another, if that is one.
    fn put(&mut self, queue: usize, place: Place) {
        let q = &mut self.all[queue];
        let old = std::mem::replace(&mut q.place, place);
        let owner = q.owner;
        let (before, after) = (q.before.take(), q.after.take());
        if let Some(list) = Queues::list(old) {
            match before {
                Some(b) => self.all[b].after = after,
                None => self.lists[list].first = after,
            }
            match after {
                Some(a) => self.all[a].before = before,
                None => self.lists[list].last = before,
            }
        }
        let waits = |place| matches!(place, Place::Hi | Place::Delayed);
        if waits(old) {
            self.waits.sub(owner);
        }
        if waits(place) {
            self.waits.add(owner);
        }
        if let Some(list) = Queues::list(place) {
            let last = self.lists[list].last.replace(queue);
            self.all[queue].before = last;
            match last {
                Some(l) => self.all[l].after = Some(queue),
                None => self.lists[list].first = Some(queue),
            }
        }
    }

    fn set_idle(&mut self, queue: usize) {
        self.put(queue, Place::Idle);
        self.by_stripe.remove(&self.all[queue].stripe);
        self.free.push(queue);
        if self.blocked && self.active() * 8 < self.limit * 7 {
            self.blocked = false;
        }
    }

    pub fn take_waiting(&mut self) -> Vec<Piece> {
        self.waiting.take()
    }

    /// Checks that every queue is in the list where the rules want it.
    pub fn check(&self) -> Result<(), String> {
        let mut seen = vec![0; self.all.len()];
        for place in [Place::Hi, Place::Lo, Place::Delayed] {
            let mut at = self.first(place);
            let mut before = None;
            while let Some(queue) = at {
                let q = &self.all[queue];
                seen[queue] += 1;
                if seen[queue] > 1 {
                    return Err(format!("the queue of stripe {} is on two lists", q.stripe));
                }
                if q.place != place || q.before != before {
                    return Err(format!(
                        "the queue of stripe {} is {:?}, and on the list of {place:?}",
                        q.stripe, q.place
                    ));
                }
                if q.pieces.is_empty() {
                    return Err(format!(
                        "the queue of stripe {} waits for nothing",
                        q.stripe
                    ));
                }
                (before, at) = (at, q.after);
            }
        }
        for (&stripe, &queue) in &self.by_stripe {
            let q = &self.all[queue];
            let listed = Queues::list(q.place).is_some();
            if q.stripe != stripe || listed != (seen[queue] == 1) || q.place == Place::Idle {
                return Err(format!("the queue of stripe {stripe} is {:?}", q.place));
            }
        }
        match self.by_stripe.len() + self.free.len() == self.all.len() {
            true => Ok(()),
            false => Err("queues are lost".into()),
        }
    }
}

impl Core {
    /// Sets the path of writes from now on. Writes that wait in queues go on from there.
    pub fn set_write_path(&mut self, path: WritePath) {
        self.queues.path = path;
    }

    /// Checks the stripe queues; an error names the first that is wrong.
    pub fn check_queues(&self) -> Result<(), String> {
        for queue in self.heads.all.iter().filter_map(|h| h.queue) {
            let q = &self.queues.all[queue];
            if q.place != Place::Held {
                return Err(format!(
                    "the queue of stripe {} is held, and on the list {:?}",
                    q.stripe, q.place
                ));
            }
        }
        self.queues.check()
    }

    /// A write comes: streams are known by their requests.
    pub(super) fn note_write(&mut self, sector: u64, sectors: u64) {
        if self.queues.path == WritePath::StripeQueue {
            self.queues.streams.note(sector, sectors);
        }
    }

    /// A piece of a write, on its way to its stripe.
    pub(super) fn enqueue(&mut self, piece: Piece) {
        let Some(queue) = self.queues.get(piece.stripe) else {
            let owner = self.owner(piece.request);
            self.queues.waiting.push(owner, piece);
            return;
        };
        let owner = self.owner(piece.request);
        let q = &mut self.queues.all[queue];
        if q.pieces.is_empty() {
            q.owner = owner;
        }
        q.pieces.push(piece);
        q.to_write |= bit(piece.index);
        if q.overwrite & bit(piece.index) == 0 {
            let same = q.pieces.iter().filter(|p| p.index == piece.index);
            let covered = same.fold(0, |all, p| all | sectors_of(p));
            if covered == u8::MAX {
                q.overwrite |= bit(piece.index);
            }
        }
        if q.place != Place::Held {
            self.route(queue);
        } else if has(Plant::QueueListedWhileHeld) {
            self.queues.put(queue, Place::Delayed);
        }
    }

    /// A queue that isn't held goes where it belongs.
    fn route(&mut self, queue: usize) {
        let q = &self.queues.all[queue];
        if q.pieces.is_empty() {
            self.queues.set_idle(queue);
            return;
        }
        let whole = q.overwrite.count_ones() as usize == self.geometry.data_members();
        if whole && q.place != Place::Hi {
            self.queues.all[queue].since = self.queues.ended;
            self.queues.put(queue, Place::Hi);
        } else if q.place == Place::Idle {
            self.queues.all[queue].since = self.queues.ended;
            self.queues.put(queue, Place::Delayed);
        }
    }

    /// Gives the pieces of a queue to its stripe's head, if a head is free.
    fn hand_over(&mut self, queue: usize) -> bool {
        let stripe = self.queues.all[queue].stripe;
        if self.queues.starved {
            return false;
        }
        let Some(head) = self.heads.get_if_free(stripe, self.queues.all[queue].owner) else {
            self.queues.starved = true;
            return false;
        };
        self.queues.put(queue, Place::Held);
        let q = &mut self.queues.all[queue];
        let pieces = std::mem::take(&mut q.pieces);
        (q.to_write, q.overwrite) = (0, 0);
        let h = &mut self.heads.all[head];
        h.queue = Some(queue);
        h.waiting.extend(&pieces);
        self.plug(head);
        // Its memory is used again.
        let mut pieces = pieces;
        pieces.clear();
        self.queues.all[queue].pieces = pieces;
        true
    }

    /// The head has nothing more of its queue.
    pub(super) fn release_queue(&mut self, head: usize) {
        let Some(queue) = self.heads.all[head].queue.take() else {
            return;
        };
        self.queues.put(queue, Place::Idle);
        self.route(queue);
    }

    /// Gives heads to queues; true if any got one.
    pub(super) fn run_queues(&mut self) -> bool {
        if self.broken {
            // Pieces that heads have released since then fail too.
            self.fail_queues();
            return false;
        }
        while !self.queues.blocked
            && let Some(piece) = self.queues.waiting.pop(self.heads.count())
        {
            self.enqueue(piece);
        }
        self.queues.starved &= !self.heads.has_quarter();
        let rows = self.queues.streams.rows(self.geometry.row_sectors());
        let mut any = self.run_whole(&rows, None);
        self.activate_queues(&rows);
        while let Some(queue) = self.queues.first(Place::Lo)
            && self.hand_over_to_read(queue)
        {
            any = true;
        }
        any
    }

    /// Whole stripes go to their heads, of all submitters or of some; but where a stream is at work in their row, all of the row at once.
    fn run_whole(&mut self, rows: &[u64], of: Option<usize>) -> bool {
        let mut any = false;
        let mut at = self.queues.first(Place::Hi);
        while let Some(queue) = at {
            let q = &self.queues.all[queue];
            at = q.after;
            if !self.may_go(q, rows) || of.is_some_and(|key| self.queues.waits.key(q.owner) != key)
            {
                continue;
            }
            if !self.hand_over(queue) {
                break;
            }
            any = true;
        }
        any
    }

    fn may_go(&self, q: &Queue, rows: &[u64]) -> bool {
        self.queues.ended - q.since > PATIENCE
            || !rows.contains(&self.geometry.stripe_row(q.stripe))
    }

    fn hand_over_to_read(&mut self, queue: usize) -> bool {
        if !self.hand_over(queue) {
            return false;
        }
        let Queue { stripe, owner, .. } = self.queues.all[queue];
        self.queues.read_last = stripe;
        self.heads.may_read(stripe, owner);
        true
    }

    /// Submitters whose writes wait for more to come, while none of their writes is under way.
    fn wait_in_vain(&self) -> impl Iterator<Item = usize> + '_ {
        let queues = &self.queues;
        let waits = queues.waits.some();
        waits.filter(|key| queues.writing.get(*key) == 0)
    }

    /// The submitters that are asked if more writes are to be expected of them: their writes wait, and none
    /// of them is under way.
    pub fn waits_for(&self) -> Vec<usize> {
        let oldest = |key| {
            let first = |place| self.first_of(place, key);
            let queue = first(Place::Delayed).or_else(|| first(Place::Hi))?;
            let piece = self.queues.all[queue].pieces.first()?;
            Some(self.owner(piece.request))
        };
        self.wait_in_vain().filter_map(oldest).collect()
    }

    /// The first on a list that is of these submitters.
    fn first_of(&self, place: Place, key: usize) -> Option<usize> {
        let mut at = self.queues.first(place);
        while let Some(queue) = at {
            let q = &self.queues.all[queue];
            if self.queues.waits.key(q.owner) == key {
                break;
            }
            at = q.after;
        }
        at
    }

    /// A submitter waits: nothing more is to be expected of it. Its row that has waited longest goes on. [`Core::unplug`] follows.
    pub fn expect_nothing(&mut self, owner: usize) {
        let key = self.queues.waits.key(owner);
        if !self.wait_in_vain().any(|k| k == key) {
            return;
        }
        if self.run_whole(&[], Some(key)) {
            return;
        }
        let Some(first) = self.first_of(Place::Delayed, key) else {
            return;
        };
        let row = |q: &Queue| self.geometry.stripe_row(q.stripe);
        let oldest = row(&self.queues.all[first]);
        let mut at = Some(first);
        while let Some(queue) = at {
            let q = &self.queues.all[queue];
            at = q.after;
            if row(q) == oldest {
                self.queues.put(queue, Place::Lo);
            }
        }
    }

    /// Partial writes that wait: those of which nothing more is to be expected may read, once few enough do.
    fn activate_queues(&mut self, rows: &[u64]) {
        let Some(first) = self.queues.first(Place::Delayed) else {
            return;
        };
        let old = self.queues.ended - self.queues.all[first].since > PATIENCE;
        let may = |key| self.heads.may_activate(key);
        if !old && !self.queues.waits.some().any(may) {
            return;
        }
        let mut going = Vec::new();
        let mut at = Some(first);
        while let Some(queue) = at {
            let q = &self.queues.all[queue];
            at = q.after;
            if self.may_go(q, rows) && (old || self.heads.may_activate(q.owner)) {
                going.push(queue);
            }
        }
        if going.is_empty() {
            return;
        }
        // Members like it in order, together with those that found no head yet, and on from where the last one was.
        let mut at = self.queues.first(Place::Lo);
        while let Some(queue) = at {
            going.push(queue);
            at = self.queues.all[queue].after;
        }
        let from = self.queues.read_last;
        going.sort_unstable_by_key(|&queue| {
            let stripe = self.queues.all[queue].stripe;
            (stripe < from, stripe)
        });
        for queue in going {
            self.queues.put(queue, Place::Lo);
        }
    }

    /// Fails the writes that wait: the array has failed.
    pub(super) fn fail_queues(&mut self) {
        for piece in self.queues.take_waiting() {
            self.fail_piece(piece.request);
        }
        for place in [Place::Hi, Place::Lo, Place::Delayed] {
            while let Some(queue) = self.queues.first(place) {
                let pieces = std::mem::take(&mut self.queues.all[queue].pieces);
                self.queues.set_idle(queue);
                for piece in pieces {
                    self.fail_piece(piece.request);
                }
            }
        }
    }
}
