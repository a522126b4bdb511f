//! One connection to a cluster.

use super::api::{Api, Handle, api};
use super::{check, missing, text};
use std::io;
use std::path::Path;
use std::ptr::null;
use std::sync::Arc;

/// The configuration of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// The configuration file; `None`: where librados looks for it.
    pub conf: Option<&'a Path>,
    /// The name of the user without `client.`; `None`: `admin`.
    pub id: Option<&'a str>,
    /// Values that count more than those of the file. One that the library doesn't know is left out.
    pub values: &'a [(&'a str, &'a str)],
}

/// A connection to a cluster: a client instance. It ends when this and all of its images are dropped, which waits for the cluster.
pub struct Cluster {
    pub(super) api: &'static Api,
    handle: Handle,
}

// SAFETY: librados' handles of clusters may be used by all threads at once (librados.h: "thread safe").
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects. An error comes with the step that failed. One that holds a [`super::Missing`] says that the libraries aren't there.
    pub fn connect(settings: &Settings<'_>) -> Result<Arc<Cluster>, (&'static str, io::Error)> {
        let api = api().map_err(|e| ("loading librbd", missing(e)))?;
        let mut step = "reading the configuration";
        Cluster::try_connect(api, settings, &mut step).map_err(|e| (step, e))
    }

    fn try_connect(
        api: &'static Api,
        settings: &Settings<'_>,
        step: &mut &'static str,
    ) -> io::Result<Arc<Cluster>> {
        let id = settings.id.map(text).transpose()?;
        let conf = settings
            .conf
            .map(|path| text(&path.to_string_lossy()))
            .transpose()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place for the handle is ours, and the name ends with a zero byte or is null, which is "admin".
        check(unsafe {
            (api.rados_create)(&mut handle, id.as_ref().map_or(null(), |s| s.as_ptr()))
        })?;
        // From here on a drop ends the handle.
        let cluster = Cluster { api, handle };
        // SAFETY: the handle is open and not connected, and the path ends with a zero byte or is null, which stands for the usual places.
        check(unsafe {
            (api.rados_conf_read_file)(handle, conf.as_ref().map_or(null(), |s| s.as_ptr()))
        })?;
        for (name, value) in settings.values {
            let (name, value) = (text(name)?, text(value)?);
            // SAFETY: as above; both texts end with a zero byte and are copied.
            let set = unsafe { (api.rados_conf_set)(handle, name.as_ptr(), value.as_ptr()) };
            if set != -libc::ENOENT {
                check(set)?;
            }
        }
        *step = "connecting";
        // SAFETY: the handle is open and not connected.
        check(unsafe { (api.rados_connect)(handle) })?;
        Ok(Arc::new(cluster))
    }

    /// A value of the configuration that is in force.
    pub fn value(&self, name: &str) -> io::Result<String> {
        let name = text(name)?;
        let mut bytes = [0u8; 256];
        // SAFETY: the name ends with a zero byte, and the function writes at most the bytes of this length.
        check(unsafe {
            (self.api.rados_conf_get)(
                self.handle,
                name.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
            )
        })?;
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// A pool of the cluster.
    pub(super) fn pool(self: &Arc<Cluster>, name: &str, namespace: &str) -> io::Result<Pool> {
        let (name, namespace) = (text(name)?, text(namespace)?);
        let mut handle = std::ptr::null_mut();
        // SAFETY: the cluster is connected, the name ends with a zero byte, and the place for the handle is ours.
        check(unsafe { (self.api.rados_ioctx_create)(self.handle, name.as_ptr(), &mut handle) })?;
        let pool = Pool {
            cluster: Arc::clone(self),
            handle,
        };
        // SAFETY: the handle is open, and the name ends with a zero byte and is copied.
        unsafe { (self.api.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        // Requests to a full pool fail instead of waiting for room.
        // SAFETY: the handle is open.
        unsafe { (self.api.rados_set_osdmap_full_try)(handle) };
        Ok(pool)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: each pool and image holds the cluster, so none is open. A handle that isn't connected may be ended too.
        unsafe { (self.api.rados_shutdown)(self.handle) };
    }
}

/// A pool and a namespace in it.
pub(super) struct Pool {
    pub(super) cluster: Arc<Cluster>,
    pub(super) handle: Handle,
}

// SAFETY: it is used to open an image and closed after that, by one thread at a time.
unsafe impl Send for Pool {}
// SAFETY: as above: nothing but its opening and its end use the handle.
unsafe impl Sync for Pool {}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the image that was opened with it is closed: it owns the pool.
        unsafe { (self.cluster.api.rados_ioctx_destroy)(self.handle) };
    }
}
