//! A disk's two directories in xenstore.

use super::xenstore::Xenstore;
use parking_lot::Mutex;
use pvblk_block::Error;
use pvblk_protocol::xenbus::{Change, MAX_VALUE, Store};
use std::sync::Arc;

/// Access to the back end's and the front end's directory.
pub(super) struct NodeStore {
    pub xenstore: Arc<Mutex<Xenstore>>,
    /// Path of the back end's directory.
    pub ours: String,
    /// Path of the front end's directory.
    pub peers: String,
    /// The `disk` key of our directory when the device was taken into service.
    pub disk: String,
    /// The front end's `state` at the last look.
    pub front: Option<String>,
}

impl NodeStore {
    /// Reads the front end's state. Errors if it can't be read, so that a live front end isn't taken for one that has
    /// left; a state without read permission counts as left.
    pub fn look(&mut self) -> Result<(), Error> {
        let path = format!("{}/state", self.peers);
        self.front = self.xenstore.lock().read_visible(&path)?;
        Ok(())
    }

    /// Reads a key of our own directory, to which the toolstack writes, too.
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
                // Counts as an absent key: the handshake goes on when the key can be read.
                tracing::debug!("{e}");
                None
            }
        }
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), Error> {
        let ours = &self.ours;
        self.xenstore.lock().transaction(|t| {
            // Writing would create a directory again that the toolstack has removed, or describe the wrong disk in
            // its successor.
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
