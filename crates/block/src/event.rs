//! Changes of a device while it is in use.

use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// A change of a device that users want to know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The capacity changed to this many sectors (512 B).
    Resized {
        /// New capacity in 512-byte sectors.
        sectors: u64,
    },
    /// The device is gone; requests complete with errors.
    Gone,
    /// Another client took the lock of the device away, and nothing is sent any more: requests fail, or wait for ever, as the device's
    /// owner chose.
    LockLost {
        /// One line for people.
        why: Arc<str>,
    },
    /// A member of an array changed.
    Member {
        /// Its place in the array, from 0.
        place: u32,
        /// The user's name of the device, or an empty one.
        name: Arc<str>,
        change: MemberChange,
    },
    /// The redundancy of an array changed.
    Condition(Condition),
}

/// A change of an array's member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberChange {
    Failed,
    /// A device is being made the member.
    RebuildStarted,
    /// The device that was rebuilt is the member.
    RebuildFinished,
    /// The device that was the member is there again, and misses what was written meanwhile.
    Back,
    /// The device that was being rebuilt isn't any more, and didn't become the member.
    RebuildStopped,
}

/// The redundancy of a device that is made of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// All members are there, or the device has none.
    #[default]
    Whole,
    /// The member at this place (from 0) failed or is missing.
    Degraded { place: u32 },
    /// More members are gone than the device can do without: its requests fail.
    Failed,
}

type Callback = dyn Fn(DeviceEvent) + Send + Sync;

/// Tells subscribers of events. Callbacks run on the thread that raises the event, so they only set flags and
/// wake threads.
#[derive(Default)]
pub struct EventHub(Mutex<HubState>);

#[derive(Default)]
struct HubState {
    subscribers: Vec<Weak<Callback>>,
    condition: Condition,
    gone: bool,
}

/// The subscription of a callback, which ends when this is dropped.
pub struct Subscription(#[allow(dead_code)] Arc<Callback>);

impl EventHub {
    /// Calls `f` for each event until the returned handle is dropped.
    pub fn subscribe(&self, f: impl Fn(DeviceEvent) + Send + Sync + 'static) -> Subscription {
        let callback: Arc<Callback> = Arc::new(f);
        let mut state = self.0.lock();
        state.subscribers.retain(|w| w.strong_count() > 0);
        state.subscribers.push(Arc::downgrade(&callback));
        Subscription(callback)
    }

    /// The device's condition by the last [`DeviceEvent::Condition`] that was raised.
    pub fn condition(&self) -> Condition {
        self.0.lock().condition
    }

    /// The device is about to be gone: called before the first request fails because of it, so that whoever sees the failure can ask for the reason.
    /// [`DeviceEvent::Gone`] follows.
    pub fn set_gone(&self) {
        self.0.lock().gone = true;
    }

    /// True if the device is gone, and its requests fail because of that.
    pub fn is_gone(&self) -> bool {
        self.0.lock().gone
    }

    /// Calls all subscribers.
    pub fn raise(&self, event: DeviceEvent) {
        let mut state = self.0.lock();
        if let DeviceEvent::Condition(condition) = event {
            state.condition = condition;
        }
        state.gone |= event == DeviceEvent::Gone;
        let all = state.subscribers.iter();
        let all: Vec<_> = all.filter_map(Weak::upgrade).collect();
        drop(state);
        for callback in all {
            callback(event.clone());
        }
    }
}

impl std::fmt::Debug for EventHub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EventHub({})", self.0.lock().subscribers.len())
    }
}
