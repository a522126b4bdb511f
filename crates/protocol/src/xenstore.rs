//! xenstore's messages (xen/include/public/io/xs_wire.h, docs/misc/xenstore.txt).
//!
//! A message is a header of four 32-bit numbers (operation, request, transaction, length; the machine's byte order)
//! and up to 4096 bytes, mostly texts that end with a zero byte.

use pvblk_block::Error;

/// Bytes of a header.
pub const HEAD: usize = 16;
/// Most bytes that follow a header (`XENSTORE_PAYLOAD_MAX`).
pub const MAX_PAYLOAD: usize = 4096;

/// Type of a request or reply (`enum xsd_sockmsg_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Lists the names in a directory.
    Directory = 1,
    /// Reads a node's value.
    Read = 2,
    /// Reports changes at and below a path from now on.
    Watch = 4,
    /// Ends a watch.
    Unwatch = 5,
    /// Starts a transaction: its requests take effect together, or not at all.
    TransactionStart = 6,
    /// Commits or aborts a transaction.
    TransactionEnd = 7,
    /// Sets a value; creates missing nodes of the path.
    Write = 11,
    /// Creates a node if it doesn't exist.
    Mkdir = 12,
    /// Removes a node and all nodes below it.
    Remove = 13,
    /// Sets a node's permissions.
    SetPermissions = 14,
    /// From the daemon, at any time: a change at a watched path.
    WatchEvent = 15,
    /// Reply: the request failed.
    Error = 16,
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// An [`Operation`], or an unknown number.
    pub operation: u32,
    /// Number that the reply repeats.
    pub request: u32,
    /// Transaction; 0 if the request is in none.
    pub transaction: u32,
    /// Length of the payload in bytes, at most [`MAX_PAYLOAD`].
    pub len: u32,
}

impl Head {
    pub fn encode(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        let words = [self.operation, self.request, self.transaction, self.len];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes the first [`HEAD`] bytes of a message. Errors if the payload would be too long.
    pub fn decode(bytes: &[u8; HEAD]) -> Result<Head, Error> {
        let word =
            |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let head = Head {
            operation: word(0),
            request: word(4),
            transaction: word(8),
            len: word(12),
        };
        if head.len as usize > MAX_PAYLOAD {
            return Err(Error::protocol(format!(
                "xenstore: a message of {} bytes, the most is {MAX_PAYLOAD}",
                head.len
            )));
        }
        Ok(head)
    }
}

/// A whole message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub head: Head,
    pub payload: Vec<u8>,
}

/// Takes the first message off `input`, if it is complete.
pub fn take_message(input: &mut Vec<u8>) -> Result<Option<Message>, Error> {
    let Some(head) = input.first_chunk::<HEAD>() else {
        return Ok(None);
    };
    let head = Head::decode(head)?;
    let end = HEAD + head.len as usize;
    if input.len() < end {
        return Ok(None);
    }
    let payload = input[HEAD..end].to_vec();
    input.drain(..end);
    Ok(Some(Message { head, payload }))
}

/// Splits a payload into texts; each ends with a zero byte, which the last may lack. Invalid UTF-8 becomes U+FFFD.
pub fn texts(payload: &[u8]) -> Vec<String> {
    let payload = payload.strip_suffix(&[0]).unwrap_or(payload);
    if payload.is_empty() {
        return Vec::new();
    }
    payload
        .split(|&b| b == 0)
        .map(|text| String::from_utf8_lossy(text).into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_off_one_by_one_and_only_whole() {
        let head = |len| Head {
            operation: Operation::Read as u32,
            request: 7,
            transaction: 3,
            len,
        };
        let mut bytes = head(3).encode().to_vec();
        bytes.extend(b"abc");
        bytes.extend(head(0).encode());
        for n in 0..bytes.len() - HEAD {
            let mut part = bytes[..n].to_vec();
            assert_eq!(take_message(&mut part).unwrap(), None, "{n}");
            assert_eq!(part.len(), n);
        }
        let first = take_message(&mut bytes).unwrap().unwrap();
        assert_eq!((first.head, &first.payload[..]), (head(3), &b"abc"[..]));
        let second = take_message(&mut bytes).unwrap().unwrap();
        assert_eq!((second.head, second.payload.len()), (head(0), 0));
        assert!(bytes.is_empty());
        let mut long = head(MAX_PAYLOAD as u32 + 1).encode().to_vec();
        assert!(take_message(&mut long).is_err());
    }

    #[test]
    fn texts_end_with_zeros() {
        assert_eq!(texts(b""), Vec::<String>::new());
        assert_eq!(texts(b"a\0"), ["a"]);
        assert_eq!(texts(b"a\0bc"), ["a", "bc"]);
        assert_eq!(texts(b"\0\0"), ["", ""]);
    }
}
