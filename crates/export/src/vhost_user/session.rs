//! A connected front end: its messages, in order, and what they make of its rings.

use super::areas::Areas;
use super::descriptors::{self, check_descriptors};
use super::inflight::{self, Inflight};
use super::memory::{MAX_BYTES, MAX_REGIONS, Regions};
use super::ring::{Kick, Ring, Surroundings};
use super::shares::Seat;
use super::stream::{Message, Received, Stream};
use super::unflushed::Marks;
use super::virtqueue::MAX_ENTRIES;
use crate::kit::FrontEnd;
use parking_lot::Mutex;
use pvblk_backend::events::Kind;
use pvblk_backend::{RateLimit, ratelimited};
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::vhost_user as proto;
use pvblk_protocol::vhost_user::{
    BACKEND_CONFIG_CHANGE, Code, ConfigHead, InflightArea, MAX_CONFIG, SingleRegion, VRING_NO_FD,
    VringAddr, VringState, flags, message, payload,
};
use pvblk_protocol::virtio::Offer;
use pvblk_sys::{Closer, PeerEvent, PeerFd, fdpass, guarded_file, is_memory};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Messages of one front end before others have their turn.
const MESSAGES_PER_TURN: usize = 32;
/// Time for them; the last one may take longer.
const TURN: Duration = Duration::from_millis(1);

/// The answer to a message.
enum Answer {
    /// With this payload.
    Payload(Vec<u8>, Option<OwnedFd>),
    /// Only if the front end asked for it.
    Done,
    /// With a failure, if the front end asked for an answer; nothing happened.
    Refused(String),
    /// When all rings that are stopping have stopped.
    Later(After),
}

/// The step that follows when rings have stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Base(u16),
    Done,
}

pub(super) struct Session {
    /// For the log: disk and front end.
    name: String,
    disk: String,
    /// Inside while a ring is at work.
    pub front: FrontEnd,
    offer: Offer,
    seat: Seat,
    stream: Stream,
    features: u64,
    protocol: u64,
    regions: Regions,
    unallocated: Gauge,
    inflight: Option<Inflight>,
    /// Bytes of an in-flight area of the front end's own that nobody allocated.
    holes: u64,
    areas: Arc<Mutex<Areas>>,
    backend: Option<OwnedFd>,
    rings: Vec<Ring>,
    waiting: Option<(After, Code, bool)>,
    ending: bool,
}

impl Session {
    pub fn new(
        name: String,
        front: FrontEnd,
        queues: u16,
        (seat, areas): (Seat, Arc<Mutex<Areas>>),
        (socket, closer): (OwnedFd, Arc<Closer>),
    ) -> Session {
        let offer = Offer::new(front.device().limits(), queues);
        let disk = front.disk().name().to_owned();
        Session {
            name,
            rings: (0..offer.queues()).map(Ring::new).collect(),
            front,
            offer,
            seat,
            stream: Stream::new(socket, closer),
            features: 0,
            protocol: 0,
            regions: Regions::default(),
            unallocated: Gauge::new(
                format!("disk {disk}: guest memory that nobody has allocated yet"),
                MemoryKind::Unallocated,
                MAX_BYTES,
            ),
            disk,
            inflight: None,
            holes: 0,
            areas,
            backend: None,
            waiting: None,
            ending: false,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// False while an answer has to wait: messages are answered in order.
    pub fn wants_messages(&self) -> bool {
        self.waiting.is_none() && !self.ending
    }

    /// Takes the messages that are there, up to a bound: others have their turn then. False when the front end closed. An error ends the session.
    pub fn readable(&mut self, clock: &dyn Fn() -> Instant) -> Result<bool, Error> {
        let start = clock();
        for _ in 0..MESSAGES_PER_TURN {
            let now = clock();
            let ready = self.wants_messages() && self.stream.has_room();
            if !ready || now.saturating_duration_since(start) >= TURN {
                break;
            }
            match self.stream.receive(now)? {
                Received::Message(message) => self.message(message)?,
                Received::Nothing => return Ok(true),
                Received::Closed => return Ok(false),
            }
        }
        Ok(true)
    }

    /// When the message that isn't there in full yet began.
    pub fn half_since(&self) -> Option<Instant> {
        self.stream.half_since()
    }

    fn message(&mut self, Message { asked, body, fds }: Message) -> Result<(), Error> {
        tracing::trace!("{}: {}", self.name, asked.code);
        match self.handle(asked.code, &body, fds) {
            Ok(Answer::Later(after)) => {
                self.waiting = Some((after, asked.code, asked.need_reply));
                self.settle()
            }
            Ok(answer) => self.answer(asked.code, asked.need_reply, answer),
            Err(e) => {
                let e = e.context(asked.code.to_string());
                // It is told, if it listens; then it is over.
                let refused = Answer::Refused(String::new());
                let _ = self.answer(asked.code, asked.need_reply, refused);
                Err(e)
            }
        }
    }

    fn answer(&mut self, code: Code, need_reply: bool, answer: Answer) -> Result<(), Error> {
        let acks = need_reply && self.protocol & proto::features::REPLY_ACK != 0;
        let (bytes, fd) = match answer {
            Answer::Payload(bytes, fd) => (bytes, fd),
            Answer::Done if acks => (0u64.to_le_bytes().to_vec(), None),
            Answer::Refused(why) => {
                if !why.is_empty() {
                    let count = RateLimit::of(&self.disk, "refused");
                    ratelimited!(warn, count, "{}: {code}: {why}", self.name);
                }
                if !acks {
                    return Ok(());
                }
                (1u64.to_le_bytes().to_vec(), None)
            }
            Answer::Done | Answer::Later(_) => return Ok(()),
        };
        let bytes = message(code as u32, flags::REPLY, &bytes);
        self.stream.send(&bytes, fd.as_ref().map(AsFd::as_fd))
    }

    /// The ring that a message names.
    fn ring(&mut self, index: u64) -> Result<&mut Ring, Error> {
        let queues = self.rings.len();
        usize::try_from(index)
            .ok()
            .and_then(|i| self.rings.get_mut(i))
            .ok_or_else(|| Error::protocol(format!("ring {index}; there are {queues}")))
    }

    fn drain(&mut self, index: u64) -> Result<(), Error> {
        self.ring(index)?;
        self.rings[index as usize].drain(&self.front);
        Ok(())
    }

    fn handle(&mut self, code: Code, body: &[u8], mut fds: Vec<PeerFd>) -> Result<Answer, Error> {
        check_descriptors(code, fds.len())?;
        self.check_negotiated(code)?;
        let u64_of = |v: u64| Ok(Answer::Payload(v.to_le_bytes().to_vec(), None));
        match code {
            Code::GetFeatures => return u64_of(self.offer.features()),
            Code::SetFeatures => {
                let features: u64 = payload(code, body)?;
                self.features = subset(features, self.offer.features())?;
            }
            Code::GetProtocolFeatures => return u64_of(proto::features::OFFERED),
            Code::SetProtocolFeatures => {
                let features: u64 = payload(code, body)?;
                self.protocol = subset(features, proto::features::OFFERED)?;
            }
            Code::SetOwner => {}
            Code::ResetOwner => {
                let front = &self.front;
                self.rings.iter_mut().for_each(|r| r.reset(front));
                return Ok(Answer::Later(After::Done));
            }
            Code::GetQueueNum => return u64_of(self.rings.len() as u64),
            Code::GetMaxMemSlots => return u64_of(MAX_REGIONS as u64),
            Code::SetMemTable => {
                let told = proto::memory_table(body)?;
                if told.len() != fds.len() {
                    return Err(descriptors::count(fds.len(), told.len()));
                }
                let mut regions = Regions::default();
                for (region, file) in told.into_iter().zip(fds) {
                    regions.add(region, file)?;
                }
                self.regions = regions;
                self.check_unallocated()?;
                self.memory_changed()?;
            }
            Code::AddMemReg => {
                let told: SingleRegion = payload(code, body)?;
                if let Some(file) = fds.pop() {
                    self.regions.add(told.region, file)?;
                }
                self.check_unallocated()?;
                self.memory_changed()?;
            }
            Code::RemMemReg => {
                let told: SingleRegion = payload(code, body)?;
                // It has no meaning; one that isn't memory could be anything.
                if let Some(file) = fds.pop() {
                    is_memory(file.as_fd()).map_err(|e| Error::os("its descriptor", e))?;
                }
                self.regions.remove(&told.region)?;
                self.check_unallocated()?;
                self.memory_changed()?;
            }
            Code::SetVringNum => {
                let told: VringState = payload(code, body)?;
                self.ring(told.index.into())?.set_entries(told.num)?;
            }
            Code::SetVringAddr => {
                let told: VringAddr = payload(code, body)?;
                self.ring(told.index.into())?.set_place(told)?;
                self.start_rings()?;
            }
            Code::SetVringBase => {
                let told: VringState = payload(code, body)?;
                self.ring(told.index.into())?.set_base(told.num)?;
            }
            Code::GetVringBase => {
                let told: VringState = payload(code, body)?;
                self.drain(told.index.into())?;
                return Ok(Answer::Later(After::Base(told.index as u16)));
            }
            Code::SetVringKick | Code::SetVringCall | Code::SetVringErr => {
                self.set_event(code, payload(code, body)?, fds.pop())?;
            }
            Code::SetVringEnable => {
                let told: VringState = payload(code, body)?;
                let ring = self.ring(told.index.into())?;
                match told.num {
                    0 => {
                        ring.enabled = Some(false);
                        self.drain(told.index.into())?;
                        return Ok(Answer::Later(After::Done));
                    }
                    1 => ring.enabled = Some(true),
                    other => return Err(Error::protocol(format!("{other} is neither 0 nor 1"))),
                }
                self.start_rings()?;
            }
            Code::SetBackendReqFd => {
                let Some(fd) = fds.pop() else {
                    return Err(descriptors::count(0, 1));
                };
                self.backend = Some(descriptors::channel(fd)?);
            }
            Code::GetConfig => return self.get_config(body),
            Code::SetConfig => return self.set_config(body),
            Code::GetInflightFd => return self.make_area(payload(code, body)?),
            Code::SetInflightFd => {
                let told: InflightArea = payload(code, body)?;
                self.check_area(&told)?;
                if let Some(file) = fds.pop() {
                    self.take_area(&told, file)?;
                }
            }
        }
        Ok(Answer::Done)
    }

    /// An area of more queues or entries than there can be would only take address space. A ring at work keeps telling its requests in the area that
    /// it was started with.
    fn check_area(&self, told: &InflightArea) -> Result<(), Error> {
        let (queues, entries) = (told.queues, told.queue_size);
        let fits = (1..=self.rings.len()).contains(&usize::from(queues));
        if !fits || entries == 0 || u32::from(entries) > MAX_ENTRIES {
            return Err(Error::protocol(format!(
                "{queues} queues of {entries} entries"
            )));
        }
        match self.rings.iter().position(Ring::is_active) {
            Some(ring) => Err(Error::protocol(format!(
                "the memory for requests in flight can't change while ring {ring} is at work"
            ))),
            None => Ok(()),
        }
    }

    /// Makes an in-flight area for the front end.
    fn make_area(&mut self, told: InflightArea) -> Result<Answer, Error> {
        self.check_area(&told)?;
        let (queues, entries) = (told.queues, told.queue_size);
        let bytes = inflight::area_bytes(queues, entries);
        let mut areas = self.areas.lock();
        // One that it had before may be emptied for it, and isn't used any more.
        self.inflight = None;
        areas.make_room(bytes)?;
        let marks = Marks::of(&**self.front.device());
        let (inflight, area, file) = Inflight::create(queues, entries, marks)?;
        let seen = guarded_file(file.as_fd(), 0, bytes);
        let kept = file.try_clone();
        let os = |e| Error::os("keeping the memory for requests in flight", e);
        areas.keep(kept.map_err(os)?, seen.map_err(os)?.id, bytes);
        self.inflight = Some(inflight);
        Ok(Answer::Payload(area.as_bytes().to_vec(), Some(file)))
    }

    /// Takes over an in-flight area that the front end has.
    fn take_area(&mut self, told: &InflightArea, file: PeerFd) -> Result<(), Error> {
        let seen = guarded_file(file.as_fd(), told.offset, told.size)
            .map_err(|e| Error::caused(ErrorKind::Protocol, "memory for requests in flight", e))?;
        let most = inflight::area_bytes(told.queues, told.queue_size);
        self.holes = match self.areas.lock().uses(seen.id) {
            true => 0,
            false => seen.unallocated.min(most),
        };
        self.check_unallocated()?;
        let marks = Marks::of(&**self.front.device());
        let inflight = Inflight::from_peer(told, file, marks)?;
        if inflight.losses().is_some() {
            ratelimited!(
                warn,
                RateLimit::of(&self.disk, "losses"),
                "{}: a server before this one took writes with it that were answered and not flushed; the guest's next flush fails, so that it knows",
                self.name
            );
        }
        self.inflight = Some(inflight);
        Ok(())
    }

    /// Messages of features that were not taken are refused.
    fn check_negotiated(&self, code: Code) -> Result<(), Error> {
        use proto::features as f;
        let (needs, name) = match code {
            Code::GetQueueNum => (f::MQ, "MQ"),
            Code::SetBackendReqFd => (f::BACKEND_REQ, "BACKEND_REQ"),
            Code::GetConfig | Code::SetConfig => (f::CONFIG, "CONFIG"),
            Code::GetInflightFd | Code::SetInflightFd => (f::INFLIGHT_SHMFD, "INFLIGHT_SHMFD"),
            Code::GetMaxMemSlots | Code::AddMemReg | Code::RemMemReg => {
                (f::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")
            }
            _ => return Ok(()),
        };
        match self.protocol & needs {
            0 => Err(Error::protocol(format!("{name} was not negotiated"))),
            _ => Ok(()),
        }
    }

    fn set_event(&mut self, code: Code, told: u64, fd: Option<PeerFd>) -> Result<(), Error> {
        let index = told & 0xff;
        if told & !(VRING_NO_FD | 0xff) != 0 || (told & VRING_NO_FD != 0) == fd.is_some() {
            return Err(Error::protocol(format!(
                "{told:#x} with {} descriptors",
                u8::from(fd.is_some())
            )));
        }
        let event =
            |fd| PeerEvent::from_peer(fd).map_err(|e| Error::os(format!("ring {index}"), e));
        let event = fd.map(event).transpose()?;
        let ring = self.ring(index)?;
        match code {
            Code::SetVringCall => ring.shared.set_call(event),
            Code::SetVringErr => ring.set_err(event),
            _ => {
                ring.set_kick(event.map_or(Kick::Poll, Kick::Event))?;
                self.start_rings()?;
            }
        }
        Ok(())
    }

    fn get_config(&self, body: &[u8]) -> Result<Answer, Error> {
        let (head, _) = config_head(body)?;
        let space = self.offer.config(self.front.sectors());
        let range = head.offset as usize..(head.offset + head.size) as usize;
        let bytes = [head.as_bytes(), &space[range]].concat();
        Ok(Answer::Payload(bytes, None))
    }

    /// Nothing in the configuration space can be written: the write cache's switch, which could be, isn't offered.
    fn set_config(&self, body: &[u8]) -> Result<Answer, Error> {
        let (head, bytes) = config_head(body)?;
        let space = self.offer.config(self.front.sectors());
        let range = head.offset as usize..(head.offset + head.size) as usize;
        if bytes == &space[range] {
            return Ok(Answer::Done);
        }
        Ok(Answer::Refused(
            "nothing in this configuration space can be changed".into(),
        ))
    }

    /// Starts all rings that can start now. Those that can't because of the disk's fence are tried again when it opens.
    pub fn start_rings(&mut self) -> Result<(), Error> {
        let around = Surroundings {
            disk: &self.disk,
            name: &self.name,
            offer: &self.offer,
            features: self.features,
            regions: &self.regions,
            seat: &self.seat,
            inflight: self.inflight.as_ref(),
        };
        let (rings, front) = (&mut self.rings, &mut self.front);
        rings.iter_mut().try_for_each(|r| r.start(&around, front))
    }

    /// Puts the guest's memory that nobody has allocated on the bill, as far as that is allowed.
    fn check_unallocated(&mut self) -> Result<(), Error> {
        let bytes = self.regions.unallocated() + self.holes;
        self.unallocated.set(bytes);
        self.areas.lock().set_own(bytes).map_err(|most| {
            Error::new(
                ErrorKind::Exhausted,
                format!(
                    "{} MiB of the guest's memory are not allocated yet; the server's control group pays for what the server touches first, and {} MiB are allowed for all guests: preallocate the guest's memory (QEMU: prealloc=on), or see --max-guest-unallocated",
                    bytes >> 20,
                    most >> 20
                ),
            )
        })
    }

    fn memory_changed(&mut self) -> Result<(), Error> {
        let (disk, regions, seat) = (&self.disk, &self.regions, &self.seat);
        let mut rings = self.rings.iter();
        rings.try_for_each(|r| r.set_memory(disk, regions, seat))?;
        self.start_rings()
    }

    /// The queue of a ring is gone. An error ends the session.
    pub fn ring_ended(
        &mut self,
        index: u16,
        generation: u64,
        reason: Option<String>,
    ) -> Result<(), Error> {
        let Some(ring) = self.rings.get_mut(usize::from(index)) else {
            return Ok(());
        };
        if ring.generation != generation {
            return Ok(());
        }
        ring.ended(reason.is_some());
        if let Some(reason) = reason {
            ratelimited!(warn, RateLimit::of(&self.disk, "queue ended"), "{reason}");
            self.front.tell(Kind::PeerBroken, &reason);
        }
        if !self.rings.iter().any(Ring::is_active) {
            self.front.leave();
        }
        self.settle()
    }

    /// Answers what waited for rings, if they have stopped.
    fn settle(&mut self) -> Result<(), Error> {
        let Some((after, code, need_reply)) = self.waiting else {
            return Ok(());
        };
        let answer = match after {
            After::Base(index) => {
                let Some(ring) = self.rings.get_mut(usize::from(index)) else {
                    return Ok(());
                };
                if ring.is_active() {
                    return Ok(());
                }
                let num = ring.take_base().into();
                let state = VringState {
                    index: index.into(),
                    num,
                };
                Answer::Payload(state.as_bytes().to_vec(), None)
            }
            // Others may be at work; those that were told to stop are not, or are broken.
            After::Done if self.rings.iter().any(Ring::is_ending) => return Ok(()),
            After::Done => Answer::Done,
        };
        self.waiting = None;
        self.answer(code, need_reply, answer)
    }

    /// Tells the front end that the configuration space is another.
    pub fn config_changed(&self) {
        // It asks for the size itself; the next change is another event.
        self.front.sectors();
        if let Some(backend) = &self.backend {
            let bytes = message(BACKEND_CONFIG_CHANGE, 0, &[]);
            if let Err(e) = fdpass::send(backend.as_fd(), &bytes, &[]) {
                let name = &self.name;
                ratelimited!(
                    warn,
                    RateLimit::of(&self.disk, "sizes"),
                    "{name}: telling the new size: {e}"
                );
            }
        }
    }

    /// Stops all rings; true when they have stopped, so that the session can be dropped. To be asked again after [`Event::Left`](crate::kit::Event::Left).
    /// Requests that a server before us left and that the rings haven't taken yet stay for the next one.
    pub fn end(&mut self) -> bool {
        self.ending = true;
        self.front.leave()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.areas.lock().set_own(0);
    }
}

fn subset(taken: u64, offered: u64) -> Result<u64, Error> {
    match taken & !offered {
        0 => Ok(taken),
        more => Err(Error::protocol(format!(
            "features {more:#x} were not offered"
        ))),
    }
}

fn config_head(body: &[u8]) -> Result<(ConfigHead, &[u8]), Error> {
    let code = Code::GetConfig;
    let split = body.split_at_checked(size_of::<ConfigHead>());
    let (head, bytes) = split.ok_or_else(|| Error::protocol("its payload is cut off"))?;
    let head: ConfigHead = payload(code, head)?;
    let end = head.offset.checked_add(head.size);
    if head.size == 0 || end.is_none_or(|e| e > MAX_CONFIG) || bytes.len() != head.size as usize {
        return Err(Error::protocol(format!(
            "{} bytes at {} of a configuration space of {MAX_CONFIG}, with {} bytes",
            head.size,
            head.offset,
            bytes.len()
        )));
    }
    Ok((head, bytes))
}
