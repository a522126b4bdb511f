//! What is measured: volumes in this process, disks over rings, exports over NBD, disks over vhost-user.

use super::spec::JobSpec;
use pvblk_block::{BlockDevice, Error};
use pvblk_client::local::{ConnectOptions, FrontLink, LinkEvent, connect};
use pvblk_client::nbd::{NbdClient, NbdClientConfig, NbdUri};
use pvblk_client::rings::Frontend;
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use pvblk_sys::{EventFd, Poller};
use pvblk_volume::VolumeSpec;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// What a target is written as, for messages.
const FORMS: &str =
    "write a volume such as mem:1G, rings:unix:PATH,disk=NAME, vhost-user:unix:PATH, or an NBD URI";

/// A target as plain data.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetSpec {
    /// A volume, opened in this process.
    Volume(VolumeSpec),
    /// `rings:unix:PATH,disk=NAME[,queues=N][,ring-pages=P][,memory=SIZE]`: a served disk, over rings.
    Rings(RingsSpec),
    /// `nbd+unix:///EXPORT?socket=PATH` or `nbd://HOST:PORT/EXPORT`: an export of an NBD server.
    Nbd(NbdUri),
    /// `vhost-user:unix:PATH[,queues=N][,queue-size=E][,memory=SIZE]`: a disk of a vhost-user-blk server.
    Vhost(VhostSpec),
}

/// How to attach to a vhost-user-blk server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSpec {
    /// The disk's socket.
    pub path: PathBuf,
    /// Rings to ask for; `None`: one for each thread.
    pub queues: Option<u16>,
    /// Entries of each ring: a power of two, 4 to 1024.
    pub entries: u16,
    /// Memory shared with the server, in bytes; `None`: what the jobs need.
    pub memory_bytes: Option<u64>,
}

/// How to attach to a served disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingsSpec {
    /// The server's socket for front ends.
    pub path: PathBuf,
    /// The disk's name.
    pub disk: String,
    /// Rings to ask for; `None`: one for each thread.
    pub queues: Option<u32>,
    /// Pages of each ring to ask for: 1, 2, 4, 8 or 16.
    pub ring_pages: usize,
    /// Memory shared with the server, in bytes; `None`: what the jobs need.
    pub memory_bytes: Option<u64>,
}

/// What the jobs need of a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Threads that use it at the same time.
    pub threads: u32,
    /// Bytes of their buffers.
    pub buffer_bytes: u64,
}

impl Need {
    /// The most that any stage of `jobs` needs; `here` says which of them use this target.
    pub fn of(jobs: &[JobSpec], here: impl Fn(&JobSpec) -> bool) -> Need {
        let (mut most, mut stage) = (Need::default(), Need::default());
        for job in jobs {
            if job.stonewall {
                stage = Need::default();
            }
            if here(job) {
                stage.threads += job.numjobs;
                stage.buffer_bytes += job.buffer_bytes();
            }
            most.threads = most.threads.max(stage.threads);
            most.buffer_bytes = most.buffer_bytes.max(stage.buffer_bytes);
        }
        most
    }
}

impl FromStr for TargetSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<TargetSpec, Error> {
        if let Some(rest) = text.strip_prefix("rings:") {
            return rings(rest)
                .map(TargetSpec::Rings)
                .map_err(|why| Error::config(format!("{text}: {why}")));
        }
        if let Some(rest) = text.strip_prefix("vhost-user:") {
            return vhost(rest)
                .map(TargetSpec::Vhost)
                .map_err(|why| Error::config(format!("{text}: {why}")));
        }
        if text.contains("://") {
            return text.parse().map(TargetSpec::Nbd);
        }
        if text.is_empty() {
            return Err(Error::config(format!("there is no target: {FORMS}")));
        }
        text.parse().map(TargetSpec::Volume)
    }
}

/// The path of `unix:PATH`, and the options behind it.
fn socket<'a>(text: &'a str, form: &str) -> Result<(PathBuf, std::str::Split<'a, char>), String> {
    let mut parts = text.split(',');
    let path = parts.next().and_then(|p| p.strip_prefix("unix:"));
    let path = path.filter(|p| !p.is_empty());
    let path = path.ok_or_else(|| format!("write {form}"))?;
    Ok((path.into(), parts))
}

fn memory(size: &str) -> Result<u64, String> {
    pvblk_volume::parse_size(size).map_err(|e| e.to_string())
}

fn vhost(text: &str) -> Result<VhostSpec, String> {
    let (path, parts) = socket(text, "vhost-user:unix:PATH")?;
    let mut spec = VhostSpec {
        path,
        queues: None,
        entries: VhostClientConfig::default().entries,
        memory_bytes: None,
    };
    for part in parts {
        let bad = |_| format!("{part}: not a number");
        match part.split_once('=') {
            Some(("queues", n)) => spec.queues = Some(n.parse().map_err(bad)?),
            Some(("queue-size", n)) => spec.entries = n.parse().map_err(bad)?,
            Some(("memory", size)) => spec.memory_bytes = Some(memory(size)?),
            _ => {
                return Err(format!(
                    "{part}: the options are queues=, queue-size= and memory="
                ));
            }
        }
    }
    Ok(spec)
}

fn rings(text: &str) -> Result<RingsSpec, String> {
    let (path, parts) = socket(text, "rings:unix:PATH,disk=NAME")?;
    let mut spec = RingsSpec {
        path,
        disk: String::new(),
        queues: None,
        ring_pages: 16,
        memory_bytes: None,
    };
    for part in parts {
        let bad = |_| format!("{part}: not a number");
        match part.split_once('=') {
            Some(("disk", name)) => name.clone_into(&mut spec.disk),
            Some(("queues", n)) => spec.queues = Some(n.parse().map_err(bad)?),
            Some(("ring-pages", n)) => spec.ring_pages = n.parse().map_err(bad)?,
            Some(("memory", size)) => spec.memory_bytes = Some(memory(size)?),
            _ => {
                return Err(format!(
                    "{part}: the options are disk=, queues=, ring-pages= and memory="
                ));
            }
        }
    }
    if spec.disk.is_empty() {
        return Err("the disk's name is missing: add ,disk=NAME".into());
    }
    Ok(spec)
}

/// An open target. Close it after the last run: dropping it leaves a front end's server to find out by itself.
pub struct Target {
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    link: Option<Link>,
    /// Why it failed, if it did.
    failure: Option<Box<dyn Fn() -> Option<String>>>,
}

impl TargetSpec {
    /// What its floors are called by in traces: over rings the disk's name, under which the server traces too.
    pub fn scope(&self) -> &str {
        match self {
            TargetSpec::Rings(spec) => &spec.disk,
            TargetSpec::Volume(_) | TargetSpec::Nbd(_) | TargetSpec::Vhost(_) => "bench",
        }
    }

    /// Opens it. `stop` is set if the target ends by itself, which ends the run.
    pub fn open(&self, need: &Need, stop: &Arc<AtomicBool>) -> Result<Target, Error> {
        match self {
            TargetSpec::Volume(spec) => Ok(Target {
                device: spec.open()?,
                link: None,
                failure: None,
            }),
            TargetSpec::Nbd(uri) => {
                let client = Arc::new(NbdClient::connect(uri, NbdClientConfig::default())?);
                Ok(Target {
                    device: client.clone(),
                    link: None,
                    failure: Some(Box::new(move || client.failure())),
                })
            }
            TargetSpec::Vhost(spec) => {
                let config = VhostClientConfig {
                    queues: spec.queues.unwrap_or(need.threads.clamp(1, 64) as u16),
                    entries: spec.entries,
                    memory_bytes: spec.memory_bytes.unwrap_or(need.buffer_bytes + (16 << 20)),
                    ..VhostClientConfig::default()
                };
                let client = Arc::new(VhostClient::connect(&spec.path, &config)?);
                Ok(Target {
                    device: client.clone(),
                    link: None,
                    failure: Some(Box::new(move || client.failure())),
                })
            }
            TargetSpec::Rings(spec) => {
                let queues = spec.queues.unwrap_or(need.threads.clamp(1, 64));
                // A quarter is kept for bounces, and tables and rings take some too.
                let memory = need.buffer_bytes * 2 + (32 << 20);
                let options = ConnectOptions {
                    queues,
                    ring_pages: spec.ring_pages,
                    memory_bytes: spec.memory_bytes.unwrap_or(memory),
                    ..ConnectOptions::default()
                };
                let (parts, link) = connect(&spec.path, &spec.disk, &options)?;
                let device = Frontend::new(parts)?;
                let link = Link::start(link, Arc::clone(&device), Arc::clone(stop))?;
                Ok(Target {
                    device,
                    link: Some(link),
                    failure: None,
                })
            }
        }
    }
}

impl Target {
    /// Ends the use of the target in order. Errors if its server ended first, with its reason.
    pub fn close(self) -> Result<(), Error> {
        if let Some(why) = self.failure.and_then(|failure| failure()) {
            return Err(Error::new(pvblk_block::ErrorKind::Disconnected, why));
        }
        self.link.map_or(Ok(()), Link::close)
    }
}

/// Follows the control connection of a front end on a thread of its own.
struct Link {
    bell: Arc<EventFd>,
    thread: JoinHandle<Result<(), Error>>,
}

impl Link {
    fn start(
        mut link: FrontLink,
        device: Arc<Frontend>,
        stop: Arc<AtomicBool>,
    ) -> Result<Link, Error> {
        let os = |e| Error::os("following the server's control connection", e);
        let bell = Arc::new(EventFd::new().map_err(os)?);
        let poller = Poller::new().map_err(os)?;
        poller.add(link.fd(), 0, false).map_err(os)?;
        poller.add(bell.as_fd(), 1, false).map_err(os)?;
        let rung = Arc::clone(&bell);
        let body = move || {
            let mut events = Vec::new();
            loop {
                events.clear();
                poller.wait(&mut events, None).map_err(os)?;
                if rung.drain() {
                    return link.close();
                }
                for event in link.step() {
                    let reason = match event {
                        LinkEvent::Resized { sectors } => {
                            device.resize(sectors);
                            continue;
                        }
                        LinkEvent::Closing { reason } => reason,
                        LinkEvent::Closed => None,
                        LinkEvent::Gone { reason } => Some(reason),
                    };
                    stop.store(true, Ordering::Relaxed);
                    let reason = reason.unwrap_or_else(|| "the server closes the disk".into());
                    if link.has_ended() {
                        device.disconnect(&reason);
                        return Err(Error::new(
                            pvblk_block::ErrorKind::Disconnected,
                            format!("the server ended first: {reason}"),
                        ));
                    }
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-link".into())
            .spawn(body)
            .map_err(os)?;
        Ok(Link { bell, thread })
    }

    fn close(self) -> Result<(), Error> {
        self.bell.notify();
        let gone = |_| Error::new(pvblk_block::ErrorKind::Os, "a thread panicked");
        self.thread.join().map_err(gone)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read() {
        assert!(matches!(
            "mem:1G".parse::<TargetSpec>().unwrap(),
            TargetSpec::Volume(_)
        ));
        let TargetSpec::Rings(r) = "rings:unix:/run/x.sock,disk=a,queues=4,ring-pages=2,memory=8M"
            .parse::<TargetSpec>()
            .unwrap()
        else {
            panic!("not rings");
        };
        assert_eq!((r.queues, r.ring_pages), (Some(4), 2));
        assert_eq!(r.memory_bytes, Some(8 << 20));
        assert!(matches!(
            "nbd://h/x".parse::<TargetSpec>().unwrap(),
            TargetSpec::Nbd(_)
        ));
        let TargetSpec::Vhost(v) = "vhost-user:unix:/run/v.sock,queues=2,queue-size=64"
            .parse::<TargetSpec>()
            .unwrap()
        else {
            panic!("not vhost-user");
        };
        assert_eq!((v.queues, v.entries, v.memory_bytes), (Some(2), 64, None));
        for bad in [
            "vhost-user:/x",
            "vhost-user:unix:",
            "vhost-user:unix:/x,disk=a",
            "",
            "http://h/x",
            "rings:",
            "rings:unix:/x",
            "rings:unix:/x,disk=a,queue=1",
            "rings:unix:/x,disk=a,queues=x",
            "mem:",
        ] {
            let e = bad.parse::<TargetSpec>().unwrap_err().to_string();
            assert!(!e.contains('\n'), "{e}");
        }
    }

    #[test]
    fn a_stage_needs_what_its_jobs_need_together() {
        let job = |numjobs, stonewall| JobSpec {
            numjobs,
            stonewall,
            ..JobSpec::new("j")
        };
        let need = Need::of(&[job(1, false), job(2, false), job(2, true)], |_| true);
        assert_eq!((need.threads, need.buffer_bytes), (3, 3 * 4096));
    }
}
