//! Samples from files: fio's JSON, the lab's JSON, or one number a line.

mod fio;
mod records;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::Path;

/// Samples of named metrics from one or more files, in the order of the files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    /// Name and samples of each metric, in the order of appearance; the last word of a name is its
    /// unit.
    pub metrics: Vec<(String, Vec<f64>)>,
    /// The machine of each file that names one.
    pub machines: Vec<Value>,
    /// The program that measured, of each file that names one.
    pub programs: Vec<String>,
}

/// The metric of a file that has numbers only.
pub const PLAIN: &str = "value";

impl Samples {
    /// Reads `files` as repetitions of one experiment.
    pub fn read(files: &[impl AsRef<Path>]) -> Result<Samples> {
        let mut samples = Samples::default();
        for file in files {
            let file = file.as_ref();
            let found = std::fs::read_to_string(file)
                .map_err(Into::into)
                .and_then(|text| Samples::parse(&text))
                .with_context(|| format!("reading samples from {}", file.display()))?;
            samples.append(found);
        }
        Ok(samples)
    }

    /// Samples in the text of one file.
    pub fn parse(text: &str) -> Result<Samples> {
        let mut samples = Samples::default();
        if let Some(json) = find_json(text) {
            for document in serde_json::Deserializer::from_str(json).into_iter() {
                samples.append(of_document(&document.context("not JSON to its end")?)?);
            }
            ensure!(!samples.metrics.is_empty(), "no samples in its JSON");
        } else {
            samples.add(PLAIN, &plain(text)?);
        }
        let bad = |v: &f64| !v.is_finite();
        if let Some((name, _)) = samples.metrics.iter().find(|(_, v)| v.iter().any(bad)) {
            bail!("a sample of {name} is not a number");
        }
        Ok(samples)
    }

    /// The samples of a metric.
    pub fn of(&self, name: &str) -> Option<&[f64]> {
        let found = self.metrics.iter().find(|(n, _)| n == name);
        found.map(|(_, samples)| samples.as_slice())
    }

    fn add(&mut self, name: &str, values: &[f64]) {
        match self.metrics.iter_mut().find(|(n, _)| n == name) {
            Some((_, samples)) => samples.extend(values),
            None => self.metrics.push((name.to_owned(), values.to_vec())),
        }
    }

    fn append(&mut self, other: Samples) {
        for (name, values) in &other.metrics {
            self.add(name, values);
        }
        self.machines.extend(other.machines);
        self.programs.extend(other.programs);
    }
}

/// The part of a text that is JSON; `None` if the text is numbers. fio prints notes in front of its
/// JSON now and then.
fn find_json(text: &str) -> Option<&str> {
    if text.trim_start().starts_with('[') {
        return Some(text);
    }
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with('{') {
            return text.get(at..);
        }
        at += line.len();
    }
    None
}

fn of_document(document: &Value) -> Result<Samples> {
    let mut samples = if fio::is_fio(document) {
        fio::samples(document)?
    } else {
        records::samples(document)
    };
    let machine = [&document["machine"], &document["result"]["machine"]];
    let machine = machine.into_iter().find(|m| !m.is_null());
    samples.machines.extend(machine.cloned());
    let program = document["fio version"].as_str().map(str::to_owned);
    samples.programs.extend(program);
    Ok(samples)
}

/// The numbers of the first column; `#` at the begin of a line starts a comment.
fn plain(text: &str) -> Result<Vec<f64>> {
    let mut values = Vec::new();
    for (line, text) in text.lines().enumerate() {
        if text.starts_with('#') {
            continue;
        }
        let Some(word) = text.split_whitespace().next() else {
            continue;
        };
        let value: f64 = word.parse().with_context(|| {
            format!(
                "line {}: {word:?} is neither a number nor the begin of JSON",
                line + 1
            )
        })?;
        values.push(value);
    }
    ensure!(!values.is_empty(), "it is empty");
    Ok(values)
}

/// True if two machines of results are of one kind, as far as their descriptions say.
pub fn same_machine(a: &Value, b: &Value) -> bool {
    const MEMORY: &str = "memory_mib";
    // A kernel's own share of the memory varies from boot to boot.
    let near = match (a[MEMORY].as_f64(), b[MEMORY].as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= 0.02 * a.max(b),
        _ => true,
    };
    let rest = |m: &Value| {
        let mut m = m.clone();
        if let Some(fields) = m.as_object_mut() {
            fields.remove(MEMORY);
        }
        m
    };
    near && rest(a) == rest(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_as_ministat_reads_them() {
        let text = "# a comment\n10 7 x\n\n  2.5\n1e3\n-4\n";
        let samples = Samples::parse(text).unwrap();
        assert_eq!(samples.of(PLAIN).unwrap(), [10.0, 2.5, 1000.0, -4.0]);
    }

    #[test]
    fn what_is_no_sample_says_where() {
        for (text, culprit) in [
            ("1\n2\nx\n", "line 3: \"x\""),
            ("", "empty"),
            ("# nothing\n", "empty"),
            ("{\"jobs\": [", "not JSON"),
            ("{}", "no samples"),
            ("1\ninf\n", "not a number"),
        ] {
            let error = format!("{:#}", Samples::parse(text).unwrap_err());
            assert!(error.contains(culprit), "{text:?}: {error}");
        }
        let error = format!("{:#}", Samples::read(&["/nonexistent/a"]).unwrap_err());
        assert!(error.contains("/nonexistent/a"), "{error}");
    }

    #[test]
    fn notes_before_json_and_several_documents() {
        let text = "fio: a note\n{\"result\":{\"machine\":{\"cpus\":2},\"iops\":[1,2]}}\n\
                    {\"result\":{\"machine\":{\"cpus\":2},\"iops\":[3]}}\n";
        let samples = Samples::parse(text).unwrap();
        assert_eq!(samples.of("iops").unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(samples.machines.len(), 2);
    }

    #[test]
    fn machines_of_a_kind() {
        let here = json!({"cpu": "A", "cpus": 2, "kernel": "6.1", "memory_mib": 24105});
        let mut there = here.clone();
        there["memory_mib"] = json!(24100);
        assert!(same_machine(&here, &there));
        there["memory_mib"] = json!(8000);
        assert!(!same_machine(&here, &there));
        let mut other = here.clone();
        other["cpu"] = json!("B");
        assert!(!same_machine(&here, &other));
    }
}
