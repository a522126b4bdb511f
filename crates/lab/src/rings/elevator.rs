//! Merging as it isn't done in any front end that serves, for comparison (docs/decisions/0051-limit-in-flight.md).

use pvblk_client::rings::MergePolicy;

/// Merging as Linux's elevator does it: also with any request that waits because the ring is full. The size of the ring then decides
/// the size of the requests, which explains the anomalies of the historical measurement (seed 000).
#[derive(Debug)]
pub enum WhileWaiting {}

impl MergePolicy for WhileWaiting {
    const JOINS_WAITING: bool = true;
}

/// Merging within a batch, and nowhere else (docs/decisions/0004-merge-in-the-plug.md).
#[derive(Debug)]
pub enum InBatch {}

impl MergePolicy for InBatch {}
