//! The array as a device: each of its queues has queues of its own to all members, and its own part of the core.
//!
//! | file | has |
//! |---|---|
//! | `device`, `shared` | the array, and the parts of it that its queues share |
//! | `queue`, `requests`, `lower` | a queue: its part of the core, its requests at the members, and its queues there |
//! | `background` | superblocks that a stop writes, queues that were closed with work, and changes that users are told of |
//! | `sync`, `pace` | the queue that rebuilds a member or makes parity right, and takes devices in |
//! | `devices` | devices by slot |
//! | `disk` | superblocks and bitmap as on disk |
//! | `patient`, `bounce`, `patience`, `returns` | members with a limited time, those that exceeded it, and those that come back |
//! | `manage`, `control`, `ask` | orders and questions of users |
//! | `detail`, `extents`, `told` | answers to them, extents, and events |

pub mod ask;
mod at_once;
mod background;
mod bounce;
mod control;
mod detail;
mod device;
mod devices;
mod disk;
mod extents;
mod lower;
mod manage;
mod pace;
mod patience;
mod patient;
mod queue;
mod requests;
mod returns;
mod shared;
mod sync;
mod told;

pub use super::core::Counts as WriteCounts;
pub use background::BackgroundWork;
pub use device::Raid5;
pub use manage::{ArrayMember, ArrayState, ArraySync, MemberState, Recovered, SyncAction};
pub use returns::ReAdded;

use super::assemble::Assembly;
use super::core::WritePath;
use super::geometry::Geometry;
use pvblk_block::{BlockDevice, Error, Limits};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Most stripes that may have pages: as many as md takes.
const MOST_STRIPES: usize = 32768;
/// Fewest, so that any request makes progress.
const LEAST_STRIPES: usize = 8;
/// Most sectors of a request.
const MAX_SECTORS: u32 = 2048;

/// Finds the devices that questions name, by the grammar of the program that serves the array.
pub trait MemberNames: Send + Sync {
    /// Opens a device as a member. Errors are one line that says what is wrong with the name.
    fn open(&self, name: &str) -> Result<Arc<dyn BlockDevice>, Error>;
    /// The file or block device that a name leads to, whatever is over it: names of one file mean one device.
    fn file(&self, name: &str) -> Option<PathBuf>;
    /// True if two names mean the same device.
    fn same_device(&self, a: &str, b: &str) -> bool {
        a == b || self.file(a).is_some_and(|file| Some(file) == self.file(b))
    }
    /// The specification that starts the array; without a grammar its members in brackets.
    fn spec(&self, parts: &SpecParts) -> String {
        parts.list()
    }
}

/// The present state of an array that serves, as far as a specification of it needs it.
#[derive(Clone, Debug)]
pub struct SpecParts {
    pub set_uuid: [u8; 16],
    /// Names of the members by place; `None`: there is none that is whole.
    pub members: Vec<Option<String>>,
    /// Names of the device that is being rebuilt and of the spares.
    pub spares: Vec<String>,
    /// Names of all devices by which the array is to be found: these, and those that superblocks on disk may still call members.
    pub devices: Vec<String>,
    /// Patterns by which it was found: see [`Raid5::found_in`].
    pub patterns: Vec<String>,
    /// A place has no member, and superblocks on disk may still count on one.
    pub missing: bool,
    pub stripes: usize,
    pub write_path: WritePath,
    /// See [`ArrayOptions`].
    pub member_timeout: Option<Duration>,
    /// Members that were kicked for their time come back by themselves.
    pub re_add: bool,
}

impl SpecParts {
    /// `raid5:[a][missing][c]`: members by place, then spares, without options.
    pub fn list(&self) -> String {
        let members = self.members.iter().map(|m| match m {
            Some(name) => format!("[{name}]"),
            None => "[missing]".into(),
        });
        let spares = self.spares.iter().map(|s| format!("[{s}]"));
        format!("raid5:{}", members.chain(spares).collect::<String>())
    }
}

/// Of a program without a grammar: names are equal or not, and no device can be added by its name.
struct NoNames;

impl MemberNames for NoNames {
    fn open(&self, name: &str) -> Result<Arc<dyn BlockDevice>, Error> {
        Err(Error::config(format!(
            "{name}: this array can't open devices by their names"
        )))
    }
    fn file(&self, _: &str) -> Option<PathBuf> {
        None
    }
}

/// Starts an array that was assembled and prepared, with a thread for its background work. `patterns`: see [`Raid5::found_in`].
pub fn serve(
    assembly: Assembly,
    options: &ArrayOptions,
    patterns: Vec<String>,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let array = Raid5::start(assembly, options)?;
    array.found_in(patterns);
    array.keep()?;
    Ok(array)
}

/// Options for serving an array.
#[derive(Clone)]
pub struct ArrayOptions {
    /// Stripes that may have pages, 8 to 32768: a page of 4 KiB for every member.
    pub stripes: usize,
    /// Path by which writes go to stripes.
    pub path: WritePath,
    /// The devices that questions name.
    pub names: Arc<dyn MemberNames>,
    /// A member that doesn't answer an I/O for so long is kicked; `None`: it is waited for. Needs [`BackgroundWork`].
    pub member_timeout: Option<Duration>,
    /// A member that was kicked for that is taken back when it answers again.
    pub re_add: bool,
}

impl Default for ArrayOptions {
    /// 256 stripes, as md.
    fn default() -> ArrayOptions {
        ArrayOptions {
            stripes: 256,
            path: WritePath::default(),
            names: Arc::new(NoNames),
            member_timeout: None,
            re_add: false,
        }
    }
}

/// A device of the array, as long as it is one.
#[derive(Clone)]
struct MemberDevice {
    device: Arc<dyn BlockDevice>,
    name: String,
}

/// The means by which the array is found the next time.
#[derive(Default)]
struct Origin {
    patterns: Vec<String>,
    /// Names of devices that superblocks on disk may call members.
    devices: Vec<String>,
    /// `devices` may name some that no superblock on disk names any more.
    stale: bool,
}

/// Limits of an array whose devices have these.
fn limits_of(all: &[Limits], geometry: &Geometry) -> Limits {
    let most = |f: fn(&Limits) -> u32| all.iter().map(f).max().unwrap_or(512);
    let row_bytes = u32::try_from(geometry.row_sectors() * 512).unwrap_or(0);
    let read_only = all.iter().any(|l| l.read_only);
    Limits {
        logical_sector_bytes: most(|l| l.logical_sector_bytes),
        physical_sector_bytes: most(|l| l.physical_sector_bytes),
        optimal_bytes: row_bytes,
        max_sectors: MAX_SECTORS,
        max_segments: MAX_SECTORS,
        discard_granularity_bytes: match all.iter().all(|l| l.write_zeroes) {
            true => row_bytes,
            false => 0,
        },
        readahead_bytes: most(|l| l.readahead_bytes),
        caches_reads: false,
        write_zeroes: !read_only,
        read_only,
        // A member that comes later may have one, and users aren't told then. A flush of members without costs nothing.
        volatile_cache: !read_only,
        non_rotational: all.iter().all(|l| l.non_rotational),
        exclusive: all.iter().all(|l| l.exclusive),
    }
}

/// The user's names of its members.
fn name_of(assembly: &Assembly) -> String {
    let members = assembly.members.iter();
    let names = members.map(|m| m.as_ref().map_or("missing", |m| &m.name));
    format!("raid5 of {}", names.collect::<Vec<_>>().join(", "))
}

/// Errors unless so many stripes of an array may have pages.
fn check_stripes(stripes: usize) -> Result<(), Error> {
    if (LEAST_STRIPES..=MOST_STRIPES).contains(&stripes) {
        return Ok(());
    }
    Err(Error::config(format!(
        "raid5 with {stripes} stripes: it takes {LEAST_STRIPES} to {MOST_STRIPES}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Front ends are told once whether a disk may lose what isn't flushed, and a member that does may come later.
    #[test]
    fn an_array_of_members_without_caches_asks_for_flushes() {
        let geometry = Geometry::new(3, 128, crate::Layout::LeftSymmetric, 1024).unwrap();
        let members = [Limits::default(); 3];
        assert!(members.iter().all(|m| !m.volatile_cache));
        assert!(limits_of(&members, &geometry).volatile_cache);
        let members = members.map(|m| Limits {
            read_only: true,
            ..m
        });
        assert!(!limits_of(&members, &geometry).volatile_cache);
    }
}
