//! A Markdown page as a list of fenced blocks.
//!
//! | in the page | is |
//! |---|---|
//! | a fence marked `sh` | commands, which one shell runs in the order of the page |
//! | a fence marked `text` after it | the output of those commands; see [`matches`] |
//! | `<!-- not run: REASON -->` before an `sh` fence | the block, and its output, is left out |
//! | `<!-- needs: PROGRAM … -->` before an `sh` fence | left out where a program isn't installed, or a path beginning with `/` doesn't exist; `root` is the user |
//! | any other fence | not looked at |

use crate::outcome::check;
use crate::{Stop, tools};
use std::path::Path;

/// A fence of the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Line of the opening fence, from 1.
    pub line: usize,
    /// The word after the opening fence.
    pub mark: String,
    /// The text between the fences.
    pub lines: Vec<String>,
    /// The comment before it.
    pub note: Note,
}

/// A comment before a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Note {
    /// There is none.
    #[default]
    Nothing,
    /// Never run, with the reason.
    NotRun(String),
    /// Run where these programs and paths are.
    Needs(Vec<String>),
}

impl Block {
    /// Why this machine doesn't run it.
    pub fn left_out(&self) -> Option<String> {
        match &self.note {
            Note::Nothing => None,
            Note::NotRun(reason) => Some(reason.clone()),
            Note::Needs(programs) => {
                let missing = |p: &&String| match p.as_str() {
                    "root" => !rustix::process::geteuid().is_root(),
                    path if path.starts_with('/') => !Path::new(path).exists(),
                    program => tools::find(program).is_none(),
                };
                let missing: Vec<&str> = programs.iter().filter(missing).map(|p| &**p).collect();
                (!missing.is_empty()).then(|| format!("not here: {}", missing.join(", ")))
            }
        }
    }

    /// Command lines: continued lines are one, and the text of a `<<` document isn't counted.
    pub fn commands(&self) -> Vec<String> {
        let mut commands = Vec::new();
        let mut joined = String::new();
        let mut until = None;
        for line in &self.lines {
            if let Some(end) = &until {
                if line == end {
                    until = None;
                }
                continue;
            }
            let line = line.trim();
            if let Some(begin) = line.strip_suffix('\\') {
                joined.push_str(begin);
                continue;
            }
            joined.push_str(line);
            let command = std::mem::take(&mut joined);
            if command.is_empty() || command.starts_with('#') {
                continue;
            }
            let here = command.split_once("<<").map(|(_, rest)| rest);
            until = here
                .and_then(|rest| rest.split_whitespace().next())
                .map(|word| word.trim_matches('\'').to_owned());
            commands.push(command);
        }
        commands
    }

    /// Servers that it starts in the background and whose output is seen.
    pub fn servers(&self) -> usize {
        let server = |c: &&String| {
            ["serve", "attach", "web"]
                .iter()
                .any(|word| c.starts_with(&format!("pvblk {word} ")))
                && c.ends_with('&')
                && !c.contains('>')
        };
        self.commands().iter().filter(server).count()
    }
}

/// The blocks of a page. A page that can't be run as it is written is refused.
pub fn blocks(text: &str) -> Result<Vec<Block>, Stop> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut open: Option<Block> = None;
    let mut note = Note::Nothing;
    for (n, line) in text.lines().enumerate() {
        let number = n + 1;
        let fence = line.trim_start().strip_prefix("```");
        match (open.take(), fence) {
            (Some(block), Some("")) => blocks.push(block),
            (Some(mut block), _) => {
                block.lines.push(line.to_owned());
                open = Some(block);
            }
            (None, Some(mark)) => {
                check(line.starts_with("```"), || {
                    format!("line {number}: a fence that is indented can't be run")
                })?;
                open = Some(Block {
                    line: number,
                    mark: mark.trim().to_owned(),
                    lines: Vec::new(),
                    note: std::mem::take(&mut note),
                });
            }
            (None, None) if line.trim().is_empty() => {}
            (None, None) => note = comment(line, number)?,
        }
    }
    check(open.is_none(), || "a fence isn't closed".into())?;
    for (n, block) in blocks.iter().enumerate() {
        let after = n.checked_sub(1).map(|p| blocks[p].mark.as_str());
        let at = block.line;
        check(block.mark != "text" || after == Some("sh"), || {
            format!("line {at}: an output (```text) comes right after its commands (```sh)")
        })?;
        check(block.mark == "sh" || block.note == Note::Nothing, || {
            format!("line {at}: only commands (```sh) are marked by a comment")
        })?;
    }
    Ok(blocks)
}

/// The note in a comment about the block after it.
fn comment(line: &str, number: usize) -> Result<Note, Stop> {
    let inside = line.trim().strip_prefix("<!--");
    let Some(inside) = inside.and_then(|rest| rest.strip_suffix("-->")) else {
        return Ok(Note::Nothing);
    };
    match inside.trim().split_once(':') {
        Some(("not run", reason)) if !reason.trim().is_empty() => {
            Ok(Note::NotRun(reason.trim().to_owned()))
        }
        Some(("needs", programs)) if !programs.trim().is_empty() => Ok(Note::Needs(
            programs.split_whitespace().map(str::to_owned).collect(),
        )),
        _ => Stop::fail(format!(
            "line {number}: write <!-- not run: REASON --> or <!-- needs: PROGRAM -->, not {line}"
        )),
    }
}

/// True if an output is that of the page: `…` stands for any characters of a line, and for any lines where it
/// stands alone. Spaces at the ends of lines don't count.
pub fn matches(expected: &[String], printed: &[&str]) -> bool {
    let Some((first, rest)) = expected.split_first() else {
        return printed.is_empty();
    };
    if first.trim() == "…" {
        return (0..=printed.len()).any(|skip| matches(rest, &printed[skip..]));
    }
    printed.split_first().is_some_and(|(line, others)| {
        line_matches(first.trim_end(), line.trim_end()) && matches(rest, others)
    })
}

fn line_matches(expected: &str, printed: &str) -> bool {
    let Some((begin, rest)) = expected.split_once('…') else {
        return expected == printed;
    };
    printed.strip_prefix(begin).is_some_and(|after| {
        let mut ends = after.char_indices().map(|(at, _)| at).chain([after.len()]);
        ends.any(|at| line_matches(rest, &after[at..]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Page

```sh
pvblk serve --disk a=mem:1M \\
    --nbd unix:s &
cat >file <<'EOF'
# not a command
EOF
# a remark
echo done
```

It prints:

```text
done
```

<!-- not run: needs a Xen host -->
```sh
xl list
```

```toml
nbd = []
```
";

    #[test]
    fn blocks_have_lines_marks_and_comments() {
        let found = blocks(PAGE).unwrap();
        let marks: Vec<(usize, &str)> = found.iter().map(|b| (b.line, &*b.mark)).collect();
        assert_eq!(marks, [(3, "sh"), (15, "text"), (20, "sh"), (24, "toml")]);
        assert_eq!(found[0].commands().len(), 3);
        assert_eq!(found[0].servers(), 1);
        assert_eq!(found[0].left_out(), None);
        assert_eq!(found[2].left_out(), Some("needs a Xen host".into()));
    }

    #[test]
    fn programs_that_are_missing_leave_a_block_out() {
        let page = "<!-- needs: sh /dev/null no-such-program-here /dev/none -->\n```sh\nx\n```\n";
        let found = blocks(page).unwrap();
        assert_eq!(
            found[0].left_out(),
            Some("not here: no-such-program-here, /dev/none".into())
        );
    }

    #[test]
    fn pages_that_cannot_be_run_are_refused() {
        for wrong in [
            "```sh\nls\n",
            "  ```sh\n  ls\n  ```\n",
            "```text\nout\n```\n",
            "```sh\nls\n```\n```toml\n```\n```text\nout\n```\n",
            "<!-- not run -->\n```sh\nls\n```\n",
            "<!-- not run: no Xen -->\n```text\nls\n```\n",
        ] {
            assert!(blocks(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_output_may_leave_things_out() {
        let expected = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        for (page, printed, same) in [
            ("a\nb", "a\nb  ", true),
            ("a\nb", "a\nc", false),
            ("a", "a\nb", false),
            ("a\nb", "a", false),
            ("took … ms, … left", "took 1.5 ms, 3 left", true),
            ("took … ms", "took 1.5 s", false),
            ("a\n…\nd", "a\nb\nc\nd", true),
            ("a\n…\nd", "a\nd", true),
            ("a\n…\nd", "a\nb", false),
            ("…", "", true),
        ] {
            let printed: Vec<&str> = printed.lines().collect();
            assert_eq!(matches(&expected(page), &printed), same, "{page}");
        }
    }
}
