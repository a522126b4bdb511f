//! [`Difference`]: what a reload changes, for people and for programs.

use super::DiskWanted;
use super::plan::{Listener, Served, Step};
use comfy_table::Table;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// The changes that a reload makes, or has made: the answer to `reload`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// False: this is what a reload would do.
    pub applied: bool,
    pub added: Vec<Added>,
    /// Names of disks.
    pub removed: Vec<String>,
    pub changed: Vec<ChangedDisk>,
    /// Number of disks that stay as they are.
    pub unchanged: usize,
    /// Sockets for peers of all disks, such as `NBD on unix:/run/nbd.sock`.
    pub opened: Vec<String>,
    pub closed: Vec<String>,
    /// Keys of the file that differ from those that the server was started with.
    pub needs_restart: Vec<String>,
    pub failed: Vec<Failed>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Added {
    pub disk: String,
    pub volume: String,
    /// The configuration names a disk that was removed at run time.
    pub was_removed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedDisk {
    pub disk: String,
    pub fields: Vec<ChangedField>,
}

/// One field of a [`DiskWanted`]; absent texts are empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedField {
    pub field: String,
    pub from: String,
    pub to: String,
}

/// A step that could not be carried out. The disk stays wanted, and the next reload tries again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    pub step: String,
    pub disk: Option<String>,
    pub why: String,
}

impl Difference {
    /// Between what is served and what is wanted. `held_back`: disks that were removed at run time until now.
    pub fn new(present: &Served, wanted: &Served, held_back: &[String]) -> Difference {
        let held_back: BTreeSet<&String> = held_back.iter().collect();
        let mut difference = Difference::default();
        for (name, disk) in &wanted.disks {
            match present.disks.get(name) {
                None => difference.added.push(Added {
                    disk: name.clone(),
                    volume: disk.volume.clone(),
                    was_removed: held_back.contains(name),
                }),
                Some(now) => match fields(now, disk) {
                    fields if fields.is_empty() => difference.unchanged += 1,
                    fields => difference.changed.push(ChangedDisk {
                        disk: name.clone(),
                        fields,
                    }),
                },
            }
        }
        let is_left = |name: &&String| !wanted.disks.contains_key(*name);
        difference.removed = present.disks.keys().filter(is_left).cloned().collect();
        let texts = |of: &Served, other: &Served| {
            let others: Vec<Listener> = other.listeners.all().collect();
            let only = of.listeners.all().filter(|l| !others.contains(l));
            only.map(|l| l.to_string()).collect::<Vec<_>>()
        };
        difference.opened = texts(wanted, present);
        difference.closed = texts(present, wanted);
        difference
    }

    /// True if what is served is what is wanted.
    pub fn is_empty(&self) -> bool {
        let Difference {
            added,
            removed,
            changed,
            opened,
            closed,
            ..
        } = self;
        added.is_empty()
            && removed.is_empty()
            && changed.is_empty()
            && opened.is_empty()
            && closed.is_empty()
    }

    pub fn add_failure(&mut self, step: &Step, why: String) {
        self.failed.push(Failed {
            step: step.to_string(),
            disk: step.disk().map(str::to_owned),
            why,
        });
    }

    /// One line for the log.
    pub fn line(&self) -> String {
        let mut parts = vec![
            format!("{} disks added", self.added.len()),
            format!("{} removed", self.removed.len()),
            format!("{} changed", self.changed.len()),
            format!("{} unchanged", self.unchanged),
        ];
        if !self.needs_restart.is_empty() {
            parts.push(format!("needs a restart: {}", self.needs_restart.join(" ")));
        }
        if let Some(first) = self.failed.first() {
            let more = match self.failed.len() - 1 {
                0 => String::new(),
                n => format!(" (and {n} more)"),
            };
            parts.push(format!("failed: {}: {}{more}", first.step, first.why));
        }
        parts.join(", ")
    }
}

fn fields(now: &DiskWanted, then: &DiskWanted) -> Vec<ChangedField> {
    let texts = |disk: &DiskWanted| {
        [
            ("volume", disk.volume.clone()),
            ("exclusive", disk.exclusive.to_string()),
            ("vhost_user", disk.vhost_user.join(" ")),
            ("xen_attach", disk.xen_attach.join(" ")),
            ("limit", disk.limit.clone().unwrap_or_default()),
        ]
    };
    let both = texts(now).into_iter().zip(texts(then));
    let differs = both.filter(|((_, from), (_, to))| from != to);
    differs
        .map(|((field, from), (_, to))| ChangedField {
            field: field.into(),
            from,
            to,
        })
        .collect()
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        for Added {
            disk,
            volume,
            was_removed,
        } in &self.added
        {
            let why = match was_removed {
                true => " (it was removed at run time)",
                false => "",
            };
            table.add_row(["added", disk, &format!("{volume}{why}")]);
        }
        for disk in &self.removed {
            table.add_row(["removed", disk, ""]);
        }
        for ChangedDisk { disk, fields } in &self.changed {
            for ChangedField { field, from, to } in fields {
                let shown = |text: &str| match text {
                    "" => "-".to_owned(),
                    text => text.to_owned(),
                };
                let what = format!("{field}: {} -> {}", shown(from), shown(to));
                table.add_row(["changed", disk, &what]);
            }
        }
        for (word, sockets) in [("opened", &self.opened), ("closed", &self.closed)] {
            for socket in sockets {
                table.add_row([word, "", socket]);
            }
        }
        if !self.is_empty() {
            writeln!(f, "{}", table.trim_fmt())?;
        }
        writeln!(f, "unchanged: {}", self.unchanged)?;
        if !self.needs_restart.is_empty() {
            writeln!(f, "needs a restart: {}", self.needs_restart.join(" "))?;
        }
        for Failed { step, why, .. } in &self.failed {
            writeln!(f, "failed: {step}: {why}")?;
        }
        if !self.applied {
            writeln!(f, "nothing is changed: this is a dry run")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(disks: &[(&str, &DiskWanted)]) -> Served {
        let disks = disks.iter().map(|(n, d)| ((*n).to_owned(), (*d).clone()));
        Served {
            disks: disks.collect(),
            ..Served::default()
        }
    }

    #[test]
    fn each_change_has_a_line() {
        let plain = DiskWanted::new("mem:1M");
        let limited = DiskWanted {
            limit: Some("iops=100".into()),
            ..plain.clone()
        };
        let present = served(&[("gone", &plain), ("same", &plain), ("slow", &plain)]);
        let mut wanted = served(&[
            ("new", &plain),
            ("old", &plain),
            ("same", &plain),
            ("slow", &limited),
        ]);
        wanted.listeners.nbd = vec!["unix:/n".into()];
        let mut d = Difference::new(&present, &wanted, &["old".into()]);
        d.needs_restart = vec!["workers".into()];
        let expected = [
            "added new mem:1M",
            "added old mem:1M (it was removed at run time)",
            "removed gone",
            "changed slow limit: - -> iops=100",
            "opened NBD on unix:/n",
            "unchanged: 1",
            "needs a restart: workers",
            "nothing is changed: this is a dry run",
        ];
        let text = d.to_string();
        let lines: Vec<String> = text
            .lines()
            .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(lines, expected);
        assert_eq!(
            d.line(),
            "2 disks added, 1 removed, 1 changed, 1 unchanged, needs a restart: workers"
        );
        let json = serde_json::to_string(&d).unwrap();
        assert_eq!(serde_json::from_str::<Difference>(&json).unwrap(), d);
        assert!(Difference::new(&wanted, &wanted, &[]).is_empty());
    }
}
