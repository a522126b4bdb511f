//! Compares volumes in the texts of `--help` with the reference, which another test compares with what the command takes.

use super::reference::{Help, sections};
use std::collections::{BTreeMap, BTreeSet};

/// Options by name, with their values as the page writes them; empty where there is none.
type Options = BTreeMap<String, String>;

/// Names of URIs that are no volumes.
const OTHER_URIS: [&str; 2] = ["http", "https"];

/// The page's options for volumes, by the word that they begin with, such as `nbds+unix`.
pub fn schemes(page: &str) -> BTreeMap<String, Options> {
    let mut all = BTreeMap::new();
    for section in sections(page) {
        let fence = |line: &String| line.starts_with("```");
        let lines = section.lines.iter().skip_while(|line| !fence(line)).skip(1);
        let forms: Vec<&String> = lines.take_while(|line| !fence(line)).collect();
        let mut options: Options = forms.iter().flat_map(|form| named(form)).collect();
        let rows = section.rows().into_iter();
        options.extend(rows.map(|(row, _)| {
            let (name, value) = row.split_once('=').unwrap_or((&row, ""));
            (name.to_owned(), value.to_owned())
        }));
        // Other sections have fences with commands.
        let is_kind = |form: &&&String| scheme(form).is_some() && section.title.starts_with('`');
        for form in forms.iter().filter(is_kind) {
            let begin = scheme(form).unwrap_or_default().to_owned();
            all.insert(begin, options.clone());
        }
    }
    all
}

/// The word before the first colon of a form.
fn scheme(form: &str) -> Option<&str> {
    let (begin, _) = form.split_once(':')?;
    let begin = begin.trim_end_matches('[');
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-+".contains(c);
    (!begin.is_empty() && begin.chars().all(fits)).then_some(begin)
}

/// Options in a text: a word after a comma or a sign of a URI, or one with a value after a colon.
fn named(text: &str) -> Options {
    let mut found = Options::new();
    for (at, sign) in text.match_indices([',', '?', '&', ':']) {
        let rest = &text[at + 1..];
        let length = rest.find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let (name, after) = rest.split_at(length.unwrap_or(rest.len()));
        if name.is_empty() {
            continue;
        }
        match after.strip_prefix('=') {
            Some(value) => {
                let end = value.find(|c: char| c.is_whitespace() || ",&[]:;)'`".contains(c));
                let value = &value[..end.unwrap_or(value.len())];
                found.insert(name.to_owned(), value.to_owned());
            }
            // A path may follow a comma, and a sentence or a volume.
            None if sign == "," && !after.starts_with([':', '/', '+']) => {
                found.entry(name.to_owned()).or_default();
            }
            None => {}
        }
    }
    found
}

/// True if a help may write a value so that the page has as `page`: in the same words, as one of several words, or as an example.
fn fits(help: &str, page: &str) -> bool {
    let is_name = |text: &str| text.chars().all(|c| c.is_ascii_uppercase()) && !text.is_empty();
    let mut words = page.split('|');
    help == page
        || words.clone().all(|w| !is_name(w)) && words.any(|w| w == help && !w.is_empty())
        || is_name(page) && !is_name(help) && !help.is_empty()
}

fn differences(place: &str, text: &str, known: &Options, wrong: &mut Vec<String>) {
    for (name, value) in named(text) {
        match known.get(&name) {
            Some(page) if fits(&value, page) => {}
            page => wrong.push(format!(
                "{place}: `{name}` has the value {value:?} in --help and {page:?} in the page"
            )),
        }
    }
}

/// The entries of the list under `Volumes:`: their forms, and all of their text.
fn entries(help: &str) -> Vec<(Vec<String>, String)> {
    let lines = help.lines().skip_while(|line| *line != "Volumes:").skip(1);
    let mut all: Vec<(Vec<String>, String)> = Vec::new();
    for line in lines.take_while(|line| !line.is_empty()) {
        let words = line.trim_start();
        if line.len() - words.len() == 2 {
            let forms = words.split("  ").next().unwrap_or_default();
            let forms = forms.split(", ").map(str::to_owned);
            all.push((forms.collect(), words.to_owned()));
        } else if let Some((_, text)) = all.last_mut() {
            text.push(' ');
            text.push_str(words);
        }
    }
    all
}

/// Volumes of `list`, whose help lists all of them, and those that the helps of other commands mention.
pub fn helps(page: &str, commands: &BTreeMap<String, Help>, list: &str) -> Vec<String> {
    let known = schemes(page);
    let mut wrong = Vec::new();
    let text = commands.get(list).map_or("", |help| &help.text);
    let mut listed = BTreeSet::new();
    for (forms, text) in entries(text) {
        let begins: Vec<&str> = forms.iter().filter_map(|form| scheme(form)).collect();
        let options: Options = begins
            .iter()
            .filter_map(|begin| known.get(*begin))
            .flat_map(Clone::clone)
            .collect();
        differences(
            &format!("{list}, {}", forms[0]),
            &text,
            &options,
            &mut wrong,
        );
        listed.extend(begins.into_iter().map(str::to_owned));
    }
    let told: BTreeSet<String> = known.keys().cloned().collect();
    for begin in listed.symmetric_difference(&told) {
        wrong.push(format!(
            "{list}: `{begin}:` is in --help or in the page, and not in both"
        ));
    }
    for (command, help) in commands {
        for word in help.text.split_whitespace() {
            // Quoted, in parentheses, or the disk of a name.
            let mut parts = word
                .split(['\'', '`', '(', '=', '['])
                .flat_map(|w| w.split(':'));
            let uri = word.split_once("://").map(|(before, _)| before);
            let uri = uri.and_then(|before| before.rsplit(['\'', '`', '(', '=', ':', '[']).next());
            if let Some(uri) = uri
                && !known.contains_key(uri)
                && !OTHER_URIS.contains(&uri)
            {
                wrong.push(format!("{command}: {word}: the page has no `{uri}:`"));
            }
            let begins = parts.by_ref().filter_map(|part| known.get(part));
            let options: Vec<&Options> = begins.collect();
            if !options.is_empty() && word.contains(':') {
                let all = options.into_iter().flat_map(Clone::clone).collect();
                differences(&format!("{command}, {word}"), word, &all, &mut wrong);
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Volumes

```
KIND[:ARGUMENTS][:VOLUME]
```

## `null`

```
null[:SIZE][,notouch]
```

| option | meaning | default |
|---|---|---|
| `notouch` | leaves | no |

## `nbd`

```
nbd://HOST/EXPORT[,OPTION]…
nbd+unix:///EXPORT?socket=PATH[,OPTION]…
```

| option | meaning | default |
|---|---|---|
| `connections=N` | number | 1 |
| `on-reconnect=resend\\|fail` | lot | `resend` |

## Durability

```sh
pvblk serve --disk a=mem:1M
```
";

    const HELP: &str = "\
Serve disks

Volumes:
  null:SIZE[,notouch]       nothing
  nbd://HOST/NAME, nbd+unix:///NAME?socket=PATH
                            a server's; with ,connections=N at the start, and with
                            ,on-reconnect=fail an error

Examples:
  pvblk serve --disk a=nbd://h/a,connections=4 --nbd unix:/x,tls=DIR
  curl http://localhost/
";

    fn wrong(page: &str, help: &str) -> Vec<String> {
        let help = Help {
            text: help.to_owned(),
            ..Help::default()
        };
        let commands = BTreeMap::from([("pvblk serve".to_owned(), help)]);
        helps(page, &commands, "pvblk serve")
    }

    #[test]
    fn help_and_page_that_agree() {
        let none: [String; 0] = [];
        assert_eq!(wrong(PAGE, HELP), none);
    }

    #[test]
    fn differences_are_found() {
        for (from, to) in [
            ("  null:SIZE[,notouch]       nothing\n", ""),
            ("null:SIZE", "none:SIZE"),
            (",notouch", ",touch"),
            (", nbd+unix:///NAME?socket=PATH", ""),
            ("?socket=PATH", "?path=PATH"),
            ("connections=N", "connections=COUNT"),
            ("connections=N", "conections=N"),
            ("on-reconnect=fail", "on-reconnect=retry"),
            ("on-reconnect=fail", "on-reconnect"),
            ("a=nbd://h/a,connections=4", "a=nbds://h/a"),
            ("a=nbd://h/a,connections=4", "a=nbd://h/a,notouch"),
            ("a=nbd://h/a,connections=4", "a=null:1G,notouch=1"),
        ] {
            let help = HELP.replacen(from, to, 1);
            assert!(
                help != HELP && !wrong(PAGE, &help).is_empty(),
                "{from} {to}"
            );
        }
        for (from, to) in [
            ("nbd+unix:///", "nbds+unix:///"),
            ("`connections=N`", "`links=N`"),
            (
                "[,notouch]\n```\n\n| option | meaning | default |\n|---|---|---|\n| `notouch`",
                "\n```\n\n| `no`",
            ),
            ("resend\\|fail", "resend\\|stop"),
        ] {
            let page = PAGE.replacen(from, to, 1);
            assert!(
                page != PAGE && !wrong(&page, HELP).is_empty(),
                "{from} {to}"
            );
        }
    }
}
