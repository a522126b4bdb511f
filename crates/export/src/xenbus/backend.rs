//! The back end's half of the handshake.

use pvblk_block::Error;
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::number::quote;
use pvblk_protocol::xenbus::{
    BackendOffers, Change, FrontKeys, Store, XenbusState, parse_front_keys, publish_properties,
};

/// Resources of a handshake: rings, event channels, the disk's queues.
pub trait Connector {
    /// Lets the front end use the disk, before [`Connector::connect`]. False while it may not: the owner calls
    /// [`BackendNegotiation::peer_changed`] when that has changed.
    fn enter(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    /// Maps the rings, binds the event channels, starts the queues, and returns the disk.
    ///
    /// The front end chose references and ports: an error refuses this connection. After an error no queue is
    /// running.
    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error>;

    /// Lets the requests in flight end, then unmaps everything. True if that has happened already; otherwise the
    /// owner calls [`BackendNegotiation::drained`] later. May be called any number of times.
    fn disconnect(&mut self) -> bool;

    /// Reports the reason why the connection ends, for the log.
    fn refuse(&mut self, _why: &str) {}
}

/// Progress of a connection's queues to their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndingQueues {
    /// Still serving, so that the front end can finish its requests.
    Running,
    /// Waiting for the last requests.
    Draining,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackendPhase {
    Start,
    InitWait,
    Connected { sectors: u64 },
    Closing { queues: EndingQueues },
    Closed,
}

/// One disk's connection to one front end, from the offers to the end, and again.
///
/// A step machine: call [`BackendNegotiation::peer_changed`] after every change of the front end's keys. A front end
/// that breaks the protocol gets state Closing and an `error` key; its queues end at once. An error returned by a
/// method comes from the store: drop the connection then.
#[derive(Debug)]
pub struct BackendNegotiation {
    offers: BackendOffers,
    online: bool,
    /// No front end may begin now.
    held: bool,
    phase: BackendPhase,
}

impl BackendNegotiation {
    /// A back end that has published nothing yet. `online` (the toolstack's key of that name) permits a front end
    /// that left to come back.
    pub fn new(offers: BackendOffers, online: bool) -> BackendNegotiation {
        BackendNegotiation {
            offers,
            online,
            held: false,
            phase: BackendPhase::Start,
        }
    }

    /// The published state.
    pub fn state(&self) -> XenbusState {
        match self.phase {
            BackendPhase::Start => XenbusState::Initialising,
            BackendPhase::InitWait => XenbusState::InitWait,
            BackendPhase::Connected { .. } => XenbusState::Connected,
            BackendPhase::Closing { .. } => XenbusState::Closing,
            BackendPhase::Closed => XenbusState::Closed,
        }
    }

    /// Follows the toolstack's `online` key: permits a front end that left to come back, or not.
    pub fn set_online(&mut self, online: bool) {
        self.online = online;
    }

    /// While held, no front end connects, and none that has closed may come back: requests of another front end are
    /// in flight on the disk, or the disk is another's. Changes of the front end's keys are seen at the next
    /// [`BackendNegotiation::peer_changed`].
    pub fn set_held(&mut self, held: bool) {
        self.held = held;
    }

    /// Publishes the offers and waits for a front end: state InitWait.
    pub fn start(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        let mut keys = self.offers.changes();
        keys.push(Change::remove("error"));
        self.enter(store, BackendPhase::InitWait, keys)
    }

    /// Reads the front end's keys and goes as far as they allow.
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
            (BackendPhase::Start, _) => Ok(()),
            (BackendPhase::InitWait, XenbusState::Unknown | XenbusState::Initialising) => Ok(()),
            (BackendPhase::InitWait, XenbusState::Initialised | XenbusState::Connected)
                if self.held =>
            {
                Ok(())
            }
            // Some front ends skip Initialised.
            (BackendPhase::InitWait, XenbusState::Initialised | XenbusState::Connected) => {
                self.connect(store, connector)
            }
            (BackendPhase::InitWait, XenbusState::Closing | XenbusState::Closed) => {
                self.close(store, connector)
            }
            (BackendPhase::Connected { .. }, XenbusState::Initialised | XenbusState::Connected) => {
                Ok(())
            }
            (
                BackendPhase::Connected { .. },
                XenbusState::Closing | XenbusState::Closed | XenbusState::Unknown,
            ) => self.close(store, connector),
            (BackendPhase::Connected { .. }, XenbusState::Initialising) => self.break_off(
                store,
                connector,
                "the front end started anew without closing",
            ),
            (BackendPhase::InitWait | BackendPhase::Connected { .. }, other) => {
                let why = format!(
                    "state {other} is not allowed while the back end is {}",
                    self.state()
                );
                self.break_off(store, connector, &why)
            }
            (BackendPhase::Closing { .. } | BackendPhase::Closed, _) => {
                self.progress(store, connector)
            }
        }
    }

    /// Records that the queues have ended, after [`Connector::disconnect`] returned false.
    pub fn drained(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        if let BackendPhase::Closing { queues } = &mut self.phase {
            *queues = EndingQueues::Gone;
        }
        self.progress(store, connector)
    }

    /// Asks the front end to disconnect in order: it finishes its requests and goes to Closed, then the queues end.
    pub fn close(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        let queues = match self.phase {
            BackendPhase::Connected { .. } => EndingQueues::Running,
            BackendPhase::Start | BackendPhase::InitWait => EndingQueues::Gone,
            BackendPhase::Closing { .. } | BackendPhase::Closed => {
                return self.progress(store, connector);
            }
        };
        self.enter(store, BackendPhase::Closing { queues }, Vec::new())?;
        self.progress(store, connector)
    }

    /// Ends the connection at once, with a reason for the front end: it or its ring is broken.
    pub fn break_off(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
        why: &str,
    ) -> Result<(), Error> {
        if self.phase == BackendPhase::Closed {
            return Ok(());
        }
        connector.refuse(why);
        // The queues end first, even if the store fails.
        let queues = if connector.disconnect() {
            EndingQueues::Gone
        } else {
            EndingQueues::Draining
        };
        if matches!(self.phase, BackendPhase::Closing { .. }) {
            self.phase = BackendPhase::Closing { queues };
        } else {
            let error = vec![Change::set("error", why)];
            self.enter(store, BackendPhase::Closing { queues }, error)?;
        }
        self.progress(store, connector)
    }

    /// Tells the front end of a new capacity in 512-byte sectors: `sectors`, then `state` again (as Linux's and QEMU's back ends do).
    pub fn resize(&mut self, store: &mut dyn Store, sectors: u64) -> Result<(), Error> {
        match self.phase {
            BackendPhase::Connected { sectors: old } if old != sectors => self.enter(
                store,
                BackendPhase::Connected { sectors },
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
        let result = match connector.enter() {
            Ok(false) => return Ok(()),
            Ok(true) => parse_front_keys(&|key| store.read(key), &self.offers)
                .and_then(|keys| Ok((connector.connect(&keys)?, keys.persistent))),
            Err(e) => Err(e),
        };
        let (mut disk, front_persistent) = match result {
            Ok(r) => r,
            Err(e) => return self.break_off(store, connector, &e.to_string()),
        };
        disk.persistent = front_persistent && self.offers.persistent;
        let sectors = disk.sectors;
        self.enter(
            store,
            BackendPhase::Connected { sectors },
            publish_properties(&disk),
        )
    }

    /// Continues an end that has begun.
    fn progress(
        &mut self,
        store: &mut dyn Store,
        connector: &mut dyn Connector,
    ) -> Result<(), Error> {
        let front = store.read("state").and_then(|s| XenbusState::parse(&s));
        let has_left = front.is_none_or(XenbusState::has_left);
        if has_left
            && self.phase
                == (BackendPhase::Closing {
                    queues: EndingQueues::Running,
                })
        {
            let queues = if connector.disconnect() {
                EndingQueues::Gone
            } else {
                EndingQueues::Draining
            };
            self.phase = BackendPhase::Closing { queues };
        }
        if has_left
            && self.phase
                == (BackendPhase::Closing {
                    queues: EndingQueues::Gone,
                })
        {
            self.enter(store, BackendPhase::Closed, Vec::new())?;
        }
        let comes_back = self.online && front == Some(XenbusState::Initialising);
        if self.phase == BackendPhase::Closed && comes_back && !self.held {
            self.start(store)?;
        }
        Ok(())
    }

    fn enter(
        &mut self,
        store: &mut dyn Store,
        phase: BackendPhase,
        mut keys: Vec<Change>,
    ) -> Result<(), Error> {
        self.phase = phase;
        keys.push(Change::set("state", self.state().number()));
        store.write(&keys)
    }
}
