//! Changes of the members that subscribers of the array are told of.

use pvblk_block::{Condition, DeviceEvent, MemberChange};
use std::sync::Arc;

/// The members at a moment, as far as subscribers are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The place without a member.
    pub failed: Option<usize>,
    pub broken: bool,
    /// The place that a device is being rebuilt for.
    pub rebuilding: Option<usize>,
    /// Devices that have become members.
    pub takeovers: u64,
}

impl Seen {
    /// The redundancy of the array.
    pub fn condition(&self) -> Condition {
        match (self.broken, self.failed) {
            (true, _) => Condition::Failed,
            (false, Some(place)) => Condition::Degraded {
                place: place as u32,
            },
            (false, None) => Condition::Whole,
        }
    }
}

/// The members as subscribers know them.
pub(super) struct Told {
    seen: Seen,
    /// Names of the members by place, as they were before the last change.
    names: Vec<Option<String>>,
}

impl Told {
    /// The members as they are now. `names` has one for each place.
    pub fn new(seen: Seen, names: Vec<Option<String>>) -> Told {
        Told { seen, names }
    }

    /// The changes since the last look. A device that was taken in and became the member between two looks has
    /// a start, too. `names` is called only if there is a change.
    pub fn look(
        &mut self,
        now: Seen,
        names: impl FnOnce() -> Vec<Option<String>>,
    ) -> Vec<DeviceEvent> {
        if now == self.seen {
            return Vec::new();
        }
        let before = std::mem::replace(&mut self.seen, now);
        let told = changes(before, now, &self.names);
        self.names = names();
        told
    }
}

fn changes(before: Seen, now: Seen, names: &[Option<String>]) -> Vec<DeviceEvent> {
    let mut out = Vec::new();
    let member = |place: usize, change| DeviceEvent::Member {
        place: place as u32,
        name: match (change, names.get(place)) {
            (MemberChange::Failed, Some(Some(name))) => Arc::from(name.as_str()),
            _ => Arc::from(""),
        },
        change,
    };
    if let Some(place) = now.failed
        && before.failed.is_none()
    {
        out.push(member(place, MemberChange::Failed));
    }
    let finished = now.takeovers != before.takeovers;
    // One that came and became the member since the last look.
    let place = before.rebuilding.or(before.failed.filter(|_| finished));
    if let Some(place) = place
        && (finished || now.rebuilding != Some(place))
    {
        if before.rebuilding.is_none() {
            out.push(member(place, MemberChange::RebuildStarted));
        }
        out.push(member(
            place,
            match finished {
                true => MemberChange::RebuildFinished,
                false => MemberChange::RebuildStopped,
            },
        ));
    }
    if let Some(place) = now.rebuilding
        && (finished || before.rebuilding != Some(place))
    {
        out.push(member(place, MemberChange::RebuildStarted));
    }
    if now.condition() != before.condition() {
        out.push(DeviceEvent::Condition(now.condition()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(events: &[DeviceEvent]) -> Vec<String> {
        let word = |e: &DeviceEvent| match e {
            DeviceEvent::Member {
                place,
                name,
                change,
            } => format!("{change:?} {place} {name}").trim_end().to_owned(),
            DeviceEvent::Condition(condition) => format!("{condition:?}"),
            other => format!("{other:?}"),
        };
        events.iter().map(word).collect()
    }

    #[test]
    fn each_change_between_two_looks_is_told_in_order() {
        let names = ["a", "b", "c"].map(|n| Some(n.to_owned()));
        let whole = Seen::default();
        let failed = Seen {
            failed: Some(1),
            ..whole
        };
        let rebuilding = Seen {
            rebuilding: Some(1),
            ..failed
        };
        let rebuilt = Seen {
            takeovers: 1,
            ..whole
        };
        let broken = Seen {
            broken: true,
            ..failed
        };
        let told = |before, now| words(&changes(before, now, &names));
        assert_eq!(told(whole, failed), ["Failed 1 b", "Degraded { place: 1 }"]);
        assert_eq!(told(failed, rebuilding), ["RebuildStarted 1"]);
        assert_eq!(told(rebuilding, rebuilt), ["RebuildFinished 1", "Whole"]);
        assert_eq!(told(rebuilding, failed), ["RebuildStopped 1"]);
        assert_eq!(told(failed, broken), ["Failed"]);
        // A small array is rebuilt between two looks.
        assert_eq!(
            told(failed, rebuilt),
            ["RebuildStarted 1", "RebuildFinished 1", "Whole"]
        );
        // A member is replaced while it is there.
        let replacing = Seen {
            rebuilding: Some(2),
            ..whole
        };
        assert_eq!(told(whole, replacing), ["RebuildStarted 2"]);
        assert_eq!(told(replacing, rebuilt), ["RebuildFinished 2"]);
        assert!(told(rebuilt, rebuilt).is_empty());
    }
}
