//! A file system on the disk: nbdfuse, a loop device, ext4, and a check of the disk afterwards.

use pvblk_e2e::mounted::{Ext4, need_machine};
use pvblk_e2e::tools::run_ok;
use pvblk_e2e::{MIB, Route, Stage, Stop, pattern, run_all};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    run_all(&[
        ("ext4_over_nbd", || ext4(Route::Nbd)),
        ("ext4_over_rings", || ext4(Route::Rings)),
    ])
}

fn ext4(route: Route) -> Result<(), Stop> {
    need_machine()?;
    let mut stage = Stage::new(route, 256 * MIB)?;
    let mut ext4 = Ext4::make(&stage)?;
    let originals = write_files(&stage, &ext4.folder)?;
    ext4.again()?;
    for original in &originals {
        let name = original.file_name().unwrap_or_default();
        pvblk_e2e::tools::compare(original, &ext4.folder.join(name))?;
    }
    ext4.end()?;
    stage.stop()?;
    run_ok("e2fsck", ["-fn", &stage.disk().display().to_string()]).map(drop)
}

/// Files of many sizes: empty, below a block, and many blocks.
fn write_files(stage: &Stage, mounted: &Path) -> Result<Vec<PathBuf>, Stop> {
    let folder = stage.path("originals");
    std::fs::create_dir(&folder)?;
    let mut originals = Vec::new();
    for n in 0..60u64 {
        let original = folder.join(format!("file{n}"));
        pattern::write(&original, n * n * 509, n)?;
        std::fs::copy(&original, mounted.join(format!("file{n}")))?;
        originals.push(original);
    }
    let large = folder.join("large");
    pattern::write(&large, 40 * MIB, 99)?;
    std::fs::copy(&large, mounted.join("large"))?;
    originals.push(large);
    Ok(originals)
}
