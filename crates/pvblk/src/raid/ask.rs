//! Arrays that can be asked: those of a server, and those that this process runs itself.

use super::progress::Bar;
use super::report::Report;
use crate::control::{self, ControlArg};
use anyhow::{Context, Result, bail};
use pvblk_raid5::Raid5;
use pvblk_raid5::ask::{Detail, DeviceState, Question, Serving, SyncProgress};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval at which progress is asked for.
const LOOK: Duration = Duration::from_millis(100);
/// A speed is that of as long, or twice that.
const LATELY: Duration = Duration::from_secs(5);
/// Longest wait for the begin of a recovery.
const BEGIN: Duration = Duration::from_secs(30);

/// An array that can be asked.
pub enum Array {
    /// A disk of the server with this control socket.
    Served {
        control: PathBuf,
        /// The disk's name was taken for one since no file has it.
        guessed: bool,
        disk: String,
    },
    /// One of our own.
    Own(Arc<Raid5>),
}

impl Array {
    /// The disk of a server.
    pub fn served(control: &ControlArg, disk: &str) -> Result<Array> {
        Ok(Array::Served {
            control: control.path()?,
            guessed: false,
            disk: disk.to_owned(),
        })
    }

    /// Asks a question; the answer is the state of the array afterwards.
    pub fn ask(&self, question: &Question) -> Result<Detail> {
        match self {
            Array::Own(array) => Ok(array.answer(question)?),
            Array::Served {
                control,
                guessed,
                disk,
            } => {
                let answer = control::ask(control, disk, &serde_json::to_string(question)?);
                let answer = match guessed {
                    true => answer.with_context(|| {
                        format!("{disk}: no file has this name, so it is a disk of a server")
                    })?,
                    false => answer?,
                };
                serde_json::from_str(&answer)
                    .with_context(|| format!("{}: the answer is no array's", control.display()))
            }
        }
    }

    /// The state of the array, and the part of it that only an array that serves has.
    pub fn serving(&self) -> Result<(Detail, Serving)> {
        let detail = self.ask(&Question::Detail {})?;
        let serving = detail.serving.clone().context("the array isn't served")?;
        Ok((detail, serving))
    }
}

/// Progress at one time.
#[derive(Clone)]
struct Look {
    at: Instant,
    action: String,
    done_bytes: u64,
}

/// Speed of a recovery, resync or check over the last seconds.
#[derive(Default)]
pub struct Speed {
    since: Option<Look>,
    /// Becomes the one above when that is long ago.
    next: Option<Look>,
}

impl Speed {
    /// Fills in the speed and the time left, from this and earlier progress.
    pub fn look(&mut self, sync: &mut SyncProgress) {
        let now = Look {
            at: Instant::now(),
            action: sync.action.clone(),
            done_bytes: sync.done_bytes,
        };
        let goes_on = |l: &&Look| l.action == now.action && l.done_bytes <= now.done_bytes;
        let Some(since) = self.since.as_ref().filter(goes_on) else {
            self.since = Some(now.clone());
            self.next = Some(now);
            return;
        };
        let seconds = since.at.elapsed().as_secs_f64().max(1e-3);
        let rate = (now.done_bytes - since.done_bytes) as f64 / seconds;
        let left = sync.of_bytes.saturating_sub(now.done_bytes) as f64;
        sync.speed_kib = Some((rate / 1024.0) as u64);
        sync.seconds_left = (rate > 0.0).then(|| (left / rate).ceil() as u64);
        if self.next.as_ref().is_none_or(|l| l.at.elapsed() > LATELY) {
            self.since = self.next.replace(now);
        }
    }
}

/// The result of following an array until it has nothing under way.
pub struct Followed {
    /// The last action that was seen.
    pub action: Option<String>,
    /// The array afterwards.
    pub detail: Detail,
    /// It was ended before its end.
    pub stopped: bool,
}

/// Shows the progress of an array until nothing is under way; `stop` ends that earlier. `action`: the action
/// that was begun just now.
pub fn follow(array: &Array, action: Option<&str>, stop: &AtomicBool) -> Result<Followed> {
    let mut bar = Bar::default();
    let mut speed = Speed::default();
    let mut action = action.map(str::to_owned);
    let mut idle_since = Instant::now();
    loop {
        let (detail, mut serving) = array.serving()?;
        if let Some(sync) = &mut serving.sync {
            speed.look(sync);
            bar.show(sync);
            action = Some(sync.action.clone());
            idle_since = Instant::now();
        } else if !begins(&detail, &serving) {
            bar.end();
            return Ok(Followed {
                action,
                detail,
                stopped: false,
            });
        } else if idle_since.elapsed() > BEGIN {
            bar.end();
            bail!(
                "nothing is done for {} s, although there is a spare; look at the server's log",
                BEGIN.as_secs()
            );
        }
        if stop.load(Ordering::Relaxed) {
            bar.end();
            return Ok(Followed {
                action,
                detail,
                stopped: true,
            });
        }
        std::thread::sleep(LOOK);
    }
}

/// True if a recovery will begin by itself in a moment.
fn begins(detail: &Detail, serving: &Serving) -> bool {
    let any = |state| detail.members.iter().any(|m| m.state == state);
    let spare = detail.degraded && serving.trouble.is_none() && any(DeviceState::Spare);
    !serving.frozen && !serving.failed && (spare || any(DeviceState::Rebuilding))
}

impl Followed {
    /// Tells how it ended, in a line; an error if the array isn't as it should be. `command`: the word of the command that followed it, `array`: of what.
    pub fn tell(self, command: &'static str, array: &str, json: bool) -> Result<()> {
        let serving = self.detail.serving.as_ref().context("not served")?;
        let trouble = self
            .trouble(serving)
            .or_else(|| self.overtaken(command, array));
        let sectors = serving.mismatch_sectors;
        let checked = matches!(self.action.as_deref(), Some("check" | "repair"));
        let counted =
            Some(sectors).filter(|_| checked && !serving.failed && serving.trouble.is_none());
        let message = match (&self.action, counted) {
            (_, Some(sectors)) => format!("mismatch_cnt: {sectors}"),
            (Some(action), _) => format!("{array}: the {} has ended", noun(action)),
            (None, _) => format!("{array}: nothing is under way"),
        };
        if trouble.is_none() || counted.is_some() || json {
            let mut report = Report::new(command, array, message);
            report.mismatch_sectors = counted;
            report.with(self.detail.clone()).print(json)?;
        }
        match trouble {
            Some(why) => bail!("{why}"),
            None => Ok(()),
        }
    }

    /// Reason why the outcome of a check or repair isn't known: a rebuild, which goes first, ended it, or came after it.
    fn overtaken(&self, command: &str, array: &str) -> Option<String> {
        let last = self.action.as_deref()?;
        let other = matches!(command, "check" | "repair") && last != command;
        other.then(|| {
            let last = noun(last);
            format!("{array}: a {last} took the place of the {command}: run it again")
        })
    }

    /// Reason why the array isn't as it should be.
    fn trouble(&self, serving: &Serving) -> Option<String> {
        if serving.failed {
            return Some("two members failed: the array has stopped".into());
        }
        if let Some(trouble) = &serving.trouble {
            return Some(trouble.clone());
        }
        if let Some(place) = self.detail.missing {
            let why = match serving.frozen {
                true => "and the array is frozen: unfreeze it",
                false => "and no spare: add one",
            };
            return Some(format!(
                "the array is degraded: no member at place {place}, {why}"
            ));
        }
        let sectors = serving.mismatch_sectors;
        (self.action.as_deref() == Some("check") && sectors > 0).then(|| {
            format!("parity is wrong in {sectors} sectors of members: `pvblk raid repair` makes it right")
        })
    }
}

/// md's word for an action as a noun.
pub fn noun(action: &str) -> &str {
    match action {
        "recover" => "rebuild",
        other => other,
    }
}
