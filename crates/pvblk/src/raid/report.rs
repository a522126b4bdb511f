//! One line about an order that was carried out, or the same as JSON.

use crate::output::print_line;
use anyhow::Result;
use pvblk_raid5::ask::{Detail, DetailMember, DeviceState};
use serde::Serialize;

/// Result of a command that changes an array or asks for work on it.
#[derive(Serialize)]
pub struct Report {
    /// The command's word, such as `add`.
    pub command: &'static str,
    /// The disk of a server, or the UUID of an array that isn't served.
    pub array: String,
    /// The line that is printed without `--json`.
    pub message: String,
    /// Sectors of members whose parity was wrong, of a check or repair that has ended.
    pub mismatch_sectors: Option<u64>,
    /// The array afterwards.
    pub detail: Option<Detail>,
}

impl Report {
    pub fn new(command: &'static str, array: &str, message: String) -> Report {
        Report {
            command,
            array: array.to_owned(),
            message,
            mismatch_sectors: None,
            detail: None,
        }
    }

    pub fn with(mut self, detail: Detail) -> Report {
        self.detail = Some(detail);
        self
    }

    /// Prints it to standard output.
    pub fn print(&self, json: bool) -> Result<()> {
        match json {
            true => print_line(&serde_json::to_string(self)?),
            false => print_line(&self.message),
        }
    }
}

/// The device that is rebuilt now.
fn rebuilding(detail: &Detail) -> Option<&DetailMember> {
    let mut members = detail.members.iter();
    members.find(|m| m.state == DeviceState::Rebuilding)
}

fn name(member: &DetailMember) -> &str {
    member.name.as_deref().unwrap_or("a device")
}

/// `added file:/d.img to vm1 as a spare`
pub fn added(disk: &str, new: &str, after: &Detail) -> String {
    let is_new = |m: &&DetailMember| m.name.as_deref() == Some(new);
    let place = after.members.iter().find(is_new).and_then(|m| m.place);
    match place {
        Some(place) => format!("added {new} to {disk}: it is rebuilt as member {place}"),
        None => format!("added {new} to {disk} as a spare"),
    }
}

/// `b.img is member 1 of vm1 again; what it missed is written`
pub fn re_added(disk: &str, member: &str, after: &Detail) -> String {
    let serving = after.serving.as_ref();
    let incoming = rebuilding(after);
    let place = incoming.and_then(|m| m.place);
    let rebuilt = serving.and_then(|s| s.rebuilt.as_ref());
    let place = place.or(rebuilt.map(|r| r.place));
    let by_bitmap = match incoming {
        Some(_) => serving.and_then(|s| s.sync.as_ref()).map(|s| s.by_bitmap),
        None => rebuilt.map(|r| r.by_bitmap),
    };
    let name = incoming.and_then(|m| m.name.as_deref()).unwrap_or(member);
    let place = place.map_or_else(|| "a member".into(), |p| format!("member {p}"));
    match by_bitmap {
        Some(false) => {
            format!("{name} is rebuilt whole as {place} of {disk}: the server's log says why")
        }
        _ => format!("{name} is {place} of {disk} again; what it missed is written"),
    }
}

/// `member 1 of vm1, b.img, is thrown out; the array is degraded`
pub fn failed(disk: &str, before: &Detail, after: &Detail) -> String {
    let is_gone =
        |m: &&DetailMember| m.name.is_some() && !after.members.iter().any(|a| a.name == m.name);
    let gone = before.members.iter().find(is_gone);
    let who = match gone {
        Some(DetailMember {
            place: Some(place), ..
        }) => {
            format!("member {place} of {disk}, {},", gone.map_or("", name))
        }
        _ => format!("a member of {disk}"),
    };
    let frozen = after.serving.as_ref().is_some_and(|s| s.frozen);
    // The spare that was added last is taken, in a moment.
    let spare = || {
        let mut spares = after.members.iter().rev();
        spares.find(|m| m.state == DeviceState::Spare)
    };
    let then = match rebuilding(after).or_else(spare) {
        _ if !after.degraded => "the array has all members".into(),
        None => "the array is degraded: add a spare".into(),
        Some(_) if frozen => "the array is degraded, and frozen: unfreeze it".into(),
        Some(m) => format!("{} is rebuilt in its place", name(m)),
    };
    format!("{who} is thrown out; {then}")
}

/// `d.img is rebuilt to replace member 1 of vm1, b.img, which is used until then`
pub fn replaced(disk: &str, after: &Detail) -> String {
    let Some(new) = rebuilding(after) else {
        return format!("{disk}: the member is replaced");
    };
    let is_old = |m: &&DetailMember| m.place == new.place && m.state == DeviceState::Active;
    let old = after.members.iter().find(is_old).map_or("the member", name);
    let place = new.place.unwrap_or_default();
    format!(
        "{} is rebuilt to replace member {place} of {disk}, {old}, which is used until then",
        name(new)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detail(members: &[(Option<usize>, DeviceState, &str)], degraded: bool) -> Detail {
        let rows: Vec<serde_json::Value> = members
            .iter()
            .enumerate()
            .map(|(n, (place, state, name))| {
                serde_json::json!({
                    "number": n, "place": place, "state": state.text(), "name": name,
                    "rebuilt_bytes": null, "corrected_reads": 0
                })
            })
            .collect();
        let detail = serde_json::json!({
            "name": "", "uuid": "", "created_secs": 0, "updated_secs": 0, "events": 0, "level": 5,
            "raid_devices": 3, "layout": "", "chunk_bytes": 0, "array_bytes": 0, "member_bytes": 0,
            "consistency_policy": "ppl", "clean": true, "degraded": degraded, "in_sync_bytes": 0,
            "missing": null, "members": rows, "notes": [], "spec": "", "serving": null
        });
        serde_json::from_value(detail).expect("a detail")
    }

    #[test]
    fn each_order_is_told_in_a_line() {
        use DeviceState::{Active, Rebuilding, Spare};
        let whole = [(Some(0), Active, "a"), (Some(1), Active, "b")];
        let before = detail(&whole, false);
        let spare = detail(&[whole[0], whole[1], (None, Spare, "d")], false);
        assert_eq!(added("r", "d", &spare), "added d to r as a spare");
        let taken = detail(&[whole[0], (Some(1), Rebuilding, "d")], true);
        assert_eq!(
            added("r", "d", &taken),
            "added d to r: it is rebuilt as member 1"
        );
        assert_eq!(
            failed("r", &before, &taken),
            "member 1 of r, b, is thrown out; d is rebuilt in its place"
        );
        assert_eq!(
            failed("r", &before, &detail(&[whole[0], (None, Spare, "d")], true)),
            "member 1 of r, b, is thrown out; d is rebuilt in its place"
        );
        assert_eq!(
            failed("r", &before, &detail(&whole[..1], true)),
            "member 1 of r, b, is thrown out; the array is degraded: add a spare"
        );
        let beside = detail(&[whole[0], whole[1], (Some(1), Rebuilding, "d")], false);
        assert_eq!(
            replaced("r", &beside),
            "d is rebuilt to replace member 1 of r, b, which is used until then"
        );
    }
}
