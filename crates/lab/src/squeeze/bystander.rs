//! A process that needs memory: one command a line on its standard input, one answer a line on its standard output.
//!
//! ```text
//! grow MIB              touches so much more: `START_NS END_NS` of the monotonic clock
//! cycle MILLISECONDS    writes to every page again and again, one pass in a second at most: `PAGES`
//! drop                  gives everything back: `done`
//! ```

use super::group::Group;
use crate::child;
use anyhow::{Context, Result, bail};
use pvblk_block::Buffer;
use rustix::time::{ClockId, clock_gettime};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// A pass over all pages takes at least this long.
const PASS: Duration = Duration::from_secs(1);

/// Nanoseconds of the monotonic clock, which is the same in all processes.
pub fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Serves commands: the main function of the process.
pub fn serve() -> Result<()> {
    let mut memory: Vec<Buffer> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split(' ');
        let (command, number) = (words.next(), words.next());
        let number = number.and_then(|n| n.parse::<u64>().ok());
        let answer = match (command, number) {
            (Some("grow"), Some(mib)) => {
                let start = now_ns();
                let buffer = Buffer::anonymous((mib as usize) << 20)?;
                touch(&buffer, 1);
                memory.push(buffer);
                format!("{start} {}", now_ns())
            }
            (Some("cycle"), Some(ms)) => cycle(&memory, Duration::from_millis(ms)).to_string(),
            (Some("drop"), None) => {
                memory.clear();
                "done".to_owned()
            }
            _ => bail!("no such command: {line}"),
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn touch(buffer: &Buffer, value: u8) {
    for at in (0..buffer.len()).step_by(PAGE) {
        buffer.write(at, &[value]);
    }
}

/// Writes to all pages for `time`; returns the number of pages written.
fn cycle(memory: &[Buffer], time: Duration) -> u64 {
    let end = Instant::now() + time;
    let mut pages = 0;
    for pass in 0u8.. {
        let start = Instant::now();
        for buffer in memory {
            // The write goes in steps of 1 MiB, so that the end of the time is seen soon.
            for at in (0..buffer.len()).step_by(1 << 20) {
                if Instant::now() >= end {
                    return pages;
                }
                if let Some(piece) = buffer.slice(at, (buffer.len() - at).min(1 << 20)) {
                    touch(&piece, pass);
                    pages += (piece.len() / PAGE) as u64;
                }
            }
        }
        let left = end.saturating_duration_since(Instant::now());
        std::thread::sleep(PASS.saturating_sub(start.elapsed()).min(left));
    }
    pages
}

/// A bystander process, as the experiment sees it.
pub struct Bystander {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Bystander {
    /// Starts a bystander in a group.
    pub fn start(group: &Group) -> Result<Bystander> {
        let mut child = group
            .command(&child::this_program()?, &["bystander".into()])?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the bystander")?;
        let input = child.stdin.take().context("no standard input")?;
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Bystander {
            child,
            input,
            output,
        })
    }

    /// Sends a command and returns at once.
    pub fn tell(&mut self, command: &str) -> Result<()> {
        writeln!(self.input, "{command}").context("telling the bystander")
    }

    /// The answer to the oldest command that has none yet.
    pub fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            bail!("the bystander is gone: {:?}", self.child.wait());
        }
        Ok(line.trim().to_owned())
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.tell(command)?;
        self.answer()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
