//! The Debian package, made of the command under test.

use crate::Stop;
use crate::daemon::binary;
use crate::tools::{need, run, run_ok};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// The package, and what is in it.
pub struct Package {
    /// It goes when the program ends.
    _dir: TempDir,
    /// The package's file.
    pub deb: PathBuf,
    /// Its files, as they will be below `/`.
    pub root: PathBuf,
    /// Its maintainer scripts.
    pub control: PathBuf,
}

/// The package, made once. The test is skipped where it can't be made.
pub fn package() -> Result<&'static Package, Stop> {
    static MADE: OnceLock<Result<Package, String>> = OnceLock::new();
    need(&["dpkg-buildpackage", "dh", "lowdown"])?;
    let made = MADE.get_or_init(|| make().map_err(Stop::into_text));
    made.as_ref().map_err(|text| Stop::Fail(text.clone()))
}

/// The tree of which the package is made.
pub fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn make() -> Result<Package, Stop> {
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("out");
    let mut command = Command::new(tree().join("scripts/deb.sh"));
    command.arg(binary()?).arg(&out);
    run(command, Duration::from_secs(600))?.success()?;
    let name = fs::read_dir(&out)?.next().transpose()?;
    let Some(deb) = name.map(|e| e.path()) else {
        return Stop::fail("scripts/deb.sh made nothing");
    };
    let (root, control) = (dir.path().join("root"), dir.path().join("control"));
    dpkg_deb(&["-x".as_ref(), deb.as_ref(), root.as_ref()])?;
    dpkg_deb(&["-e".as_ref(), deb.as_ref(), control.as_ref()])?;
    Ok(Package {
        _dir: dir,
        deb,
        root,
        control,
    })
}

fn dpkg_deb(args: &[&Path]) -> Result<(), Stop> {
    run_ok("dpkg-deb", args).map(drop)
}

impl Package {
    /// The next version, as a file in `folder`: the same files, and another default configuration.
    pub fn next(&self, folder: &Path) -> Result<PathBuf, Stop> {
        let next = folder.join("next");
        dpkg_deb(&["-R".as_ref(), &self.deb, &next])?;
        let control = next.join("DEBIAN/control");
        let text = fs::read_to_string(&control)?;
        let version = text.lines().find(|l| l.starts_with("Version: "));
        let version = version.unwrap_or_default();
        fs::write(&control, text.replace(version, "Version: 99"))?;
        fs::write(next.join("etc/pvblk/pvblk.toml"), "# another default\n")?;
        let deb = folder.join("next.deb");
        dpkg_deb(&["-Znone".as_ref(), "-b".as_ref(), &next, &deb])?;
        Ok(deb)
    }
}
