//! An open image.

use super::api::{Api, Handle};
use super::cluster::{Cluster, Pool};
use super::{check, text};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Features of images, as librbd numbers them.
pub mod features {
    /// One client at a time may write.
    pub const EXCLUSIVE_LOCK: u64 = 1 << 2;
    /// The image knows which of its objects differ from a snapshot's without asking for them.
    pub const FAST_DIFF: u64 = 1 << 4;
}

/// A flag of `rbd_get_flags`.
const FAST_DIFF_INVALID: u64 = 1 << 1;
/// `RBD_LOCK_MODE_EXCLUSIVE`
const EXCLUSIVE: c_int = 0;

type OnUpdate = Box<dyn Fn() + Send + Sync>;

/// An open image. A drop closes it on a thread of its own, since that waits for the cluster; see [`Image::close`].
pub struct Image {
    open: Option<Open>,
    /// Where somebody waits for its end.
    ended: Mutex<Option<Sender<io::Result<()>>>>,
}

/// The handle and all that it needs.
pub(super) struct Open {
    handle: Handle,
    /// Dropped when the image is closed, and never without that: its cluster must not go from under an open image.
    pool: ManuallyDrop<Pool>,
    watch: Option<Watch>,
}

struct Watch {
    number: u64,
    /// Lives until the watch has ended.
    on_update: *mut OnUpdate,
}

// SAFETY: librbd's images may be used by all threads at once; the watch's function is `Send` and `Sync`.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

unsafe extern "C" fn updated(argument: *mut c_void) {
    // SAFETY: the argument is the function of the watch, which lives until the watch has ended, and is only read.
    let on_update = unsafe { &*argument.cast::<OnUpdate>() };
    // A panic can't go through librbd; it has printed its message.
    let _ = catch_unwind(AssertUnwindSafe(on_update));
}

unsafe extern "C" fn differs(
    offset: u64,
    len: usize,
    exists: c_int,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the argument is the closure that `Image::data` has on its stack while it calls librbd.
    let found = unsafe { &mut *argument.cast::<&mut (dyn FnMut(u64, u64) + Send)>() };
    if exists == 0 {
        return 0;
    }
    match catch_unwind(AssertUnwindSafe(|| found(offset, len as u64))) {
        Ok(()) => 0,
        Err(_) => -libc::EIO,
    }
}

impl Image {
    /// Opens an image, or a snapshot of it. Read-only images have no watch in the cluster, and know nothing of changes. An error comes with
    /// the step that failed.
    pub fn open(
        cluster: &Arc<Cluster>,
        (pool, namespace): (&str, &str),
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
    ) -> Result<Image, (&'static str, io::Error)> {
        let pool = cluster.pool(pool, namespace);
        let pool = pool.map_err(|e| ("opening the pool", e))?;
        let image = Image::open_in(pool, name, snapshot, read_only);
        image.map_err(|e| ("opening the image", e))
    }

    fn open_in(
        pool: Pool,
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
    ) -> io::Result<Image> {
        let (name, snapshot) = (text(name)?, snapshot.map(text).transpose()?);
        let open = match read_only {
            true => pool.cluster.api.rbd_open_read_only,
            false => pool.cluster.api.rbd_open,
        };
        let mut handle = null_mut();
        let snapshot = snapshot.as_ref().map_or(null(), |s| s.as_ptr());
        // SAFETY: the pool is open, the names end with a zero byte (or are null: no snapshot), and the place for the handle is ours.
        check(unsafe { open(pool.handle, name.as_ptr(), &mut handle, snapshot) })?;
        Ok(Image {
            open: Some(Open {
                handle,
                pool: ManuallyDrop::new(pool),
                watch: None,
            }),
            ended: Mutex::new(None),
        })
    }

    fn parts(&self) -> (&'static Api, Handle) {
        match &self.open {
            Some(open) => (open.pool.cluster.api, open.handle),
            None => unreachable!("an image is closed by its owner only"),
        }
    }

    pub(super) fn api(&self) -> &'static Api {
        self.parts().0
    }

    pub(super) fn handle(&self) -> Handle {
        self.parts().1
    }

    /// The connection that it was opened on.
    pub fn cluster(&self) -> &Arc<Cluster> {
        match &self.open {
            Some(open) => &open.pool.cluster,
            None => unreachable!("an image is closed by its owner only"),
        }
    }

    fn number(&self, ask: unsafe extern "C" fn(Handle, *mut u64) -> c_int) -> io::Result<u64> {
        let mut number = 0;
        // SAFETY: the image is open, and the function stores one number.
        check(unsafe { ask(self.handle(), &mut number) })?;
        Ok(number)
    }

    /// Size in bytes.
    pub fn size(&self) -> io::Result<u64> {
        self.number(self.api().rbd_get_size)
    }

    /// Bits of [`features`].
    pub fn features(&self) -> io::Result<u64> {
        self.number(self.api().rbd_get_features)
    }

    /// Bytes of an object, or of the part of it that is addressed at once.
    pub fn stripe_unit(&self) -> io::Result<u64> {
        self.number(self.api().rbd_get_stripe_unit)
    }

    /// True if [`Image::data`] asks for no object.
    pub fn has_fast_diff(&self) -> io::Result<bool> {
        let flags = self.number(self.api().rbd_get_flags)?;
        Ok(self.features()? & features::FAST_DIFF != 0 && flags & FAST_DIFF_INVALID == 0)
    }

    /// A value of the image's metadata, if it has one of this name that is shorter than 64 bytes.
    pub fn metadata(&self, name: &str) -> io::Result<Option<String>> {
        let name = text(name)?;
        let mut bytes = [0u8; 64];
        let mut len = bytes.len();
        // SAFETY: the name ends with a zero byte, and the function writes at most `len` bytes.
        let got = unsafe {
            (self.api().rbd_metadata_get)(
                self.handle(),
                name.as_ptr(),
                bytes.as_mut_ptr().cast(),
                &mut len,
            )
        };
        match got {
            e if e == -libc::ENOENT || e == -libc::ERANGE => Ok(None),
            other => {
                check(other)?;
                let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
                Ok(Some(String::from_utf8_lossy(&bytes[..end]).into_owned()))
            }
        }
    }

    /// Takes the exclusive lock and keeps it: other clients' requests for it are refused. Waits for the lock of a client that
    /// is dead, which is blocked first; EROFS: a living client has it.
    pub fn acquire_lock(&self) -> io::Result<()> {
        // SAFETY: the image is open.
        check(unsafe { (self.api().rbd_lock_acquire)(self.handle(), EXCLUSIVE) }).map(drop)
    }

    /// True if this image has the lock, as the cluster knows it. ESHUTDOWN: the client instance is blocked.
    pub fn owns_lock(&self) -> io::Result<bool> {
        let mut owns = 0;
        // SAFETY: the image is open, and the function stores one number.
        check(unsafe { (self.api().rbd_is_exclusive_lock_owner)(self.handle(), &mut owns) })?;
        Ok(owns != 0)
    }

    /// Address of the client instance that has the lock.
    pub fn lock_owner(&self) -> io::Result<Option<String>> {
        let mut mode = 0;
        let mut owners: [*mut c_char; 8] = [null_mut(); 8];
        let mut count = owners.len();
        // SAFETY: the image is open; the function stores at most `count` pointers and their number.
        let got = unsafe {
            (self.api().rbd_lock_get_owners)(
                self.handle(),
                &mut mode,
                owners.as_mut_ptr(),
                &mut count,
            )
        };
        if got == -libc::ENOENT {
            return Ok(None);
        }
        check(got)?;
        let count = count.min(owners.len());
        // SAFETY: the function has succeeded: the first `count` pointers are texts that end with a zero byte.
        let first = (count > 0).then(|| unsafe { CStr::from_ptr(owners[0]) });
        let first = first.map(|text| text.to_string_lossy().into_owned());
        // SAFETY: the pointers are those of the function above, and are used no more.
        unsafe { (self.api().rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(first)
    }

    /// Breaks the lock of `owner`, and blocks that client instance first if the configuration says so. EBUSY: another one has it; ENOENT: none has.
    pub fn break_lock(&self, owner: &str) -> io::Result<()> {
        let owner = text(owner)?;
        // SAFETY: the image is open, and the text ends with a zero byte.
        check(unsafe { (self.api().rbd_lock_break)(self.handle(), EXCLUSIVE, owner.as_ptr()) })
            .map(drop)
    }

    /// Calls `on_update` on a thread of librbd when the image's header changed: its size, its snapshots. It must not wait.
    /// One watch is enough; further ones are ignored.
    pub fn watch(&mut self, on_update: impl Fn() + Send + Sync + 'static) -> io::Result<()> {
        let (api, handle) = self.parts();
        let Some(open) = self.open.as_mut().filter(|open| open.watch.is_none()) else {
            return Ok(());
        };
        let on_update: *mut OnUpdate = Box::into_raw(Box::new(Box::new(on_update)));
        let mut number = 0;
        // SAFETY: the image is open, the number is ours, and the argument lives until the watch has ended.
        let got = unsafe { (api.rbd_update_watch)(handle, &mut number, updated, on_update.cast()) };
        if let Err(e) = check(got) {
            // SAFETY: there is no watch, so nobody else has the box.
            drop(unsafe { Box::from_raw(on_update) });
            return Err(e);
        }
        open.watch = Some(Watch { number, on_update });
        Ok(())
    }

    /// Calls `found` for the parts of the image that hold data, with offset and length in bytes, by whole objects. The calls
    /// come from any thread, one at a time.
    pub fn data(&self, mut found: impl FnMut(u64, u64) + Send) -> io::Result<()> {
        let len = self.size()?;
        let mut found: &mut (dyn FnMut(u64, u64) + Send) = &mut found;
        let argument: *mut &mut (dyn FnMut(u64, u64) + Send) = &mut found;
        // SAFETY: the image is open; no snapshot is named; the closure outlives the call, after which librbd doesn't call it any more.
        check(unsafe {
            (self.api().rbd_diff_iterate2)(
                self.handle(),
                null(),
                0,
                len,
                1,
                1,
                differs,
                argument.cast(),
            )
        })
        .map(drop)
    }

    /// Closes the image, which gives its lock back, when its last user is done with it, and waits for that so long. ETIMEDOUT: it is closed later.
    pub fn close(self: Arc<Image>, patience: Duration) -> io::Result<()> {
        let (tell, told) = channel();
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(tell);
        drop(self);
        told.recv_timeout(patience).unwrap_or_else(|_| {
            // Without a thread nobody tells.
            Err(io::Error::from_raw_os_error(libc::ETIMEDOUT))
        })
    }
}

impl Open {
    fn close(mut self) -> io::Result<()> {
        let api = self.pool.cluster.api;
        if let Some(watch) = self.watch.take() {
            // SAFETY: the watch is one of this open image.
            let ended = unsafe { (api.rbd_update_unwatch)(self.handle, watch.number) };
            if ended >= 0 {
                // SAFETY: librbd has waited for calls that ran, and makes no more. Otherwise the box stays for ever.
                drop(unsafe { Box::from_raw(watch.on_update) });
            }
        }
        // SAFETY: each operation in flight holds the image, so there is none, and nobody else uses the handle.
        let closed = check(unsafe { (api.rbd_close)(self.handle) }).map(drop);
        // SAFETY: the image is closed, and the pool isn't used any more.
        unsafe { ManuallyDrop::drop(&mut self.pool) };
        closed
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else {
            return;
        };
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ended = ended.take();
        let close = move || {
            let closed = open.close();
            if let Some(ended) = ended {
                // Nobody may wait any more.
                let _ = ended.send(closed);
            }
        };
        // Without a thread the image stays open until the process ends: here it can't be waited for.
        let _ = std::thread::Builder::new()
            .name("pvblk-rbd-close".into())
            .stack_size(256 * 1024)
            .spawn(close);
    }
}
