//! The child's side: its calls to the parent, and its way into the sandbox.

use super::calls::{Answer, CONNECTING, Call, Numbered, Places, SocketKind, State, receive, send};
use super::lockdown;
use super::user::User;
use crate::events::{EventForm, RunEvent};
use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvblk_backend::PressureSources;
use pvblk_block::Error;
use pvblk_client::dial::{Dialer, SocketType};
use pvblk_export::socket_file::{NameOwner, SocketAccess, SocketFile};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_volume::{FileAnswer, FileCall, PassCall};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// io_uring instances that the child may use: one for each queue of a file. A queue without one does its I/O on threads.
const RINGS: usize = 64;

type Reply = (Answer, Option<OwnedFd>);

/// The link to the parent.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    /// Held while a message is sent.
    sending: Mutex<()>,
    next: AtomicU64,
    /// Calls without an answer by number. `None`: the parent is gone.
    waiting: Mutex<Option<HashMap<u64, SyncSender<Reply>>>>,
    connecting: Places,
}

impl Link {
    fn open(socket: OwnedFd) -> Result<Arc<Link>> {
        let link = Arc::new(Link {
            socket,
            sending: Mutex::default(),
            next: AtomicU64::new(0),
            waiting: Mutex::new(Some(HashMap::new())),
            connecting: Places::new(CONNECTING),
        });
        let reader = Arc::clone(&link);
        std::thread::Builder::new()
            .name("pvblk-parent".into())
            .stack_size(256 << 10)
            .spawn(move || reader.read())
            .context("starting a thread")?;
        Ok(link)
    }

    /// Gives each answer to its caller, until the parent is gone.
    fn read(&self) {
        while let Ok(Some((answer, file))) = receive::<Numbered<Answer>>(&self.socket) {
            let mut waiting = self.waiting.lock();
            let caller = waiting.as_mut().and_then(|w| w.remove(&answer.number));
            if let Some(caller) = caller {
                let _ = caller.send((answer.of, file));
            }
        }
        // Their callers hear of it.
        self.waiting.lock().take();
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn ask(&self, call: Call, file: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
        let number = self.number();
        let (caller, answer) = sync_channel(1);
        let gone = || io::Error::from(Errno::PIPE);
        let mut waiting = self.waiting.lock();
        waiting.as_mut().ok_or_else(gone)?.insert(number, caller);
        drop(waiting);
        let sent = {
            let _one = self.sending.lock();
            send(self.socket.as_fd(), &Numbered { number, of: call }, file)
        };
        if let Err(e) = sent {
            if let Some(waiting) = self.waiting.lock().as_mut() {
                waiting.remove(&number);
            }
            return Err(io::Error::other(e));
        }
        answer.recv().map_err(|_| gone())
    }

    /// Tells the service manager, as far as there is one.
    pub fn tell(&self, state: State) {
        let _ = self.ask(Call::Tell(state), None);
    }

    /// Has an image opened; returns the disk's name and the socket of the process that serves it.
    pub fn open_image(&self, image: &str) -> io::Result<(String, PathBuf)> {
        match self.ask(Call::OpenImage(image.to_owned()), None)? {
            (Answer::Image(name, rings), _) => Ok((name, rings)),
            (answer, _) => Err(answer.error()),
        }
    }

    /// Has it closed, without waiting for that.
    pub fn close_image(&self, name: &str) {
        let message = Numbered {
            number: self.number(),
            of: Call::CloseImage(name.to_owned()),
        };
        let _one = self.sending.lock();
        // Without the parent the image is closed, too.
        let _ = send(self.socket.as_fd(), &message, None);
    }

    /// A socket that listens at `address`, with the number of its file.
    fn bind(
        &self,
        address: &NbdAddr,
        kind: SocketKind,
        access: SocketAccess,
    ) -> Result<(OwnedFd, u64), Error> {
        let name = self.number();
        let call = Call::Bind {
            name,
            address: address.to_string(),
            kind,
            mode: access.mode,
            group: access.group,
        };
        let failed = |e| Error::os(format!("listening at {address}"), e);
        match self.ask(call, None).map_err(failed)? {
            (Answer::Bound, Some(socket)) => Ok((socket, name)),
            (
                Answer::Refused {
                    by_user: true,
                    text,
                },
                _,
            ) => Err(Error::config(text)),
            (Answer::Refused { text, .. }, _) => Err(failed(io::Error::other(text))),
            _ => Err(failed(Errno::PROTO.into())),
        }
    }

    /// As [`SocketFile::bind_for`].
    pub fn unix(
        self: &Arc<Link>,
        path: &Path,
        kind: SocketKind,
        access: SocketAccess,
    ) -> Result<SocketFile, Error> {
        let address = NbdAddr::Unix(path.to_owned());
        let (socket, number) = self.bind(&address, kind, access)?;
        let name = ParentsName {
            link: Arc::clone(self),
            number,
        };
        Ok(SocketFile::passed(socket, path, Box::new(name)))
    }

    /// A socket of a TCP port that doesn't block.
    pub fn tcp(&self, address: &NbdAddr) -> Result<TcpListener, Error> {
        let (socket, _) = self.bind(address, SocketKind::Stream, SocketAccess::default())?;
        Ok(socket.into())
    }
}

impl Dialer for Link {
    fn connection(
        &self,
        address: &NbdAddr,
        kind: SocketType,
        timeout: Duration,
    ) -> io::Result<OwnedFd> {
        let call = Call::Connect {
            address: address.to_string(),
            kind: match kind {
                SocketType::SEQPACKET => SocketKind::Packets,
                _ => SocketKind::Stream,
            },
            timeout,
        };
        self.connecting.take();
        let answer = self.ask(call, None);
        self.connecting.give_back();
        match answer? {
            (Answer::Connected, Some(socket)) => Ok(socket),
            (answer, _) => Err(answer.error()),
        }
    }
}

impl RunEvent for Link {
    fn run(&self, event: &EventForm) -> Result<(), String> {
        let answer = self.ask(Call::Event(event.clone()), None);
        match answer.map_err(|e| e.to_string())? {
            (Answer::Done, _) => Ok(()),
            (answer, _) => Err(answer.error().to_string()),
        }
    }

    fn end(&self) {
        // Without the parent there is no program, either.
        let _ = self.ask(Call::LastEvents, None);
    }
}

/// The link for calls of files.
#[derive(Debug)]
pub struct FileCalls(pub Arc<Link>);

impl PassCall for FileCalls {
    fn pass(
        &self,
        call: FileCall,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<(FileAnswer, Option<OwnedFd>)> {
        match self.0.ask(Call::File(call), file)? {
            (Answer::File(answer), file) => Ok((answer, file)),
            _ => Err(Errno::PROTO.into()),
        }
    }

    fn rule(&self) -> Option<&'static str> {
        Some(
            "a server in a sandbox opens files that its configuration names, and those below a folder of --open-in (open_in)",
        )
    }
}

/// A socket's file, which the parent made and removes.
#[derive(Debug)]
struct ParentsName {
    link: Arc<Link>,
    number: u64,
}

impl NameOwner for ParentsName {}

impl Drop for ParentsName {
    fn drop(&mut self) {
        let _ = self.link.ask(Call::Unbind(self.number), None);
    }
}

/// A server's process that reads bytes of peers.
pub struct Child {
    link: Arc<Link>,
    sources: Option<PressureSources>,
}

impl Child {
    /// Gives up all rights but those that serving needs; until [`Child::lock`] the process may still make sockets and threads of any kind. To be called
    /// before there is any other thread.
    pub fn enter(parent: &str, user: &User) -> Result<Child> {
        // The parent has this socket as the child's standard input.
        let socket = io::stdin().as_fd().try_clone_to_owned();
        let socket = socket.context("the socket to the parent")?;
        // These need rights that are given up now.
        let sources = PressureSources::find();
        let rings = pvblk_sys::uring::reserve_rings(RINGS);
        if rings < RINGS {
            tracing::debug!("{rings} of {RINGS} io_uring instances could be made");
        }
        lockdown::give_up_rights(user, parent)?;
        Ok(Child {
            link: Link::open(socket)?,
            sources: Some(sources),
        })
    }

    /// The link to the parent.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Sources of memory pressure, which were opened before the sandbox; once.
    pub fn sources(&mut self) -> PressureSources {
        self.sources.take().unwrap_or_else(PressureSources::none)
    }

    /// Lets all threads make the system calls of [`lockdown::allowed`] only, those to come too.
    pub fn lock(&self) -> Result<()> {
        lockdown::lock()
    }
}
