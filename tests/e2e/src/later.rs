//! NBD clients of the Debian after the one that the tests are made for: libnbd's and QEMU's programs with extended headers.
//!
//! `tests/vm/fetch.sh` unpacks their packages into a folder, with all libraries that they need. They run there, with their own loader.

use crate::Stop;
use crate::tools::run;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// For the first run, which fetches the packages.
const PREPARATION: Duration = Duration::from_secs(600);

/// The folder with the programs.
pub struct Later {
    root: PathBuf,
}

impl Later {
    /// Fetches the packages if they aren't here; the test is skipped where that can't be.
    pub fn fetch() -> Result<Later, Stop> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm/fetch.sh");
        let mut command = Command::new(script);
        command.arg("nbd").stdin(Stdio::null());
        let finished = run(command, PREPARATION)?;
        if finished.status.and_then(|s| s.code()) == Some(125) {
            let why = finished.stderr.lines().last().unwrap_or_default();
            let why = why.trim_start_matches("vm: ");
            return Stop::skip(format!("no clients of a later Debian: {why}"));
        }
        let root = finished.success()?.stdout.trim().into();
        Ok(Later { root })
    }

    /// A command line of one of its programs.
    pub fn tool<I: AsRef<OsStr>>(
        &self,
        program: &str,
        args: impl IntoIterator<Item = I>,
    ) -> Command {
        let usr = self.root.join("usr");
        let libraries = usr.join("lib/x86_64-linux-gnu");
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries);
        command.arg(usr.join("bin").join(program));
        command.args(args).stdin(Stdio::null());
        // Its Python's own modules.
        command.env("PYTHONHOME", &usr);
        command
    }

    /// Runs one of its programs, which must succeed within two minutes. Returns its output.
    pub fn run_ok<I: AsRef<OsStr>>(
        &self,
        program: &str,
        args: impl IntoIterator<Item = I>,
    ) -> Result<String, Stop> {
        let finished = run(self.tool(program, args), Duration::from_secs(120))?;
        Ok(finished.success()?.stdout)
    }
}
