//! A disk as a file system: nbdfuse, a loop device, mounts, and their undoing.

use crate::outcome::check;
use crate::tools::{find, need, run, run_ok, tool, wait, wait_for};
use crate::{Stage, Stop};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Undoes mounts and loop devices in reverse, whatever happened: a stuck mount would outlive the tests.
#[derive(Default)]
pub struct Undo(Vec<(&'static str, Vec<String>)>);

impl Undo {
    /// Adds a command that undoes a step.
    pub fn add(&mut self, program: &'static str, args: &[&str]) {
        self.0
            .push((program, args.iter().map(|a| (*a).to_owned()).collect()));
    }

    /// Runs the last of these commands.
    pub fn last(&mut self) -> Result<(), Stop> {
        match self.0.pop() {
            Some((program, args)) => run_ok(program, args).map(drop),
            None => Ok(()),
        }
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        while let Some((program, args)) = self.0.pop() {
            let _ = run(tool(program, args), Duration::from_secs(20));
        }
    }
}

/// The disk as a plain file, through FUSE.
pub struct Fuse {
    child: Child,
    folder: PathBuf,
    /// Image file of the disk.
    pub file: PathBuf,
}

impl Fuse {
    /// Shows the disk at `uri` as a file in `folder`, which is made.
    pub fn mount(folder: &Path, uri: &str) -> Result<Fuse, Stop> {
        std::fs::create_dir(folder)?;
        let file = folder.join("nbd");
        let child = tool("nbdfuse", [&file.display().to_string(), uri])
            .stdout(Stdio::null())
            .spawn()?;
        let mut fuse = Fuse {
            child,
            folder: folder.to_path_buf(),
            file,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !fuse.file.exists() {
            if let Some(status) = fuse.child.try_wait()? {
                return Stop::skip(format!("nbdfuse can't mount here ({status})"));
            }
            check(Instant::now() < deadline, || "nbdfuse shows no disk".into())?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(fuse)
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = run(
            tool("fusermount3", [Path::new("-u"), &self.folder]),
            Duration::from_secs(20),
        );
        if !matches!(wait(&mut self.child, Duration::from_secs(60)), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Checks that the machine can mount; containers often can't.
pub fn need_machine() -> Result<(), Stop> {
    need(&[
        "nbdfuse",
        "fusermount3",
        "losetup",
        "mkfs.ext4",
        "e2fsck",
        "mount",
        "cmp",
    ])?;
    if !rustix::process::geteuid().is_root() {
        return Stop::skip("mounting needs root");
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Stop::skip(format!("no {device}"));
        }
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !known.split_whitespace().any(|w| w == "ext4") && find("modprobe").is_none() {
        return Stop::skip("the kernel has no ext4");
    }
    Ok(())
}

/// Mounts an ext4; a skip if this machine can't.
pub fn mount(device: &str, folder: &str) -> Result<(), Stop> {
    let mounted = run(
        tool("mount", ["-t", "ext4", device, folder]),
        Duration::from_secs(60),
    )?;
    if mounted.stderr.contains("permission denied") || mounted.stderr.contains("unknown filesystem")
    {
        return Stop::skip(format!("can't mount here: {}", mounted.stderr.trim()));
    }
    mounted.success().map(drop)
}

/// A new ext4 on a stage's disk, mounted. Dropping it undoes all of it.
pub struct Ext4 {
    undo: Undo,
    /// The loop device has been told to detach from its file: it does so with the last descriptor, so nothing stays behind a test that was killed.
    attached: File,
    fuse: Fuse,
    /// The loop device.
    pub device: String,
    /// Where it is mounted.
    pub folder: PathBuf,
}

impl Ext4 {
    /// Makes the disk and the file system.
    pub fn make(stage: &Stage) -> Result<Ext4, Stop> {
        let fuse = Fuse::mount(&stage.path("fuse"), &stage.uri())?;
        let file = fuse.file.display().to_string();
        let shown = run(
            tool("losetup", ["-f", "--show", &file]),
            Duration::from_secs(20),
        )?;
        let device = shown.stdout.trim().to_owned();
        if device.is_empty() {
            return Stop::skip(format!("no loop device: {}", shown.stderr.trim()));
        }
        let attached = File::open(&device)?;
        run_ok("losetup", ["-d", &device])?;
        run_ok("mkfs.ext4", ["-q", "-F", &device])?;
        let folder = stage.path("mounted");
        std::fs::create_dir(&folder)?;
        let mut ext4 = Ext4 {
            undo: Undo::default(),
            attached,
            fuse,
            device,
            folder,
        };
        ext4.mount()?;
        Ok(ext4)
    }

    fn mount(&mut self) -> Result<(), Stop> {
        let folder = self.folder.display().to_string();
        mount(&self.device, &folder)?;
        self.undo.add("umount", &[&folder]);
        Ok(())
    }

    /// Unmounts, checks and mounts again, so that everything is read from the disk and not from the kernel's cache.
    pub fn again(&mut self) -> Result<(), Stop> {
        self.undo.last()?;
        run_ok("blockdev", ["--flushbufs", &self.device])?;
        run_ok("e2fsck", ["-fn", &self.device])?;
        self.mount()
    }

    /// Undoes all steps, in reverse order; an error if that failed.
    pub fn end(mut self) -> Result<(), Stop> {
        self.undo.last()?;
        drop(self.attached);
        let attached = Path::new("/sys/block")
            .join(Path::new(&self.device).file_name().unwrap_or_default())
            .join("loop/backing_file");
        wait_for(&format!("{} lets its file go", self.device), || {
            Ok(!attached.exists())
        })?;
        drop(self.fuse);
        Ok(())
    }
}
