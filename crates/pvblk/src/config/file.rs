//! The configuration file's form.

use crate::opener::Opener;
use crate::wanted::DiskWanted;
use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Keys have the names of the flags, with `_` for `-`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub local: Option<String>,
    #[serde(default)]
    pub nbd: Vec<String>,
    pub sandbox: Option<String>,
    #[serde(default)]
    pub open_in: Vec<PathBuf>,
    #[serde(default)]
    pub connect_to: Vec<String>,
    pub workers: Option<usize>,
    pub max_queues: Option<u32>,
    pub max_guest_unallocated: Option<String>,
    pub max_ring_pages: Option<u32>,
    pub spin_us: Option<u64>,
    #[serde(default)]
    pub allow_remote: bool,
    pub control: Option<String>,
    pub web: Option<String>,
    #[serde(default)]
    pub web_allow_remote: bool,
    #[serde(default)]
    pub web_host: Vec<String>,
    pub web_token_file: Option<PathBuf>,
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
    pub fn read(path: &Path, opener: &Opener) -> Result<File> {
        let text = opener.text(path);
        let text = text.with_context(|| format!("reading {}", path.display()))?;
        toml::from_str(&text).map_err(|e| {
            let before = e.span().map_or("", |s| &text[..s.start]);
            let line = 1 + before.matches('\n').count();
            anyhow!("{}, line {line}: {}", path.display(), e.message())
        })
    }

    /// Keys with other values in `later`, but for those that a running server takes: disks, and sockets for peers of all disks.
    pub fn differences(&self, later: &File) -> Vec<String> {
        let values = |file: &File| match serde_json::to_value(file) {
            Ok(serde_json::Value::Object(values)) => values,
            _ => serde_json::Map::new(),
        };
        let (now, then) = (values(self), values(later));
        let taken = |key: &str| matches!(key, "disk" | "nbd" | "local");
        let differs = then
            .iter()
            .filter(|(key, value)| !taken(key) && now.get(*key) != Some(value));
        differs.map(|(key, _)| key.clone()).collect()
    }
}
