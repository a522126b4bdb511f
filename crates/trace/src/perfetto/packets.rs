//! Writes packets of a trace file, one after the other.

use super::proto::{
    CounterDescriptor, DebugAnnotation, InternedData, InternedName, ORDER_EXPLICIT,
    SEQ_INCREMENTAL_STATE_CLEARED, SEQ_NEEDS_INCREMENTAL_STATE, TYPE_COUNTER, TYPE_SLICE_BEGIN,
    TYPE_SLICE_END, TracePacket, TrackDescriptor, TrackEvent, UNIT_COUNT,
};
use std::collections::HashMap;
use std::io::{self, Write};

/// Number of the only sequence of packets.
const SEQUENCE: u32 = 1;
/// Number of the field `packet` of the message `Trace`.
const PACKET: u32 = 1;

/// A track of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Track(u64);

/// Tracks have slices, or a counter's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Slices, or other tracks below.
    Slices,
    /// A number over time.
    Counter,
}

/// Numbers of names that were told.
#[derive(Default)]
struct Names(HashMap<String, u64>);

impl Names {
    /// The number of `name`, and what has to be told if it is new.
    fn of(&mut self, name: &str) -> (u64, Option<InternedName>) {
        if let Some(iid) = self.0.get(name) {
            return (*iid, None);
        }
        // 0 is no number of a name.
        let iid = self.0.len() as u64 + 1;
        self.0.insert(name.to_owned(), iid);
        let new = InternedName {
            iid: Some(iid),
            name: Some(name.to_owned()),
        };
        (iid, Some(new))
    }
}

/// More about a slice.
#[derive(Clone, Copy, Default)]
pub struct About<'a> {
    pub flows: &'a [u64],
    /// Names and numbers.
    pub notes: &'a [(&'static str, u64)],
}

/// Writes packets to a file, each as soon as it is whole.
pub struct Packets<W> {
    to: W,
    bytes: Vec<u8>,
    begun: bool,
    tracks: u64,
    categories: Names,
    names: Names,
    notes: Names,
}

impl<W: Write> Packets<W> {
    pub fn new(to: W) -> Packets<W> {
        Packets {
            to,
            bytes: Vec::new(),
            begun: false,
            tracks: 0,
            categories: Names::default(),
            names: Names::default(),
            notes: Names::default(),
        }
    }

    fn packet(&mut self, mut packet: TracePacket) -> io::Result<()> {
        packet.trusted_packet_sequence_id = Some(SEQUENCE);
        packet.sequence_flags = Some(match std::mem::replace(&mut self.begun, true) {
            false => SEQ_INCREMENTAL_STATE_CLEARED,
            true => SEQ_NEEDS_INCREMENTAL_STATE,
        });
        self.bytes.clear();
        prost::encoding::message::encode(PACKET, &packet, &mut self.bytes);
        self.to.write_all(&self.bytes)
    }

    /// A new track. Among those of one parent, the one with the least `rank` stands first.
    pub fn track(
        &mut self,
        parent: Option<Track>,
        name: &str,
        kind: Kind,
        rank: i32,
    ) -> io::Result<Track> {
        self.tracks += 1;
        let track = Track(self.tracks);
        let counter = CounterDescriptor {
            unit: Some(UNIT_COUNT),
        };
        let descriptor = TrackDescriptor {
            uuid: Some(track.0),
            name: Some(name.to_owned()),
            parent_uuid: parent.map(|p| p.0),
            counter: (kind == Kind::Counter).then_some(counter),
            child_ordering: (kind == Kind::Slices).then_some(ORDER_EXPLICIT),
            sibling_order_rank: Some(rank),
        };
        self.packet(TracePacket {
            track_descriptor: Some(descriptor),
            ..TracePacket::default()
        })?;
        Ok(track)
    }

    pub fn begin(
        &mut self,
        track: Track,
        time_ns: u64,
        (category, name): (&str, &str),
        about: About<'_>,
    ) -> io::Result<()> {
        let mut told = InternedData::default();
        let (category, new) = self.categories.of(category);
        told.event_categories.extend(new);
        let (name, new) = self.names.of(name);
        told.event_names.extend(new);
        let notes = about.notes.iter().map(|(note, value)| {
            let (iid, new) = self.notes.of(note);
            told.debug_annotation_names.extend(new);
            DebugAnnotation {
                name_iid: Some(iid),
                uint_value: Some(*value),
            }
        });
        let event = TrackEvent {
            category_iids: vec![category],
            debug_annotations: notes.collect(),
            r#type: Some(TYPE_SLICE_BEGIN),
            name_iid: Some(name),
            track_uuid: Some(track.0),
            counter_value: None,
            flow_ids: about.flows.to_vec(),
        };
        self.packet(TracePacket {
            timestamp: Some(time_ns),
            track_event: Some(event),
            interned_data: (told != InternedData::default()).then_some(told),
            ..TracePacket::default()
        })
    }

    pub fn end(&mut self, track: Track, time_ns: u64) -> io::Result<()> {
        self.event(track, time_ns, TYPE_SLICE_END, None)
    }

    pub fn count(&mut self, track: Track, time_ns: u64, value: u64) -> io::Result<()> {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        self.event(track, time_ns, TYPE_COUNTER, Some(value))
    }

    fn event(
        &mut self,
        track: Track,
        time_ns: u64,
        kind: i32,
        counter_value: Option<i64>,
    ) -> io::Result<()> {
        let event = TrackEvent {
            r#type: Some(kind),
            track_uuid: Some(track.0),
            counter_value,
            ..TrackEvent::default()
        };
        self.packet(TracePacket {
            timestamp: Some(time_ns),
            track_event: Some(event),
            ..TracePacket::default()
        })
    }

    /// Flushes the file.
    pub fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}
