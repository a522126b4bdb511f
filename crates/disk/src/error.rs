//! Errors of opening, of requests and of the end.

use pvblk_block::{Cause, Status};
use std::{error, fmt, io};

/// Kinds of errors that programs distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The specification, or an option, makes no sense.
    Config,
    /// The server refused while the disk was opened, for example because it has no disk of that name.
    Refused,
    /// The server went away and didn't come back in time. The disk is of no more use: open it again.
    Disconnected,
    /// The server broke its protocol.
    Protocol,
    /// The operating system refused, for example because nobody serves at a socket; [`Error::raw_os_error`] has its number.
    Os,
    /// The medium failed. For a flush: writes since the last one may be lost, and must be written again.
    Io,
    /// The request lies outside the disk, isn't made of whole blocks, or is too long.
    Invalid,
    /// The disk is read-only.
    ReadOnly,
    /// The medium has no space left, or a write begins at the end of the disk.
    NoSpace,
    /// The disk can't do this, for example discard.
    Unsupported,
    /// All queues, all shared memory, or all places of a queue are in use.
    Exhausted,
    /// Queues of the disk are still open.
    Busy,
    /// The contents keep the disk from being used: a file holds an image format, for example.
    Content,
}

/// An error that prints as one line: the reason, and the remedy where there is one.
///
/// [`source`](error::Error::source) leads to the causes. They are part of the line already, so a program that prints the line need not follow them.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    error: pvblk_block::Error,
}

impl Error {
    /// The kind, for programs that act on it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operating system's number of the error, if one is among the causes.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.error.raw_os_error()
    }

    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Error {
        // The inner kind is never looked at.
        Error::of(
            kind,
            pvblk_block::Error::new(pvblk_block::ErrorKind::Config, text),
        )
    }

    fn of(kind: ErrorKind, error: pvblk_block::Error) -> Error {
        Error(Box::new(Inner { kind, error }))
    }

    pub(crate) fn os(text: impl Into<String>, cause: impl Into<Box<Cause>>) -> Error {
        let os = pvblk_block::ErrorKind::Os;
        Error::of(
            ErrorKind::Os,
            pvblk_block::Error::boxed(os, text, cause.into()),
        )
    }

    /// An error of the crates below. A function and not a `From`, which would be part of the interface.
    pub(crate) fn of_device(error: pvblk_block::Error) -> Error {
        let kind = match error.kind() {
            pvblk_block::ErrorKind::Config => ErrorKind::Config,
            pvblk_block::ErrorKind::Protocol => ErrorKind::Protocol,
            pvblk_block::ErrorKind::Os => ErrorKind::Os,
            pvblk_block::ErrorKind::Unsupported => ErrorKind::Unsupported,
            pvblk_block::ErrorKind::Disconnected => ErrorKind::Disconnected,
            pvblk_block::ErrorKind::Exhausted => ErrorKind::Exhausted,
            pvblk_block::ErrorKind::Content => ErrorKind::Content,
        };
        Error::of(kind, error)
    }

    /// An error of opening a disk: no server was there before, so a connection that ends means another thing than later.
    pub(crate) fn of_opening(error: pvblk_block::Error) -> Error {
        let mut error = Error::of_device(error);
        if error.kind() == ErrorKind::Disconnected {
            error.0.kind = match error.raw_os_error() {
                Some(_) => ErrorKind::Os,
                None => ErrorKind::Refused,
            };
        }
        error
    }

    pub(crate) fn advise(self, advice: &str) -> Error {
        let Inner { kind, error } = *self.0;
        Error::of(kind, error.advise(advice))
    }

    /// The error of a request that failed with this status. `what` says which request it was.
    pub(crate) fn of_request(status: Status, is_flush: bool, is_gone: bool, what: &str) -> Error {
        let (kind, why) = match status {
            Status::IoError if is_gone => (
                ErrorKind::Disconnected,
                "the server is gone; open the disk again",
            ),
            Status::IoError if is_flush => (
                ErrorKind::Io,
                "the device failed, or lost its cache; write again what was written since the last flush",
            ),
            // No request that succeeded comes here.
            Status::IoError | Status::Ok => (
                ErrorKind::Io,
                "the device failed; its server's log may say why",
            ),
            Status::Unsupported => (ErrorKind::Unsupported, "the disk can't do this"),
            Status::NoSpace => (
                ErrorKind::NoSpace,
                "the medium under the disk has no space left; make room there",
            ),
            Status::ReadOnly => (ErrorKind::ReadOnly, "the disk is read-only"),
            Status::Invalid => (
                ErrorKind::Invalid,
                "outside the disk, not made of whole blocks, or too long; see Disk::limits",
            ),
        };
        Error::new(kind, format!("{what}: {why}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.error.fmt(f)
    }
}

/// The kind and the line, so that a `main` that returns this error prints a sentence.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.kind, self.0.error)
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.0.error.source()
    }
}

/// The error is kept inside, and found again by [`io::Error::downcast`].
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let of_system = error.raw_os_error().map(io::Error::from_raw_os_error);
        let kind = match error.kind() {
            ErrorKind::Config | ErrorKind::Invalid => io::ErrorKind::InvalidInput,
            ErrorKind::Refused => io::ErrorKind::ConnectionRefused,
            ErrorKind::Disconnected => io::ErrorKind::NotConnected,
            ErrorKind::Protocol | ErrorKind::Content => io::ErrorKind::InvalidData,
            ErrorKind::Os => of_system.map_or(io::ErrorKind::Other, |e| e.kind()),
            ErrorKind::Io => io::ErrorKind::Other,
            ErrorKind::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            ErrorKind::NoSpace => io::ErrorKind::StorageFull,
            ErrorKind::Unsupported => io::ErrorKind::Unsupported,
            ErrorKind::Exhausted | ErrorKind::Busy => io::ErrorKind::ResourceBusy,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use error::Error as _;

    #[test]
    fn causes_and_the_systems_number_are_kept() {
        const ENOENT: i32 = 2;
        let missing = io::Error::from_raw_os_error(ENOENT);
        let error = Error::os("connecting to s", missing).advise("is the server running?");
        let line =
            "connecting to s: No such file or directory (os error 2); is the server running?";
        assert_eq!(error.to_string(), line);
        assert_eq!(format!("{error:?}"), format!("Os: {line}"));
        assert!(error.source().is_some_and(|s| s.is::<io::Error>()));
        assert_eq!(error.raw_os_error(), Some(ENOENT));
        let outer = io::Error::from(error);
        assert_eq!(outer.kind(), io::ErrorKind::NotFound);
        let inner: Error = outer.downcast().expect("the error is inside");
        assert_eq!(inner.to_string(), line);
    }

    #[test]
    fn a_server_that_ends_a_handshake_refuses() {
        use pvblk_block::{Error as E, ErrorKind as K};
        let refused = Error::of_opening(E::new(K::Disconnected, "no disk of this name"));
        assert_eq!(refused.kind(), ErrorKind::Refused);
        assert_eq!(refused.to_string(), "no disk of this name");
        let nobody = io::Error::from_raw_os_error(2);
        let nobody = Error::of_opening(E::caused(K::Disconnected, "connecting", nobody));
        assert_eq!(nobody.kind(), ErrorKind::Os);
        let other = Error::of_opening(E::config("no size"));
        assert_eq!(other.kind(), ErrorKind::Config);
    }

    #[test]
    fn an_io_error_of_a_disk_that_is_gone_says_so() {
        let of = |status, flush, gone| {
            let error = Error::of_request(status, flush, gone, "read of 1 B");
            (error.kind(), error.to_string())
        };
        let (kind, text) = of(Status::IoError, false, true);
        assert_eq!(kind, ErrorKind::Disconnected);
        assert!(text.starts_with("read of 1 B: the server is gone"));
        let (kind, text) = of(Status::IoError, true, false);
        assert_eq!(kind, ErrorKind::Io);
        assert!(text.contains("write again"), "{text}");
        assert_eq!(of(Status::ReadOnly, false, true).0, ErrorKind::ReadOnly);
    }
}
