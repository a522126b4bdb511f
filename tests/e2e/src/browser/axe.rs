//! axe-core, which finds mistakes that keep people from using a page. It is fetched once, into `target/axe`.

use super::Browser;
use crate::Stop;
use crate::outcome::check;
use crate::tools::{find, run, run_ok, tool};
use std::path::{Path, PathBuf};
use std::time::Duration;

const VERSION: &str = "4.14.1";

/// The source of axe, or why it can't be had.
pub struct Axe(String);

impl Axe {
    /// `PVBLK_AXE` names a copy of `axe.min.js`; else npm fetches the package, which it compares with its checksum.
    pub fn find() -> Result<Axe, Stop> {
        if let Some(path) = std::env::var_os("PVBLK_AXE") {
            return Ok(Axe(std::fs::read_to_string(path)?));
        }
        let folder = target().join("axe");
        let file = folder.join(format!("axe-{VERSION}.min.js"));
        if !file.is_file() {
            fetch(&folder, &file)?;
        }
        Ok(Axe(std::fs::read_to_string(file)?))
    }

    /// Fails if axe finds something in the page as it is now.
    pub fn check(&self, browser: &mut Browser, view: &str) -> Result<(), Stop> {
        browser.eval(&format!("{}; true", self.0))?;
        let found = browser.eval(
            "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations.map((found) => \
             `${found.id}: ${found.nodes.length} × ${found.nodes[0].html.slice(0, 200)}`).join('\\n'))",
        )?;
        check(found == "", || format!("axe, {view}: {found}"))
    }
}

fn target() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Folder for pictures and the like, made if there is none.
pub fn folder(name: &str) -> Result<PathBuf, Stop> {
    let folder = target().join(name);
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn fetch(folder: &Path, file: &Path) -> Result<(), Stop> {
    if find("npm").is_none() {
        return Stop::skip(
            "axe-core isn't here: no npm to fetch it, and PVBLK_AXE doesn't name it",
        );
    }
    std::fs::create_dir_all(folder)?;
    let mut pack = tool("npm", ["pack", "--silent", &format!("axe-core@{VERSION}")]);
    pack.current_dir(folder);
    if run(pack, Duration::from_secs(60))?.success().is_err() {
        return Stop::skip("axe-core isn't here, and npm can't fetch it");
    }
    let archive = folder.join(format!("axe-core-{VERSION}.tgz"));
    let (from, to) = (archive.display().to_string(), folder.display().to_string());
    run_ok("tar", ["-xzf", &from, "-C", &to, "package/axe.min.js"])?;
    // Under its name only when it is whole.
    std::fs::rename(folder.join("package/axe.min.js"), file)?;
    Ok(())
}
