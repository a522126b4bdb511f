//! Messages of the local handshake as bytes; [`super`] has the table.

use crate::xenbus::{Change, MAX_VALUE};

/// Longest message in bytes: the keys of 64 queues of 16 pages take about 36 KiB.
pub const MAX_FRAME: usize = 64 * 1024;
/// The only supported version.
pub const VERSION: u16 = 1;
/// Longest name of a disk or front end, in bytes.
pub const MAX_NAME: usize = 256;

const MAGIC: &[u8; 7] = b"pvblkif";
const REMOVED: u16 = u16::MAX;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// First message of a front end: asks for a disk.
    Hello {
        /// The disk's name.
        disk: String,
        /// The front end's name, for logs.
        front: String,
    },
    /// The back end refuses, with this reason, and closes the socket.
    Error(String),
    /// A transaction on the sender's directory.
    Write(Vec<Change>),
    /// The guest memory; its descriptor comes with the message.
    Memory {
        /// First frame (4096 B) of the grant table.
        table_first: u32,
        /// Frames of the grant table.
        table_frames: u32,
    },
    /// An event channel; two eventfds come with the message.
    Channel {
        /// Port number, not 0.
        port: u32,
    },
}

/// Reason why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The message ends early, is too long, or has invalid text.
    #[error("a malformed message of type {0}; is the peer pvblk?")]
    Malformed(u8),
    /// No such type in this version.
    #[error("a message of unknown type {0}; is the peer pvblk?")]
    Type(u8),
    /// The peer uses another version of this protocol.
    #[error(
        "the peer speaks version {0} of the local handshake, only {VERSION} is spoken here: use the same pvblk on both sides"
    )]
    Version(u16),
}

impl Frame {
    /// Number of descriptors that come with the message.
    pub fn descriptors(&self) -> usize {
        match self {
            Frame::Memory { .. } => 1,
            Frame::Channel { .. } => 2,
            _ => 0,
        }
    }

    /// Encodes the message. `None` if it doesn't fit [`MAX_FRAME`], or a text is too long.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(64);
        match self {
            Frame::Hello { disk, front } => {
                out.push(1);
                out.extend(MAGIC);
                out.extend(VERSION.to_le_bytes());
                put_text(&mut out, disk, MAX_NAME)?;
                put_text(&mut out, front, MAX_NAME)?;
            }
            Frame::Error(text) => {
                out.push(2);
                put_text(&mut out, text, MAX_VALUE)?;
            }
            Frame::Write(changes) => {
                out.push(3);
                out.extend(u16::try_from(changes.len()).ok()?.to_le_bytes());
                for Change { key, value } in changes {
                    put_text(&mut out, key, MAX_VALUE)?;
                    match value {
                        Some(value) => put_text(&mut out, value, MAX_VALUE)?,
                        None => out.extend(REMOVED.to_le_bytes()),
                    }
                }
            }
            Frame::Memory {
                table_first,
                table_frames,
            } => {
                out.push(4);
                out.extend(table_first.to_le_bytes());
                out.extend(table_frames.to_le_bytes());
            }
            Frame::Channel { port } => {
                out.push(5);
                out.extend(port.to_le_bytes());
            }
        }
        (out.len() <= MAX_FRAME).then_some(out)
    }

    /// Decodes a message. Does no I/O, and allocates at most a small multiple of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Frame, FrameError> {
        let (&kind, rest) = bytes.split_first().ok_or(FrameError::Malformed(0))?;
        let mut reader = FrameReader(rest);
        let frame = match kind {
            1 => {
                let version = reader.hello();
                match version {
                    Some(v) if v != VERSION => return Err(FrameError::Version(v)),
                    Some(_) => reader.hello_rest(),
                    None => None,
                }
            }
            2 => reader.text(MAX_VALUE).map(Frame::Error),
            3 => reader.changes().map(Frame::Write),
            4 => reader.memory(),
            5 => reader.u32().map(|port| Frame::Channel { port }),
            other => return Err(FrameError::Type(other)),
        };
        frame
            .filter(|_| reader.0.is_empty())
            .ok_or(FrameError::Malformed(kind))
    }
}

fn put_text(out: &mut Vec<u8>, text: &str, max: usize) -> Option<()> {
    let len = u16::try_from(text.len())
        .ok()
        .filter(|_| text.len() <= max)?;
    out.extend(len.to_le_bytes());
    out.extend(text.as_bytes());
    Some(())
}

struct FrameReader<'a>(&'a [u8]);

impl FrameReader<'_> {
    fn bytes(&mut self, n: usize) -> Option<&[u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes(2)?.try_into().ok().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn text_of(&mut self, len: u16, max: usize) -> Option<String> {
        if usize::from(len) > max {
            return None;
        }
        let bytes = self.bytes(usize::from(len))?;
        std::str::from_utf8(bytes).ok().map(str::to_owned)
    }

    fn text(&mut self, max: usize) -> Option<String> {
        let len = self.u16()?;
        self.text_of(len, max)
    }

    fn hello(&mut self) -> Option<u16> {
        if self.bytes(MAGIC.len())? != MAGIC {
            return None;
        }
        self.u16()
    }

    fn hello_rest(&mut self) -> Option<Frame> {
        Some(Frame::Hello {
            disk: self.text(MAX_NAME)?,
            front: self.text(MAX_NAME)?,
        })
    }

    fn changes(&mut self) -> Option<Vec<Change>> {
        let count = self.u16()?;
        // The peer claims this count: grow only as changes are decoded.
        let mut changes = Vec::new();
        for _ in 0..count {
            let key = self.text(MAX_VALUE)?;
            let value = match self.u16()? {
                REMOVED => None,
                len => Some(self.text_of(len, MAX_VALUE)?),
            };
            changes.push(Change { key, value });
        }
        Some(changes)
    }

    fn memory(&mut self) -> Option<Frame> {
        Some(Frame::Memory {
            table_first: self.u32()?,
            table_frames: self.u32()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Frame> {
        vec![
            Frame::Hello {
                disk: "a".into(),
                front: "lab ü".into(),
            },
            Frame::Error("no".into()),
            Frame::Write(vec![
                Change::set("state", 3),
                Change::set("empty", ""),
                Change::remove("old"),
            ]),
            Frame::Write(vec![]),
            Frame::Memory {
                table_first: 1,
                table_frames: 2,
            },
            Frame::Channel { port: 9 },
        ]
    }

    #[test]
    fn a_message_survives_its_bytes_and_every_cut_or_longer_one_is_refused() {
        for frame in all() {
            let bytes = frame.encode().unwrap();
            assert_eq!(Frame::decode(&bytes), Ok(frame.clone()));
            for n in 0..bytes.len() {
                assert!(Frame::decode(&bytes[..n]).is_err(), "{frame:?} cut at {n}");
            }
            let mut longer = bytes.clone();
            longer.push(0);
            assert!(Frame::decode(&longer).is_err());
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let mut bytes = all()[0].encode().unwrap();
        bytes[8] = 7;
        // Bytes after the version may be anything in another version.
        bytes.truncate(12);
        let e = Frame::decode(&bytes).unwrap_err();
        assert_eq!(e, FrameError::Version(7));
        assert!(e.to_string().contains("version 7"));
    }

    #[test]
    fn noise_never_panics_and_decoded_messages_encode_to_the_same_bytes() {
        let mut seed = 0x2545_f491_4f6c_dd1du64;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let good: Vec<_> = all().iter().map(|f| f.encode().unwrap()).collect();
        for i in 0..200_000 {
            let mut bytes = good[i % good.len()].clone();
            for _ in 0..next() % 4 {
                let at = next() as usize % bytes.len();
                bytes[at] = next() as u8;
            }
            bytes.truncate(next() as usize % (bytes.len() + 8));
            if let Ok(frame) = Frame::decode(&bytes) {
                assert_eq!(frame.encode().unwrap(), bytes);
            }
        }
        assert!(Frame::decode(&[3, 0xff, 0xff]).is_err());
    }

    #[test]
    fn a_message_that_is_too_long_is_not_encoded() {
        let long = "x".repeat(MAX_VALUE + 1);
        assert!(Frame::Error(long.clone()).encode().is_none());
        let value = "x".repeat(MAX_VALUE);
        let many = (0..17).map(|i| Change::set(format!("k{i}"), &value));
        assert!(Frame::Write(many.collect()).encode().is_none());
    }
}
