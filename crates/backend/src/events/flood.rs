//! The limit for events of one kind about one disk.

use super::{Event, Kind};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Events of one kind and disk that are told at once.
pub(super) const BURST: u32 = 8;
/// One more is told after this time.
pub(super) const PACE: Duration = Duration::from_secs(10);
/// Most pairs of a kind and a disk that are counted for themselves; the others share one count for each kind.
pub(super) const MOST: usize = 4096;

/// The number of events that there may be, and the last one that was left out.
#[derive(Default)]
struct Bucket {
    /// The time at which it will be full again; `None`: it is full.
    full_at: Option<Instant>,
    left_out: u64,
    /// The last one of those.
    kept: Option<Box<Event>>,
}

impl Bucket {
    fn is_full(&self, now: Instant) -> bool {
        self.kept.is_none() && self.full_at.is_none_or(|at| at <= now)
    }

    /// Takes the place of one event, if there is one.
    fn take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + PACE;
        let fits = full_at <= now + PACE * BURST;
        if fits {
            self.full_at = Some(full_at);
        }
        fits
    }
}

/// Limits events so that no pair of disk and kind hides the others.
#[derive(Default)]
pub(super) struct Flood {
    buckets: HashMap<Kind, HashMap<String, Bucket>>,
    len: usize,
    /// For the pairs beyond [`MOST`].
    shared: HashMap<Kind, Bucket>,
}

impl Flood {
    /// Gives the event back if it is to be told, with the number of those before it that were left out.
    pub fn admit(&mut self, mut event: Event, now: Instant) -> Option<Event> {
        if event.kind.is_unlimited() {
            return Some(event);
        }
        let bucket = self.bucket(event.kind, event.disk.as_deref().unwrap_or_default());
        if bucket.take(now) {
            event.left_out = std::mem::take(&mut bucket.left_out);
            bucket.kept = None;
            return Some(event);
        }
        bucket.left_out += 1;
        match &mut bucket.kept {
            Some(kept) => **kept = event,
            None => bucket.kept = Some(Box::new(event)),
        }
        None
    }

    fn bucket(&mut self, kind: Kind, disk: &str) -> &mut Bucket {
        let of_kind = self.buckets.entry(kind).or_default();
        if !of_kind.contains_key(disk) {
            if self.len == MOST {
                return self.shared.entry(kind).or_default();
            }
            self.len += 1;
            of_kind.insert(disk.to_owned(), Bucket::default());
        }
        of_kind.entry(disk.to_owned()).or_default()
    }

    /// Events that were left out last and that may be told now. Forgets buckets that are full again. To be
    /// called once a second or so.
    pub fn due(&mut self, now: Instant) -> Vec<Event> {
        let mut due = Vec::new();
        let own = self.buckets.values_mut().flat_map(HashMap::values_mut);
        for bucket in own.chain(self.shared.values_mut()) {
            if bucket.kept.is_some()
                && bucket.take(now)
                && let Some(mut event) = bucket.kept.take()
            {
                // It is one of those that were counted.
                event.left_out = std::mem::take(&mut bucket.left_out) - 1;
                due.push(*event);
            }
        }
        let mut len = 0;
        for of_kind in self.buckets.values_mut() {
            of_kind.retain(|_, bucket| !bucket.is_full(now));
            len += of_kind.len();
        }
        self.shared.retain(|_, bucket| !bucket.is_full(now));
        self.len = len;
        // In the order in which they happened.
        due.sort_by_key(|event| event.time);
        due
    }

    /// True if there have been no events for so long that any may come.
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.shared.is_empty()
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.len
    }
}
