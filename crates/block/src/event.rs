//! Changes of a device while it is in use.

use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// A change of a device that users want to know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The capacity changed to this many sectors (512 B).
    Resized {
        /// New capacity in 512-byte sectors.
        sectors: u64,
    },
    /// The device is gone; requests complete with errors.
    Gone,
}

type Callback = dyn Fn(DeviceEvent) + Send + Sync;

/// Tells subscribers of events. Callbacks run on the thread that raises the event, so they only set flags and
/// wake threads.
#[derive(Default)]
pub struct EventHub(Mutex<Vec<Weak<Callback>>>);

/// The subscription of a callback, which ends when this is dropped.
pub struct Subscription(#[allow(dead_code)] Arc<Callback>);

impl EventHub {
    /// Calls `f` for each event until the returned handle is dropped.
    pub fn subscribe(&self, f: impl Fn(DeviceEvent) + Send + Sync + 'static) -> Subscription {
        let callback: Arc<Callback> = Arc::new(f);
        let mut all = self.0.lock();
        all.retain(|w| w.strong_count() > 0);
        all.push(Arc::downgrade(&callback));
        Subscription(callback)
    }

    /// Calls all subscribers.
    pub fn raise(&self, event: DeviceEvent) {
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        for callback in all {
            callback(event);
        }
    }
}

impl std::fmt::Debug for EventHub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EventHub({})", self.0.lock().len())
    }
}
