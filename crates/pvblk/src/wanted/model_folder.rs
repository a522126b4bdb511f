//! A folder for tests, on a machine that crashes: bytes and names that nobody made stable may be lost, in part, and in any order.

use super::store::Folder;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A mistake that a store could make; the folder behaves as if it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Bytes aren't made stable before the file gets its name.
    UnsyncedBytes,
    /// The name isn't made stable.
    UnsyncedNames,
    /// The file is written in its place.
    WrittenInPlace,
}

/// The end of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process: the system keeps all that it was given.
    Kill,
    /// The machine: what isn't stable may be lost.
    PowerCut,
}

#[derive(Clone, Default)]
struct Bytes {
    now: Vec<u8>,
    stable: Vec<u8>,
}

/// A change of names that may not be stable yet.
#[derive(Clone)]
enum Naming {
    Made(String, usize),
    Renamed(String, String, usize),
}

struct Medium {
    rng: fastrand::Rng,
    mistake: Option<Mistake>,
    files: Vec<Bytes>,
    names: BTreeMap<String, usize>,
    stable_names: BTreeMap<String, usize>,
    unstable: Vec<Naming>,
    /// Operations until the crash; `None`: none is planned.
    fuse: Option<u32>,
    is_down: bool,
    /// Every operation fails with this probability, and the machine goes on.
    errors: f64,
}

/// Clones are the same folder.
#[derive(Clone)]
pub struct ModelFolder(Arc<Mutex<Medium>>);

impl ModelFolder {
    pub fn new(seed: u64, mistake: Option<Mistake>) -> ModelFolder {
        ModelFolder(Arc::new(Mutex::new(Medium {
            rng: fastrand::Rng::with_seed(seed),
            mistake,
            files: Vec::new(),
            names: BTreeMap::new(),
            stable_names: BTreeMap::new(),
            unstable: Vec::new(),
            fuse: None,
            is_down: false,
            errors: 0.0,
        })))
    }

    /// Plans a crash in the middle of the operation after so many others.
    pub fn crash_after(&self, operations: u32) {
        self.0.lock().fuse = Some(operations);
    }

    pub fn fail_with(&self, probability: f64) {
        self.0.lock().errors = probability;
    }

    pub fn is_down(&self) -> bool {
        self.0.lock().is_down
    }

    /// The server's, or the machine's, next start.
    pub fn start_again(&self, after: Crash) {
        let medium = &mut *self.0.lock();
        if after == Crash::PowerCut {
            medium.lose();
        }
        medium.fuse = None;
        medium.is_down = false;
    }

    /// One operation. One in whose middle the crash comes may have been done, in part.
    fn operation(&self, work: impl Fn(&mut Medium, bool)) -> io::Result<()> {
        let medium = &mut *self.0.lock();
        if medium.is_down {
            return Err(io::Error::other("the machine is down"));
        }
        if medium.rng.f64() < medium.errors {
            if medium.rng.bool() {
                work(medium, false);
            }
            return Err(io::Error::other("an error of the medium"));
        }
        match &mut medium.fuse {
            Some(0) => {
                medium.is_down = true;
                if medium.rng.bool() {
                    work(medium, true);
                }
                return Err(io::Error::other("the machine goes down"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        work(medium, false);
        Ok(())
    }
}

impl Medium {
    /// The file of a name, which is made if there is none.
    fn file(&mut self, name: &str) -> usize {
        if let Some(&file) = self.names.get(name) {
            return file;
        }
        let file = self.files.len();
        self.files.push(Bytes::default());
        self.names.insert(name.into(), file);
        self.unstable.push(Naming::Made(name.into(), file));
        file
    }

    fn put(&mut self, name: &str, bytes: &[u8], is_cut: bool) {
        let file = self.file(name);
        let most = match is_cut {
            true => self.rng.usize(..=bytes.len()),
            false => bytes.len(),
        };
        self.files[file].now = bytes[..most].to_vec();
    }

    fn apply(names: &mut BTreeMap<String, usize>, naming: &Naming) {
        match naming {
            Naming::Made(name, file) => {
                names.insert(name.clone(), *file);
            }
            Naming::Renamed(from, to, file) => {
                names.remove(from);
                names.insert(to.clone(), *file);
            }
        }
    }

    /// Loses what isn't stable, or some of it.
    fn lose(&mut self) {
        for naming in std::mem::take(&mut self.unstable) {
            if self.rng.bool() {
                Medium::apply(&mut self.stable_names, &naming);
            }
        }
        self.names = self.stable_names.clone();
        for Bytes { now, stable } in &mut self.files {
            if now != stable {
                *stable = match self.rng.u8(..5) {
                    0 => stable.clone(),
                    1 => now.clone(),
                    2 => Vec::new(),
                    3 => vec![0; now.len()],
                    _ => now[..self.rng.usize(..=now.len())].to_vec(),
                };
            }
            now.clone_from(stable);
        }
    }
}

impl Folder for ModelFolder {
    fn path(&self) -> &Path {
        Path::new("/model")
    }

    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let medium = self.0.lock();
        let file = medium.names.get(name);
        Ok(file.map(|&file| medium.files[file].now.clone()))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.operation(|medium, is_cut| medium.put(name, bytes, is_cut))
    }

    fn sync_file(&self, name: &str) -> io::Result<()> {
        self.operation(|medium, _| {
            if medium.mistake != Some(Mistake::UnsyncedBytes) {
                let file = medium.file(name);
                let bytes = &mut medium.files[file];
                bytes.stable.clone_from(&bytes.now);
            }
        })
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.operation(|medium, is_cut| {
            let file = medium.file(from);
            if medium.mistake == Some(Mistake::WrittenInPlace) {
                let bytes = medium.files[file].now.clone();
                return medium.put(to, &bytes, is_cut);
            }
            let naming = Naming::Renamed(from.into(), to.into(), file);
            Medium::apply(&mut medium.names, &naming);
            medium.unstable.push(naming);
        })
    }

    fn sync_names(&self) -> io::Result<()> {
        self.operation(|medium, _| {
            if medium.mistake != Some(Mistake::UnsyncedNames) {
                medium.unstable.clear();
                medium.stable_names = medium.names.clone();
            }
        })
    }
}
