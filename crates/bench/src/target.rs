//! A disk that is measured: any volume, opened for as many threads as the jobs have.

use super::spec::JobSpec;
use pvblk_block::{BlockDevice, Error};
use pvblk_volume::{Need, VolumeSpec};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The most that jobs have at work on a target at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Threads that use it at the same time.
    pub threads: u32,
    /// Bytes of their buffers.
    pub buffer_bytes: u64,
}

impl Load {
    /// The most that any stage of `jobs` needs; `here` says which of them use this target.
    pub fn of(jobs: &[JobSpec], here: impl Fn(&JobSpec) -> bool) -> Load {
        let (mut most, mut stage) = (Load::default(), Load::default());
        for job in jobs {
            if job.stonewall {
                stage = Load::default();
            }
            if here(job) {
                stage.threads += job.numjobs;
                stage.buffer_bytes += job.buffer_bytes();
            }
            most.threads = most.threads.max(stage.threads);
            most.buffer_bytes = most.buffer_bytes.max(stage.buffer_bytes);
        }
        most
    }
}

/// Opens a target. `stop` is set if its server ends it, which ends the run. Close the device after the last run: a server that isn't
/// told has to find out by itself.
pub fn open_target(
    spec: &VolumeSpec,
    load: &Load,
    stop: &Arc<AtomicBool>,
) -> Result<Arc<dyn BlockDevice>, Error> {
    spec.open_for(&Need {
        queues: load.threads.clamp(1, 64) as u16,
        fewer: false,
        at_start: false,
        buffer_bytes: load.buffer_bytes,
        patience: None,
        ended: Arc::clone(stop),
        ..Need::default()
    })
}

/// Name of a target's layers in traces: over rings the disk's, under which its server traces too.
pub fn scope(spec: &VolumeSpec) -> &str {
    match spec {
        VolumeSpec::Rings(spec) => &spec.disk,
        _ => "bench",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_needs_what_its_jobs_need_together() {
        let job = |numjobs, stonewall| JobSpec {
            numjobs,
            stonewall,
            ..JobSpec::new("j")
        };
        let load = Load::of(&[job(1, false), job(2, false), job(2, true)], |_| true);
        assert_eq!((load.threads, load.buffer_bytes), (3, 3 * 4096));
    }
}
