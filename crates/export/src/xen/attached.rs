//! One disk of one guest: the handshake, its directories, its queues.

use super::connector::XenConnector;
use super::node::Node;
use super::store::NodeStore;
use crate::xenbus::serving::{self, Serves};
use crate::xenbus::{BackendNegotiation, Note, Store, XenbusState};
use pvblk_block::Error;
use std::time::{Duration, Instant};

/// How long a guest may take to leave when it is asked to before this is told, and told again.
const CLOSING_TIME: Duration = Duration::from_secs(30);

/// A device directory of ours that names a disk of this server.
pub(super) struct Attached {
    pub node: Node,
    /// Of this one alone: the next device of the same number has another.
    pub id: u64,
    pub negotiation: BackendNegotiation,
    pub store: NodeStore,
    pub connector: XenConnector,
    /// Its guest's name, where the disk goes to guests of that name.
    pub guest: Option<String>,
    /// Closed with a front end of an earlier server; told once.
    left_over: bool,
    /// It may not begin now; see [`BackendNegotiation::set_held`].
    held: bool,
    state: XenbusState,
    /// When a close that lasts is told.
    pub deadline: Option<Instant>,
}

impl Attached {
    pub fn new((node, id): (Node, u64), store: NodeStore, connector: XenConnector) -> Attached {
        Attached {
            node,
            id,
            // Whether it is online is read when it starts.
            negotiation: BackendNegotiation::new(connector.serving.offers, true),
            store,
            connector,
            guest: None,
            left_over: false,
            held: false,
            state: XenbusState::Initialising,
            deadline: None,
        }
    }

    /// For logs.
    pub fn name(&self) -> String {
        self.connector.name()
    }

    pub fn state(&self) -> XenbusState {
        self.negotiation.state()
    }

    /// True while its front end has queues, or may come to have some.
    pub fn has_disk(&self) -> bool {
        matches!(self.state(), XenbusState::InitWait | XenbusState::Connected)
            || self.connector.serving.is_running()
    }

    /// Whether it may begin is for the server to say, before each step. True if that is new.
    pub fn set_held(&mut self, held: bool) -> bool {
        self.negotiation.set_held(held);
        std::mem::replace(&mut self.held, held) != held
    }

    /// True if it may have wanted to begin, and was not let.
    pub fn is_held(&self) -> bool {
        self.held && self.state() != XenbusState::Connected
    }

    /// True once the front end of an earlier server has closed: it won't come back to this device, and is to get the disk by name.
    pub fn take_left_over(&mut self) -> bool {
        let closed =
            self.state() == XenbusState::Closed && self.store.front.as_deref() == Some("6");
        self.guest.is_some() && closed && std::mem::take(&mut self.left_over)
    }

    /// True if our directory is not the one that was taken into service: somebody removed it and made it anew between two looks.
    pub fn is_replaced(&self) -> Result<bool, Error> {
        let begun = self.state() != XenbusState::Initialising;
        Ok(self.store.own("disk")?.as_ref() != Some(&self.store.disk)
            || begun && self.store.own("state")?.as_deref() == Some("1"))
    }

    /// Begins, where the fence is open. Rings of an earlier server can't be taken over: answers have overwritten requests that it
    /// hadn't answered, so a front end that still uses them is asked to leave.
    pub fn start(&mut self) -> Result<(), Error> {
        self.store.look()?;
        let front = self
            .store
            .read("state")
            .and_then(|s| XenbusState::parse(&s));
        if self.is_offline()? {
            return self.close();
        }
        let ours = self.store.own("state")?;
        let fresh = ours.is_none_or(|s| s == "1");
        match front {
            None | Some(XenbusState::Unknown | XenbusState::Initialising) => {
                self.negotiation.start(&mut self.store)?;
            }
            Some(XenbusState::InitWait | XenbusState::Initialised) if fresh => {
                self.negotiation.start(&mut self.store)?;
            }
            Some(state) => {
                if !matches!(state, XenbusState::Closing | XenbusState::Closed) {
                    tracing::warn!(
                        "{}: it uses rings of a server that is gone; it has to close, and to be attached again",
                        self.name()
                    );
                }
                self.left_over = !fresh;
                self.negotiation
                    .close(&mut self.store, &mut self.connector)?;
            }
        }
        self.front_changed()
    }

    /// The front end's directory changed.
    pub fn front_changed(&mut self) -> Result<(), Error> {
        self.store.look()?;
        let Attached {
            negotiation,
            store,
            connector,
            ..
        } = self;
        negotiation.peer_changed(store, connector)?;
        self.settle();
        Ok(())
    }

    /// Somebody, maybe we, wrote to our directory: the toolstack asks for the end by `online` and `state`.
    pub fn own_changed(&mut self) -> Result<(), Error> {
        // Where our own step has just overwritten the state that it asked for, `online` still tells; so it does before we have written any,
        // where the state is an earlier server's.
        let begun = self.state() != XenbusState::Initialising;
        let asked = self.is_offline()?
            || begun && matches!(self.store.own("state")?.as_deref(), Some("5" | "6"));
        let open = !matches!(self.state(), XenbusState::Closing | XenbusState::Closed);
        if asked && open {
            return self.close();
        }
        Ok(())
    }

    /// True if the toolstack takes the disk away.
    fn is_offline(&mut self) -> Result<bool, Error> {
        let online = self.store.own("online")?;
        let off = online.as_ref().is_some_and(|v| v.trim() == "0");
        if online.is_some() {
            self.negotiation.set_online(!off);
        }
        Ok(off)
    }

    /// Asks the front end to leave.
    pub fn close(&mut self) -> Result<(), Error> {
        self.negotiation
            .close(&mut self.store, &mut self.connector)?;
        self.settle();
        Ok(())
    }

    /// Ends the connection, whatever the front end does.
    pub fn break_off(&mut self, why: &str) -> Result<(), Error> {
        let Attached {
            negotiation,
            store,
            connector,
            ..
        } = self;
        negotiation.break_off(store, connector, why)?;
        self.settle();
        Ok(())
    }

    /// What another thread told.
    pub fn note(&mut self, note: Note) -> Result<(), Error> {
        let Attached {
            negotiation,
            store,
            connector,
            ..
        } = self;
        serving::note(note, negotiation, store, connector)?;
        self.settle();
        Ok(())
    }

    fn settle(&mut self) {
        let state = self.state();
        if state == self.state {
            return;
        }
        tracing::debug!("{}: {} → {state}", self.name(), self.state);
        self.state = state;
        // It came back by itself.
        self.left_over &= state != XenbusState::InitWait;
        self.deadline = (state == XenbusState::Closing).then(|| Instant::now() + CLOSING_TIME);
    }

    /// A close that lasts is told.
    pub fn late(&mut self, now: Instant) {
        if self.deadline.is_some_and(|at| at <= now) {
            self.deadline = Some(now + CLOSING_TIME * 10);
            tracing::warn!(
                "{}: the guest still uses it, or doesn't answer",
                self.name()
            );
        }
    }
}
