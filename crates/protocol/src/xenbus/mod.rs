//! The keys of the blkif handshake (xen/include/public/io/{xenbus,blkif}.h): each end owns a directory of short text keys and
//! reads the other's through a [`Store`].
//!
//! Neither end trusts the peer's directory. Every number is parsed strictly and bounded before it is used, and every
//! refusal names the key. The two ends, in `export` and `client`, decide on the order of what they write.

mod front_keys;
pub mod number;
mod offers;
mod properties;
mod state;
mod store;

pub use front_keys::{FrontKeys, QueueKeys, RingSizeKey, parse_front_keys};
pub use offers::{BackendOffers, OfferedLimits, one_page, parse_offers};
pub use properties::{DiskProperties, parse_properties, parse_sectors, publish_properties};
pub use state::XenbusState;
pub use store::{Change, KeyMap, MAX_BYTES, MAX_KEY, MAX_KEYS, MAX_VALUE, Store, check_key};

/// Most queues of one disk, as Linux's usual limit for a driver.
pub const MAX_QUEUES: u32 = 64;
