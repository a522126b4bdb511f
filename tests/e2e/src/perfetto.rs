//! Timelines, read by decoders of others.

use crate::Stop;
use crate::outcome::check;
use crate::tools::run_ok;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Number and sum in nanoseconds of slices, by track and name.
pub type Sums = BTreeMap<(String, String), (u64, u64)>;

/// A message as protoc prints it: fields in their order.
#[derive(Debug, Default)]
struct Message<'a>(Vec<(&'a str, Field<'a>)>);

#[derive(Debug)]
enum Field<'a> {
    Value(&'a str),
    Message(Message<'a>),
}

impl<'a> Message<'a> {
    fn read(lines: &mut impl Iterator<Item = &'a str>) -> Message<'a> {
        let mut fields = Vec::new();
        while let Some(line) = lines.next() {
            let line = line.trim();
            if line == "}" {
                break;
            }
            if let Some(name) = line.strip_suffix(" {") {
                fields.push((name, Field::Message(Message::read(lines))));
            } else if let Some((name, value)) = line.split_once(": ") {
                fields.push((name, Field::Value(value)));
            }
        }
        Message(fields)
    }

    fn messages(&self, name: &str) -> impl Iterator<Item = &Message<'a>> {
        self.0.iter().filter_map(move |(n, field)| match field {
            Field::Message(message) if *n == name => Some(message),
            _ => None,
        })
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find_map(|(n, field)| match field {
            Field::Value(value) if *n == name => Some(*value),
            _ => None,
        })
    }

    fn number(&self, name: &str) -> u64 {
        let number = self.value(name).and_then(|v| v.parse().ok());
        number.unwrap_or(0)
    }

    fn text(&self, name: &str) -> String {
        let text = self.value(name).unwrap_or("\"\"");
        text.trim_matches('"').to_owned()
    }
}

/// The slices of a timeline, by protoc.
pub fn by_protoc(timeline: &Path) -> Result<Sums, Stop> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let script = format!(
        "protoc --decode=perfetto.protos.Trace -I'{0}' '{0}/timeline.proto' <'{1}'",
        data.display(),
        timeline.display()
    );
    let said = run_ok("sh", ["-c", &script])?.stdout;
    let trace = Message::read(&mut said.lines());
    let (mut tracks, mut names) = (HashMap::new(), HashMap::new());
    let mut steps = Vec::new();
    for packet in trace.messages("packet") {
        for told in packet.messages("interned_data") {
            for name in told.messages("event_names") {
                names.insert(name.number("iid"), name.text("name"));
            }
        }
        for track in packet.messages("track_descriptor") {
            tracks.insert(track.number("uuid"), track.text("name"));
        }
        for event in packet.messages("track_event") {
            steps.push((packet.number("timestamp"), event));
        }
    }
    // Perfetto sorts by time, and keeps the file's order at one moment.
    steps.sort_by_key(|s| s.0);
    let (mut open, mut sums) = (HashMap::new(), Sums::new());
    for (time, event) in steps {
        let track = event.number("track_uuid");
        let open: &mut Vec<_> = open.entry(track).or_default();
        match event.value("type") {
            Some("TYPE_SLICE_BEGIN") => open.push((event.number("name_iid"), time)),
            Some("TYPE_SLICE_END") => {
                let Some((name, begin)) = open.pop() else {
                    return Stop::fail("an end without a begin");
                };
                let name = names.get(&name).cloned().unwrap_or_default();
                let sum = sums.entry((tracks[&track].clone(), name)).or_insert((0, 0));
                *sum = (sum.0 + 1, sum.1 + time - begin);
            }
            _ => {}
        }
    }
    match open.values().all(Vec::is_empty) {
        true => Ok(sums),
        false => Stop::fail("a begin without an end"),
    }
}

/// The same by Perfetto's own query engine.
pub fn by_trace_processor(timeline: &Path, query: &Path) -> Result<Sums, Stop> {
    let text = "select track.name as track, slice.name as name, count(*) as n, sum(dur) as ns \
                from slice join track on slice.track_id = track.id group by 1, 2;\n";
    std::fs::write(query, text)?;
    let args = [Path::new("-q"), query, timeline];
    let said = run_ok("trace_processor_shell", args)?.stdout;
    let row = |line: &str| {
        let mut cells = line.rsplitn(3, ',').map(|c| c.trim_matches('"'));
        let (ns, n) = (cells.next()?.parse().ok()?, cells.next()?.parse().ok()?);
        let (track, name) = cells.next()?.split_once("\",\"")?;
        Some(((track.to_owned(), name.to_owned()), (n, ns)))
    };
    Ok(said.lines().filter_map(row).collect())
}

/// Most that a sum may be beside that of `latency`, as a share.
const CLOSE: f64 = 0.001;

/// Sums of the slices on all tracks of `latency`'s devices are its figures; returns the number of sums.
pub fn same_sums(sums: &Sums, figures: &Value) -> Result<usize, Stop> {
    let of = |track: &str, name: &str| {
        let of = sums.iter();
        let of = of.filter(|((t, n), _)| t.starts_with(track) && n == name);
        of.fold((0, 0), |sum, (_, s)| (sum.0 + s.0, sum.1 + s.1))
    };
    let near = |name: &str, found: (u64, u64), figures: &Value| {
        let count = figures["count"].as_u64().unwrap_or(0);
        let ns = figures["average_ns"].as_f64().unwrap_or(f64::NAN) * count as f64;
        let is_near = (found.1 as f64 - ns).abs() <= CLOSE * ns;
        check(is_near && found.0 == count, || {
            format!("{name}: {found:?}, and latency has {count} of {ns} ns together")
        })
    };
    let mut compared = 0;
    for device in figures["devices"].as_array().into_iter().flatten() {
        let name = device["name"].as_str().unwrap_or_default();
        let track = format!("{name} queue ");
        // Operations are not apart in hops' names: the sum is of all.
        for hop in ["Q2G", "G2I", "I2D", "Q2D", "G2D", "Q2M", "M2D", "D2C"] {
            let operations = device["operations"].as_object().into_iter().flatten();
            let all: Vec<&Value> = operations.map(|(_, o)| &o[hop]).collect();
            let all = all.iter().filter(|v| !v.is_null());
            let (mut count, mut ns) = (0, 0.0);
            for one in all {
                let n = one["count"].as_u64().unwrap_or(0);
                count += n;
                ns += one["average_ns"].as_f64().unwrap_or(f64::NAN) * n as f64;
            }
            if count > 0 {
                let average = serde_json::json!({"count": count, "average_ns": ns / count as f64});
                near(&format!("{name} {hop}"), of(&track, hop), &average)?;
                compared += 1;
            }
        }
        for (op, hops) in device["operations"].as_object().into_iter().flatten() {
            let (whole, before) = (of(&track, op), of(&track, "A2Q"));
            // A request may begin with A: its slice has the time before Q, too.
            let whole = (whole.0, whole.1.saturating_sub(before.1));
            near(&format!("{name} {op}"), whole, &hops["Q2C"])?;
            compared += 1;
        }
    }
    for path in figures["paths"].as_array().into_iter().flatten() {
        let track = format!("{} way", path["name"].as_str().unwrap_or_default());
        for hop in path["hops"].as_array().into_iter().flatten() {
            let name = hop["hop"].as_str().unwrap_or_default();
            near(name, of(&track, name), &hop["figures"])?;
            compared += 1;
        }
    }
    Ok(compared)
}
