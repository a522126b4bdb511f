//! Runs many seeds, or one again.

use pvblk_sim::{Options, Planted, Report, run};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: pvblk-sim [--seeds COUNT] [--from SEED] [--seed SEED] [--planted NAME]
  --seeds COUNT   how many (default 1000)
  --from SEED     the first (default 0)
  --seed SEED     this one, with all its events
  --planted NAME  with a bug that must be found";

struct Flags {
    seeds: u64,
    from: u64,
    options: Options,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Flags, String> {
    let mut flags = Flags {
        seeds: 1000,
        from: 0,
        options: Options::default(),
    };
    while let Some(flag) = args.next() {
        let mut value = || args.next().ok_or(format!("{flag} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
        match flag.as_str() {
            "--seeds" => flags.seeds = number(value()?)?,
            "--from" => flags.from = number(value()?)?,
            "--seed" => {
                flags.from = number(value()?)?;
                flags.seeds = 1;
                flags.options.verbose = true;
            }
            "--planted" => {
                let name = value()?;
                let found = Planted::ALL.iter().find(|(n, _)| *n == name);
                let names: Vec<_> = Planted::ALL.iter().map(|(n, _)| *n).collect();
                let none = || format!("no planted bug {name}; there are {}", names.join(", "));
                flags.options.planted = Some(found.ok_or_else(none)?.1);
            }
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    Ok(flags)
}

fn main() -> ExitCode {
    let flags = match parse(std::env::args().skip(1)) {
        Ok(flags) => flags,
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let start = Instant::now();
    let mut told = start;
    let mut sum = Report::default();
    for done in 0..flags.seeds {
        match run(flags.from.wrapping_add(done), &flags.options) {
            Ok(report) => sum += report,
            Err(failure) => {
                eprintln!("{failure}");
                println!("failed at seed {}, after {done} that passed", failure.seed);
                return ExitCode::FAILURE;
            }
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            eprintln!("{} of {} seeds", done + 1, flags.seeds);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} seeds passed in {seconds:.1} s, {:.0} a second: {} steps, {} requests, {} kills, {} lost caches, {} reconnects",
        flags.seeds,
        flags.seeds as f64 / seconds,
        sum.steps,
        sum.requests,
        sum.kills,
        sum.losses,
        sum.reconnects
    );
    ExitCode::SUCCESS
}
