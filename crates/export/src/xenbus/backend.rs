//! The back end's half of the handshake.

use super::number::quote;
use super::{
    BackendOffers, Change, FrontKeys, Store, XenbusState, parse_front_keys, publish_properties,
};
use pvblk_block::Error;
use pvblk_frontend::DiskProperties;

/// The resources behind a handshake: rings, event channels, the disk's queues.
pub trait Connector {
    /// Maps the rings, binds the event channels, starts the queues, and returns the disk.
    ///
    /// References and ports are the front end's word: an error refuses this connection. After an error nothing is running.
    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error>;

    /// Lets the requests in flight end, then unmaps everything. True if that has happened already;
    /// otherwise the owner calls [`BackendNegotiation::drained`] later. Called any number of times.
    fn disconnect(&mut self) -> bool;

    /// The connection ends for this reason: for the log.
    fn refuse(&mut self, _why: &str) {}
}

/// What is left of a connection that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queues {
    /// Still serving, so that the front end can finish.
    Running,
    /// Letting the last requests end.
    Draining,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    InitWait,
    Connected { sectors: u64 },
    Closing { queues: Queues },
    Closed,
}

/// One disk's connection to one front end, from offers to the end, and again.
///
/// A step machine: [`BackendNegotiation::peer_changed`] after every change of the front end's keys.
/// A front end that makes no sense gets state Closing and an `error` key; its queues end at once.
/// An error returned by a method is the store's own: the connection is to be dropped.
#[derive(Debug)]
pub struct BackendNegotiation {
    offers: BackendOffers,
    online: bool,
    /// Nobody may begin now.
    held: bool,
    phase: Phase,
}

impl BackendNegotiation {
    /// A back end that has published nothing yet. `online` (the toolstack's key of that name): a front end that left may come back.
    pub fn new(offers: BackendOffers, online: bool) -> BackendNegotiation {
        BackendNegotiation {
            offers,
            online,
            held: false,
            phase: Phase::Start,
        }
    }

    /// Our state, as published.
    pub fn state(&self) -> XenbusState {
        match self.phase {
            Phase::Start => XenbusState::Initialising,
            Phase::InitWait => XenbusState::InitWait,
            Phase::Connected { .. } => XenbusState::Connected,
            Phase::Closing { .. } => XenbusState::Closing,
            Phase::Closed => XenbusState::Closed,
        }
    }

    /// The toolstack takes the disk away (or gives it back): whether a front end that left may come back.
    pub fn set_online(&mut self, online: bool) {
        self.online = online;
    }

    /// While held, no front end connects, and none that has closed is let back: somebody else's requests are at work on the disk, or it is
    /// theirs. What they want is seen at the next [`BackendNegotiation::peer_changed`].
    pub fn set_held(&mut self, held: bool) {
        self.held = held;
    }

    /// Publishes the offers and waits for a front end: state InitWait.
    pub fn start(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        let mut keys = self.offers.changes();
        keys.push(Change::remove("error"));
        self.enter(store, Phase::InitWait, keys)
    }

    /// Looks at the front end's keys and goes as far as they allow.
    pub fn peer_changed(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        let front = match store.read("state") {
            None => XenbusState::Unknown,
            Some(text) => match XenbusState::parse(&text) {
                Some(state) => state,
                None => {
                    let why = format!("state is {}, not 0 to 8", quote(&text));
                    return self.break_off(store, connector, &why);
                }
            },
        };
        match (self.phase, front) {
            (Phase::Start, _) => Ok(()),
            (Phase::InitWait, XenbusState::Unknown | XenbusState::Initialising) => Ok(()),
            (Phase::InitWait, XenbusState::Initialised | XenbusState::Connected) if self.held => {
                Ok(())
            }
            // Some front ends skip Initialised.
            (Phase::InitWait, XenbusState::Initialised | XenbusState::Connected) => {
                self.connect(store, connector)
            }
            (Phase::InitWait, XenbusState::Closing | XenbusState::Closed) => {
                self.close(store, connector)
            }
            (Phase::Connected { .. }, XenbusState::Initialised | XenbusState::Connected) => Ok(()),
            (
                Phase::Connected { .. },
                XenbusState::Closing | XenbusState::Closed | XenbusState::Unknown,
            ) => self.close(store, connector),
            (Phase::Connected { .. }, XenbusState::Initialising) => self.break_off(
                store,
                connector,
                "the front end started anew without closing",
            ),
            (Phase::InitWait | Phase::Connected { .. }, other) => {
                let why = format!("state {other} makes no sense while we are {}", self.state());
                self.break_off(store, connector, &why)
            }
            (Phase::Closing { .. } | Phase::Closed, _) => self.progress(store, connector),
        }
    }

    /// The queues have ended, after [`Connector::disconnect`] returned false.
    pub fn drained(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        if let Phase::Closing { queues } = &mut self.phase {
            *queues = Queues::Gone;
        }
        self.progress(store, connector)
    }

    /// Asks the front end to leave in order: it finishes its requests and goes to Closed, then the queues end.
    pub fn close(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        let queues = match self.phase {
            Phase::Connected { .. } => Queues::Running,
            Phase::Start | Phase::InitWait => Queues::Gone,
            Phase::Closing { .. } | Phase::Closed => return self.progress(store, connector),
        };
        self.enter(store, Phase::Closing { queues }, Vec::new())?;
        self.progress(store, connector)
    }

    /// Ends the connection at once with a reason for the front end: it, or its ring, is broken.
    pub fn break_off(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
        why: &str,
    ) -> Result<(), Error> {
        if self.phase == Phase::Closed {
            return Ok(());
        }
        connector.refuse(why);
        // Queues first: they end even if the store fails.
        let queues = if connector.disconnect() {
            Queues::Gone
        } else {
            Queues::Draining
        };
        if matches!(self.phase, Phase::Closing { .. }) {
            self.phase = Phase::Closing { queues };
        } else {
            let error = vec![Change::set("error", why)];
            self.enter(store, Phase::Closing { queues }, error)?;
        }
        self.progress(store, connector)
    }

    /// Tells the front end of a new capacity in 512-byte sectors: `sectors`, then `state` again (as Linux's and QEMU's back ends do).
    pub fn resize(&mut self, store: &mut dyn Store, sectors: u64) -> Result<(), Error> {
        match self.phase {
            Phase::Connected { sectors: old } if old != sectors => self.enter(
                store,
                Phase::Connected { sectors },
                vec![Change::set("sectors", sectors)],
            ),
            _ => Ok(()),
        }
    }

    fn connect(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        let result = parse_front_keys(&|key| store.read(key), &self.offers)
            .and_then(|keys| Ok((connector.connect(&keys)?, keys.persistent)));
        let (mut disk, front_persistent) = match result {
            Ok(r) => r,
            Err(e) => return self.break_off(store, connector, &e.to_string()),
        };
        disk.persistent = front_persistent && self.offers.persistent;
        let sectors = disk.sectors;
        self.enter(
            store,
            Phase::Connected { sectors },
            publish_properties(&disk),
        )
    }

    /// Goes on with an end that has begun.
    fn progress(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        let front = store.read("state").and_then(|s| XenbusState::parse(&s));
        let has_left = front.is_none_or(XenbusState::has_left);
        if has_left
            && self.phase
                == (Phase::Closing {
                    queues: Queues::Running,
                })
        {
            let queues = if connector.disconnect() {
                Queues::Gone
            } else {
                Queues::Draining
            };
            self.phase = Phase::Closing { queues };
        }
        if has_left
            && self.phase
                == (Phase::Closing {
                    queues: Queues::Gone,
                })
        {
            self.enter(store, Phase::Closed, Vec::new())?;
        }
        let comes_back = self.online && front == Some(XenbusState::Initialising);
        if self.phase == Phase::Closed && comes_back && !self.held {
            self.start(store)?;
        }
        Ok(())
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
