//! A slow medium by hand: `slow_medium DIR [--backing DIR] [--direct-io] [--synchronous] [--write-back] [--seed N]`.
//!
//! Mounts a FUSE file system on DIR, an empty folder, until SIGTERM or SIGINT. Files are made with the usual
//! commands. `DIR/.control` lists the waiting requests, and takes commands:
//!
//! ```text
//! echo 'set * write mix 0 2 30 50 400' >DIR/.control   of each thousand writes 30 take 50 to 400 ms, the others 0 to 2
//! echo 'set disk.img write,fsync hold' >DIR/.control   held until released
//! echo 'release * *' >DIR/.control
//! cat DIR/.control
//! ```

use pvblk_e2e::Stop;
use pvblk_e2e::slow_medium::{Options, SlowMedium};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "usage: slow_medium DIR [--backing DIR] [--direct-io] [--synchronous] [--write-back] [--seed N]";

fn main() -> ExitCode {
    let Some((point, options)) = arguments() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(&point, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stop::Skip(why) | Stop::Fail(why) | Stop::Emulator(why)) => {
            eprintln!("slow_medium: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(point: &Path, options: Options) -> Result<(), Stop> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let medium = SlowMedium::mount(point, options)?;
    eprintln!("slow_medium: ready");
    signals.forever().next();
    drop(medium);
    Ok(())
}

fn arguments() -> Option<(PathBuf, Options)> {
    let mut options = Options {
        asynchronous: true,
        ..Options::default()
    };
    let mut point = None;
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--backing" => options.backing = Some(words.next()?.into()),
            "--direct-io" => (options.direct_io, options.parallel_writes) = (true, true),
            "--synchronous" => options.asynchronous = false,
            "--write-back" => options.write_back = true,
            "--seed" => options.seed = words.next()?.parse().ok()?,
            other if other.starts_with('-') => return None,
            other => point = Some(PathBuf::from(other)),
        }
    }
    Some((point?, options))
}
