//! One disk of one guest: its handshake, its directories, its queues.

use super::connector::XenConnector;
use super::node::Node;
use super::store::NodeStore;
use crate::kit::{Event, FrontEnd};
use crate::xenbus::Connector;
use crate::xenbus::serving::{Handshake, Serves};
use pvblk_block::Error;
use pvblk_protocol::xenbus::{Store, XenbusState};
use std::time::{Duration, Instant};

/// Time after which a guest that was asked to release its disk is reported in the log, and the interval of further
/// reports.
const CLOSING_TIME: Duration = Duration::from_secs(30);

/// A back-end directory that names a disk of this server.
pub(super) struct GuestDisk {
    pub node: Node,
    /// Unique in this server: another device with the same number later has another id.
    pub id: u64,
    handshake: Handshake<NodeStore, XenConnector>,
    /// The guest's name, if a standing order attached the disk.
    pub guest: Option<String>,
    /// The front end used an earlier server and has closed; reported once.
    left_over: bool,
    /// The handshake may not begin now; see [`BackendNegotiation::set_held`].
    held: bool,
    state: XenbusState,
    /// Time at which a close that hasn't finished is reported.
    pub deadline: Option<Instant>,
}

impl GuestDisk {
    pub fn new((node, id): (Node, u64), store: NodeStore, connector: XenConnector) -> GuestDisk {
        GuestDisk {
            node,
            id,
            // `online` is read in `start`.
            handshake: Handshake::new(store, connector),
            guest: None,
            left_over: false,
            held: false,
            state: XenbusState::Initialising,
            deadline: None,
        }
    }

    /// Name in log lines.
    pub fn name(&self) -> String {
        self.handshake.connector.name()
    }

    /// The disk's name, for logs.
    pub fn disk(&self) -> &str {
        &self.handshake.connector.serving.disk
    }

    /// Its use of the disk.
    pub fn front(&mut self) -> &mut FrontEnd {
        &mut self.handshake.connector.serving.front
    }

    /// True if the disk's fence is open.
    pub fn may_enter(&self) -> bool {
        self.handshake.connector.serving.front.may_enter()
    }

    /// True while requests of it may be at work.
    pub fn is_at_work(&self) -> bool {
        self.handshake.connector.serving.front.is_at_work()
    }

    /// The `disk` key of its directory.
    pub fn disk_key(&self) -> &str {
        &self.handshake.store.disk
    }

    /// Ends its queues; what it leaves behind if requests of them are at work.
    pub fn end(mut self) -> Option<XenConnector> {
        (!self.handshake.connector.disconnect()).then_some(self.handshake.connector)
    }

    pub fn state(&self) -> XenbusState {
        self.handshake.state()
    }

    /// True while the front end has queues, or may get some.
    pub fn has_disk(&self) -> bool {
        matches!(self.state(), XenbusState::InitWait | XenbusState::Connected) || self.is_at_work()
    }

    /// Sets whether the handshake may begin; the server decides that before each step. True if this changed.
    pub fn set_held(&mut self, held: bool) -> bool {
        self.handshake.negotiation.set_held(held);
        std::mem::replace(&mut self.held, held) != held
    }

    /// True if the handshake was held back while the front end may have wanted it.
    pub fn is_held(&self) -> bool {
        self.held && self.state() != XenbusState::Connected
    }

    /// True once, after the front end of an earlier server has closed: it won't come back to this device, and gets a
    /// new device from its standing order.
    pub fn take_left_over(&mut self) -> bool {
        let closed = self.state() == XenbusState::Closed
            && self.handshake.store.front.as_deref() == Some("6");
        self.guest.is_some() && closed && std::mem::take(&mut self.left_over)
    }

    /// True if the directory was removed and created again since it was taken into service.
    pub fn is_replaced(&self) -> Result<bool, Error> {
        let begun = self.state() != XenbusState::Initialising;
        let store = &self.handshake.store;
        Ok(store.own("disk")?.as_ref() != Some(&store.disk)
            || begun && store.own("state")?.as_deref() == Some("1"))
    }

    /// Begins, if the fence is open. Rings of an earlier server can't be taken over: responses have overwritten
    /// requests that it hadn't completed. So a front end that still uses such rings is asked to disconnect.
    pub fn start(&mut self) -> Result<(), Error> {
        self.handshake.store.look()?;
        let store = &self.handshake.store;
        let front = store.read("state").and_then(|s| XenbusState::parse(&s));
        if self.is_offline()? {
            return self.close();
        }
        let ours = self.handshake.store.own("state")?;
        let fresh = ours.is_none_or(|s| s == "1");
        match front {
            None | Some(XenbusState::Unknown | XenbusState::Initialising) => {
                self.handshake.start()?;
            }
            Some(XenbusState::InitWait | XenbusState::Initialised) if fresh => {
                self.handshake.start()?;
            }
            Some(state) => {
                if !matches!(state, XenbusState::Closing | XenbusState::Closed) {
                    tracing::warn!(
                        "{}: the front end uses rings of an earlier server; unmount the disk in the guest, then detach and attach it again",
                        self.name()
                    );
                }
                self.left_over = !fresh;
                self.handshake.close()?;
            }
        }
        self.front_changed()
    }

    /// Handles a change of the front end's directory.
    pub fn front_changed(&mut self) -> Result<(), Error> {
        self.handshake.store.look()?;
        self.handshake.peer_changed()?;
        self.settle();
        Ok(())
    }

    /// Handles a change of the back end's directory, by the toolstack or by this server. The toolstack asks for the
    /// end by `online` and `state`.
    pub fn own_changed(&mut self) -> Result<(), Error> {
        // `state` may have been overwritten by a step of this server, or be an earlier server's; `online` tells in
        // both cases.
        let begun = self.state() != XenbusState::Initialising;
        let asked = self.is_offline()?
            || begun
                && matches!(
                    self.handshake.store.own("state")?.as_deref(),
                    Some("5" | "6")
                );
        let open = !matches!(self.state(), XenbusState::Closing | XenbusState::Closed);
        if asked && open {
            return self.close();
        }
        Ok(())
    }

    /// True if the toolstack is taking the disk away.
    fn is_offline(&mut self) -> Result<bool, Error> {
        let online = self.handshake.store.own("online")?;
        let off = online.as_ref().is_some_and(|v| v.trim() == "0");
        if online.is_some() {
            self.handshake.negotiation.set_online(!off);
        }
        Ok(off)
    }

    /// Asks the front end to disconnect.
    pub fn close(&mut self) -> Result<(), Error> {
        self.handshake.close()?;
        self.settle();
        Ok(())
    }

    /// Ends the connection without waiting for the front end.
    pub fn break_off(&mut self, why: &str) -> Result<(), Error> {
        self.handshake.break_off(why)?;
        self.settle();
        Ok(())
    }

    /// Handles an event that another thread reported.
    pub fn event(&mut self, event: Event) -> Result<(), Error> {
        if matches!(event, Event::FenceOpen) {
            self.handshake.store.look()?;
        }
        self.handshake.event(event)?;
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
        // The front end came back by itself.
        self.left_over &= state != XenbusState::InitWait;
        self.deadline = (state == XenbusState::Closing).then(|| Instant::now() + CLOSING_TIME);
    }

    /// Reports a close that takes too long.
    pub fn late(&mut self, now: Instant) {
        if self.deadline.is_some_and(|at| at <= now) {
            self.deadline = Some(now + CLOSING_TIME * 10);
            tracing::warn!(
                "{}: the guest still uses the disk or doesn't respond; unmount it there",
                self.name()
            );
        }
    }
}
