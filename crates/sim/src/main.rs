//! Runs many seeds, or one again.

use pvblk_sim::{Failure, Planted, paged, raid, squeezed, stops};
use std::fmt::Display;
use std::ops::AddAssign;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: pvblk-sim [raid|cache|squeeze|stop] [--seeds COUNT] [--from SEED] [--seed SEED] [--verbose] [--planted NAME]
  raid            a RAID-5 array whose power is cut, instead of front end and back end
  cache           a page cache over a disk whose power is cut
  squeeze         buffer pools whose memory is taken away
  stop            an orderly stop of several disks, some in trouble
  --seeds COUNT   how many (default 1000)
  --from SEED     the first (default 0)
  --seed SEED     this one, with all its events
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
            "--seed" => {
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

/// The bug with a name.
fn named<B: Copy>(all: &[(&str, B)], name: Option<&str>) -> Result<Option<B>, String> {
    let Some(name) = name else { return Ok(None) };
    let found = all.iter().find(|(n, _)| *n == name);
    let names: Vec<_> = all.iter().map(|(n, _)| *n).collect();
    let none = || format!("no planted bug {name}; there are {}", names.join(", "));
    Ok(Some(found.ok_or_else(none)?.1))
}

fn whole(args: Vec<String>) -> Result<ExitCode, String> {
    let raid = args.first().is_some_and(|a| a == "raid");
    let cache = args.first().is_some_and(|a| a == "cache");
    let squeeze = args.first().is_some_and(|a| a == "squeeze");
    let stop = args.first().is_some_and(|a| a == "stop");
    let named_one = raid || cache || squeeze || stop;
    let flags = parse(args.into_iter().skip(usize::from(named_one)))?;
    let (name, verbose) = (flags.planted.as_deref(), flags.verbose);
    if raid {
        let planted = named(raid::Bug::ALL, name)?;
        let options = raid::Options { planted, verbose };
        return Ok(campaign(&flags, |seed| raid::run(seed, &options)));
    }
    if cache {
        let planted = named(paged::Bug::ALL, name)?;
        let options = paged::Options { planted, verbose };
        return Ok(campaign(&flags, |seed| paged::run(seed, &options)));
    }
    if squeeze {
        let planted = named(squeezed::Bug::ALL, name)?;
        let options = squeezed::Options { planted, verbose };
        return Ok(campaign(&flags, |seed| squeezed::run(seed, &options)));
    }
    if stop {
        let planted = named(stops::Bug::ALL, name)?;
        let options = stops::Options { planted, verbose };
        return Ok(campaign(&flags, |seed| stops::run(seed, &options)));
    }
    let planted = named(Planted::ALL, name)?;
    let options = pvblk_sim::Options { planted, verbose };
    Ok(campaign(&flags, |seed| pvblk_sim::run(seed, &options)))
}

fn campaign<R: Default + AddAssign + Display>(
    flags: &Flags,
    run: impl Fn(u64) -> Result<R, Box<Failure>>,
) -> ExitCode {
    let start = Instant::now();
    let mut told = start;
    let mut sum = R::default();
    for done in 0..flags.seeds {
        match run(flags.from.wrapping_add(done)) {
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
        "{} seeds passed in {seconds:.1} s, {:.0} a second: {sum}",
        flags.seeds,
        flags.seeds as f64 / seconds,
    );
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    whole(std::env::args().skip(1).collect()).unwrap_or_else(|why| {
        eprintln!("{why}\n{USAGE}");
        ExitCode::from(2)
    })
}
