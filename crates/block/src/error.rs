//! Errors of control paths: a small stable kind, a context, a source.

use std::fmt;

/// What went wrong, as far as a program has to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// What the user asked for makes no sense; the text says what to do.
    Config,
    /// The peer broke its protocol.
    Protocol,
    /// The operating system refused.
    Os,
    /// The device can't do that.
    Unsupported,
    /// The peer is gone.
    Disconnected,
    /// A bound was reached.
    Exhausted,
    /// What a disk holds, which a guest may have written, keeps it from being used; the text says what to do.
    Content,
}

/// An error that prints as one line: what failed, why, and where it helps what to do.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error without a deeper cause.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Error {
        Error {
            kind,
            context: context.into(),
            source: None,
        }
    }

    /// An error of the operating system, with what was tried.
    pub fn os(
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        Error {
            kind: ErrorKind::Os,
            context: context.into(),
            source: Some(source.into()),
        }
    }

    /// A mistake of the user.
    pub fn config(context: impl Into<String>) -> Error {
        Error::new(ErrorKind::Config, context)
    }

    /// A mistake (or malice) of the peer.
    pub fn protocol(context: impl Into<String>) -> Error {
        Error::new(ErrorKind::Protocol, context)
    }

    /// The stable kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        // The cause is printed here, once; `source` is for programs.
        if let Some(s) = &self.source {
            write!(f, ": {s}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
