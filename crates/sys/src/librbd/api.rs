//! The functions of librados and librbd, found at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

/// A handle of the libraries: `rados_t`, `rados_ioctx_t`, `rbd_image_t`, `rbd_completion_t`.
pub(super) type Handle = *mut c_void;

/// Called by a thread of librbd with the completion and its argument.
pub(super) type Complete = unsafe extern "C" fn(Handle, *mut c_void);
/// Called by a thread of librbd with the argument of the watch.
pub(super) type Updated = unsafe extern "C" fn(*mut c_void);
/// Called with offset, length, 1 if there is data, and the argument of the call.
pub(super) type Differs = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// The libraries can't be used.
#[derive(Clone, Debug)]
pub struct Missing(String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// Addresses of the functions that are used, under their own names.
        pub(super) struct Api {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
        }

        impl Api {
            fn find(libraries: &[Library]) -> Result<Api, Missing> {
                Ok(Api {
                    $($name: {
                        let address = symbol(libraries, concat!(stringify!($name), "\0"))?;
                        // SAFETY: the address is that of the function of this name, whose C declaration in
                        // librados.h and librbd.h (16.2) has these types; both keep their ABI under this soname.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $result)?>(address)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados_create: fn(*mut Handle, *const c_char) -> c_int;
    rados_conf_read_file: fn(Handle, *const c_char) -> c_int;
    rados_conf_set: fn(Handle, *const c_char, *const c_char) -> c_int;
    rados_conf_get: fn(Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados_connect: fn(Handle) -> c_int;
    rados_shutdown: fn(Handle);
    rados_ioctx_create: fn(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_destroy: fn(Handle);
    rados_ioctx_set_namespace: fn(Handle, *const c_char);
    rados_set_osdmap_full_try: fn(Handle);
    rbd_open: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close: fn(Handle) -> c_int;
    rbd_get_size: fn(Handle, *mut u64) -> c_int;
    rbd_get_features: fn(Handle, *mut u64) -> c_int;
    rbd_get_flags: fn(Handle, *mut u64) -> c_int;
    rbd_get_stripe_unit: fn(Handle, *mut u64) -> c_int;
    rbd_metadata_get: fn(Handle, *const c_char, *mut c_char, *mut usize) -> c_int;
    rbd_lock_acquire: fn(Handle, c_int) -> c_int;
    rbd_is_exclusive_lock_owner: fn(Handle, *mut c_int) -> c_int;
    rbd_lock_get_owners: fn(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup: fn(*mut *mut c_char, usize);
    rbd_lock_break: fn(Handle, c_int, *const c_char) -> c_int;
    rbd_update_watch: fn(Handle, *mut u64, Updated, *mut c_void) -> c_int;
    rbd_update_unwatch: fn(Handle, u64) -> c_int;
    rbd_diff_iterate2: fn(Handle, *const c_char, u64, u64, u8, u8, Differs, *mut c_void) -> c_int;
    rbd_aio_create_completion: fn(*mut c_void, Complete, *mut Handle) -> c_int;
    rbd_aio_get_return_value: fn(Handle) -> isize;
    rbd_aio_release: fn(Handle);
    rbd_aio_readv: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_writev: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_discard: fn(Handle, u64, u64, Handle) -> c_int;
    rbd_aio_write_zeroes: fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd_aio_flush: fn(Handle, Handle) -> c_int;
}

/// An open library. It is never closed: threads of it run until the process ends.
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr) -> Result<Library, Missing> {
        // SAFETY: the name ends with a zero byte. The library's initializers are those of the distribution's
        // package, which any program that is linked with it runs as well.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match handle.is_null() {
            false => Ok(Library(handle)),
            true => Err(Missing(reason().unwrap_or_else(|| format!("{name:?}")))),
        }
    }
}

/// The reason of the last failure of this thread.
fn reason() -> Option<String> {
    // SAFETY: the result is null or a text that ends with a zero byte, and that stays until this thread's next
    // call of these functions.
    unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

fn symbol(libraries: &[Library], name: &'static str) -> Result<*mut c_void, Missing> {
    let plain = name.trim_end_matches('\0');
    for library in libraries {
        // SAFETY: the library is open, and the name ends with a zero byte.
        let address = unsafe { libc::dlsym(library.0, name.as_ptr().cast()) };
        if !address.is_null() {
            return Ok(address);
        }
    }
    Err(Missing(format!("librbd is too old: it has no {plain}")))
}

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// glibc's; the `libc` crate hasn't declared it.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), arg: *mut c_void) -> c_int;
}

/// The process's exit, whichever way it comes, ends it before destructors that were registered until now. Threads of the libraries run on during an exit, as the one
/// that closes an image that was refused, and would find what their destructors have freed.
fn exit_before_destructors() {
    extern "C" fn end(status: c_int, _: *mut c_void) {
        // SAFETY: it ends the process. Rust's output was written out before `exit` was called.
        unsafe { libc::_exit(status) }
    }
    // SAFETY: the function fits, and takes no argument. If there is no room for it destructors run, as without this.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { on_exit(end, std::ptr::null_mut()) };
}

static API: OnceLock<Api> = OnceLock::new();

/// The last call before an exit. Threads of the libraries, if these are loaded, run on until the process has ended, so destructors of the libraries don't run.
pub fn before_exit() {
    // Once more: some objects of the libraries are made, and their destructors registered, when they are used first.
    if API.get().is_some() {
        exit_before_destructors();
    }
}

/// The functions. The first call loads the libraries; one that fails is tried again by the next.
pub(super) fn api() -> Result<&'static Api, Missing> {
    if let Some(api) = API.get() {
        return Ok(api);
    }
    let libraries = [
        Library::open(c"librados.so.2")?,
        Library::open(c"librbd.so.1")?,
    ];
    let found = Api::find(&libraries)?;
    exit_before_destructors();
    Ok(API.get_or_init(|| found))
}
