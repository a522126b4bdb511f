//! The bytes of vhost-user: headers, requests and their payloads (QEMU, docs/interop/vhost-user.rst). Little-endian, as every
//! host that we run on.

use pvblk_block::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a header.
pub const HEADER: usize = 12;
/// Most bytes of a payload that we take: the configuration space with its header is the longest.
pub const MAX_PAYLOAD: usize = 1024;
/// Bytes of the configuration space that a front end may ask for.
pub const MAX_CONFIG: u32 = 256;
/// Most memory regions in one SET_MEM_TABLE.
pub const MAX_TABLE_REGIONS: usize = 8;

/// Bits of a header's flags.
pub mod flags {
    /// Version, in the two lowest bits; always 1.
    pub const VERSION: u32 = 1;
    /// Mask of the version.
    pub const VERSION_MASK: u32 = 3;
    /// This is an answer.
    pub const REPLY: u32 = 4;
    /// The sender wants an answer even if the request has none by itself.
    pub const NEED_REPLY: u32 = 8;
}

/// Bits of the protocol's own features.
pub mod features {
    /// More than one queue.
    pub const MQ: u64 = 1 << 0;
    /// Every request can be answered.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// A second socket, for requests of the back end.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The configuration space is the back end's.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are told in shared memory.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// Memory comes and goes region by region.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The features of the protocol that our servers offer.
    pub const OFFERED: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}

/// Feature bit of virtio that says that the protocol has features of its own.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// In SET_VRING_KICK, _CALL and _ERR: no descriptor comes along.
pub const VRING_NO_FD: u64 = 1 << 8;
/// The request of the back end which says that the configuration space has changed.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// A message's code in the requests of a front end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Code { $($(#[$doc])* $name = $code,)* }

        impl Code {
            /// All that we know, for tests and fuzzing.
            pub const ALL: &[Code] = &[$(Code::$name,)*];

            /// The code of this number.
            pub fn from_u32(code: u32) -> Option<Code> {
                match code { $($code => Some(Code::$name),)* _ => None }
            }
        }

        impl std::fmt::Display for Code {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Code::$name => $text,)* })
            }
        }
    };
}

codes! {
    /// The front end asks for the features of virtio that are offered.
    GetFeatures = 1, "GET_FEATURES";
    /// The features of virtio that the front end uses.
    SetFeatures = 2, "SET_FEATURES";
    /// A new session.
    SetOwner = 3, "SET_OWNER";
    /// All rings stop; deprecated.
    ResetOwner = 4, "RESET_OWNER";
    /// All memory regions anew.
    SetMemTable = 5, "SET_MEM_TABLE";
    /// A ring's entries.
    SetVringNum = 8, "SET_VRING_NUM";
    /// Where a ring's parts are.
    SetVringAddr = 9, "SET_VRING_ADDR";
    /// From which index on a ring is read.
    SetVringBase = 10, "SET_VRING_BASE";
    /// Stops a ring and asks for its index.
    GetVringBase = 11, "GET_VRING_BASE";
    /// The event that wakes us; starts the ring.
    SetVringKick = 12, "SET_VRING_KICK";
    /// The event that wakes the guest.
    SetVringCall = 13, "SET_VRING_CALL";
    /// The event that tells of a broken ring.
    SetVringErr = 14, "SET_VRING_ERR";
    /// The front end asks for the features of the protocol that are offered.
    GetProtocolFeatures = 15, "GET_PROTOCOL_FEATURES";
    /// The features of the protocol that the front end uses.
    SetProtocolFeatures = 16, "SET_PROTOCOL_FEATURES";
    /// The front end asks for the most rings.
    GetQueueNum = 17, "GET_QUEUE_NUM";
    /// A ring is served, or isn't.
    SetVringEnable = 18, "SET_VRING_ENABLE";
    /// The socket for our requests.
    SetBackendReqFd = 21, "SET_BACKEND_REQ_FD";
    /// Reads the configuration space.
    GetConfig = 24, "GET_CONFIG";
    /// Writes the configuration space.
    SetConfig = 25, "SET_CONFIG";
    /// Asks for memory in which requests in flight are told.
    GetInflightFd = 31, "GET_INFLIGHT_FD";
    /// Hands that memory over.
    SetInflightFd = 32, "SET_INFLIGHT_FD";
    /// The front end asks for the most memory regions.
    GetMaxMemSlots = 36, "GET_MAX_MEM_SLOTS";
    /// One more memory region.
    AddMemReg = 37, "ADD_MEM_REG";
    RemMemReg = 38, "REM_MEM_REG";
}

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    /// The request's number.
    pub request: u32,
    /// [`flags`].
    pub flags: u32,
    /// Bytes that follow.
    pub size: u32,
}

/// A header that is good in form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub code: Code,
    /// The front end wants an answer in any case.
    pub need_reply: bool,
    /// Bytes of its payload.
    pub size: usize,
}

impl Header {
    /// Checks a front end's header.
    pub fn check(&self) -> Result<Asked, Error> {
        let code = Code::from_u32(self.request).ok_or_else(|| {
            Error::protocol(format!(
                "request {} is unknown or was not offered",
                self.request
            ))
        })?;
        let known = flags::VERSION_MASK | flags::REPLY | flags::NEED_REPLY;
        if self.flags & !known != 0 || self.flags & flags::VERSION_MASK != flags::VERSION {
            let bits = self.flags;
            return Err(Error::protocol(format!(
                "{code}: its flags {bits:#x} are not version 1's"
            )));
        }
        if self.flags & flags::REPLY != 0 {
            return Err(Error::protocol(format!(
                "{code}: it is marked as an answer"
            )));
        }
        if self.size as usize > MAX_PAYLOAD {
            let size = self.size;
            return Err(Error::protocol(format!(
                "{code}: its payload has {size} bytes"
            )));
        }
        Ok(Asked {
            code,
            need_reply: self.flags & flags::NEED_REPLY != 0,
            size: self.size as usize,
        })
    }
}

/// A message of ours: header and payload.
pub fn message(request: u32, flag: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        request,
        flags: flags::VERSION | flag,
        size: payload.len() as u32,
    };
    [header.as_bytes(), payload].concat()
}

/// A ring and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VringState {
    /// The ring's number.
    pub index: u32,
    /// Entries, an index, or 0 and 1.
    pub num: u32,
}

/// Where a ring's parts are, in the front end's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VringAddr {
    /// The ring's number.
    pub index: u32,
    /// Bit 0: writes are logged, for migration.
    pub flags: u32,
    pub descriptor: u64,
    pub used: u64,
    pub available: u64,
    /// Where writes to the used ring are logged.
    pub log: u64,
}

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MemoryRegion {
    /// Where the guest has it.
    pub guest_address: u64,
    pub size: u64,
    /// Where the front end has it.
    pub user_address: u64,
    /// Where it begins in its file.
    pub file_offset: u64,
}

/// ADD_MEM_REG and REM_MEM_REG.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SingleRegion {
    pub padding: u64,
    pub region: MemoryRegion,
}

/// The head of GET_CONFIG and SET_CONFIG; the bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ConfigHead {
    pub offset: u32,
    pub size: u32,
    /// 0, or 1 during a migration.
    pub flags: u32,
}

/// GET_INFLIGHT_FD and SET_INFLIGHT_FD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct InflightArea {
    pub size: u64,
    /// Where they begin in the file.
    pub offset: u64,
    pub queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// Makes the structure whole; 0.
    pub padding: [u8; 4],
}

/// Takes a payload of exactly one `T`.
pub fn payload<T: FromBytes + KnownLayout + Immutable>(
    code: Code,
    bytes: &[u8],
) -> Result<T, Error> {
    T::read_from_bytes(bytes).map_err(|_| {
        let (has, takes) = (bytes.len(), size_of::<T>());
        Error::protocol(format!(
            "{code}: its payload has {has} bytes and should have {takes}"
        ))
    })
}

/// The regions of a SET_MEM_TABLE.
pub fn memory_table(bytes: &[u8]) -> Result<Vec<MemoryRegion>, Error> {
    let code = Code::SetMemTable;
    let Some((head, rest)) = bytes.split_at_checked(8) else {
        return Err(Error::protocol(format!("{code}: its payload is cut off")));
    };
    let count = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if count > MAX_TABLE_REGIONS {
        return Err(Error::protocol(format!(
            "{code}: {count} memory regions are too many, at most {MAX_TABLE_REGIONS} are taken"
        )));
    }
    // Some front ends send room for all; what is behind the regions has no meaning.
    let regions = rest
        .get(..count * size_of::<MemoryRegion>())
        .ok_or_else(|| {
            Error::protocol(format!(
                "{code}: its payload has no room for {count} regions"
            ))
        })?;
    regions
        .chunks_exact(size_of::<MemoryRegion>())
        .map(|r| payload(code, r))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_lengths_of_the_specification() {
        assert_eq!(size_of::<Header>(), HEADER);
        assert_eq!(size_of::<VringAddr>(), 40);
        assert_eq!(size_of::<SingleRegion>(), 40);
        assert_eq!(size_of::<InflightArea>(), 24);
        for code in Code::ALL {
            assert_eq!(Code::from_u32(*code as u32), Some(*code));
        }
    }

    #[test]
    fn headers_are_checked() {
        let good = Header {
            request: 5,
            flags: 1 | 8,
            size: 40,
        };
        let asked = good.check().unwrap();
        assert_eq!((asked.code, asked.need_reply), (Code::SetMemTable, true));
        for (bad, why) in [
            (Header { request: 0, ..good }, "unknown"),
            (Header { request: 6, ..good }, "was not offered"),
            (Header { flags: 0, ..good }, "version"),
            (Header { flags: 2, ..good }, "version"),
            (
                Header {
                    flags: 1 | 16,
                    ..good
                },
                "flags",
            ),
            (
                Header {
                    flags: 1 | 4,
                    ..good
                },
                "answer",
            ),
            (
                Header {
                    size: MAX_PAYLOAD as u32 + 1,
                    ..good
                },
                "payload",
            ),
        ] {
            let e = bad.check().unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
        }
    }

    #[test]
    fn a_memory_table_says_how_many_regions_follow() {
        let region = MemoryRegion {
            guest_address: 1,
            size: 2,
            user_address: 3,
            file_offset: 4,
        };
        let table = |count: u32, regions: usize| {
            let mut bytes = [count.to_le_bytes(), [0; 4]].concat();
            for _ in 0..regions {
                bytes.extend_from_slice(region.as_bytes());
            }
            memory_table(&bytes)
        };
        assert_eq!(table(2, 2).unwrap(), [region, region]);
        assert_eq!(table(1, 8).unwrap(), [region]);
        assert!(table(3, 2).unwrap_err().to_string().contains("no room"));
        assert!(table(9, 9).unwrap_err().to_string().contains("too many"));
        assert!(table(u32::MAX, 0).is_err() && memory_table(&[0; 7]).is_err());
    }
}
