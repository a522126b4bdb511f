//! A disk's two directories in xenstore.

use super::xenstore::Xenstore;
use crate::xenbus::{Change, MAX_VALUE, Store};
use parking_lot::Mutex;
use pvblk_block::Error;
use std::sync::Arc;

/// Our directory and the front end's.
pub(super) struct NodeStore {
    pub xenstore: Arc<Mutex<Xenstore>>,
    /// Ours.
    pub ours: String,
    /// The front end's.
    pub peers: String,
    /// The `disk` key of ours when it was taken into service.
    pub disk: String,
    /// The front end's `state` when it was looked at last.
    pub front: Option<String>,
}

impl NodeStore {
    /// Looks at the front end's state. Where that can't be read, nobody may take it for a front end that has left; one that doesn't let
    /// us see it has.
    pub fn look(&mut self) -> Result<(), Error> {
        let path = format!("{}/state", self.peers);
        self.front = self.xenstore.lock().read_visible(&path)?;
        Ok(())
    }

    /// A key of our own directory; the toolstack writes there, too.
    pub fn own(&self, key: &str) -> Result<Option<String>, Error> {
        self.xenstore.lock().read(&format!("{}/{key}", self.ours))
    }
}

impl Store for NodeStore {
    fn read(&self, key: &str) -> Option<String> {
        if key == "state" {
            return self.front.clone();
        }
        let path = format!("{}/{key}", self.peers);
        match self.xenstore.lock().read(&path) {
            Ok(value) => value.filter(|v| v.len() <= MAX_VALUE),
            Err(e) => {
                // The same as a key that isn't there: the handshake goes on when it can be read.
                tracing::debug!("{e}");
                None
            }
        }
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), Error> {
        let ours = &self.ours;
        self.xenstore.lock().transaction(|t| {
            // Writing would make a directory again that the toolstack has removed, or lie about the disk of the next one there.
            if t.read(&format!("{ours}/disk"))?.as_ref() != Some(&self.disk) {
                return Ok(());
            }
            for Change { key, value } in changes {
                let path = format!("{ours}/{key}");
                match value {
                    Some(value) => t.write(&path, value)?,
                    None => t.remove(&path)?,
                }
            }
            Ok(())
        })
    }
}
