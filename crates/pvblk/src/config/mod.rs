//! What to serve: flags and file, checked and put together.

use crate::cli::ServeArgs;
use crate::shares::ClientLimits;
use anyhow::{Context, Result, bail};
use pvblk_backend::{FLOOR_PAGES_PER_WORKER, MAX_BUFFER_PAGES, SQUEEZE_DURATION};
use pvblk_export::vhost_user::Listen;
use pvblk_export::xen::StandingOrder;
use pvblk_export::xen::node::parse_device;
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::nbd::NbdAddr;
use pvblk_volume::VolumeSpec;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most rings of one disk.
pub const MAX_QUEUES: u32 = 64;

/// A checked configuration.
#[derive(Debug)]
pub struct ServeConfig {
    pub disks: Vec<(String, VolumeSpec)>,
    /// Names of disks for one front end at a time.
    pub exclusive: Vec<String>,
    pub local: Option<PathBuf>,
    pub nbd: Vec<NbdAddr>,
    pub vhost_user: Vec<Listen>,
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
    pub control: Option<PathBuf>,
    pub slow: Option<Duration>,
    pub buffers: Buffers,
    pub clients: ClientLimits,
}

/// How much buffer memory is kept, and when it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Pages that each connection keeps.
    pub max_pages: usize,
    /// How long none are kept under pressure.
    pub squeeze: Duration,
    /// Pages for each worker that are kept even then.
    pub floor_pages: usize,
    /// Listen for pressure.
    pub listen: bool,
}

impl Default for Buffers {
    fn default() -> Buffers {
        Buffers {
            max_pages: MAX_BUFFER_PAGES,
            squeeze: SQUEEZE_DURATION,
            floor_pages: FLOOR_PAGES_PER_WORKER,
            listen: true,
        }
    }
}

/// Most pages that a connection can be told to keep: as many as it can have in flight.
const MOST_BUFFER_PAGES: usize = 16384;
/// Longest squeeze.
const LONGEST_SQUEEZE: Duration = Duration::from_secs(60);

/// Checks a number of pages to keep.
pub fn buffer_pages(pages: usize) -> Result<usize> {
    if pages > MOST_BUFFER_PAGES {
        bail!("--max-buffer-pages {pages}: at most {MOST_BUFFER_PAGES}");
    }
    Ok(pages)
}

/// Checks the length of a squeeze.
pub fn squeeze_duration(ms: u64) -> Result<Duration> {
    let duration = Duration::from_millis(ms);
    if duration > LONGEST_SQUEEZE {
        bail!(
            "--buffer-squeeze-duration-ms {ms}: at most {}",
            LONGEST_SQUEEZE.as_millis()
        );
    }
    Ok(duration)
}

/// Checks a worker's floor.
pub fn floor_pages(pages: usize) -> Result<usize> {
    if pages > FLOOR_PAGES_PER_WORKER {
        bail!("--buffer-floor-pages {pages}: at most {FLOOR_PAGES_PER_WORKER}");
    }
    Ok(pages)
}

/// The file's form.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    local: Option<String>,
    #[serde(default)]
    nbd: Vec<String>,
    workers: Option<usize>,
    max_queues: Option<u32>,
    max_guest_unallocated: Option<String>,
    max_ring_pages: Option<u32>,
    spin_us: Option<u64>,
    #[serde(default)]
    allow_remote: bool,
    control: Option<String>,
    slow: Option<String>,
    max_buffer_pages: Option<usize>,
    buffer_squeeze_duration_ms: Option<u64>,
    buffer_floor_pages: Option<usize>,
    #[serde(default)]
    no_pressure: bool,
    max_client_memory: Option<String>,
    max_client_memory_per_disk: Option<String>,
    max_connections: Option<usize>,
    max_connections_per_disk: Option<usize>,
    #[serde(default)]
    xen: bool,
    #[serde(default)]
    no_persistent_grants: bool,
    #[serde(default)]
    disk: BTreeMap<String, DiskTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DiskTable {
    volume: String,
    #[serde(default)]
    exclusive: bool,
    vhost_user: Option<String>,
    /// Guests that get it, as in `--xen-attach`.
    #[serde(default)]
    xen_attach: Vec<String>,
}

impl ServeConfig {
    /// Reads the file, if there is one, adds the flags, and checks everything before anything is opened.
    pub fn resolve(args: &ServeArgs) -> Result<ServeConfig> {
        let file = match &args.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let mut disks = Vec::new();
        let mut vhost_user = Vec::new();
        let mut xen_attach = Vec::new();
        for (name, table) in &file.disk {
            disks.push((name.clone(), table.volume.clone()));
            if let Some(path) = &table.vhost_user {
                vhost_user.push((name.clone(), unix_path("vhost_user =", path)?));
            }
            xen_attach.extend(table.xen_attach.iter().map(|g| format!("{name}={g}")));
        }
        for arg in &args.disks {
            let (name, volume) = arg.split_once('=').with_context(|| {
                format!("--disk {arg}: write NAME=VOLUME, such as --disk a=mem:1G")
            })?;
            disks.push((name.to_owned(), volume.to_owned()));
        }
        if disks.is_empty() {
            bail!("no disk to serve: give at least one --disk NAME=VOLUME");
        }
        let mut checked: Vec<(String, VolumeSpec)> = Vec::new();
        for (name, volume) in disks {
            check_name(&name)?;
            if checked.iter().any(|(n, _)| *n == name) {
                bail!("disk {name} is given twice: names must differ");
            }
            let spec = volume.parse().with_context(|| format!("disk {name}"))?;
            checked.push((name, spec));
        }
        let of_file = file.disk.iter().filter(|(_, t)| t.exclusive);
        let exclusive: Vec<String> = of_file
            .map(|(name, _)| name.clone())
            .chain(args.exclusive.iter().cloned())
            .collect();
        if let Some(name) = exclusive
            .iter()
            .find(|n| checked.iter().all(|(c, _)| c != *n))
        {
            bail!("--exclusive {name}: there is no disk {name}");
        }
        let local = args.local.as_ref().or(file.local.as_ref());
        let local = local.map(|s| unix_path("--local", s)).transpose()?;
        let nbd: Vec<NbdAddr> = file
            .nbd
            .iter()
            .chain(&args.nbd)
            .map(|s| s.parse::<NbdAddr>().map_err(anyhow::Error::from))
            .collect::<Result<_>>()?;
        for arg in &args.vhost_user {
            let (name, path) = arg.split_once('=').with_context(|| {
                format!("--vhost-user {arg}: write NAME=unix:PATH, such as --vhost-user a=unix:/run/a.sock")
            })?;
            vhost_user.push((name.to_owned(), unix_path("--vhost-user NAME=", path)?));
        }
        let vhost_user = vhost_user
            .into_iter()
            .map(
                |(disk, path)| match checked.iter().any(|(n, _)| *n == disk) {
                    true => Ok(Listen { disk, path }),
                    false => bail!(
                        "--vhost-user {disk}=unix:{}: there is no disk {disk}",
                        path.display()
                    ),
                },
            )
            .collect::<Result<Vec<_>>>()?;
        let xen = args.xen || file.xen;
        if local.is_none() && nbd.is_empty() && vhost_user.is_empty() && !xen {
            bail!(
                "nowhere to serve: give --local unix:PATH, --nbd unix:PATH, --nbd tcp:HOST:PORT, --vhost-user NAME=unix:PATH or --xen"
            );
        }
        xen_attach.extend(args.xen_attach.iter().cloned());
        if !xen_attach.is_empty() && !xen {
            bail!("--xen-attach {}: it needs --xen, too", xen_attach[0]);
        }
        let xen_attach = orders(&xen_attach, &checked)?;
        let workers = match args.workers.or(file.workers) {
            Some(0) => bail!("--workers must be at least 1"),
            Some(n) if n > 1024 => bail!("--workers must be at most 1024"),
            Some(n) => n,
            None => pvblk_sys::cpu::allowed().len().max(1),
        };
        let max_queues = args
            .max_queues
            .or(file.max_queues)
            .unwrap_or((workers as u32).clamp(4, MAX_QUEUES));
        if !(1..=MAX_QUEUES).contains(&max_queues) {
            bail!("--max-queues must be from 1 to {MAX_QUEUES}");
        }
        let unallocated = args
            .max_guest_unallocated
            .as_ref()
            .or(file.max_guest_unallocated.as_ref());
        let control = args.control.as_ref().or(file.control.as_ref());
        let control = control.map(|s| unix_path("--control", s)).transpose()?;
        let slow = |s: &String| time(s).map_err(|e| anyhow::anyhow!("slow = {s:?}: {e}"));
        let slow = match (args.slow, &file.slow) {
            (None, Some(text)) => Some(slow(text)?),
            (flag, _) => flag,
        };
        let mut buffers = Buffers::default();
        if let Some(n) = args.max_buffer_pages.or(file.max_buffer_pages) {
            buffers.max_pages = buffer_pages(n)?;
        }
        if let Some(ms) = args
            .buffer_squeeze_duration_ms
            .or(file.buffer_squeeze_duration_ms)
        {
            buffers.squeeze = squeeze_duration(ms)?;
        }
        if let Some(n) = args.buffer_floor_pages.or(file.buffer_floor_pages) {
            buffers.floor_pages = floor_pages(n)?;
        }
        buffers.listen = !(args.no_pressure || file.no_pressure);
        let pages = args.max_ring_pages.or(file.max_ring_pages).unwrap_or(16);
        Ok(ServeConfig {
            disks: checked,
            exclusive,
            local,
            nbd,
            vhost_user,
            xen,
            xen_attach,
            persistent_grants: !(args.no_persistent_grants || file.no_persistent_grants),
            workers,
            max_queues,
            max_guest_unallocated: guest_unallocated(unallocated)?,
            max_ring: ring_size("--max-ring-pages", pages)?,
            spin_max: spin(args.spin_us.or(file.spin_us).unwrap_or(50))?,
            allow_remote: args.allow_remote || file.allow_remote,
            control,
            slow,
            buffers,
            clients: clients(args, &file)?,
        })
    }
}

/// What NBD clients may have.
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
fn guest_unallocated(text: Option<&String>) -> Result<Option<u64>> {
    match text.map(String::as_str) {
        None => Ok(pvblk_backend::group_limit().map(|bytes| bytes / 2)),
        Some("none") => Ok(None),
        Some(size) => match pvblk_volume::parse_size(size) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) => bail!("--max-guest-unallocated {size}: {e}; or none"),
        },
    }
}

fn read(path: &Path) -> Result<File> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    toml::from_str(&text).map_err(|e| {
        let line = e
            .span()
            .map_or(1, |s| 1 + text[..s.start].matches('\n').count());
        anyhow::anyhow!("{}, line {line}: {}", path.display(), e.message())
    })
}

/// Checks disks for guests by name.
fn orders(all: &[String], disks: &[(String, VolumeSpec)]) -> Result<Vec<StandingOrder>> {
    let mut orders: Vec<StandingOrder> = Vec::new();
    for text in all {
        let order = order(text).with_context(|| format!("--xen-attach {text}"))?;
        let StandingOrder { disk, guest, .. } = &order;
        if !disks.iter().any(|(name, _)| name == disk) {
            bail!("--xen-attach {text}: there is no disk {disk}");
        }
        for other in orders.iter().filter(|o| o.guest == *guest) {
            if other.disk == *disk {
                bail!("--xen-attach {text}: guest {guest} gets disk {disk} already");
            }
            if order.device.is_some() && other.device == order.device {
                bail!("--xen-attach {text}: that device is disk {}", other.disk);
            }
        }
        orders.push(order);
    }
    Ok(orders)
}

/// `DISK=GUEST[:DEVICE]`.
fn order(text: &str) -> Result<StandingOrder> {
    let parts = text
        .split_once('=')
        .context("write DISK=GUEST or DISK=GUEST:DEVICE, such as vm1=debian:xvda")?;
    // Device names have no colon, guests' may.
    let (guest, device) = match parts.1.rsplit_once(':') {
        Some((guest, device)) => (guest, Some(parse_device(device)?)),
        None => (parts.1, None),
    };
    if guest.is_empty() || guest.bytes().all(|b| b.is_ascii_digit()) {
        bail!("give the guest's name: its number is another after each start");
    }
    Ok(StandingOrder {
        disk: parts.0.into(),
        guest: guest.into(),
        device,
    })
}

fn check_name(name: &str) -> Result<()> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(good) {
        bail!("disk name {name:?}: use 1 to 64 letters, digits, '-', '_' or '.'");
    }
    Ok(())
}

/// The path of `unix:PATH`.
pub fn unix_path(flag: &str, text: &str) -> Result<PathBuf> {
    match text.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => Ok(path.into()),
        _ => bail!("{flag} {text}: write unix:PATH"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(time("10ms"), Ok(Duration::from_millis(10)));
        assert_eq!(time("1.5us"), Ok(Duration::from_nanos(1500)));
        for wrong in ["", "10", "ms", "-1s", "10 ms", "1e300s", "1h"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    fn args(disks: &[&str]) -> ServeArgs {
        ServeArgs {
            disks: disks.iter().map(|s| (*s).to_owned()).collect(),
            nbd: vec!["unix:/tmp/x.sock".into()],
            ..ServeArgs::default()
        }
    }

    #[test]
    fn mistakes_are_told_in_one_line_that_says_what_to_do() {
        let cases: &[(&[&str], &str)] = &[
            (&[], "--disk NAME=VOLUME"),
            (&["a"], "NAME=VOLUME"),
            (&["a=mem:1M", "a=mem:2M"], "given twice"),
            (&["a b=mem:1M"], "letters"),
            (&["a=floppy:1M"], "disk a"),
        ];
        for (disks, expect) in cases {
            let e = format!("{:#}", ServeConfig::resolve(&args(disks)).unwrap_err());
            assert!(e.contains(expect), "{e}");
            assert!(!e.contains('\n'), "{e}");
        }
        let mut a = args(&["a=mem:1M"]);
        a.max_ring_pages = Some(3);
        assert!(ServeConfig::resolve(&a).is_err());
        a.max_ring_pages = None;
        a.buffer_floor_pages = Some(65);
        assert!(ServeConfig::resolve(&a).is_err());
        a.buffer_floor_pages = None;
        a.max_buffer_pages = Some(16385);
        assert!(ServeConfig::resolve(&a).is_err());
        a.max_buffer_pages = None;
        a.nbd.clear();
        assert!(ServeConfig::resolve(&a).is_err());
    }

    #[test]
    fn a_virtual_machines_socket_names_its_disk() {
        let mut a = args(&["a=mem:1M"]);
        a.nbd.clear();
        for (wrong, expect) in [
            ("a", "NAME=unix:PATH"),
            ("a=/tmp/x", "unix:PATH"),
            ("b=unix:/tmp/x", "no disk b"),
        ] {
            a.vhost_user = vec![wrong.into()];
            let e = format!("{:#}", ServeConfig::resolve(&a).unwrap_err());
            assert!(e.contains(expect) && !e.contains('\n'), "{e}");
        }
        a.vhost_user = vec!["a=unix:/tmp/x".into()];
        let c = ServeConfig::resolve(&a).unwrap();
        assert_eq!(c.vhost_user[0].path, Path::new("/tmp/x"));
        for (text, limit) in [("none", None), ("3G", Some(3 << 30))] {
            a.max_guest_unallocated = Some(text.into());
            assert_eq!(
                ServeConfig::resolve(&a).unwrap().max_guest_unallocated,
                limit
            );
        }
        a.max_guest_unallocated = Some("much".into());
        let e = format!("{:#}", ServeConfig::resolve(&a).unwrap_err());
        assert!(
            e.contains("max-guest-unallocated") && !e.contains('\n'),
            "{e}"
        );
    }

    #[test]
    fn disks_for_xen_guests_by_name_are_checked_before_anything_starts() {
        let mut a = args(&["a=mem:1M", "b=mem:1M"]);
        a.xen_attach = vec!["a=debian".into()];
        let e = ServeConfig::resolve(&a).unwrap_err().to_string();
        assert!(e.contains("--xen-attach a=debian: it needs --xen"), "{e}");
        a.xen = true;
        let cases: &[(&[&str], &str)] = &[
            (&["a"], "DISK=GUEST"),
            (&["c=debian"], "no disk c"),
            (&["a="], "guest's name"),
            (&["a=7:xvda"], "guest's name"),
            (&["a=debian:hda"], "hda"),
            (&["a=debian:"], "not a device"),
            (&["a=debian", "a=debian:xvdb"], "gets disk a already"),
            (
                &["a=debian:xvda", "b=debian:51712"],
                "that device is disk a",
            ),
        ];
        for (orders, expect) in cases {
            a.xen_attach = orders.iter().map(|s| (*s).to_owned()).collect();
            let e = format!("{:#}", ServeConfig::resolve(&a).unwrap_err());
            assert!(e.contains(expect) && !e.contains('\n'), "{e}");
            assert!(e.starts_with("--xen-attach "), "{e}");
        }
        a.xen_attach = vec!["a=deb:ian:xvdb".into(), "a=other".into()];
        let all = ServeConfig::resolve(&a).unwrap().xen_attach;
        let told: Vec<_> = all.iter().map(|o| (o.guest.as_str(), o.device)).collect();
        assert_eq!(told, [("deb:ian", Some(51728)), ("other", None)]);
    }

    #[test]
    fn a_file_and_flags_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        std::fs::write(
            &path,
            "local = 'unix:/tmp/r.sock'\nworkers = 3\nmax_buffer_pages = 7\nmax_client_memory = '1G'\nmax_connections_per_disk = 9\nxen = true\n[disk.x]\nvolume = 'mem:1M'\nxen_attach = ['one', 'two:xvda']\n",
        )
        .unwrap();
        let mut a = args(&["y=null:1M"]);
        a.config = Some(path.clone());
        let c = ServeConfig::resolve(&a).unwrap();
        assert_eq!(c.disks.len(), 2);
        assert_eq!((c.workers, c.max_queues), (3, 4));
        assert_eq!(c.buffers.max_pages, 7);
        let clients = (c.clients.memory, c.clients.connections_of_disk);
        assert_eq!(clients, (Some(1 << 30), 9));
        let guests: Vec<_> = c.xen_attach.iter().map(|o| o.guest.as_str()).collect();
        assert_eq!(guests, ["one", "two"]);
        assert_eq!(c.local.unwrap(), Path::new("/tmp/r.sock"));
        std::fs::write(&path, "\nlocale = 'x'\n").unwrap();
        let e = ServeConfig::resolve(&a).unwrap_err().to_string();
        assert!(e.contains("line 2"), "{e}");
    }
}
