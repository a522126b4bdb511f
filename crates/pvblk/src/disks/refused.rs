//! [`Refused`]: why a command about a disk isn't carried out.

use super::{Entry, Stage};
use pvblk_block::error_line;
use std::fmt;

/// Why, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// There is no disk or export of that name.
    NoDisk,
    /// The name is taken.
    Exists,
    /// Somebody uses it.
    InUse,
    /// It takes longer than the asker waits. It goes on.
    Late,
    /// Another command is at it, or there are too many.
    Busy,
    Stopping,
    /// The request makes no sense.
    Invalid,
    /// It didn't work.
    Failed,
}

/// One line that says what is wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub why: Why,
    pub text: String,
}

impl Refused {
    pub fn new(why: Why, text: impl Into<String>) -> Refused {
        let text = text.into();
        Refused { why, text }
    }

    pub fn no_disk(name: &str) -> Refused {
        let text = format!("there is no disk {name}: see `pvblk disk list`");
        Refused::new(Why::NoDisk, text)
    }

    pub fn stopping() -> Refused {
        Refused::new(Why::Stopping, "the server is stopping")
    }

    pub fn invalid(e: impl AsRef<dyn std::error::Error + 'static>) -> Refused {
        Refused::new(Why::Invalid, error_line(e.as_ref()))
    }

    pub fn failed(e: &(dyn std::error::Error + 'static)) -> Refused {
        Refused::new(Why::Failed, error_line(e))
    }

    /// The name is taken, and what is wanted of it can't be done now.
    pub(super) fn busy(name: &str, entry: &Entry) -> Refused {
        let what = match entry.stage {
            Stage::Opening => "being opened",
            Stage::GivenUp => "still being opened for a command that gave up",
            Stage::Removing => "being removed",
            Stage::Serving => {
                let text = format!(
                    "there is a disk {name} already: choose another name, or remove that one"
                );
                return Refused::new(Why::Exists, text);
            }
            Stage::Failed => {
                let why = entry.reason.as_deref().unwrap_or("it could not be opened");
                let text =
                    format!("disk {name} isn't open: {why}; `pvblk disk add {name}` tries again");
                return Refused::new(Why::Failed, text);
            }
        };
        let text = format!("disk {name} is {what}: wait, or see `pvblk disk list`");
        Refused::new(Why::Busy, text)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Refused {}
