//! A whole capture in memory: the events of one or more files, sorted by time.

use super::{ReadError, Reader, Step, every, gap, name};
use crate::guest::{GuestClock, NoClock};
use crate::{Action, Device, Event, Extra};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// Most notes kept; files from untrusted sources may cause any number.
const MAX_NOTES: usize = 100;
/// Most disks of a guest that are compared with ours: those with most requests.
const MOST_GUEST_DEVICES: usize = 16;
/// Most messages kept.
const MAX_MESSAGES: usize = 10_000;

/// Events of one or more files, with names, messages and losses.
#[derive(Debug, Default)]
pub struct Capture {
    /// Sorted by time after [`Capture::sort`]; before, those of one file are in order.
    pub events: Vec<Event>,
    /// Names of devices, from our messages.
    pub devices: BTreeMap<Device, String>,
    /// Names of processes, by number.
    pub processes: BTreeMap<u32, String>,
    /// Messages of other programs: time in nanoseconds, device, text.
    pub messages: Vec<(u64, Device, String)>,
    /// Missing records, counted by gaps in their numbers.
    pub missing: u64,
    /// Events dropped while recording, from our messages.
    pub dropped: u64,
    /// Only one request of so many was followed, if our messages say so; the greatest of them.
    pub every: Option<u32>,
    /// Oddities found while reading, one line each.
    pub notes: Vec<String>,
    /// Number and time of the last record of each device and CPU.
    last: HashMap<(u32, u32), (u32, u64)>,
}

/// The files of a path: itself if it is a file, else all `PATH.blktrace.N` from 0 up to the first missing number.
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    (0u32..)
        .map(|n| numbered(path, n))
        .take_while(|p| p.is_file())
        .collect()
}

pub(super) fn numbered(prefix: &Path, number: u32) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(format!(".blktrace.{number}"));
    name.into()
}

impl Capture {
    /// Reads all files of all paths; see [`files_of`].
    pub fn read(paths: &[PathBuf]) -> Result<Capture, ReadError> {
        let mut capture = Capture::default();
        for path in paths {
            let error = |file: &Path, why: String| ReadError {
                file: file.display().to_string(),
                offset: 0,
                why,
            };
            let files = files_of(path);
            if files.is_empty() {
                let first = numbered(path, 0);
                let why = format!("there is no such file, and no {}", first.display());
                return Err(error(path, why));
            }
            for file in files {
                let input = File::open(&file).map_err(|e| error(&file, e.to_string()))?;
                capture.add(file.display().to_string(), BufReader::new(input))?;
            }
        }
        capture.sort();
        Ok(capture)
    }

    /// Adds all records of a file.
    pub fn add(&mut self, name: impl Into<String>, input: impl Read) -> Result<(), ReadError> {
        let mut reader = Reader::new(name, input);
        while let Some(step) = reader.next_step()? {
            match step {
                Step::Event(event, sequence) => {
                    self.count(event.device, event.queue, sequence, event.time_ns);
                    self.events.push(event);
                }
                Step::Other(record) => {
                    if !record.is_notification() {
                        let device = Device(record.device);
                        self.count(device, record.cpu, record.sequence, record.time_ns);
                    }
                }
                Step::Process(pid, name) => {
                    self.processes.insert(pid, name);
                }
                Step::Clock(..) => {}
                Step::Message(time_ns, device, text) => {
                    self.message(time_ns, device, text);
                }
                Step::CutOff => {
                    let text = format!("{}: the last record is cut off", reader.name());
                    self.note(text);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Adds a capture that a guest's own blktrace made of the disk that we serve as `disk`, named `disk/guest`. Its
    /// times are converted to this capture's clock. Of several devices of the guest, the one whose requests match
    /// ours is taken. Errors if no back end of that name was traced, or if the clocks can't be aligned. Call
    /// [`Capture::sort`] afterwards.
    pub fn add_guest(&mut self, guest: &Capture, disk: &str) -> Result<GuestClock, String> {
        let (back, front) = (format!("{disk}/back"), format!("{disk}/guest"));
        let named = |name: &str| self.devices.iter().find(|(_, n)| *n == name);
        let Some((back, _)) = named(&back) else {
            let all = self
                .devices
                .values()
                .filter_map(|n| n.strip_suffix("/back"));
            let all: Vec<&str> = all.collect();
            return Err(match all.is_empty() {
                true => "the capture has no back end: give the server's as FILE".into(),
                false => format!("no disk {disk} was traced; there are: {}", all.join(", ")),
            });
        };
        if named(&front).is_some() {
            return Err(format!(
                "disk {disk} has a front end in the capture already"
            ));
        }
        let ours: Vec<Event> = self
            .events
            .iter()
            .filter(|e| e.device == *back)
            .copied()
            .collect();
        // The guest's file may name any number of devices.
        let mut theirs: HashMap<Device, (usize, Vec<Event>)> = HashMap::new();
        for event in &guest.events {
            let (issued, events) = theirs.entry(event.device).or_default();
            *issued += usize::from(event.action == Action::Issue);
            events.push(*event);
        }
        let mut theirs: Vec<_> = theirs.into_iter().collect();
        theirs.sort_by_key(|(device, (issued, _))| (Reverse(*issued), *device));
        theirs.truncate(MOST_GUEST_DEVICES);
        let mut best = (Device::default(), Err::<GuestClock, _>(NoClock::TooFew(0)));
        for (device, (_, events)) in &theirs {
            let clock = GuestClock::set(events, &ours);
            let better = match (&clock, &best.1) {
                (Ok(this), Ok(that)) => this.requests > that.requests,
                (Ok(_), Err(_)) => true,
                (Err(NoClock::TooFew(this)), Err(NoClock::TooFew(that))) => this > that,
                (Err(why), Err(_)) => *why == NoClock::Contradiction,
                (Err(_), Ok(_)) => false,
            };
            if better {
                best = (*device, clock);
            }
        }
        let (device, clock) = best;
        let clock = clock.map_err(|why| why.to_string())?;
        // The first disk of every guest has the same number.
        let taken = |d: &Device| self.devices.contains_key(d);
        let mut free = (device.minor()..).map(|minor| Device::new(device.major(), minor));
        let as_device = free.find(|d| !taken(d)).unwrap_or(device);
        // The capture doesn't say from which partition a request came: the whole disk is the uppermost layer.
        let seen = theirs.into_iter().filter(|(d, _)| *d == device);
        let seen = seen.flat_map(|(_, (_, events))| events);
        let seen = seen.filter(|e| e.action != Action::Remap).map(|e| Event {
            time_ns: clock.server_ns(e.time_ns),
            device: as_device,
            extra: match e.extra {
                Extra::Gap { until_ns, lost } => Extra::Gap {
                    until_ns: clock.server_ns(until_ns),
                    lost,
                },
                other => other,
            },
            ..e
        });
        self.events.extend(seen);
        self.devices.insert(as_device, front);
        self.missing += guest.missing;
        guest.notes.iter().for_each(|note| self.note(note.clone()));
        Ok(clock)
    }

    /// Looks for records that are missing before this one.
    fn count(&mut self, device: Device, cpu: u32, sequence: u32, time_ns: u64) {
        let last = self.last.entry((device.0, cpu));
        let last = last.or_insert((sequence, time_ns));
        // In a merged dump neighbours may be swapped; only gaps are losses.
        if sequence > last.0 {
            let lost = u64::from(sequence - last.0 - 1);
            if lost > 0 {
                self.missing += lost;
                let from_ns = last.1.min(time_ns);
                self.events.push(Event::gap(device, from_ns, time_ns, lost));
            }
            *last = (sequence, time_ns);
        }
    }

    fn message(&mut self, time_ns: u64, device: Device, text: String) {
        if let Some(name) = name(&text) {
            let before = self.devices.insert(device, name.to_owned());
            if let Some(before) = before.filter(|before| before != name) {
                self.note(format!(
                    "device {device} is {before} in one capture and {name} in another: their figures are mixed"
                ));
            }
        } else if let Some(gap) = gap(time_ns, device, &text) {
            self.dropped = self.dropped.saturating_add(gap.lost());
            self.events.push(gap);
        } else if let Some(every) = every(&text) {
            self.every = self.every.max(Some(every));
        } else if self.messages.len() < MAX_MESSAGES {
            self.messages.push((time_ns, device, text));
        }
    }

    fn note(&mut self, text: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(text);
        }
    }

    /// Sorts the events by time; at the same time, in the order of a request's life.
    pub fn sort(&mut self) {
        self.events.sort_by_key(|e| (e.time_ns, e.action));
    }

    /// A device's name, or its number if it has none.
    pub fn device_name(&self, device: Device) -> String {
        let name = self.devices.get(&device);
        name.map_or_else(|| device.to_string(), |name| name.clone())
    }
}
