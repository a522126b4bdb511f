//! Reads records from a file that may come from an untrusted source.

use super::{RECORD_BYTES, Record, VERSION, gap, notify};
use crate::{Device, Event};
use std::fmt;
use std::io::{ErrorKind, Read};
use std::time::{Duration, SystemTime};

/// Place and reason of an error while reading a file.
#[derive(Debug)]
pub struct ReadError {
    pub file: String,
    /// Offset in bytes at which the record begins.
    pub offset: u64,
    /// Reason, for users.
    pub why: String,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, byte {}: {}", self.file, self.offset, self.why)
    }
}

impl std::error::Error for ReadError {}

/// Content of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A step of a request, and the record's number among those of its device and CPU.
    Event(Event, u32),
    /// Number and name of a process.
    Process(u32, String),
    /// A time of the events' clock in nanoseconds, the device that reported it, and the time of day at that moment.
    Clock(u64, Device, SystemTime),
    /// Time in nanoseconds, device and text of a message.
    Message(u64, Device, String),
    /// An unsupported record: a passed-through command, or an action of a later kernel. It has a record number, as
    /// [`Step::Event`] has.
    Other(Record),
    /// The file ends inside a record, as after an interrupted capture.
    CutOff,
}

impl Step {
    /// Its event, or the gap that its message reports.
    pub fn event(&self) -> Option<Event> {
        match self {
            Step::Event(event, _) => Some(*event),
            Step::Message(time_ns, device, text) => gap(*time_ns, *device, text),
            _ => None,
        }
    }
}

/// Reads one file, record by record.
pub struct Reader<R> {
    input: R,
    name: String,
    /// Offset in bytes at which the next record begins.
    offset: u64,
    /// True if the file's byte order is not this machine's; known after the first record.
    swapped: Option<bool>,
    payload: Vec<u8>,
}

impl<R: Read> Reader<R> {
    /// Creates a reader of a file called `name`.
    pub fn new(name: impl Into<String>, input: R) -> Reader<R> {
        Reader {
            input,
            name: name.into(),
            offset: 0,
            swapped: None,
            payload: Vec::new(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn error(&self, why: impl Into<String>) -> ReadError {
        ReadError {
            file: self.name.clone(),
            offset: self.offset,
            why: why.into(),
        }
    }

    /// The next record; `None` at the end.
    pub fn next_step(&mut self) -> Result<Option<Step>, ReadError> {
        let mut bytes = [0; RECORD_BYTES];
        match self.fill(&mut bytes)? {
            0 => return Ok(None),
            RECORD_BYTES => {}
            _ => return Ok(Some(Step::CutOff)),
        }
        let Some((record, swapped)) = Record::decode(&bytes) else {
            let magic = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            return Err(self.error(format!("no blktrace record: it begins with {magic:#010x}")));
        };
        if *self.swapped.get_or_insert(swapped) != swapped {
            return Err(self.error("the byte order changes"));
        }
        let version = record.magic & 0xff;
        if version != VERSION {
            return Err(self.error(format!("version {version}, not {VERSION}")));
        }
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(usize::from(record.payload_bytes), 0);
        let step = if self.fill(&mut payload)? < payload.len() {
            Ok(Step::CutOff)
        } else {
            self.step(&record, &payload)
        };
        self.offset += (RECORD_BYTES + payload.len()) as u64;
        self.payload = payload;
        step.map(Some)
    }

    fn step(&self, record: &Record, payload: &[u8]) -> Result<Step, ReadError> {
        let payload = match (record.has_cgroup(), payload) {
            (false, all) => all,
            (true, [_, _, _, _, _, _, _, _, rest @ ..]) => rest,
            (true, short) => {
                let why = format!("a payload of {} bytes has no cgroup in it", short.len());
                return Err(self.error(why));
            }
        };
        if !record.is_notification() {
            let event = record.event(payload).map_err(|why| self.error(why))?;
            return Ok(match event {
                Some(event) => Step::Event(event, record.sequence),
                None => Step::Other(*record),
            });
        }
        Ok(match record.code() {
            notify::PROCESS => Step::Process(record.pid, text(payload)),
            notify::TIMESTAMP => {
                let half = |at: usize| {
                    let bytes = payload.get(at..at + 4).filter(|_| payload.len() == 8);
                    let number = bytes
                        .and_then(|b| b.try_into().ok())
                        .map(u32::from_ne_bytes);
                    let why = || self.error(format!("a time of {} bytes, not 8", payload.len()));
                    number.map(|n| self.native(n)).ok_or_else(why)
                };
                let (seconds, nanoseconds) = (half(0)?, half(4)?);
                if nanoseconds >= 1_000_000_000 {
                    return Err(self.error(format!("{nanoseconds} nanoseconds in a second")));
                }
                let since = Duration::new(u64::from(seconds), nanoseconds);
                Step::Clock(
                    record.time_ns,
                    Device(record.device),
                    SystemTime::UNIX_EPOCH + since,
                )
            }
            notify::MESSAGE => Step::Message(record.time_ns, Device(record.device), text(payload)),
            _ => Step::Other(*record),
        })
    }

    fn native(&self, number: u32) -> u32 {
        if self.swapped == Some(true) {
            number.swap_bytes()
        } else {
            number
        }
    }

    /// Reads until `to` is full or the file ends; returns the bytes read.
    fn fill(&mut self, to: &mut [u8]) -> Result<usize, ReadError> {
        let mut at = 0;
        while at < to.len() {
            match self.input.read(&mut to[at..]) {
                Ok(0) => break,
                Ok(n) => at += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.error(e.to_string())),
            }
        }
        Ok(at)
    }
}

/// Text up to its first 0 byte, without characters that would confuse a terminal.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end])
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
