//! Calls of a [`FileOpener`] as messages, so that another process makes them: [`PassedOpener`] asks, [`carry_out`] makes the call that was asked for.

use super::{FileOpener, LockHolder, Match, PathStat};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A call of [`FileOpener`]; a file or folder that it is about is passed beside it. Paths may have any bytes.
#[derive(Debug, Serialize, Deserialize)]
pub enum FileCall {
    /// The path, and the bits of flags and mode.
    Open(OsString, u32, u32),
    Reopen(u32),
    OpenIn(String, u32, u32),
    RenameIn(String, String),
    MakeFolder(OsString, u32),
    Stat(OsString),
    RealPath(OsString),
    Expand(String, usize),
    LockHolder,
    LoopOver(bool),
    DeviceText(u64, String),
}

/// The answer to a [`FileCall`].
#[derive(Debug, Serialize, Deserialize)]
pub enum FileAnswer {
    /// The number of the error.
    Failed(i32),
    Done,
    /// It is passed beside the answer.
    Descriptor,
    Stat(u32, u64),
    Path(Option<OsString>),
    /// With the number of the error of a folder that can't be read.
    Matches(Vec<(OsString, Option<i32>)>),
    Process(u32, String),
    Ended,
    Unknown,
    Text(String),
}

/// A way to the process that makes the calls.
pub trait PassCall: fmt::Debug + Send + Sync {
    /// Passes the call with its file, and waits for the answer. An error is one of the way.
    fn pass(
        &self,
        call: FileCall,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<(FileAnswer, Option<OwnedFd>)>;

    /// The rule by which that process refuses files, for [`FileOpener::rule`].
    fn rule(&self) -> Option<&'static str> {
        None
    }
}

/// Makes a call that was received. [`FileAnswer::Failed`] is among the answers.
pub fn carry_out(
    opener: &dyn FileOpener,
    call: FileCall,
    file: Option<BorrowedFd<'_>>,
) -> (FileAnswer, Option<OwnedFd>) {
    match attempt(opener, call, file) {
        Ok(answer) => answer,
        Err(e) => (FileAnswer::Failed(number(&e)), None),
    }
}

fn number(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

fn attempt(
    opener: &dyn FileOpener,
    call: FileCall,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<(FileAnswer, Option<OwnedFd>)> {
    let file = || file.ok_or(Errno::BADF);
    let flags = OFlags::from_bits_retain;
    let mode = Mode::from_bits_retain;
    let opened = |opened| (FileAnswer::Descriptor, Some(opened));
    let answer = match call {
        FileCall::Open(path, f, m) => {
            let file = opener.open(Path::new(&path), flags(f), mode(m));
            return file.map(opened);
        }
        FileCall::Reopen(f) => return opener.reopen(file()?, flags(f)).map(opened),
        FileCall::OpenIn(name, f, m) => {
            let file = opener.open_in(file()?, &name, flags(f), mode(m));
            return file.map(opened);
        }
        FileCall::RenameIn(from, to) => {
            opener.rename_in(file()?, &from, &to)?;
            FileAnswer::Done
        }
        FileCall::MakeFolder(path, m) => {
            opener.make_folder(Path::new(&path), mode(m))?;
            FileAnswer::Done
        }
        FileCall::Stat(path) => {
            let PathStat { mode, device } = opener.stat(Path::new(&path))?;
            FileAnswer::Stat(mode, device)
        }
        FileCall::RealPath(path) => {
            let path = opener.real_path(Path::new(&path))?;
            FileAnswer::Path(Some(path.into()))
        }
        FileCall::Expand(pattern, most) => {
            let found = opener.expand(&pattern, most)?;
            let all = found.into_iter().map(|one| match one {
                Match::Path(path) => (path.into(), None),
                Match::Unreadable(path, e) => (path.into(), Some(number(&e))),
            });
            FileAnswer::Matches(all.collect())
        }
        FileCall::LockHolder => match opener.lock_holder(file()?) {
            LockHolder::Process { pid, name } => FileAnswer::Process(pid, name),
            LockHolder::Ended => FileAnswer::Ended,
            LockHolder::Unknown => FileAnswer::Unknown,
        },
        FileCall::LoopOver(read_only) => {
            let device = opener.loop_over(file()?, read_only);
            FileAnswer::Path(device.map(OsString::from))
        }
        FileCall::DeviceText(device, leaf) => FileAnswer::Text(opener.device_text(device, &leaf)?),
    };
    Ok((answer, None))
}

/// The opener whose calls another process makes.
#[derive(Debug)]
pub struct PassedOpener<W>(pub W);

impl<W: PassCall> PassedOpener<W> {
    fn ask(
        &self,
        call: FileCall,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<(FileAnswer, Option<OwnedFd>)> {
        match self.0.pass(call, file)? {
            (FileAnswer::Failed(number), _) => Err(io::Error::from_raw_os_error(number)),
            answer => Ok(answer),
        }
    }

    fn descriptor(&self, call: FileCall, file: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        match self.ask(call, file)? {
            (FileAnswer::Descriptor, Some(opened)) => Ok(opened),
            _ => Err(another()),
        }
    }
}

/// An answer to another question.
fn another() -> io::Error {
    Errno::PROTO.into()
}

impl<W: PassCall> FileOpener for PassedOpener<W> {
    fn rule(&self) -> Option<&'static str> {
        self.0.rule()
    }

    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        self.descriptor(FileCall::Open(path.into(), flags.bits(), mode.bits()), None)
    }

    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        self.descriptor(FileCall::Reopen(flags.bits()), Some(file))
    }

    fn open_in(
        &self,
        folder: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> io::Result<OwnedFd> {
        let call = FileCall::OpenIn(name.into(), flags.bits(), mode.bits());
        self.descriptor(call, Some(folder))
    }

    fn rename_in(&self, folder: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        let call = FileCall::RenameIn(from.into(), to.into());
        self.ask(call, Some(folder)).map(drop)
    }

    fn make_folder(&self, path: &Path, mode: Mode) -> io::Result<()> {
        let call = FileCall::MakeFolder(path.into(), mode.bits());
        self.ask(call, None).map(drop)
    }

    fn stat(&self, path: &Path) -> io::Result<PathStat> {
        match self.ask(FileCall::Stat(path.into()), None)? {
            (FileAnswer::Stat(mode, device), _) => Ok(PathStat { mode, device }),
            _ => Err(another()),
        }
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        match self.ask(FileCall::RealPath(path.into()), None)? {
            (FileAnswer::Path(Some(path)), _) => Ok(path.into()),
            _ => Err(another()),
        }
    }

    fn expand(&self, pattern: &str, most: usize) -> io::Result<Vec<Match>> {
        let answer = self.ask(FileCall::Expand(pattern.into(), most), None)?;
        let (FileAnswer::Matches(all), _) = answer else {
            return Err(another());
        };
        let all = all.into_iter().map(|(path, number)| match number {
            None => Match::Path(path.into()),
            Some(n) => Match::Unreadable(path.into(), io::Error::from_raw_os_error(n)),
        });
        Ok(all.collect())
    }

    fn lock_holder(&self, file: BorrowedFd<'_>) -> LockHolder {
        match self.ask(FileCall::LockHolder, Some(file)) {
            Ok((FileAnswer::Process(pid, name), _)) => LockHolder::Process { pid, name },
            Ok((FileAnswer::Ended, _)) => LockHolder::Ended,
            _ => LockHolder::Unknown,
        }
    }

    fn loop_over(&self, file: BorrowedFd<'_>, read_only: bool) -> Option<PathBuf> {
        match self.ask(FileCall::LoopOver(read_only), Some(file)) {
            Ok((FileAnswer::Path(path), _)) => path.map(PathBuf::from),
            _ => None,
        }
    }

    fn device_text(&self, device: u64, leaf: &str) -> io::Result<String> {
        match self.ask(FileCall::DeviceText(device, leaf.into()), None)? {
            (FileAnswer::Text(text), _) => Ok(text),
            _ => Err(another()),
        }
    }
}
