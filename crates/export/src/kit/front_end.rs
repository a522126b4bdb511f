//! [`FrontEnd`]: one front end's use of a disk, whatever it speaks.

use super::inbox::{Event, Inbox};
use pvblk_backend::events::{EventLog, Kind, Peer, Presence};
use pvblk_backend::{
    Attachment, Disk, FenceOpened, Key, RateLimit, RequestSource, Service, SourceEnd, ratelimited,
};
use pvblk_block::{BlockDevice, DeviceEvent, Error, ErrorKind, Subscription};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

enum Use {
    /// It isn't let in, or has left.
    Outside,
    Inside(Attachment, Presence),
    /// It has left, and requests of it are at work.
    Leaving,
}

/// A front end of a disk, inside or outside of it, and what other threads tell of it: events go to an inbox, with the front end's number. Dropping it
/// while it is inside is leaving without an event.
///
/// ```text
///  outside ──enter, while the disk's fence is open──▶ inside ──leave──▶ leaving ──Event::Left──▶ outside
/// ```
pub(crate) struct FrontEnd {
    service: Arc<Service>,
    disk: Arc<Disk>,
    inbox: Arc<Inbox>,
    id: u64,
    /// Its name for the disk's other users.
    name: String,
    peer: Peer,
    opened: FenceOpened,
    used: Use,
    generation: u64,
    /// An event about a resize is in the inbox.
    resize_noted: Arc<AtomicBool>,
    _events: Subscription,
}

impl FrontEnd {
    /// Front end `id` of a server with this inbox, outside.
    pub fn new(
        service: &Arc<Service>,
        disk: Arc<Disk>,
        inbox: &Arc<Inbox>,
        id: u64,
        name: String,
        peer: Peer,
    ) -> FrontEnd {
        let resize_noted = Arc::default();
        let events = subscribe(&disk, inbox, id, Arc::clone(&resize_noted));
        if disk.users().is_closed() {
            // Nobody told the subscription.
            inbox.put(id, Event::Removed);
        }
        let told = Arc::clone(inbox);
        FrontEnd {
            service: Arc::clone(service),
            disk,
            inbox: Arc::clone(inbox),
            id,
            name,
            peer,
            opened: Arc::new(move || told.put(id, Event::FenceOpen)),
            used: Use::Outside,
            generation: 0,
            resize_noted,
            _events: events,
        }
    }

    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        self.disk.device()
    }

    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// True if it may enter now: no requests of a front end that is gone are at work on the disk. Otherwise [`Event::FenceOpen`] follows.
    pub fn may_enter(&self) -> bool {
        self.disk.users().fence_is_open(&self.opened)
    }

    /// Enters the disk, if it isn't inside yet; false if it may not now: then [`Event::FenceOpen`] follows. Errors if the disk is exclusive and used.
    pub fn enter(&mut self) -> Result<bool, Error> {
        match self.used {
            Use::Inside(..) => Ok(true),
            Use::Leaving => Ok(false),
            Use::Outside => {
                let entered = self.service.enter(&self.disk, &self.name, &self.opened)?;
                let Some(attachment) = entered else {
                    return Ok(false);
                };
                self.generation += 1;
                let (events, disk) = (self.service.events(), self.disk.name());
                let presence = Presence::begin(events, disk, &self.name, &self.peer);
                self.used = Use::Inside(attachment, presence);
                Ok(true)
            }
        }
    }

    /// Serves one queue of a front end that is inside; [`Event::QueueEnded`] follows, with these numbers. After an error it doesn't.
    pub fn serve(
        &mut self,
        queue: u16,
        generation: u64,
        source: Box<dyn RequestSource>,
    ) -> Result<Key, Error> {
        let Use::Inside(attachment, _) = &mut self.used else {
            return Err(Error::new(ErrorKind::Disconnected, "it has left the disk"));
        };
        let (inbox, id) = (Arc::clone(&self.inbox), self.id);
        attachment.serve(source, move |end| {
            let reason = match end {
                SourceEnd::Closed => None,
                SourceEnd::Broken(e) => Some(e.to_string()),
            };
            let ended = Event::QueueEnded {
                queue,
                generation,
                reason,
            };
            inbox.put(id, ended);
        })
    }

    /// Stops one queue after what it has outstanding.
    pub fn stop(&self, key: Key) {
        if let Use::Inside(attachment, _) = &self.used {
            attachment.stop(key);
        }
    }

    /// Leaves: its queues stop after what they have outstanding. True if nothing of it is at work any more, else [`Event::Left`] follows. May be called
    /// any number of times.
    pub fn leave(&mut self) -> bool {
        match std::mem::replace(&mut self.used, Use::Leaving) {
            Use::Leaving => return false,
            Use::Outside => {}
            Use::Inside(attachment, _left) => {
                let (inbox, id) = (Arc::clone(&self.inbox), self.id);
                let generation = self.generation;
                if !attachment.leave(move || inbox.put(id, Event::Left { generation })) {
                    return false;
                }
            }
        }
        self.used = Use::Outside;
        true
    }

    /// Takes [`Event::Left`]; true if it is about this use of the disk.
    pub fn left(&mut self, generation: u64) -> bool {
        let ours = self.is_leaving() && generation == self.generation;
        if ours {
            self.used = Use::Outside;
        }
        ours
    }

    /// Tells one use of the disk from the next.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// True while it is inside, or requests of it are at work.
    pub fn is_at_work(&self) -> bool {
        !matches!(self.used, Use::Outside)
    }

    pub fn is_leaving(&self) -> bool {
        matches!(self.used, Use::Leaving)
    }

    pub fn is_inside(&self) -> bool {
        matches!(self.used, Use::Inside(..))
    }

    /// The device's size in whole logical sectors, in units of 512 bytes. Resizes from now on are told again.
    pub fn sectors(&self) -> u64 {
        self.resize_noted.store(false, Ordering::Release);
        whole_sectors(self.device().as_ref())
    }

    /// The front end as the system knows it.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Tells that it broke its protocol, or why it isn't let in.
    pub fn tell(&self, kind: Kind, why: &str) {
        let events = self.service.events();
        self.peer.tell(events, kind, Some(self.disk.name()), why);
    }

    /// Logs why the connection of a front end ends, under the name `name`, and tells of it unless it left in order. `disk`: as far
    /// as it has named one that there is.
    pub fn log_end(events: &EventLog, disk: Option<&str>, peer: &Peer, name: &str, why: &Error) {
        let place = disk.unwrap_or("no disk");
        match why.kind() {
            ErrorKind::Disconnected => {
                ratelimited!(info, RateLimit::of(place, "ended"), "{name}: {why}")
            }
            kind => {
                ratelimited!(warn, RateLimit::of(place, "broken"), "{name}: {why}");
                let kind = match kind {
                    ErrorKind::Protocol => Kind::PeerBroken,
                    _ => Kind::PeerRefused,
                };
                peer.tell(events, kind, disk, &why.to_string());
            }
        }
    }
}

fn subscribe(disk: &Disk, inbox: &Arc<Inbox>, id: u64, noted: Arc<AtomicBool>) -> Subscription {
    let inbox = Arc::clone(inbox);
    let (gone, removed) = (AtomicBool::new(false), AtomicBool::new(false));
    let users = Arc::clone(disk.users());
    disk.device().events().subscribe(move |event| {
        let (told, event) = match event {
            DeviceEvent::Resized { .. } => (&*noted, Event::Resized),
            DeviceEvent::Gone if users.is_closed() => (&removed, Event::Removed),
            DeviceEvent::Gone => (&gone, Event::DeviceGone),
            DeviceEvent::LockLost { .. }
            | DeviceEvent::Member { .. }
            | DeviceEvent::Condition(_) => return,
        };
        if !told.swap(true, Ordering::AcqRel) {
            inbox.put(id, event);
        }
    })
}

/// A device's size in whole logical sectors, in 512-byte sectors.
pub(crate) fn whole_sectors(device: &dyn BlockDevice) -> u64 {
    let unit = device.limits().sectors_per_block().max(1);
    let sectors = device.capacity_sectors();
    sectors - sectors % unit
}
