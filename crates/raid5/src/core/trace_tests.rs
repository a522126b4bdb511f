//! Runs of the model's shape, as traces: `pvblk-raid5-model` allows each, so it is among those that were searched.
//!
//! The core's accesses and the model's steps aren't one to one (docs/decisions/0048-stripes-own-themselves.md has the table). So that each
//! step is one, all I/O of a phase ends at once, calculations are done as soon as they come up, and a log that its writer leaves at
//! its look, or by the last part in the step in which a stop begins, is looked at by the next writer at once. Looks that the model doesn't have are left out: that of a batch whose log has failed,
//! and that of a log's next writer after such a failure, if words are stopped still.

use super::common::{Common, Setup};
use super::flying::Flying;
use super::io::Purpose;
use super::log::UnitKey;
use super::queue::{Mail, QueueCore};
use super::world::{DATA_SECTORS, devices_of};
use super::{MemberIo, Work};
use crate::core::members::Members;
use crate::core::slots::Unsynced;
use crate::words::{Answer, Owner, Room, Seen};
use crate::{Geometry, Layout, LogArea, Policy, STRIPE_BYTES, STRIPE_SECTORS};
use fastrand::Rng;
use pvblk_block::{Buffer, Op, Request, RequestFlags, Status};
use pvblk_raid5_model::{Bound, Model, Shape, Step, Vocabulary, bound, replay};
use pvblk_testing::seeds;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

const MEMBERS: usize = 3;
const STRIPES: u64 = 2;
const QUEUES: usize = 3;
/// The tag of the flush.
const FLUSH: u64 = 99;

/// I/O that ends at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Group {
    Batch(usize),
    Log(UnitKey),
    Kick,
    Flush,
}

/// I/O of a queue in flight, and the step that its end is, if it is one.
struct Flight {
    queue: usize,
    group: Group,
    end: Option<Step>,
    ios: Vec<MemberIo>,
}

struct Run {
    rng: Rng,
    bound: Bound,
    common: Arc<Common>,
    queues: Vec<QueueCore>,
    /// Mail by queue that posts it and queue that gets it.
    post: Vec<Vec<VecDeque<Mail>>>,
    flights: Vec<Flight>,
    errand: Option<usize>,
    dead: Option<usize>,
    /// The member that may die.
    dies: Option<usize>,
    kicks: bool,
    /// Writes that aren't submitted, and those that are and haven't arrived at their stripes, by queue.
    unasked: Vec<usize>,
    arriving: Vec<VecDeque<u64>>,
    done: usize,
    /// `Some(false)`: a flush is to come.
    flush: Option<bool>,
    /// The log that the step is about.
    log: u8,
    /// Stripes of batches whose log has failed, and logs that others waited for then.
    failed: BTreeSet<usize>,
    failed_logs: BTreeSet<usize>,
    /// Stripes that are written but for the dead member, and their queues.
    unnamed: Vec<(usize, u8)>,
    steps: Vec<Step>,
    /// Writes of whole stripes that went as runs.
    runs: usize,
}

fn owner(queue: usize) -> Owner {
    Owner::new(queue as u16 + 1).expect("a number")
}

/// Writes of random shapes, to an array with one log or two. With one, blocks of a stripe aren't neighbours, so that each write is of one.
fn random_bound(rng: &mut Rng) -> Bound {
    let one_log = rng.bool();
    let blocks = ["a", "b", "a/2", "b/2", "ab", "ab"];
    let blocks = if one_log { &blocks[..4] } else { &blocks[..] };
    let mut write = || {
        let stripe = rng.u32(..2);
        let fua = if rng.u32(..4) == 0 { "!" } else { "" };
        format!("{stripe}:{}{fua}", rng.choice(blocks).expect("one of them"))
    };
    let writes = [write(), write(), write()];
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    Bound {
        parity: if one_log { [2, 2] } else { [2, 1] },
        ..bound(&writes)
    }
}

/// False if a stripe has writes to this member's block and to others, or two writes to both. The model takes those to the former first, and the
/// core the write that arrived first.
fn may_die(bound: &Bound, geometry: &Geometry, member: usize) -> bool {
    (0..STRIPES).all(|stripe| {
        let Some(index) = geometry.data_index(geometry.stripe_row(stripe), member) else {
            return true;
        };
        let writes = bound.writes.iter().flatten();
        let writes = writes.filter(|shape| u64::from(shape.stripe) == stripe);
        let blocks: Vec<u8> = writes.map(|shape| shape.blocks).collect();
        let (its, others) = (1 << index, !(1u8 << index));
        let to_both = blocks.iter().any(|b| b & its != 0 && b & others != 0);
        let has: BTreeSet<bool> = blocks.iter().map(|b| b & its != 0).collect();
        has.len() < 2 && !(to_both && blocks.len() > 1)
    })
}

fn array(bound: &Bound) -> Arc<Common> {
    let one_log = bound.parity[0] == bound.parity[1];
    let chunk = if one_log { 16 } else { 8 };
    let sectors = STRIPES * STRIPE_SECTORS;
    let geometry = Geometry::new(MEMBERS as u32, chunk, Layout::LeftAsymmetric, sectors);
    let geometry = geometry.expect("a geometry");
    for stripe in 0..STRIPES {
        let parity = usize::from(bound.parity[stripe as usize]);
        assert_eq!(geometry.stripe_parity(stripe), parity);
    }
    let room = Room {
        bytes: 4 * STRIPE_BYTES as u64,
        segments: 8,
    };
    let common = Common::new(Setup {
        geometry,
        policy: Policy::Ppl(LogArea {
            sector: 0,
            sectors: DATA_SECTORS,
        }),
        devices: devices_of(MEMBERS, true, false, room),
        members: Members::new((0..MEMBERS).map(Some).collect(), None),
        unsynced: Unsynced::default(),
        dirty: true,
        // The model knows no blocks that can't be read once.
        chunks: None,
        in_memory: false,
        has_sums: false,
        unsummed: Vec::new(),
        limited: false,
        rotational: false,
        most_read_errors: 0,
        words: STRIPES as usize,
        sets: 8,
        queues: QUEUES,
        parts: 4,
        signature: 7,
    });
    common.expect("memory")
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut rng = Rng::with_seed(seed);
        let bound = random_bound(&mut rng);
        let common = array(&bound);
        let geometry = common.geometry;
        let dies = rng.usize(..MEMBERS);
        let open = |queue| QueueCore::open(&common, owner(queue)).expect("room for it");
        let no_mail = |_| (0..QUEUES).map(|_| VecDeque::new()).collect();
        Run {
            queues: (0..QUEUES).map(open).collect(),
            post: (0..QUEUES).map(no_mail).collect(),
            flights: Vec::new(),
            errand: None,
            dead: None,
            dies: Some(dies).filter(|dies| may_die(&bound, &geometry, *dies)),
            kicks: false,
            unasked: (0..bound.writes.len()).collect(),
            arriving: vec![VecDeque::new(); QUEUES],
            done: 0,
            flush: rng.bool().then_some(false),
            log: 0,
            failed: BTreeSet::new(),
            failed_logs: BTreeSet::new(),
            unnamed: Vec::new(),
            steps: Vec::new(),
            runs: 0,
            bound,
            common,
            rng,
        }
    }

    /// Takes steps until nothing is left.
    fn run(&mut self) {
        loop {
            let first = self.rng.u32(..8);
            let any = (first..first + 8).any(|kind| match kind % 8 {
                0 => self.ask(),
                1 => self.ask_flush(),
                2 => self.die(),
                3 => self.deliver(),
                4 => self.name(),
                5 => self.end_flight(),
                _ => self.step_any(),
            });
            if !any {
                break;
            }
        }
        assert!(
            self.queues.iter().all(QueueCore::is_idle),
            "{:?}",
            self.queues
        );
        assert_eq!(self.done, self.bound.writes.len());
    }

    fn ask(&mut self) -> bool {
        if self.unasked.is_empty() {
            return false;
        }
        let shape = |write: usize| self.bound.writes[write].expect("a write");
        // The first of those that are alike.
        let wanted = shape(self.unasked[self.rng.usize(..self.unasked.len())]);
        // Writes that are alike arrive in their order if one queue takes them. Of several that wait, any may arrive first.
        let queue = usize::from(wanted.blocks + wanted.stripe) % QUEUES;
        if !self.arriving[queue].is_empty() {
            return false;
        }
        let at = self
            .unasked
            .iter()
            .position(|write| shape(*write) == wanted);
        let write = self.unasked.remove(at.expect("itself"));
        let request = self.request(write as u64, &wanted);
        self.arriving[queue].push_back(write as u64);
        self.queues[queue].submit(request);
        true
    }

    fn request(&self, tag: u64, shape: &Shape) -> Box<Request> {
        let stripe = u64::from(shape.stripe);
        let first = shape.blocks.trailing_zeros() as usize;
        let sector = self.common.geometry.stripe_array_sector(stripe, first);
        let half = if shape.sectors == 0b11 { 1 } else { 2 };
        let sectors = u64::from(shape.blocks.count_ones()) * STRIPE_SECTORS / half;
        let memory = Buffer::anonymous(sectors as usize * 512).expect("memory");
        let mut request = Request::with_buffers(Op::Write, sector, vec![memory], tag);
        if shape.fua {
            request.flags |= RequestFlags::FUA;
        }
        request
    }

    fn ask_flush(&mut self) -> bool {
        if self.flush != Some(false) || self.done == 0 {
            return false;
        }
        self.flush = Some(true);
        self.steps.push(Step::FlushBegin);
        let queue = self.rng.usize(..QUEUES);
        self.queues[queue].submit(Request::new(Op::Flush, 0, 0, FLUSH));
        self.collect(queue);
        true
    }

    fn die(&mut self) -> bool {
        if self.rng.u32(..8) > 0 {
            return false;
        }
        let Some(member) = self.dies.take() else {
            return false;
        };
        self.dead = Some(member);
        self.steps.push(Step::Die(member as u8));
        true
    }

    fn deliver(&mut self) -> bool {
        let first = self.rng.usize(..QUEUES * QUEUES);
        let mut pairs = (first..first + QUEUES * QUEUES).map(|n| (n / QUEUES % QUEUES, n % QUEUES));
        pairs.any(|(from, to)| {
            let mail = self.post[from][to].pop_front();
            mail.map(|mail| self.queues[to].receive(mail)).is_some()
        })
    }

    fn name(&mut self) -> bool {
        let Some(queue) = self.errand.take() else {
            return false;
        };
        self.steps.push(Step::KickNamed);
        self.queues[queue].named(0);
        self.collect(queue);
        true
    }

    fn step_any(&mut self) -> bool {
        let first = self.rng.usize(..QUEUES);
        (first..first + QUEUES).any(|queue| self.step(queue % QUEUES))
    }

    /// One step of a queue.
    fn step(&mut self, queue: usize) -> bool {
        let q = &mut self.queues[queue];
        let places = q.places.in_use();
        if !(q.next_part() || q.next_gathered()) {
            return self.step_mail(queue);
        }
        if q.places.in_use() > places {
            let write = self.arriving[queue].pop_front().expect("a write");
            self.steps.push(Step::Submit(write as u8));
            // A run's word is looked at in the step in which it is claimed.
            if !q.works.is_empty() || !q.ios.is_empty() {
                let shape = self.bound.writes[write as usize].expect("a write");
                self.steps.push(Step::Check(shape.stripe));
            }
        }
        self.collect(queue);
        true
    }

    /// A step that a queue's next mail asks for.
    fn step_mail(&mut self, queue: usize) -> bool {
        let q = &mut self.queues[queue];
        let mut looks_at = (None, None);
        match q.todo.front_mut() {
            Some(Mail::Stripe(token)) => {
                // In the model a batch knows nothing of what others have read.
                token.record_mut().known.valid = 0;
                looks_at.0 = Some(token.at());
            }
            Some(Mail::Log(token)) => looks_at.1 = Some(token.at()),
            Some(Mail::Answer(Answer::Stable { token, .. })) => {
                self.steps.push(Step::DataBegin(token.at() as u8));
            }
            Some(Mail::GoOn) => {
                let named = self.unnamed.extract_if(.., |(by, _)| *by == queue);
                self.steps
                    .extend(named.map(|(_, stripe)| Step::Release(stripe)));
            }
            _ => {}
        }
        let done = q.next_mail();
        let parked = q.parked.last().map(|token| token.at());
        let held = q.held_logs.last().map(|token| token.at());
        if let Some(stripe) = looks_at.0
            && !(self.failed.remove(&stripe) && parked == Some(stripe))
        {
            self.steps.push(Step::Check(stripe as u8));
        }
        if let Some(log) = looks_at.1 {
            self.log = log as u8;
            if !(self.failed_logs.remove(&log) && held == Some(log)) {
                self.steps.push(Step::LogGo(log as u8));
            }
            // The model's writer is whoever has a batch.
            if let Some(to) = self.hurry_log(queue, log) {
                self.queues[to].next_mail();
                self.collect(to);
            }
        }
        self.collect(queue);
        done
    }

    /// A log that a queue has handed over in this step is the next thing that its new owner looks at; returns that queue.
    fn hurry_log(&mut self, queue: usize, log: usize) -> Option<usize> {
        let q = &mut self.queues[queue];
        let is_log = |mail: &Mail| matches!(mail, Mail::Log(token) if token.at() == log);
        let (to, mail) = match q.mail.iter().position(|(_, mail)| is_log(mail)) {
            Some(at) => {
                let (to, mail) = q.mail.remove(at);
                (usize::from(to.number()) - 1, mail)
            }
            None => (queue, q.todo.remove(q.todo.iter().position(is_log)?)?),
        };
        self.queues[to].todo.push_front(mail);
        Some(to)
    }

    /// I/O of a phase ends.
    fn end_flight(&mut self) -> bool {
        if self.flights.is_empty() {
            return false;
        }
        let at = self.rng.usize(..self.flights.len());
        let Flight {
            queue,
            group,
            end,
            ios,
        } = self.flights.swap_remove(at);
        let is_dead = |io: &MemberIo| Some(io.slot) == self.dead;
        let fails = ios.iter().any(is_dead);
        self.steps.extend(end);
        match end {
            Some(Step::DataEnd(stripe)) if fails => self.unnamed.push((queue, stripe)),
            Some(Step::LogFlushed(log)) => self.log = log,
            _ => {}
        }
        let goes = matches!(self.common.epoch.look(), Seen::Going(_));
        if group == Group::Flush
            && fails
            && goes
            && self.common.membership().members.failed().is_none()
        {
            self.steps.push(Step::FlushFailed);
        }
        let again = self.sent_back(queue);
        for io in ios {
            let ok = Some(io.slot) != self.dead;
            self.queues[queue].ended(io.token, ok);
        }
        if let (Some(Step::LogWritten(log)), true) = (end, fails) {
            let failed = self.sent_back(queue);
            self.failed.extend(failed.difference(&again));
            let q = &self.queues[queue];
            let mut mail = q.todo.iter().chain(q.mail.iter().map(|(_, mail)| mail));
            if mail.any(|mail| matches!(mail, Mail::Log(token) if token.at() == usize::from(log))) {
                self.failed_logs.insert(log.into());
            }
        }
        // A log that is left in the step in which a stop begins: the model's kick waits for the next writer's look, and the words' doesn't.
        let begins = self.queues[queue].kick.is_some() && !self.kicks;
        let left = match end {
            Some(Step::DataEnd(stripe)) if begins => {
                let log = usize::from(self.bound.parity[usize::from(stripe)]);
                self.hurry_log(queue, log)
            }
            _ => None,
        };
        self.collect(queue);
        if let Some(to) = left {
            self.step_mail(to);
        }
        true
    }

    /// Stripes whose batches a log sends back.
    fn sent_back(&self, queue: usize) -> BTreeSet<usize> {
        let q = &self.queues[queue];
        let mail = q.todo.iter().chain(q.mail.iter().map(|(_, mail)| mail));
        let again = mail.filter_map(|mail| match mail {
            Mail::Answer(Answer::Again { token, .. }) => Some(token.at()),
            _ => None,
        });
        again.collect()
    }

    /// Takes a queue's outputs.
    fn collect(&mut self, queue: usize) {
        let q = &mut self.queues[queue];
        if q.kick.is_some() && !std::mem::replace(&mut self.kicks, true) {
            self.steps.push(Step::KickScan);
        }
        while let Some(mut work) = q.works.pop() {
            match &work {
                Work::Stripe(one) => {
                    let Some(Flying::Calculating(token)) = q.flying.get(one.flying) else {
                        panic!("a calculation without a batch");
                    };
                    let stripe = token.at() as u8;
                    self.steps.push(Step::Close(stripe));
                    if !one.calculation.logged {
                        self.steps.push(Step::DataBegin(stripe));
                    }
                }
                Work::Run(run) => {
                    let Some(Flying::Run(run)) = q.flying.get(run.flying) else {
                        panic!("a calculation without a run");
                    };
                    self.runs += 1;
                    self.steps.push(Step::Close(run.only_word() as u8));
                }
            }
            work.run();
            q.worked(&mut work);
        }
        for (to, mail) in q.mail.drain(..) {
            self.post[queue][usize::from(to.number()) - 1].push_back(mail);
        }
        for io in q.ios.drain(..) {
            let stripe = (io.sector.saturating_sub(DATA_SECTORS) / STRIPE_SECTORS) as u8;
            let (group, end) = match (&q.purposes[io.token.0].0, io.op) {
                (Purpose::Read { flying, .. }, _) => {
                    (Group::Batch(*flying), Some(Step::ReadsEnd(stripe)))
                }
                (Purpose::Write { flying }, _) => {
                    (Group::Batch(*flying), Some(Step::DataEnd(stripe)))
                }
                (Purpose::Log(key), Op::Flush) => {
                    (Group::Log(*key), Some(Step::LogFlushed(self.log)))
                }
                (Purpose::Log(key), _) => (Group::Log(*key), Some(Step::LogWritten(io.slot as u8))),
                (Purpose::Kick, _) => (Group::Kick, None),
                (Purpose::Flush(_), _) => (Group::Flush, None),
                (Purpose::Direct(_) | Purpose::Sync | Purpose::Sweep, _) => {
                    panic!("nobody reads or syncs")
                }
            };
            let same = |flight: &&mut Flight| flight.queue == queue && flight.group == group;
            match self.flights.iter_mut().find(same) {
                Some(flight) => flight.ios.push(io),
                None => {
                    if group == Group::Kick {
                        self.steps.push(Step::KickFlush);
                    }
                    let ios = vec![io];
                    self.flights.push(Flight {
                        queue,
                        group,
                        end,
                        ios,
                    });
                }
            }
        }
        for _ in q.errands.drain(..) {
            self.steps.push(Step::KickName);
            self.errand = Some(queue);
        }
        for completion in q.done.drain(..) {
            assert_eq!(completion.status, Status::Ok);
            match completion.request.tag {
                FLUSH => self.steps.push(Step::FlushEnd),
                _ => self.done += 1,
            }
        }
    }
}

#[test]
fn the_model_allows_every_run() {
    let (mut kinds, mut steps, mut runs) = (BTreeSet::new(), 0, 0);
    for seed in seeds(48, 3000) {
        println!("seed {seed}");
        let mut run = Run::new(seed);
        run.run();
        let model = Model {
            bound: run.bound,
            bug: None,
        };
        let trace = || {
            let steps: Vec<String> = run.steps.iter().map(Step::to_string).collect();
            format!("{}: {}", run.bound, steps.join(" · "))
        };
        if let Err(refused) = replay(&model, &run.steps) {
            panic!("{refused}\n{}", trace());
        }
        kinds.extend(run.steps.iter().map(|step| step.kind()));
        steps += run.steps.len();
        runs += run.runs;
    }
    println!("{steps} steps, {runs} runs");
    if pvblk_testing::given_seed().is_none() {
        assert!(runs > 100);
        // All but parking as a step of its own, and those of rebuilds.
        let others = ["parked", "rebuild"];
        for (kind, (word, _)) in Step::WORDS.iter().enumerate() {
            let is_other = others.iter().any(|other| word.starts_with(other));
            assert_eq!(kinds.contains(&kind), !is_other, "{word}");
        }
    }
}
