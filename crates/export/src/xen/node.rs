//! Paths of a disk's two directories in xenstore, and names of devices.

use pvblk_block::Error;

/// The kind of our back ends. Only pvblk uses it, so no driver of the kernel takes our directories for its own.
pub const KIND: &str = "pvblk";

/// First reserved domain number; no domain has it or a higher one (`DOMID_FIRST_RESERVED`).
const FIRST_RESERVED: u16 = 0x7ff0;

/// One virtual block device (vbd) of one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// The guest's domain, 0 to 32751.
    pub domid: u16,
    /// The device's number in the guest, such as 51712 for xvda.
    pub devid: u32,
}

impl Node {
    /// Parses two components of a path.
    pub fn parse(domid: &str, devid: &str) -> Option<Node> {
        let digits = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
        if !digits(domid) || !digits(devid) {
            return None;
        }
        let domid = domid.parse().ok().filter(|&d: &u16| d < FIRST_RESERVED)?;
        let devid = devid.parse().ok()?;
        Some(Node { domid, devid })
    }

    /// Path of the back end's directory, in domain `own`.
    pub fn back_end(self, own: u16) -> String {
        format!("{}/{}", self.guests_back_ends(own), self.devid)
    }

    /// Path of the directory of all back ends of this guest in domain `own`.
    pub fn guests_back_ends(self, own: u16) -> String {
        format!("{}/{}", back_ends(own), self.domid)
    }

    /// Path of the front end's directory.
    pub fn front_end(self) -> String {
        let Node { domid, devid } = self;
        format!("/local/domain/{domid}/device/vbd/{devid}")
    }

    /// Path of the front end's `state`.
    pub fn front_state(self) -> String {
        format!("{}/state", self.front_end())
    }
}

impl std::fmt::Display for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "domain {}, {}", self.domid, device_name(self.devid))
    }
}

/// Path of the directory of all back ends of our kind in a domain.
pub fn back_ends(own: u16) -> String {
    format!("/local/domain/{own}/backend/{KIND}")
}

/// Xen's major number, 202, with 16 minors for each disk; then the extended numbers, with 256
/// (docs/man/xen-vbd-interface.7).
const MAJOR: u32 = 202;
const EXTENDED: u32 = 1 << 28;

/// Parses a device: `xvda` to `xvdzz` (whole disks), or a number.
pub fn parse_device(name: &str) -> Result<u32, Error> {
    let refuse = || {
        Error::config(format!(
            "{} is not a device; give xvda, xvdb and so on, or a number",
            pvblk_protocol::xenbus::number::quote(name)
        ))
    };
    if let Some(letters) = name.strip_prefix("xvd") {
        let valid =
            (1..=2).contains(&letters.len()) && letters.bytes().all(|b| b.is_ascii_lowercase());
        if !valid {
            return Err(refuse());
        }
        let fold = |n: u32, b: u8| n * 26 + u32::from(b - b'a') + 1;
        let disk = letters.bytes().fold(0, fold) - 1;
        return Ok(match disk {
            0..16 => MAJOR << 8 | disk << 4,
            _ => EXTENDED | disk << 8,
        });
    }
    let digits = !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
    let number = digits.then(|| name.parse().ok()).flatten();
    number.filter(|&n: &u32| n < 1 << 29).ok_or_else(refuse)
}

/// Name of a device; the number itself if it isn't that of an `xvd` disk.
pub fn device_name(devid: u32) -> String {
    let disk = match devid {
        d if d >> 8 == MAJOR && d & 15 == 0 => (d & 0xff) >> 4,
        d if d & EXTENDED != 0 && d & 0xff == 0 => (d & !EXTENDED) >> 8,
        d => return d.to_string(),
    };
    let letter = |n: u32| char::from(b'a' + (n % 26) as u8);
    match disk {
        0..26 => format!("xvd{}", letter(disk)),
        26..702 => format!("xvd{}{}", letter(disk / 26 - 1), letter(disk)),
        _ => devid.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names_and_numbers() {
        for (name, devid) in [
            ("xvda", 51712),
            ("xvdb", 51728),
            ("xvdp", 51952),
            ("xvdq", EXTENDED | 16 << 8),
            ("xvdz", EXTENDED | 25 << 8),
            ("xvdaa", EXTENDED | 26 << 8),
            ("xvdzz", EXTENDED | 701 << 8),
        ] {
            assert_eq!(parse_device(name).unwrap(), devid, "{name}");
            assert_eq!(device_name(devid), name);
        }
        assert_eq!(parse_device("768").unwrap(), 768);
        assert_eq!(device_name(768), "768");
        for bad in [
            "",
            "xvd",
            "xvdA",
            "xvda1",
            "xvdaaa",
            "hda",
            "-1",
            "536870912",
            "99999999999",
        ] {
            assert!(parse_device(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_numbers_are_nodes() {
        let node = Node::parse("7", "51712").unwrap();
        assert_eq!(node.back_end(0), "/local/domain/0/backend/pvblk/7/51712");
        for (domid, devid) in [
            ("", "1"),
            ("1", ""),
            ("+1", "1"),
            ("1", "-1"),
            ("32752", "1"),
            ("65536", "1"),
            ("1", "4294967296"),
        ] {
            assert_eq!(Node::parse(domid, devid), None, "{domid}/{devid}");
        }
    }
}
