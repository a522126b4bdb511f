//! The configuration of a server: flags and file, checked and put together.

mod buffers;
mod disks;
mod file;
#[cfg(test)]
mod tests;

use crate::cli::ServeArgs;
use crate::control::ControlSocket;
use crate::events;
use crate::log::{self, LogArgs};
use crate::nbd::NbdListen;
use crate::opener::Opener;
use crate::shares::ClientLimits;
use crate::wanted::{Configured, DiskWanted, Listeners, WantedState};
use crate::web::WebConfig;
use anyhow::{Context, Result, anyhow, bail};
use pvblk_block::error_line;
use pvblk_export::kit::UnixListen;
use pvblk_export::xen::StandingOrder;
use pvblk_protocol::blkif::RingSize;
use pvblk_volume::VolumeSpec;
use std::path::PathBuf;
use std::time::Duration;

pub use buffers::{Buffers, buffer_pages, squeeze_duration};
use disks::WrongDisk;
pub use file::File;

/// Most rings of one disk.
pub const MAX_QUEUES: u32 = 64;

/// A checked configuration.
#[derive(Debug)]
pub struct ServeConfig {
    /// As file and flags name them.
    pub configured: Configured,
    /// Disks in the order in which they are served.
    pub wanted: Vec<(String, DiskWanted)>,
    pub disks: Vec<(String, VolumeSpec)>,
    /// Disks that are wanted and can't be served, each with the reason.
    pub wrong: Vec<(String, DiskWanted, String)>,
    pub local: Option<UnixListen>,
    pub nbd: Vec<NbdListen>,
    /// Sockets for virtual machines, each with its disk.
    pub vhost_user: Vec<(String, UnixListen)>,
    pub xen: bool,
    pub xen_attach: Vec<StandingOrder>,
    pub persistent_grants: bool,
    pub workers: usize,
    pub max_queues: u32,
    /// Bytes of vhost-user guests' memory that nobody has allocated; `None`: no limit.
    pub max_guest_unallocated: Option<u64>,
    pub max_ring: RingSize,
    pub spin_max: Duration,
    pub allow_remote: bool,
    pub control: ControlSocket,
    /// The page and the metrics.
    pub web: Option<WebConfig>,
    pub slow: Option<Duration>,
    pub on_event: Option<PathBuf>,
    pub hang_after: Duration,
    pub log: LogArgs,
    pub buffers: Buffers,
    pub clients: ClientLimits,
    /// Where changes at run time are kept.
    pub state: Option<PathBuf>,
    file: File,
}

impl ServeConfig {
    /// Reads the file, if there is one, adds the flags, and checks everything before anything is opened.
    pub fn resolve(args: &ServeArgs, opener: &Opener) -> Result<ServeConfig> {
        let file = match &args.config {
            Some(path) => File::read(path, opener)?,
            None => File::default(),
        };
        let xen = args.xen || file.xen;
        let control = args.control.as_ref().or(file.control.as_ref());
        let control = ControlSocket::of_server(control.map(String::as_str))?;
        let wanted = disks::configured(args, &file)?;
        let disks = disks::check(&wanted, args, xen).map_err(|wrong| wrong.why)?;
        let state = state(args);
        if wanted.is_empty() && state.is_none() && !control.is_told() {
            bail!(
                "no disk to serve: give at least one --disk NAME=VOLUME, or --control unix:PATH and add disks with `pvblk disk add`"
            );
        }
        let local = args.local.as_ref().or(file.local.as_ref());
        let nbd_texts = file.nbd.iter().chain(&args.nbd).cloned();
        let listeners = Listeners {
            local: local.cloned().into_iter().collect(),
            nbd: nbd_texts.collect(),
        };
        let local = local.map(|s| unix_listen("--local", s)).transpose()?;
        let nbd = addresses(&listeners.nbd)?;
        let nowhere = local.is_none() && nbd.is_empty() && disks.vhost_user.is_empty() && !xen;
        if nowhere && state.is_none() && !control.is_told() {
            bail!(
                "nowhere to serve: give --local unix:PATH, --nbd unix:PATH, --nbd tcp:HOST:PORT, --vhost-user NAME=unix:PATH or --xen"
            );
        }
        let workers = workers(args, &file)?;
        let pages = args.max_ring_pages.or(file.max_ring_pages).unwrap_or(16);
        Ok(ServeConfig {
            configured: Configured {
                disks: wanted.clone(),
                listeners,
            },
            wanted,
            disks: disks.specs,
            wrong: Vec::new(),
            local,
            nbd,
            vhost_user: disks.vhost_user,
            xen,
            xen_attach: disks.xen_attach,
            persistent_grants: !(args.no_persistent_grants || file.no_persistent_grants),
            workers,
            max_queues: max_queues(args, &file, workers)?,
            max_guest_unallocated: guest_unallocated(args, &file)?,
            max_ring: ring_size("--max-ring-pages", pages)?,
            spin_max: spin(args.spin_us.or(file.spin_us).unwrap_or(100))?,
            allow_remote: args.allow_remote || file.allow_remote,
            control,
            web: WebConfig::of_server(&args.web, &file)?,
            slow: time_of(args.slow, "slow", &file.slow)?,
            on_event: on_event(args, &file, opener)?,
            hang_after: events::hang_after(time_of(
                args.hang_after,
                "hang_after",
                &file.hang_after,
            )?),
            log: args.log.or(file.log.as_ref(), file.log_format.as_ref()),
            buffers: Buffers::resolve(args, &file)?,
            clients: clients(args, &file)?,
            state,
            file,
        })
    }

    /// Serves what is wanted: the configuration, with changes at run time over it. A disk that was added at run time and can't be served any more is told, and
    /// goes to [`ServeConfig::wrong`].
    pub fn take(&mut self, args: &ServeArgs, state: &WantedState) -> Result<()> {
        let mut wanted = state.disks();
        let disks = loop {
            match disks::check(&wanted, args, self.xen) {
                Ok(disks) => break disks,
                Err(WrongDisk { disk, why }) => {
                    let why = error_line(&*why);
                    tracing::error!("disk {disk} is not served: {why}");
                    let (wrong, right) = wanted.into_iter().partition(|(name, _)| *name == disk);
                    wanted = right;
                    let wrong: Vec<(String, DiskWanted)> = wrong;
                    self.wrong.extend(
                        wrong
                            .into_iter()
                            .map(|(name, disk)| (name, disk, why.clone())),
                    );
                }
            }
        };
        for name in state.held_back() {
            log::line(format_args!(
                "disk {name} isn't served: it is configured, and was removed at run time; `pvblk ctl reload` serves it again"
            ));
        }
        self.wanted = wanted;
        self.disks = disks.specs;
        self.vhost_user = disks.vhost_user;
        self.xen_attach = disks.xen_attach;
        let Listeners { local, nbd } = state.listeners();
        let local = local.first().map(|s| unix_listen("--local", s));
        self.local = local.transpose()?;
        self.nbd = addresses(&nbd)?;
        Ok(())
    }

    /// Checks disks against each other, and whether they can be served.
    pub fn check(&self, args: &ServeArgs, wanted: &[(String, DiskWanted)]) -> Result<()> {
        let checked = disks::check(wanted, args, self.xen);
        checked.map(drop).map_err(|wrong| wrong.why)
    }

    /// The file as it was read.
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn addresses(texts: &[String]) -> Result<Vec<NbdListen>> {
    let parse = |text: &String| Ok(text.parse::<NbdListen>()?);
    texts.iter().map(parse).collect()
}

/// `--state`, or the folder that systemd made for the service.
fn state(args: &ServeArgs) -> Option<PathBuf> {
    let of_service = || {
        let folders = std::env::var("STATE_DIRECTORY").ok()?;
        let first = folders.split(':').next()?;
        (!first.is_empty()).then(|| first.into())
    };
    args.state.clone().or_else(of_service)
}

fn workers(args: &ServeArgs, file: &File) -> Result<usize> {
    match args.workers.or(file.workers) {
        Some(0) => bail!("--workers must be at least 1"),
        Some(n) if n > 1024 => bail!("--workers must be at most 1024"),
        Some(n) => Ok(n),
        None => Ok(pvblk_sys::cpu::allowed().len().max(1)),
    }
}

fn max_queues(args: &ServeArgs, file: &File, workers: usize) -> Result<u32> {
    let usual = (workers as u32).clamp(4, MAX_QUEUES);
    let queues = args.max_queues.or(file.max_queues).unwrap_or(usual);
    if !(1..=MAX_QUEUES).contains(&queues) {
        bail!("--max-queues must be from 1 to {MAX_QUEUES}");
    }
    Ok(queues)
}

/// A time by its flag, or else by its key in the file.
fn time_of(flag: Option<Duration>, key: &str, text: &Option<String>) -> Result<Option<Duration>> {
    match (flag, text) {
        (None, Some(text)) => {
            let time = time(text).map_err(|e| anyhow!("{key} = {text:?}: {e}"))?;
            Ok(Some(time))
        }
        (flag, _) => Ok(flag),
    }
}

fn on_event(args: &ServeArgs, file: &File, opener: &Opener) -> Result<Option<PathBuf>> {
    let program = args.on_event.as_ref().or(file.on_event.as_ref());
    let program = program.map(|p| events::check_program("--on-event", p, opener));
    program.transpose()
}

/// The bounds for NBD clients.
fn clients(args: &ServeArgs, file: &File) -> Result<ClientLimits> {
    let size = |flag: &Option<String>, key: &Option<String>| {
        let text = flag.as_ref().or(key.as_ref());
        text.map(|s| pvblk_volume::parse_size(s)).transpose()
    };
    let default = ClientLimits::default();
    let connections = args.max_connections.or(file.max_connections);
    let of_disk = args
        .max_connections_per_disk
        .or(file.max_connections_per_disk);
    ClientLimits {
        memory: size(&args.max_client_memory, &file.max_client_memory)?,
        memory_of_disk: size(
            &args.max_client_memory_per_disk,
            &file.max_client_memory_per_disk,
        )?,
        connections: connections.unwrap_or(default.connections),
        connections_of_disk: of_disk.unwrap_or(default.connections_of_disk),
    }
    .check()
}

/// Without a word of the user: half of what the server's control group may have, so that guests can't have it killed.
fn guest_unallocated(args: &ServeArgs, file: &File) -> Result<Option<u64>> {
    let of_flag = args.max_guest_unallocated.as_ref();
    let text = of_flag.or(file.max_guest_unallocated.as_ref());
    match text.map(String::as_str) {
        None => Ok(pvblk_backend::group_limit().map(|bytes| bytes / 2)),
        Some("none") => Ok(None),
        Some(size) => match pvblk_volume::parse_size(size) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) => bail!("--max-guest-unallocated {size}: {e}; or none"),
        },
    }
}

/// The path of `unix:PATH`.
pub fn unix_path(flag: &str, text: &str) -> Result<PathBuf> {
    match text.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => Ok(path.into()),
        _ => bail!("{flag} {text}: write unix:PATH"),
    }
}

/// A socket for peers, with its options.
pub fn unix_listen(flag: &str, text: &str) -> Result<UnixListen> {
    text.parse().map_err(|e| anyhow!("{flag} {text}: {e}"))
}

/// A ring's size from its pages.
pub fn ring_size(flag: &str, pages: u32) -> Result<RingSize> {
    RingSize::from_pages(pages as usize)
        .with_context(|| format!("{flag} {pages}: must be 1, 2, 4, 8 or 16"))
}

/// A bounded spin window.
pub fn spin(us: u64) -> Result<Duration> {
    if us > 10_000 {
        bail!("--spin-us {us}: at most 10000, or an idle disk would cost a CPU");
    }
    Ok(Duration::from_micros(us))
}

/// A time with its unit, such as 10ms.
pub fn time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match &text[digits.len()..] {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err("a time has a unit: ns, us, ms or s".into()),
    };
    let number: f64 = digits.parse().map_err(|_| "not a number")?;
    Duration::try_from_secs_f64(number * scale).map_err(|e| e.to_string())
}
