//! Runs many seeds of a scenario, or one seed again.

use pvblk_sim::{Bug, Options, SCENARIOS, Scenario, campaign};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: pvblk-sim [SCENARIO] [--seeds COUNT] [--from SEED] [--replay SEED] [--verbose] [--planted NAME]
       pvblk-sim list
  SCENARIO        rings (the default), raid, cache, squeeze or stop; `list` says what they are, and which bugs they can be given
  --seeds COUNT   how many (default 1000)
  --from SEED     the first (default 0)
  --replay SEED   this one alone, with all its events; --seed is the same
  --verbose       all events of all seeds
  --planted NAME  with a bug that must be found";

struct Flags {
    seeds: u64,
    from: u64,
    verbose: bool,
    planted: Option<String>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Flags, String> {
    let mut flags = Flags {
        seeds: 1000,
        from: 0,
        verbose: false,
        planted: None,
    };
    while let Some(flag) = args.next() {
        let mut value = || args.next().ok_or(format!("{flag} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
        match flag.as_str() {
            "--seeds" => flags.seeds = number(value()?)?,
            "--from" => flags.from = number(value()?)?,
            "--replay" | "--seed" => {
                flags.from = number(value()?)?;
                flags.seeds = 1;
                flags.verbose = true;
            }
            "--verbose" => flags.verbose = true,
            "--planted" => flags.planted = Some(value()?),
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    Ok(flags)
}

/// The bug of the scenario with this name.
fn named(scenario: &Scenario, name: &str) -> Result<Bug, String> {
    let all = (scenario.bugs)();
    let names: Vec<_> = all.iter().map(|b| b.name()).collect();
    let none = || format!("no planted bug {name}; there are {}", names.join(", "));
    all.iter()
        .find(|b| b.name() == name)
        .copied()
        .ok_or_else(none)
}

fn list() {
    for scenario in SCENARIOS {
        println!("{}: {}", scenario.name, scenario.about);
        for bug in (scenario.bugs)() {
            println!("  {:31}{}", bug.name(), bug.about().trim());
        }
    }
}

fn whole(args: Vec<String>) -> Result<ExitCode, String> {
    let mut args = args.into_iter().peekable();
    let name = args.next_if(|a| !a.starts_with("--"));
    let name = name.as_deref().unwrap_or("rings");
    if name == "list" {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    let scenario = Scenario::named(name).ok_or_else(|| format!("there is no scenario {name}"))?;
    let flags = parse(args)?;
    let bug = flags.planted.as_deref().map(|b| named(scenario, b));
    let options = Options {
        bug: bug.transpose()?,
        verbose: flags.verbose,
    };
    let mut told = Instant::now();
    let progress = |done| {
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            eprintln!("{done} of {} seeds", flags.seeds);
        }
        true
    };
    let (sum, failure) = campaign::run(scenario, &options, flags.from, flags.seeds, progress);
    let Some(failure) = failure else {
        println!("{name}: {sum}");
        return Ok(ExitCode::SUCCESS);
    };
    eprintln!("{failure}");
    println!(
        "{name}: failed at seed {}, after {} that passed",
        failure.seed, sum.seeds
    );
    Ok(ExitCode::FAILURE)
}

fn main() -> ExitCode {
    whole(std::env::args().skip(1).collect()).unwrap_or_else(|why| {
        eprintln!("{why}\n{USAGE}");
        ExitCode::from(2)
    })
}
