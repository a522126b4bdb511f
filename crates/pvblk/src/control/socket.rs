//! Where the control socket is.

use crate::config::unix_path;
use anyhow::{Result, bail};
use clap::Args;
use std::path::{Path, PathBuf};

/// Where a server of the system listens, and where its clients look for it.
const USUAL: &str = "unix:/run/pvblk/control.sock";
/// Names another one; `none`: servers listen only where they are told.
const VARIABLE: &str = "PVBLK_CONTROL";

/// A client's flag.
#[derive(Args, Debug, Clone)]
pub struct ControlArg {
    /// The server's control socket [default: $PVBLK_CONTROL, else unix:/run/pvblk/control.sock]
    #[arg(long, value_name = "unix:PATH")]
    pub control: Option<String>,
}

impl ControlArg {
    pub fn path(&self) -> Result<PathBuf> {
        client_path(self.control.as_deref(), variable().as_deref())
    }

    /// The same, if a server is named, or a socket is at the usual place.
    pub fn find(&self) -> Result<Option<PathBuf>> {
        let variable = variable();
        if self.control.is_none() && variable.as_deref() == Some("none") {
            return Ok(None);
        }
        let path = client_path(self.control.as_deref(), variable.as_deref())?;
        let is_usual = self.control.is_none() && variable.is_none();
        Ok((!is_usual || path.exists()).then_some(path))
    }
}

fn variable() -> Option<String> {
    std::env::var(VARIABLE).ok().filter(|v| !v.is_empty())
}

fn client_path(flag: Option<&str>, variable: Option<&str>) -> Result<PathBuf> {
    match (flag, variable) {
        (Some(flag), _) => unix_path("--control", flag),
        (None, Some("none")) => {
            bail!("which server? give --control unix:PATH ({VARIABLE} is none)")
        }
        (None, Some(text)) => unix_path(&format!("{VARIABLE}="), text),
        (None, None) => unix_path("--control", USUAL),
    }
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlSocket {
    /// It was told.
    Told(PathBuf),
    /// At the usual place, if it can.
    Usual(PathBuf),
    /// It was told not to, or may not be at the usual place.
    None,
}

impl ControlSocket {
    /// The socket that follows from `--control` or the file's `control`.
    pub fn of_server(told: Option<&str>) -> Result<ControlSocket> {
        let of_service = std::env::var("RUNTIME_DIRECTORY").ok();
        let is_root = pvblk_sys::limits::is_root();
        ControlSocket::resolve(told, variable().as_deref(), of_service.as_deref(), is_root)
    }

    fn resolve(
        told: Option<&str>,
        variable: Option<&str>,
        of_service: Option<&str>,
        is_root: bool,
    ) -> Result<ControlSocket> {
        let usual = unix_path("", USUAL)?;
        Ok(match (told, variable) {
            (Some("none"), _) => ControlSocket::None,
            (Some(text), _) => ControlSocket::Told(unix_path("--control", text)?),
            (None, Some("none")) => ControlSocket::None,
            (None, Some(text)) => ControlSocket::Told(unix_path(&format!("{VARIABLE}="), text)?),
            // systemd's RuntimeDirectory=; there may be several.
            (None, None)
                if of_service.is_some_and(|dirs| {
                    dirs.split(':')
                        .any(|d| Some(Path::new(d)) == usual.parent())
                }) =>
            {
                ControlSocket::Usual(usual)
            }
            (None, None) if is_root => ControlSocket::Usual(usual),
            (None, None) => ControlSocket::None,
        })
    }

    pub fn is_told(&self) -> bool {
        matches!(self, ControlSocket::Told(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_meet_at_the_usual_place_unless_they_are_told_another() {
        let usual = || ControlSocket::Usual("/run/pvblk/control.sock".into());
        let told = |p: &str| ControlSocket::Told(p.into());
        let server =
            |flag, variable, dir, root| ControlSocket::resolve(flag, variable, dir, root).unwrap();
        assert_eq!(server(None, None, None, true), usual());
        assert_eq!(server(None, None, None, false), ControlSocket::None);
        assert_eq!(
            server(None, None, Some("/run/a:/run/pvblk"), false),
            usual()
        );
        assert_eq!(
            server(None, None, Some("/run/other"), false),
            ControlSocket::None
        );
        assert_eq!(server(None, Some("unix:/x"), None, false), told("/x"));
        assert_eq!(
            server(Some("unix:/y"), Some("unix:/x"), None, true),
            told("/y")
        );
        assert_eq!(server(None, Some("none"), None, true), ControlSocket::None);
        assert_eq!(server(Some("none"), None, None, true), ControlSocket::None);
        assert!(ControlSocket::resolve(Some("/y"), None, None, true).is_err());
        let client = |flag, variable| client_path(flag, variable).unwrap();
        assert_eq!(client(None, None), Path::new("/run/pvblk/control.sock"));
        assert_eq!(client(None, Some("unix:/x")), Path::new("/x"));
        assert_eq!(client(Some("unix:/y"), Some("none")), Path::new("/y"));
        let e = client_path(None, Some("none")).unwrap_err().to_string();
        assert!(e.contains("--control unix:PATH"), "{e}");
    }
}
