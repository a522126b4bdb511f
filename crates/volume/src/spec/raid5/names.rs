//! The devices that an array's questions name: names are specs.

use super::super::{Need, VolumeSpec};
use super::found::spec_now;
use pvblk_block::{BlockDevice, Error};
use pvblk_raid5::{MemberNames, SpecParts};
use std::path::PathBuf;
use std::sync::Arc;

/// Names of an array's devices are specs, for [`pvblk_raid5::ArrayOptions::names`].
#[derive(Default)]
pub struct SpecNames {
    need: Need,
}

impl SpecNames {
    /// Devices that are named are opened for this need.
    pub fn new(need: &Need) -> SpecNames {
        SpecNames { need: need.clone() }
    }
}

impl MemberNames for SpecNames {
    fn open(&self, name: &str) -> Result<Arc<dyn BlockDevice>, Error> {
        let spec: VolumeSpec = name.parse()?;
        spec.as_member().open_for(&self.need)
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        let spec: VolumeSpec = name.parse().ok()?;
        let path = &spec.file()?.path;
        let real = self.need.opener.real_path(path);
        real.or_else(|_| std::path::absolute(path)).ok()
    }

    fn spec(&self, parts: &SpecParts) -> String {
        spec_now(parts).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_the_same_by_their_files() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name).display().to_string();
        std::fs::write(path("a"), "").expect("a file");
        std::os::unix::fs::symlink(path("a"), path("link")).expect("a link");
        let a = format!("file:{}", path("a"));
        let names = SpecNames::default();
        for same in [
            a.clone(),
            path("a"),
            path("link"),
            format!("{a},direct,size=1M"),
            format!("delay:1ms:fault:error=0.5:{a}"),
        ] {
            assert!(names.same_device(&a, &same), "{same}");
        }
        for other in ["0", "mem:1M", "", "x:y", &path("b")] {
            assert!(!names.same_device(&a, other), "{other}");
        }
        assert!(names.same_device("mem:1M", "mem:1M"));
        assert!(!names.same_device("mem:1M", "mem:2M"));
    }
}
