//! Opening a disk.

use crate::shared::Shared;
use crate::{Disk, Error, ErrorKind};
use pvblk_block::BlockDevice;
use pvblk_volume::{Members, Need, RingsSpec, VolumeSpec};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The number of rings and connections that a client can have.
const MOST_QUEUES: u16 = 64;

/// Settings for opening a disk otherwise than [`Disk::open`] and [`Disk::connect`] do.
///
/// ```
/// use pvblk_disk::Options;
/// use std::time::Duration;
///
/// let disk = Options::new()
///     .queues(1)
///     .memory_bytes(1 << 20)
///     .patience(Some(Duration::from_secs(5)))
///     .open("mem:64M")?;
/// assert_eq!(disk.size_bytes(), 64 << 20);
/// # Ok::<(), pvblk_disk::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    queues: u16,
    memory_bytes: u64,
    patience: Option<Duration>,
}

impl Default for Options {
    fn default() -> Options {
        Options::new()
    }
}

impl Options {
    /// Four queues, buffers of 16 MiB, a minute of patience.
    pub fn new() -> Options {
        Options {
            queues: 4,
            memory_bytes: 16 << 20,
            patience: Some(Duration::from_secs(60)),
        }
    }

    /// Sets the number of queues that may be open at the same time, 1 to 63, and of threads that are in blocking calls side by side; more of these wait for one
    /// another. A server may have fewer rings: queues then share rings of a pvblk server, and can't be opened at a vhost-user server.
    #[must_use]
    pub fn queues(mut self, queues: u16) -> Options {
        self.queues = queues;
        self
    }

    /// Sets the bytes of all buffers together, where they are in memory that is shared with a server. The system supplies this memory as it is used. Blocking
    /// calls take up to 1 MiB of it for each thread that is in one.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: u64) -> Options {
        self.memory_bytes = bytes;
        self
    }

    /// Sets the time for which requests wait for a server that went away: on its return they go on, and nobody is told. After that time, or at once with `None`,
    /// they fail with [`ErrorKind::Disconnected`], and so do all later ones.
    ///
    /// It holds for pvblk servers over rings and for NBD servers. A specification may say otherwise (`wait=` and `on-reconnect=` of `nbd:`). Disks of vhost-user
    /// servers always fail at once.
    #[must_use]
    pub fn patience(mut self, patience: Option<Duration>) -> Options {
        self.patience = patience;
        self
    }

    /// Opens the disk that a specification names: see [`Disk::open`].
    pub fn open(&self, spec: &str) -> Result<Disk, Error> {
        let mut spec: VolumeSpec = spec.parse().map_err(Error::of_device)?;
        if let Some(patience) = self.patience {
            wait_at_most(&mut spec, patience);
        }
        self.open_spec(&spec)
    }

    /// Connects to a disk of a pvblk server of this host: see [`Disk::connect`].
    pub fn connect(&self, socket: impl AsRef<Path>, disk: &str) -> Result<Disk, Error> {
        self.open_spec(&VolumeSpec::Rings(RingsSpec {
            path: socket.as_ref().to_owned(),
            disk: disk.to_owned(),
            queues: None,
            ring_pages: RingsSpec::RING_PAGES,
            memory_bytes: None,
        }))
    }

    fn open_spec(&self, spec: &VolumeSpec) -> Result<Disk, Error> {
        if self.queues == 0 || self.queues >= MOST_QUEUES {
            return Err(Error::new(
                ErrorKind::Config,
                format!("{} queues; ask for 1 to {}", self.queues, MOST_QUEUES - 1),
            ));
        }
        let gone = Arc::<AtomicBool>::default();
        let need = Need {
            // One more for a blocking call while the user has all others.
            queues: self.queues + 1,
            fewer: true,
            at_start: false,
            buffer_bytes: self.memory_bytes,
            patience: self.patience,
            ended: Arc::clone(&gone),
            ..Need::default()
        };
        let device: Arc<dyn BlockDevice> = spec.open_for(&need).map_err(Error::of_opening)?;
        let most = usize::from(self.queues);
        Ok(Disk::new(Shared::new(device, gone, most), most))
    }
}

/// Limits the time for which requests wait for NBD servers, unless the specification says it.
fn wait_at_most(spec: &mut VolumeSpec, patience: Duration) {
    use pvblk_volume::NbdSpec;
    match spec {
        VolumeSpec::Nbd(NbdSpec {
            on_reconnect: None,
            wait: wait @ None,
            ..
        }) => *wait = Some(patience),
        VolumeSpec::Delay(_, inner) | VolumeSpec::Fault(_, inner) | VolumeSpec::Cache(_, inner) => {
            wait_at_most(inner, patience)
        }
        VolumeSpec::Raid5(array) => {
            if let Members::Named(members) = &mut array.of {
                let members = members.iter_mut().flatten();
                members.for_each(|m| wait_at_most(m, patience));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_that_of_all_nbd_servers_without_their_own() {
        let of = |text: &str| {
            let mut spec: VolumeSpec = text.parse().expect("a specification");
            wait_at_most(&mut spec, Duration::from_secs(7));
            spec.to_string()
        };
        let uri = "nbd+unix:///a?socket=/s";
        assert_eq!(of(uri), format!("{uri},wait=7s"));
        let (own, fail) = (format!("{uri},wait=1s"), format!("{uri},on-reconnect=fail"));
        assert_eq!(of(&own), own);
        assert_eq!(of(&fail), fail);
        assert_eq!(
            of(&format!("cache:64M:delay:1ms:{uri}")),
            format!("cache:64M:delay:1ms:{uri},wait=7s")
        );
        let array = format!("raid5:[mem:1M][mem:1M][{uri}]");
        assert!(of(&array).contains("wait=7s"), "{}", of(&array));
        assert_eq!(of("mem:1M"), "mem:1M");
    }
}
