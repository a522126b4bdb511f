//! Volumes that store blocks, and decorators over volumes.
//!
//! | spec | what it is |
//! |---|---|
//! | `null[:SIZE][,notouch]` | stores nothing, completes at once; reads give zeros (1 TiB unless a size is given) |
//! | `mem:SIZE[,sector=512\|4096]` | sparse memory, one copy per request |
//! | `file:PATH[,OPTION…]` | a regular file or block device; see [`FileSpec`] for the options |
//! | `delay:MODEL:INNER` | a modelled device over another; see [`DelaySpec`] |
//! | `fault:FAULTS:INNER` | errors, stalls and torn writes by seed; see [`FaultSpec`] |
//! | `cache:SIZE[,OPTION…]:INNER` | a page cache over another; see [`CacheSpec`] |
//! | `raid5:[MEMBER][MEMBER]…[,OPTION…]` | a RAID-5 array in md's format; see [`Raid5Spec`] |
//! | `nbd://HOST:PORT/EXPORT`, `nbd+unix:///EXPORT?socket=PATH` | an export of an NBD server |
//! | `rbd:POOL/IMAGE[,OPTION…]` | an image of a Ceph cluster; see [`RbdSpec`] |
//! | `vhost-user:unix:PATH[,OPTION…]` | a disk of a vhost-user-blk server; see [`VhostSpec`] |
//! | `rings:unix:PATH,disk=NAME[,OPTION…]` | a disk of a local server over rings; see [`RingsSpec`] |
//!
//! [`open`] takes such a spec; [`VolumeSpec`] is its parsed form. Every volume is a
//! [`pvblk_block::BlockDevice`] and is used through [`pvblk_block::Queue`].

mod delay;
mod extents;
mod fault;
mod file;
mod hold;
mod mem;
mod null;
mod opener;
mod spec;

pub use delay::DelayVolume;
pub use fault::FaultVolume;
pub use file::FileVolume;
pub use mem::MemVolume;
pub use null::NullVolume;
pub use opener::{
    FileAnswer, FileCall, FileOpener, LockHolder, Match, PassCall, PassedOpener, PathStat,
    carry_out, in_process,
};
pub use pvblk_block::{Clock, ManualClock, SystemClock};
pub use pvblk_client::rbd::{OnLostLock, RbdSpec};
pub use spec::{
    CacheSpec, Candidates, DelaySpec, Engine, FaultSpec, FileSpec, Found, ImageOpener, Look,
    MemSpec, Members, NbdSpec, Need, NullSpec, Raid5Spec, Reach, RingsSpec, SpecNames, VhostSpec,
    VolumeSpec, look, parse_size, spec_in_folder,
};

use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;

/// Opens the volume that `spec` describes, such as `mem:1G` or `delay:200us:file:/srv/disk.img`.
///
/// Fails with a one-line [`pvblk_block::ErrorKind::Config`] error if the spec makes no sense, or with
/// an [`pvblk_block::ErrorKind::Os`] error if the system refuses.
pub fn open(spec: &str) -> Result<Arc<dyn BlockDevice>, Error> {
    spec.parse::<VolumeSpec>()?.open()
}
