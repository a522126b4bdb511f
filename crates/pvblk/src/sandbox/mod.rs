//! `pvblk serve --sandbox`: two processes. The parent keeps its privileges, opens files and makes sockets; the child serves, which means that it reads bytes of
//! guests and clients, and may do little else (decision 41).

mod calls;
mod child;
mod events;
mod images;
mod library;
mod lockdown;
mod parent;
mod policy;
mod servers;
mod user;

pub use calls::{SocketKind, State};
pub use child::{Child, FileCalls, Link};
pub use images::Images;
use library::LibraryRole;

use crate::cli::ServeArgs;
use crate::config::{File, ServeConfig};
use crate::opener::Opener;
use anyhow::{Context, Result, bail};
use std::process::ExitCode;
use user::User;

/// Variable of the child's environment: the parent's number. The socket to the parent is the child's standard input.
const PARENT: &str = "PVBLK_SANDBOX_PARENT";

/// The part of this process.
pub enum Role {
    /// There is no sandbox.
    Alone,
    /// It serves, once it has entered the sandbox.
    Child(Entrance),
    /// It was the parent; the child has served, and this was its status.
    Over(ExitCode),
    /// It opens images for another server.
    Library(LibraryRole),
}

/// A child that still has the parent's rights, and no thread but one.
pub struct Entrance {
    parent: String,
    user: User,
}

impl Entrance {
    /// Gives the rights up.
    pub fn enter(&self) -> Result<Child> {
        Child::enter(&self.parent, &self.user)
    }
}

/// Finds this process's part. The parent starts its child, and returns when that has ended.
pub fn role(args: &ServeArgs) -> Result<Role> {
    if let Ok(role) = std::env::var(library::ROLE) {
        let role = serde_json::from_str(&role).context("the part of this process")?;
        return Ok(Role::Library(role));
    }
    let file = args.config.as_ref();
    let file = file.map(|path| File::read(path, &Opener::default()));
    let file = file.transpose()?.unwrap_or_default();
    let Some(user) = args.sandbox.as_ref().or(file.sandbox.as_ref()) else {
        if !args.open_in.is_empty() || !file.open_in.is_empty() {
            bail!(
                "--open-in says which files a server in a sandbox may open: give --sandbox USER too"
            );
        }
        if !args.connect_to.is_empty() || !file.connect_to.is_empty() {
            bail!(
                "--connect-to says which servers a server in a sandbox may connect to: give --sandbox USER too"
            );
        }
        return Ok(Role::Alone);
    };
    let user = User::find(user)?;
    match std::env::var(PARENT) {
        Ok(parent) => Ok(Role::Child(Entrance { parent, user })),
        Err(_) => Ok(Role::Over(parent::run(args, &user)?)),
    }
}

/// Refuses what can't be served in a sandbox.
fn check(config: &ServeConfig) -> Result<()> {
    if config.xen {
        bail!(
            "--xen needs devices of the hypervisor, which a server in a sandbox can't open: give no --sandbox"
        );
    }
    Ok(())
}
