//! Disks of other servers as volumes: `vhost-user`, `rings`.

use super::image::{ImageOpener, InProcess};
use super::parse::{size, unknown};
use crate::opener::{self, FileOpener};
use pvblk_block::units::Size;
use pvblk_block::{BlockDevice, Error};
use pvblk_client::dial::{self, Dialer};
use pvblk_client::local::{ConnectOptions, LocalDisk};
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use std::fmt;
use std::path::PathBuf;
use std::str::Split;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Most queues or connections of a client.
const MOST_QUEUES: u16 = 64;
/// Memory beside the buffers that a vhost-user client shares.
const VHOST_SPARE: u64 = 16 << 20;
/// The same over rings, where a quarter of all is kept for copies, and tables and rings take some too.
const RINGS_SPARE: u64 = 32 << 20;

/// The use that is made of a volume, as far as it decides on what its client asks of a server. The text of a specification goes before it.
#[derive(Clone, Debug)]
pub struct Need {
    /// Queues that are open at the same time.
    pub queues: u16,
    /// Fewer queues will do, if a server has no more.
    pub fewer: bool,
    /// Connections to an NBD server are made when it is opened, so that opening a queue doesn't wait for it.
    pub at_start: bool,
    /// Bytes of the buffers of all requests in flight.
    pub buffer_bytes: u64,
    /// Time for which requests wait for a server of rings that went away; `None`: they fail, those to an NBD server too.
    pub patience: Option<Duration>,
    /// Set when a server of rings asks to end, or is given up.
    pub ended: Arc<AtomicBool>,
    /// Opens files, now and while the volume is used.
    pub opener: Arc<dyn FileOpener>,
    /// Connects to servers, now and while the volume is used; `rbd` connects for itself.
    pub dialer: Arc<dyn Dialer>,
    /// Opens images of Ceph clusters.
    pub images: Arc<dyn ImageOpener>,
}

impl Default for Need {
    /// That of a disk that is served: 4 queues, fewer if there aren't as many, made at the start; a minute of patience; files are opened, and connections made, in this process.
    fn default() -> Need {
        Need {
            queues: 4,
            fewer: true,
            at_start: true,
            buffer_bytes: 16 << 20,
            patience: Some(Duration::from_secs(60)),
            ended: Arc::default(),
            opener: opener::in_process(),
            dialer: dial::in_process(),
            images: Arc::new(InProcess),
        }
    }
}

impl Need {
    /// The need of the volume below a cache, whose background has a queue of its own beside those of the users, and which opens one more for a moment to flush when the
    /// volume shrinks.
    #[must_use]
    pub fn below_cache(&self) -> Need {
        Need {
            queues: self.queues.saturating_add(2).min(MOST_QUEUES),
            ..self.clone()
        }
    }
}

/// A disk of a vhost-user-blk server: `vhost-user:unix:PATH[,queues=N][,queue-size=E][,memory=SIZE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSpec {
    /// The disk's socket.
    pub path: PathBuf,
    /// Rings to ask for, 1 to 64; `None`: what is needed.
    pub queues: Option<u16>,
    /// Entries of each ring: a power of two, 4 to 1024.
    pub entries: u16,
    /// Memory shared with the server, in bytes; `None`: what is needed.
    pub memory_bytes: Option<u64>,
}

impl VhostSpec {
    /// Entries of a ring, unless told otherwise.
    pub const ENTRIES: u16 = 256;

    pub(super) fn open(&self, need: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        let config = VhostClientConfig {
            queues: self.queues.unwrap_or(need.queues),
            fewer: self.queues.is_none() && need.fewer,
            entries: self.entries,
            memory_bytes: self.memory_bytes.unwrap_or(need.buffer_bytes + VHOST_SPARE),
            dialer: Arc::clone(&need.dialer),
            ..VhostClientConfig::default()
        };
        Ok(Arc::new(VhostClient::connect(&self.path, &config)?))
    }

    pub(super) fn problem(&self) -> Option<String> {
        if !(4..=1024).contains(&self.entries) || !self.entries.is_power_of_two() {
            return Some("queue-size must be a power of two from 4 to 1024".into());
        }
        queues_problem(self.queues)
    }
}

fn queues_problem(queues: Option<u16>) -> Option<String> {
    let wrong = queues.is_some_and(|n| !(1..=64).contains(&n));
    wrong.then(|| "queues must be 1 to 64".into())
}

/// A disk of a local server over rings: `rings:unix:PATH,disk=NAME[,queues=N][,ring-pages=P][,memory=SIZE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingsSpec {
    /// The server's socket for front ends.
    pub path: PathBuf,
    /// The disk's name.
    pub disk: String,
    /// Rings to ask for, 1 to 64; `None`: what is needed. The server may offer fewer.
    pub queues: Option<u16>,
    /// Pages of each ring to ask for: 1, 2, 4, 8 or 16.
    pub ring_pages: usize,
    /// Memory shared with the server, in bytes; `None`: what is needed.
    pub memory_bytes: Option<u64>,
}

impl RingsSpec {
    /// Pages of a ring to ask for, unless told otherwise.
    pub const RING_PAGES: usize = 16;

    pub(super) fn open(&self, need: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        let options = ConnectOptions {
            queues: self.queues.unwrap_or(need.queues).into(),
            ring_pages: self.ring_pages,
            memory_bytes: self
                .memory_bytes
                .unwrap_or(need.buffer_bytes * 2 + RINGS_SPARE),
            dialer: Arc::clone(&need.dialer),
            ..ConnectOptions::default()
        };
        let ended = Arc::clone(&need.ended);
        let tell = move || ended.store(true, Ordering::Relaxed);
        let disk = LocalDisk::connect(&self.path, &self.disk, &options, need.patience, tell)?;
        Ok(Arc::new(disk))
    }

    pub(super) fn problem(&self) -> Option<String> {
        if ![1, 2, 4, 8, 16].contains(&self.ring_pages) {
            return Some("ring-pages must be 1, 2, 4, 8 or 16".into());
        }
        queues_problem(self.queues)
    }
}

/// The path of `unix:PATH`, and the options after it.
fn socket<'a>(text: &'a str, example: &str) -> Result<(PathBuf, Split<'a, char>), String> {
    let mut parts = text.split(',');
    let path = parts.next().and_then(|p| p.strip_prefix("unix:"));
    let path = path.filter(|p| !p.is_empty());
    let path = path.ok_or_else(|| format!("a server's socket is missing, as in {example}"))?;
    Ok((path.into(), parts))
}

pub(super) fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    let wrong = |_| format!("{key} `{}` is not a number", value.escape_debug());
    value.parse().map_err(wrong)
}

pub(super) fn vhost_user(text: &str) -> Result<VhostSpec, String> {
    let (path, parts) = socket(text, "vhost-user:unix:/run/vm1.sock")?;
    let mut spec = VhostSpec {
        path,
        queues: None,
        entries: VhostSpec::ENTRIES,
        memory_bytes: None,
    };
    for part in parts {
        match part.split_once('=') {
            Some(("queues", n)) => spec.queues = Some(number("queues", n)?),
            Some(("queue-size", n)) => spec.entries = number("queue-size", n)?,
            Some(("memory", bytes)) => spec.memory_bytes = Some(size(bytes)?),
            _ => return Err(unknown(part, "queues=N, queue-size=E, memory=SIZE")),
        }
    }
    Ok(spec)
}

pub(super) fn rings(text: &str) -> Result<RingsSpec, String> {
    const EXAMPLE: &str = "rings:unix:/run/pvblk.sock,disk=vm1";
    let (path, parts) = socket(text, EXAMPLE)?;
    let mut spec = RingsSpec {
        path,
        disk: String::new(),
        queues: None,
        ring_pages: RingsSpec::RING_PAGES,
        memory_bytes: None,
    };
    for part in parts {
        match part.split_once('=') {
            Some(("disk", name)) => name.clone_into(&mut spec.disk),
            Some(("queues", n)) => spec.queues = Some(number("queues", n)?),
            Some(("ring-pages", n)) => spec.ring_pages = number("ring-pages", n)?,
            Some(("memory", bytes)) => spec.memory_bytes = Some(size(bytes)?),
            _ => {
                return Err(unknown(
                    part,
                    "disk=NAME, queues=N, ring-pages=P, memory=SIZE",
                ));
            }
        }
    }
    match spec.disk.is_empty() {
        true => Err(format!("the disk's name is missing, as in {EXAMPLE}")),
        false => Ok(spec),
    }
}

impl fmt::Display for VhostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vhost-user:unix:{}", self.path.display())?;
        if let Some(n) = self.queues {
            write!(f, ",queues={n}")?;
        }
        if self.entries != VhostSpec::ENTRIES {
            write!(f, ",queue-size={}", self.entries)?;
        }
        memory(f, self.memory_bytes)
    }
}

impl fmt::Display for RingsSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rings:unix:{},disk={}", self.path.display(), self.disk)?;
        if let Some(n) = self.queues {
            write!(f, ",queues={n}")?;
        }
        if self.ring_pages != RingsSpec::RING_PAGES {
            write!(f, ",ring-pages={}", self.ring_pages)?;
        }
        memory(f, self.memory_bytes)
    }
}

fn memory(f: &mut fmt::Formatter<'_>, bytes: Option<u64>) -> fmt::Result {
    bytes.map_or(Ok(()), |bytes| write!(f, ",memory={}", Size(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_needs_queues_of_its_own_below() {
        let below = |queues| {
            let need = Need {
                queues,
                ..Need::default()
            };
            need.below_cache().queues
        };
        assert_eq!((below(1), below(4), below(63), below(64)), (3, 6, 64, 64));
    }
}
