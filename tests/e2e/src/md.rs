//! Many small arrays for the kernel's md in one guest: see `tests/vm/scripts/md-arrays.sh`.

use crate::{MIB, Stop, vm};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(300);

/// A guest with md, its script and its files.
pub struct Guest {
    dir: TempDir,
    store: File,
    member_mib: u64,
    slots: usize,
    arrays: HashMap<String, Range<usize>>,
    plan: String,
}

impl Guest {
    /// For members of this size.
    pub fn new(member_mib: u64) -> Result<Guest, Stop> {
        let dir = tempfile::tempdir()?;
        Ok(Guest {
            store: File::create(dir.path().join("store"))?,
            member_mib,
            slots: 0,
            arrays: HashMap::new(),
            plan: String::new(),
            dir,
        })
    }

    /// Hands over an array: its members that are there. Returns the slot of the first.
    pub fn array(&mut self, name: &str, members: &[PathBuf]) -> Result<usize, Stop> {
        let first = self.slots;
        self.room(name, members.len());
        for (member, slot) in members.iter().zip(first..) {
            self.store
                .seek(SeekFrom::Start(slot as u64 * self.member_mib * MIB))?;
            std::io::copy(&mut File::open(member)?, &mut self.store)?;
        }
        Ok(first)
    }

    /// Members of zeros.
    pub fn room(&mut self, name: &str, members: usize) {
        let slots = self.slots..self.slots + members;
        self.slots = slots.end;
        let _ = write!(self.plan, "array {name}");
        for slot in slots.clone() {
            let _ = write!(self.plan, " {slot}");
        }
        self.plan.push('\n');
        self.arrays.insert(name.into(), slots);
    }

    /// A slot for a spare; with the array's members that come back.
    pub fn spare(&mut self, name: &str) -> usize {
        let slots = self.arrays.entry(name.into()).or_default();
        slots.end += 1;
        self.slots += 1;
        self.slots - 1
    }

    /// Lines of the plan.
    pub fn plan(&mut self, lines: &str) {
        self.plan.push_str(lines);
        self.plan.push('\n');
    }

    /// Runs it all.
    pub fn run(self, kind: vm::Kind) -> Result<Done, Stop> {
        let store = self.dir.path().join("store");
        self.store
            .set_len(self.slots as u64 * self.member_mib * MIB)?;
        let plan = self.dir.path().join("plan");
        let mut text = format!("{} {}\n{}", self.member_mib, self.slots, self.plan);
        // A disk has whole sectors.
        text.push_str(&"\0".repeat(4096 - text.len() % 4096));
        std::fs::write(&plan, text)?;
        let out = self.dir.path().join("out");
        std::fs::create_dir(&out)?;
        let script = vm::named("md-arrays.sh");
        vm::script(kind, &script, &[&store, &plan], &out, LIMIT)?;
        Ok(Done {
            dir: self.dir,
            member_mib: self.member_mib,
            arrays: self.arrays,
        })
    }
}

/// The results of the script.
pub struct Done {
    dir: TempDir,
    member_mib: u64,
    arrays: HashMap<String, Range<usize>>,
}

impl Done {
    /// A file that was left for an array.
    pub fn text(&self, name: &str, what: &str) -> Result<String, Stop> {
        let path = self.dir.path().join("out").join(name).join(what);
        std::fs::read_to_string(&path).map_err(|e| Stop::Fail(format!("{name}/{what}: {e}")))
    }

    /// Its first word.
    pub fn word(&self, name: &str, what: &str) -> Result<String, Stop> {
        let text = self.text(name, what)?;
        Ok(text.split_whitespace().next().unwrap_or_default().into())
    }

    /// Lines of the kernel about an array, without times, that have these words.
    pub fn kernel(&self, name: &str, words: &str) -> Result<Vec<String>, Stop> {
        let text = self.text(name, "dmesg")?;
        let lines = text.lines().filter(|l| l.contains(words));
        let bare = lines.map(|l| l.split_once("] ").map_or(l, |(_, rest)| rest));
        Ok(bare.map(str::to_owned).collect())
    }

    /// The kernel's version.
    pub fn version(&self) -> Result<String, Stop> {
        self.word(".", "kernel")
    }

    /// Copies the members of an array to files of a folder.
    pub fn members(&self, name: &str, to: &Path) -> Result<Vec<PathBuf>, Stop> {
        let slots = self.arrays.get(name).cloned().unwrap_or_default();
        let mut store = OpenOptions::new()
            .read(true)
            .open(self.dir.path().join("store"))?;
        let bytes = self.member_mib * MIB;
        slots
            .enumerate()
            .map(|(n, slot)| {
                let path = to.join(format!("{name}.{n}"));
                store.seek(SeekFrom::Start(slot as u64 * bytes))?;
                std::io::copy(&mut (&mut store).take(bytes), &mut File::create(&path)?)?;
                Ok(path)
            })
            .collect()
    }
}
