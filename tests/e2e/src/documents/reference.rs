//! Compares the reference pages with the command's help, and with its errors, which list what the command
//! knows.

use super::session::Programs;
use crate::daemon::pvblk;
use crate::outcome::check;
use crate::tools::run;
use crate::{MIB, Stop};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// An option: its value's name and its default, each empty where there is none.
pub type Options = BTreeMap<String, (String, String)>;

/// The options and arguments in the `--help` of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Help {
    /// The line after `Usage:`.
    pub usage: String,
    /// By `--name`.
    pub options: Options,
    /// Names of the subcommands.
    pub commands: Vec<String>,
    /// All of it.
    pub text: String,
}

/// Reads the text of `--help`.
pub fn help(text: &str) -> Help {
    let mut help = Help {
        text: text.to_owned(),
        ..Help::default()
    };
    let mut section = "";
    let mut last: Option<(String, String, String)> = None;
    let mut all = Vec::new();
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let words = line.trim();
        if let Some(usage) = line.strip_prefix("Usage: ") {
            help.usage = usage.to_owned();
        } else if indent == 0 && !words.is_empty() {
            section = words;
        } else if section == "Commands:" && indent == 2 {
            help.commands
                .extend(words.split(' ').next().map(str::to_owned));
        } else if section == "Options:" && indent <= 6 && words.starts_with('-') {
            all.extend(last.take());
            let (names, about) = words.split_once("  ").unwrap_or((words, ""));
            let long = names.find("--").map_or(names, |at| &names[at..]);
            let (name, value) = long.split_once(' ').unwrap_or((long, ""));
            let value = value.trim_matches(['<', '>']).to_owned();
            last = Some((name.to_owned(), value, about.to_owned()));
        } else if let (Some((_, _, about)), "Options:") = (&mut last, section) {
            about.push(' ');
            about.push_str(words);
        }
    }
    all.extend(last);
    for (name, value, about) in all {
        let default = about.split_once("[default: ").map_or("", |(_, rest)| rest);
        let default = default.split(']').next().unwrap_or_default();
        if name != "--help" && name != "--version" {
            help.options.insert(name, (value, default.to_owned()));
        }
    }
    help.commands.retain(|c| c != "help");
    help
}

/// All commands of these programs without subcommands, by their words.
pub fn commands(programs: &Programs) -> Result<BTreeMap<String, Help>, Stop> {
    let mut all = BTreeMap::new();
    let mut next: Vec<String> = programs.keys().cloned().collect();
    while let Some(words) = next.pop() {
        let (program, args) = words.split_once(' ').unwrap_or((&words, ""));
        let mut command = Command::new(&programs[program]);
        command.args(args.split_whitespace()).arg("--help");
        let help = help(&run(command, LIMIT)?.success()?.stdout);
        if help.commands.is_empty() {
            all.insert(words, help);
        } else {
            next.extend(help.commands.iter().map(|c| format!("{words} {c}")));
        }
    }
    Ok(all)
}

/// A part of a page, from a heading to the next.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading of the table.
    pub title: String,
    /// The lines below.
    pub lines: Vec<String>,
}

impl Section {
    /// First and last cells of the rows of its tables whose first cell begins with code.
    pub fn rows(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        for line in &self.lines {
            let Some(row) = line.strip_prefix("| `") else {
                continue;
            };
            let row = row.trim_end().trim_end_matches('|').replace("\\|", "\u{1}");
            let mut cells = row.split('|').map(|c| c.trim().replace('\u{1}', "|"));
            let first = cells.next().unwrap_or_default();
            let last = cells.next_back().unwrap_or_default();
            let code = first.split('`').next().unwrap_or_default();
            rows.push((code.to_owned(), last));
        }
        rows
    }

    /// Code in its heading, such as the commands that it is about.
    fn subjects(&self) -> Vec<String> {
        let code = self.title.split('`').skip(1).step_by(2);
        code.map(str::to_owned).collect()
    }
}

/// The sections of a page.
pub fn sections(page: &str) -> Vec<Section> {
    let mut all: Vec<Section> = Vec::new();
    let mut fenced = false;
    for line in page.lines() {
        fenced ^= line.starts_with("```");
        match line.strip_prefix('#') {
            Some(rest) if !fenced => all.push(Section {
                title: rest.trim_start_matches('#').trim().to_owned(),
                lines: Vec::new(),
            }),
            _ => all
                .last_mut()
                .into_iter()
                .for_each(|s| s.lines.push(line.to_owned())),
        }
    }
    all
}

/// Differences between the commands' help and pages whose sections have their names as headings, their usage in a fence, and a table of
/// options with the default in the last column.
pub fn flags(pages: &[String], commands: &BTreeMap<String, Help>) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut missing: BTreeSet<&String> = commands.keys().collect();
    for section in pages.iter().flat_map(|page| sections(page)) {
        let title = &section.title;
        for name in section.subjects() {
            let Some(help) = commands.get(&name) else {
                if name.starts_with("pvblk") {
                    wrong.push(format!("{title}: there is no command {name}"));
                }
                continue;
            };
            missing.remove(&name);
            if !section.lines.contains(&help.usage) {
                wrong.push(format!("{title}: the usage isn't there: {}", help.usage));
            }
            let mut told = Options::new();
            for (option, default) in section.rows() {
                let (option, value) = option.split_once(' ').unwrap_or((&option, ""));
                let default = default.replace('`', "");
                told.insert(option.to_owned(), (value.to_owned(), default));
            }
            told.retain(|option, _| option.starts_with("--"));
            for option in told.keys().chain(help.options.keys()) {
                match (told.get(option), help.options.get(option)) {
                    (Some(page), Some(help)) if page == help => {}
                    (page, help) => wrong.push(format!(
                        "{title}, {option}: (value, default) is {page:?} in the page and {help:?} in --help"
                    )),
                }
            }
        }
    }
    wrong.extend(
        missing
            .iter()
            .map(|m| format!("{m}: no section is about it")),
    );
    wrong.sort();
    wrong.dedup();
    wrong
}

/// The words that an error lists as possible: those after `words`, up to an example.
fn possible(text: &str, words: &str) -> Option<BTreeSet<String>> {
    let (_, list) = text.split_once(words)?;
    let list = list.split(", as in").next()?.lines().next()?;
    let name = |item: &str| {
        let item = item.trim().trim_matches('`');
        let end = item.find(['=', ' ']).unwrap_or(item.len());
        item[..end].to_owned()
    };
    // `a time first, then iops=RATE` and `, or a path with a /` are sentences.
    let items = list.split(", ").map(|i| i.trim_start_matches("then "));
    let items = items.filter(|i| !i.starts_with("a ") && !i.starts_with("or "));
    Some(items.map(name).collect())
}

fn refusal(volume: &str) -> Result<String, Stop> {
    let disk = format!("a={volume}");
    let command = pvblk(["serve", "--disk", &disk, "--nbd", "unix:none"])?;
    Ok(run(command, LIMIT)?.stderr)
}

/// Differences between the volumes that the command knows and a page with a section for each kind, whose tables name its options.
pub fn volumes(page: &str) -> Result<Vec<String>, Stop> {
    let mut wrong = Vec::new();
    let kinds = possible(&refusal("bogus:1M")?, "unknown kind `bogus`: use ");
    let kinds = kinds.ok_or_else(|| Stop::Fail("no kinds are named".into()))?;
    check(kinds.len() >= 10, || format!("{kinds:?}"))?;
    let sections = sections(page);
    for section in &sections {
        for kind in section.subjects().iter().filter(|k| !kinds.contains(*k)) {
            wrong.push(format!("{}: there is no volume `{kind}`", section.title));
        }
    }
    for kind in kinds {
        let spec = match kind.as_str() {
            "file" => "file:x,ro,bogus=1".to_owned(),
            "null" | "mem" => format!("{kind}:{MIB},bogus=1"),
            "cache" => "cache:1M,bogus=1:null".to_owned(),
            "nbd" => "nbd://h/x,bogus=1".to_owned(),
            "rbd" => "rbd:p/i,bogus=1".to_owned(),
            "vhost-user" => "vhost-user:unix:x,bogus=1".to_owned(),
            "rings" => "rings:unix:x,disk=a,bogus=1".to_owned(),
            // The form by UUID has the options of the other one, and its own.
            "raid5" => format!("raid5:uuid={},bogus=1", "0".repeat(32)),
            decorator => format!("{decorator}:bogus=1:null"),
        };
        let said = refusal(&spec)?;
        let Some(known) = possible(&said, ": use ") else {
            return Stop::fail(format!("{spec}: no options are named: {said}"));
        };
        let about = |s: &&Section| s.subjects().contains(&kind);
        let rows = sections.iter().filter(about).flat_map(Section::rows);
        let name = |row: &str| row.split('=').next().unwrap_or_default().to_owned();
        let told: BTreeSet<String> = rows.map(|(row, _)| name(&row)).collect();
        if told != known {
            wrong.push(format!("{kind}: {told:?} in the page, {known:?} known"));
        }
    }
    Ok(wrong)
}

/// Differences between the keys of a configuration file and a page with a table of them, and of those of a disk.
pub fn configuration(page: &str, dir: &Path) -> Result<Vec<String>, Stop> {
    let mut wrong = Vec::new();
    let sections = sections(page);
    for (title, text) in [
        ("Keys of the file", "bogus = 1\n"),
        ("Keys of a disk", "[disk.a]\nbogus = 1\n"),
    ] {
        let file = dir.join("bogus.toml");
        std::fs::write(&file, text)?;
        let command = pvblk(["serve".as_ref(), "--config".as_ref(), file.as_os_str()])?;
        let said = run(command, LIMIT)?.stderr;
        let Some(known) = possible(&said, "expected one of ") else {
            return Stop::fail(format!("no keys are named: {said}"));
        };
        let section = sections.iter().find(|s| s.title == title);
        let rows = section.map(Section::rows).unwrap_or_default();
        let told: BTreeSet<String> = rows.into_iter().map(|(row, _)| row).collect();
        if told != known {
            wrong.push(format!("{title}: {told:?} in the page, {known:?} known"));
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "\
Do something

Usage: pvblk do [OPTIONS] <DISK>

Arguments:
  <DISK>  The disk

Options:
      --queues <N>
          Rings to ask for; see --other
          --not-an-option

          [default: 2]

      --wait           Show how far it is
  -o, --output <NAME>  Where to [default: the first
                       that is free]
  -h, --help           Print help

Examples:
  --nothing
";

    const PAGE: &str = "\
# Flags

## `pvblk do`

```
pvblk do [OPTIONS] <DISK>
```

| option | meaning | default |
|---|---|---|
| `--queues N` | rings | 2 |
| `--wait` | shows | |
| `--output NAME` | where | the first that is free |
";

    #[test]
    fn help_and_page_that_agree() {
        let help = help(HELP);
        assert_eq!(help.usage, "pvblk do [OPTIONS] <DISK>");
        let two = ("N".to_owned(), "2".to_owned());
        assert_eq!(help.options["--queues"], two);
        assert_eq!(help.options.len(), 3);
        let commands = BTreeMap::from([("pvblk do".to_owned(), help)]);
        let none: [String; 0] = [];
        assert_eq!(flags(&[PAGE.to_owned()], &commands), none);
    }

    #[test]
    fn differences_are_found_both_ways() {
        let commands = BTreeMap::from([("pvblk do".to_owned(), help(HELP))]);
        for (from, to) in [
            ("| `--wait` | shows | |\n", ""),
            ("--wait", "--hurry"),
            ("| 2 |", "| 3 |"),
            ("--queues N", "--queues M"),
            ("[OPTIONS] <DISK>", "<DISK>"),
            ("## `pvblk do`", "## `pvblk undo`"),
        ] {
            let page = PAGE.replace(from, to);
            assert!(!flags(&[page], &commands).is_empty(), "{from}");
        }
    }

    #[test]
    fn errors_name_what_is_possible() {
        let set = |names: &[&str]| Some(names.iter().map(|n| (*n).to_owned()).collect());
        for (text, names) in [
            (
                "x: use iops=RATE, serial, as in delay:1ms",
                &["iops", "serial"][..],
            ),
            (
                "x: use a time first, then iops=R, bw=R, as in",
                &["iops", "bw"],
            ),
            (
                "x: use null, mem, as in mem:1G, or a path",
                &["null", "mem"],
            ),
            ("x: use notouch, as in null", &["notouch"]),
        ] {
            assert_eq!(possible(text, ": use "), set(names));
        }
        assert_eq!(
            possible("expected one of `local`, `nbd`\n", "expected one of "),
            set(&["local", "nbd"])
        );
    }
}
