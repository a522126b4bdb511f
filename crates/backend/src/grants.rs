//! How the back end reaches a peer's pages.

use pvblk_block::Buffer;
use pvblk_sys::xen::{CopyDirection, GrantCopy};

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
    /// There is no memory for its data now; there will be when other requests have ended.
    #[error("there is no memory for the data of grant reference {0}")]
    Busy(u32),
}

/// How a request's buffer relates to the page that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is the page, for as long as the connection; nothing follows.
    Direct,
    /// It is the page until [`GrantMapper::release`], which must come before the request is answered.
    Mapped,
    /// It is private memory, and data is moved by [`GrantMapper::copy`]; given back by [`GrantMapper::release`].
    Copied,
}

/// One use of a granted page by a request, if something is to follow.
#[derive(Debug)]
pub struct PageUse {
    /// The reference.
    pub gref: u32,
    /// First byte on the page.
    pub offset: u16,
    /// [`Access::Mapped`] or [`Access::Copied`].
    pub access: Access,
    /// As the mapper returned it.
    pub buffer: Buffer,
}

/// Turns grant references into buffers. One per queue, so that queues share no lock and no counter.
pub trait GrantMapper: Send {
    /// `len` bytes at `offset` of the granted page (`offset + len` is at most 4096, the caller's promise), and what has to follow.
    /// The entry is read once and checked; `writable` if we will write to the page.
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        writable: bool,
    ) -> Result<(Buffer, Access), GrantError>;

    /// Copies the first bytes of a granted page out, once.
    fn read(&mut self, gref: u32, dst: &mut [u8]) -> Result<(), GrantError> {
        let (buffer, access) = self.map(gref, 0, dst.len(), false)?;
        buffer.read(0, dst);
        if access != Access::Direct {
            self.release(PageUse {
                gref,
                offset: 0,
                access,
                buffer,
            });
        }
        Ok(())
    }

    /// Moves the data of [`Access::Copied`] buffers, many in one call; each says what came of it.
    fn copy(&mut self, _direction: CopyDirection, copies: &mut [GrantCopy]) {
        debug_assert!(copies.is_empty(), "this mapper copies nothing");
    }

    /// Ends one use of a page: the request that had it is over.
    fn release(&mut self, _page: PageUse) {}

    /// True if so much was mapped and copied for requests lately that other queues should have their turn; it counts anew then.
    fn wants_pause(&mut self) -> bool {
        false
    }

    /// True if the front end has left: its references may grant other pages by now, so nothing is copied, and nobody waits for it.
    fn is_cut_off(&self) -> bool {
        false
    }

    /// Nothing has come for a while: what is kept for the next requests goes, within reason.
    fn rest(&mut self) {}
}
