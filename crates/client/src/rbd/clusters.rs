//! Connections that several images share.

use super::planted::{Plant, has};
use super::spec::RbdSpec;
use parking_lot::Mutex;
use pvblk_block::{Error, ErrorKind};
use pvblk_sys::librbd::{Cluster, Missing, Settings};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// Longest time of connecting, in seconds.
pub(super) const CONNECT_SECONDS: &str = "30";

/// Settings that count more than those of the configuration file; decision 31 has the reasons.
const VALUES: &[(&str, &str)] = &[
    // One cache is enough, and this one would make completed writes volatile.
    ("rbd_cache", "false"),
    ("rbd_persistent_cache_mode", "disabled"),
    // A request that timed out may still land.
    ("rados_osd_op_timeout", "0"),
    ("rados_mon_op_timeout", "0"),
    ("client_mount_timeout", CONNECT_SECONDS),
    // Nothing waits for room in threads that all images share.
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
    ("rbd_non_blocking_aio", "true"),
    // Guests may change the buffers of their writes.
    ("rbd_disable_zero_copy_writes", "true"),
    // A dead owner can't write any more when its lock is broken.
    ("rbd_blocklist_on_break_lock", "true"),
    // Standard error is the log, with one form of lines.
    ("log_to_stderr", "false"),
    ("err_to_stderr", "false"),
];

#[derive(Clone, PartialEq, Eq)]
struct Key {
    conf: Option<PathBuf>,
    id: Option<String>,
}

/// The connection for new images, if there is one. The lock is held while it is made, so that images which are opened at the same time
/// don't make several.
type Slot = Arc<Mutex<Weak<Cluster>>>;

static SLOTS: Mutex<Vec<(Key, Slot)>> = Mutex::new(Vec::new());

fn slot(spec: &RbdSpec) -> Slot {
    let key = Key {
        conf: spec.conf.clone(),
        id: spec.id.clone(),
    };
    let mut slots = SLOTS.lock();
    if let Some((_, slot)) = slots.iter().find(|(k, _)| *k == key) {
        return Arc::clone(slot);
    }
    let slot = Slot::default();
    slots.push((key, Arc::clone(&slot)));
    slot
}

/// A connection for this image: one that others have too, unless it is to have its own. Waits for the monitors, but not for ever.
pub(super) fn connection(spec: &RbdSpec) -> Result<Arc<Cluster>, Error> {
    if !spec.is_locked() && !spec.is_read_only() {
        return connect(spec);
    }
    let slot = slot(spec);
    let mut shared = slot.lock();
    if let Some(cluster) = shared.upgrade() {
        return Ok(cluster);
    }
    let cluster = connect(spec)?;
    *shared = Arc::downgrade(&cluster);
    Ok(cluster)
}

/// No image is opened on this connection any more: the cluster has blocked it.
pub(super) fn forget(spec: &RbdSpec, blocked: &Arc<Cluster>) {
    let slot = slot(spec);
    let mut shared = slot.lock();
    if std::ptr::eq(shared.as_ptr(), Arc::as_ptr(blocked)) {
        *shared = Weak::new();
    }
}

/// Blocked connections with an image whose lock was broken: the block was meant for that one.
static ROBBED: Mutex<Vec<Weak<Cluster>>> = Mutex::new(Vec::new());

/// An image of this connection, which is blocked, has lost its lock.
pub(super) fn note_robbed(blocked: &Arc<Cluster>) {
    let mut robbed = ROBBED.lock();
    robbed.retain(|cluster| cluster.strong_count() > 0);
    robbed.push(Arc::downgrade(blocked));
}

/// True if an image of this connection has lost its lock.
pub(super) fn is_robbed(blocked: &Arc<Cluster>) -> bool {
    let robbed = ROBBED.lock();
    robbed
        .iter()
        .any(|c| std::ptr::eq(c.as_ptr(), Arc::as_ptr(blocked)))
}

fn connect(spec: &RbdSpec) -> Result<Arc<Cluster>, Error> {
    let mut values = VALUES.to_vec();
    if has(Plant::TakenUnblocked) {
        values.push(("rbd_blocklist_on_break_lock", "false"));
    }
    let settings = Settings {
        conf: spec.conf.as_deref(),
        id: spec.id.as_deref(),
        values: &values,
    };
    Cluster::connect(&settings).map_err(|(step, e)| explain(spec, step, e))
}

fn explain(spec: &RbdSpec, step: &str, e: io::Error) -> Error {
    if e.get_ref().is_some_and(|inner| inner.is::<Missing>()) {
        return Error::caused(ErrorKind::Unsupported, spec.to_string(), e)
            .advise("install the package librbd1");
    }
    let error = Error::os(format!("{spec}: {step}"), e);
    match (step, error.raw_os_error()) {
        ("reading the configuration", Some(2)) => {
            error.advise("name the cluster's configuration file with conf=PATH")
        }
        ("connecting", Some(110)) => error.advise("are its monitors running?"),
        ("connecting", Some(1 | 2 | 13 | 22)) => error
            .advise("the user and its keyring: name them with id= and in the configuration file"),
        _ => error,
    }
}
