//! Timelines, read by decoders of others.

use crate::Stop;
use crate::tools::run_ok;
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
