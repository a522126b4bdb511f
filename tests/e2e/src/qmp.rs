//! QEMU's storage daemon, told by its machine protocol (QMP) what to do.

use crate::Stop;
use crate::outcome::check;
use crate::tools::tool;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a start, an answer or an event.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running `qemu-storage-daemon`; killed when dropped.
pub struct StorageDaemon {
    child: Child,
    commands: UnixStream,
    answers: BufReader<UnixStream>,
    /// Events that came while an answer was awaited.
    events: Vec<Value>,
}

impl StorageDaemon {
    /// Starts it with its control socket in `folder`.
    pub fn start(folder: &Path) -> Result<StorageDaemon, Stop> {
        let socket = folder.join("qmp.sock");
        let chardev = format!("socket,id=qmp,server=on,wait=off,path={}", socket.display());
        let args = ["--chardev", &chardev, "--monitor", "chardev=qmp"];
        let mut command = tool("qemu-storage-daemon", args);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let begin = Instant::now();
        let commands = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(e) if begin.elapsed() > PATIENCE || child.try_wait()?.is_some() => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Stop::fail(format!("qemu-storage-daemon doesn't listen: {e}"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        commands.set_read_timeout(Some(PATIENCE))?;
        let answers = BufReader::new(commands.try_clone()?);
        let mut daemon = StorageDaemon {
            child,
            commands,
            answers,
            events: Vec::new(),
        };
        let greeting = daemon.line()?;
        check(greeting["QMP"].is_object(), || {
            format!("not QMP: {greeting}")
        })?;
        daemon.ask("qmp_capabilities", json!({}))?;
        Ok(daemon)
    }

    fn line(&mut self) -> Result<Value, Stop> {
        let mut text = String::new();
        self.answers.read_line(&mut text)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Runs a command; fails with QEMU's words if it does.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Stop> {
        let question = json!({"execute": command, "arguments": arguments});
        writeln!(self.commands, "{question}")?;
        loop {
            let answer = self.line()?;
            if !answer["event"].is_null() {
                self.events.push(answer);
                continue;
            }
            check(answer["error"].is_null(), || {
                format!("{question}: {}", answer["error"])
            })?;
            return Ok(answer["return"].clone());
        }
    }

    /// Waits for an event of this name about a job; a job that has failed fails the test.
    pub fn wait_for(&mut self, event: &str, job: &str) -> Result<(), Stop> {
        loop {
            let found = match self.events.is_empty() {
                true => self.line()?,
                false => self.events.remove(0),
            };
            let data = &found["data"];
            if data["device"] != job {
                continue;
            }
            check(data["error"].is_null(), || format!("{job}: {data}"))?;
            if found["event"] == event {
                return Ok(());
            }
        }
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
