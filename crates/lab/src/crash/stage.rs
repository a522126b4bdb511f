//! One export of one volume, and its server; the volume's files may be on a slow medium.

use crate::child::{self, Server};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

/// The way by which the workload reaches the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Export {
    /// Local rings: the front end sends again the requests that were in flight.
    Rings,
    /// A guest's queues with in-flight tracking: the next server does the requests in flight again.
    VhostUser,
    /// NBD: the client connects again and doesn't know which requests in flight were done.
    Nbd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Volume {
    /// A file, through the kernel's page cache.
    File,
    /// A file, past the page cache.
    Direct,
    /// A write-back cache, smaller than the disk, over a file. A killed server takes unflushed writes along.
    Cache,
    /// A RAID-5 array of files past the page cache.
    Raid5,
}

impl Export {
    pub const ALL: [Export; 3] = [Export::Rings, Export::VhostUser, Export::Nbd];

    fn name(self) -> &'static str {
        match self {
            Export::Rings => "rings",
            Export::VhostUser => "vhost-user",
            Export::Nbd => "nbd",
        }
    }
}

impl Volume {
    pub const ALL: [Volume; 4] = [Volume::File, Volume::Direct, Volume::Cache, Volume::Raid5];

    fn name(self) -> &'static str {
        match self {
            Volume::File => "file",
            Volume::Direct => "direct",
            Volume::Cache => "cache",
            Volume::Raid5 => "raid5",
        }
    }

    /// True if completed writes outlive the server's process without a flush.
    pub fn keeps(self) -> bool {
        self != Volume::Cache
    }
}

impl fmt::Display for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Export {
    type Err = String;

    fn from_str(word: &str) -> Result<Export, String> {
        let found = Export::ALL.into_iter().find(|e| e.name() == word);
        found.ok_or_else(|| format!("{word}: rings, vhost-user or nbd"))
    }
}

impl FromStr for Volume {
    type Err = String;

    fn from_str(word: &str) -> Result<Volume, String> {
        let found = Volume::ALL.into_iter().find(|v| v.name() == word);
        found.ok_or_else(|| format!("{word}: file, direct, cache or raid5"))
    }
}

/// Bytes of an array's member: half of the disk, and room for the array's metadata.
const MEMBER: u64 = 12 << 20;

/// One disk and the files behind it.
pub(super) struct Stage {
    pub export: Export,
    pub volume: Volume,
    /// Folder of the sockets and the journal.
    pub dir: PathBuf,
    /// Folder of the disk's files.
    files: PathBuf,
    sectors: u64,
}

impl Stage {
    /// A disk of zeros, with its files in `files`.
    pub fn new(
        export: Export,
        volume: Volume,
        dir: &Path,
        files: &Path,
        sectors: u64,
    ) -> Result<Stage> {
        let stage = Stage {
            export,
            volume,
            dir: dir.to_owned(),
            files: files.to_owned(),
            sectors,
        };
        for (name, bytes) in stage.files() {
            let path = stage.files.join(name);
            let file = std::fs::File::create(&path);
            let file = file.with_context(|| format!("making {}", path.display()))?;
            file.set_len(bytes)?;
        }
        if volume == Volume::Raid5 {
            stage.make_array()?;
        }
        Ok(stage)
    }

    /// Names and sizes of the files.
    pub fn files(&self) -> Vec<(String, u64)> {
        let name = |part: &str| format!("{}-{}-{part}", self.export, self.volume);
        match self.volume {
            Volume::Raid5 => (0..3).map(|n| (name(&format!("m{n}")), MEMBER)).collect(),
            _ => vec![(name("disk"), self.sectors * 512)],
        }
    }

    fn make_array(&self) -> Result<()> {
        let mut command = Command::new(child::pvblk()?);
        command.args(["raid", "create", "--raid-devices", "3", "--chunk", "64K"]);
        let made = command
            .args(self.paths())
            .output()
            .context("making an array")?;
        if !made.status.success() {
            bail!("making an array: {}", String::from_utf8_lossy(&made.stderr));
        }
        Ok(())
    }

    fn paths(&self) -> Vec<String> {
        let path = |(name, _)| self.files.join::<String>(name).display().to_string();
        self.files().into_iter().map(path).collect()
    }

    fn spec(&self) -> String {
        // The disk has sectors of 512 bytes, so that all volumes take the same requests.
        let paths = self.paths();
        let direct = |p: &String| format!("file:{p},direct,sector=512");
        match self.volume {
            Volume::File => format!("file:{}", paths[0]),
            Volume::Direct => direct(&paths[0]),
            Volume::Cache => format!("cache:2M:file:{}", paths[0]),
            Volume::Raid5 => {
                let members = paths.iter().map(|p| format!("[{}]", direct(p)));
                format!("raid5:{}", members.collect::<String>())
            }
        }
    }

    pub fn socket(&self) -> String {
        self.dir.join("socket").display().to_string()
    }

    /// Starts a server. `before` is the specification of a decorator, put before that of the
    /// volume.
    pub fn serve(&self, before: &str, queues: u32, ring_pages: u32) -> Result<Server> {
        let socket = format!("unix:{}", self.socket());
        let disk = format!("a={before}{}", self.spec());
        let mut args = vec!["serve".to_owned(), "--disk".to_owned(), disk];
        match self.export {
            Export::Rings => args.extend(["--local".into(), socket]),
            Export::VhostUser => args.extend(["--vhost-user".into(), format!("a={socket}")]),
            Export::Nbd => args.extend(["--nbd".into(), socket]),
        }
        if self.export != Export::Nbd {
            args.extend(["--max-queues".into(), queues.to_string()]);
        }
        if self.export == Export::Rings {
            args.extend(["--max-ring-pages".into(), ring_pages.to_string()]);
        }
        Server::start(&args, None)
    }
}
