//! Exports that come and go.

use super::aside::within;
use super::{Refused, Registry, Why};
use crate::config::unix_listen;
use crate::nbd::NbdListen;
use crate::wanted::DiskWanted;
use pvblk_block::Error;
use pvblk_export::kit::{plain_address, same_address};
use pvblk_protocol::nbd::NbdAddr;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// A way by which clients reach disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Export {
    /// A socket for virtual machines.
    VhostUser { disk: String, socket: String },
    /// A standing order for a Xen guest, `GUEST[:DEVICE]`.
    XenAttach { disk: String, guest: String },
    /// A listener for NBD clients of all disks.
    Nbd(String),
    /// A socket for front ends on rings of all disks.
    Local(String),
}

/// An export that was added or removed, for programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportShown {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// `vhost_user`, `xen_attach`, `nbd` or `local`.
    pub kind: String,
    /// Where it is: with the real port, if one was chosen.
    pub place: String,
}

impl Registry {
    /// Starts an export.
    pub fn add_export(
        self: &Arc<Registry>,
        export: &Export,
        patience: Duration,
    ) -> Result<ExportShown, Refused> {
        if self.state.lock().stopping {
            return Err(Refused::stopping());
        }
        let (registry, export) = (Arc::clone(self), export.clone());
        within(patience, "adding the export", move || match &export {
            Export::Nbd(address) => registry.add_nbd(address),
            Export::Local(socket) => {
                let listen = unix_listen("local:", socket).map_err(Refused::invalid)?;
                let added = registry.exports.add_local(&listen);
                added.map_err(|e| Refused::failed(&e))?;
                registry.keep_export(&export, true).inspect_err(|_| {
                    let _ = registry.exports.remove_local(&listen.path, true);
                })?;
                Ok(export.shown(plain_address(socket)))
            }
            Export::VhostUser { disk, .. } | Export::XenAttach { disk, .. } => {
                registry.add_to_disk(disk, &export)
            }
        })
    }

    /// Ends an export. One that is used stays, with an error, unless `force`.
    pub fn remove_export(
        self: &Arc<Registry>,
        export: &Export,
        force: bool,
        patience: Duration,
    ) -> Result<ExportShown, Refused> {
        let (registry, export) = (Arc::clone(self), export.clone());
        within(patience, "removing the export", move || {
            let exports = &registry.exports;
            match &export {
                Export::Nbd(address) => {
                    let parsed: NbdAddr =
                        plain_address(address).parse().map_err(|e| invalid(&e))?;
                    let removed =
                        registry.keep_removal(&export, || exports.remove_nbd(&parsed, force));
                    removed?;
                    Ok(export.shown(plain_address(address)))
                }
                Export::Local(socket) => {
                    let listen = unix_listen("local:", socket).map_err(Refused::invalid)?;
                    let removed = registry
                        .keep_removal(&export, || exports.remove_local(&listen.path, force));
                    removed?;
                    Ok(export.shown(plain_address(socket)))
                }
                Export::VhostUser { disk, .. } | Export::XenAttach { disk, .. } => {
                    registry.remove_from_disk(disk, &export, force)
                }
            }
        })
    }

    fn add_nbd(&self, address: &str) -> Result<ExportShown, Refused> {
        let parsed: NbdListen = address.parse().map_err(|e| invalid(&e))?;
        let added = self.exports.add_nbd(&parsed);
        let real = added.map_err(|e| Refused::failed(&e))?;
        let kept = self.keep_export(&Export::Nbd(parsed.to_string()), true);
        kept.inspect_err(|_| {
            let _ = self.exports.remove_nbd(&real.address, true);
        })?;
        tracing::info!("NBD on {}", real.uri(""));
        Ok(Export::Nbd(String::new()).shown(&real.address.to_string()))
    }

    /// Stores that an export isn't wanted any more, and then removes it; what can't be removed is wanted as before.
    fn keep_removal(
        &self,
        export: &Export,
        remove: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Refused> {
        let was = self.keep_export(export, false)?;
        remove().map_err(|e| {
            if let Some(place) = was
                && let Err(refused) = self.keep_export(&export.at(place), true)
            {
                tracing::error!("the next start finds no {}: {refused}", export.place());
            }
            used_or_none(e)
        })
    }

    /// Starts an export of one disk, and notes that it is wanted.
    fn add_to_disk(&self, name: &str, export: &Export) -> Result<ExportShown, Refused> {
        let number = {
            let mut state = self.state.lock();
            let entry = state.serving(name)?;
            if export.text_in(&entry.wanted).is_some() {
                let text = format!("disk {name} has that export already");
                return Err(Refused::new(Why::Exists, text));
            }
            entry.number
        };
        let parsed = export.alone().parse(name).map_err(Refused::invalid)?;
        self.export(name, &parsed)
            .map_err(|e| Refused::failed(&e))?;
        self.keep_export(export, true).inspect_err(|_| {
            self.unexport(&parsed.vhost_user, &parsed.xen_attach);
        })?;
        let noted = self.with_entry(name, number, |entry| export.note(&mut entry.wanted, true));
        if !noted {
            self.unexport(&parsed.vhost_user, &parsed.xen_attach);
            return Err(Refused::no_disk(name));
        }
        Ok(export.shown(export.name()))
    }

    fn remove_from_disk(
        &self,
        name: &str,
        export: &Export,
        force: bool,
    ) -> Result<ExportShown, Refused> {
        let number = {
            let mut state = self.state.lock();
            let entry = state.serving(name)?;
            if export.text_in(&entry.wanted).is_none() {
                let text = format!("disk {name} has no such export: see `pvblk disk show {name}`");
                return Err(Refused::new(Why::NoDisk, text));
            }
            entry.number
        };
        let parsed = export.alone().parse(name).map_err(Refused::invalid)?;
        self.keep_removal(export, || {
            for listen in &parsed.vhost_user {
                self.exports.remove_vhost(&listen.path, force)?;
            }
            for order in parsed.xen_attach {
                self.exports.remove_order(order)?;
            }
            Ok(())
        })?;
        self.with_entry(name, number, |entry| export.note(&mut entry.wanted, false));
        Ok(export.shown(export.name()))
    }
}

impl Export {
    fn kind(&self) -> &'static str {
        match self {
            Export::VhostUser { .. } => "vhost_user",
            Export::XenAttach { .. } => "xen_attach",
            Export::Nbd(_) => "nbd",
            Export::Local(_) => "local",
        }
    }

    pub(super) fn place(&self) -> &str {
        match self {
            Export::VhostUser { socket, .. } => socket,
            Export::XenAttach { guest, .. } => guest,
            Export::Nbd(place) | Export::Local(place) => place,
        }
    }

    fn shown(&self, place: &str) -> ExportShown {
        let disk = match self {
            Export::VhostUser { disk, .. } | Export::XenAttach { disk, .. } => Some(disk.clone()),
            Export::Nbd(_) | Export::Local(_) => None,
        };
        ExportShown {
            disk,
            kind: self.kind().to_owned(),
            place: place.to_owned(),
        }
    }

    /// The list of a disk in which it stands.
    fn list<'a>(&self, wanted: &'a mut DiskWanted) -> Option<&'a mut Vec<String>> {
        match self {
            Export::VhostUser { .. } => Some(&mut wanted.vhost_user),
            Export::XenAttach { .. } => Some(&mut wanted.xen_attach),
            Export::Nbd(_) | Export::Local(_) => None,
        }
    }

    /// Its place without options.
    fn name(&self) -> &str {
        match self {
            Export::XenAttach { guest, .. } => guest,
            _ => plain_address(self.place()),
        }
    }

    /// True if `place` is another text for this export's: a socket is named by its address, without its options.
    pub(super) fn is_at(&self, place: &str) -> bool {
        match self {
            Export::XenAttach { guest, .. } => guest == place,
            _ => same_address(self.place(), place),
        }
    }

    /// The same export by another text.
    fn at(&self, place: String) -> Export {
        match self.clone() {
            Export::VhostUser { disk, .. } => Export::VhostUser {
                disk,
                socket: place,
            },
            Export::XenAttach { disk, .. } => Export::XenAttach { disk, guest: place },
            Export::Nbd(_) => Export::Nbd(place),
            Export::Local(_) => Export::Local(place),
        }
    }

    /// The text by which a disk has it.
    pub(super) fn text_in(&self, wanted: &DiskWanted) -> Option<String> {
        let list = match self {
            Export::VhostUser { .. } => &wanted.vhost_user,
            _ => &wanted.xen_attach,
        };
        list.iter().find(|place| self.is_at(place)).cloned()
    }

    pub(super) fn note(&self, wanted: &mut DiskWanted, is_there: bool) {
        if let Some(list) = self.list(wanted) {
            list.retain(|place| !self.is_at(place));
            if is_there {
                list.push(self.place().to_owned());
            }
        }
    }

    /// A disk that has nothing but this export, to be parsed.
    fn alone(&self) -> DiskWanted {
        let mut wanted = DiskWanted::new("null");
        self.note(&mut wanted, true);
        wanted
    }
}

fn invalid(e: &Error) -> Refused {
    Refused::new(Why::Invalid, e.to_string())
}

fn used_or_none(e: Error) -> Refused {
    let why = match e.kind() {
        pvblk_block::ErrorKind::Exhausted => Why::InUse,
        _ => Why::Failed,
    };
    Refused::new(why, e.to_string())
}
