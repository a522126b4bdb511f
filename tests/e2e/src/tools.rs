//! Running other people's programs, with a deadline.

use crate::Stop;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Where a program is; also looks where an ordinary user's path has no administrator's tools.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|p| p.is_file())
}

/// Skips the test unless every program is installed.
pub fn need(programs: &[&str]) -> Result<(), Stop> {
    let missing: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|p| find(p).is_none())
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Stop::skip(format!("not installed: {}", missing.join(", ")))
    }
}

/// Skips the test unless there is a fio that speaks NBD.
pub fn need_fio_nbd() -> Result<(), Stop> {
    need(&["fio"])?;
    let engines = run(tool("fio", ["--enghelp"]), Duration::from_secs(60))?;
    if engines.stdout.lines().any(|l| l.trim() == "nbd") {
        return Ok(());
    }
    Stop::skip(format!("{:?} has no nbd engine", find("fio")))
}

/// Output and exit status of a program.
#[derive(Debug)]
pub struct Finished {
    /// The command line, for messages.
    pub line: String,
    /// The exit status; `None` if the program was killed at the deadline.
    pub status: Option<ExitStatus>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Finished {
    /// Fails with everything that is known unless the program ended with status 0.
    pub fn success(self) -> Result<Finished, Stop> {
        match self.status {
            Some(status) if status.success() => Ok(self),
            Some(_) => Err(self.failure("failed")),
            None => Err(self.failure("hung and was killed")),
        }
    }

    /// A failure with the program's output.
    pub fn failure(&self, what: &str) -> Stop {
        let mut text = format!("`{}` {what} ({:?})", self.line, self.status);
        for (name, said) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            for line in last_lines(said, 15) {
                let _ = write!(text, "\n  {name}: {line}");
            }
        }
        Stop::Fail(text)
    }
}

fn last_lines(text: &str, count: usize) -> impl Iterator<Item = &str> {
    let lines: Vec<&str> = text.lines().collect();
    let skip = lines.len().saturating_sub(count);
    lines.into_iter().skip(skip)
}

/// A command line under construction: a program of the system, found as [`find`] does.
pub fn tool<I: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = I>) -> Command {
    let mut command = Command::new(find(program).unwrap_or_else(|| program.into()));
    command.args(args).stdin(Stdio::null());
    command
}

/// fio writes to an NBD export and verifies what it reads, at the latest until `limit`. The options say how much, where and how.
pub fn fio_verify(uri: &str, options: &[&str], limit: Duration) -> Result<(), Stop> {
    let uri = format!("--uri={uri}");
    let always = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        // Two requests to the same place at once have no defined result.
        "--serialize_overlap=1",
    ];
    let args = always.iter().chain(options);
    run(tool("fio", args), limit)?.success().map(drop)
}

/// Runs a program to its end, or kills it after `limit`.
///
/// Its output goes to files, so that a chatty program can't block on a full pipe.
pub fn run(mut command: Command, limit: Duration) -> Result<Finished, Stop> {
    let mut stdout = tempfile::tempfile()?;
    let mut stderr = tempfile::tempfile()?;
    command
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?);
    let line = describe(&command);
    let mut child = command
        .spawn()
        .map_err(|e| Stop::Fail(format!("`{line}` can't start: {e}")))?;
    let status = wait(&mut child, limit)?;
    if status.is_none() {
        child.kill()?;
        child.wait()?;
    }
    let read = |file: &mut std::fs::File| -> Result<String, Stop> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok(Finished {
        line,
        status,
        stdout: read(&mut stdout)?,
        stderr: read(&mut stderr)?,
    })
}

/// Runs a tool that must succeed within two minutes.
pub fn run_ok<I: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = I>,
) -> Result<Finished, Stop> {
    run(tool(program, args), Duration::from_secs(120))?.success()
}

/// Fails unless two files are equal.
pub fn compare(a: &Path, b: &Path) -> Result<(), Stop> {
    run_ok("cmp", [a, b]).map(drop)
}

/// Waits for a child; `None` if it still runs after `limit`.
pub fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>, Stop> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The command line as a person would type it.
pub fn describe(command: &Command) -> String {
    let words: Vec<OsString> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_os_string)
        .collect();
    let words: Vec<_> = words.iter().map(|w| w.to_string_lossy()).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hanging_program_is_killed() {
        let begin = Instant::now();
        let finished = run(tool("sleep", ["60"]), Duration::from_millis(50)).unwrap();
        assert!(finished.status.is_none() && finished.success().is_err());
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_failing_program_tells_what_it_said() {
        let result = run_ok("sh", ["-c", "echo on the way; echo no disk >&2; exit 3"]);
        let Err(Stop::Fail(text)) = result else {
            panic!("{result:?}")
        };
        assert!(text.contains("stderr: no disk") && text.contains("stdout: on the way"));
    }

    #[test]
    fn a_missing_program_skips() {
        assert!(matches!(
            need(&["no-such-program-here"]),
            Err(Stop::Skip(_))
        ));
        assert!(need(&["sh"]).is_ok());
    }
}
