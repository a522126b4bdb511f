//! Samples in the JSON of the lab's experiments: every array of numbers, named by where it is.

use super::Samples;
use serde_json::{Map, Value};

/// Names that are left out of the names of metrics.
const SILENT: [&str; 2] = ["result", "samples"];

/// All arrays of numbers. The name of one is made of the texts and whole numbers beside it (`depth 32 pvblk`),
/// if its object is one of several, and of its own. A record's part for reports isn't measured again, and is left out.
pub fn samples(document: &Value) -> Samples {
    let mut samples = Samples::default();
    walk(document, "", &mut samples);
    samples
}

fn walk(value: &Value, name: &str, samples: &mut Samples) {
    match value {
        Value::Object(fields) => {
            let measured = |key: &str| key != "machine" && key != "report";
            for (key, value) in fields.iter().filter(|(key, _)| measured(key)) {
                let key = if SILENT.contains(&key.as_str()) {
                    ""
                } else {
                    key
                };
                walk(value, &join(name, key), samples);
            }
        }
        Value::Array(items) => {
            let numbers: Option<Vec<f64>> = items.iter().map(Value::as_f64).collect();
            match numbers {
                Some(numbers) if !numbers.is_empty() => add(name, &numbers, samples),
                _ => {
                    for item in items.iter().filter_map(Value::as_object) {
                        let name = join(name, &labels(item));
                        walk(&Value::Object(item.clone()), &name, samples);
                    }
                }
            }
        }
        _ => {}
    }
}

/// Adds a metric. If one document has two sets of one name, their places in it tell them apart.
fn add(name: &str, numbers: &[f64], samples: &mut Samples) {
    let name = if name.is_empty() { super::PLAIN } else { name };
    let mut unique = name.to_owned();
    let mut number = 2;
    while samples.of(&unique).is_some() {
        unique = format!("{name} #{number}");
        number += 1;
    }
    samples.add(&unique, numbers);
}

fn labels(item: &Map<String, Value>) -> String {
    item.iter().fold(String::new(), |labels, (key, value)| {
        let label = match value {
            Value::String(text) => text.clone(),
            Value::Number(n) if n.is_u64() || n.is_i64() => format!("{key} {n}"),
            _ => return labels,
        };
        join(&labels, &label)
    })
}

fn join(a: &str, b: &str) -> String {
    format!("{a} {b}").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_come_from_the_places() {
        let document = json!({
            "command": "pvblk-lab nbd --depths 1",
            "result": {
                "machine": {"cpus": [2, 2]},
                "pinned": true,
                "samples": [
                    {"server": "pvblk", "depth": 1, "iops": [1.0, 2.0], "cpu_us": [3.0]},
                    {"server": "null", "depth": 1, "iops": [4.0]},
                    {"server": "null", "depth": 1, "iops": [5.0]},
                ],
                "empty": [],
            }
        });
        let expected = [
            ("depth 1 pvblk cpu_us", vec![3.0]),
            ("depth 1 pvblk iops", vec![1.0, 2.0]),
            ("depth 1 null iops", vec![4.0]),
            ("depth 1 null iops #2", vec![5.0]),
        ];
        let expected = expected.map(|(n, v)| (n.to_owned(), v));
        assert_eq!(samples(&document).metrics, expected);
    }

    #[test]
    fn a_bare_array_has_a_name() {
        assert_eq!(samples(&json!([1, 2, 3])).of("value").unwrap().len(), 3);
    }
}
