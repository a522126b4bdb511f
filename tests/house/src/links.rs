//! Checks that links between documents have targets.

use crate::Finding;

/// Checks the relative links of the Markdown file at `path`. `exists` tells if there is a file at a path relative to
/// the root.
pub fn check(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    targets(text)
        .filter(|(_, target)| {
            let inside = target.split('#').next().unwrap_or("");
            !inside.is_empty() && !inside.contains("://") && !exists(&join(folder, inside))
        })
        .map(|(line, target)| {
            Finding::new(format!("{path}:{line}"), format!("leads nowhere: {target}"))
        })
        .collect()
}

/// Line and target of every `](target)`, outside of fenced code.
fn targets(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines()
        .enumerate()
        .filter(move |(_, line)| {
            let fence = line.trim_start().starts_with("```");
            fenced ^= fence;
            !fenced && !fence
        })
        .flat_map(|(n, line)| {
            line.split("](")
                .skip(1)
                .filter_map(|rest| rest.split_once(')'))
                .map(move |(target, _)| (n + 1, target))
        })
}

fn join(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<Finding> {
        check(path, text, |p| matches!(p, "README.md" | "docs/a.md"))
    }

    #[test]
    fn dead_links_are_found() {
        let dead = found("docs/b.md", "one\n[x](c.md) and [y](../README.md#top)");
        assert_eq!(dead, [Finding::new("docs/b.md:2", "leads nowhere: c.md")]);
    }

    #[test]
    fn good_links_pass() {
        let text = "[a](docs/a.md) [b](./README.md) [c](https://example.org/x) [d](#part)";
        assert_eq!(found("README.md", text), []);
        assert_eq!(found("README.md", "```\n[a](none.md)\n```"), []);
    }
}
