//! Searches all bounds, shows the shortest way to a planted bug, or checks a trace.

use pvblk_raid5_model::{
    Bound, Bug, Found, Machine, Model, Property, Step, Vocabulary, all, bound, replay, search, sums,
};
use std::io::Read;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "usage: pvblk-raid5-model all | list | planted NAME | sums WORD… | search WRITE… | check WRITE… <TRACE
  all             searches all bounds of both models
  list            lists properties, planted bugs, and the steps of traces
  planted NAME    plants a bug, and prints the shortest way to a property that it breaks
  sums WORD…      searches one bound of checksums; 0:a is a write, 0:a? a read, others are sweep, cut, flip, sum, lost, all, astray
  search WRITE…   searches one bound of the write path; 0:ab is a write of both blocks of stripe 0, 1:a/2 of half of a block, and ! means FUA
  check WRITE…    reads a trace from standard input, a step on each line, and says whether the model allows it";

fn clean(bound: Bound) -> Model {
    Model { bound, bug: None }
}

fn clean_sums(bound: sums::Bound) -> sums::Model {
    sums::Model { bound, bug: None }
}

/// Searches all bounds of a model.
fn search_all<M: Machine>(name: &str, models: &[M]) -> Result<(), String> {
    let begin = Instant::now();
    let mut sum = Found::default();
    for (n, model) in models.iter().enumerate() {
        let found = search(model).map_err(|trace| trace.to_string())?;
        println!("{}/{} {}: {found}", n + 1, models.len(), model.bound());
        sum.add(&found);
    }
    println!(
        "{name}: {} bounds: {sum}; {} s",
        models.len(),
        begin.elapsed().as_secs()
    );
    Ok(())
}

fn all_bounds() -> Result<(), String> {
    let of_sums: Vec<_> = sums::all().into_iter().map(clean_sums).collect();
    search_all("checksums", &of_sums)?;
    let of_writes: Vec<_> = all().into_iter().map(clean).collect();
    search_all("write path", &of_writes)
}

fn list() {
    println!("properties of the write path:");
    list_properties(Property::OF_WRITES);
    println!("properties of checksums:");
    list_properties(Property::OF_SUMS);
    println!("planted bugs of the write path:");
    for bug in Bug::ALL {
        println!("  {:28}{}", bug.name(), bug.about());
    }
    println!("planted bugs of checksums:");
    for bug in sums::Bug::ALL {
        println!("  {:28}{}", bug.name(), bug.about());
    }
    println!("steps of the write path:");
    list_steps::<Step>();
    println!("steps of checksums:");
    list_steps::<sums::Step>();
}

fn list_properties(properties: &[Property]) {
    for property in properties {
        println!("  {:28}{}", property.name(), property.about());
    }
}

fn list_steps<S: Vocabulary>() {
    for (word, about) in S::WORDS {
        println!("  {word:28}{about}");
    }
}

fn planted(name: &str) -> Result<(), String> {
    if let Some(bug) = sums::Bug::named(name) {
        let bound = bug.bound();
        return show(
            name,
            &sums::Model {
                bound,
                bug: Some(bug),
            },
        );
    }
    let bug = Bug::named(name).ok_or(format!("no planted bug {name}; `list` names them"))?;
    let bound = bug.bound();
    show(
        name,
        &Model {
            bound,
            bug: Some(bug),
        },
    )
}

/// Prints the shortest way to the property that a planted bug breaks.
fn show(name: &str, model: &impl Machine) -> Result<(), String> {
    match search(model) {
        Ok(found) => Err(format!("{name} is not found: {found}")),
        Err(trace) => {
            print!("{name}: {trace}");
            Ok(())
        }
    }
}

/// Searches one bound.
fn search_one(model: &impl Machine) -> Result<(), String> {
    let found = search(model).map_err(|trace| trace.to_string())?;
    println!("{}: {found}", model.bound());
    Ok(())
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
        ["search", ..] => asked(&args[1..]).and_then(|bound| search_one(&clean(bound))),
        ["sums", ..] => match sums::bound(&args[1..].join(" ")) {
            Some(bound) => search_one(&clean_sums(bound)),
            None => Err("a bound is like `0:a 0:b? sweep flip cut`".into()),
        },
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
