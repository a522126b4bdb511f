//! An opener behind a socket: each call is a message of JSON, with descriptors beside it, and so is its answer.

use super::*;
use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Most bytes of a message.
const MOST: usize = 64 << 10;

/// Makes each call over a socket. A thread carries the calls out, until this is dropped.
#[derive(Debug)]
pub(super) struct Passed {
    socket: Mutex<OwnedFd>,
}

#[derive(Serialize, Deserialize)]
enum Call {
    Open(PathBuf, u32, u32),
    Reopen(u32),
    OpenIn(String, u32, u32),
    RenameIn(String, String),
    MakeFolder(PathBuf, u32),
    Stat(PathBuf),
    RealPath(PathBuf),
    Expand(String, usize),
    LockHolder,
    LoopOver(bool),
    DeviceText(u64, String),
}

#[derive(Serialize, Deserialize)]
enum Answer {
    /// By the number of the error.
    Failed(i32),
    Done,
    /// It is beside the answer.
    Descriptor,
    Stat(u32, u64),
    Path(Option<PathBuf>),
    /// With the number of the error of a folder that can't be read.
    Matches(Vec<(PathBuf, Option<i32>)>),
    Process(u32, String),
    Ended,
    Unknown,
    Text(String),
}

impl Passed {
    pub(super) fn over(opener: &Arc<Elsewhere>) -> Passed {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .expect("two sockets");
        let opener = Arc::clone(opener);
        std::thread::spawn(move || {
            while let Some((call, file)) = receive(&theirs) {
                let (answer, opened) = match carry_out(&opener, call, file.as_ref()) {
                    Ok(answer) => answer,
                    Err(e) => (Answer::Failed(number(&e)), None),
                };
                send(&theirs, &answer, opened.as_ref().map(AsFd::as_fd));
            }
        });
        Passed {
            socket: Mutex::new(ours),
        }
    }

    fn ask(
        &self,
        call: &Call,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<(Answer, Option<OwnedFd>)> {
        let socket = self.socket.lock().unwrap();
        send(&socket, call, file);
        match receive(&socket).expect("an answer") {
            (Answer::Failed(number), _) => Err(io::Error::from_raw_os_error(number)),
            answer => Ok(answer),
        }
    }

    fn descriptor(&self, call: &Call, file: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        match self.ask(call, file)? {
            (Answer::Descriptor, Some(opened)) => Ok(opened),
            _ => panic!("no descriptor"),
        }
    }
}

fn number(e: &io::Error) -> i32 {
    e.raw_os_error().expect("the error of a system call")
}

fn send(socket: &OwnedFd, message: &impl Serialize, file: Option<BorrowedFd<'_>>) {
    let bytes = serde_json::to_vec(message).expect("JSON");
    assert!(bytes.len() <= MOST);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        assert!(beside.push(SendAncillaryMessage::ScmRights(&files)));
    }
    // Whoever asked may be gone.
    let _ = sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut beside,
        SendFlags::NOSIGNAL,
    );
}

/// `None`: the other side is gone.
fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> Option<(T, Option<OwnedFd>)> {
    let mut bytes = vec![0; MOST];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(socket, &mut parts, &mut beside, flags).expect("a message");
    let file = beside.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    match received.bytes {
        0 => None,
        n => Some((serde_json::from_slice(&bytes[..n]).expect("JSON"), file)),
    }
}

fn carry_out(
    opener: &Elsewhere,
    call: Call,
    file: Option<&OwnedFd>,
) -> io::Result<(Answer, Option<OwnedFd>)> {
    let file = || file.expect("a descriptor").as_fd();
    let flags = OFlags::from_bits_retain;
    let mode = Mode::from_bits_retain;
    let opened = |opened| (Answer::Descriptor, Some(opened));
    let answer = match call {
        Call::Open(path, f, m) => return opener.open(&path, flags(f), mode(m)).map(opened),
        Call::Reopen(f) => return opener.reopen(file(), flags(f)).map(opened),
        Call::OpenIn(name, f, m) => {
            let file = opener.open_in(file(), &name, flags(f), mode(m));
            return file.map(opened);
        }
        Call::RenameIn(from, to) => {
            opener.rename_in(file(), &from, &to)?;
            Answer::Done
        }
        Call::MakeFolder(path, m) => {
            opener.make_folder(&path, mode(m))?;
            Answer::Done
        }
        Call::Stat(path) => {
            let PathStat { mode, device } = opener.stat(&path)?;
            Answer::Stat(mode, device)
        }
        Call::RealPath(path) => Answer::Path(Some(opener.real_path(&path)?)),
        Call::Expand(pattern, most) => {
            let found = opener.expand(&pattern, most)?;
            let all = found.into_iter().map(|one| match one {
                Match::Path(path) => (path, None),
                Match::Unreadable(path, e) => (path, Some(number(&e))),
            });
            Answer::Matches(all.collect())
        }
        Call::LockHolder => match opener.lock_holder(file()) {
            LockHolder::Process { pid, name } => Answer::Process(pid, name),
            LockHolder::Ended => Answer::Ended,
            LockHolder::Unknown => Answer::Unknown,
        },
        Call::LoopOver(read_only) => Answer::Path(opener.loop_over(file(), read_only)),
        Call::DeviceText(device, leaf) => Answer::Text(opener.device_text(device, &leaf)?),
    };
    Ok((answer, None))
}

impl FileOpener for Passed {
    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        self.descriptor(&Call::Open(path.into(), flags.bits(), mode.bits()), None)
    }

    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        self.descriptor(&Call::Reopen(flags.bits()), Some(file))
    }

    fn open_in(
        &self,
        folder: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> io::Result<OwnedFd> {
        let call = Call::OpenIn(name.into(), flags.bits(), mode.bits());
        self.descriptor(&call, Some(folder))
    }

    fn rename_in(&self, folder: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        let call = Call::RenameIn(from.into(), to.into());
        self.ask(&call, Some(folder)).map(drop)
    }

    fn make_folder(&self, path: &Path, mode: Mode) -> io::Result<()> {
        let call = Call::MakeFolder(path.into(), mode.bits());
        self.ask(&call, None).map(drop)
    }

    fn stat(&self, path: &Path) -> io::Result<PathStat> {
        match self.ask(&Call::Stat(path.into()), None)? {
            (Answer::Stat(mode, device), _) => Ok(PathStat { mode, device }),
            _ => panic!("another answer"),
        }
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        match self.ask(&Call::RealPath(path.into()), None)? {
            (Answer::Path(Some(path)), _) => Ok(path),
            _ => panic!("another answer"),
        }
    }

    fn expand(&self, pattern: &str, most: usize) -> io::Result<Vec<Match>> {
        let (Answer::Matches(all), _) = self.ask(&Call::Expand(pattern.into(), most), None)? else {
            panic!("another answer");
        };
        let all = all.into_iter().map(|(path, number)| match number {
            None => Match::Path(path),
            Some(n) => Match::Unreadable(path, io::Error::from_raw_os_error(n)),
        });
        Ok(all.collect())
    }

    fn lock_holder(&self, file: BorrowedFd<'_>) -> LockHolder {
        match self
            .ask(&Call::LockHolder, Some(file))
            .expect("an answer")
            .0
        {
            Answer::Process(pid, name) => LockHolder::Process { pid, name },
            Answer::Ended => LockHolder::Ended,
            Answer::Unknown => LockHolder::Unknown,
            _ => panic!("another answer"),
        }
    }

    fn loop_over(&self, file: BorrowedFd<'_>, read_only: bool) -> Option<PathBuf> {
        let answer = self.ask(&Call::LoopOver(read_only), Some(file));
        match answer.expect("an answer").0 {
            Answer::Path(path) => path,
            _ => panic!("another answer"),
        }
    }

    fn device_text(&self, device: u64, leaf: &str) -> io::Result<String> {
        match self.ask(&Call::DeviceText(device, leaf.into()), None)? {
            (Answer::Text(text), _) => Ok(text),
            _ => panic!("another answer"),
        }
    }
}
