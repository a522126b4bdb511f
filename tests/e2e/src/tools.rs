//! Running other people's programs, with a deadline.

use crate::Stop;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
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

/// The command line of a program that gets `signal` once this process has ended, however that came about: nothing stays behind a test that was killed. By
/// `setpriv` of util-linux.
///
/// The kernel sends the signal when the thread ends that started the program: see [`start`].
pub fn bound(program: impl AsRef<OsStr>, signal: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", signal]).arg(program);
    command
}

/// Starts a [`bound`] command from a thread that stays until this process ends, whatever becomes of the caller's.
pub fn start(command: Command) -> std::io::Result<Child> {
    type Order = (Command, Sender<std::io::Result<Child>>);
    static STARTER: OnceLock<Sender<Order>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (orders, taken) = channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, answer) in taken {
                let started = command.spawn();
                // Its ends of pipes are the child's alone.
                drop(command);
                let _ = answer.send(started);
            }
        });
        orders
    });
    let gone = || std::io::Error::other("the thread that starts programs is gone");
    let (answer, started) = channel();
    starter.send((command, answer)).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}

/// Fails unless `what` becomes true within two minutes.
pub fn wait_for(what: &str, mut is: impl FnMut() -> Result<bool, Stop>) -> Result<(), Stop> {
    let begin = Instant::now();
    while !is()? {
        if begin.elapsed() > Duration::from_secs(120) {
            return Stop::fail(format!("not within two minutes: {what}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
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
pub(crate) mod tests {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::io::{BufRead, BufReader, Write};

    #[test]
    fn a_hanging_program_is_killed() {
        let begin = Instant::now();
        let finished = run(tool("sleep", ["60"]), Duration::from_millis(50)).unwrap();
        assert!(finished.status.is_none() && finished.success().is_err());
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    /// Set where this program is the one that is killed, to the word that the test gave.
    pub const KILLED: &str = "PVBLK_TEST_KILLED";

    /// Runs this test once more in a process of its own, which prints the number of a process that it has started, and kills that process.
    /// Returns the other's number.
    pub fn left_by_a_killed_program(test: &str, word: &str) -> Pid {
        let mut program = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(KILLED, word)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(program.stdout.take().unwrap()).lines();
        let number = said
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("started ")?.parse().ok());
        program.kill().unwrap();
        program.wait().unwrap();
        Pid::from_raw(number.expect("it says what it started")).unwrap()
    }

    pub fn wait_for_the_end_of(pid: Pid) {
        let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
        let begin = Instant::now();
        // A process that nobody waits for stays as a zombie.
        while std::fs::read_to_string(&stat).is_ok_and(|s| !s.contains(") Z ")) {
            if begin.elapsed() > Duration::from_secs(60) {
                let _ = kill_process(pid, Signal::KILL);
                panic!("it outlives the program that started it");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_bound_program_ends_with_the_process_that_started_it_and_not_with_a_thread() {
        if std::env::var_os(KILLED).is_none() {
            let test = "tools::tests::a_bound_program_ends_with_the_process_that_started_it_and_not_with_a_thread";
            return wait_for_the_end_of(left_by_a_killed_program(test, ""));
        }
        let starter = std::thread::spawn(|| {
            // It doesn't end with its input.
            let echo = r#"echo bound; read -r line; echo "$line"; exec sleep 1000"#;
            let mut command = bound("sh", "KILL");
            command.args(["-c", echo]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut echo = start(command).unwrap();
            let mut answers = BufReader::new(echo.stdout.take().unwrap());
            answers.read_line(&mut String::new()).unwrap();
            (rustix::thread::gettid(), echo, answers)
        });
        let (thread, mut echo, mut answers) = starter.join().unwrap();
        // Its last act is to have signals of its end sent.
        let task = format!("/proc/self/task/{}", thread.as_raw_nonzero());
        while Path::new(&task).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut line = String::new();
        // A pipe without a reader is found below.
        let _ = echo.stdin.as_mut().unwrap().write_all(b"alive\n");
        answers.read_line(&mut line).unwrap();
        assert_eq!(line, "alive\n");
        println!("\nstarted {}", echo.id());
        // Until it is killed.
        let _ = std::io::stdin().read_line(&mut line);
        panic!("it lives on");
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
