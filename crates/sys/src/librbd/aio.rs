//! Operations on an image.

use super::api::Handle;
use super::{Image, check};
use crate::Buffer;
use std::ffi::c_void;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// An operation on an image; offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AioOp {
    /// Fills the buffers from this offset on.
    Read(u64),
    /// Writes the buffers at this offset.
    Write(u64),
    /// Frees a range; smaller ranges than the library's granularity stay as they are.
    Discard(u64, u64),
    /// Zeroes a range; `true` keeps its space allocated.
    WriteZeroes(u64, u64, bool),
    /// Makes all writes stable that are complete.
    Flush,
}

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`
const THICK: i32 = 1;

/// The owner's part of an operation.
pub trait Finish: Send + Sized + 'static {
    /// The operation is done. Called once, on a thread of librbd, where nothing may wait.
    fn finish(aio: Box<Aio<Self>>);
}

/// Room for one operation, to be used again and again.
pub struct Aio<T> {
    /// The owner's part.
    pub owner: T,
    /// The buffers of the operation; librbd uses them until it has called back.
    pub buffers: Vec<Buffer>,
    /// Bytes that were read, 0, or the negative number of an error.
    pub result: i64,
    /// Kept open while the operation is in flight, and until the owner takes it.
    pub image: Option<Arc<Image>>,
    iov: Vec<libc::iovec>,
}

// SAFETY: the raw pointers in `iov` point into regions that `buffers` keep mapped, and are used by librbd only; nothing is bound to a thread.
unsafe impl<T: Send> Send for Aio<T> {}

impl<T: Finish> Aio<T> {
    /// Room for an operation of this owner.
    pub fn new(owner: T) -> Box<Aio<T>> {
        Box::new(Aio {
            owner,
            buffers: Vec::new(),
            result: 0,
            image: None,
            iov: Vec::new(),
        })
    }
}

unsafe extern "C" fn complete<T: Finish>(completion: Handle, argument: *mut c_void) {
    // SAFETY: the argument is the box that `Image::submit` gave to librbd with this completion, which is called back once.
    let mut aio = unsafe { Box::from_raw(argument.cast::<Aio<T>>()) };
    if let Some(image) = &aio.image {
        let api = image.api();
        // SAFETY: the completion is complete, and isn't used after its release.
        aio.result = unsafe {
            let result = (api.rbd_aio_get_return_value)(completion);
            (api.rbd_aio_release)(completion);
            result as i64
        };
    }
    // A panic can't go through librbd; it has printed its message.
    let _ = catch_unwind(AssertUnwindSafe(|| T::finish(aio)));
}

impl Image {
    /// Starts an operation. [`Finish::finish`] gets it back when it is done, however long that takes. Gives it back with the
    /// error if librbd doesn't take it.
    pub fn submit<T: Finish>(
        self: &Arc<Image>,
        mut aio: Box<Aio<T>>,
        op: AioOp,
    ) -> Result<(), (Box<Aio<T>>, io::Error)> {
        let (api, image) = (self.api(), self.handle());
        let is_read = matches!(op, AioOp::Read(_));
        aio.iov.clear();
        if matches!(op, AioOp::Read(_) | AioOp::Write(_)) {
            let Aio { iov, buffers, .. } = &mut *aio;
            iov.extend(buffers.iter().map(|b| b.iovec(0, is_read)));
        }
        aio.result = 0;
        aio.image = Some(Arc::clone(self));
        let (iov, count) = (aio.iov.as_ptr(), aio.iov.len() as i32);
        let argument = Box::into_raw(aio);
        let mut completion = std::ptr::null_mut();
        // SAFETY: the argument is a box that nobody else has until librbd calls `complete` of its type with it.
        let created = unsafe {
            (api.rbd_aio_create_completion)(argument.cast(), complete::<T>, &mut completion)
        };
        if let Err(e) = check(created) {
            // SAFETY: there is no completion, so the box is still ours.
            return Err((unsafe { Box::from_raw(argument) }, e));
        }
        // SAFETY: the image is open, and the operation, which `argument` owns, keeps it so. The vectors and the memory that they name live in it
        // as well, until librbd has called back. They name no Rust reference: peers may change that memory at any time.
        let started = unsafe {
            match op {
                AioOp::Read(at) => (api.rbd_aio_readv)(image, iov, count, at, completion),
                AioOp::Write(at) => (api.rbd_aio_writev)(image, iov, count, at, completion),
                AioOp::Discard(at, len) => (api.rbd_aio_discard)(image, at, len, completion),
                AioOp::WriteZeroes(at, len, thick) => {
                    let flags = if thick { THICK } else { 0 };
                    (api.rbd_aio_write_zeroes)(image, at, len as usize, completion, flags, 0)
                }
                AioOp::Flush => (api.rbd_aio_flush)(image, completion),
            }
        };
        match check(started) {
            Ok(_) => Ok(()),
            Err(e) => {
                // SAFETY: librbd returns an error only before it takes the completion, so it won't call back, and the box is still ours.
                let aio = unsafe {
                    (api.rbd_aio_release)(completion);
                    Box::from_raw(argument)
                };
                Err((aio, e))
            }
        }
    }
}
