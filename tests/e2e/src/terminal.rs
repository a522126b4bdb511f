//! A terminal that a test looks at: a pseudo-terminal, and the screen that its output makes.

use crate::Stop;
use crate::outcome::check;
use crate::tools::{describe, find};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A program on a terminal of its own; killed when dropped.
pub struct Terminal {
    master: File,
    /// The side of the program. It keeps the terminal when the program has ended.
    slave: File,
    child: Child,
    screen: Arc<Mutex<vt100::Parser>>,
    line: String,
}

impl Terminal {
    /// Starts a program, which has the terminal as its controlling one, by `setsid` of util-linux.
    pub fn start(command: &Command, columns: u16, rows: u16) -> Result<Terminal, Stop> {
        let Some(setsid) = find("setsid") else {
            return Stop::skip("not installed: setsid");
        };
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let name = name.to_string_lossy().into_owned();
        let slave = File::options().read(true).write(true).open(&name)?;
        let master = File::from(master);
        set_size(&master, columns, rows)?;
        let mut on_terminal = Command::new(setsid);
        on_terminal.arg("-c").arg(command.get_program());
        on_terminal.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => on_terminal.env(name, value),
                None => on_terminal.env_remove(name),
            };
        }
        on_terminal
            .stdin(Stdio::from(slave.try_clone()?))
            .stdout(Stdio::from(slave.try_clone()?))
            .stderr(Stdio::from(slave.try_clone()?));
        let line = describe(command);
        let child = on_terminal.spawn()?;
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (mut output, drawn) = (master.try_clone()?, Arc::clone(&screen));
        std::thread::spawn(move || {
            let mut bytes = [0; 1 << 14];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                let mut drawn = drawn.lock().unwrap_or_else(PoisonError::into_inner);
                drawn.process(&bytes[..count]);
            }
        });
        Ok(Terminal {
            master,
            slave,
            child,
            screen,
            line,
        })
    }

    fn parser(&self) -> MutexGuard<'_, vt100::Parser> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The screen's lines, without spaces at their ends.
    pub fn text(&self) -> String {
        let parser = self.parser();
        let (_, columns) = parser.screen().size();
        let lines = parser.screen().rows(0, columns);
        let lines: Vec<String> = lines.map(|l| l.trim_end().to_owned()).collect();
        lines.join("\n")
    }

    /// Types text, or the bytes of a key.
    pub fn keys(&mut self, keys: &str) -> Result<(), Stop> {
        Ok(self.master.write_all(keys.as_bytes())?)
    }

    pub fn resize(&mut self, columns: u16, rows: u16) -> Result<(), Stop> {
        self.parser().screen_mut().set_size(rows, columns);
        set_size(&self.master, columns, rows)
    }

    /// Waits until the screen is so; returns it.
    pub fn until(&self, what: &str, is: impl Fn(&str) -> bool) -> Result<String, Stop> {
        self.until_state(what, |terminal| Ok(is(&terminal.text())))?;
        Ok(self.text())
    }

    fn until_state(
        &self,
        what: &str,
        is: impl Fn(&Terminal) -> Result<bool, Stop>,
    ) -> Result<(), Stop> {
        let end = Instant::now() + Duration::from_secs(60);
        while !is(self)? {
            if Instant::now() > end {
                let text = self.text();
                return Stop::fail(format!("`{}`: never {what}:\n{text}", self.line));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    pub fn signal(&self, signal: Signal) -> Result<(), Stop> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        match pid {
            Some(pid) => Ok(kill_process(pid, signal)?),
            None => Stop::fail("no process id"),
        }
    }

    /// True while the program has the alternate screen.
    pub fn is_taken(&self) -> bool {
        self.parser().screen().alternate_screen()
    }

    /// Waits until the program is stopped by a signal.
    pub fn until_stopped(&self) -> Result<(), Stop> {
        let path = format!("/proc/{}/stat", self.child.id());
        self.until_state("stopped", |_| {
            let stat = std::fs::read_to_string(&path)?;
            Ok(stat
                .rsplit(')')
                .next()
                .is_some_and(|s| s.trim_start().starts_with('T')))
        })
    }

    /// Fails unless the terminal is as a shell expects it.
    pub fn check_given_back(&self) -> Result<(), Stop> {
        self.until_state("given back", |t| {
            let parser = t.parser();
            Ok(!parser.screen().alternate_screen() && !parser.screen().hide_cursor())
        })?;
        let modes = tcgetattr(&self.slave)?.local_modes;
        let cooked = LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
        check(modes.contains(cooked), || {
            format!("`{}` left the terminal in {modes:?}", self.line)
        })
    }

    /// Waits for the program's end.
    pub fn wait(&mut self) -> Result<ExitStatus, Stop> {
        match crate::tools::wait(&mut self.child, Duration::from_secs(60))? {
            Some(status) => Ok(status),
            None => Stop::fail(format!("`{}` didn't end:\n{}", self.line, self.text())),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn set_size(master: &File, columns: u16, rows: u16) -> Result<(), Stop> {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(master, size)?)
}
