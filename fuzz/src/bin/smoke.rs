//! Runs every target (or those named) over its seeds and random changes of them: `smoke [SECONDS [TARGET…]]`.
//! `smoke seeds` writes the generated seeds again.

use pvblk_fuzz::{TARGETS, smoke};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next();
    if first.as_deref() == Some("seeds") {
        for (name, _) in TARGETS {
            if let Err(e) = smoke::write_seeds(name) {
                eprintln!("writing seeds of {name}: {e}");
                return ExitCode::FAILURE;
            }
        }
        return ExitCode::SUCCESS;
    }
    let seconds = match first.as_deref().map(str::parse).transpose() {
        Ok(s) => s.unwrap_or(2),
        Err(_) => {
            eprintln!("usage: smoke [SECONDS [TARGET…]] | smoke seeds");
            return ExitCode::FAILURE;
        }
    };
    let named: Vec<String> = arguments.collect();
    let seed = pvblk_testing::seed();
    let mut failed = 0;
    let mut passed = 0;
    for (name, target) in TARGETS {
        if !named.is_empty() && !named.iter().any(|n| n == name) {
            continue;
        }
        println!("smoke: {name} for {seconds} s");
        let time = Duration::from_secs(seconds);
        let result = std::panic::catch_unwind(|| smoke::run(name, *target, seed, 1, time));
        match result {
            Ok(n) => {
                passed += 1;
                println!("smoke:   executions: {n}");
            }
            Err(_) => failed += 1,
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!("test result: {verdict}. {passed} passed; {failed} failed; 0 ignored;");
    ExitCode::from(u8::from(failed > 0))
}
