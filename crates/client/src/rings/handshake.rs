//! The front end's half of the handshake.

use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::blkif::{Abi, RingSize};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::RingSizeKey;
use pvblk_protocol::xenbus::number::{quote, sentence};
use pvblk_protocol::xenbus::one_page;
use pvblk_protocol::xenbus::{
    Change, FrontKeys, MAX_QUEUES, QueueKeys, Store, XenbusState, parse_offers, parse_properties,
    parse_sectors,
};

/// Behaviour of the front end in the handshake; the default is a current Linux's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontPersonality {
    /// Ignores multi-queue keys.
    pub ignores_multi_queue: bool,
    /// Ignores keys for rings of several pages.
    pub ignores_multi_page: bool,
    /// Goes to Connected as soon as its keys are written, as MirageOS does.
    pub skips_initialised: bool,
    /// Writes `num-ring-pages` instead of `ring-page-order`, as Red Hat's and Amazon's old kernels did.
    pub deprecated_ring_pages: bool,
}

/// Upper limits of a front end; the back end may offer less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontWishes {
    /// Queues, 1 to 64.
    pub queues: u32,
    /// Size of each ring.
    pub ring: RingSize,
    /// Use persistent grants.
    pub persistent: bool,
    /// Behaviour in the handshake.
    pub personality: FrontPersonality,
}

/// Resources of a front end's handshake.
pub trait FrontResources {
    /// Creates `queues` rings and event channels, grants the ring pages, and returns references and ports in order of
    /// the queues.
    fn allocate(&mut self, queues: usize, ring: RingSize) -> Result<Vec<QueueKeys>, Error>;
}

/// A change that the back end published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrontEvent {
    /// The disk can be used.
    Connected(DiskProperties),
    /// The disk's capacity changed.
    Resized {
        /// New capacity in 512-byte sectors.
        sectors: u64,
    },
    /// The back end asks to end: finish the requests in flight, then close.
    Closing {
        /// The back end's reason, if it gave one.
        reason: Option<String>,
    },
    /// The back end doesn't use our memory any more.
    Closed {
        /// The back end's reason, if it gave one.
        reason: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrontendPhase {
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
    /// Closing is published.
    Closing,
    /// Closed is published: no request is in flight.
    Closed,
}

/// One front end's connection to its disk.
///
/// A step machine: call [`FrontendNegotiation::peer_changed`] after every change of the back end's keys. The back end
/// isn't trusted either. An error ends the connection; its text says what the back end did.
#[derive(Debug)]
pub struct FrontendNegotiation {
    wishes: FrontWishes,
    phase: FrontendPhase,
}

impl FrontendNegotiation {
    /// A front end that has published nothing yet.
    pub fn new(wishes: FrontWishes) -> FrontendNegotiation {
        FrontendNegotiation {
            wishes,
            phase: FrontendPhase::Start,
        }
    }

    /// The published state.
    pub fn state(&self) -> XenbusState {
        match self.phase {
            FrontendPhase::Start | FrontendPhase::Offers => XenbusState::Initialising,
            FrontendPhase::Properties { .. } if self.wishes.personality.skips_initialised => {
                XenbusState::Connected
            }
            FrontendPhase::Properties { .. } => XenbusState::Initialised,
            FrontendPhase::Connected { .. } | FrontendPhase::PeerClosing => XenbusState::Connected,
            FrontendPhase::Closing => XenbusState::Closing,
            FrontendPhase::Closed => XenbusState::Closed,
        }
    }

    /// Starts (again) and waits for the back end's offers: state Initialising. Removes keys of an earlier connection
    /// that the next one may not write, since the back end would read them.
    pub fn start(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        let stale = [
            "ring-page-order",
            "num-ring-pages",
            "multi-queue-num-queues",
        ];
        let keys = stale.map(Change::remove).to_vec();
        self.enter(store, FrontendPhase::Offers, keys)
    }

    /// Reads the back end's keys and goes as far as they allow.
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
            (FrontendPhase::Start, _) => Ok(None),
            (FrontendPhase::Offers | FrontendPhase::Properties { .. }, XenbusState::Closing) => {
                Err(refusal(reason))
            }
            (FrontendPhase::Properties { .. }, XenbusState::Closed) => Err(refusal(reason)),
            (FrontendPhase::Offers, XenbusState::InitWait) => {
                self.publish(store, resources)?;
                Ok(None)
            }
            // An earlier connection may still be ending.
            (
                FrontendPhase::Offers,
                XenbusState::Unknown
                | XenbusState::Initialising
                | XenbusState::Connected
                | XenbusState::Closed,
            ) => Ok(None),
            (
                FrontendPhase::Properties { .. },
                XenbusState::Initialising | XenbusState::InitWait | XenbusState::Initialised,
            ) => Ok(None),
            (FrontendPhase::Properties { max_indirect }, XenbusState::Connected) => {
                self.connect(store, max_indirect).map(Some)
            }
            (
                FrontendPhase::Connected {
                    sectors,
                    sector_size,
                },
                XenbusState::Connected,
            ) => {
                let now = parse_sectors(&|k| store.read(k), sector_size)?;
                if now == sectors {
                    return Ok(None);
                }
                self.phase = FrontendPhase::Connected {
                    sectors: now,
                    sector_size,
                };
                Ok(Some(FrontEvent::Resized { sectors: now }))
            }
            (FrontendPhase::Connected { .. }, XenbusState::Closing) => {
                self.phase = FrontendPhase::PeerClosing;
                Ok(Some(FrontEvent::Closing { reason }))
            }
            (
                FrontendPhase::Connected { .. }
                | FrontendPhase::PeerClosing
                | FrontendPhase::Closing
                | FrontendPhase::Closed,
                XenbusState::Closed | XenbusState::Unknown,
            ) => Ok(Some(FrontEvent::Closed { reason })),
            (FrontendPhase::PeerClosing | FrontendPhase::Closing | FrontendPhase::Closed, _) => {
                Ok(None)
            }
            (_, other) => Err(Error::protocol(format!(
                "the back end went to state {other} while the front end is {}",
                self.state()
            ))),
        }
    }

    /// Publishes Closing. Then finish the requests in flight and call [`FrontendNegotiation::finish_close`].
    pub fn begin_close(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        match self.phase {
            FrontendPhase::Closing | FrontendPhase::Closed => Ok(()),
            _ => self.enter(store, FrontendPhase::Closing, Vec::new()),
        }
    }

    /// Publishes Closed: no request is in flight, and the back end's queues may end.
    pub fn finish_close(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        match self.phase {
            FrontendPhase::Closed => Ok(()),
            _ => self.enter(store, FrontendPhase::Closed, Vec::new()),
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
            RingSizeKey::DeprecatedPages
        } else {
            RingSizeKey::Order
        };
        let phase = FrontendPhase::Properties {
            max_indirect: offered.max_indirect_segments,
        };
        self.enter(store, phase, keys.changes(size_key))
    }

    fn connect(&mut self, store: &mut dyn Store, max_indirect: u16) -> Result<FrontEvent, Error> {
        let mut disk = parse_properties(&|key| store.read(key))?;
        disk.persistent &= self.wishes.persistent;
        disk.max_indirect_segments = max_indirect;
        let phase = FrontendPhase::Connected {
            sectors: disk.sectors,
            sector_size: disk.sector_size,
        };
        self.enter(store, phase, Vec::new())?;
        Ok(FrontEvent::Connected(disk))
    }

    fn enter(
        &mut self,
        store: &mut dyn Store,
        phase: FrontendPhase,
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
