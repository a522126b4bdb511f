//! Children of an experiment: `pvblk`, which is measured, and this same program in another role.

use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The `pvblk` that is measured: `PVBLK_BIN`, or the one beside this program.
pub fn pvblk() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("PVBLK_BIN") {
        return Ok(named.into());
    }
    let beside = this_program()?.with_file_name("pvblk");
    ensure!(
        beside.is_file(),
        "there is no pvblk beside this program, at {}: build it, or name it in PVBLK_BIN",
        beside.display()
    );
    Ok(beside)
}

/// This program, to be started in another role.
pub fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("finding this program")
}

/// A child that is ended when it is dropped, with the lines of its standard error.
pub struct Server {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Server {
    /// Starts `pvblk` with `args`, on one CPU if `cpu` is given, and waits for the line `pvblk: ready`.
    pub fn start(args: &[String], cpu: Option<usize>) -> Result<Server> {
        let mut command = on_cpu(cpu, pvblk()?);
        command.args(args);
        Server::spawn(command)
    }

    /// Starts this program with `args`, and waits as [`Server::start`].
    pub fn start_role(args: &[String], cpu: Option<usize>) -> Result<Server> {
        let mut command = on_cpu(cpu, this_program()?);
        command.args(args);
        Server::spawn(command)
    }

    /// Starts a command that becomes a program that says `pvblk: ready`, and waits as [`Server::start`].
    pub fn spawn(mut command: Command) -> Result<Server> {
        let mut child = command
            // Servers that run side by side would meet at the usual place.
            .env("PVBLK_CONTROL", "none")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting a server")?;
        let stderr = child.stderr.take().context("no standard error")?;
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let server = Server { child, lines };
        let mut last = String::new();
        loop {
            match server.line(Duration::from_secs(20)) {
                Some(line) if line == "pvblk: ready" => return Ok(server),
                Some(line) => last = line,
                None => bail!("the server did not start: {last}"),
            }
        }
    }

    /// The next line of standard error; `None` when none comes within `timeout` or the child ended.
    pub fn line(&self, timeout: Duration) -> Option<String> {
        self.lines.recv_timeout(timeout).ok()
    }

    /// The process id of the child.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the child a signal by name, such as `STOP`.
    pub fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.pid().to_string())
            .status()
            .context("running kill")?;
        if !status.success() {
            bail!("kill -{name} failed");
        }
        Ok(())
    }

    /// Kills the child and returns when none of its threads runs any more. Threads that wait in the kernel
    /// may be left; [`Server::kill`] waits for those too.
    pub fn strike(&mut self) -> Result<()> {
        self.child.kill().context("killing a child")?;
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.is_running() && runs(self.pid()) {
            if Instant::now() > deadline {
                bail!("a killed child goes on");
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Kills the child, as a crash would, and waits for its end.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing a child")?;
        self.child.wait().context("waiting for a child")?;
        Ok(())
    }

    /// Asks the child to end and waits for that; an error if it ends with another status than 0.
    pub fn stop(mut self) -> Result<()> {
        self.signal("TERM")?;
        for _ in 0..3000 {
            if let Some(status) = self.child.try_wait()? {
                if !status.success() {
                    bail!("{status}: {}", self.last_lines().join(" | "));
                }
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("it didn't end: {}", self.last_lines().join(" | "))
    }

    /// True until the child has ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The last lines of standard error that weren't read yet, at most five.
    pub fn last_lines(&self) -> Vec<String> {
        // The thread that reads standard error may be a moment behind the child's end.
        let mut lines: Vec<String> = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(Duration::from_millis(100)) {
            lines.push(line);
        }
        lines.split_off(lines.len().saturating_sub(5))
    }

    /// CPU time used so far, user and system, in seconds.
    pub fn cpu_seconds(&self) -> Result<f64> {
        cpu_seconds(self.pid())
    }
}

/// True if a thread of a process runs or could run. A thread that waits in the kernel with a pending SIGKILL
/// never runs again.
fn runs(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return false;
    };
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| rest.trim_start().starts_with('R'))
    })
}

/// A program that is to run on one CPU, if there is one.
pub fn on_cpu(cpu: Option<usize>, program: impl AsRef<OsStr>) -> Command {
    let Some(cpu) = cpu else {
        return Command::new(program);
    };
    let mut command = Command::new("taskset");
    command.arg("-c").arg(cpu.to_string()).arg(program);
    command
}

/// Waits for `time`, and returns the percentage of a CPU that the threads of a process took in it which haven't ended.
pub fn cpu_percent(pid: u32, time: Duration) -> Result<f64> {
    let now = || threads_ns(pid).context("a process that has ended");
    let before = now()?;
    std::thread::sleep(time);
    Ok((now()? - before) / time.as_nanos() as f64 * 100.0)
}

/// CPU time that those threads of a process took so far which haven't ended, in nanoseconds. `None`: there is no such process.
pub fn threads_ns(pid: u32) -> Option<f64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    // One may end meanwhile.
    let ran = threads.flatten().filter_map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    Some(ran.sum())
}

/// CPU time that a process used so far, user and system, all threads, in seconds.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Fields after the name, which is in parentheses: utime is the 12th, stime the 13th.
    let rest = stat.rsplit_once(')').context("unreadable stat")?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let [user, system] = [11, 12].map(|i| fields.get(i).and_then(|f| f.parse::<f64>().ok()));
    let ticks = user.context("unreadable stat")? + system.context("unreadable stat")?;
    Ok(ticks / 100.0) // USER_HZ is 100 on every Linux ABI
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.is_running() {
            return;
        }
        let _ = self.signal("CONT");
        let _ = self.signal("TERM");
        for _ in 0..500 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
