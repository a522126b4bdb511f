//! Progress of an array: a bar on a terminal, else a line for each tenth.

use crate::output::{tell, tell_part};
use pvblk_raid5::Raid5Progress;
use pvblk_raid5::ask::SyncProgress;
use std::io::IsTerminal;

/// Places of the bar itself.
const WIDTH: u64 = 30;

/// Draws on standard error.
#[derive(Default)]
pub struct Bar {
    action: String,
    lines: Raid5Progress,
    drawn: bool,
}

impl Bar {
    /// Shows the current progress.
    pub fn show(&mut self, sync: &SyncProgress) {
        if self.action != sync.action {
            self.action.clone_from(&sync.action);
            self.lines = Raid5Progress::default();
        }
        if std::io::stderr().is_terminal() {
            self.drawn = true;
            tell_part!("\r{}\x1b[K", bar(sync));
            return;
        }
        let line = self.lines.step(sync.done_bytes / 512, sync.of_bytes / 512);
        if let Some(line) = line {
            tell!("{}: {line}{}", sync.action, pace(sync));
        }
    }

    /// Takes it away.
    pub fn end(&mut self) {
        if std::mem::take(&mut self.drawn) {
            tell_part!("\r\x1b[K");
        }
    }
}

/// `check [=========>          ] 45 %, 450 of 1000 MiB of each member, 120000 KiB/s, 0:05 left`
fn bar(sync: &SyncProgress) -> String {
    let (done, of) = (sync.done_bytes, sync.of_bytes.max(1));
    let filled = (done.saturating_mul(WIDTH) / of).min(WIDTH) as usize;
    let mut text = format!(
        "{} [{}{}{}] {} %, {} of {} MiB of each member",
        sync.action,
        "=".repeat(filled),
        if filled < WIDTH as usize { ">" } else { "" },
        " ".repeat((WIDTH as usize).saturating_sub(filled + 1)),
        percent(sync),
        done >> 20,
        of >> 20,
    );
    text.push_str(&pace(sync));
    text
}

/// `, 120000 KiB/s, 0:05 left`, as far as it is known.
pub fn pace(sync: &SyncProgress) -> String {
    let speed = sync.speed_kib.map(|s| format!(", {s} KiB/s"));
    let left = sync.seconds_left.map(|s| format!(", {} left", time(s)));
    [speed, left].into_iter().flatten().collect()
}

/// Whole percent that are done.
pub fn percent(sync: &SyncProgress) -> u64 {
    let done = u128::from(sync.done_bytes) * 100 / u128::from(sync.of_bytes.max(1));
    done as u64
}

/// `1:02:03` or `2:03`.
pub fn time(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_whatever_is_done() {
        let of = |done_bytes| SyncProgress {
            by_bitmap: false,
            action: "check".into(),
            done_bytes,
            of_bytes: 100 << 20,
            mismatch_sectors: 0,
            speed_kib: Some(1024),
            seconds_left: Some(62),
        };
        assert_eq!(
            bar(&of(0)),
            "check [>                             ] 0 %, 0 of 100 MiB of each member, 1024 KiB/s, 1:02 left"
        );
        for done in 0..=100 {
            let text = bar(&of(done << 20));
            assert_eq!(text.find(']'), Some(7 + WIDTH as usize), "{text}");
        }
    }

    #[test]
    fn times_are_told_as_on_a_clock() {
        assert_eq!(time(5), "0:05");
        assert_eq!(time(3661), "1:01:01");
    }
}
