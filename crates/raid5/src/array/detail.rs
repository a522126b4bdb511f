//! Answers of an array to questions, as JSON has them.

use super::{ArrayMember, ArrayState, MemberState};
use crate::{Assembly, Geometry, Kept, Policy, Superblock, uuid_text};
use serde::{Deserialize, Serialize};

/// An array, with the words of `mdadm --detail`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Detail {
    /// Name of the array.
    pub name: String,
    /// Its id, as mdadm prints it.
    pub uuid: String,
    /// Seconds since 1970.
    pub created_secs: u64,
    /// The same, of its newest superblock.
    pub updated_secs: u64,
    /// Counter of the newest superblock.
    pub events: u64,
    /// The RAID level, always 5.
    pub level: u32,
    /// Number of places.
    pub raid_devices: usize,
    /// Such as `left-symmetric`.
    pub layout: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Bytes that users have.
    pub array_bytes: u64,
    /// Bytes of each member that are used for data and parity.
    pub member_bytes: u64,
    /// `ppl`, `bitmap` or `resync`.
    pub consistency_policy: String,
    /// The newest superblock was written together with a private map. False after md has written it, though the map may still be there.
    #[serde(default)]
    pub private_map: bool,
    /// It was written together with checksums of all blocks as well.
    #[serde(default)]
    pub checksums: bool,
    /// It was stopped in order, or nothing was written since its start.
    pub clean: bool,
    /// A place has no member that is whole.
    pub degraded: bool,
    /// Bytes of each member, from the start, whose parity is right.
    pub in_sync_bytes: u64,
    /// The place without a member that is whole.
    pub missing: Option<usize>,
    /// Places and devices.
    pub members: Vec<DetailMember>,
    /// Findings of the look at the members, a line each.
    pub notes: Vec<String>,
    /// The specification that starts the array in its present state.
    #[serde(default)]
    pub spec: String,
    /// State that only an array that serves has.
    pub serving: Option<Serving>,
}

/// The answer to [`super::ask::Question::Spec`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecAnswer {
    /// The specification that starts the array now, and if its members are files also after a rebuild that is under way.
    pub spec: String,
    /// Its members by place and its spares, as a specification.
    pub list: String,
}

/// A place, or a device without one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetailMember {
    /// The device's number in the superblocks.
    pub number: Option<u32>,
    /// Number of its place; `None` for a spare.
    pub place: Option<usize>,
    pub state: DeviceState,
    /// The user's name of the device.
    pub name: Option<String>,
    /// Bytes that are rebuilt, while it is being rebuilt.
    pub rebuilt_bytes: Option<u64>,
    /// Blocks that it could not read, and that were calculated and written again, ever.
    pub corrected_reads: u32,
    /// Blocks of it that were other than was written, or whose checksums on it were, and that were made right, since the array is served.
    #[serde(default)]
    pub checksum_errors: u32,
}

/// State of a device, in mdadm's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    #[serde(rename = "active sync")]
    Active,
    /// It becomes one.
    #[serde(rename = "spare rebuilding")]
    Rebuilding,
    /// It can become one.
    #[serde(rename = "spare")]
    Spare,
    /// It was one, and was thrown out.
    #[serde(rename = "faulty")]
    Faulty,
    /// No device is at this place.
    #[serde(rename = "removed")]
    Removed,
}

impl DeviceState {
    /// The state in mdadm's words.
    pub fn text(self) -> &'static str {
        match self {
            DeviceState::Active => "active sync",
            DeviceState::Rebuilding => "spare rebuilding",
            DeviceState::Spare => "spare",
            DeviceState::Faulty => "faulty",
            DeviceState::Removed => "removed",
        }
    }
}

/// State that only an array that serves has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Serving {
    /// Two members failed: nothing works any more.
    pub failed: bool,
    /// The recovery, resync or check under way.
    pub sync: Option<SyncProgress>,
    /// Sectors of members whose parity was wrong in the last check or repair: md's `mismatch_cnt`.
    pub mismatch_sectors: u64,
    /// Why the last rebuild didn't end.
    pub trouble: Option<String>,
    /// The last rebuild that ended.
    #[serde(default)]
    pub rebuilt: Option<Rebuilt>,
    /// Devices that were thrown out because they didn't answer, and come back by themselves.
    #[serde(default)]
    pub away: Vec<AwayMember>,
    /// Milliseconds after which a member that doesn't answer is thrown out.
    #[serde(default)]
    pub member_timeout_ms: Option<u64>,
    /// Stripes that may have pages: md's `stripe_cache_size`.
    pub stripes: usize,
    /// Those at work: md's `stripe_cache_active`.
    pub active_stripes: usize,
    /// The write path: `direct` or `stripe-queue`.
    pub write_path: String,
    /// Nothing begins by itself.
    pub frozen: bool,
    /// KiB a second of each member, while others use the array: md's `sync_speed_min`.
    pub speed_min_kib: u64,
    /// The same, at most: md's `sync_speed_max`.
    pub speed_max_kib: u64,
}

/// A rebuild that came to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilt {
    pub place: usize,
    /// Sectors of the member that were written.
    pub sectors: u64,
    /// Only those that the write-intent bitmap marked.
    pub by_bitmap: bool,
}

/// A device that was a member, and comes back when it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwayMember {
    /// The place that it had.
    pub place: usize,
    /// The user's name of the device.
    pub name: String,
}

/// Progress of a recovery, resync or check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncProgress {
    /// `resync`, `recover`, `check`, `repair` or `checksum`.
    pub action: String,
    /// Bytes of each member that are done.
    pub done_bytes: u64,
    /// Bytes in all.
    pub of_bytes: u64,
    /// Sectors of members whose parity was wrong, so far.
    pub mismatch_sectors: u64,
    /// Only what the write-intent bitmap marks is rebuilt.
    #[serde(default)]
    pub by_bitmap: bool,
    /// KiB a second of each member; known to clients that ask more than once.
    #[serde(default)]
    pub speed_kib: Option<u64>,
    /// Until its end, at this speed.
    #[serde(default)]
    pub seconds_left: Option<u64>,
}

impl Detail {
    /// An array that isn't served.
    pub fn of_assembly(assembly: &Assembly) -> Detail {
        let mut members = Vec::new();
        let incoming = assembly.incoming.as_ref();
        for (place, member) in assembly.members.iter().enumerate() {
            if let Some(m) = member {
                members.push(row(
                    &m.superblock,
                    &m.name,
                    Some(place),
                    DeviceState::Active,
                ));
            }
            if let Some(i) = incoming.filter(|i| i.place == place) {
                members.push(DetailMember {
                    rebuilt_bytes: Some(i.recovered_sectors * 512),
                    ..row(
                        &i.member.superblock,
                        &i.member.name,
                        Some(place),
                        DeviceState::Rebuilding,
                    )
                });
            } else if member.is_none() {
                members.push(removed(place));
            }
        }
        for spare in &assembly.spares {
            let state = match spare.is_spare() {
                true => DeviceState::Spare,
                false => DeviceState::Faulty,
            };
            members.push(row(&spare.superblock, &spare.name, None, state));
        }
        Detail {
            clean: !assembly.dirty,
            degraded: assembly.failed().is_some(),
            in_sync_bytes: assembly.in_sync_sectors() * 512,
            missing: assembly.failed(),
            members,
            notes: assembly.notes.clone(),
            ..Detail::of_superblock(assembly.newest(), &assembly.geometry)
        }
    }

    /// An array that serves.
    pub(super) fn of_state(state: &ArrayState, geometry: &Geometry) -> Detail {
        let mut members: Vec<DetailMember> = state.members.iter().map(member).collect();
        if let Some(place) = state.failed
            && !members.iter().any(|m| m.place == Some(place))
        {
            let before = |m: &&DetailMember| m.place.is_some_and(|p| p < place);
            let at = members.iter().take_while(before).count();
            members.insert(at, removed(place));
        }
        let whole = geometry.member_sectors();
        Detail {
            clean: !state.dirty,
            degraded: state.failed.is_some(),
            in_sync_bytes: state.in_sync_sectors.unwrap_or(whole) * 512,
            missing: state.failed,
            members,
            serving: Some(Serving {
                failed: state.broken,
                sync: state.sync.as_ref().map(|s| SyncProgress {
                    action: s.action.to_string(),
                    done_bytes: s.done_sectors * 512,
                    of_bytes: s.of_sectors * 512,
                    mismatch_sectors: s.mismatch_sectors,
                    by_bitmap: s.by_bitmap,
                    speed_kib: None,
                    seconds_left: None,
                }),
                mismatch_sectors: state.mismatch_sectors,
                trouble: state.trouble.clone(),
                rebuilt: state.recovered.map(|r| Rebuilt {
                    place: r.place,
                    sectors: r.sectors,
                    by_bitmap: r.by_bitmap,
                }),
                away: state
                    .away
                    .iter()
                    .map(|(place, name)| AwayMember {
                        place: *place,
                        name: name.clone(),
                    })
                    .collect(),
                member_timeout_ms: state
                    .member_timeout
                    .map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
                stripes: state.stripes,
                active_stripes: state.active_stripes,
                write_path: state.write_path.to_string(),
                frozen: state.frozen,
                speed_min_kib: state.speed_min_kib,
                speed_max_kib: state.speed_max_kib,
            }),
            ..Detail::of_superblock(&state.superblock, geometry)
        }
    }

    fn of_superblock(sb: &Superblock, geometry: &Geometry) -> Detail {
        let seconds = |stamp: u64| stamp & ((1 << 40) - 1);
        let policy = match sb.policy() {
            Policy::Resync => "resync",
            Policy::Bitmap { .. } => "bitmap",
            Policy::Ppl(_) => "ppl",
        };
        Detail {
            name: sb.name(),
            uuid: uuid_text(&sb.set_uuid),
            created_secs: seconds(sb.ctime),
            updated_secs: seconds(sb.utime),
            events: sb.events,
            level: 5,
            raid_devices: geometry.members(),
            layout: geometry.layout().to_string(),
            chunk_bytes: geometry.chunk_sectors() * 512,
            array_bytes: geometry.capacity_sectors() * 512,
            member_bytes: geometry.member_sectors() * 512,
            consistency_policy: policy.into(),
            private_map: sb.keeps_map(),
            checksums: sb.kept() == Kept::MapAndSums,
            clean: true,
            degraded: false,
            in_sync_bytes: 0,
            missing: None,
            members: Vec::new(),
            notes: Vec::new(),
            spec: String::new(),
            serving: None,
        }
    }
}

fn row(sb: &Superblock, name: &str, place: Option<usize>, state: DeviceState) -> DetailMember {
    DetailMember {
        number: Some(sb.dev_number),
        place,
        state,
        name: Some(name.to_owned()),
        rebuilt_bytes: None,
        corrected_reads: sb.corrected_reads,
        checksum_errors: 0,
    }
}

fn removed(place: usize) -> DetailMember {
    DetailMember {
        number: None,
        place: Some(place),
        state: DeviceState::Removed,
        name: None,
        rebuilt_bytes: None,
        corrected_reads: 0,
        checksum_errors: 0,
    }
}

fn member(m: &ArrayMember) -> DetailMember {
    let (state, rebuilt) = match m.state {
        MemberState::InSync => (DeviceState::Active, None),
        MemberState::Rebuilding(sectors) => (DeviceState::Rebuilding, Some(sectors * 512)),
        MemberState::Spare => (DeviceState::Spare, None),
    };
    DetailMember {
        number: Some(m.number),
        place: m.place,
        state,
        name: Some(m.name.clone()),
        rebuilt_bytes: rebuilt,
        corrected_reads: m.corrected_reads,
        checksum_errors: m.checksum_errors,
    }
}
