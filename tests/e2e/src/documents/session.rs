//! One shell that runs the commands of a page.

use super::page::{Block, matches};
use crate::Stop;
use crate::outcome::check;
use crate::tools::wait;
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Programs by name.
pub type Programs = BTreeMap<String, PathBuf>;

/// Longest time for a page: a bound for hangs.
const LIMIT: Duration = Duration::from_secs(600);

/// Commands that the shell reads first. Each block writes to a file of its own, together with the servers
/// that it starts, so their later output is in no other block's. A block ends when its servers are ready.
const PRELUDE: &str = r#"
unset BASH_ENV
set -E -o pipefail
__begin() { exec >"$PAGE_OUT/$1" 2>&1; echo "$1" >"$PAGE_OUT/at"; }
__end() {
    local deadline=$((SECONDS + 60))
    until [ "$(grep -c '^pvblk: ready$' "$PAGE_OUT/$1")" -ge "$2" ]; do
        if ((SECONDS > deadline)) || ! kill -0 $! 2>/dev/null; then
            echo "a server that the block starts didn't become ready"
            exit 1
        fi
        sleep 0.05
    done
    cp "$PAGE_OUT/$1" "$PAGE_OUT/$1.end"
}
trap 'echo "line $LINENO: exit status $?" >>"$PAGE_OUT/failed"' ERR
"#;

/// Runs the blocks that aren't left out, in a folder of its own, and compares what they print. `name` is for messages; `programs` are found
/// under these names before all others.
pub fn run(name: &str, blocks: &[Block], programs: &Programs) -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let folder = |name: &str| -> Result<_, Stop> {
        let path = dir.path().join(name);
        fs::create_dir(&path)?;
        Ok(path)
    };
    let (work, out, bin) = (folder("work")?, folder("out")?, folder("bin")?);
    for (program, path) in programs {
        std::os::unix::fs::symlink(path, bin.join(program))?;
    }
    let script = out.join("page.sh");
    fs::write(&script, script_of(blocks))?;
    fs::write(out.join("prelude"), PRELUDE)?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut child = Command::new("bash")
        .arg("-e")
        .arg(&script)
        .env("BASH_ENV", out.join("prelude"))
        .env("PAGE_OUT", &out)
        .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin.display()))
        .env("PVBLK_CONTROL", "none")
        .env("HOME", &work)
        .current_dir(&work)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(out.join("shell"))?)
        .process_group(0)
        .spawn()?;
    let status = wait(&mut child, LIMIT)?;
    // Processes that the page left behind are ended.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait()?;
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap_or_default();
    let how = match status {
        Some(status) if status.success() => return compare(name, blocks, &read),
        Some(status) => status.to_string(),
        None => format!("it hung, and was ended after {} s", LIMIT.as_secs()),
    };
    let (at, failed) = (read("at"), read("failed"));
    let line = failed.lines().next().unwrap_or("no command failed");
    let printed = read(at.trim()) + &read("shell");
    Stop::fail(format!(
        "{name}, the block at line {}: {line} ({how}). It printed:\n{printed}",
        at.trim()
    ))
}

/// A script whose lines have the numbers that they have in the page.
fn script_of(blocks: &[Block]) -> String {
    let mut script = String::new();
    let mut at = 1;
    for block in blocks {
        if block.mark != "sh" || block.left_out().is_some() {
            continue;
        }
        while at < block.line {
            script.push('\n');
            at += 1;
        }
        let _ = writeln!(script, "__begin {}", block.line);
        for line in &block.lines {
            let _ = writeln!(script, "{line}");
        }
        let _ = writeln!(script, "__end {} {}", block.line, block.servers());
        at += block.lines.len() + 2;
    }
    script
}

fn compare(name: &str, blocks: &[Block], read: &dyn Fn(&str) -> String) -> Result<(), Stop> {
    let pairs = blocks.iter().zip(blocks.iter().skip(1));
    for (commands, output) in pairs.filter(|(c, o)| o.mark == "text" && c.left_out().is_none()) {
        let printed = read(&format!("{}.end", commands.line));
        let lines: Vec<&str> = printed.lines().collect();
        check(matches(&output.lines, &lines), || {
            format!(
                "{name}, line {}: the page says\n{}\nand the commands at line {} printed\n{printed}",
                output.line,
                output.lines.join("\n"),
                commands.line
            )
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::page::blocks;
    use std::path::Path;

    /// Stands for pvblk: it says that it is ready a while after it began, and stays; with an argument `ends` it ends before.
    fn server(dir: &Path) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let path = dir.join("server");
        let text = "#!/bin/sh\nsleep 0.3\n[ $2 != ends ] || exit 1\ntouch up\necho 'pvblk: ready'\nexec sleep 1000\n";
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn run_page(text: &str) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        let programs = Programs::from([("pvblk".to_owned(), server(dir.path()))]);
        let result = run("p.md", &blocks(text).unwrap(), &programs);
        result.map_err(Stop::into_text)
    }

    #[test]
    fn commands_run_in_one_shell_and_servers_are_waited_for() {
        let page = "\
```sh
here=$PWD
pvblk serve --disk a=mem:1M &
```

```text
pvblk: ready
```

<!-- not run: it would fail -->
```sh
false
```

```sh
[ $here = $PWD ] && ls
```

```text
up
```
";
        assert_eq!(run_page(page), Ok(()));
    }

    #[test]
    fn a_wrong_command_is_found_with_its_line() {
        for wrong in ["no-such-command", "false", "echo a | grep b", "cat none"] {
            let page = format!("# Page\n\n```sh\ntrue\n{wrong}\ntrue\n```\n");
            let text = run_page(&page).unwrap_err();
            assert!(text.contains("line 5"), "{text}");
        }
    }

    #[test]
    fn a_wrong_output_is_found() {
        let page = "```sh\necho 1 queue\n```\n\n```text\n2 queues\n```\n";
        let text = run_page(page).unwrap_err();
        assert!(
            text.contains("line 5") && text.contains("1 queue\n"),
            "{text}"
        );
    }

    #[test]
    fn a_server_that_ends_at_once_is_found() {
        let text = run_page("```sh\npvblk serve ends &\n```\n").unwrap_err();
        assert!(text.contains("line 1"), "{text}");
    }
}
