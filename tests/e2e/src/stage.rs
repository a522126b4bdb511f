//! A served disk and the way to it, in a folder of its own.

use crate::sandbox::{self, need_sandbox};
use crate::{Daemon, Stop};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The way by which clients reach the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// NBD of the serving process.
    Nbd,
    /// Shared rings into an attached process, and NBD of that one.
    Rings,
}

/// Rings of the attached process: several queues of several pages, so that both are exercised.
const ATTACH: [&str; 4] = ["--queues", "2", "--ring-pages", "8"];

/// A `file` disk that is served, and attached where the route goes over rings.
pub struct Stage {
    // Dropped in this order: the front end first, so that the back end sees it leave.
    attach: Option<Daemon>,
    serve: Daemon,
    dir: TempDir,
    route: Route,
    in_sandbox: bool,
}

impl Stage {
    /// A new disk `a` of `bytes`.
    pub fn new(route: Route, bytes: u64) -> Result<Stage, Stop> {
        Stage::with_file(route, bytes, |_| Ok(()))
    }

    /// A new disk `a` of `bytes`, which is served in a sandbox.
    pub fn in_sandbox(route: Route, bytes: u64) -> Result<Stage, Stop> {
        need_sandbox()?;
        Stage::make(route, bytes, true, |_| Ok(()))
    }

    /// A disk `a` of `bytes` whose file `prepare` may fill first.
    pub fn with_file(
        route: Route,
        bytes: u64,
        prepare: impl FnOnce(&Path) -> Result<(), Stop>,
    ) -> Result<Stage, Stop> {
        Stage::make(route, bytes, false, prepare)
    }

    fn make(
        route: Route,
        bytes: u64,
        in_sandbox: bool,
        prepare: impl FnOnce(&Path) -> Result<(), Stop>,
    ) -> Result<Stage, Stop> {
        let dir = tempfile::tempdir()?;
        let disk = dir.path().join("disk.img");
        std::fs::File::create(&disk)?.set_len(bytes)?;
        prepare(&disk)?;
        let serve = start_server(dir.path(), in_sandbox, &[])?;
        let mut stage = Stage {
            attach: None,
            serve,
            dir,
            route,
            in_sandbox,
        };
        if route == Route::Rings {
            stage.attach = Some(stage.attach_again(&[])?);
        }
        Ok(stage)
    }

    /// One more attachment, with its own socket unless `extra` says otherwise.
    pub fn attach_again(&self, extra: &[&str]) -> Result<Daemon, Stop> {
        let local = unix(&self.local_socket());
        let nbd = unix(&self.path("attach.sock"));
        let mut args = vec!["attach", &local, "--disk", "a", "--nbd", &nbd];
        args.extend(if extra.is_empty() { &ATTACH } else { extra });
        Daemon::start(args)
    }

    /// A file in the stage's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The file that backs the disk.
    pub fn disk(&self) -> PathBuf {
        self.path("disk.img")
    }

    /// Where attachments connect.
    pub fn local_socket(&self) -> PathBuf {
        self.path("local.sock")
    }

    /// The NBD socket at the end of the route.
    pub fn nbd_socket(&self) -> PathBuf {
        self.path(match self.route {
            Route::Nbd => "nbd.sock",
            Route::Rings => "attach.sock",
        })
    }

    /// The disk for NBD clients.
    pub fn uri(&self) -> String {
        uri(&self.nbd_socket(), "a")
    }

    /// The process that serves the disk.
    pub fn serve(&mut self) -> &mut Daemon {
        &mut self.serve
    }

    /// The process whose NBD socket clients use: the last one on the route.
    pub fn nearest(&mut self) -> &mut Daemon {
        self.attach.as_mut().unwrap_or(&mut self.serve)
    }

    /// Takes the attachment away, to stop or crash it.
    pub fn take_attach(&mut self) -> Option<Daemon> {
        self.attach.take()
    }

    /// Puts an attachment in its place.
    pub fn put_attach(&mut self, attach: Daemon) {
        self.attach = Some(attach);
    }

    /// Kills the server as a crash would.
    pub fn kill_server(&mut self) -> Result<(), Stop> {
        self.serve.kill()
    }

    /// Starts the server again, with these options besides.
    pub fn start_server(&mut self, extra: &[&str]) -> Result<(), Stop> {
        self.serve = start_server(self.dir.path(), self.in_sandbox, extra)?;
        Ok(())
    }

    /// Ends all processes, the front end first; each must end well.
    pub fn stop(&mut self) -> Result<(), Stop> {
        if let Some(attach) = &mut self.attach {
            attach.stop()?;
        }
        self.serve.stop()
    }
}

/// A socket as the command's flags want it.
pub fn unix(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// An export as NBD clients want it.
pub fn uri(socket: &Path, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}

fn start_server(dir: &Path, in_sandbox: bool, extra: &[&str]) -> Result<Daemon, Stop> {
    let disk = format!("a=file:{}", dir.join("disk.img").display());
    let local = unix(&dir.join("local.sock"));
    let nbd = unix(&dir.join("nbd.sock"));
    let mut args = vec!["serve", "--disk", &disk, "--local", &local, "--nbd", &nbd];
    args.extend(extra);
    let user = sandbox::user();
    if in_sandbox {
        args.extend(["--sandbox", &user]);
    }
    Daemon::start(args)
}
