//! The parts of a request's way through the layers.

use crate::Device;

/// A part of a request's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// On this device, from Q until G: it waits for a tag, or for a limit of a disk.
    Get,
    /// On this device, from Q, or from G if that is a hop of its own, until the issue.
    Wait,
    /// From this device's D to the Q of the given device below it.
    Down(Device),
    /// From this device's D to its C, with no device below.
    Work,
    /// From this device's Q to its C: it answered without an issue, as a cache does that has the data.
    Answer,
    /// From the C of the given device below to this one's C.
    Up(Device),
}

impl Part {
    /// The hop's name on the device called `device`; `name` is asked for that of another device.
    pub fn name(self, device: &str, name: impl Fn(Device) -> String) -> String {
        let other = |other: Device| {
            let other = name(other);
            let is_front = device.ends_with("/front") || device.ends_with("/guest");
            match is_front && other.ends_with("/back") {
                true => "ring".to_owned(),
                false => other,
            }
        };
        match self {
            Part::Get if device.ends_with("/back") || device.ends_with("/attach") => {
                format!("{device}: waits for a limit")
            }
            Part::Get => format!("{device}: waits for a tag"),
            Part::Answer if device.ends_with("/cache") => format!("{device}: hit"),
            Part::Answer => format!("{device}: answers"),
            Part::Wait => format!("{device}: waits"),
            Part::Down(below) => format!("{device}: down to {}", other(below)),
            Part::Work => format!("{device}: works"),
            Part::Up(below) => format!("{device}: up from {}", other(below)),
        }
    }
}
