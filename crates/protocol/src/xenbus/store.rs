//! The store that a handshake reads and writes, and a bounded copy of a peer's directory.

use super::number::quote;
use pvblk_block::Error;
use std::collections::BTreeMap;
use std::fmt::Display;

/// Longest key in bytes: far below XENSTORE_REL_PATH_MAX (2048), far above any key of blkif.
pub const MAX_KEY: usize = 256;
/// Longest value in bytes (`XENSTORE_PAYLOAD_MAX`, xen/include/public/io/xs_wire.h).
pub const MAX_VALUE: usize = 4096;
/// Most keys of one directory: 64 queues of 17 keys, and spare room.
pub const MAX_KEYS: usize = 2048;
/// Most bytes of all keys and values of one directory.
pub const MAX_BYTES: usize = 128 * 1024;

/// One key written or removed in a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Relative name, such as `queue-0/ring-ref3`.
    pub key: String,
    /// The new value; `None` removes the key.
    pub value: Option<String>,
}

impl Change {
    /// A change that writes `value`.
    pub fn set(key: impl Into<String>, value: impl Display) -> Change {
        Change {
            key: key.into(),
            value: Some(value.to_string()),
        }
    }

    /// A change that writes 1 or 0.
    pub fn flag(key: impl Into<String>, on: bool) -> Change {
        Change::set(key, u8::from(on))
    }

    /// A change that removes the key.
    pub fn remove(key: impl Into<String>) -> Change {
        Change {
            key: key.into(),
            value: None,
        }
    }
}

/// Both ends' directories, as one end sees them. Names are relative to a directory.
///
/// A store doesn't report changes: its owner steps the negotiation after every change of the peer's directory (a
/// watch on its `state` is enough).
pub trait Store {
    /// Reads a key of the peer's directory; `None` if it is absent or can't be read.
    fn read(&self, key: &str) -> Option<String>;

    /// Changes keys of our own directory in one transaction: the peer sees all of them or none. Removing an absent
    /// key is not an error.
    fn write(&mut self, changes: &[Change]) -> Result<(), Error>;
}

/// Checks a key's name: 1 to [`MAX_KEY`] bytes of letters, digits and `-/@_` (docs/misc/xenstore.txt), relative.
pub fn check_key(key: &str) -> Result<(), Error> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-/@_".contains(&b);
    if key.len() > MAX_KEY {
        return Err(Error::protocol(format!(
            "a key of {} bytes, the most is {MAX_KEY}",
            key.len()
        )));
    }
    if !key.bytes().all(allowed) || key.split('/').any(str::is_empty) {
        return Err(Error::protocol(format!(
            "{} is not the name of a key",
            quote(key)
        )));
    }
    Ok(())
}

/// A bounded copy of a directory. Writing a key again replaces its value, so repeated writes can't make it grow.
#[derive(Clone, Debug, Default)]
pub struct KeyMap {
    keys: BTreeMap<String, String>,
    bytes: usize,
}

impl KeyMap {
    /// An empty directory.
    pub fn new() -> KeyMap {
        KeyMap::default()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    /// Number of keys, at most [`MAX_KEYS`].
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Total length of keys and values in bytes, at most [`MAX_BYTES`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Applies a peer's transaction. Errors if a name, a value or the whole exceeds its limit; the directory is then
    /// incomplete and its owner ends the connection.
    pub fn apply(&mut self, changes: Vec<Change>) -> Result<(), Error> {
        for Change { key, value } in changes {
            check_key(&key)?;
            let Some(value) = value else {
                if let Some(old) = self.keys.remove(&key) {
                    self.bytes -= key.len() + old.len();
                }
                continue;
            };
            if value.len() > MAX_VALUE {
                return Err(Error::protocol(format!(
                    "{key} holds {} bytes, the most is {MAX_VALUE}",
                    value.len()
                )));
            }
            let name = key.len();
            let added = name + value.len();
            // The old value is removed first, so that the limit applies to the bytes that are kept.
            if let Some(old) = self.keys.remove(&key) {
                self.bytes -= name + old.len();
            }
            if self.keys.len() == MAX_KEYS || self.bytes + added > MAX_BYTES {
                return Err(Error::protocol(format!(
                    "more than {MAX_KEYS} keys or {MAX_BYTES} bytes in one directory"
                )));
            }
            self.keys.insert(key, value);
            self.bytes += added;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in [
            "state",
            "queue-63/ring-ref15",
            "a@b_c",
            &"k".repeat(MAX_KEY),
        ] {
            check_key(good).unwrap();
        }
        for bad in [
            "",
            "/state",
            "state/",
            "a//b",
            "a b",
            "a\0",
            "é",
            "..",
            &"k".repeat(MAX_KEY + 1),
        ] {
            assert!(check_key(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_flood_of_writes_cannot_grow_a_directory() {
        let mut map = KeyMap::new();
        for i in 0..10_000 {
            map.apply(vec![Change::set("state", i % 10)]).unwrap();
        }
        assert_eq!((map.len(), map.bytes()), (1, 6));
        let mut n = 0;
        while map.apply(vec![Change::set(format!("k{n}"), "v")]).is_ok() {
            n += 1;
        }
        assert_eq!(map.len(), MAX_KEYS);
        let mut map = KeyMap::new();
        let big = "x".repeat(MAX_VALUE);
        let mut n = 0;
        while map.apply(vec![Change::set(format!("k{n}"), &big)]).is_ok() {
            n += 1;
        }
        assert!(map.bytes() <= MAX_BYTES && n == MAX_BYTES / (MAX_VALUE + 3));
        map.apply((0..n).map(|i| Change::remove(format!("k{i}"))).collect())
            .unwrap();
        assert_eq!((map.len(), map.bytes()), (0, 0));
        assert!(
            map.apply(vec![Change::set("k", "x".repeat(MAX_VALUE + 1))])
                .is_err()
        );
    }
}
