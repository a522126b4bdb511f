//! Timelines in Perfetto's trace format: requests as flows through the layers, hops as slices. See docs/decisions/0038-timelines-and-reports.md.

mod lanes;
mod packets;
mod proto;
mod slices;

use crate::latency::{Analyzer, Followed, Life, Paths};
use crate::{Action, Device, Event, Extra, op_name};
use lanes::Lanes;
use packets::{About, Kind, Packets, Track};
use slices::Step;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

/// Events after which the figures are thrown away that the analysis collects, which nobody asks for here.
const FORGET_AFTER: u64 = 1 << 16;

/// Figures of a timeline that was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drawn {
    /// Requests that are slices, counted on each layer.
    pub requests: u64,
    /// Events that were lost, as the gaps say.
    pub lost: u64,
}

/// Writes events, in the order of their times, as a timeline.
pub struct Timeline<W> {
    packets: Packets<W>,
    analyzer: Analyzer,
    paths: Paths,
    names: BTreeMap<Device, String>,
    disks: HashMap<String, Track>,
    layers: HashMap<Device, Layer>,
    /// Gaps that concern all devices.
    gaps: Gaps,
    completed: Vec<Life>,
    events: u64,
    drawn: Drawn,
}

/// The tracks of a device.
struct Layer {
    /// Name of the device.
    name: String,
    disk: Track,
    group: Track,
    in_flight: Track,
    /// Value of the counter.
    count: u64,
    gaps: Gaps,
    /// By number of the queue.
    queues: HashMap<u32, LaneTracks>,
    way: LaneTracks,
}

/// Tracks of requests that overlap.
#[derive(Default)]
struct LaneTracks {
    lanes: Lanes,
    tracks: Vec<Track>,
}

#[derive(Default)]
struct Gaps {
    track: Option<Track>,
    /// End of the last gap; one that follows may begin before.
    until_ns: u64,
}

/// Ranks of the tracks of a layer.
mod rank {
    pub const WAY: i32 = 0;
    pub const IN_FLIGHT: i32 = 0;
    pub const GAPS: i32 = 1;
    pub const QUEUES: i32 = 2;
    /// Of a layer itself: those of known places in the order in which a request passes them, then all others.
    pub const LAYERS: [&str; 4] = ["guest", "attach", "front", "back"];
}

impl<W: Write> Timeline<W> {
    pub fn new(to: W) -> Timeline<W> {
        Timeline {
            packets: Packets::new(to),
            analyzer: Analyzer::new(),
            paths: Paths::default(),
            names: BTreeMap::new(),
            disks: HashMap::new(),
            layers: HashMap::new(),
            gaps: Gaps::default(),
            completed: Vec::new(),
            events: 0,
            drawn: Drawn::default(),
        }
    }

    /// Tells a device's name; it has to come before the device's events.
    pub fn name(&mut self, device: Device, name: &str) {
        if self.names.get(&device).is_some_and(|n| n == name) {
            return;
        }
        self.paths.name(device, name);
        self.names.insert(device, name.to_owned());
    }

    /// Adds an event; those of all devices come in the order of their times.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        self.events += 1;
        if self.events.is_multiple_of(FORGET_AFTER) {
            self.analyzer.take();
            self.paths.take();
        }
        self.paths.event(event);
        let mut completed = std::mem::take(&mut self.completed);
        self.analyzer
            .event(event, &mut |life| completed.push(life.clone()));
        for life in &completed {
            let followed = self.paths.follow(life);
            self.request(life, &followed, event.queue)?;
        }
        completed.clear();
        self.completed = completed;
        if let Extra::Gap { until_ns, lost } = event.extra {
            self.gap(event, until_ns, lost)?;
        }
        self.count(event)
    }

    /// Ends the timeline.
    pub fn finish(self) -> io::Result<(W, Drawn)> {
        Ok((self.packets.finish()?, self.drawn))
    }

    fn request(&mut self, life: &Life, followed: &Followed, queue: u32) -> io::Result<()> {
        self.drawn.requests += 1;
        self.layer(life.device)?;
        let Some(layer) = self.layers.get_mut(&life.device) else {
            return Ok(());
        };
        let packets = &mut self.packets;
        let (begin_ns, end_ns) = slices::span(life);
        let name = format!("{} queue {queue}", layer.name);
        let lanes = layer.queues.entry(queue).or_default();
        let rank = rank::QUEUES.saturating_add(i32::try_from(queue).unwrap_or(i32::MAX));
        let place = (layer.group, name.as_str(), rank);
        let track = lanes.track(packets, place, begin_ns, end_ns)?;
        let mut slices = Vec::new();
        slices::hops(life, &mut slices);
        let own = About {
            flows: &[followed.number],
            notes: &notes(life),
        };
        let below = About {
            flows: &followed.below,
            notes: &[],
        };
        draw(packets, track, life, slices, |name| match name {
            None => ("request", own),
            Some("D2C") => ("hop", below),
            Some(_) => ("hop", About::default()),
        })?;
        let Some(way) = &followed.way else {
            return Ok(());
        };
        let name = format!("{} way", layer.name);
        let place = (layer.disk, name.as_str(), rank::WAY);
        let track = layer.way.track(packets, place, life.queue_ns, end_ns)?;
        let mut at_ns = life.queue_ns;
        let names: Vec<String> = way
            .iter()
            .map(|(device, part, _)| self.paths.hop_name(*device, *part))
            .collect();
        let slices = way.iter().zip(&names).map(|((_, _, ns), name)| {
            let from_ns = at_ns;
            at_ns = at_ns.saturating_add(*ns);
            (name.as_str(), from_ns.min(end_ns), at_ns.min(end_ns))
        });
        let way = Life {
            remap_ns: None,
            ..life.clone()
        };
        draw(packets, track, &way, slices.collect(), |name| match name {
            None => ("way", About { flows: &[], ..own }),
            Some(_) => ("part", About::default()),
        })
    }

    /// Counts requests in flight. A request that is known to have begun has an end, or a gap.
    fn count(&mut self, event: &Event) -> io::Result<()> {
        if event.action != Action::Queue && event.action != Action::Complete {
            return Ok(());
        }
        self.layer(event.device)?;
        let now = self.analyzer.in_flight(event.device);
        match self.layers.get_mut(&event.device) {
            Some(layer) => layer.set(&mut self.packets, event.time_ns, now),
            None => Ok(()),
        }
    }

    fn gap(&mut self, event: &Event, until_ns: u64, lost: u64) -> io::Result<()> {
        self.drawn.lost = self.drawn.lost.saturating_add(lost);
        if event.device != Device::ALL {
            self.layer(event.device)?;
        }
        let concerned = |device: &Device| event.device == Device::ALL || *device == event.device;
        for (device, layer) in &mut self.layers {
            if concerned(device) {
                layer.set(&mut self.packets, event.time_ns, 0)?;
            }
        }
        let (gaps, parent) = match self.layers.get_mut(&event.device) {
            Some(layer) if event.device != Device::ALL => (&mut layer.gaps, Some(layer.group)),
            _ => (&mut self.gaps, None),
        };
        let track = match gaps.track {
            Some(track) => track,
            None => {
                let name = match parent {
                    Some(_) => "events lost",
                    None => "events lost, of any disk",
                };
                let track = self.packets.track(parent, name, Kind::Slices, rank::GAPS)?;
                *gaps.track.insert(track)
            }
        };
        let begin_ns = event.time_ns.max(gaps.until_ns);
        gaps.until_ns = until_ns.max(begin_ns);
        let about = About {
            flows: &[],
            notes: &[("lost", lost)],
        };
        self.packets
            .begin(track, begin_ns, ("gap", "events lost"), about)?;
        self.packets.end(track, gaps.until_ns)
    }

    /// Makes the tracks of a device, if it has none.
    fn layer(&mut self, device: Device) -> io::Result<()> {
        if self.layers.contains_key(&device) {
            return Ok(());
        }
        let name = self.names.get(&device);
        let name = name.map_or_else(|| device.to_string(), Clone::clone);
        let (disk, place) = name.split_once('/').unwrap_or((&name, ""));
        let packets = &mut self.packets;
        let track = match self.disks.get(disk) {
            Some(track) => *track,
            None => {
                let rank = self.disks.len() as i32 + 1;
                let track = packets.track(None, disk, Kind::Slices, rank)?;
                *self.disks.entry(disk.to_owned()).or_insert(track)
            }
        };
        let known = rank::LAYERS.iter().position(|known| *known == place);
        let rank = known.unwrap_or(rank::LAYERS.len() + device.minor() as usize);
        let group = packets.track(Some(track), &name, Kind::Slices, rank as i32 + 1)?;
        let title = format!("{name} in flight");
        let in_flight = packets.track(Some(group), &title, Kind::Counter, rank::IN_FLIGHT)?;
        let layer = Layer {
            name,
            disk: track,
            group,
            in_flight,
            count: 0,
            gaps: Gaps::default(),
            queues: HashMap::new(),
            way: LaneTracks::default(),
        };
        self.layers.insert(device, layer);
        Ok(())
    }
}

impl Layer {
    fn set(
        &mut self,
        packets: &mut Packets<impl Write>,
        time_ns: u64,
        count: u64,
    ) -> io::Result<()> {
        if std::mem::replace(&mut self.count, count) == count {
            return Ok(());
        }
        packets.count(self.in_flight, time_ns, count)
    }
}

impl LaneTracks {
    /// The track for a request. `place` is its parent, name and rank: all lanes of a queue have the same.
    fn track(
        &mut self,
        packets: &mut Packets<impl Write>,
        place: (Track, &str, i32),
        begin_ns: u64,
        end_ns: u64,
    ) -> io::Result<Track> {
        let lane = self.lanes.take(begin_ns, end_ns) as usize;
        let (parent, name, rank) = place;
        if lane == self.tracks.len() {
            let track = packets.track(Some(parent), name, Kind::Slices, rank)?;
            self.tracks.push(track);
        }
        Ok(self.tracks[lane])
    }
}

/// Draws the request's slice, for which `about` is asked without a name, and `inner` in it.
fn draw<'a>(
    packets: &mut Packets<impl Write>,
    track: Track,
    life: &Life,
    mut inner: Vec<slices::Slice<'a>>,
    about: impl Fn(Option<&str>) -> (&'static str, About<'a>),
) -> io::Result<()> {
    let (begin_ns, end_ns) = slices::span(life);
    let (category, notes) = about(None);
    packets.begin(track, begin_ns, (category, op_name(life.op)), notes)?;
    slices::nested(&mut inner, |step| match step {
        Step::Begin(name, at_ns) => {
            let (category, notes) = about(Some(name));
            packets.begin(track, at_ns, (category, name), notes)
        }
        Step::End(at_ns) => packets.end(track, at_ns),
    })?;
    packets.end(track, end_ns)
}

fn notes(life: &Life) -> [(&'static str, u64); 4] {
    [
        ("sector", life.sector),
        ("sectors", life.sectors),
        ("submitter", u64::from(life.submitter)),
        ("errno", u64::from(life.error)),
    ]
}
