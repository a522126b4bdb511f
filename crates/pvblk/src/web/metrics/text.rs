//! Writing samples as text: Prometheus' format 0.0.4, and OpenMetrics 1.0.

use super::families::{Family, Type};
use pvblk_web::quality;
use std::fmt::Write as _;
use std::io::{self, Write};

/// A format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Prometheus,
    OpenMetrics,
}

impl Form {
    /// The form that a reader likes best.
    pub fn of_accept(accept: Option<&str>) -> Form {
        let Some(accept) = accept else {
            return Form::Prometheus;
        };
        let open = quality(
            Some(accept),
            "application/openmetrics-text",
            &["1.0.0", "0.0.1"],
        );
        let plain = quality(Some(accept), "text/plain", &["0.0.4"]);
        match open > plain || (open == plain && accept.contains("openmetrics")) {
            true => Form::OpenMetrics,
            false => Form::Prometheus,
        }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Form::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Bytes that are put together before they are sent.
const PIECE: usize = 32 << 10;

/// The lines of one reading.
pub struct Lines<'a> {
    form: Form,
    text: String,
    out: &'a mut dyn Write,
    /// Families that have begun.
    #[cfg(test)]
    pub begun: Vec<&'static str>,
}

impl<'a> Lines<'a> {
    pub fn new(form: Form, out: &'a mut dyn Write) -> Lines<'a> {
        Lines {
            form,
            text: String::with_capacity(PIECE + 4096),
            out,
            #[cfg(test)]
            begun: Vec::new(),
        }
    }

    /// Begins a family; its samples follow.
    pub fn family(&mut self, family: &'static Family) -> io::Result<Samples<'_, 'a>> {
        let Family {
            name, help, kind, ..
        } = family;
        #[cfg(test)]
        self.begun.push(name);
        let (kind, ending, kind_ending) = match (kind, self.form) {
            (Type::Counter, Form::OpenMetrics) => ("counter", "_total", ""),
            (Type::Counter, Form::Prometheus) => ("counter", "_total", "_total"),
            (Type::Gauge, _) => ("gauge", "", ""),
            (Type::Histogram, _) => ("histogram", "", ""),
            (Type::Info, Form::OpenMetrics) => ("info", "_info", ""),
            // The old format has no such type.
            (Type::Info, Form::Prometheus) => ("gauge", "_info", "_info"),
        };
        let text = &mut self.text;
        // Writing to a text doesn't fail.
        let _ = write!(
            text,
            "# HELP {name}{kind_ending} {help}\n# TYPE {name}{kind_ending} {kind}\n"
        );
        if let (Form::OpenMetrics, Some(unit)) = (self.form, family.unit()) {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        self.send(PIECE)?;
        Ok(Samples {
            lines: self,
            name,
            ending,
        })
    }

    fn send(&mut self, least: usize) -> io::Result<()> {
        if self.text.len() >= least {
            self.out.write_all(self.text.as_bytes())?;
            self.text.clear();
        }
        Ok(())
    }

    /// Sends the rest.
    pub fn finish(mut self) -> io::Result<()> {
        if self.form == Form::OpenMetrics {
            self.text += "# EOF\n";
        }
        self.send(0)
    }
}

/// The samples of a family.
pub struct Samples<'l, 'a> {
    lines: &'l mut Lines<'a>,
    name: &'static str,
    ending: &'static str,
}

impl Samples<'_, '_> {
    /// A whole number.
    pub fn put(&mut self, labels: &Labels, value: u64) -> io::Result<()> {
        self.begin(self.ending, labels);
        push_number(&mut self.lines.text, value);
        self.end()
    }

    /// Nanoseconds, written in seconds without loss.
    pub fn put_ns(&mut self, labels: &Labels, ns: u64) -> io::Result<()> {
        self.begin(self.ending, labels);
        push_seconds(&mut self.lines.text, ns);
        self.end()
    }

    /// A histogram: counts by the bounds, which grow, and above all of them; and the sum of times.
    pub fn put_histogram(
        &mut self,
        labels: &Labels,
        bounds: &[&str],
        counts: &[u64],
        sum_ns: u64,
    ) -> io::Result<()> {
        let mut sum = 0;
        for (index, count) in counts.iter().enumerate() {
            sum += count;
            let le = bounds.get(index).copied().unwrap_or("+Inf");
            let text = &mut self.lines.text;
            text.push_str(self.name);
            text.push_str("_bucket{");
            text.push_str(&labels.0);
            text.push_str(",le=\"");
            text.push_str(le);
            text.push_str("\"} ");
            push_number(text, sum);
            self.end()?;
        }
        self.begin("_sum", labels);
        push_seconds(&mut self.lines.text, sum_ns);
        self.end()?;
        self.begin("_count", labels);
        push_number(&mut self.lines.text, sum);
        self.end()
    }

    fn begin(&mut self, ending: &str, labels: &Labels) {
        let text = &mut self.lines.text;
        text.push_str(self.name);
        text.push_str(ending);
        if !labels.0.is_empty() {
            text.push('{');
            text.push_str(&labels.0);
            text.push('}');
        }
        text.push(' ');
    }

    fn end(&mut self) -> io::Result<()> {
        self.lines.text.push('\n');
        self.lines.send(PIECE)
    }
}

fn push_number(text: &mut String, number: u64) {
    let _ = write!(text, "{number}");
}

fn push_seconds(text: &mut String, ns: u64) {
    let (seconds, rest) = (ns / 1_000_000_000, ns % 1_000_000_000);
    push_number(text, seconds);
    if rest > 0 {
        let _ = write!(text, ".{rest:09}");
    }
}

/// Labels as they stand between the braces.
#[derive(Clone, Debug, Default)]
pub struct Labels(String);

impl Labels {
    /// One label; the value may be any text.
    pub fn of(name: &str, value: &str) -> Labels {
        Labels::default().and(name, value)
    }

    /// The same and one more.
    #[must_use]
    pub fn and(&self, name: &str, value: &str) -> Labels {
        let mut text = String::with_capacity(self.0.len() + name.len() + value.len() + 4);
        text.push_str(&self.0);
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        for c in value.chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                c => text.push(c),
            }
        }
        text.push('"');
        Labels(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::families::{BUILD, DISK_LATENCY, DISK_REQUESTS, DISK_TIME};
    use super::*;

    fn written(form: Form) -> String {
        let mut out = Vec::new();
        let mut lines = Lines::new(form, &mut out);
        let mut samples = lines.family(&BUILD).unwrap();
        samples.put(&Labels::of("version", "1"), 1).unwrap();
        let hostile = Labels::of("disk", "a\"} 1\n# EOF\\").and("op", "read");
        lines
            .family(&DISK_REQUESTS)
            .unwrap()
            .put(&hostile, 7)
            .unwrap();
        let mut samples = lines.family(&DISK_TIME).unwrap();
        samples.put_ns(&Labels::default(), 12_000_000_034).unwrap();
        samples.put_ns(&Labels::default(), 3_000_000_000).unwrap();
        let mut samples = lines.family(&DISK_LATENCY).unwrap();
        let labels = Labels::of("disk", "a");
        samples
            .put_histogram(&labels, &["0.5", "1.0"], &[1, 0, 2], 5_500_000_000)
            .unwrap();
        lines.finish().unwrap();
        let text = String::from_utf8(out).unwrap();
        let without = |l: &&str| !l.starts_with("# HELP");
        text.lines().filter(without).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn both_formats_are_written_as_they_want_it() {
        let samples = "pvblk_disk_request_duration_seconds_bucket{disk=\"a\",le=\"0.5\"} 1\n\
            pvblk_disk_request_duration_seconds_bucket{disk=\"a\",le=\"1.0\"} 1\n\
            pvblk_disk_request_duration_seconds_bucket{disk=\"a\",le=\"+Inf\"} 3\n\
            pvblk_disk_request_duration_seconds_sum{disk=\"a\"} 5.500000000\n\
            pvblk_disk_request_duration_seconds_count{disk=\"a\"} 3";
        let hostile = "pvblk_disk_requests_total{disk=\"a\\\"} 1\\n# EOF\\\\\",op=\"read\"} 7";
        let times = "pvblk_disk_request_time_seconds_total 12.000000034\npvblk_disk_request_time_seconds_total 3";
        assert_eq!(
            written(Form::Prometheus),
            format!(
                "# TYPE pvblk_build_info gauge\npvblk_build_info{{version=\"1\"}} 1\n\
                 # TYPE pvblk_disk_requests_total counter\n{hostile}\n\
                 # TYPE pvblk_disk_request_time_seconds_total counter\n{times}\n\
                 # TYPE pvblk_disk_request_duration_seconds histogram\n{samples}"
            )
        );
        assert_eq!(
            written(Form::OpenMetrics),
            format!(
                "# TYPE pvblk_build info\npvblk_build_info{{version=\"1\"}} 1\n\
                 # TYPE pvblk_disk_requests counter\n{hostile}\n\
                 # TYPE pvblk_disk_request_time_seconds counter\n# UNIT pvblk_disk_request_time_seconds seconds\n{times}\n\
                 # TYPE pvblk_disk_request_duration_seconds histogram\n# UNIT pvblk_disk_request_duration_seconds seconds\n{samples}\n\
                 # EOF"
            )
        );
    }

    #[test]
    fn readers_get_the_format_that_they_ask_for() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Form::of_accept(Some(prometheus)), Form::OpenMetrics);
        for plain in [
            None,
            Some("*/*"),
            Some("text/plain"),
            Some("text/html,*/*;q=0.8"),
        ] {
            assert_eq!(Form::of_accept(plain), Form::Prometheus, "{plain:?}");
        }
        assert_eq!(
            Form::of_accept(Some("application/openmetrics-text")),
            Form::OpenMetrics
        );
    }
}
