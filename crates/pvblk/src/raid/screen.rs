//! A text that is drawn again in place on a terminal, and put out as it is elsewhere. One that is larger than the terminal is cut.

use crate::output::print;
use crate::terminal::{Terminal, shown, size};
use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use std::time::{Duration, Instant};

/// Interval at which signals are looked for.
const LOOK: Duration = Duration::from_millis(50);

/// The view. Its end gives the terminal back.
pub struct Screen {
    /// `None`: the output is no terminal.
    terminal: Option<(Terminal, Signals)>,
}

impl Screen {
    pub fn open() -> Result<Screen> {
        let Some(terminal) = Terminal::take(false)? else {
            return Ok(Screen { terminal: None });
        };
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGWINCH]);
        let terminal = Some((terminal, signals.context("signals")?));
        Ok(Screen { terminal })
    }

    pub fn show(&self, text: &str) -> Result<()> {
        match self.terminal {
            None => print(text),
            Some(_) => print(&frame(text, size())),
        }
    }

    /// Waits, and draws the text again when the terminal's size changes, or when the shell continues the process. A signal that ends programs ends this one,
    /// with the terminal given back.
    pub fn wait(&mut self, time: Duration, text: &str) -> Result<()> {
        let Some((terminal, signals)) = &mut self.terminal else {
            std::thread::sleep(time);
            return Ok(());
        };
        let until = Instant::now() + time;
        while Instant::now() < until {
            std::thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
            for signal in signals.pending() {
                match signal {
                    SIGWINCH => {}
                    SIGTSTP => terminal.stop()?,
                    other => terminal.end_by(other)?,
                }
                print(&frame(text, size()))?;
            }
        }
        Ok(())
    }
}

/// The text from the upper left corner on. Each line is ended by an erasure of its rest, so nothing flickers and nothing old is left.
fn frame(text: &str, (width, height): (u16, u16)) -> String {
    let mut out = String::from("\x1b[H");
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let rows = usize::from(height.max(1));
    for (n, line) in lines.iter().take(rows).enumerate() {
        if n > 0 {
            out.push('\n');
        }
        // The last column stays empty: an erasure there would take the character with it.
        let columns = usize::from(width).saturating_sub(1);
        out.extend(shown(line).chars().take(columns));
        out.push_str("\x1b[K");
    }
    out.push_str("\x1b[J");
    out
}

#[cfg(test)]
mod tests {
    use super::frame;

    #[test]
    fn a_frame_fits_the_terminal() {
        assert_eq!(
            frame("ab\ncd\n", (80, 24)),
            "\x1b[Hab\x1b[K\ncd\x1b[K\x1b[J"
        );
        assert_eq!(
            frame("äbc\nd\ne\n", (3, 2)),
            "\x1b[Häb\x1b[K\nd\x1b[K\x1b[J"
        );
        assert_eq!(frame("", (0, 0)), "\x1b[H\x1b[J");
        assert_eq!(frame("a\x1b[2J", (80, 24)), "\x1b[Ha\\u{1b}[2J\x1b[K\x1b[J");
    }
}
