//! Writing `NAME.blktrace.N`.

use super::capture::numbered;
use super::{DROP_MESSAGE, MAGIC, NAME_MESSAGE, Record, VERSION, category, notify, record_of};
use crate::{Collector, Device, Event, MAX_QUEUES};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use zerocopy::IntoBytes;

/// Bytes that a message may have, as in Linux.
const MAX_MESSAGE: usize = 127;

/// Writes a capture: one file for each queue (ring, CPU).
pub struct Writer {
    prefix: PathBuf,
    files: BTreeMap<u32, BufWriter<File>>,
    /// Last record of each device and queue.
    sequences: BTreeMap<(u32, u32), u32>,
    submitters: BTreeSet<u32>,
}

impl Writer {
    /// Begins a capture of this name. Files of an earlier one of the same name are removed: readers
    /// take every number up to the first that is missing.
    pub fn create(prefix: impl Into<PathBuf>) -> io::Result<Writer> {
        let prefix = prefix.into();
        for old in (0..).map(|n| numbered(&prefix, n)) {
            match std::fs::remove_file(&old) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) => return Err(at(&old, &e)),
            }
        }
        let mut writer = Writer {
            prefix,
            files: BTreeMap::new(),
            sequences: BTreeMap::new(),
            submitters: BTreeSet::new(),
        };
        writer.file(0)?;
        Ok(writer)
    }

    fn file(&mut self, queue: u32) -> io::Result<&mut BufWriter<File>> {
        if queue as usize >= MAX_QUEUES {
            let why = format!("queue {queue}: a capture has at most {MAX_QUEUES}");
            return Err(io::Error::other(why));
        }
        match self.files.entry(queue) {
            std::collections::btree_map::Entry::Occupied(file) => Ok(file.into_mut()),
            std::collections::btree_map::Entry::Vacant(none) => {
                let path = numbered(&self.prefix, queue);
                let file = File::create(&path).map_err(|e| at(&path, &e))?;
                Ok(none.insert(BufWriter::new(file)))
            }
        }
    }

    /// Writes an event. Those of one queue must come in order.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
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

    /// Names a submitter; who has no name when its first event comes gets one.
    pub fn process(&mut self, time_ns: u64, submitter: u32, name: &str) -> io::Result<()> {
        self.submitters.insert(submitter);
        let mut record = note(time_ns, notify::PROCESS, Device::default());
        record.pid = submitter;
        // Linux pads names to 16 bytes, and ends them with a 0.
        let mut padded = [0u8; 16];
        let len = name.len().min(15);
        padded[..len].copy_from_slice(&name.as_bytes()[..len]);
        self.put_sized(record, &padded)
    }

    /// Names a device.
    pub fn device(&mut self, time_ns: u64, device: Device, name: &str) -> io::Result<()> {
        self.message(time_ns, device, &format!("{NAME_MESSAGE}{name}"))
    }

    /// Tells that events were lost.
    pub fn dropped(&mut self, time_ns: u64, device: Device, count: u64) -> io::Result<()> {
        self.message(time_ns, device, &format!("{DROP_MESSAGE}{count} events"))
    }

    /// Tells the time of day that belongs to a time of the events.
    pub fn clock(&mut self, time_ns: u64, device: Device, day: SystemTime) -> io::Result<()> {
        let since = day.duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default();
        let seconds = u32::try_from(since.as_secs()).unwrap_or(u32::MAX);
        let payload = [seconds, since.subsec_nanos()];
        let record = note(time_ns, notify::TIMESTAMP, device);
        self.put_sized(record, payload.as_bytes())
    }

    /// A message, cut to 127 bytes.
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
        let file = self.file(record.cpu)?;
        file.write_all(record.as_bytes())?;
        file.write_all(payload)
    }

    /// Ends the capture: empty files fill the holes between the numbers. Returns how many files there are.
    pub fn finish(mut self) -> io::Result<u32> {
        let count = self.files.keys().next_back().map_or(0, |last| last + 1);
        for queue in 0..count {
            self.file(queue)?.flush()?;
        }
        Ok(count)
    }
}

/// Writes what a collector has to tell about the events, and the events, which it sorts.
pub fn write_capture(
    prefix: impl Into<PathBuf>,
    collector: &Collector,
    events: &mut [Event],
) -> io::Result<u32> {
    events.sort_by_key(|e| (e.time_ns, e.action));
    let mut writer = Writer::create(prefix)?;
    let (first, last) = match &*events {
        [first, .., last] => (first.time_ns, last.time_ns),
        [one] => (one.time_ns, one.time_ns),
        [] => (0, 0),
    };
    for (device, name) in collector.devices() {
        writer.clock(first, device, collector.time_of_day(first))?;
        writer.device(first, device, &name)?;
    }
    for event in &*events {
        writer.event(event)?;
    }
    for lost in collector.drops() {
        writer.dropped(last, lost.device, lost.dropped)?;
    }
    if collector.refused() > 0 {
        writer.dropped(last, Device::default(), collector.refused())?;
    }
    writer.finish()
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
