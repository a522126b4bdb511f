//! Outcomes of tests, and the runner.

use crate::tools::tool;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::os::unix::process::CommandExt;
use std::process::{ExitCode, Stdio};

/// Why a test stopped before its end.
#[derive(Debug)]
pub enum Stop {
    /// This machine can't run the test; the text names the missing program or right.
    Skip(String),
    /// The product, or the test, is wrong.
    Fail(String),
    /// The emulator broke the CPU of a guest, which says nothing of the product.
    Emulator(String),
}

/// Runs of a test whose guest's CPU is broken each time.
const RUNS: usize = 3;

/// Begins a test anew if the emulator broke its guest.
fn with_a_whole_guest(test: fn() -> Result<(), Stop>) -> Result<(), Stop> {
    for _ in 1..RUNS {
        match test() {
            Err(Stop::Emulator(text)) => {
                println!("once more: the emulator broke its guest: {text}")
            }
            result => return result,
        }
    }
    test()
}

impl Stop {
    /// A failure with this text.
    pub fn fail<T>(text: impl Into<String>) -> Result<T, Stop> {
        Err(Stop::Fail(text.into()))
    }

    /// Its text, whatever it is.
    pub fn into_text(self) -> String {
        match self {
            Stop::Skip(text) | Stop::Fail(text) | Stop::Emulator(text) => text,
        }
    }

    /// A skip for this reason.
    pub fn skip<T>(reason: impl Into<String>) -> Result<T, Stop> {
        Err(Stop::Skip(reason.into()))
    }
}

impl From<std::io::Error> for Stop {
    fn from(e: std::io::Error) -> Stop {
        Stop::Fail(e.to_string())
    }
}

impl From<rustix::io::Errno> for Stop {
    fn from(e: rustix::io::Errno) -> Stop {
        Stop::Fail(e.to_string())
    }
}

impl From<serde_json::Error> for Stop {
    fn from(e: serde_json::Error) -> Stop {
        Stop::Fail(format!("unexpected JSON: {e}"))
    }
}

/// Fails unless `condition` holds; `text` says what was expected and what was found.
pub fn check(condition: bool, text: impl FnOnce() -> String) -> Result<(), Stop> {
    if condition {
        Ok(())
    } else {
        Err(Stop::Fail(text()))
    }
}

/// One test of a run, which is skipped where this machine can't run it.
pub fn trial(
    name: impl Into<String>,
    test: impl FnOnce() -> Result<(), Stop> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name, move || match test() {
        Ok(()) => Ok(Completion::Completed),
        Err(Stop::Skip(reason)) => Ok(Completion::ignored_with(reason)),
        Err(Stop::Fail(text) | Stop::Emulator(text)) => Err(Failed::from(text)),
    })
}

/// A named test.
pub type Test = (&'static str, fn() -> Result<(), Stop>);

/// Runs the tests, as [`run_trials`] does.
pub fn run_all(tests: &[Test]) -> ExitCode {
    run_trials(|| {
        let tests = tests.iter();
        tests
            .map(|&(name, test)| trial(name, move || with_a_whole_guest(test)))
            .collect()
    })
}

/// Runs tests one after another (each loads the machine) unless the command line asks otherwise, in a mount namespace of this process's own.
pub fn run_trials(trials: impl FnOnce() -> Vec<Trial>) -> ExitCode {
    own_mounts();
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials()).exit_code()
}

/// Gives this process a mount namespace of its own: its mounts end with it, even if it is killed. Does nothing without the right to make one.
/// Begins the program anew.
fn own_mounts() {
    const INSIDE: &str = "PVBLK_E2E_OWN_MOUNTS";
    let unshare = || tool("unshare", ["--mount", "--propagation", "private"]);
    let is_allowed = || {
        let tried = unshare().arg("true").stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    if std::env::var_os(INSIDE).is_none()
        && is_allowed()
        && let Ok(this) = std::env::current_exe()
    {
        let mut again = unshare();
        again.arg(this).args(std::env::args_os().skip(1));
        // This only returns if it fails.
        let error = again.env(INSIDE, "1").exec();
        eprintln!("no mount namespace: {error}");
    }
}
