//! Searches all bounds, shows the shortest way to a planted bug, or checks a trace.

use pvblk_raid5_model::{
    Bound, Bug, Found, Model, Property, Step, Vocabulary, all, bound, replay, search,
};
use std::io::Read;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "usage: pvblk-raid5-model all | list | planted NAME | search WRITE… | check WRITE… <TRACE
  all             searches all bounds
  list            lists properties, planted bugs, and the steps of traces
  planted NAME    plants a bug, and prints the shortest way to a property that it breaks
  search WRITE…   searches one bound; 0:ab is a write of both blocks of stripe 0, 1:a/2 of half of a block, and ! means FUA
  check WRITE…    reads a trace from standard input, a step on each line, and says whether the model allows it";

fn clean(bound: Bound) -> Model {
    Model { bound, bug: None }
}

fn all_bounds() -> Result<(), String> {
    let (begin, bounds) = (Instant::now(), all());
    let mut sum = Found::default();
    for (n, bound) in bounds.iter().enumerate() {
        let found = search(&clean(*bound)).map_err(|trace| trace.to_string())?;
        println!("{}/{} {bound}: {found}", n + 1, bounds.len());
        sum.add(&found);
    }
    println!(
        "{} bounds: {sum}; {} s",
        bounds.len(),
        begin.elapsed().as_secs()
    );
    Ok(())
}

fn list() {
    println!("properties:");
    for property in Property::ALL {
        println!("  {:28}{}", property.name(), property.about());
    }
    println!("planted bugs:");
    for bug in Bug::ALL {
        println!("  {:28}{}", bug.name(), bug.about());
    }
    println!("steps:");
    for (word, about) in Step::WORDS {
        println!("  {word:28}{about}");
    }
}

fn planted(name: &str) -> Result<(), String> {
    let bug = Bug::named(name).ok_or(format!("no planted bug {name}; `list` names them"))?;
    let planted = Model {
        bound: bug.bound(),
        bug: Some(bug),
    };
    match search(&planted) {
        Ok(found) => Err(format!("{name} is not found: {found}")),
        Err(trace) => {
            print!("{name}: {trace}");
            Ok(())
        }
    }
}

/// A bound with the writes of the command line.
fn asked(writes: &[String]) -> Result<Bound, String> {
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    if writes.is_empty() || writes.len() > 3 {
        return Err("a bound has one write to three".into());
    }
    match writes
        .iter()
        .find(|w| pvblk_raid5_model::shape(w).is_none())
    {
        Some(wrong) => Err(format!("{wrong} is no write; 0:ab, 1:a/2 and 0:b! are")),
        None => Ok(bound(&writes)),
    }
}

fn check(bound: Bound) -> Result<(), String> {
    let mut text = String::new();
    let read = std::io::stdin().read_to_string(&mut text);
    read.map_err(|e| format!("reading the trace: {e}"))?;
    let step =
        |line: &str| Step::read(line).ok_or(format!("{line:?} is no step; `list` names them"));
    let steps: Result<Vec<Step>, String> = text.lines().map(step).collect();
    match replay(&clean(bound), &steps?) {
        Ok(_) => {
            println!("the model allows this trace");
            Ok(())
        }
        Err(refused) => Err(refused.to_string()),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["all"] => all_bounds(),
        ["list"] => {
            list();
            Ok(())
        }
        ["planted", name] => planted(name),
        ["search", ..] => asked(&args[1..]).and_then(|bound| {
            let found = search(&clean(bound)).map_err(|trace| trace.to_string())?;
            println!("{bound}: {found}");
            Ok(())
        }),
        ["check", ..] => asked(&args[1..]).and_then(check),
        _ => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
