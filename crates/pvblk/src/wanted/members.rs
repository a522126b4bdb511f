//! Members of arrays that are added and replaced while they serve: the volume that is kept is one that works.

use crate::disks::Registry;
use crate::opener::Opener;
use crate::wanted::WantedState;
use anyhow::{Context, Result};
use pvblk_backend::Disk;
use pvblk_block::{BlockDevice, Error, error_line};
use pvblk_raid5::ask::{Question, SpecAnswer};
use pvblk_volume::{Members, Raid5Spec, VolumeSpec};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;

/// Most devices that may be on their way into one array.
const MOST_JOINING: usize = 64;

/// Opens the volume of disk `name`. Devices that may have become members of its array before a crash are taken if they are.
pub fn open(
    opener: &Opener,
    state: Option<&WantedState>,
    name: &str,
    spec: &VolumeSpec,
) -> Result<Arc<dyn BlockDevice>, Error> {
    if state.is_some_and(|state| state.has_added(name, spec)) {
        refuse_to_make(opener, spec)?;
    }
    let joining = state.map(|s| s.joining(name)).unwrap_or_default();
    let Some(with) = with_devices(spec, &joining) else {
        return opener.volume(spec);
    };
    let device = match opener.volume(&with) {
        Ok(device) => device,
        Err(e) => {
            tracing::info!("disk {name}: {e}; so without {}", joining.join(" "));
            opener.volume(spec)?
        }
    };
    if let Some(state) = state {
        let answer = device.ask(&spec_question());
        let settled = answer.map(|answer| {
            let volume = volume_with(spec, &answer?)?;
            state.set_members(name, &volume)
        });
        if let Some(Err(e)) = settled {
            tracing::warn!(
                "disk {name}: its members are not noted: {}",
                error_line(&*e)
            );
        }
    }
    Ok(device)
}

/// The disk was served: a file that isn't there now is missed. One that is made in its place, where a file system isn't mounted, would be empty, and healthy.
fn refuse_to_make(opener: &Opener, spec: &VolumeSpec) -> Result<(), Error> {
    let Some(file) = spec.file().filter(|file| file.size_bytes.is_some()) else {
        return Ok(());
    };
    match opener.stat(&file.path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::config(format!(
            "{spec}: the file has gone since the disk was added, perhaps with a file system that isn't mounted: bring it back, or remove the disk and add it again to begin with an empty one"
        ))),
        _ => Ok(()),
    }
}

/// Asks a disk a question that may change the members of its array: stores first what may come, and afterwards what is.
pub fn ask(
    registry: &Arc<Registry>,
    disk: &Arc<Disk>,
    question: &str,
    ask: impl FnOnce() -> Result<String, Error>,
) -> Result<String, Error> {
    let name = disk.name();
    let (Some(state), Some(change)) = (registry.kept(), MemberChange::of(question)) else {
        return ask();
    };
    let wanted = state.disk(name).map(|w| w.volume.parse::<VolumeSpec>());
    let Some(Ok(mut spec)) = wanted else {
        return ask();
    };
    if array(&mut spec).is_none() {
        return ask();
    }
    if let Some(device) = change.joins {
        let joining = state.joining(name);
        if joining.len() >= MOST_JOINING && !joining.contains(&device) {
            return Err(Error::config(format!(
                "disk {name}: {MOST_JOINING} devices are on their way into its array, the most there may be: see `pvblk raid detail`"
            )));
        }
        let stored = state.add_joining(name, &device);
        stored.map_err(|e| Error::config(format!("disk {name}: {}", error_line(&*e))))?;
    }
    let answer = ask()?;
    // The order is carried out; without this the next start looks at the devices that may have joined.
    if let Err(e) = settle(registry, disk, &spec) {
        tracing::warn!(
            "disk {name}: its members are not noted: {}",
            error_line(&*e)
        );
    }
    Ok(answer)
}

/// Stores the volume by which the array of a disk is found now.
fn settle(registry: &Arc<Registry>, disk: &Arc<Disk>, spec: &VolumeSpec) -> Result<()> {
    let answer = disk.ask(&spec_question()).context("it doesn't tell them")?;
    registry.set_members(disk.name(), &volume_with(spec, &answer?)?)
}

/// Stores the volume by which the array of a disk is found now, if other devices are its members than those that the stored volume names. Returns whether there was something to
/// store; then the array is to be asked again later.
pub fn note(registry: &Arc<Registry>, disk: &Arc<Disk>) -> Result<bool> {
    let name = disk.name();
    let Some(state) = registry.kept() else {
        return Ok(false);
    };
    let Some(seen) = state.members(name) else {
        return Ok(false);
    };
    let Ok(spec) = seen.volume.parse::<VolumeSpec>() else {
        return Ok(false);
    };
    let Some(Raid5Spec {
        of: Members::Named(named),
        ..
    }) = array(&mut spec.clone()).cloned()
    else {
        // Found by its UUID, it is found whatever its members are.
        return Ok(false);
    };
    let Some(answer) = disk.ask(&spec_question()) else {
        return Ok(false);
    };
    let answer = answer?;
    if is_of(&named, &answer)? {
        return Ok(false);
    }
    registry.settle_members(name, &seen, &volume_with(&spec, &answer)?)?;
    Ok(true)
}

/// True if an array that answered so has the devices that are named, and no others.
fn is_of(named: &[Option<VolumeSpec>], answer: &str) -> Result<bool> {
    let answer: SpecAnswer = serde_json::from_str(answer).context("no answer of an array")?;
    let VolumeSpec::Raid5(Raid5Spec {
        of: Members::Named(now),
        ..
    }) = answer.list.parse()?
    else {
        anyhow::bail!("no list of members: {}", answer.list);
    };
    let texts = |members: &[Option<VolumeSpec>]| {
        let all = members.iter().flatten().map(|m| m.as_member().to_string());
        all.collect::<BTreeSet<String>>()
    };
    Ok(texts(named) == texts(&now))
}

fn spec_question() -> String {
    serde_json::to_string(&Question::Spec {}).unwrap_or_default()
}

/// An order that changes the members of an array.
struct MemberChange {
    /// The device that comes.
    joins: Option<String>,
}

impl MemberChange {
    fn of(question: &str) -> Option<MemberChange> {
        let joins = match serde_json::from_str(question).ok()? {
            Question::Add { member, .. } => Some(member),
            Question::ReAdd { member } => Some(member).filter(|m| m.parse::<usize>().is_err()),
            Question::Replace { with, .. } => with,
            Question::Fail { .. } | Question::Remove { .. } => None,
            _ => return None,
        };
        Some(MemberChange { joins })
    }
}

/// The array of a volume, below its decorators.
fn array(spec: &mut VolumeSpec) -> Option<&mut Raid5Spec> {
    match spec {
        VolumeSpec::Raid5(array) => Some(array),
        VolumeSpec::Delay(_, inner) | VolumeSpec::Fault(_, inner) | VolumeSpec::Cache(_, inner) => {
            array(inner)
        }
        _ => None,
    }
}

/// The same volume with more devices among those of its array; `None`: there is none, or it has them.
fn with_devices(spec: &VolumeSpec, devices: &[String]) -> Option<VolumeSpec> {
    let mut with = spec.clone();
    let array = array(&mut with)?;
    for device in devices {
        let device: VolumeSpec = device.parse().ok()?;
        match &mut array.of {
            Members::Named(members) => members.push(Some(device)),
            Members::Found(candidates) => candidates.within.push(without_size(device)),
        }
    }
    (with != *spec).then_some(with)
}

/// Candidates are there already, and `size=` makes files.
fn without_size(mut device: VolumeSpec) -> VolumeSpec {
    let mut at = &mut device;
    loop {
        match at {
            VolumeSpec::File(file) => {
                file.size_bytes = None;
                return device;
            }
            VolumeSpec::Delay(_, inner)
            | VolumeSpec::Fault(_, inner)
            | VolumeSpec::Cache(_, inner) => at = inner,
            _ => return device,
        }
    }
}

/// The volume with the members that its array told, and its own options.
fn volume_with(spec: &VolumeSpec, answer: &str) -> Result<String> {
    let answer: SpecAnswer = serde_json::from_str(answer).context("no answer of an array")?;
    let VolumeSpec::Raid5(told) = answer.spec.parse()? else {
        anyhow::bail!("no array: {}", answer.spec);
    };
    let mut volume = spec.clone();
    let array = array(&mut volume).context("no array")?;
    array.of = told.of;
    Ok(volume.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VolumeSpec {
        text.parse().expect("a volume")
    }

    #[test]
    fn devices_that_may_have_joined_are_looked_at() {
        let with = |text: &str, devices: &[&str]| {
            let devices: Vec<String> = devices.iter().map(|d| (*d).to_owned()).collect();
            with_devices(&spec(text), &devices).map(|s| s.to_string())
        };
        assert_eq!(with("file:a", &["file:d"]), None);
        let array = "cache:1M:raid5:[file:/a][file:/b][file:/c]";
        assert_eq!(with(array, &[]), None);
        let found = with(array, &["file:/d,size=1M"]).expect("another volume");
        let list = "raid5:[file:/a][file:/b][file:/c][file:/d,size=1M]";
        assert!(found.ends_with(list), "{found}");
        let uuid = "raid5:uuid=00112233:44556677:8899aabb:ccddeeff,in=file:/a";
        let found = with(uuid, &["file:/d,size=1M"]).expect("another volume");
        assert_eq!(spec(&found), spec(&format!("{uuid},in=file:/d")));
    }

    #[test]
    fn a_volume_keeps_its_options_and_gets_the_members() {
        let text = "cache:1M:raid5:[file:/a][file:/b][file:/c],stripes=300";
        let told = "raid5:[file:/a][file:/d][file:/c]";
        let answer = serde_json::json!({"spec": told, "list": told}).to_string();
        let volume = volume_with(&spec(text), &answer).expect("a volume");
        let expected = "cache:1M:raid5:[file:/a][file:/d][file:/c],stripes=300";
        assert_eq!(spec(&volume), spec(expected));
        assert!(volume_with(&spec("file:/a"), &answer).is_err());
    }

    #[test]
    fn an_array_that_has_the_devices_that_are_named_needs_no_other_volume() {
        let named = |text: &str| {
            let mut spec = spec(text);
            match &array(&mut spec).expect("an array").of {
                Members::Named(named) => named.clone(),
                Members::Found(_) => panic!("found by its UUID"),
            }
        };
        let is_of = |text: &str, list: &str| {
            let answer = serde_json::json!({"spec": list, "list": list}).to_string();
            is_of(&named(text), &answer).expect("an answer")
        };
        let four = "raid5:[file:/a][file:/b][file:/c][file:/d]";
        assert!(is_of(four, four));
        // The spare is a member now, and all devices are there.
        assert!(is_of(four, "raid5:[file:/d][file:/b][file:/c][file:/a]"));
        // The member that failed isn't among them any more.
        assert!(!is_of(four, "raid5:[file:/a][file:/d][file:/c]"));
        assert!(!is_of(
            "raid5:[file:/a][missing][file:/c]",
            "raid5:[file:/a][file:/d][file:/c]"
        ));
        assert!(is_of(
            "raid5:[file:/a][missing][file:/c]",
            "raid5:[file:/a][missing][file:/c]"
        ));
    }

    #[test]
    fn orders_that_change_members_are_known() {
        let joins = |question: &str| MemberChange::of(question).map(|c| c.joins);
        let some = |text: &str| Some(Some(text.to_owned()));
        assert_eq!(
            joins(r#"{"raid": "add", "member": "file:d"}"#),
            some("file:d")
        );
        let replace = r#"{"raid": "replace", "member": "1", "with": "file:d"}"#;
        assert_eq!(joins(replace), some("file:d"));
        assert_eq!(joins(r#"{"raid": "fail", "member": "1"}"#), Some(None));
        assert_eq!(joins(r#"{"raid": "detail"}"#), None);
        assert_eq!(joins(r#"{"cache": "counters"}"#), None);
    }
}
