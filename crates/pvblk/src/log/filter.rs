//! Levels by module.

use pvblk_block::Error;
use tracing_subscriber::EnvFilter;

/// Levels that lines can have, and `off`.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// Modules that have lines: our crates, without `pvblk-`.
const MODULES: [&str; 10] = [
    "backend", "block", "bench", "cache", "client", "export", "raid5", "sys", "trace", "volume",
];

/// The filter for `LEVEL` or `MODULE=LEVEL`, several with commas between. A module is a crate of ours, or a part of one: `raid5`, `export::nbd`.
pub(super) fn parse(text: &str) -> Result<EnvFilter, Error> {
    let directives: Result<Vec<String>, Error> = text.split(',').map(directive).collect();
    let wrong = |e| Error::config(format!("log {text}: {e}"));
    EnvFilter::try_new(directives?.join(",")).map_err(wrong)
}

fn directive(text: &str) -> Result<String, Error> {
    let text = text.trim();
    let (module, level) = match text.split_once('=') {
        Some((module, level)) => (Some(module.trim()), level.trim()),
        None => (None, text),
    };
    if !LEVELS.contains(&level) {
        let levels = LEVELS.join(", ");
        return Err(Error::config(format!(
            "log {text}: a level is one of {levels}"
        )));
    }
    let Some(module) = module else {
        return Ok(level.to_owned());
    };
    let first = module.split("::").next().unwrap_or_default();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    if first == "pvblk" && module.chars().all(is_word) {
        return Ok(format!("{module}={level}"));
    }
    if !MODULES.contains(&first) || !module.chars().all(is_word) {
        let modules = MODULES.join(", ");
        return Err(Error::config(format!(
            "log {text}: a module is pvblk (the command itself), or one of {modules}, or a part of one, such as export::nbd"
        )));
    }
    Ok(format!("pvblk_{module}={level}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_our_crates() {
        for (text, expected) in [
            ("debug", "debug"),
            (" warn ", "warn"),
            ("raid5=debug", "pvblk_raid5=debug"),
            ("export::nbd=trace", "pvblk_export::nbd=trace"),
            ("pvblk::daemon=off", "pvblk::daemon=off"),
        ] {
            assert_eq!(directive(text).unwrap(), expected);
        }
        assert!(parse("info,raid5=debug").is_ok());
        for (text, words) in [
            ("loud", "a level is one of"),
            ("raid5=loud", "a level is one of"),
            ("tokio=info", "a module is"),
            ("", "a level is one of"),
            ("raid5[x]=info", "a module is"),
        ] {
            let e = parse(text).unwrap_err().to_string();
            assert!(e.contains(words), "{text}: {e}");
        }
    }
}
