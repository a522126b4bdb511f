//! The front end's half of the handshake.

use super::front_keys::SizeKey;
use super::number::{quote, sentence};
use super::offers::one_page;
use super::{
    Change, FrontKeys, MAX_QUEUES, QueueKeys, Store, XenbusState, parse_offers, parse_properties,
    parse_sectors,
};
use pvblk_block::{Error, ErrorKind};
use pvblk_frontend::DiskProperties;
use pvblk_ring::{Abi, RingSize};

/// Which front end to play; the default is a current Linux one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontPersonality {
    /// Doesn't know multi-queue keys.
    pub ignores_multi_queue: bool,
    /// Doesn't know rings of several pages.
    pub ignores_multi_page: bool,
    /// Goes to Connected as soon as its keys are written, as MirageOS does.
    pub skips_initialised: bool,
    /// Writes `num-ring-pages` for `ring-page-order`, as Red Hat's and Amazon's old kernels did.
    pub deprecated_ring_pages: bool,
}

/// What a front end would like, if the back end offers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontWishes {
    /// Queues, 1 to 64.
    pub queues: u32,
    /// Size of each ring.
    pub ring: RingSize,
    /// Keep grants for the life of the connection.
    pub persistent: bool,
    /// Which front end to play.
    pub personality: FrontPersonality,
}

/// The resources behind a front end's handshake.
pub trait FrontResources {
    /// Makes `queues` rings and event channels, grants the ring pages, and returns references and ports in order of the queues.
    fn allocate(&mut self, queues: usize, ring: RingSize) -> Result<Vec<QueueKeys>, Error>;
}

/// What a step found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrontEvent {
    /// The disk can be used.
    Connected(DiskProperties),
    /// The disk has this many 512-byte sectors now.
    Resized {
        /// New capacity in 512-byte sectors.
        sectors: u64,
    },
    /// The back end wants to end: finish the requests in flight, then close.
    Closing {
        /// The back end's reason, if it gave one.
        reason: Option<String>,
    },
    /// The back end uses nothing of ours any more.
    Closed {
        /// The back end's reason, if it gave one.
        reason: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    /// Waits for the back end's InitWait.
    Offers,
    /// Keys are published; waits for the back end's Connected.
    Properties {
        max_indirect: u16,
    },
    Connected {
        sectors: u64,
        sector_size: u32,
    },
    /// The back end ends; our requests may still be in flight.
    PeerClosing,
    /// We have told the back end that we end.
    Closing,
    /// We have told the back end that nothing is in flight.
    Closed,
}

/// One front end's connection to its disk.
///
/// A step machine: [`FrontendNegotiation::peer_changed`] after every change of the back end's keys. The
/// back end isn't trusted either. An error ends the connection; it says what the back end did.
#[derive(Debug)]
pub struct FrontendNegotiation {
    wishes: FrontWishes,
    phase: Phase,
}

impl FrontendNegotiation {
    /// A front end that has published nothing yet.
    pub fn new(wishes: FrontWishes) -> FrontendNegotiation {
        FrontendNegotiation {
            wishes,
            phase: Phase::Start,
        }
    }

    /// Our state, as published.
    pub fn state(&self) -> XenbusState {
        match self.phase {
            Phase::Start | Phase::Offers => XenbusState::Initialising,
            Phase::Properties { .. } if self.wishes.personality.skips_initialised => {
                XenbusState::Connected
            }
            Phase::Properties { .. } => XenbusState::Initialised,
            Phase::Connected { .. } | Phase::PeerClosing => XenbusState::Connected,
            Phase::Closing => XenbusState::Closing,
            Phase::Closed => XenbusState::Closed,
        }
    }

    /// Starts (or starts anew) and waits for the back end's offers: state Initialising.
    /// Keys of an earlier connection that the next one may not write are removed, since a back end would read them.
    pub fn start(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        let stale = [
            "ring-page-order",
            "num-ring-pages",
            "multi-queue-num-queues",
        ];
        let keys = stale.map(Change::remove).to_vec();
        self.enter(store, Phase::Offers, keys)
    }

    /// Looks at the back end's keys and goes as far as they allow.
    pub fn peer_changed(
        &mut self,
        store: &mut dyn Store,
        resources: &mut dyn FrontResources,
    ) -> Result<Option<FrontEvent>, Error> {
        let back = match store.read("state") {
            None => XenbusState::Unknown,
            Some(text) => XenbusState::parse(&text).ok_or_else(|| {
                Error::protocol(format!("the back end's state is {}", quote(&text)))
            })?,
        };
        let reason = store.read("error").map(|e| sentence(&e));
        match (self.phase, back) {
            (Phase::Start, _) => Ok(None),
            (Phase::Offers | Phase::Properties { .. }, XenbusState::Closing) => {
                Err(refusal(reason))
            }
            (Phase::Properties { .. }, XenbusState::Closed) => Err(refusal(reason)),
            (Phase::Offers, XenbusState::InitWait) => {
                self.publish(store, resources)?;
                Ok(None)
            }
            // An earlier connection of ours may still be ending.
            (
                Phase::Offers,
                XenbusState::Unknown
                | XenbusState::Initialising
                | XenbusState::Connected
                | XenbusState::Closed,
            ) => Ok(None),
            (
                Phase::Properties { .. },
                XenbusState::Initialising | XenbusState::InitWait | XenbusState::Initialised,
            ) => Ok(None),
            (Phase::Properties { max_indirect }, XenbusState::Connected) => {
                self.connect(store, max_indirect).map(Some)
            }
            (
                Phase::Connected {
                    sectors,
                    sector_size,
                },
                XenbusState::Connected,
            ) => {
                let now = parse_sectors(&|k| store.read(k), sector_size)?;
                if now == sectors {
                    return Ok(None);
                }
                self.phase = Phase::Connected {
                    sectors: now,
                    sector_size,
                };
                Ok(Some(FrontEvent::Resized { sectors: now }))
            }
            (Phase::Connected { .. }, XenbusState::Closing) => {
                self.phase = Phase::PeerClosing;
                Ok(Some(FrontEvent::Closing { reason }))
            }
            (
                Phase::Connected { .. } | Phase::PeerClosing | Phase::Closing | Phase::Closed,
                XenbusState::Closed | XenbusState::Unknown,
            ) => Ok(Some(FrontEvent::Closed { reason })),
            (Phase::PeerClosing | Phase::Closing | Phase::Closed, _) => Ok(None),
            (_, other) => Err(Error::protocol(format!(
                "the back end went to state {other} while we are {}",
                self.state()
            ))),
        }
    }

    /// Tells the back end that we end: state Closing. Then finish what is in flight and call [`FrontendNegotiation::finish_close`].
    pub fn begin_close(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        match self.phase {
            Phase::Closing | Phase::Closed => Ok(()),
            _ => self.enter(store, Phase::Closing, Vec::new()),
        }
    }

    /// Tells the back end that nothing is in flight and its queues may end: state Closed.
    pub fn finish_close(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        match self.phase {
            Phase::Closed => Ok(()),
            _ => self.enter(store, Phase::Closed, Vec::new()),
        }
    }

    fn publish(
        &mut self,
        store: &mut dyn Store,
        resources: &mut dyn FrontResources,
    ) -> Result<(), Error> {
        let offered = parse_offers(&|key| store.read(key))?;
        let FrontWishes {
            queues,
            ring,
            persistent,
            personality,
        } = self.wishes;
        let queues = if personality.ignores_multi_queue {
            1
        } else {
            queues.clamp(1, MAX_QUEUES.min(offered.max_queues))
        };
        let ring = if personality.ignores_multi_page {
            one_page()
        } else {
            ring.min(offered.max_ring)
        };
        let keys = FrontKeys {
            queues: resources.allocate(queues as usize, ring)?,
            ring,
            abi: Abi::default(),
            persistent,
        };
        let size_key = if personality.deprecated_ring_pages {
            SizeKey::DeprecatedPages
        } else {
            SizeKey::Order
        };
        let phase = Phase::Properties {
            max_indirect: offered.max_indirect_segments,
        };
        self.enter(store, phase, keys.changes(size_key))
    }

    fn connect(&mut self, store: &mut dyn Store, max_indirect: u16) -> Result<FrontEvent, Error> {
        let mut disk = parse_properties(&|key| store.read(key))?;
        disk.persistent &= self.wishes.persistent;
        disk.max_indirect_segments = max_indirect;
        let phase = Phase::Connected {
            sectors: disk.sectors,
            sector_size: disk.sector_size,
        };
        self.enter(store, phase, Vec::new())?;
        Ok(FrontEvent::Connected(disk))
    }

    fn enter(
        &mut self,
        store: &mut dyn Store,
        phase: Phase,
        mut keys: Vec<Change>,
    ) -> Result<(), Error> {
        self.phase = phase;
        keys.push(Change::set("state", self.state().number()));
        store.write(&keys)
    }
}

fn refusal(reason: Option<String>) -> Error {
    Error::new(
        ErrorKind::Disconnected,
        format!(
            "the back end ended the handshake: {}",
            reason.as_deref().unwrap_or("it gave no reason")
        ),
    )
}
