//! How the back end reaches a peer's pages.

use pvblk_block::Buffer;

/// Why a grant reference can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The reference is outside the table, or its entry grants nothing.
    #[error("grant reference {0} grants nothing")]
    Bad(u32),
    /// The entry's frame is outside the granter's memory.
    #[error("grant reference {0} names a frame outside the memory")]
    Frame(u32),
    /// A write to a page granted read-only.
    #[error("grant reference {0} is read-only")]
    ReadOnly(u32),
    /// Too many pages mapped, or the system refused.
    #[error("grant reference {0} can't be mapped now")]
    Exhausted(u32),
}

/// Turns grant references into buffers. One per queue, so that queues share no lock and no counter.
pub trait GrantMapper: Send {
    /// `len` bytes at `offset` of the granted page (`offset + len` is at most 4096, the caller's promise).
    /// The entry is read once and checked; `writable` if we will write to the page.
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        writable: bool,
    ) -> Result<Buffer, GrantError>;

    /// True if [`GrantMapper::unmap`] must be called for every mapped reference before its request is
    /// answered (grants that are not persistent). The local mapper sees all of the memory and needs nothing.
    fn needs_unmap(&self) -> bool {
        false
    }

    /// Ends one use of a reference; its buffers are no longer in use.
    fn unmap(&mut self, _gref: u32) {}
}
