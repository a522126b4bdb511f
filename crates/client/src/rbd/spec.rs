//! The name of an image, as people write it.

use pvblk_block::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Fate of the requests of an image whose lock was taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLostLock {
    #[default]
    Fail,
    /// They wait until the disk ends.
    Wait,
}

/// An image of a Ceph cluster: `POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][,OPTION]…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdSpec {
    pub pool: String,
    /// The namespace in the pool, or an empty one.
    pub namespace: String,
    pub image: String,
    pub snapshot: Option<String>,
    /// The cluster's configuration file; `None`: where librados looks for it.
    pub conf: Option<PathBuf>,
    /// The user without `client.`; `None`: `admin`.
    pub id: Option<String>,
    /// Open for reading only. A snapshot always is.
    pub read_only: bool,
    /// Take the exclusive lock, if it is opened for writing.
    pub lock: bool,
    pub on_lost_lock: OnLostLock,
}

const EXAMPLE: &str = "rbd:pool/image";
const OPTIONS: &str = "conf=PATH, id=NAME, ro, nolock, on-lost-lock=fail|wait";

impl RbdSpec {
    /// The image of this name, writable, locked.
    pub fn new(pool: impl Into<String>, image: impl Into<String>) -> RbdSpec {
        RbdSpec {
            pool: pool.into(),
            namespace: String::new(),
            image: image.into(),
            snapshot: None,
            conf: None,
            id: None,
            read_only: false,
            lock: true,
            on_lost_lock: OnLostLock::Fail,
        }
    }

    /// True if writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }

    /// True if the exclusive lock is taken and kept.
    pub fn is_locked(&self) -> bool {
        self.lock && !self.is_read_only()
    }

    /// The reason why it can't be opened, or isn't printed as it is parsed.
    pub fn problem(&self) -> Option<String> {
        let parts = [&self.pool, &self.image];
        if parts.iter().any(|part| part.is_empty()) {
            return Some(format!("a pool and an image are missing, as in {EXAMPLE}"));
        }
        let texts = parts
            .into_iter()
            .chain([&self.namespace])
            .chain(&self.snapshot)
            .chain(&self.id);
        let conf = self.conf.iter().map(|path| path.to_string_lossy());
        for text in texts.map(|text| text.as_str().into()).chain(conf.clone()) {
            if text.chars().any(|c| c == ',' || c == '\0' || c == '\n') {
                return Some("names and paths can't hold a comma or a line break".into());
            }
        }
        let names = parts.into_iter().chain([&self.namespace]);
        if names.chain(&self.snapshot).any(|n| n.contains(['/', '@'])) {
            return Some("names can't hold `/` or `@`".into());
        }
        let empty = |text: &Option<String>| text.as_ref().is_some_and(String::is_empty);
        if empty(&self.snapshot) {
            return Some("a snapshot is missing after the `@`".into());
        }
        if empty(&self.id) || conf.into_iter().any(|path| path.is_empty()) {
            return Some("conf= and id= need a value".into());
        }
        None
    }
}

impl FromStr for RbdSpec {
    type Err = String;

    /// Parses the text after `rbd:`. The error says in one line what is allowed.
    fn from_str(text: &str) -> Result<RbdSpec, String> {
        let mut parts = text.split(',');
        let path = parts.next().unwrap_or_default();
        let (path, snapshot) = match path.split_once('@') {
            Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
            None => (path, None),
        };
        let names: Vec<&str> = path.split('/').collect();
        let (pool, namespace, image) = match names[..] {
            [pool, image] => (pool, "", image),
            [pool, namespace, image] => (pool, namespace, image),
            _ => return Err(format!("a pool and an image are missing, as in {EXAMPLE}")),
        };
        let mut spec = RbdSpec {
            namespace: namespace.into(),
            snapshot,
            ..RbdSpec::new(pool, image)
        };
        for part in parts {
            match part.split_once('=') {
                Some(("conf", path)) => spec.conf = Some(path.into()),
                Some(("id", name)) => spec.id = Some(name.into()),
                Some(("on-lost-lock", "fail")) => spec.on_lost_lock = OnLostLock::Fail,
                Some(("on-lost-lock", "wait")) => spec.on_lost_lock = OnLostLock::Wait,
                None if part == "ro" => spec.read_only = true,
                None if part == "nolock" => spec.lock = false,
                _ => {
                    return Err(format!(
                        "unknown option `{}`: use {OPTIONS}",
                        part.escape_debug()
                    ));
                }
            }
        }
        spec.problem().map_or(Ok(spec), Err)
    }
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}/", self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.image)?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{snapshot}")?;
        }
        if let Some(conf) = &self.conf {
            write!(f, ",conf={}", conf.display())?;
        }
        if let Some(id) = &self.id {
            write!(f, ",id={id}")?;
        }
        for (said, word) in [(self.read_only, ",ro"), (!self.lock, ",nolock")] {
            f.write_str(if said { word } else { "" })?;
        }
        match self.on_lost_lock {
            OnLostLock::Fail => Ok(()),
            OnLostLock::Wait => f.write_str(",on-lost-lock=wait"),
        }
    }
}

/// The context of errors of this image.
pub(super) fn failed(spec: &RbdSpec, what: &str, cause: std::io::Error) -> Error {
    Error::os(format!("{spec}: {what}"), cause)
}
