//! The configuration file's form.

use crate::wanted::DiskWanted;
use anyhow::{Context, Result, anyhow};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Keys have the names of the flags, with `_` for `-`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub local: Option<String>,
    #[serde(default)]
    pub nbd: Vec<String>,
    pub workers: Option<usize>,
    pub max_queues: Option<u32>,
    pub max_guest_unallocated: Option<String>,
    pub max_ring_pages: Option<u32>,
    pub spin_us: Option<u64>,
    #[serde(default)]
    pub allow_remote: bool,
    pub control: Option<String>,
    pub slow: Option<String>,
    pub on_event: Option<PathBuf>,
    pub hang_after: Option<String>,
    pub log: Option<String>,
    pub log_format: Option<String>,
    pub max_buffer_pages: Option<usize>,
    pub buffer_squeeze_duration_ms: Option<u64>,
    pub buffer_floor_pages: Option<usize>,
    #[serde(default)]
    pub no_pressure: bool,
    pub max_client_memory: Option<String>,
    pub max_client_memory_per_disk: Option<String>,
    pub max_connections: Option<usize>,
    pub max_connections_per_disk: Option<usize>,
    #[serde(default)]
    pub xen: bool,
    #[serde(default)]
    pub no_persistent_grants: bool,
    #[serde(default)]
    pub disk: BTreeMap<String, DiskWanted>,
}

impl File {
    /// Reads it; a mistake is told with its line.
    pub fn read(path: &Path) -> Result<File> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        toml::from_str(&text).map_err(|e| {
            let before = e.span().map_or("", |s| &text[..s.start]);
            let line = 1 + before.matches('\n').count();
            anyhow!("{}, line {line}: {}", path.display(), e.message())
        })
    }
}
