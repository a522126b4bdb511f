//! Devices that were members: what is left at them, and how they come back. docs/decisions/0033-members-that-stall.md has the rules.

use super::background::BackgroundWork;
use super::control::Parts;
use super::{ArrayShared, MemberDevice};
use crate::core::{Core, Kicked, Token};
use crate::{Member, Policy, Role, SUPER_BYTES, SUPER_SECTOR, Superblock};
use pvblk_block::planted::{Plant, has};
use pvblk_block::stacked::LowerQueue;
use pvblk_block::{
    BlockDevice, Buffer, Completion, DeviceEvent, Error, MemberChange, Op, QueueContext, Request,
    Status,
};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// First wait until a member that was kicked for its time is looked at.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest such wait: it is doubled each time.
const MOST_DOUBLINGS: u32 = 9;

/// The way in which a device that was a member becomes it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReAdded {
    /// The chunks that the write-intent bitmap marks are written.
    ByBitmap,
    /// It is rebuilt whole, for this reason.
    Whole(String),
}

/// A device that was a member.
pub(super) struct Away {
    /// Its slot, while it isn't `quiet`.
    slot: usize,
    name: String,
    place: usize,
    /// As its superblock was, or was about to be.
    superblock: Superblock,
    device: Weak<dyn BlockDevice>,
    /// It is to come back by itself.
    held: Option<Arc<dyn BlockDevice>>,
    /// Nothing of ours is at the device any more.
    quiet: bool,
}

/// The background thread's look at devices that are to come back.
#[derive(Default)]
pub(super) struct Returns {
    looking: Option<Looking>,
    /// Time of the next look.
    at: Duration,
    /// Looks and returns that weren't long ago.
    tries: u32,
    /// A device that is to be added as a spare by a thread that may wait for it.
    whole: Option<(String, Arc<dyn BlockDevice>)>,
}

/// Abandoned I/O at a device that was kicked.
pub(super) struct LeftBehind {
    lower: LowerQueue,
    /// The tokens of each request, by its tag.
    tokens: HashMap<u64, Vec<Token>>,
    polled: Vec<Completion>,
}

impl LeftBehind {
    pub fn new(lower: LowerQueue, tokens: HashMap<u64, Vec<Token>>) -> LeftBehind {
        LeftBehind {
            lower,
            tokens,
            polled: Vec::new(),
        }
    }

    /// Appends the I/O that has come back; false when none is left.
    fn poll(&mut self, ended: &mut Vec<Token>) -> bool {
        self.lower.poll(&mut self.polled);
        for completion in self.polled.drain(..) {
            let tokens = self.tokens.remove(&completion.request.tag);
            ended.extend(tokens.into_iter().flatten());
        }
        !self.lower.is_idle()
    }
}

/// A read of a device's superblock.
struct Looking {
    lower: LowerQueue,
    buffer: Buffer,
    name: String,
}

impl ArrayShared {
    /// Remembers devices that were kicked.
    pub(super) fn note_away(&self, kicked: Vec<Kicked>, devices: &[Option<MemberDevice>]) {
        let mut away = self.away.lock();
        for Kicked {
            slot,
            superblock,
            stalled,
        } in kicked
        {
            let (Some(device), Role::Active(place)) = (&devices[slot], superblock.role()) else {
                continue;
            };
            let held = (stalled && self.control.re_add).then(|| Arc::clone(&device.device));
            // Of several that had the place, the last one comes back.
            for other in away.iter_mut().filter(|a| a.place == usize::from(place)) {
                other.held = None;
            }
            away.push(Away {
                slot,
                name: device.name.clone(),
                place: usize::from(place),
                superblock,
                device: Arc::downgrade(&device.device),
                held,
                quiet: false,
            });
        }
    }

    /// Refuses a device at which I/O of an earlier membership is left: a write that lands later would spoil what is recovered.
    pub(super) fn find_left_io(
        &self,
        name: &str,
        device: &Arc<dyn BlockDevice>,
    ) -> Result<(), Error> {
        let core = self.core.lock();
        self.observe(&core);
        drop(core);
        let away = self.away.lock();
        let same = |a: &&Away| {
            std::ptr::addr_eq(a.device.as_ptr(), Arc::as_ptr(device))
                || self.control.names.same_device(&a.name, name)
        };
        match away.iter().find(|a| !a.quiet && same(a)) {
            Some(busy) => Err(Error::config(format!(
                "{name}: I/O from the time when it was member {} hasn't ended there; try again when the device has answered, or end the server",
                busy.place
            ))),
            None => Ok(()),
        }
    }

    /// Notes the devices at which no I/O is left. Their slots may be used again after this.
    fn observe(&self, core: &Core) {
        let mut away = self.away.lock();
        for one in away.iter_mut().filter(|a| !a.quiet) {
            one.quiet = core.at_device(one.slot) == 0;
        }
        away.retain(|a| !a.quiet || a.held.is_some());
    }

    /// Names of the devices that are to come back by themselves, with their places.
    pub(super) fn held_names(&self) -> Vec<(usize, String)> {
        let away = self.away.lock();
        let held = away.iter().filter(|a| a.held.is_some());
        held.map(|a| (a.place, a.name.clone())).collect()
    }

    /// A device that is to come back by itself, by its place or name.
    pub(super) fn find_held(&self, text: &str) -> Option<(String, Arc<dyn BlockDevice>)> {
        let place = text.parse().ok();
        let away = self.away.lock();
        let means =
            |a: &&Away| Some(a.place) == place || self.control.names.same_device(&a.name, text);
        let mut held = away.iter().filter(|a| a.held.is_some()).filter(means);
        held.find_map(|a| Some((a.name.clone(), Arc::clone(a.held.as_ref()?))))
    }

    fn is_quiet(&self, name: &str) -> bool {
        let away = self.away.lock();
        away.iter()
            .any(|a| a.name == name && (a.quiet || has(Plant::LateWriteIsCurrent)))
    }
}

/// True if a superblock that was read from a device is the one that it had when it was kicked. The last change may not have reached it.
fn is_the_same(was: &Superblock, found: &Superblock) -> bool {
    let id = |s: &Superblock| (s.set_uuid, s.device_uuid, s.dev_number, s.role());
    id(was) == id(found) && (found.events == was.events || found.events + 1 == was.events)
}

impl BackgroundWork {
    /// Looks after devices that were members; `idle`: nothing is to begin.
    pub(super) fn step_away(&mut self, now: Duration, frozen: bool) {
        let shared = Arc::clone(&self.shared);
        let mut ended = Vec::new();
        let mut left = shared.left_behind.lock();
        left.retain_mut(|l| l.poll(&mut ended));
        drop(left);
        if !ended.is_empty() {
            self.queue.step(|core, owner| {
                ended
                    .drain(..)
                    .for_each(|token| core.ended(owner, token, false));
            });
        }
        if let Some(limit) = shared.control.limit
            && now >= self.tick_at
        {
            self.tick_at = now + limit / crate::core::TICKS;
            self.queue.step(|core, owner| core.tick(owner));
        }
        if shared.away.lock().is_empty() && shared.control.returning.lock().is_none() {
            return;
        }
        let (failed, incoming) = {
            let core = shared.core.lock();
            shared.observe(&core);
            (core.wants_spare(), core.recovered_sectors())
        };
        if let Some((_, place, _)) = incoming {
            self.let_go_of(place);
        }
        if failed.is_none() {
            // Another device has the place.
            *shared.control.returning.lock() = None;
            return;
        }
        if frozen {
            return;
        }
        let returning = shared.control.returning.lock().take();
        if let Some(member) = returning {
            self.take_back(member);
            return;
        }
        self.look(now, failed);
    }

    /// Another device takes a place: those that were held for it aren't any more.
    fn let_go_of(&mut self, place: usize) {
        let mut away = self.shared.away.lock();
        for one in away.iter_mut().filter(|a| a.place == place) {
            if one.held.take().is_some() {
                tracing::debug!("raid5: {} is not waited for any more", one.name);
            }
        }
    }

    /// Looks whether the device that was kicked from a place can come back.
    fn look(&mut self, now: Duration, failed: Option<usize>) {
        if let Some(found) = self.returns.looking.as_mut().and_then(Looking::poll) {
            let Some(looking) = self.returns.looking.take() else {
                return;
            };
            if let Err(e) = self.judge(&looking.name, found) {
                tracing::warn!("raid5: {} is not taken back: {e}", looking.name);
            }
            return;
        }
        if self.returns.looking.is_some() || now < self.returns.at {
            return;
        }
        let away = self.shared.away.lock();
        let next = away
            .iter()
            .filter(|a| Some(a.place) == failed)
            .find_map(|a| Some((a.name.clone(), Arc::clone(a.held.as_ref()?))));
        drop(away);
        let Some((name, device)) = next.filter(|(name, _)| self.shared.is_quiet(name)) else {
            return;
        };
        let doublings = self.returns.tries.min(MOST_DOUBLINGS);
        let first = match self.shared.control.limit {
            Some(limit) => limit.min(FIRST_WAIT),
            None => FIRST_WAIT,
        };
        self.returns.at = now + first * (1 << doublings);
        self.returns.tries += 1;
        match Looking::begin(name, &device) {
            Ok(looking) => self.returns.looking = Some(looking),
            Err(e) => tracing::debug!("raid5: {e}"),
        }
    }

    /// Takes a device back by itself, if its superblock is the one that it had.
    fn judge(&mut self, name: &str, found: Result<Superblock, Error>) -> Result<(), Error> {
        let found = found?;
        let mut away = self.shared.away.lock();
        let Some(one) = away.iter_mut().find(|a| a.name == name && a.held.is_some()) else {
            return Ok(());
        };
        if !is_the_same(&one.superblock, &found) {
            one.held = None;
            return Err(Error::config(
                "it has another superblock than when it was kicked; look at it, and add it",
            ));
        }
        let (place, device) = (one.place, one.held.clone());
        drop(away);
        let Some(device) = device else { return Ok(()) };
        let parts: &dyn Parts = &*self.shared;
        let why = parts.why_whole(place, &found);
        parts.raise_back(place, name);
        match why {
            None => self.take_back(Member {
                device,
                name: name.to_owned(),
                superblock: found,
            }),
            Some(why) => {
                tracing::warn!("raid5: {name} is back and is rebuilt whole: {why}");
                self.let_go_of(place);
                self.returns.whole = Some((name.to_owned(), device));
            }
        }
        Ok(())
    }

    /// The device that is to be added as a spare, since it came back and is to be rebuilt whole. Adding waits for the device.
    pub fn take_whole(&mut self) -> Option<(String, Arc<dyn BlockDevice>)> {
        self.returns.whole.take()
    }

    /// Times of looks long ago don't count any more.
    pub(super) fn forgive_returns(&mut self) {
        self.returns.tries /= 2;
    }

    /// A device that was a member becomes it again, by the bitmap.
    fn take_back(&mut self, member: Member) {
        let shared = Arc::clone(&self.shared);
        let Role::Active(place) = member.superblock.role() else {
            return;
        };
        let place = usize::from(place);
        let ability = member.device.limits().into();
        let superblock = member.superblock.clone();
        let device = MemberDevice {
            device: Arc::clone(&member.device),
            name: member.name.clone(),
        };
        let taken = self.queue.step(|core, owner| {
            if core.wants_spare() != Some(place) {
                return Err(Error::config(format!("place {place} isn't empty any more")));
            }
            let slot = core.take_in(place, superblock, true, ability, owner)?;
            shared.set_device(slot, device);
            Ok::<(), Error>(())
        });
        match taken {
            Ok(()) => tracing::info!(
                "raid5: {} is member {place} again; what it missed is written",
                member.name
            ),
            Err(e) => {
                tracing::debug!("raid5: {e}");
                // Another time, unless the place is another's by then.
                let empty = shared.core.lock().wants_spare() == Some(place);
                if empty {
                    *shared.control.returning.lock() = Some(member);
                }
            }
        }
    }
}

impl Looking {
    fn begin(name: String, device: &Arc<dyn BlockDevice>) -> Result<Looking, Error> {
        let mut lower = LowerQueue::open(device, &QueueContext::new(1))?;
        let buffer = Buffer::anonymous(SUPER_BYTES)
            .map_err(|e| Error::os(format!("{name}: memory to read its superblock"), e))?;
        let request = Request::with_buffers(Op::Read, SUPER_SECTOR, vec![buffer.clone()], 0);
        lower.push(request);
        lower.submit();
        Ok(Looking {
            lower,
            buffer,
            name,
        })
    }

    /// The superblock, when it was read.
    fn poll(&mut self) -> Option<Result<Superblock, Error>> {
        let mut done = Vec::new();
        self.lower.poll(&mut done);
        let completion = done.pop()?;
        Some(match completion.status {
            Status::Ok => {
                let mut bytes = [0; SUPER_BYTES];
                self.buffer.read(0, &mut bytes);
                Superblock::parse(&bytes).map_err(Error::from)
            }
            _ => Err(Error::config("its superblock can't be read")),
        })
    }
}

impl dyn Parts + '_ {
    /// The reason why a device that was the member of a place can't be brought up to date by the bitmap; `None` if it can. `superblock`: as it is on
    /// the device.
    pub(super) fn why_whole(&self, place: usize, superblock: &Superblock) -> Option<String> {
        let Some(bitmap) = self.bitmap_header() else {
            return Some("the array has no write-intent bitmap".into());
        };
        if !matches!(superblock.policy(), Policy::Bitmap { .. }) {
            return Some("the device has no write-intent bitmap".into());
        }
        if superblock.role() != Role::Active(place as u16)
            || (superblock.recovered_sectors() < superblock.size_sectors
                && !superblock.is_recovered_by_bitmap())
        {
            return Some(format!("it was not the whole member of place {place}"));
        }
        if superblock.events < bitmap.events_cleared {
            return Some(format!(
                "it is too old: its events are {}, and bits of the bitmap were cleared at {}",
                superblock.events, bitmap.events_cleared
            ));
        }
        None
    }

    /// A device that was the member of a place is to become it again, by the bitmap.
    pub(super) fn bring_back(&self, place: usize, member: Member) {
        let name = member.name.clone();
        *self.control().returning.lock() = Some(member);
        self.raise_back(place, &name);
    }

    /// The member at a place is there again.
    pub(super) fn raise_back(&self, place: usize, name: &str) {
        self.control().events.raise(DeviceEvent::Member {
            place: place as u32,
            name: Arc::from(name),
            change: MemberChange::Back,
        });
    }
}
