//! A front end on rings, on the back end's side, whatever the handshake runs over: its queues, and what other threads tell of it.

use super::{BackendNegotiation, Connector};
use crate::kit::{Event, FrontEnd, whole_sectors};
use pvblk_backend::events::{HealthState, Kind};
use pvblk_backend::{BlkifQueueParts, BlkifSource, RateLimit, ratelimited};
use pvblk_block::{BlockDevice, Error};
use pvblk_protocol::xenbus::number::sentence;
use pvblk_protocol::xenbus::{BackendOffers, DiskProperties, Store, XenbusState};

/// A connector whose queues are those of a [`Serving`].
pub(crate) trait Serves: Connector {
    /// The queues of this connector.
    fn serving(&mut self) -> &mut Serving;

    /// Name in log lines.
    fn name(&self) -> String;
}

/// One handshake with one front end, by a store and a connector of its transport.
pub(crate) struct Handshake<S, C> {
    pub negotiation: BackendNegotiation,
    pub store: S,
    pub connector: C,
}

impl<S: Store, C: Serves> Handshake<S, C> {
    pub fn new(store: S, mut connector: C) -> Handshake<S, C> {
        Handshake {
            negotiation: BackendNegotiation::new(connector.serving().offers, true),
            store,
            connector,
        }
    }

    pub fn state(&self) -> XenbusState {
        self.negotiation.state()
    }

    /// See [`BackendNegotiation::start`].
    pub fn start(&mut self) -> Result<(), Error> {
        self.negotiation.start(&mut self.store)
    }

    /// See [`BackendNegotiation::peer_changed`].
    pub fn peer_changed(&mut self) -> Result<(), Error> {
        self.negotiation
            .peer_changed(&mut self.store, &mut self.connector)
    }

    /// See [`BackendNegotiation::close`].
    pub fn close(&mut self) -> Result<(), Error> {
        self.negotiation.close(&mut self.store, &mut self.connector)
    }

    /// See [`BackendNegotiation::break_off`].
    pub fn break_off(&mut self, why: &str) -> Result<(), Error> {
        self.negotiation
            .break_off(&mut self.store, &mut self.connector, why)
    }

    /// Turns an event from another thread into a step of the handshake.
    pub fn event(&mut self, event: Event) -> Result<(), Error> {
        let front = &mut self.connector.serving().front;
        match event {
            Event::QueueEnded {
                generation,
                reason: Some(reason),
                ..
            } if front.is_inside() && generation == front.generation() => {
                self.break_off(&sentence(&reason))
            }
            Event::Left { generation } if front.left(generation) => self
                .negotiation
                .drained(&mut self.store, &mut self.connector),
            Event::Resized => {
                let sectors = front.sectors();
                self.negotiation.resize(&mut self.store, sectors)
            }
            Event::DeviceGone if front.is_at_work() => self.break_off("the disk's device is gone"),
            Event::FenceOpen => self.peer_changed(),
            Event::QueueEnded { .. }
            | Event::Left { .. }
            | Event::DeviceGone
            | Event::Removed
            | Event::ThreadEnded => Ok(()),
        }
    }
}

/// A connector's part that doesn't depend on the transport.
pub(crate) struct Serving {
    /// The disk's name, for logs.
    pub disk: String,
    /// The front end's name, for logs.
    pub peer: String,
    pub front: FrontEnd,
    /// Offers to the front end.
    pub offers: BackendOffers,
}

impl Serving {
    /// Implements [`Connector::refuse`]; `name` is the connector's.
    pub fn refuse(&self, name: &str, why: &str) {
        ratelimited!(warn, RateLimit::of(&self.disk, "refused"), "{name}: {why}");
        if self.front.disk().health().state() == HealthState::Failed {
            // That was told, and is not the front end's fault.
            return;
        }
        self.front.tell(
            match self.front.is_inside() {
                true => Kind::PeerBroken,
                false => Kind::PeerRefused,
            },
            why,
        );
    }

    /// Logs that a connection was made.
    pub fn connected(&self, what: std::fmt::Arguments<'_>) {
        ratelimited!(info, RateLimit::of(&self.disk, "connected"), "{what}");
    }

    /// Serves the queues of a front end that has entered the disk; returns the disk as the front end is to see it. After an error those that were served
    /// already are ending.
    pub fn attach(&mut self, queues: Vec<BlkifQueueParts>) -> Result<DiskProperties, Error> {
        let generation = self.front.generation();
        for (i, parts) in (0..).zip(queues) {
            let source = Box::new(BlkifSource::new(parts));
            if let Err(e) = self.front.serve(i, generation, source) {
                self.front.leave();
                return Err(e);
            }
        }
        Ok(properties(self.front.device().as_ref(), &self.offers))
    }
}

/// Describes a device by blkif's properties. Write-through devices offer no flush: every completed write is stable
/// already.
fn properties(device: &dyn BlockDevice, offers: &BackendOffers) -> DiskProperties {
    let (limits, incarnation) = (device.limits(), device.incarnation());
    let writable = !limits.read_only;
    let discard = writable && limits.discard_granularity_bytes > 0;
    DiskProperties {
        sectors: whole_sectors(device),
        sector_size: limits.logical_sector_bytes,
        physical_sector_size: limits.physical_sector_bytes,
        read_only: limits.read_only,
        flush: writable && limits.volatile_cache,
        barrier: writable && offers.barrier,
        discard,
        discard_secure: false,
        discard_granularity: if discard {
            limits.discard_granularity_bytes
        } else {
            0
        },
        persistent: offers.persistent,
        max_indirect_segments: offers.indirect_limit(),
        cache_mark: incarnation.cache,
        contents_mark: incarnation.contents,
    }
}
