//! Writes files `NAME.blktrace.N`.

use super::capture::numbered;
use super::{
    DROP_MESSAGE, EVERY_MESSAGE, MAGIC, NAME_MESSAGE, Record, VERSION, category, notify, record_of,
};
use crate::{Action, Collector, Device, Event, Extra, MAX_QUEUES};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use zerocopy::IntoBytes;

/// Longest message in bytes, as in Linux.
const MAX_MESSAGE: usize = 127;

/// Destination of records.
enum Output {
    /// One file for each queue.
    Files {
        prefix: PathBuf,
        files: BTreeMap<u32, BufWriter<File>>,
    },
    /// One stream of all queues, as `blkparse -d` writes it.
    Stream(Box<dyn Write + Send>),
}

/// Writes a capture: one file for each queue (ring, CPU), or one stream.
pub struct Writer {
    output: Output,
    /// Number of the last record of each device and queue.
    sequences: BTreeMap<(u32, u32), u32>,
    submitters: BTreeSet<u32>,
}

impl Writer {
    /// Begins a capture of this name. Removes files of an earlier capture of the same name, because readers take
    /// every number up to the first missing one.
    pub fn create(prefix: impl Into<PathBuf>) -> io::Result<Writer> {
        let prefix = prefix.into();
        for old in (0..).map(|n| numbered(&prefix, n)) {
            match std::fs::remove_file(&old) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) => return Err(at(&old, &e)),
            }
        }
        let files = BTreeMap::new();
        let mut writer = Writer::to(Output::Files { prefix, files });
        writer.output(0)?;
        Ok(writer)
    }

    /// Writes all queues' records into one stream, which should be buffered.
    pub fn stream(output: impl Write + Send + 'static) -> Writer {
        Writer::to(Output::Stream(Box::new(output)))
    }

    fn to(output: Output) -> Writer {
        Writer {
            output,
            sequences: BTreeMap::new(),
            submitters: BTreeSet::new(),
        }
    }

    fn output(&mut self, queue: u32) -> io::Result<&mut dyn Write> {
        let (prefix, files) = match &mut self.output {
            Output::Stream(stream) => return Ok(stream),
            Output::Files { prefix, files } => (prefix, files),
        };
        if queue as usize >= MAX_QUEUES {
            let why = format!("queue {queue}: a capture has at most {MAX_QUEUES}");
            return Err(io::Error::other(why));
        }
        match files.entry(queue) {
            std::collections::btree_map::Entry::Occupied(file) => Ok(file.into_mut()),
            std::collections::btree_map::Entry::Vacant(none) => {
                let path = numbered(prefix, queue);
                let file = File::create(&path).map_err(|e| at(&path, &e))?;
                Ok(none.insert(BufWriter::new(file)))
            }
        }
    }

    /// Writes an event. Events of one queue must come in order.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        if let Extra::Gap { until_ns, lost } = event.extra {
            let text = format!("{DROP_MESSAGE}{lost} events until {until_ns}");
            return self.message(event.time_ns, event.device, &text);
        }
        if self.submitters.insert(event.submitter) {
            let name = format!("submitter-{}", event.submitter);
            self.process(event.time_ns, event.submitter, &name)?;
        }
        let (mut record, payload, len) = record_of(event);
        let key = (event.device.0, event.queue);
        let sequence = self.sequences.entry(key).or_default();
        *sequence = sequence.wrapping_add(1);
        record.sequence = *sequence;
        self.put(&record, &payload[..len])
    }

    /// Names a submitter. A submitter without a name gets one at its first event.
    pub fn process(&mut self, time_ns: u64, submitter: u32, name: &str) -> io::Result<()> {
        self.submitters.insert(submitter);
        let mut record = note(time_ns, notify::PROCESS, Device::default());
        record.pid = submitter;
        // Linux pads names to 16 bytes, with a 0 at the end.
        let mut padded = [0u8; 16];
        let len = name.len().min(15);
        padded[..len].copy_from_slice(&name.as_bytes()[..len]);
        self.put_sized(record, &padded)
    }

    /// Names a device.
    pub fn device(&mut self, time_ns: u64, device: Device, name: &str) -> io::Result<()> {
        self.message(time_ns, device, &format!("{NAME_MESSAGE}{name}"))
    }

    /// Writes the time of day that belongs to a time of the events' clock.
    pub fn clock(&mut self, time_ns: u64, device: Device, day: SystemTime) -> io::Result<()> {
        let since = day.duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default();
        let seconds = u32::try_from(since.as_secs()).unwrap_or(u32::MAX);
        let payload = [seconds, since.subsec_nanos()];
        let record = note(time_ns, notify::TIMESTAMP, device);
        self.put_sized(record, payload.as_bytes())
    }

    /// Writes a message, cut to 127 bytes.
    pub fn message(&mut self, time_ns: u64, device: Device, text: &str) -> io::Result<()> {
        let mut end = text.len().min(MAX_MESSAGE);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let record = note(time_ns, notify::MESSAGE, device);
        self.put_sized(record, &text.as_bytes()[..end])
    }

    fn put_sized(&mut self, mut record: Record, payload: &[u8]) -> io::Result<()> {
        record.payload_bytes = payload.len() as u16;
        self.put(&record, payload)
    }

    fn put(&mut self, record: &Record, payload: &[u8]) -> io::Result<()> {
        let output = self.output(record.cpu)?;
        output.write_all(record.as_bytes())?;
        output.write_all(payload)
    }

    /// Passes all written records to the system.
    pub fn flush(&mut self) -> io::Result<()> {
        match &mut self.output {
            Output::Stream(stream) => stream.flush(),
            Output::Files { files, .. } => files.values_mut().try_for_each(Write::flush),
        }
    }

    /// Ends the capture: creates empty files for missing numbers. Returns the number of files.
    pub fn finish(mut self) -> io::Result<u32> {
        let count = match &self.output {
            Output::Stream(_) => 1,
            Output::Files { files, .. } => files.keys().next_back().map_or(0, |last| last + 1),
        };
        for queue in 0..count {
            self.output(queue)?.flush()?;
        }
        Ok(count)
    }
}

/// Writes a capture while its events arrive, with the names and times of day from its collector.
pub struct CaptureWriter {
    writer: Writer,
    collector: Collector,
    named: BTreeSet<Device>,
    /// One request of so many is followed, as the capture says.
    every: u32,
    written: Written,
}

/// Numbers of a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Events of requests.
    pub events: u64,
    /// Events that are missing, as its gaps say.
    pub lost: u64,
}

impl CaptureWriter {
    /// Creates a writer of the events of `collector`.
    pub fn new(writer: Writer, collector: Collector) -> CaptureWriter {
        CaptureWriter {
            writer,
            collector,
            named: BTreeSet::new(),
            every: 1,
            written: Written::default(),
        }
    }

    /// Writes events, those of a queue in order of time.
    pub fn events(&mut self, events: &[Event]) -> io::Result<()> {
        let every = self.collector.every();
        if every != self.every
            && let Some(first) = events.first()
        {
            self.every = every;
            let text = format!("{EVERY_MESSAGE}{every}");
            self.writer.message(first.time_ns, Device::ALL, &text)?;
        }
        for event in events {
            self.written.lost += event.lost();
            self.written.events += u64::from(event.action != Action::Gap);
            if event.device != Device::ALL && !self.named.contains(&event.device) {
                self.name(event)?;
            }
            self.writer.event(event)?;
        }
        Ok(())
    }

    #[cold]
    fn name(&mut self, event: &Event) -> io::Result<()> {
        self.named.insert(event.device);
        let day = self.collector.time_of_day(event.time_ns);
        self.writer.clock(event.time_ns, event.device, day)?;
        let devices = self.collector.devices();
        match devices.iter().find(|(device, _)| *device == event.device) {
            Some((device, name)) => self.writer.device(event.time_ns, *device, name),
            None => Ok(()),
        }
    }

    /// Passes all written records to the system.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Ends the capture.
    pub fn finish(self) -> io::Result<Written> {
        self.writer.finish()?;
        Ok(self.written)
    }
}

/// Writes a whole capture: sorts the events and writes them with the names and times of day from their collector.
pub fn write_capture(
    prefix: impl Into<PathBuf>,
    collector: &Collector,
    events: &mut [Event],
) -> io::Result<Written> {
    events.sort_by_key(|e| (e.time_ns, e.action));
    let mut capture = CaptureWriter::new(Writer::create(prefix)?, collector.clone());
    capture.events(events)?;
    capture.finish()
}

fn note(time_ns: u64, code: u32, device: Device) -> Record {
    Record {
        magic: MAGIC | VERSION,
        time_ns,
        action: category::NOTIFY | code,
        device: device.0,
        ..Record::default()
    }
}

fn at(path: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}
