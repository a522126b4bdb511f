//! Devices that were members, and how they come back. docs/decisions/0033-members-that-stall.md has the rules.

use super::MemberDevice;
use super::shared::Shared;
use crate::{Member, Role, SUPER_BYTES, SUPER_SECTOR, Superblock, sleepy};
use pvblk_block::planted::{Plant, has};
use pvblk_block::stacked::LowerQueue;
use pvblk_block::{
    BlockDevice, Buffer, DeviceEvent, Error, MemberChange, Op, QueueContext, Request, Status,
};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// First wait until a member that was kicked for its time is looked at.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest such wait: it is doubled each time.
const MOST_DOUBLINGS: u32 = 9;

/// The way in which a device that was a member becomes it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReAdded {
    /// Only chunks that it missed are written: those that the write-intent bitmap marks, or the private map, or its like in the server's memory.
    ByBitmap,
    /// It is rebuilt whole, for this reason.
    Whole(String),
}

/// A device that isn't a member any more.
pub struct Gone {
    pub(super) device: MemberDevice,
    /// As it was, or was about to be.
    pub(super) superblock: Superblock,
    /// It did not answer in time.
    pub(super) stalled: bool,
}

/// A device that was a member.
pub struct Away {
    name: String,
    place: usize,
    /// As its superblock was, or was about to be.
    superblock: Superblock,
    pub(super) device: Weak<dyn BlockDevice>,
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

/// The places of an array, as far as devices that come back need them.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// The place without a member that a device may come back to.
    pub wants: Option<usize>,
    /// The place that another device becomes the member of.
    pub incoming: Option<usize>,
    /// Nothing begins by itself.
    pub frozen: bool,
}

/// A read of a device's superblock.
struct Looking {
    lower: LowerQueue,
    buffer: Buffer,
    name: String,
}

/// True if a superblock that was read from a device is the one that it had when it was kicked. The last change may not have reached it.
fn is_the_same(was: &Superblock, found: &Superblock) -> bool {
    let id = |s: &Superblock| (s.set_uuid, s.device_uuid, s.dev_number, s.role());
    id(was) == id(found) && (found.events == was.events || found.events + 1 == was.events)
}

/// A whole member that was left out.
pub struct Missed {
    /// Its superblock as it was, or was about to be, when it was left out last.
    was: Superblock,
    /// As it was found on the device when that came back: the next one may not have reached it.
    found: Option<Superblock>,
}

impl Missed {
    fn is(&self, found: &Superblock) -> bool {
        is_the_same(&self.was, found) || self.found.as_ref() == Some(found)
    }
}

/// True if a device held all data of its place.
fn is_whole(superblock: &Superblock) -> bool {
    superblock.recovered_sectors() >= superblock.size_sectors
}

impl Returns {
    /// Looks after devices that were members. One that is to come back now is [`super::control::Control`]'s `returning`.
    pub fn step(&mut self, shared: &Shared, now: Duration, places: Places) {
        let control = &shared.control;
        if control.away.lock().is_empty() && control.returning.lock().is_none() {
            return;
        }
        shared.observe();
        if let Some(place) = places.incoming {
            shared.let_go_of(place);
        }
        let Some(wanted) = places.wants else {
            // Another device has the place, or is about to.
            *control.returning.lock() = None;
            self.looking = None;
            return;
        };
        if !places.frozen && control.returning.lock().is_none() {
            self.look(shared, now, wanted);
        }
    }

    /// Looks whether the device that was kicked from a place can come back.
    fn look(&mut self, shared: &Shared, now: Duration, wanted: usize) {
        if let Some(found) = self.looking.as_mut().and_then(Looking::poll) {
            let Some(looking) = self.looking.take() else {
                return;
            };
            if let Err(e) = self.judge(shared, &looking.name, found) {
                tracing::warn!("raid5: {} is not taken back: {e}", looking.name);
            }
            return;
        }
        if self.looking.is_some() || now < self.at {
            return;
        }
        let away = shared.control.away.lock();
        let next = away
            .iter()
            .filter(|a| a.place == wanted && (a.quiet || has(Plant::LateWriteIsCurrent)))
            .find_map(|a| Some((a.name.clone(), Arc::clone(a.held.as_ref()?))));
        drop(away);
        let Some((name, device)) = next else {
            return;
        };
        let doublings = self.tries.min(MOST_DOUBLINGS);
        let first = match shared.control.limit {
            Some(limit) => limit.min(FIRST_WAIT),
            None => FIRST_WAIT,
        };
        self.at = now + first * (1 << doublings);
        self.tries += 1;
        match Looking::begin(name, &device) {
            Ok(looking) => self.looking = Some(looking),
            Err(e) => tracing::debug!("raid5: {e}"),
        }
    }

    /// A device comes back by itself, if its superblock is the one that it had.
    fn judge(
        &mut self,
        shared: &Shared,
        name: &str,
        found: Result<Superblock, Error>,
    ) -> Result<(), Error> {
        let found = found?;
        let mut away = shared.control.away.lock();
        let is_it = |a: &&mut Away| a.name == name && a.held.is_some();
        let is_quiet = |a: &&mut Away| a.quiet || has(Plant::LateWriteIsCurrent);
        let Some(one) = away.iter_mut().filter(is_quiet).find(is_it) else {
            return Ok(());
        };
        let missed = shared.control.missed.lock();
        let is_known = missed.as_ref().is_some_and(|missed| missed.is(&found));
        drop(missed);
        if !is_known && !is_the_same(&one.superblock, &found) {
            one.held = None;
            return Err(Error::config(
                "it has another superblock than when it was kicked; look at it, and add it",
            ));
        }
        let (place, device) = (one.place, one.held.clone());
        drop(away);
        let Some(device) = device else { return Ok(()) };
        match shared.why_whole(place, &found) {
            None => shared.bring_back(
                place,
                Member {
                    device,
                    name: name.to_owned(),
                    superblock: found,
                },
            ),
            Some(why) => {
                shared.raise_back(place, name);
                tracing::warn!("raid5: {name} is back and is rebuilt whole: {why}");
                shared.let_go_of(place);
                self.whole = Some((name.to_owned(), device));
            }
        }
        Ok(())
    }

    /// The device that is to be added as a spare, since it came back and is to be rebuilt whole. Adding waits for the device.
    pub fn take_whole(&mut self) -> Option<(String, Arc<dyn BlockDevice>)> {
        self.whole.take()
    }

    /// Times of looks long ago don't count any more.
    pub fn forgive(&mut self) {
        self.tries /= 2;
    }
}

/// Adds a device that came back, on a thread of its own: the device may stall again.
pub(super) fn add_whole(shared: &Arc<Shared>, (name, device): (String, Arc<dyn BlockDevice>)) {
    let shared = Arc::downgrade(shared);
    let add = move || {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if let Err(e) = shared.add(&name, &device, false, &mut sleepy()) {
            tracing::warn!("raid5: {name} came back and can't be added: {e}");
        }
    };
    let thread = std::thread::Builder::new().name("pvblk-raid5-add".into());
    if let Err(e) = thread.spawn(add) {
        tracing::warn!("raid5: starting a thread: {e}");
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

impl Shared {
    /// Remembers devices that aren't members any more.
    pub(super) fn note_away(&self, gone: impl IntoIterator<Item = Gone>) {
        let control = &self.control;
        let mut away = control.away.lock();
        for Gone {
            device,
            superblock,
            stalled,
        } in gone
        {
            let Role::Active(place) = superblock.role() else {
                continue;
            };
            let held = (stalled && control.re_add).then(|| Arc::clone(&device.device));
            // Of several that had the place, the last one comes back.
            for other in away.iter_mut().filter(|a| a.place == usize::from(place)) {
                other.held = None;
            }
            away.push(Away {
                name: device.name,
                place: usize::from(place),
                superblock,
                device: Arc::downgrade(&device.device),
                held,
                quiet: false,
            });
        }
    }

    /// Refuses a device at which I/O of an earlier membership is left: a write that lands later would spoil what is recovered.
    pub(super) fn refuse_if_busy(
        &self,
        name: &str,
        device: &Arc<dyn BlockDevice>,
    ) -> Result<(), Error> {
        self.observe();
        let control = &self.control;
        let away = control.away.lock();
        let same = |a: &&Away| {
            std::ptr::addr_eq(a.device.as_ptr(), Arc::as_ptr(device))
                || control.names.same_device(&a.name, name)
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
    fn observe(&self) {
        let mut away = self.control.away.lock();
        for one in away.iter_mut().filter(|a| !a.quiet) {
            one.quiet = !self.patience.is_left(one);
        }
        away.retain(|a| !a.quiet || a.held.is_some());
    }

    /// Names of the devices that are to come back by themselves, with their places.
    pub(super) fn held(&self) -> Vec<(usize, String)> {
        let away = self.control.away.lock();
        let held = away.iter().filter(|a| a.held.is_some());
        held.map(|a| (a.place, a.name.clone())).collect()
    }

    /// A device that is to come back by itself, by its place or name.
    pub(super) fn held_device(&self, text: &str) -> Option<(String, Arc<dyn BlockDevice>)> {
        let place = text.parse().ok();
        let control = &self.control;
        let away = control.away.lock();
        let means = |a: &&Away| Some(a.place) == place || control.names.same_device(&a.name, text);
        let mut held = away.iter().filter(|a| a.held.is_some()).filter(means);
        held.find_map(|a| Some((a.name.clone(), Arc::clone(a.held.as_ref()?))))
    }

    /// Another device takes a place: those that were held for it aren't any more.
    fn let_go_of(&self, place: usize) {
        let mut away = self.control.away.lock();
        for one in away.iter_mut().filter(|a| a.place == place) {
            if one.held.take().is_some() {
                tracing::debug!("raid5: {} is not waited for any more", one.name);
            }
        }
    }

    /// The reason why a device that was the member of a place can't be brought up to date by the bitmap, or its like; `None` if it
    /// can. `superblock`: the device's own, as it was read.
    pub(super) fn why_whole(&self, place: usize, superblock: &Superblock) -> Option<String> {
        let Some(bitmap) = self.bitmap_header() else {
            let missed = self.control.missed.lock();
            return match &*missed {
                Some(missed) if missed.is(superblock) => None,
                Some(missed) if missed.was.device_uuid == superblock.device_uuid => {
                    Some("its superblock was changed since it was left out".into())
                }
                _ => Some(
                    "the array has no write-intent bitmap and no private map, and its server doesn't know what this device missed".into(),
                ),
            };
        };
        if !superblock.has_policy_of(&self.written.lock().superblock) {
            return Some("it has another consistency policy than the array has now".into());
        }
        let is_its = is_whole(superblock) || bitmap.guides(superblock);
        if superblock.role() != Role::Active(place as u16) || !is_its {
            return Some(format!("it was not the whole member of place {place}"));
        }
        if superblock.events < bitmap.events_cleared {
            return Some(format!(
                "it is too old: its events are {}, and marks were cleared at {}",
                superblock.events, bitmap.events_cleared
            ));
        }
        None
    }

    /// Superblocks on disk leave a device out from now on, and words don't know of it yet.
    pub(super) fn note_missed(&self, superblock: &Superblock) {
        if !matches!(superblock.role(), Role::Active(_)) {
            return;
        }
        let mut missed = self.control.missed.lock();
        let mut same = missed.take_if(|m| m.was.device_uuid == superblock.device_uuid);
        if let Some(same) = &mut same {
            same.was = superblock.clone();
        }
        let new = || Missed {
            was: superblock.clone(),
            found: None,
        };
        if let Some(now) = same.or_else(|| is_whole(superblock).then(new)) {
            *missed = Some(now);
        }
    }

    /// A device that was the member of a place is to become it again, by the bitmap.
    pub(super) fn bring_back(&self, place: usize, member: Member) {
        let name = member.name.clone();
        if let Some(missed) = &mut *self.control.missed.lock()
            && missed.is(&member.superblock)
        {
            missed.found = Some(member.superblock.clone());
        }
        *self.control.returning.lock() = Some(member);
        self.raise_back(place, &name);
    }

    /// The member at a place is there again.
    pub(super) fn raise_back(&self, place: usize, name: &str) {
        self.control.events.raise(DeviceEvent::Member {
            place: place as u32,
            name: Arc::from(name),
            change: MemberChange::Back,
        });
    }
}
