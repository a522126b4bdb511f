//! The model: it is made of answers, and knows no clock, socket or terminal.

pub mod heat;
mod hops;
pub mod rates;

pub use hops::{Followed, HopName, Way, name};

use super::feed::News;
use super::hops::{DiskHops, HopsReport};
use crate::disks::DiskShown;
use crate::events::EventForm;
use crate::memory::Report;
use crate::raid::Speed;
use crate::stat;
use heat::HeatMap;
use pvblk_backend::Totals;
use pvblk_raid5::ask::Detail;
use rates::Rates;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Events that are kept.
const EVENTS: usize = 1024;
/// Looks at the counters for which a disk's limits count as reached after an event told so, while there are no hops that tell more.
const LIMITED_FOR: u32 = 60;

/// Least time that an answer of `hops` is about, to be shown.
pub const LEAST_NS: u64 = 500_000_000;

/// A disk in the list.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// As `disk.list` has it; `None`: the server has no list, or it wasn't asked yet.
    pub shown: Option<DiskShown>,
    /// Since the answer before; `None` at first.
    pub rates: Option<Rates>,
    pub way: Way,
    /// Looks for which the disk still counts as one whose limits hold it back, by an event.
    limited_for: u32,
    /// Requests waited for a limit in the last second, by their hops.
    is_waiting: bool,
}

impl Row {
    pub fn is_limited(&self) -> bool {
        self.is_waiting || self.limited_for > 0
    }

    /// The disk's state in one word: that of its life while it isn't served, else its health, or `limited`.
    pub fn state(&self) -> &str {
        let Some(shown) = &self.shown else {
            return if self.is_limited() { "limited" } else { "" };
        };
        match shown.state.as_str() {
            "serving" if shown.health == "healthy" && self.is_limited() => "limited",
            "serving" => &shown.health,
            other => other,
        }
    }
}

/// A connection of the shown disk.
#[derive(Clone, Debug)]
pub struct ConnectionRates {
    pub name: String,
    pub rates: Rates,
}

/// The disk that is shown.
#[derive(Default)]
pub struct OfDisk {
    pub name: String,
    pub connections: Vec<ConnectionRates>,
    pub heat: HeatMap,
    pub followed: Followed,
    pub array: Option<Box<Detail>>,
    speed: Speed,
    pub cache: Option<CacheRates>,
}

/// Counters of a cache, and the share of hits since the answer before.
#[derive(Clone, Debug, Default)]
pub struct CacheRates {
    pub now: Map<String, Value>,
    pub hit_share: Option<f64>,
}

/// Readings of a disk's and its connections' counters.
struct Reading {
    elapsed_ns: u64,
    totals: Totals,
    connections: HashMap<String, Totals>,
}

#[derive(Default)]
pub struct Model {
    /// The server's socket.
    pub server: String,
    pub version: String,
    /// Why the server doesn't answer.
    pub gone: Option<String>,
    pub rows: BTreeMap<String, Row>,
    /// Number of disks that could not be opened.
    pub failed: usize,
    /// Why there are no hops; `None` while there are, or while they aren't known.
    pub no_hops: Option<String>,
    /// One request in so many was followed in the last answer; 0: there was none.
    pub every: u64,
    pub events: VecDeque<EventForm>,
    pub memory: Option<Box<Report>>,
    pub disk: Option<OfDisk>,
    /// Answers about counters in this connection.
    pub looks: u64,
    before: HashMap<String, Reading>,
}

impl Model {
    pub fn new(server: &str) -> Model {
        Model {
            server: server.to_owned(),
            ..Model::default()
        }
    }

    /// The disk that is shown from now on.
    pub fn show(&mut self, name: Option<&str>) {
        if self.disk.as_ref().map(|d| d.name.as_str()) == name {
            return;
        }
        self.disk = name.map(|name| OfDisk {
            name: name.to_owned(),
            ..OfDisk::default()
        });
        // Its connections have rates from the second answer on.
        for reading in self.before.values_mut() {
            reading.connections.clear();
        }
    }

    pub fn news(&mut self, news: News) {
        match news {
            News::Live(version) => {
                self.version = version;
                self.gone = None;
                self.before.clear();
                self.looks = 0;
            }
            News::Gone(why) => self.gone = Some(why),
            News::Counted(answer) => self.counted(answer),
            News::Listed(disks) => self.listed(disks),
            News::Memory(report) => self.memory = Some(report),
            News::Event(event, is_recent) => self.event(event, is_recent),
            News::Hops(of, answer) => self.hops(of.as_deref(), answer),
            News::NoHops(why) => {
                self.no_hops = Some(why);
                self.every = 0;
                for row in self.rows.values_mut() {
                    row.way = Way::default();
                    row.is_waiting = false;
                }
            }
            News::Array(disk, detail) => {
                if let Some(of) = self.shown(&disk) {
                    of.array(detail);
                }
            }
            News::Cache(disk, counters) => {
                if let Some(of) = self.shown(&disk) {
                    of.cache(counters);
                }
            }
        }
    }

    fn shown(&mut self, name: &str) -> Option<&mut OfDisk> {
        self.disk.as_mut().filter(|d| d.name == name)
    }

    fn counted(&mut self, answer: stat::Answer) {
        self.looks += 1;
        self.failed = answer.failed;
        let mut there = BTreeSet::new();
        for of in answer.disks {
            let now = Reading {
                elapsed_ns: of.elapsed_ns,
                totals: Totals::from(&of.counted),
                connections: HashMap::new(),
            };
            let old = self.before.remove(&of.disk);
            // A disk that was removed and added counts anew.
            let old = old.filter(|o| o.elapsed_ns <= now.elapsed_ns);
            let row = self.rows.entry(of.disk.clone()).or_default();
            row.rates = old.as_ref().map(|o| {
                let seconds = (now.elapsed_ns - o.elapsed_ns) as f64 / 1e9;
                Rates::new(&now.totals.clone().since(&o.totals), seconds)
            });
            row.limited_for = row.limited_for.saturating_sub(1);
            let mut now = now;
            if let Some(shown) = self.disk.as_mut().filter(|d| d.name == of.disk) {
                if let Some(rates) = &row.rates {
                    shown.heat.add(&rates.times);
                }
                now.connections = shown.connected(&of, old.as_ref());
            }
            self.before.insert(of.disk.clone(), now);
            there.insert(of.disk);
        }
        self.before.retain(|name, _| there.contains(name));
        // Disks that aren't open have no counters; those that the list doesn't have either are gone.
        self.rows.retain(|name, row| {
            let is_counted = there.contains(name);
            if !is_counted {
                row.rates = None;
            }
            is_counted || row.shown.is_some()
        });
    }

    fn listed(&mut self, disks: Vec<DiskShown>) {
        let names: BTreeSet<&str> = disks.iter().map(|d| d.name.as_str()).collect();
        self.rows.retain(|name, row| {
            let is_listed = names.contains(name.as_str());
            is_listed || (row.shown.is_none() && row.rates.is_some())
        });
        // Of two with one name the second is on its way out.
        for disk in disks.into_iter().rev() {
            let row = self.rows.entry(disk.name.clone()).or_default();
            row.shown = Some(disk);
        }
    }

    fn event(&mut self, event: EventForm, is_recent: bool) {
        if let Some(last) = self.events.back()
            && last.run != event.run
        {
            self.events.clear();
        }
        let is_known = self.events.back().is_some_and(|l| l.number >= event.number);
        if is_known {
            return;
        }
        if is_recent
            && event.kind == "limit-reached"
            && let Some(row) = event.disk.as_ref().and_then(|d| self.rows.get_mut(d))
        {
            row.limited_for = LIMITED_FOR;
        }
        self.events.push_back(event);
        if self.events.len() > EVENTS {
            self.events.pop_front();
        }
    }

    fn hops(&mut self, of: Option<&str>, answer: HopsReport) {
        self.no_hops = None;
        // A change of N by another client brings an object early, with next to nothing in it.
        if answer.elapsed_ns < LEAST_NS {
            return;
        }
        self.every = answer.every;
        let mut ways: HashMap<String, DiskHops> = HashMap::new();
        for disk in answer.disks {
            ways.insert(disk.disk.clone(), disk);
        }
        for (name, row) in &mut self.rows {
            if of.is_some_and(|of| of != name) {
                continue;
            }
            let way = ways.remove(name).unwrap_or_default();
            row.is_waiting = way.hops.iter().any(|h| h.label == "limit" && h.sum_ns > 0);
            row.limited_for = 0;
            if let Some(shown) = self.disk.as_mut().filter(|d| d.name == *name) {
                shown.followed.every = answer.every;
                shown.followed.elapsed_ns = answer.elapsed_ns;
                shown.followed.lost = answer.lost;
                shown.followed.unknown = answer.unknown;
                shown.followed.add(answer.at_ns, way.clone());
            }
            row.way = Way::new(way);
        }
    }
}

impl OfDisk {
    /// Takes the rates of connections since `old`, and returns their counters.
    fn connected(&mut self, now: &stat::OfDisk, old: Option<&Reading>) -> HashMap<String, Totals> {
        let seconds = old.map_or(0, |o| now.elapsed_ns - o.elapsed_ns) as f64 / 1e9;
        self.connections.clear();
        let mut readings = HashMap::new();
        for c in &now.connections {
            let totals = Totals::from(&c.counted);
            let before = old.and_then(|o| o.connections.get(&c.name));
            if let Some(before) = before {
                self.connections.push(ConnectionRates {
                    name: c.name.clone(),
                    rates: Rates::new(&totals.clone().since(before), seconds),
                });
            }
            readings.insert(c.name.clone(), totals);
        }
        readings
    }

    fn array(&mut self, mut detail: Box<Detail>) {
        if let Some(sync) = detail.serving.as_mut().and_then(|s| s.sync.as_mut()) {
            self.speed.look(sync);
        }
        self.array = Some(detail);
    }

    fn cache(&mut self, now: Map<String, Value>) {
        let number = |of: &Map<String, Value>, name: &str| of.get(name).and_then(Value::as_u64);
        let since = |name: &str| -> Option<u64> {
            let before = number(&self.cache.as_ref()?.now, name)?;
            number(&now, name)?.checked_sub(before)
        };
        let (hits, misses) = (since("hits"), since("misses"));
        let share = |h: u64, m: u64| (h + m > 0).then(|| h as f64 / (h + m) as f64);
        let hit_share = hits.zip(misses).and_then(|(h, m)| share(h, m));
        self.cache = Some(CacheRates { now, hit_share });
    }
}
