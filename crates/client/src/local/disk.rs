//! A disk of a local server, connected and kept so, as one device.

use super::{ConnectOptions, Keeper, KeeperEvent, connect};
use crate::rings::Frontend;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Close, Decorator, DeviceQueue, Error, ErrorKind, Forwards,
    QueueContext,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A disk of a local server over rings, with the thread that follows its server.
pub struct LocalDisk {
    front: Arc<Frontend>,
    keeper: Mutex<Option<Keeper>>,
}

impl LocalDisk {
    /// Connects to disk `name` of the server at `path`. When the server goes away, requests wait up to `patience` for the next one, and
    /// are replayed; with `None` they fail. `ended` is called, on a thread of its own, when the server asks to end or is given up.
    pub fn connect(
        path: &Path,
        name: &str,
        options: &ConnectOptions,
        patience: Option<Duration>,
        ended: impl Fn() + Send + 'static,
    ) -> Result<LocalDisk, Error> {
        let (parts, link) = connect(path, name, options)?;
        let front = Frontend::new(parts)?;
        let told = name.to_owned();
        let tell = move |event| match event {
            KeeperEvent::Lost { reason } => {
                let seconds = patience.unwrap_or_default().as_secs();
                tracing::warn!("disk {told}: {reason}; requests wait up to {seconds} s for it");
            }
            KeeperEvent::Back { after } => {
                let seconds = after.as_secs_f64();
                tracing::info!("disk {told}: connected again after {seconds:.1} s");
            }
            KeeperEvent::Closing { .. } | KeeperEvent::Ended { .. } => ended(),
        };
        let keeper = Keeper::start(link, Arc::clone(&front), patience, tell)
            .map_err(|e| Error::os("following the server's control connection", e))?;
        Ok(LocalDisk {
            front,
            keeper: Mutex::new(Some(keeper)),
        })
    }

    /// The front end alone: closing it ends nothing.
    pub fn front(&self) -> &Arc<Frontend> {
        &self.front
    }

    /// True while the server is gone: requests in flight get no response, and a flush can't succeed.
    pub fn is_gone(&self) -> bool {
        self.keeper.lock().as_ref().is_some_and(Keeper::is_gone)
    }
}

impl Decorator for LocalDisk {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.front
    }

    fn describe(&self) -> String {
        self.front.describe()
    }

    fn floor(&self) -> String {
        self.front.floor()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        self.front.open_device_queue(context)
    }

    fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: inner.refresh,
            extents: inner.extents,
            cached: inner.cached,
            incarnation: inner.incarnation,
            close: Some(self),
            questions: inner.questions,
            memory: inner.memory,
            buffers: inner.buffers,
        }
    }
}

impl Close for LocalDisk {
    /// Ends the connection in order. Errors if the server ended it first, with the reason.
    fn close(&self) -> Result<(), Error> {
        let Some(keeper) = self.keeper.lock().take() else {
            return Ok(());
        };
        match keeper.stop() {
            None => Ok(()),
            Some(why) => Err(Error::new(
                ErrorKind::Disconnected,
                format!("the server ended first: {why}"),
            )),
        }
    }
}
