//! Disks of pvblk servers, of NBD and vhost-user servers, and files, for programs that read and write them.
//!
//! There are two ways to use a [`Disk`]:
//! - its blocking calls, from any number of threads: [`read_at`](Disk::read_at), [`write_at`](Disk::write_at), [`flush`](Disk::flush),
//!   [`discard`](Disk::discard), [`write_zeroes`](Disk::write_zeroes), and a [`Cursor`] for code that takes `std::io`'s traits;
//! - a [`Queue`] for each thread that wants the disk's full speed: push requests, submit them as one batch, poll completions, and sleep on a descriptor. It
//!   has no runtime and no callbacks, and buffers are in the memory that is shared with the server, where there is one.
//!
//! ```
//! # mod support { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/mod.rs")); }
//! # let server = support::Server::start("mem:64M");
//! # let socket = server.socket();
//! use pvblk_disk::Disk;
//!
//! // The server was started by `pvblk serve --disk vm1=… --local unix:SOCKET`.
//! let disk = Disk::connect(socket, "vm1")?;
//! disk.write_at(&[7; 4096], 0)?;
//! disk.flush()?;
//! let mut bytes = [0; 10];
//! disk.read_at(&mut bytes, 4090)?;
//! assert_eq!(bytes, [7, 7, 7, 7, 7, 7, 0, 0, 0, 0]);
//! disk.close()?;
//! # Ok::<(), pvblk_disk::Error>(())
//! ```
//!
//! # Writes and flushes
//!
//! A write that completed is seen by all reads after it, and is stable after a flush that was submitted when the write had completed. A flush covers the writes of all queues and
//! threads. [`Request::fua`] makes one write stable by itself.
//!
//! # A server that goes away
//!
//! While the server of a disk is away its requests wait, those in flight and new ones, up to [`Options::patience`]. When it is back they go on where they
//! were, and callers see no more than a long request. Three things can end otherwise:
//! - The server doesn't come back in time, or the next one has another disk under the name (too small, read-only, or a `mem:` that lost its contents): every
//!   request fails with [`ErrorKind::Disconnected`], now and later. Open the disk again.
//! - The machine under the server failed, and with it writes that no flush covered: the next flush fails with [`ErrorKind::Io`], and those writes must
//!   be made again.
//! - The connection is to a vhost-user server, or patience is `None`: requests fail at once.
//!
//! [`Queue::wait`] has a limit of time of its own; requests stay in flight after it.
//!
//! # Threads
//!
//! A disk of a server has one thread of the library, which follows the server's control connection and connects again; volumes in this process have those that
//! `ARCHITECTURE.md` lists. No thread touches requests that a queue has. Warnings go to [`tracing`](https://docs.rs/tracing), if the program listens.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod buffer;
mod cursor;
mod disk;
mod error;
mod lanes;
mod limits;
mod options;
mod queue;
mod request;
mod shared;

pub use buffer::Buffer;
pub use cursor::Cursor;
pub use disk::Disk;
pub use error::{Error, ErrorKind};
pub use limits::Limits;
pub use options::Options;
pub use queue::{Queue, Readiness};
pub use request::{Completion, Full, Request};

// Threads may share a disk, and hand all else to one another.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    const fn handed<T: Send>() {}
    shared::<Disk>();
    shared::<Error>();
    shared::<Options>();
    handed::<Queue>();
    handed::<Buffer>();
    handed::<Request>();
    handed::<Completion>();
};
