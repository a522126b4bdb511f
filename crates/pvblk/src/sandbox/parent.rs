//! The parent's side: it starts the child, makes its calls, and ends with it.

use super::calls::{Answer, CONNECTING, Call, Numbered, Places, SocketKind, receive, send};
use super::events::Events;
use super::library::Library;
use super::policy::Policy;
use super::servers::Servers;
use super::user::User;
use super::{PARENT, check};
use crate::cli::ServeArgs;
use crate::config::ServeConfig;
use crate::control::ControlSocket;
use crate::nbd::NbdListen;
use crate::opener::Opener;
use crate::web::WebConfig;
use crate::{daemon, log};
use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvblk_block::{Error, ErrorKind};
use pvblk_client::dial::Dialer;
use pvblk_export::nbd::bind_tcp;
use pvblk_export::socket_file::{SocketAccess, SocketFile, SocketName};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_sys::fdpass;
use pvblk_volume::RbdSpec;
use pvblk_volume::carry_out;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

/// Calls that are being made at once; a call that hangs at a medium keeps its place. The next one waits.
const AT_ONCE: usize = 64;

/// Starts the child and carries its calls out until it has ended. Returns its status.
pub fn run(args: &ServeArgs, user: &User) -> Result<ExitCode> {
    let opener = Opener::default();
    let config = ServeConfig::resolve(args, &opener)?;
    check(&config)?;
    log::start(Some((&config.log, &opener)))?;
    let policy = policy(args, &config)?;
    let specs = config.disks.iter().map(|(_, spec)| spec.reach().images);
    let images: Vec<RbdSpec> = specs.flatten().collect();
    let library = match images.is_empty() {
        true => None,
        false => Some(Library::start(&images, user)?),
    };
    let servers = servers(args, &config, library.as_ref())?;
    pvblk_sys::limits::raise_open_files();
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD]);
    let mut signals = signals.context("handling signals")?;
    let (ours, theirs) = fdpass::pair().context("a pair of sockets")?;
    let program = std::env::current_exe().context("this program")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(PARENT, std::process::id().to_string())
        // The parent tells systemd.
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_PID")
        .stdin(theirs)
        .spawn()
        .context("starting the process that serves")?;
    tracing::debug!("process {} serves as user {}", child.id(), user.user);
    let server = Arc::new(Server {
        socket: ours,
        sending: Mutex::default(),
        policy,
        servers,
        library,
        connecting: Places::new(CONNECTING),
        events: config.on_event.clone().map(Events::new),
        allow_remote: config.allow_remote,
        web_allow_remote: config.web.as_ref().is_some_and(WebConfig::allow_remote),
        secured: config.nbd.iter().filter_map(NbdListen::secured).collect(),
        names: Mutex::default(),
        calls: Places::new(AT_ONCE),
    });
    let reader = Arc::clone(&server);
    std::thread::Builder::new()
        .name("pvblk-opener".into())
        .spawn(move || reader.serve())
        .context("starting a thread")?;
    let pid = Pid::from_child(&child);
    let mut is_over = false;
    for signal in signals.forever() {
        if signal != SIGCHLD {
            // It has ended, perhaps; then the next signal tells.
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = kill_process(pid, signal);
            }
        }
        if let Some(status) = child.try_wait()? {
            // Files of sockets that the child didn't get to.
            server.names.lock().clear();
            server.end_library();
            return Ok(match is_over {
                true => ExitCode::FAILURE,
                false => code(status),
            });
        }
        if !is_over && server.library_has_ended() {
            is_over = true;
            // Its images have to be opened again: both begin anew.
            let _ = kill_process(pid, Signal::TERM);
        }
    }
    Ok(ExitCode::FAILURE)
}

/// The child's status as this process's; a child that was killed is told.
fn code(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal() {
        log::failure(format_args!(
            "pvblk: the process that serves was ended by signal {signal}"
        ));
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(1))
}

/// The files that the configuration names, and the folders of `--open-in`.
fn policy(args: &ServeArgs, config: &ServeConfig) -> Result<Policy> {
    let mut files = Vec::new();
    let mut read_only: Vec<PathBuf> = args.config.iter().cloned().collect();
    let mut folders = args.open_in.clone();
    folders.extend(config.file().open_in.iter().cloned());
    for (_, spec) in &config.disks {
        let reach = spec.reach();
        files.extend(reach.files);
        read_only.extend(reach.credentials);
        folders.extend(reach.folders);
    }
    let listens = config.vhost_user.iter().map(|(_, listen)| listen);
    files.extend(listens.chain(&config.local).map(|l| l.path.clone()));
    let web = config.web.as_ref();
    read_only.extend(web.and_then(WebConfig::token_file).cloned());
    let web = web.map(WebConfig::address);
    read_only.extend(config.nbd.iter().flat_map(NbdListen::files));
    // Names of users and groups in rules.
    read_only.extend([PathBuf::from("/etc/passwd"), PathBuf::from("/etc/group")]);
    let nbd = config.nbd.iter().map(NbdListen::address);
    for address in nbd.chain(web) {
        if let NbdAddr::Unix(path) = address {
            files.push(path.clone());
        }
    }
    match &config.control {
        ControlSocket::None => {}
        ControlSocket::Told(path) => files.push(path.clone()),
        ControlSocket::Usual(path) => {
            // Its folder is made where it isn't there.
            if let Some(folder) = path.parent()
                && !folder.exists()
            {
                let made = std::fs::DirBuilder::new().create(folder);
                made.with_context(|| format!("making {}", folder.display()))?;
            }
            files.push(path.clone());
        }
    }
    if let Some(state) = &config.state {
        match std::fs::DirBuilder::new().create(state) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(e).with_context(|| format!("--state {}", state.display()));
            }
            _ => folders.push(state.clone()),
        }
    }
    Policy::new(&files, &read_only, &folders)
        .context("files that the server in its sandbox may use")
}

/// The servers that disks of the configuration are on, and those of `--connect-to`.
fn servers(args: &ServeArgs, config: &ServeConfig, library: Option<&Library>) -> Result<Servers> {
    let specs = config.disks.iter().map(|(_, spec)| spec.reach().servers);
    let mut named: Vec<NbdAddr> = specs.flatten().collect();
    named.extend(library.map(|library| NbdAddr::Unix(library.rings())));
    let allowed = args.connect_to.iter().chain(&config.file().connect_to);
    let allowed: Vec<String> = allowed.cloned().collect();
    Servers::new(&named, &allowed).context("servers that the server in its sandbox may connect to")
}

struct Server {
    socket: OwnedFd,
    /// Held while an answer is sent.
    sending: Mutex<()>,
    policy: Policy,
    servers: Servers,
    /// `None`: the configuration names no image of a Ceph cluster.
    library: Option<Library>,
    connecting: Places,
    /// `None`: there is no `--on-event`.
    events: Option<Events>,
    allow_remote: bool,
    web_allow_remote: bool,
    /// TCP addresses of the configuration where clients need a certificate.
    secured: Vec<String>,
    /// Files of sockets by their numbers.
    names: Mutex<HashMap<u64, SocketName>>,
    calls: Places,
}

impl Server {
    /// Makes calls, each on a thread of its own, until the child is gone.
    fn serve(self: Arc<Server>) {
        loop {
            let (call, file) = match receive::<Numbered<Call>>(&self.socket) {
                Ok(Some(received)) => received,
                Ok(None) => return,
                Err(e) => {
                    tracing::error!(
                        "the process that serves sent a message that can't be read: {e}"
                    );
                    return;
                }
            };
            self.calls.take();
            let server = Arc::clone(&self);
            let thread = std::thread::Builder::new()
                .name("pvblk-open".into())
                .stack_size(512 << 10)
                .spawn(move || {
                    server.make(call, file.as_ref());
                    server.calls.give_back();
                });
            if let Err(e) = thread {
                tracing::error!("starting a thread for a call: {e}");
                return;
            }
        }
    }

    fn make(&self, call: Numbered<Call>, file: Option<&OwnedFd>) {
        let (answer, opened) = self.answer(call.of, file);
        let answer = Numbered {
            number: call.number,
            of: answer,
        };
        let _one = self.sending.lock();
        let opened = opened.as_ref().map(AsFd::as_fd);
        if let Err(e) = send(self.socket.as_fd(), &answer, opened) {
            let why = Numbered {
                number: call.number,
                of: Answer::Refused {
                    by_user: false,
                    text: e.to_string(),
                },
            };
            let _ = send(self.socket.as_fd(), &why, None);
        }
    }

    fn answer(&self, call: Call, file: Option<&OwnedFd>) -> (Answer, Option<OwnedFd>) {
        match call {
            Call::File(call) => {
                let file = file.map(AsFd::as_fd);
                let (answer, opened) = carry_out(&self.policy, call, file);
                (Answer::File(answer), opened)
            }
            Call::Bind {
                name,
                address,
                kind,
                mode,
                group,
            } => match self.bind(name, &address, kind, SocketAccess { mode, group }) {
                Ok(socket) => (Answer::Bound, Some(socket)),
                Err(e) => {
                    let by_user = e.kind() == ErrorKind::Config;
                    let text = pvblk_block::error_line(&e);
                    (Answer::Refused { by_user, text }, None)
                }
            },
            Call::Unbind(name) => {
                let name = self.names.lock().remove(&name);
                drop(name);
                (Answer::Done, None)
            }
            Call::Connect {
                address,
                kind,
                timeout,
            } => match self.connect(&address, kind, timeout) {
                Ok(socket) => (Answer::Connected, Some(socket)),
                Err(e) => (Answer::of(&e), None),
            },
            Call::OpenImage(image) => match self.open_image(&image) {
                Ok((name, rings)) => (Answer::Image(name, rings), None),
                Err(e) => (Answer::of(&e), None),
            },
            Call::CloseImage(name) => {
                if let Some(library) = &self.library {
                    library.close(&name);
                }
                (Answer::Done, None)
            }
            Call::Event(event) => match self.events.as_ref().map(|events| events.run(&event)) {
                Some(Ok(())) => (Answer::Done, None),
                Some(Err(text)) => (
                    Answer::Refused {
                        by_user: false,
                        text,
                    },
                    None,
                ),
                None => (Answer::of(&Errno::ACCESS.into()), None),
            },
            Call::LastEvents => {
                if let Some(events) = &self.events {
                    events.end();
                }
                (Answer::Done, None)
            }
            Call::Tell(state) => {
                daemon::tell(state);
                (Answer::Done, None)
            }
        }
    }

    fn bind(
        &self,
        name: u64,
        address: &str,
        kind: SocketKind,
        access: SocketAccess,
    ) -> Result<OwnedFd, Error> {
        match address.parse()? {
            NbdAddr::Tcp { host, port } => {
                let secured = self.secured.iter().any(|known| known == address);
                let allow = self.allow_remote || self.web_allow_remote || secured;
                Ok(bind_tcp(&host, port, allow)?.into())
            }
            NbdAddr::Unix(path) => {
                self.may_bind(&path)?;
                let (socket, file) = SocketFile::make(&path, kind.into(), access)?;
                self.names.lock().insert(name, file);
                Ok(socket)
            }
        }
    }

    fn connect(&self, address: &str, kind: SocketKind, timeout: Duration) -> io::Result<OwnedFd> {
        let address: NbdAddr = address.parse().map_err(|_| Errno::INVAL)?;
        if !self.connecting.try_take() {
            return Err(Errno::BUSY.into());
        }
        let connected = self.servers.connection(&address, kind.into(), timeout);
        self.connecting.give_back();
        connected
    }

    fn open_image(&self, image: &str) -> io::Result<(String, PathBuf)> {
        let none = || {
            let why = "the configuration of this server in its sandbox names no image: add the disk there, and start it again";
            io::Error::new(io::ErrorKind::PermissionDenied, why)
        };
        let library = self.library.as_ref().ok_or_else(none)?;
        Ok((library.open(image)?, library.rings()))
    }

    fn library_has_ended(&self) -> bool {
        let Some(library) = &self.library else {
            return false;
        };
        match library.status() {
            Ok(Some(status)) => {
                log::failure(format_args!(
                    "pvblk: the process that opens images ended ({status}): the server ends with it"
                ));
                true
            }
            _ => false,
        }
    }

    /// Has images closed in order.
    fn end_library(&self) {
        if let Some(library) = &self.library {
            library.end();
        }
    }

    fn may_bind(&self, path: &Path) -> Result<(), Error> {
        self.policy.may_make(path).map_err(|_| {
            Error::config(format!(
                "{}: a server in a sandbox makes sockets that its configuration names, and those below a folder of --open-in",
                path.display()
            ))
        })
    }
}

#[cfg(test)]
mod tests;
