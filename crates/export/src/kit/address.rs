//! Addresses of Unix sockets as users write them: `unix:PATH[,OPTION=VALUE]…`.

use crate::socket_file::SocketAccess;
use pvblk_block::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// True if two addresses with options lead to the same place, whatever their options.
pub fn same_address(a: &str, b: &str) -> bool {
    plain_address(a) == plain_address(b)
}

/// An address without its options, which is its name.
pub fn plain_address(text: &str) -> &str {
    text.split_once(',').map_or(text, |(address, _)| address)
}

/// The options `socket-group=` and `socket-mode=`, the same for the sockets of all exports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessOptions {
    mode: Option<u32>,
    /// By name or number.
    group: Option<String>,
}

impl AccessOptions {
    /// Takes an option; false if it is another one's.
    pub fn take(&mut self, key: &str, value: &str) -> Result<bool, Error> {
        match key {
            "socket-mode" => {
                let parsed = u32::from_str_radix(value, 8).ok();
                let why = "socket-mode is an octal number such as 660, without rights to run";
                let fits = parsed.filter(|mode| mode & !0o666 == 0);
                self.mode = Some(fits.ok_or_else(|| Error::config(why))?);
            }
            "socket-group" if !value.is_empty() => self.group = Some(value.to_owned()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// True if there is one of them.
    pub fn is_given(&self) -> bool {
        *self != AccessOptions::default()
    }

    /// The access that they stand for; `number` looks a group up.
    pub fn resolve(
        &self,
        number: impl Fn(&str) -> Result<u32, Error>,
    ) -> Result<SocketAccess, Error> {
        let group = self.group.as_deref();
        let usual = if group.is_some() { 0o660 } else { 0o600 };
        Ok(SocketAccess {
            mode: self.mode.unwrap_or(usual),
            group: group.map(number).transpose()?,
        })
    }
}

/// `unix:PATH[,socket-group=GROUP][,socket-mode=MODE]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnixListen {
    text: String,
    /// The socket's file.
    pub path: PathBuf,
    /// The processes that may connect there.
    pub access: AccessOptions,
}

impl FromStr for UnixListen {
    type Err = Error;

    fn from_str(text: &str) -> Result<UnixListen, Error> {
        let mut parts = text.split(',');
        let path = parts.next().and_then(|p| p.strip_prefix("unix:"));
        let path = path.filter(|p| !p.is_empty());
        let path = path.ok_or_else(|| Error::config("write unix:PATH"))?;
        let mut access = AccessOptions::default();
        for option in parts {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            if !access.take(key, value)? {
                let why = format!(
                    "{option:?} is none of its options: socket-group=GROUP, socket-mode=MODE"
                );
                return Err(Error::config(why));
            }
        }
        Ok(UnixListen {
            text: text.to_owned(),
            path: path.into(),
            access,
        })
    }
}

impl fmt::Display for UnixListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket_file::{SocketFile, SocketType};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn group(name: &str) -> Result<u32, Error> {
        match name {
            "kvm" => Ok(109),
            _ => Err(Error::config(format!("there is no {name}"))),
        }
    }

    #[test]
    fn a_socket_is_its_owners_unless_its_options_say_otherwise() {
        for (text, mode, number) in [
            ("unix:/run/a", 0o600, None),
            ("unix:/run/a,socket-group=kvm", 0o660, Some(109)),
            ("unix:/run/a,socket-mode=666", 0o666, None),
            (
                "unix:/run/a,socket-mode=620,socket-group=kvm",
                0o620,
                Some(109),
            ),
        ] {
            let listen: UnixListen = text.parse().unwrap();
            assert_eq!(listen.to_string(), text);
            assert_eq!(listen.path, std::path::Path::new("/run/a"));
            assert_eq!(listen.access.is_given(), text.contains(','));
            let expected = SocketAccess {
                mode,
                group: number,
            };
            assert_eq!(listen.access.resolve(group).unwrap(), expected, "{text}");
            assert!(same_address(text, "unix:/run/a") && !same_address(text, "unix:/run/ab"));
        }
    }

    #[test]
    fn a_mistake_is_told() {
        for (text, why) in [
            ("/run/a", "write unix:PATH"),
            ("unix:", "write unix:PATH"),
            ("unix:,socket-mode=660", "write unix:PATH"),
            ("unix:/a,socket-mode=999", "octal"),
            ("unix:/a,socket-mode=770", "without rights to run"),
            ("unix:/a,socket-group=", "none of its options"),
            ("unix:/a,tls=/etc/tls", "none of its options"),
        ] {
            let e = text.parse::<UnixListen>().unwrap_err().to_string();
            assert!(e.contains(why), "{text}: {e}");
        }
        let unknown: UnixListen = "unix:/a,socket-group=nobodys".parse().unwrap();
        let e = unknown.access.resolve(group).unwrap_err().to_string();
        assert!(e.contains("nobodys"), "{e}");
    }

    #[test]
    fn the_file_has_the_group_and_the_mode() {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(
            "unix:{},socket-group=mine,socket-mode=640",
            dir.path().join("s").display()
        );
        let listen: UnixListen = text.parse().unwrap();
        // The user who runs the tests is in this group, and may be in no other.
        let mine = rustix::process::getegid().as_raw();
        let access = listen.access.resolve(|_| Ok(mine)).unwrap();
        let socket = SocketFile::bind_for(&listen.path, SocketType::STREAM, access).unwrap();
        let file = std::fs::metadata(socket.path()).unwrap();
        assert_eq!(
            (file.permissions().mode() & 0o777, file.gid()),
            (0o640, mine)
        );
    }
}
