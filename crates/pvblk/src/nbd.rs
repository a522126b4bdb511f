//! `--nbd`: where to listen for NBD clients, which of them may do what, and TLS.

use crate::opener::Opener;
use pvblk_block::Error;
use pvblk_export::kit::AccessOptions;
use pvblk_export::nbd::{Clients, Credentials, Rights, Rule, Rules, Tls, Who};
use pvblk_export::socket_file::SocketAccess;
use pvblk_protocol::nbd::NbdAddr;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// Files of credentials, with the names that QEMU's and nbdkit's users know: certificate, key, authorities, revoked certificates.
const FILES: [&str; 4] = [
    "server-cert.pem",
    "server-key.pem",
    "ca-cert.pem",
    "ca-crl.pem",
];

/// `ADDRESS[,OPTION=VALUE]…`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdListen {
    text: String,
    address: NbdAddr,
    access: AccessOptions,
    tls: Option<TlsOptions>,
    allow: Vec<Allow>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct TlsOptions {
    folder: PathBuf,
    required: bool,
    clients: Clients,
}

/// `WHO=DISK[:ro]`
#[derive(Clone, Debug, PartialEq, Eq)]
struct Allow {
    who: Named,
    disk: Option<String>,
    rights: Rights,
}

/// Clients, with users and groups by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    Any,
    User(String),
    Group(String),
    Certificate(String),
}

impl FromStr for NbdListen {
    type Err = Error;

    fn from_str(text: &str) -> Result<NbdListen, Error> {
        let mut parts = text.split(',');
        let address: NbdAddr = parts.next().unwrap_or_default().parse()?;
        let is_unix = matches!(address, NbdAddr::Unix(_));
        let wrong = |why: &str| Error::config(format!("--nbd {text}: {why}"));
        let (mut access, mut allow) = (AccessOptions::default(), Vec::new());
        let (mut folder, mut required, mut clients) = (None, None, None);
        for option in parts {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let yes_or_no = |yes: &str, no: &str| match value {
                v if v == yes => Ok(true),
                v if v == no => Ok(false),
                _ => Err(wrong(&format!("write {key}={yes} or {key}={no}"))),
            };
            match key {
                "tls" if !value.is_empty() => folder = Some(PathBuf::from(value)),
                "tls-mode" => required = Some(yes_or_no("require", "allow")?),
                "verify-peer" => clients = Some(yes_or_no("yes", "no")?),
                "allow" => {
                    let why = "write allow=WHO=DISK or allow=WHO=DISK:ro, where WHO is any, cert:NAME, uid:USER or gid:GROUP, and DISK a name or *";
                    allow.push(parse_allow(value).ok_or_else(|| wrong(why))?);
                }
                _ => {
                    let taken = access.take(key, value);
                    if taken.map_err(|e| wrong(&e.to_string()))? {
                        continue;
                    }
                    return Err(wrong(&format!(
                        "{option:?} is none of its options: tls=DIR, tls-mode, verify-peer, allow, socket-group, socket-mode"
                    )));
                }
            }
        }
        if !is_unix && access.is_given() {
            return Err(wrong("socket-mode and socket-group are for Unix sockets"));
        }
        if folder.is_none() && (required.is_some() || clients.is_some()) {
            return Err(wrong("tls-mode and verify-peer need tls=DIR"));
        }
        let clients = match clients {
            Some(false) => Clients::NeedNoCertificates,
            _ => Clients::MustHaveCertificates,
        };
        let tls = folder.map(|folder| TlsOptions {
            folder,
            required: required.unwrap_or(true),
            clients,
        });
        let has = |is: fn(&Named) -> bool| allow.iter().any(|a: &Allow| is(&a.who));
        let verifies = tls.is_some() && clients == Clients::MustHaveCertificates;
        if has(|who| matches!(who, Named::Certificate(_))) && !verifies {
            return Err(wrong("allow=cert:… needs tls=DIR, and verify-peer=yes"));
        }
        if has(|who| matches!(who, Named::User(_) | Named::Group(_))) && !is_unix {
            return Err(wrong("allow=uid:… and allow=gid:… are for Unix sockets"));
        }
        Ok(NbdListen {
            text: text.to_owned(),
            address,
            access,
            tls,
            allow,
        })
    }
}

fn parse_allow(text: &str) -> Option<Allow> {
    let (who, disk) = text.rsplit_once('=')?;
    let (disk, rights) = match disk.rsplit_once(':') {
        Some((disk, rights)) => (disk, rights.parse().ok()?),
        None => (disk, Rights::ReadWrite),
    };
    let who = match who.split_once(':') {
        None if who == "any" => Named::Any,
        Some((_, "")) => return None,
        Some(("cert", name)) => Named::Certificate(name.to_owned()),
        Some(("uid", name)) => Named::User(name.to_owned()),
        Some(("gid", name)) => Named::Group(name.to_owned()),
        _ => return None,
    };
    let disk = match disk {
        "" => return None,
        "*" => None,
        name => Some(name.to_owned()),
    };
    Some(Allow { who, disk, rights })
}

impl fmt::Display for NbdListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl NbdListen {
    pub fn address(&self) -> &NbdAddr {
        &self.address
    }

    /// The address, if nobody without a certificate gets to a disk there.
    pub fn secured(&self) -> Option<String> {
        let tls = self.tls.as_ref()?;
        let is = tls.required && tls.clients == Clients::MustHaveCertificates;
        is.then(|| self.address.to_string())
    }

    /// The files that its credentials are in; some of them needn't be there.
    pub fn files(&self) -> Vec<PathBuf> {
        let tls = self.tls.iter();
        tls.flat_map(|tls| FILES.map(|name| tls.folder.join(name)))
            .collect()
    }

    /// The processes that may connect to its socket.
    pub fn access(&self, opener: &Opener) -> Result<SocketAccess, Error> {
        opener.access(&self.access)
    }

    /// The rights of clients.
    pub fn rules(&self, opener: &Opener) -> Result<Rules, Error> {
        let rule = |allow: &Allow| {
            Ok(Rule {
                who: match &allow.who {
                    Named::Any => Who::Any,
                    Named::User(name) => Who::User(opener.number("/etc/passwd", name)?),
                    Named::Group(name) => Who::Group(opener.number("/etc/group", name)?),
                    Named::Certificate(name) => Who::Certificate(name.clone()),
                },
                disk: allow.disk.clone(),
                rights: allow.rights,
            })
        };
        let rules: Result<Vec<Rule>, Error> = self.allow.iter().map(rule).collect();
        rules.map(Rules::new)
    }

    /// TLS with its credentials, which are read by `opener` now and when they change.
    pub fn tls(&self, opener: &Arc<Opener>) -> Result<Option<Arc<Tls>>, Error> {
        let Some(TlsOptions {
            folder,
            required,
            clients,
        }) = self.tls.clone()
        else {
            return Ok(None);
        };
        let opener = Arc::clone(opener);
        let read = move |name: &str| {
            let path = folder.join(name);
            let bytes = opener.credential(&path);
            bytes.map_err(|e| {
                (
                    e.kind(),
                    Error::os(format!("reading {}", path.display()), e),
                )
            })
        };
        let credentials = move || {
            let needed = |name: &str| read(name).map_err(|(_, e)| e);
            let optional = |name: &str| match read(name) {
                Err((ErrorKind::NotFound, _)) => Ok(None),
                Err((_, e)) => Err(e),
                Ok(bytes) => Ok(Some(bytes)),
            };
            let [certificate, key, authorities, revoked] = FILES;
            Ok(Credentials {
                certificate: needed(certificate)?,
                key: needed(key)?,
                authorities: optional(authorities)?,
                revoked: optional(revoked)?,
            })
        };
        let tls = Tls::new(required, clients, Box::new(credentials))?;
        Ok(Some(Arc::new(tls)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_an_address_with_options() {
        let plain: NbdListen = "unix:/run/nbd.sock".parse().unwrap();
        let opener = Opener::default();
        assert_eq!(plain.access(&opener).unwrap(), SocketAccess::default());
        assert_eq!(plain.rules(&opener).unwrap(), Rules::default());
        assert!(plain.secured().is_none() && plain.files().is_empty());
        let text = "unix:/run/nbd.sock,socket-group=12,allow=uid:root=vm1,allow=any=*:ro";
        let shared: NbdListen = text.parse().unwrap();
        assert_eq!(shared.to_string(), text);
        let access = shared.access(&opener).unwrap();
        assert_eq!((access.mode, access.group), (0o660, Some(12)));
        let rules = Rules::new(vec![
            Rule {
                who: Who::User(0),
                disk: Some("vm1".into()),
                rights: Rights::ReadWrite,
            },
            Rule {
                who: Who::Any,
                disk: None,
                rights: Rights::ReadOnly,
            },
        ]);
        assert_eq!(shared.rules(&opener).unwrap(), rules);
        let tls: NbdListen = "tcp:0.0.0.0:10809,tls=/etc/pvblk/tls,allow=cert:b.example=*:ro"
            .parse()
            .unwrap();
        assert_eq!(tls.secured().unwrap(), "tcp:0.0.0.0:10809");
        assert_eq!(tls.files().len(), 4);
        for text in ["tls-mode=allow", "verify-peer=no"] {
            let tls: NbdListen = format!("tcp:h:1,tls=/d,{text}").parse().unwrap();
            assert!(tls.secured().is_none());
        }
    }

    #[test]
    fn a_mistake_is_told() {
        for (text, why) in [
            ("unix:/a,b", "none of its options"),
            ("unix:/a,socket-mode=999", "octal"),
            ("unix:/a,socket-mode=777", "without rights to run"),
            ("tcp:h:1,socket-group=kvm", "Unix sockets"),
            ("tcp:h:1,tls-mode=allow", "need tls=DIR"),
            ("tcp:h:1,tls=/d,tls-mode=maybe", "tls-mode=require"),
            ("tcp:h:1,allow=cert:x=*", "needs tls=DIR"),
            (
                "tcp:h:1,tls=/d,verify-peer=no,allow=cert:x=*",
                "verify-peer=yes",
            ),
            ("tcp:h:1,allow=uid:1=*", "Unix sockets"),
            ("unix:/a,allow=everyone=*", "WHO is any"),
            ("unix:/a,allow=any=vm1:wo", "WHO is any"),
        ] {
            let e = text.parse::<NbdListen>().unwrap_err().to_string();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
