//! Manual pages of all commands, and completions for shells, out of the same texts as `--help` (decision 42).

use crate::cli::Cli;
use anyhow::Context;
use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
pub struct ManualArgs {
    /// Folder for them; made if there is none
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Date in the pages' last line, such as 2026-11-24
    #[arg(long, value_name = "DATE", default_value = "")]
    pub date: String,
}

/// A folder below the given one for each kind: `man`, `bash`, `zsh`, `fish`.
pub fn run(args: &ManualArgs) -> anyhow::Result<()> {
    let mut command = Cli::command();
    // The name of a nested command is then `pvblk raid create`, and its usage says so.
    command.build();
    let man = args.folder.join("man");
    make(&man)?;
    pages(&command, &man, &args.date)?;
    for (shell, folder) in [
        (Shell::Bash, "bash"),
        (Shell::Zsh, "zsh"),
        (Shell::Fish, "fish"),
    ] {
        let folder = args.folder.join(folder);
        make(&folder)?;
        clap_complete::generate_to(shell, &mut Cli::command(), "pvblk", &folder)
            .with_context(|| format!("completions for {shell}"))?;
    }
    Ok(())
}

fn make(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))
}

/// The page of this command, and those of the commands below it.
fn pages(command: &Command, folder: &Path, date: &str) -> anyhow::Result<()> {
    for below in command.get_subcommands() {
        if !below.is_hide_set() && below.get_name() != "help" {
            pages(below, folder, date)?;
        }
    }
    let name = page_name(command);
    let page = clap_mangen::Man::new(command.clone())
        .title(name.to_uppercase())
        .section("1")
        .date(date)
        .source(concat!("pvblk ", env!("CARGO_PKG_VERSION")))
        .manual("pvblk");
    let mut text = Vec::new();
    page.render(&mut text)?;
    // Flags and sockets are long words: lines aren't stretched to the margin for them. What follows the options is set in columns already.
    let text = String::from_utf8(text)?
        .replacen("\n.SH NAME", "\n.ad l\n.nh\n.SH NAME", 1)
        .replacen("\n.SH EXTRA\n", "\n.SH NOTES\n.nf\n", 1);
    let path = folder.join(format!("{name}.1"));
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

/// As git names its pages: `pvblk-raid-create`.
fn page_name(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    name.replace(' ', "-")
}
