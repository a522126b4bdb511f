//! Looks at the files and block devices that patterns match, for superblocks of md.
//!
//! A file system or a device may hang, so all of it is done on threads of its own, whose calls are given up after a time. A call that was given up can't be
//! ended; its thread stays until the call returns. The number of such threads in the process is bounded.

use crate::opener::{FileOpener, Match, PATTERNS};
use pvblk_block::{Error, ErrorKind};
use pvblk_raid5::{SUPER_BYTES, SUPER_SECTOR, Superblock, SuperblockError};
use rustix::fs::{FileType, Mode, OFlags};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Most files that patterns may match.
const MOST_FILES: usize = 4096;
/// Files that are looked at at a time.
const AT_ONCE: usize = 16;
/// Longest time for one file: a disk that has to spin up answers in it.
const FILE_WAIT: Duration = Duration::from_secs(20);
/// Longest time for the expansion of patterns.
const EXPAND_WAIT: Duration = Duration::from_secs(20);
/// Most threads whose calls were given up and haven't returned.
const MOST_HUNG: usize = 32;

static HUNG: AtomicUsize = AtomicUsize::new(0);

/// One file, whatever its names: device and inode, or the number of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileId {
    File(u64, u64),
    Block(u64),
}

/// Contents of a path, as far as an array needs them.
#[derive(Debug)]
pub enum Found {
    Superblock(Box<Superblock>),
    /// No member can be there: another kind of file, too short, or without a superblock.
    Nothing,
    /// It may be a member, and can't be used: a line for the user, without the path.
    Unusable(String),
}

/// A path that was looked at.
#[derive(Debug)]
pub struct Look {
    pub path: PathBuf,
    /// The first of the patterns that match it.
    pub pattern: usize,
    pub found: Found,
}

type Answer = io::Result<Option<(FileId, Found)>>;

/// Looks at all files that the patterns match, in the patterns' order. A file that several paths lead to comes once.
///
/// Errors if a pattern is none, matches too much, or its folder doesn't answer. A pattern without wildcards is a path, and is looked at even if there is
/// nothing.
pub fn look(opener: &Arc<dyn FileOpener>, patterns: &[&Path]) -> Result<Vec<Look>, Error> {
    let (paths, mut looks) = expand(opener, patterns)?;
    let opener = Arc::clone(opener);
    let read = move |path: &Path| superblock_at(&*opener, path);
    looks.extend(look_at(paths, FILE_WAIT, read)?);
    Ok(looks)
}

/// True if the pattern matches the path; both are made absolute.
pub fn matches(pattern: &Path, path: &Path) -> bool {
    let absolute = |p: &Path| std::path::absolute(p).ok();
    let (Some(pattern), Some(path)) = (absolute(pattern), absolute(path)) else {
        return false;
    };
    let pattern = pattern.to_str().and_then(|p| glob::Pattern::new(p).ok());
    pattern.is_some_and(|p| p.matches_path_with(&path, PATTERNS))
}

/// Why a text is no pattern.
pub fn pattern_problem(pattern: &Path) -> Option<String> {
    match pattern.to_str().map(glob::Pattern::new) {
        None => Some("a pattern is text in UTF-8".into()),
        Some(Err(e)) => Some(format!("it is no pattern: {e}")),
        Some(Ok(_)) => None,
    }
}

/// Paths with the number of their pattern.
type Paths = Vec<(usize, PathBuf)>;

/// The paths, and folders that can't be read.
fn expand(opener: &Arc<dyn FileOpener>, patterns: &[&Path]) -> Result<(Paths, Vec<Look>), Error> {
    let all = patterns.iter().map(|p| p.display().to_string());
    let all: Vec<String> = all.collect();
    let (texts, opener) = (all.clone(), Arc::clone(opener));
    let expand = move || -> Result<(Paths, Vec<Look>), String> {
        let (mut paths, mut unreadable) = (Vec::new(), Vec::new());
        for (n, text) in texts.iter().enumerate() {
            if !text.contains(['*', '?', '[']) {
                paths.push((n, PathBuf::from(text)));
                continue;
            }
            glob::Pattern::new(text).map_err(|e| format!("{text}: {e}"))?;
            let left = MOST_FILES - (paths.len() + unreadable.len()).min(MOST_FILES);
            let found = opener.expand(text, left + 1);
            let found = found.map_err(|e| format!("{text}: {e}"))?;
            if found.len() > left {
                return Err(format!(
                    "{text}: more than {MOST_FILES} files match; write a narrower pattern"
                ));
            }
            for one in found {
                match one {
                    Match::Path(path) => paths.push((n, path)),
                    Match::Unreadable(path, e) => unreadable.push(Look {
                        path,
                        pattern: n,
                        found: Found::Unusable(e.to_string()),
                    }),
                }
            }
        }
        Ok((paths, unreadable))
    };
    let (tell, told) = mpsc::channel();
    let call = Call::begin(move || {
        let _ = tell.send(expand());
    })?;
    match told.recv_timeout(EXPAND_WAIT) {
        Ok(found) => found.map_err(Error::config),
        Err(_) => {
            call.give_up();
            Err(Error::new(
                ErrorKind::Os,
                format!(
                    "{}: a folder didn't answer in {} s",
                    all.join(", "),
                    EXPAND_WAIT.as_secs()
                ),
            ))
        }
    }
}

/// A call on a thread of its own.
struct Call(Arc<AtomicUsize>);

const RUNNING: usize = 0;
const RETURNED: usize = 1;
const GIVEN_UP: usize = 2;

impl Call {
    fn begin(call: impl FnOnce() + Send + 'static) -> Result<Call, Error> {
        if HUNG.load(Ordering::Relaxed) >= MOST_HUNG {
            return Err(Error::new(
                ErrorKind::Os,
                format!(
                    "{MOST_HUNG} earlier looks at candidates for arrays still hang: leave out of `in=` what doesn't answer"
                ),
            ));
        }
        let state = Arc::new(AtomicUsize::new(RUNNING));
        let ours = Arc::clone(&state);
        let run = move || {
            call();
            if ours.swap(RETURNED, Ordering::AcqRel) == GIVEN_UP {
                HUNG.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("pvblk-look".into());
        thread
            .spawn(run)
            .map_err(|e| Error::os("starting a thread to look at candidates", e))?;
        Ok(Call(state))
    }

    fn give_up(&self) {
        HUNG.fetch_add(1, Ordering::Relaxed);
        let state = self
            .0
            .compare_exchange(RUNNING, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
        if state.is_err() {
            HUNG.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn look_at(
    paths: Paths,
    patience: Duration,
    read: impl Fn(&Path) -> Answer + Clone + Send + 'static,
) -> Result<Vec<Look>, Error> {
    let (tell, told) = mpsc::channel();
    let mut answers: Vec<Option<Answer>> = paths.iter().map(|_| None).collect();
    let mut running: Vec<(usize, Instant, Call)> = Vec::new();
    let mut next = 0;
    while next < paths.len() || !running.is_empty() {
        if next < paths.len() && running.len() < AT_ONCE {
            let (path, tell, read) = (paths[next].1.clone(), tell.clone(), read.clone());
            let n = next;
            let call = Call::begin(move || {
                let _ = tell.send((n, read(&path)));
            })?;
            running.push((n, Instant::now() + patience, call));
            next += 1;
            continue;
        }
        // In order of their ends, since all have as long.
        let first = running[0].1;
        match told.recv_timeout(first.saturating_duration_since(Instant::now())) {
            Ok((n, answer)) => {
                running.retain(|(m, ..)| *m != n);
                // One that came too late keeps the answer that it hangs.
                answers[n].get_or_insert(answer);
            }
            Err(_) => {
                let (n, _, call) = running.remove(0);
                call.give_up();
                answers[n] = Some(Err(io::ErrorKind::TimedOut.into()));
            }
        }
    }
    let mut seen = HashSet::new();
    let mut looks = Vec::new();
    for ((pattern, path), answer) in paths.into_iter().zip(answers.into_iter().flatten()) {
        let found = match answer {
            Ok(Some((id, _))) if !seen.insert(id) => continue,
            Ok(Some((_, found))) => found,
            Ok(None) => Found::Nothing,
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Found::Unusable(format!(
                "it doesn't answer (no superblock was read in {} s)",
                patience.as_secs()
            )),
            Err(e) => Found::Unusable(e.to_string()),
        };
        looks.push(Look {
            path,
            pattern,
            found,
        });
    }
    Ok(looks)
}

/// Reads the superblock of a file or block device, without a lock. `None`: it is neither.
fn superblock_at(opener: &dyn FileOpener, path: &Path) -> Answer {
    // A FIFO isn't waited for, and a device isn't opened to find out that it is a tape.
    let kind = |mode| FileType::from_raw_mode(mode);
    let before = opener.stat(path)?.kind();
    if before == FileType::Directory {
        let all = path.join("*");
        let why = format!("it is a folder; for its files write {}", all.display());
        return Err(io::Error::other(why));
    }
    if !matches!(before, FileType::RegularFile | FileType::BlockDevice) {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(opener.open(path, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&file)?;
    let id = match kind(stat.st_mode) {
        FileType::RegularFile => FileId::File(stat.st_dev, stat.st_ino),
        FileType::BlockDevice => FileId::Block(stat.st_rdev),
        _ => return Ok(None),
    };
    let mut bytes = [0; SUPER_BYTES];
    let found = match file.read_exact_at(&mut bytes, SUPER_SECTOR * 512) {
        Ok(()) => match Superblock::parse(&bytes) {
            Ok(sb) => Found::Superblock(Box::new(sb)),
            Err(SuperblockError::Magic(_)) => Found::Nothing,
            Err(e) => Found::Unusable(e.to_string()),
        },
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => cut_off(&file)?,
        Err(e) => return Err(e),
    };
    Ok(Some((id, found)))
}

/// A file that ends before its superblock does.
fn cut_off(file: &File) -> io::Result<Found> {
    let mut begin = [0; 4];
    let magic = match file.read_exact_at(&mut begin, SUPER_SECTOR * 512) {
        Ok(()) => u32::from_le_bytes(begin) == pvblk_raid5::SUPER_MAGIC,
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(e) => return Err(e),
    };
    Ok(match magic {
        true => Found::Unusable("it ends in the middle of its superblock".into()),
        false => Found::Nothing,
    })
}

#[cfg(test)]
mod tests;
