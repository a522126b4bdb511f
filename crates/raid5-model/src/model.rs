//! The model: the state that follows a step.

use crate::bound::Bound;
use crate::bug::Bug;
use crate::check::{Broken, Property, may_matter};
use crate::machine::Machine;
use crate::plan::{
    alone, calculate, entry, log_device, log_of, place, plan, ready, targets, written,
};
use crate::rank::rank;
use crate::state::{
    BLOCKS, DEVICES, Entry, Expected, Flush, Kick, LogPhase, Members, NONE, PARITY, Phase, SECTORS,
    SPARE, STRIPES, SYNC, Sector, State, Stripe, Superblock, Sync, WRITES, Write, value, version,
};
use crate::step::{Step, is_syncs_turn};

/// A bound, and a bug or none.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub bound: Bound,
    pub bug: Option<Bug>,
}

impl Model {
    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The state in which a run begins: parity is right, all is stable, nobody has written.
    pub fn first(&self) -> State {
        let mut media = [[[Sector::new(0); SECTORS]; STRIPES]; DEVICES];
        for at in 0..STRIPES {
            for b in 0..=PARITY {
                let contents = match b {
                    PARITY => value(0, 0) ^ value(1, 0),
                    b => value(b, 0),
                };
                media[place(&self.bound, at, b)][at] = [Sector::new(contents); SECTORS];
            }
        }
        let expected = Expected {
            may: 1,
            after_flush: 0,
            now: 0,
        };
        let writes = self.bound.writes.map(|shape| Write {
            submitted: false,
            left: shape.map_or(0, |s| s.blocks),
        });
        State {
            media,
            entries: [[Entry::default(); STRIPES]; DEVICES],
            stripes: [Stripe::default(); STRIPES],
            logs: Default::default(),
            epoch: 0,
            kick: Kick::None,
            waits: 0,
            sync: Sync::Off,
            sync_stripe: 0,
            sync_block: [0; SECTORS],
            superblock: Superblock {
                failed: NONE,
                committed: 0,
                swapped: NONE,
            },
            next_superblock: None,
            members: Members::default(),
            dead: NONE,
            writes,
            flush: Flush::None,
            expected: [[[expected; SECTORS]; BLOCKS]; STRIPES],
        }
    }

    /// The state after a step that the state allows, or the property that the step breaks.
    pub fn after(&self, state: &State, step: Step) -> Result<State, Broken> {
        let mut s = *state;
        match step {
            Step::Submit(w) => self.submit(&mut s, w),
            Step::Check(n) => self.check(&mut s, n as usize),
            Step::Park(n) => {
                s.stripes[n as usize].phase = Phase::Parked;
                tell_kick(&mut s, n as usize);
            }
            Step::ReadsEnd(n) => self.reads_end(&mut s, n as usize),
            Step::Close(n) => self.close(&mut s, n as usize)?,
            Step::LogGo(n) => self.log_go(&mut s, n as usize)?,
            Step::LogFlushed(n) => self.log_flushed(&mut s, n as usize)?,
            Step::LogWritten(n) => self.log_written(&mut s, n as usize),
            Step::DataBegin(n) => self.data_begin(&mut s, n as usize)?,
            Step::DataEnd(n) => self.data_end(&mut s, n as usize)?,
            Step::Release(n) => {
                let told = !self.has(Bug::ToldBeforeRelease) || s.stripes[n as usize].round > 0;
                self.release(&mut s, n as usize, told)?;
            }
            Step::KickScan => self.kick_scan(&mut s),
            Step::KickFlush => {
                if !self.has(Bug::KickNotFlushed) {
                    self.flush_members(&mut s);
                }
                s.kick = Kick::Flushed;
            }
            Step::KickName => {
                s.next_superblock = Some(Superblock {
                    failed: self.kicked_place(&s),
                    committed: 0,
                    swapped: NONE,
                });
                s.kick = Kick::Naming;
            }
            Step::KickNamed => self.kick_named(&mut s),
            Step::FlushBegin => self.flush_begin(&mut s),
            Step::FlushEnd => {
                s.flush = Flush::Done;
                for e in s.expected.as_flattened_mut().as_flattened_mut() {
                    e.may = e.after_flush;
                    e.after_flush = 0;
                }
            }
            Step::FlushFailed => begin_kick(&mut s),
            Step::Die(d) => s.dead = d,
            Step::SyncWant => {
                s.members.incoming = true;
                s.sync = Sync::AtStripe;
                arrive(&mut s.stripes[s.sync_stripe as usize], SYNC);
            }
            Step::SyncRead(n) => self.sync_read(&mut s, n as usize),
            Step::SyncWritten(n) => self.sync_written(&mut s, n as usize),
            Step::SyncOn => {
                s.sync = Sync::Off;
                s.sync_stripe = s.members.done;
            }
            Step::SyncFlush => {
                if !self.has(Bug::CommittedBeforeFlush) {
                    self.flush_members(&mut s);
                }
                s.sync = Sync::Flushed;
                if s.dead_member().is_some() {
                    begin_kick(&mut s);
                }
            }
            Step::SyncTell => self.sync_tell(&mut s),
            Step::SyncTold => self.sync_told(&mut s),
            Step::SyncTake => self.sync_take(&mut s),
            Step::SyncTaken => self.sync_taken(&mut s),
        }
        Ok(s)
    }

    /// The device that a block of a batch goes to.
    pub fn target(&self, s: &State, at: usize, b: usize) -> Option<usize> {
        targets(&self.bound, self.bug, s, at, b)
    }

    fn submit(&self, s: &mut State, w: u8) {
        let Some(shape) = self.bound.writes[w as usize] else {
            return;
        };
        s.writes[w as usize].submitted = true;
        let stripe = &mut s.stripes[shape.stripe as usize];
        let closed = matches!(
            stripe.phase,
            Phase::Listed | Phase::Logging | Phase::Logged | Phase::Writing
        );
        if self.has(Bug::JoinedAfterClose) && closed {
            stripe.batch[w as usize] = shape.blocks;
        }
        arrive(stripe, w);
    }

    fn check(&self, s: &mut State, at: usize) {
        if s.is_stopped() && !self.has(Bug::ClaimNotChecked) {
            self.park(s, at);
            return;
        }
        s.stripes[at].epoch = s.epoch;
        if is_syncs_turn(&s.stripes[at].list) && s.sync == Sync::Over {
            self.sync_release(s, at);
            return;
        }
        if is_syncs_turn(&s.stripes[at].list) {
            s.stripes[at].phase = Phase::SyncReading;
            s.members.begun = at as u8 + 1;
            return;
        }
        let alone = alone(&self.bound, self.bug, s, at);
        s.stripes[at].alone = alone.map_or(NONE, |b| b as u8);
        self.want_reads(s, at, 0);
    }

    /// Asks for what the requests that are in the list need.
    fn want_reads(&self, s: &mut State, at: usize, round: u8) {
        let plan = plan(&self.bound, self.bug, s, at, WRITES + 1);
        let stripe = &mut s.stripes[at];
        stripe.need = plan.need & !stripe.valid;
        stripe.round = round;
        stripe.phase = match stripe.need {
            0 => Phase::Read,
            _ => Phase::Reading,
        };
    }

    /// Parks the owner of a stripe, if the stop isn't over already.
    fn park(&self, s: &mut State, at: usize) {
        let stopped = s.is_stopped();
        let stripe = &mut s.stripes[at];
        stripe.forget_plan();
        stripe.phase = match (self.has(Bug::ParkNotRechecked), stopped) {
            (true, _) => Phase::Parking,
            (false, true) => Phase::Parked,
            (false, false) => Phase::Claimed,
        };
        tell_kick(s, at);
    }

    fn reads_end(&self, s: &mut State, at: usize) {
        let need = s.stripes[at].need;
        for b in (0..=PARITY).filter(|b| need & (1 << b) != 0) {
            let device = s.members.device(place(&self.bound, at, b), at);
            if device == Some(s.dead as usize) {
                begin_kick(s);
                self.park(s, at);
                return;
            }
            if let Some(device) = device {
                s.stripes[at].reads[b] = s.media[device][at].map(|sector| sector.now);
            }
        }
        let stripe = &mut s.stripes[at];
        stripe.valid |= need;
        stripe.need = 0;
        if stripe.epoch != s.epoch {
            self.park(s, at);
            return;
        }
        stripe.phase = Phase::Read;
        // Others have joined: there is a second round of reads for them, and no third.
        if stripe.round == 0 {
            self.want_reads(s, at, 1);
        }
    }

    fn close(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        if self.has(Bug::CursorReadTwice) {
            let alone = alone(&self.bound, self.bug, s, at);
            s.stripes[at].alone = alone.map_or(NONE, |b| b as u8);
        }
        let requests = match self.has(Bug::CalculatedBeforeRead) {
            true => WRITES + 1,
            false => ready(&self.bound, self.bug, s, at),
        };
        if requests == 0 {
            return Err(Broken::new(Property::ReadBeforeCalculated, || {
                format!("stripe {at}: nothing can be calculated from what was read")
            }));
        }
        let plan = plan(&self.bound, self.bug, s, at, requests);
        if plan.need & !s.stripes[at].valid != 0 {
            return Err(Broken::new(Property::ReadBeforeCalculated, || {
                format!("stripe {at}: blocks {:#b} were not read", plan.need)
            }));
        }
        calculate(&self.bound, self.bug, &mut s.stripes[at], &plan);
        let Some(log) = log_of(&self.bound, s, at) else {
            s.stripes[at].phase = Phase::Closed;
            return Ok(());
        };
        s.stripes[at].phase = Phase::Listed;
        tell_kick(s, at);
        let log = &mut s.logs[log];
        log.next |= 1 << at;
        if log.phase == LogPhase::Idle {
            log.phase = LogPhase::Claimed;
        }
        Ok(())
    }

    fn log_go(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        if s.is_stopped() && !self.has(Bug::EpochNotChecked) {
            s.logs[at].phase = LogPhase::Held;
            tell_kick_log(s, at);
            return Ok(());
        }
        self.send_back(s, at);
        if s.logs[at].next != 0 && s.logs[at].stale && !self.has(Bug::LogReusedEarly) {
            s.logs[at].phase = LogPhase::Flushing;
            self.flush_members(s);
            return Ok(());
        }
        self.begin_unit(s, at)
    }

    /// Batches that were planned in another epoch are planned anew.
    fn send_back(&self, s: &mut State, log: usize) {
        let next = s.logs[log].next;
        for at in (0..STRIPES).filter(|at| next & (1 << at) != 0) {
            if s.stripes[at].epoch != s.epoch && !s.is_stopped() && !self.has(Bug::StalePlanKept) {
                s.logs[log].next &= !(1 << at);
                s.stripes[at].forget_plan();
                s.stripes[at].phase = Phase::Claimed;
            }
        }
    }

    fn begin_unit(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let unit = std::mem::take(&mut s.logs[at].next);
        if unit == 0 {
            s.logs[at].phase = LogPhase::Idle;
            tell_kick_log(s, at);
            return Ok(());
        }
        for n in (0..STRIPES).filter(|n| unit & (1 << n) != 0) {
            planned_now(s, n)?;
            if s.stripes[n].phase == Phase::Listed {
                s.stripes[n].phase = Phase::Logging;
            }
        }
        s.logs[at].unit = unit;
        s.logs[at].phase = LogPhase::Writing;
        Ok(())
    }

    fn log_flushed(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let failed = s.dead_member().is_some() && !self.has(Bug::LogIgnoresFlushError);
        if failed {
            begin_kick(s);
        }
        if failed || (s.is_stopped() && !self.has(Bug::EpochNotChecked)) {
            s.logs[at].phase = LogPhase::Held;
            tell_kick_log(s, at);
            return Ok(());
        }
        s.logs[at].stale = false;
        self.send_back(s, at);
        self.begin_unit(s, at)
    }

    fn log_written(&self, s: &mut State, at: usize) {
        let unit = s.logs[at].unit;
        let device = log_device(self.bug, s, at);
        let of = |s: &State, n: usize| match unit & (1 << n) {
            0 => Entry::default(),
            _ => entry(&s.stripes[n]),
        };
        if device.is_some_and(|d| d == s.dead as usize) {
            begin_kick(s);
            s.entries[s.dead as usize] = [Entry::default(); STRIPES];
            s.logs[at].unit = 0;
            s.logs[at].phase = match s.logs[at].next {
                0 => LogPhase::Idle,
                _ => LogPhase::Held,
            };
            for n in (0..STRIPES).filter(|n| unit & (1 << n) != 0) {
                self.park(s, n);
            }
            tell_kick_log(s, at);
            return;
        }
        if let Some(device) = device {
            s.entries[device] = [of(s, 0), of(s, 1)];
        }
        for stripe in (0..STRIPES).filter(|n| unit & (1 << n) != 0) {
            if s.stripes[stripe].phase == Phase::Logging {
                s.stripes[stripe].phase = Phase::Logged;
            }
        }
        s.logs[at].phase = LogPhase::Stripes;
    }

    fn data_begin(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let stripe = s.stripes[at];
        planned_now(s, at)?;
        for b in written(&stripe, true) {
            if let Some(device) = self.target(s, at, b) {
                for sector in 0..SECTORS {
                    s.media[device][at][sector].begin(stripe.new[b][sector]);
                }
            }
        }
        for (b, sector) in touched_sectors(&stripe) {
            let Some(version) = version(b, stripe.new[b][sector]) else {
                return Err(Broken::new(Property::OnlyWritten, || {
                    format!("block {b} of stripe {at} gets contents that nobody wrote")
                }));
            };
            let e = &mut s.expected[at][b][sector];
            e.may |= 1 << version;
            if s.flush == Flush::Flying {
                e.after_flush |= 1 << version;
            }
        }
        s.stripes[at].phase = Phase::Writing;
        Ok(())
    }

    fn data_end(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let stripe = s.stripes[at];
        for b in written(&stripe, true) {
            let Some(device) = self.target(s, at, b) else {
                continue;
            };
            if device == s.dead as usize {
                s.stripes[at].failed = true;
                continue;
            }
            let fua = stripe.fua && !(b == PARITY && self.has(Bug::ParityNotFua));
            for sector in 0..SECTORS {
                s.media[device][at][sector].end(stripe.new[b][sector], fua);
            }
        }
        let log = place(&self.bound, at, PARITY);
        self.stripe_done(s, log, at);
        if s.stripes[at].failed {
            begin_kick(s);
            if !self.has(Bug::AcknowledgedUnnamed) {
                s.stripes[at].phase = Phase::Unnamed;
                tell_kick(s, at);
                return Ok(());
            }
        }
        if self.has(Bug::ToldBeforeRelease) {
            s.stripes[at].phase = Phase::Ending;
            s.stripes[at].round = u8::from(s.is_stopped());
            return Ok(());
        }
        self.release(s, at, true)
    }

    /// A stripe of a log's unit is written.
    fn stripe_done(&self, s: &mut State, log: usize, at: usize) {
        let l = &mut s.logs[log];
        if l.unit & (1 << at) == 0 {
            return;
        }
        l.unit &= !(1 << at);
        if l.unit == 0 {
            l.stale = true;
            l.phase = match l.next {
                0 => LogPhase::Idle,
                _ => LogPhase::Claimed,
            };
            tell_kick_log(s, log);
        }
    }

    /// Acknowledges the batch, and hands the stripe over to the next request.
    fn release(&self, s: &mut State, at: usize, told: bool) -> Result<(), Broken> {
        let stripe = s.stripes[at];
        if stripe.batch != stripe.calculated {
            return Err(Broken::new(Property::ClosedOnce, || {
                format!("stripe {at}: a write is acknowledged that parity was calculated without")
            }));
        }
        for (b, sector) in touched_sectors(&stripe) {
            let e = &mut s.expected[at][b][sector];
            e.now = version(b, stripe.new[b][sector]).unwrap_or(NONE);
            let stable = self.bound.writes.iter().zip(stripe.batch);
            let mut stable = stable.filter_map(|(shape, blocks)| Some((shape.as_ref()?, blocks)));
            let covers = |(shape, blocks): (&crate::bound::Shape, u8)| {
                shape.fua && blocks & (1 << b) != 0 && shape.sectors & (1 << sector) != 0
            };
            if stable.any(covers) {
                e.may = 1 << e.now;
                if s.flush == Flush::Flying {
                    e.after_flush = 1 << e.now;
                }
            }
        }
        let mut next = Stripe {
            list: stripe.list,
            ..Stripe::default()
        };
        for w in 0..WRITES {
            s.writes[w].left &= !stripe.batch[w];
            if stripe.batch[w] != 0 && s.writes[w].left == 0 {
                next.remove(w as u8);
            }
        }
        self.hand_over(s, at, next, told);
        Ok(())
    }

    pub(crate) fn hand_over(&self, s: &mut State, at: usize, next: Stripe, told: bool) {
        s.stripes[at] = next;
        let waits = next.list[0] != NONE;
        if waits && self.has(Bug::WaiterDropped) {
            s.stripes[at] = Stripe::default();
        } else if waits {
            s.stripes[at].phase = Phase::Claimed;
        }
        if told {
            s.waits &= !(1 << at);
        }
    }

    /// The flush of a user takes effect at once on all devices. Nobody learns of it before it ends, so a cut before its end is a cut
    /// before its begin; and what is written meanwhile isn't covered.
    fn flush_begin(&self, s: &mut State) {
        s.flush = Flush::Flying;
        for at in 0..STRIPES {
            for b in 0..BLOCKS {
                for sector in 0..SECTORS {
                    let e = &mut s.expected[at][b][sector];
                    e.after_flush = 1 << e.now;
                }
            }
            let stripe = s.stripes[at];
            if matches!(
                stripe.phase,
                Phase::Writing | Phase::Unnamed | Phase::Ending
            ) {
                for (b, sector) in touched_sectors(&stripe) {
                    if let Some(version) = version(b, stripe.new[b][sector]) {
                        s.expected[at][b][sector].after_flush |= 1 << version;
                    }
                }
            }
        }
        if !self.has(Bug::FlushNotAwaited) {
            let skips = self.has(Bug::FlushSkipsIncoming) && s.members.incoming;
            self.flush_devices(s, |device| !skips || device != SPARE);
        }
    }

    pub(crate) fn flush_members(&self, s: &mut State) {
        self.flush_devices(s, |_| true);
    }

    fn flush_devices(&self, s: &mut State, which: impl Fn(usize) -> bool) {
        for device in (0..DEVICES).filter(|d| which(*d)) {
            if !s.members.has(device) || device == s.dead as usize {
                continue;
            }
            for at in 0..STRIPES {
                for sector in 0..SECTORS {
                    let flying = self.flying(s, device, at, sector);
                    s.media[device][at][sector].flush(flying);
                }
            }
        }
    }
}

impl Machine for Model {
    type State = State;
    type Step = Step;

    fn bound(&self) -> String {
        self.bound.to_string()
    }

    fn first(&self) -> State {
        Model::first(self)
    }

    fn steps(&self, state: &State, out: &mut Vec<Step>) {
        Model::steps(self, state, out);
    }

    fn after(&self, state: &State, step: Step) -> Result<State, Broken> {
        Model::after(self, state, step)
    }

    fn check(&self, before: &State, after: &State) -> Result<(), Broken> {
        self.check_state(after, !may_matter(before, after))
    }

    fn check_rest(&self, state: &State) -> Result<(), Broken> {
        Model::check_rest(self, state)
    }

    fn rank(&self, state: &State) -> u64 {
        rank(state)
    }
}

/// A request claims the stripe, or joins its list.
fn arrive(stripe: &mut Stripe, request: u8) {
    stripe.push(request);
    if stripe.phase == Phase::Free {
        stripe.phase = Phase::Claimed;
    }
}

/// Somebody has seen the member fail: stripes are to stop.
pub(crate) fn begin_kick(s: &mut State) {
    if s.kick == Kick::None && s.dead_member().is_some() {
        s.epoch += 1;
        s.kick = Kick::Begun;
    }
}

/// The owner of a stripe without I/O in flight tells the kick, which may wait for it.
fn tell_kick(s: &mut State, at: usize) {
    if s.stripes[at].is_drained() {
        s.waits &= !(1 << at);
    }
}

fn tell_kick_log(s: &mut State, log: usize) {
    s.waits &= !(1 << (STRIPES + log));
}

/// Checks that a batch was planned for the members that the array has now.
fn planned_now(s: &State, at: usize) -> Result<(), Broken> {
    if s.stripes[at].epoch / 2 == s.epoch / 2 {
        return Ok(());
    }
    Err(Broken::new(Property::PlannedForTheseMembers, || {
        format!("stripe {at}: the members have changed since the batch was planned")
    }))
}

/// Data sectors that a batch writes.
fn touched_sectors(stripe: &Stripe) -> impl Iterator<Item = (usize, usize)> + use<> {
    let touched = stripe.touched;
    let blocks = (0..BLOCKS).filter(move |b| touched & (1 << b) != 0);
    blocks.flat_map(|b| (0..SECTORS).map(move |sector| (b, sector)))
}
