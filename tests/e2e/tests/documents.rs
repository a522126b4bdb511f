//! The documents for users: every command in them runs, in the order in which it stands, and prints what the page says; the reference
//! names what the command knows, and nothing else.

use libtest_mimic::Trial;
use pvblk_e2e::daemon::{binary, lab_binary};
use pvblk_e2e::documents::{page, reference, session, specs};
use pvblk_e2e::outcome::{check, trial};
use pvblk_e2e::{Stop, run_trials};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    run_trials(|| {
        let mut trials = vec![
            trial("options_and_reference_agree", options),
            trial("volumes_and_reference_agree", volumes),
            trial("volumes_in_helps_and_reference_agree", helps),
            trial("configuration_and_reference_agree", configuration),
        ];
        trials.extend(pages());
        trials
    })
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn programs() -> Result<session::Programs, Stop> {
    let pvblk = ("pvblk".to_owned(), binary()?);
    let lab = ("pvblk-lab".to_owned(), lab_binary()?);
    Ok(session::Programs::from([pvblk, lab]))
}

/// Paths of the documents, from the root.
fn names() -> Result<Vec<String>, Stop> {
    let mut names = vec!["README.md".to_owned()];
    for folder in ["docs/guide", "docs/reference"] {
        let before = names.len();
        for entry in std::fs::read_dir(root().join(folder))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            names.extend(name.ends_with(".md").then(|| format!("{folder}/{name}")));
        }
        check(names.len() > before, || format!("{folder} is empty"))?;
    }
    names.sort();
    Ok(names)
}

fn text(name: &str) -> Result<String, Stop> {
    Ok(std::fs::read_to_string(root().join(name))?)
}

/// A trial for each page, and one for each block that isn't run, so that the list of skipped trials
/// has it with its reason.
fn pages() -> Vec<Trial> {
    let names = match names() {
        Ok(names) => names,
        Err(e) => return vec![trial("documents", || Err(e))],
    };
    let mut trials = Vec::new();
    for name in names {
        let blocks = match text(&name).and_then(|text| page::blocks(&text)) {
            Ok(blocks) => blocks,
            Err(e) => {
                trials.push(trial(&name, || Err(e)));
                continue;
            }
        };
        let mut run = 0;
        for block in blocks.iter().filter(|b| b.mark == "sh") {
            match block.left_out() {
                None => run += block.commands().len(),
                Some(why) => {
                    let told = format!("{name} line {}", block.line);
                    let why = format!("{} commands: {why}", block.commands().len());
                    trials.push(trial(&told, || Stop::skip(why)));
                }
            }
        }
        if run > 0 {
            let told = format!("{name} ({run} commands)");
            let each = move || session::run(&name, &blocks, &programs()?);
            trials.push(trial(&told, each));
        }
    }
    trials
}

fn agree(wrong: &[String]) -> Result<(), Stop> {
    check(wrong.is_empty(), || wrong.join("\n"))
}

fn options() -> Result<(), Stop> {
    let pages = [
        text("docs/reference/flags.md")?,
        text("docs/reference/lab.md")?,
    ];
    let commands = reference::commands(&programs()?)?;
    check(commands.len() > 30, || format!("{:?}", commands.keys()))?;
    agree(&reference::flags(&pages, &commands))
}

fn volumes() -> Result<(), Stop> {
    agree(&reference::volumes(&text("docs/reference/volumes.md")?)?)
}

fn helps() -> Result<(), Stop> {
    let page = text("docs/reference/volumes.md")?;
    let known = specs::schemes(&page).len();
    check(known > 12, || format!("{known} forms in the page"))?;
    let commands = reference::commands(&programs()?)?;
    agree(&specs::helps(&page, &commands, "pvblk serve"))
}

fn configuration() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let page = text("docs/reference/configuration.md")?;
    agree(&reference::configuration(&page, dir.path())?)
}
