//! The medium below the disk's files, made slow by its control file: the end-to-end tests' `slow_medium`.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest time that a request on this medium waits by itself: the longest delay of a mix, and time to
/// spare.
const SETTLES: Duration = Duration::from_secs(60);
/// The longest delay, in milliseconds: longer than a server needs to start.
const LONGEST: u32 = 400;

/// A slow medium under some files, or the ordinary file system that they are on.
#[derive(Clone)]
pub(super) struct Medium {
    control: Option<PathBuf>,
    files: Vec<String>,
}

impl Medium {
    pub fn new(point: Option<&Path>, files: Vec<String>) -> Result<Medium> {
        let control = point.map(|p| p.join(".control"));
        if let Some(path) = control.as_ref().filter(|p| !p.exists()) {
            bail!("{}: no slow medium is mounted there", path.display());
        }
        Ok(Medium { control, files })
    }

    pub fn is_slow(&self) -> bool {
        self.control.is_some()
    }

    fn order(&self, what: impl Fn(&str) -> String) -> Result<()> {
        let Some(control) = &self.control else {
            return Ok(());
        };
        let text: String = self.files.iter().map(|f| what(f) + "\n").collect();
        std::fs::write(control, text).context("the slow medium")
    }

    /// Sets no delays, or delays that leave most requests fast and make some writes slower than a
    /// server's start.
    pub fn some_delays(&self, rng: &mut fastrand::Rng) -> Result<()> {
        let (share, longest) = (rng.u32(1..60), rng.u32(20..LONGEST));
        let slow = rng.u32(..4) > 0;
        self.order(|f| match slow {
            true => format!(
                "set {f} write,fallocate mix 0 2 {share} 10 {longest}\nset {f} fsync delay 0 10\n\
                 set {f} read mix 0 0 5 1 10"
            ),
            false => format!("set {f} * now"),
        })
    }

    /// Sets no delays for requests from now on.
    pub fn no_delays(&self) -> Result<()> {
        self.order(|f| format!("set {f} * now"))
    }

    /// Holds writes and flushes from now on until they are released.
    pub fn hold(&self) -> Result<()> {
        self.order(|f| format!("set {f} write,fsync,fallocate hold"))
    }

    /// Releases the requests that are held, and those that wait for their time.
    pub fn release(&self) -> Result<()> {
        self.order(|f| format!("release {f} *"))
    }

    /// Waits until no request of these files waits any more.
    pub fn settle(&self) -> Result<()> {
        let Some(control) = &self.control else {
            return Ok(());
        };
        let deadline = Instant::now() + SETTLES;
        loop {
            let told = std::fs::read_to_string(control).context("the slow medium")?;
            let busy = |f: &String| told.contains(&format!("\nfile {f} held "));
            if !self.files.iter().any(busy) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the slow medium doesn't settle: {told}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
