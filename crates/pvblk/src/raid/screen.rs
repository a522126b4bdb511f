//! A view that is drawn again in place on a terminal, and put out as plain text elsewhere.
//!
//! On a terminal the view has the alternate screen, so the shell's screen is as it was when the view ends: by a signal, an error or its own end. A view that
//! is larger than the terminal is cut.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Interval at which signals are looked for.
const LOOK: Duration = Duration::from_millis(50);
/// Size that is taken if the terminal doesn't tell it.
const USUAL: (u16, u16) = (80, 24);

/// The view. Its end gives the terminal back.
pub struct Screen {
    /// `None`: the output is no terminal.
    signals: Option<Signals>,
}

impl Screen {
    pub fn open() -> Result<Screen> {
        let signals = match stdout().is_terminal() {
            true => Some(Signals::new([SIGINT, SIGTERM, SIGHUP, SIGWINCH]).context("signals")?),
            false => None,
        };
        if signals.is_some() {
            put(ENTER)?;
        }
        Ok(Screen { signals })
    }

    pub fn show(&self, text: &str) -> Result<()> {
        match self.signals {
            None => put(text),
            Some(_) => put(&frame(text, size())),
        }
    }

    /// Waits, and draws the text again when the terminal's size changes. A signal that ends programs ends this one, with the terminal given back.
    pub fn wait(&mut self, time: Duration, text: &str) -> Result<()> {
        let Some(signals) = &mut self.signals else {
            std::thread::sleep(time);
            return Ok(());
        };
        let until = Instant::now() + time;
        while Instant::now() < until {
            std::thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
            for signal in signals.pending() {
                match signal {
                    SIGWINCH => put(&frame(text, size()))?,
                    other => {
                        put(LEAVE)?;
                        emulate_default_handler(other).context("a signal")?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.signals.is_some() {
            // Nothing can be told if the terminal is gone.
            let _ = put(LEAVE);
        }
    }
}

fn put(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("printing")
}

fn size() -> (u16, u16) {
    let size = terminal_size::terminal_size();
    size.map_or(USUAL, |(width, height)| (width.0, height.0))
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
        out.extend(line.chars().take(usize::from(width).saturating_sub(1)));
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
    }
}
