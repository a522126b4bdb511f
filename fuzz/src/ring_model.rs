//! The expected behaviour of a back end's ring, step by step, from ring.h's rules (facts 1.5).

/// Bytes of the ring's header.
const ENTRIES_AT: usize = 64;
/// Bytes of an entry.
pub const ENTRY: usize = 112;

/// The back end's private indices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Indices {
    /// Entries of the ring.
    pub size: u32,
    /// The next request to take.
    pub next: u32,
    /// `req_prod` as last looked at.
    pub seen: u32,
    /// The next response to fill.
    pub filled: u32,
    /// Responses made visible.
    pub published: u32,
}

impl Indices {
    /// Offset of a slot.
    pub fn slot(&self, index: u32) -> usize {
        ENTRIES_AT + (index & (self.size - 1)) as usize * ENTRY
    }

    /// Requests taken and not answered.
    pub fn unanswered(&self) -> u32 {
        self.next.wrapping_sub(self.filled)
    }

    /// Before a request is taken: true if there is one, `None` if `req_prod` is impossible.
    /// A batch that was seen is taken without another look.
    pub fn look(&mut self, req_prod: u32) -> Option<bool> {
        if self.seen == self.next {
            let ahead = req_prod.wrapping_sub(self.next);
            if ahead > self.size - self.unanswered() {
                return None;
            }
            self.seen = req_prod;
        }
        Some(self.seen != self.next)
    }

    /// Makes responses visible; `Some(notify)` if there were any.
    pub fn publish(&mut self, rsp_event: u32) -> Option<bool> {
        let old = std::mem::replace(&mut self.published, self.filled);
        let new = self.filled;
        if old == new {
            return None;
        }
        // In (old, new]: one to `new - old` past the old index.
        let away = rsp_event.wrapping_sub(old);
        Some(away >= 1 && away <= new.wrapping_sub(old))
    }
}

/// The bytes of a response.
pub fn response(id: u64, operation: u8, status: i16) -> [u8; 16] {
    let mut b = [0; 16];
    b[..8].copy_from_slice(&id.to_ne_bytes());
    b[8] = operation;
    b[10..12].copy_from_slice(&status.to_ne_bytes());
    b
}
