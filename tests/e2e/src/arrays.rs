//! RAID-5 arrays of files, made and served by `pvblk`.

use crate::daemon::pvblk;
use crate::nbd::{Command, Connection};
use crate::outcome::check;
use crate::tools::{run, run_ok};
use crate::{Daemon, MIB, Stop};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Longest time for a command on arrays of this size.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Members as files, of 24 MiB unless told otherwise.
pub struct Disks {
    /// Where they are.
    pub dir: TempDir,
}

impl Disks {
    /// Makes `count` empty members.
    pub fn new(count: usize) -> Result<Disks, Stop> {
        Disks::of(count, 24)
    }

    /// Empty ones of another size.
    pub fn of(count: usize, mib: u64) -> Result<Disks, Stop> {
        Disks::at(tempfile::tempdir()?, count, mib)
    }

    /// Empty ones in memory, where a log is durable at once; on disk if there is no place for that.
    pub fn fast(count: usize, mib: u64) -> Result<Disks, Stop> {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        Disks::at(dir, count, mib)
    }

    fn at(dir: TempDir, count: usize, mib: u64) -> Result<Disks, Stop> {
        let disks = Disks { dir };
        for n in 0..count {
            File::create(disks.path(n))?.set_len(mib * MIB)?;
        }
        Ok(disks)
    }

    /// One of them.
    pub fn path(&self, n: usize) -> PathBuf {
        self.dir.path().join(format!("m{n}"))
    }

    /// Some of them.
    pub fn paths(&self, of: std::ops::Range<usize>) -> Vec<PathBuf> {
        of.map(|n| self.path(n)).collect()
    }
}

/// Runs `pvblk raid`, and returns what it printed.
pub fn raid(args: &[&str], members: &[PathBuf]) -> Result<String, Stop> {
    let mut command = pvblk(["raid"])?;
    command.args(args).args(members);
    Ok(run(command, LIMIT)?.success()?.stdout)
}

/// The output of `pvblk raid detail --json`.
pub fn detail(members: &[PathBuf]) -> Result<Value, Stop> {
    Ok(serde_json::from_str(&raid(
        &["detail", "--json"],
        members,
    )?)?)
}

/// 4 KiB blocks in which the members don't add up to zero.
pub fn wrong_stripes(members: &[PathBuf]) -> Result<usize, Stop> {
    let starts: Result<Vec<usize>, Stop> = members.iter().map(data_offset).collect();
    wrong_from(members, &starts?, usize::MAX)
}

/// Where the data of a member begins.
pub fn data_offset(member: &PathBuf) -> Result<usize, Stop> {
    let said = raid(&["examine"], std::slice::from_ref(member))?;
    let line = said.lines().find(|l| l.contains("Data Offset"));
    let number = line.and_then(|l| l.split(" : ").nth(1)?.split(' ').next()?.parse().ok());
    let sectors: Option<usize> = number;
    sectors.map_or_else(
        || Stop::fail(format!("no offset in {said}")),
        |n| Ok(n * 512),
    )
}

/// As [`wrong_stripes`] in the first bytes of each member, knowing where data begins.
pub fn wrong_from(members: &[PathBuf], starts: &[usize], bytes: usize) -> Result<usize, Stop> {
    let mut sum = Vec::new();
    for (member, &start) in members.iter().zip(starts) {
        let data = std::fs::read(member)?;
        let data = &data[start..];
        let data = &data[..data.len().min(bytes)];
        sum.resize(sum.len().max(data.len()), 0u8);
        for (to, from) in sum.iter_mut().zip(data) {
            *to ^= from;
        }
    }
    Ok(sum
        .chunks(4096)
        .filter(|b| b.iter().any(|&x| x != 0))
        .count())
}

/// A buffer of random bytes.
pub fn random(bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::new();
    let mut data = vec![0; bytes];
    rng.fill(&mut data);
    data
}

/// The spec of an array of these members, without one of them if so.
pub fn spec(members: &[PathBuf], without: Option<usize>) -> String {
    let each = members
        .iter()
        .enumerate()
        .map(|(n, path)| match without == Some(n) {
            true => "[missing]".to_owned(),
            false => format!("[{}]", path.display()),
        });
    format!("raid5:{}", each.collect::<String>())
}

/// A server of one array.
pub struct Served {
    pub daemon: Daemon,
    dir: TempDir,
}

impl Served {
    /// Serves the array of this spec.
    pub fn start(spec: &str) -> Result<Served, Stop> {
        let dir = tempfile::tempdir()?;
        let disk = format!("r={spec}");
        let nbd = format!("unix:{}", dir.path().join("s").display());
        Ok(Served {
            daemon: Daemon::start(["serve", "--disk", &disk, "--nbd", &nbd])?,
            dir,
        })
    }

    /// Its NBD socket; the array is `r`.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Where it is.
    pub fn uri(&self) -> String {
        format!(
            "nbd+unix:///r?socket={}",
            self.dir.path().join("s").display()
        )
    }

    /// Copies all of it to a file.
    pub fn read(&self, to: &Path) -> Result<(), Stop> {
        run_ok("nbdcopy", [self.uri().as_ref(), to.as_os_str()]).map(drop)
    }

    /// Writes all of it from a file, and flushes.
    pub fn write(&self, from: &Path) -> Result<(), Stop> {
        let uri = self.uri();
        run_ok(
            "nbdcopy",
            ["--flush".as_ref(), from.as_os_str(), uri.as_ref()],
        )
        .map(drop)
    }

    /// Writes random bytes of random lengths all over it, and into an image that has its data; several at a time.
    pub fn scribble(&self, image: &Path, rng: &mut fastrand::Rng) -> Result<(), Stop> {
        let file = OpenOptions::new().write(true).open(image)?;
        let mut client = Connection::open(&self.socket(), "r")?;
        // The order of two writes to the same place isn't known, so each has a place of its own.
        let part = client.size_bytes / 512 / 8;
        for round in 0..24u64 {
            for n in 0..8 {
                let at = rng.u64(0..part);
                let most = 1 << rng.u32(0..8);
                let data = random(rng.u64(1..=most.min(part - at)) as usize * 512);
                let at = (n * part + at) * 512;
                client.send(Command::Write, round * 8 + n, at, &data)?;
                file.write_all_at(&data, at)?;
            }
            for _ in 0..8 {
                let reply = client.receive()?;
                check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
            }
        }
        client.send(Command::Flush, 0, 0, &[])?;
        let reply = client.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))
    }

    /// True if a line of the server has these words.
    pub fn said(&self, what: &str) -> bool {
        self.daemon.lines().iter().any(|l| l.contains(what))
    }
}

/// Copies the contents of an array to a file, with a server of pvblk.
pub fn dump(members: &[PathBuf], without: Option<usize>, to: &Path) -> Result<(), Stop> {
    let mut served = Served::start(&spec(members, without))?;
    served.read(to)?;
    served.daemon.stop()
}

/// sha256 of a file.
pub fn sum(path: &Path) -> Result<String, Stop> {
    let said = run_ok("sha256sum", [path])?.stdout;
    Ok(first_word(&said))
}

/// The text before the first space.
fn first_word(text: &str) -> String {
    text.split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// The first word of a file that a guest left in `/out`.
pub fn left(out: &Path, name: &str) -> Result<String, Stop> {
    Ok(first_word(&std::fs::read_to_string(out.join(name))?))
}

/// Copies the members to a folder.
pub fn copies(members: &[PathBuf], to: &Path) -> Result<Vec<PathBuf>, Stop> {
    let copy = |path: &PathBuf| -> Result<PathBuf, Stop> {
        let copy = to.join(path.file_name().unwrap_or_default());
        std::fs::copy(path, &copy)?;
        Ok(copy)
    };
    members.iter().map(copy).collect()
}

/// Writes random bytes into random ranges of a file, of any number of sectors.
pub fn scribble(path: &Path, rng: &mut fastrand::Rng) -> Result<(), Stop> {
    let file = OpenOptions::new().write(true).open(path)?;
    let sectors = file.metadata()?.len() / 512;
    for _ in 0..40 {
        let at = rng.u64(0..sectors);
        let most = 1 << rng.u32(0..12);
        let count = rng.u64(1..=most.min(sectors - at));
        file.write_all_at(&random(count as usize * 512), at * 512)?;
    }
    Ok(())
}
