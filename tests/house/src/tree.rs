//! Finds the files of the tree.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Folders without files of ours.
const SKIPPED: &[&str] = &["target", ".git", "artifacts", "corpus", "node_modules"];

/// The root of the workspace.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors()
        .nth(2)
        .expect("the workspace is two folders up")
        .to_path_buf()
}

/// Every file below `root` whose name ends in one of `extensions`: its path relative to `root`, and its text.
pub fn files(root: &Path, extensions: &[&str]) -> io::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type()?;
            if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
                folders.push(path);
            } else if kind.is_file() && extensions.iter().any(|e| name.ends_with(e)) {
                let relative = path.strip_prefix(root).unwrap_or(&path);
                let text = fs::read_to_string(&path)?;
                found.push((relative.to_string_lossy().into_owned(), text));
            }
        }
    }
    found.sort();
    Ok(found)
}
