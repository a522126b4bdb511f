//! Errors of control paths: a small stable kind, a context, a cause, and what to do.

use std::fmt;
use std::io;

/// Kinds of errors that programs distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The user asked for something that can't be; the text says what to do.
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
    /// The contents of a disk, which a guest may have written, keep it from being used; the text says what to
    /// do.
    Content,
}

/// A cause of any type.
pub type Cause = dyn std::error::Error + Send + Sync;

/// An error that prints as one line: the context, every cause once, and what to do where that isn't part of the context.
///
/// `source` returns the cause although it has been printed: print a chain that may hold an `Error` with [`error_line`].
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    cause: Option<Box<Cause>>,
    advice: Option<String>,
}

impl Error {
    /// An error without a deeper cause.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Error {
        Error {
            kind,
            context: context.into(),
            cause: None,
            advice: None,
        }
    }

    /// An error with its cause. An empty context is left out of the text.
    pub fn caused<E>(kind: ErrorKind, context: impl Into<String>, cause: E) -> Error
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        Error::boxed(kind, context, Box::new(cause))
    }

    /// An error like [`Error::caused`], with a cause that is boxed already.
    pub fn boxed(kind: ErrorKind, context: impl Into<String>, cause: Box<Cause>) -> Error {
        Error {
            cause: Some(match cause.downcast::<rustix::io::Errno>() {
                // Programs can look for one type.
                Ok(errno) => Box::new(io::Error::from(*errno)),
                Err(other) => other,
            }),
            ..Error::new(kind, context)
        }
    }

    /// An error of the operating system. `context` says what was tried.
    pub fn os<E>(context: impl Into<String>, cause: E) -> Error
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        Error::caused(ErrorKind::Os, context, cause)
    }

    /// A mistake of the user.
    pub fn config(context: impl Into<String>) -> Error {
        Error::new(ErrorKind::Config, context)
    }

    /// A mistake (or malice) of the peer.
    pub fn protocol(context: impl Into<String>) -> Error {
        Error::new(ErrorKind::Protocol, context)
    }

    /// The same kind of error, with `place` before its context.
    #[must_use]
    pub fn context(self, place: impl Into<String>) -> Error {
        Error::caused(self.kind, place, self)
    }

    /// The same error, with advice printed after its cause.
    #[must_use]
    pub fn advise(self, advice: impl Into<String>) -> Error {
        Error {
            advice: Some(advice.into()),
            ..self
        }
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The number of the operating system's error, if one is among the causes.
    pub fn raw_os_error(&self) -> Option<i32> {
        let mut cause = std::error::Error::source(self);
        while let Some(at) = cause {
            let number = at.downcast_ref().and_then(io::Error::raw_os_error);
            if number.is_some() {
                return number;
            }
            cause = at.source();
        }
        None
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        if let Some(cause) = &self.cause {
            let between = if self.context.is_empty() { "" } else { ": " };
            write!(f, "{between}{}", error_line(&**cause))?;
        }
        match &self.advice {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_ref().map(|cause| &**cause as _)
    }
}

/// Any error and its causes as one line. A cause that the line already contains isn't printed again: some
/// errors print their cause themselves.
pub fn error_line(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(at) = cause {
        let text = at.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = at.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    /// An error that prints only its own part, as in most libraries.
    #[derive(Debug)]
    struct Outer(io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("outer")
        }
    }

    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    const ENOENT: i32 = 2;

    fn missing() -> io::Error {
        io::Error::from_raw_os_error(ENOENT)
    }

    const MISSING: &str = "No such file or directory (os error 2)";

    #[test]
    fn the_cause_is_kept_and_printed_once() {
        let error = Error::os("opening x", missing());
        assert_eq!(error.to_string(), format!("opening x: {MISSING}"));
        assert_eq!(error_line(&error), error.to_string());
        let cause = error.source().unwrap().downcast_ref::<io::Error>();
        assert_eq!(cause.unwrap().raw_os_error(), Some(ENOENT));
        assert_eq!(error.raw_os_error(), Some(ENOENT));
        let errno = Error::os("opening x", rustix::io::Errno::NOENT);
        assert!(errno.source().unwrap().is::<io::Error>());
        assert_eq!(errno.to_string(), error.to_string());
        assert_eq!(Error::config("x").raw_os_error(), None);
    }

    #[test]
    fn a_context_keeps_the_kind_and_all_causes() {
        let first = Error::caused(ErrorKind::Disconnected, "it is gone", Outer(missing()));
        let error = first.context("ring 1").context("disk a");
        assert_eq!(error.kind(), ErrorKind::Disconnected);
        let line = format!("disk a: ring 1: it is gone: outer: {MISSING}");
        assert_eq!(error.to_string(), line);
        assert_eq!(error_line(&error), line);
        assert_eq!(error.raw_os_error(), Some(ENOENT));
    }

    #[test]
    fn advice_comes_last() {
        let error = Error::os("connecting", missing()).advise("is it running?");
        let line = format!("connecting: {MISSING}; is it running?");
        assert_eq!(error.to_string(), line);
        assert_eq!(error_line(&error), line);
        let error = error.context("disk a");
        assert_eq!(error.to_string(), format!("disk a: {line}"));
        assert_eq!(error_line(&error), format!("disk a: {line}"));
    }

    #[test]
    fn a_chain_of_other_errors_is_one_line() {
        assert_eq!(error_line(&Outer(missing())), format!("outer: {MISSING}"));
        let within = io::Error::other(Error::os("opening x", missing()));
        assert_eq!(error_line(&within), format!("opening x: {MISSING}"));
        let plain = Error::caused(ErrorKind::Config, "", Outer(missing()));
        assert_eq!(plain.to_string(), format!("outer: {MISSING}"));
    }
}
