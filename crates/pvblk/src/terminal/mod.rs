//! The terminal of a view that is drawn in place: `pvblk top`, `pvblk raid detail --watch`.
//!
//! The view has the alternate screen, so the shell's screen is as it was when the view ends: by its own end, an error, a panic, a signal, or a stop by Ctrl-Z.

mod backend;
mod text;

pub use backend::Drawing;
pub use text::{ascii, is_utf8, shown};

use crate::output::print;
use anyhow::{Context, Result};
use crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use signal_hook::consts::SIGTSTP;
use signal_hook::low_level::emulate_default_handler;
use std::io::{IsTerminal, stdout};
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Size that is taken if the terminal doesn't tell it.
const USUAL: (u16, u16) = (80, 24);

/// State of the process' terminal: it is the shell's; it has a view; it has one that reads keys.
static STATE: AtomicU8 = AtomicU8::new(FREE);
const FREE: u8 = 0;
const TAKEN: u8 = 1;
const WITH_KEYS: u8 = 2;

/// The terminal, with the alternate screen. Its end gives it back.
pub struct Terminal {
    keys: bool,
}

impl Terminal {
    /// Takes the terminal of the standard output; `keys`: each key is read as it comes, Ctrl-C and Ctrl-Z, too. `None`: the output is no terminal.
    pub fn take(keys: bool) -> Result<Option<Terminal>> {
        if !stdout().is_terminal() {
            return Ok(None);
        }
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            // A message on the alternate screen would vanish with it.
            std::panic::set_hook(Box::new(move |panic| {
                give_back();
                before(panic);
            }));
        });
        let terminal = Terminal { keys };
        terminal.enter()?;
        Ok(Some(terminal))
    }

    fn enter(&self) -> Result<()> {
        STATE.store(if self.keys { WITH_KEYS } else { TAKEN }, Ordering::SeqCst);
        if self.keys {
            enable_raw_mode().context("reading keys from the terminal")?;
        }
        print(ENTER)
    }

    /// True until a panic of another thread gave the terminal back.
    pub fn is_taken(&self) -> bool {
        STATE.load(Ordering::SeqCst) != FREE
    }

    /// Gives the terminal to the shell and stops the process, until the shell continues it.
    pub fn stop(&self) -> Result<()> {
        give_back();
        emulate_default_handler(SIGTSTP).context("stopping")?;
        self.enter()
    }

    /// Gives the terminal back and ends the process as `signal` does by default.
    pub fn end_by(&self, signal: i32) -> Result<()> {
        give_back();
        emulate_default_handler(signal).context("a signal")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
    }
}

/// Nothing can be told if the terminal is gone, so errors are left out.
fn give_back() {
    let state = STATE.swap(FREE, Ordering::SeqCst);
    if state != FREE {
        let _ = print(LEAVE);
    }
    if state == WITH_KEYS {
        let _ = disable_raw_mode();
    }
}

/// Columns and lines.
pub fn size() -> (u16, u16) {
    let size = terminal_size::terminal_size();
    size.map_or(USUAL, |(width, height)| (width.0, height.0))
}
