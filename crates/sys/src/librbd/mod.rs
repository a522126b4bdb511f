//! Ceph's images through librados and librbd, which are loaded when they are used first.
//!
//! - A [`Cluster`] is one connection: a *client instance*, of which any number of images may be opened.
//! - An [`Image`] keeps its cluster connected.
//! - An [`Aio`] is an operation. It owns its buffers and keeps its image open from the submission until librbd has called back, on a
//!   thread of librbd.
//!
//! All calls but [`Image::submit`] and the reading ones may wait for the cluster, without a limit.

mod aio;
mod api;
mod cluster;
mod image;

pub use aio::{Aio, AioOp, Finish};
pub use api::{Missing, before_exit};
pub use cluster::{Cluster, Settings};
pub use image::{Image, features};

use std::ffi::{CString, c_int};
use std::io;

/// True if the libraries are installed.
pub fn is_installed() -> Result<(), Missing> {
    api::api().map(drop)
}

/// A result of the libraries as an error of the system.
fn check(result: c_int) -> io::Result<c_int> {
    match result < 0 {
        true => Err(io::Error::from_raw_os_error(result.saturating_neg())),
        false => Ok(result),
    }
}

fn text(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

fn missing(e: Missing) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, e)
}
