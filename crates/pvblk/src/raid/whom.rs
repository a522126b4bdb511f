//! The array that a command is about: a disk that is served, or members.

use super::args::Whom;
use super::ask::Array;
use crate::control::ControlArg;
use crate::wanted::check_name;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// The array that the names of a command line stand for.
#[derive(Debug, PartialEq, Eq)]
pub enum Target<'a> {
    /// A disk of a server, and the names after it.
    Served {
        control: PathBuf,
        /// The server wasn't named: no file has the disk's name.
        guessed: bool,
        disk: &'a str,
        rest: &'a [String],
    },
    /// Members of an array that isn't served.
    Members,
}

impl Whom {
    /// With `--control` the first name is a disk. Without it a name that may be a member's is one, and any other is a disk of the server that
    /// `$PVBLK_CONTROL` names, or of the one at the usual place.
    pub fn target(&self) -> Result<Target<'_>> {
        let is_there = |name: &str| Path::new(name).exists();
        target(&self.names, &self.control, ControlArg::find, is_there)
    }

    /// The disk of a server; `None` if members are named instead.
    pub fn served(&self) -> Result<Option<Array>> {
        match self.target()? {
            Target::Members => Ok(None),
            Target::Served {
                control,
                guessed,
                disk,
                rest: [],
            } => Ok(Some(Array::Served {
                control,
                guessed,
                disk: disk.to_owned(),
            })),
            Target::Served { guessed: true, .. } => bail!(
                "{}: no file has this name; name members by their files, or a disk that is served alone",
                self.names[0]
            ),
            Target::Served { .. } => bail!(
                "{}: with --control name the disk alone; the server knows its members",
                self.names.join(" ")
            ),
        }
    }
}

fn target<'a>(
    names: &'a [String],
    control: &ControlArg,
    find: impl FnOnce(&ControlArg) -> Result<Option<PathBuf>>,
    is_there: impl Fn(&str) -> bool,
) -> Result<Target<'a>> {
    let Some((disk, rest)) = names.split_first() else {
        bail!("name members, or a disk that is served");
    };
    let guessed = control.control.is_none();
    if guessed && (check_name(disk).is_err() || is_there(disk)) {
        return Ok(Target::Members);
    }
    match find(control)? {
        Some(control) => Ok(Target::Served {
            control,
            guessed,
            disk,
            rest,
        }),
        None => bail!(
            "{disk}: there is no such file, and no server to ask for a disk of this name: name members by their files, or the server with --control unix:PATH"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(names: &[&str], flag: Option<&str>, found: Option<&str>) -> Result<String, String> {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let control = ControlArg {
            control: flag.map(str::to_owned),
        };
        let find = |_: &ControlArg| Ok(found.map(PathBuf::from));
        let target = target(&names, &control, find, |name| name == "a.img");
        let target = target.map_err(|e| e.to_string())?;
        Ok(match target {
            Target::Members => "members".into(),
            Target::Served {
                control,
                guessed,
                disk,
                rest,
            } => format!("{disk} at {} {guessed} {rest:?}", control.display()),
        })
    }

    #[test]
    fn a_served_disk_is_told_from_a_member() {
        let here = Some("/ctl");
        // Offline use stays: files, paths and volumes, whether or not there is a server.
        for server in [here, None] {
            for first in ["a.img", "./r", "/dev/sda", "file:r", "mem:1M", "sub/r"] {
                let told = told(&[first, "b.img"], None, server);
                assert_eq!(told.as_deref(), Ok("members"), "{first}");
            }
        }
        assert_eq!(told(&["r"], None, here).as_deref(), Ok("r at /ctl true []"));
        let more = told(&["r", "file:d"], None, here).unwrap();
        assert_eq!(more, "r at /ctl true [\"file:d\"]");
        // A server that is named has the disk, also if a file has its name.
        let named = told(&["a.img"], Some("unix:/ctl"), here).unwrap();
        assert_eq!(named, "a.img at /ctl false []");
        let why = told(&["r"], None, None).unwrap_err();
        assert!(
            why.contains("no such file") && why.contains("--control unix:PATH"),
            "{why}"
        );
    }

    #[test]
    fn a_disk_of_a_server_stands_alone() {
        let served = |control: Option<&str>| {
            let whom = Whom {
                control: ControlArg {
                    control: control.map(str::to_owned),
                },
                names: vec!["none-of-this-name".into(), "b".into()],
                json: false,
            };
            whom.served().map(drop).unwrap_err().to_string()
        };
        let why = served(Some("unix:/ctl"));
        assert!(why.contains("name the disk alone"), "{why}");
    }
}
