//! Access of the back end to a peer's pages.

use pvblk_block::Buffer;
use pvblk_sys::xen::{CopyDirection, GrantCopy};

/// Reasons why a grant reference can't be used.
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

/// The relation of a request's buffer to the granted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The buffer is the page, for as long as the connection lasts; it needs no release.
    Direct,
    /// The buffer is the page until [`GrantMapper::release`], which must come before the response.
    Mapped,
    /// The buffer is private memory, and data is moved by [`GrantMapper::copy`]; [`GrantMapper::release`]
    /// takes it back.
    Copied,
}

/// One use of a granted page by a request that has to be released.
#[derive(Debug)]
pub struct PageUse {
    /// The grant reference.
    pub gref: u32,
    /// First byte on the page.
    pub offset: u16,
    /// [`Access::Mapped`] or [`Access::Copied`].
    pub access: Access,
    /// The buffer that the mapper returned.
    pub buffer: Buffer,
}

/// Turns grant references into buffers. There is one for each queue, so that queues share no lock
/// and no counter.
pub trait GrantMapper: Send {
    /// A buffer of `len` bytes at `offset` of the granted page (the caller guarantees that `offset + len` is
    /// at most 4096), and the way of access. The entry is read once and checked; `writable` if the page will
    /// be written.
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

    /// Moves the data of [`Access::Copied`] buffers, many in one call; each entry has its own
    /// result.
    fn copy(&mut self, _direction: CopyDirection, copies: &mut [GrantCopy]) {
        debug_assert!(copies.is_empty(), "this mapper copies nothing");
    }

    /// Ends one use of a page: the request that had it is over.
    fn release(&mut self, _page: PageUse) {}

    /// True if so much was mapped and copied for requests lately that other queues should have their turn;
    /// the count then begins again.
    fn wants_pause(&mut self) -> bool {
        false
    }

    /// True if the front end has left: its references may grant other pages by now, so no data is copied, and
    /// the front end waits for none.
    fn is_cut_off(&self) -> bool {
        false
    }

    /// No request has come for a while: memory that is kept for the next requests is given back,
    /// within reason.
    fn rest(&mut self) {}
}
