//! A write load that remembers which writes completed and which were flushed, and checks the disk's
//! file against that.

use crate::nbd::{Command, Connection};
use crate::outcome::check;
use crate::{Stop, pattern};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: usize = 16 << 10;
const WINDOW: usize = 16;
/// A FLUSH after so many writes.
const FLUSH_EVERY: u64 = 64;
/// Cookies of flushes; writes use their sequence number, which stays below.
const FLUSH_BIT: u64 = 1 << 63;

/// A client's knowledge of each block at the end.
#[derive(Debug, Default)]
pub struct Promises {
    /// Number of the last write sent to a block.
    sent: HashMap<u64, u64>,
    /// Number of the last write to a block that was acknowledged.
    acknowledged: HashMap<u64, u64>,
    /// Number of the last write to a block that a completed FLUSH covers.
    durable: HashMap<u64, u64>,
    /// Number of acknowledged writes.
    pub writes: u64,
    /// Number of completed flushes.
    pub flushes: u64,
}

/// Writes until the server closes the connection. `progress` counts acknowledged writes. An error
/// in any reply fails: the server must finish the requests that it took, or close.
pub fn write_until_closed(
    mut connection: Connection,
    progress: &AtomicU64,
) -> Result<Promises, Stop> {
    let blocks = connection.size_bytes / BLOCK as u64;
    let mut promises = Promises::default();
    let mut in_flight: HashMap<u64, u64> = HashMap::new();
    // The writes that were acknowledged when a flush was sent: the flush covers those, and no
    // others.
    let mut flushing: HashMap<u64, HashMap<u64, u64>> = HashMap::new();
    let mut block = vec![0; BLOCK];
    let (mut sequence, mut open) = (0, true);
    loop {
        while open && in_flight.len() + flushing.len() < WINDOW {
            sequence += 1;
            let sent = if sequence % FLUSH_EVERY == 0 {
                let cookie = sequence | FLUSH_BIT;
                flushing.insert(cookie, promises.acknowledged.clone());
                connection.send(Command::Flush, cookie, 0, &[])
            } else {
                let index = sequence % blocks;
                pattern::fill_block(&mut block, index, sequence);
                in_flight.insert(sequence, index);
                promises.sent.insert(index, sequence);
                connection.send(Command::Write, sequence, index * BLOCK as u64, &block)
            };
            // The server has closed its side; replies may still be on their way.
            open = sent.is_ok();
        }
        let Some(reply) = connection.receive()? else {
            return Ok(promises);
        };
        check(reply.error == 0, || {
            format!("error {} before the connection closed", reply.error)
        })?;
        if let Some(covered) = flushing.remove(&reply.cookie) {
            promises.durable.extend(covered);
            promises.flushes += 1;
        } else if let Some(index) = in_flight.remove(&reply.cookie) {
            let last = promises.acknowledged.entry(index).or_default();
            *last = (*last).max(reply.cookie);
            promises.writes += 1;
            progress.fetch_add(1, Ordering::Relaxed);
        } else {
            return Stop::fail(format!("a reply to nothing: {reply:?}"));
        }
    }
}

impl Promises {
    /// Checks the disk's file: every block holds a whole write, none older than the last flushed
    /// one.
    pub fn check_file(&self, disk: &Path) -> Result<(), Stop> {
        let file = File::open(disk)?;
        let mut block = vec![0; BLOCK];
        for (&index, &sent) in &self.sent {
            file.read_exact_at(&mut block, index * BLOCK as u64)?;
            let acknowledged = self.acknowledged.get(&index).copied().unwrap_or(0);
            let durable = self.durable.get(&index).copied().unwrap_or(0);
            let held = pattern::block_sequence(&block, index);
            check(
                held.is_some_and(|held| held >= durable.max(acknowledged) && held <= sent),
                || {
                    format!(
                        "block {index} holds write {held:?}; sent {sent}, acknowledged {acknowledged}, flushed {durable}"
                    )
                },
            )?;
        }
        Ok(())
    }
}
