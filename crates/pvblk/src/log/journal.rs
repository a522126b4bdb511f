//! The journal of systemd, by its native protocol (systemd's docs/JOURNAL_NATIVE_PROTOCOL.md): one datagram for an entry, with its
//! fields.

use super::record::Record;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use tracing::Level;

/// The journal's socket.
pub(super) const SOCKET: &str = "/run/systemd/journal/socket";
/// Most bytes of an entry's text: a datagram must fit into the socket's buffer.
const LONGEST: usize = 32 << 10;

/// True if standard error is the journal: it says so in `JOURNAL_STREAM`, which children inherit that have another standard error.
pub(super) fn is_standard_error() -> bool {
    let Ok(found) = rustix::fs::fstat(io::stderr()) else {
        return false;
    };
    let stream = std::env::var("JOURNAL_STREAM");
    stream.is_ok_and(|s| s == format!("{}:{}", found.st_dev, found.st_ino))
}

/// An entry with its length before it, as [`Journal`] takes it.
pub(super) fn frame(record: &Record<'_>) -> Vec<u8> {
    let priority = match record.level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        _ => "7",
    };
    let mut entry = vec![0; 4];
    let message = record.message;
    let message = &message[..message.floor_char_boundary(message.len().min(LONGEST))];
    add(&mut entry, "PRIORITY", priority);
    add(&mut entry, "SYSLOG_IDENTIFIER", "pvblk");
    add(&mut entry, "MESSAGE", message);
    if let Some(module) = record.module {
        add(&mut entry, "PVBLK_MODULE", module);
    }
    for (name, value) in record.fields {
        add(
            &mut entry,
            &format!("PVBLK_{}", name.to_ascii_uppercase()),
            value,
        );
    }
    let len = (entry.len() - 4) as u32;
    entry[..4].copy_from_slice(&len.to_le_bytes());
    entry
}

fn add(entry: &mut Vec<u8>, name: &str, value: &str) {
    entry.extend_from_slice(name.as_bytes());
    match value.contains('\n') {
        false => entry.push(b'='),
        true => {
            entry.push(b'\n');
            entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
        }
    }
    entry.extend_from_slice(value.as_bytes());
    entry.push(b'\n');
}

/// A writer of entries, by a socket that is connected to the journal; may wait for the journal. systemd keeps the socket at its place while the journal is
/// started again.
pub(super) struct Journal(pub(super) UnixDatagram);

impl Write for &Journal {
    /// Takes one entry of `frames`, which begins with one.
    fn write(&mut self, frames: &[u8]) -> io::Result<usize> {
        let Some((len, rest)) = frames.split_first_chunk() else {
            return Ok(frames.len());
        };
        let len = (u32::from_le_bytes(*len) as usize).min(rest.len());
        match self.0.send(&rest[..len]) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(e),
            // A journal that is restarted loses the entry, as a full one does.
            _ => Ok(4 + len),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opener::Opener;

    #[test]
    fn entries_are_datagrams_with_fields() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        let journal = Journal(Opener::default().datagrams(&path).unwrap());
        let mut journal = &journal;
        let fields = [("event", "disk-added".to_owned())];
        let record = |message| Record {
            level: Level::ERROR,
            module: Some("m"),
            message,
            fields: &fields,
        };
        let long = "x".repeat(2 * LONGEST);
        let mut frames = frame(&record("one"));
        frames.extend(frame(&record("two\nlines")));
        frames.extend(frame(&record(&long)));
        let mut rest = &frames[..];
        while !rest.is_empty() {
            let n = journal.write(rest).unwrap();
            rest = &rest[n..];
        }
        let mut buffer = vec![0; 1 << 17];
        let mut next = || {
            let n = socket.recv(&mut buffer).unwrap();
            String::from_utf8_lossy(&buffer[..n]).into_owned()
        };
        let ours = "PVBLK_MODULE=m\nPVBLK_EVENT=disk-added\n";
        let head = "PRIORITY=3\nSYSLOG_IDENTIFIER=pvblk\n";
        assert_eq!(next(), format!("{head}MESSAGE=one\n{ours}"));
        let len = "\u{9}\0\0\0\0\0\0\0";
        assert_eq!(next(), format!("{head}MESSAGE\n{len}two\nlines\n{ours}"));
        assert_eq!(next().matches('x').count(), LONGEST);
    }
}
