//! States of either end of a connection.

use std::fmt;

/// State of one end of a connection (xen/include/public/io/xenbus.h, `enum xenbus_state`).
///
/// ```text
///   back end                              front end
///   1 Initialising                        1 Initialising
///        │ publishes offers                    │
///   2 InitWait ─────────────────────────▶      │ reads offers, makes rings, publishes keys
///        │      ◀───────────────────────  3 Initialised   (some front ends go to 4 at once)
///        │ maps rings, publishes disk          │
///   4 Connected ────────────────────────▶      │ reads the disk
///        │      ◀───────────────────────  4 Connected
///        │                                     │
///   5 Closing   ◀──── either begins ────▶ 5 Closing
///        │      ◀───────────────────────  6 Closed        (no request is left in its rings)
///   6 Closed: queues drained              │
///        │      ◀───────────────────────  1 Initialising  (reconnect, if the disk is online)
///   2 InitWait
/// ```
///
/// Writing 4 again while Connected tells the front end to read `sectors` again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum XenbusState {
    /// Gone, or never there.
    Unknown = 0,
    /// Nothing is published yet.
    Initialising = 1,
    /// Back end: offers are published, the front end's keys are awaited.
    InitWait = 2,
    /// Front end: keys are published, the back end's properties are awaited.
    Initialised = 3,
    /// Requests may flow.
    Connected = 4,
    /// This end asks to end, or follows the peer's request.
    Closing = 5,
    /// This end doesn't use the peer's resources any more.
    Closed = 6,
    /// Not used by block devices.
    Reconfiguring = 7,
    /// Not used by block devices.
    Reconfigured = 8,
}

const NAMES: [(XenbusState, &str); 9] = [
    (XenbusState::Unknown, "Unknown"),
    (XenbusState::Initialising, "Initialising"),
    (XenbusState::InitWait, "InitWait"),
    (XenbusState::Initialised, "Initialised"),
    (XenbusState::Connected, "Connected"),
    (XenbusState::Closing, "Closing"),
    (XenbusState::Closed, "Closed"),
    (XenbusState::Reconfiguring, "Reconfiguring"),
    (XenbusState::Reconfigured, "Reconfigured"),
];

impl XenbusState {
    /// Parses the text of a `state` key: one digit, 0 to 8. `None` for anything else.
    pub fn parse(value: &str) -> Option<XenbusState> {
        match value.as_bytes() {
            [d @ b'0'..=b'8'] => Some(NAMES[usize::from(d - b'0')].0),
            _ => None,
        }
    }

    /// The number in a `state` key, 0 to 8.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// True if this end has no resources of an earlier connection: it left, or starts again.
    pub fn has_left(self) -> bool {
        matches!(
            self,
            XenbusState::Unknown | XenbusState::Initialising | XenbusState::Closed
        )
    }
}

impl fmt::Display for XenbusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES[usize::from(self.number())].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_survives_its_text_and_other_texts_are_refused() {
        for (state, name) in NAMES {
            assert_eq!(XenbusState::parse(&state.number().to_string()), Some(state));
            assert_eq!(state.to_string(), name);
        }
        for bad in [
            "",
            "9",
            "-1",
            "04",
            "4 ",
            " 4",
            "+4",
            "Connected",
            "\u{664}",
        ] {
            assert_eq!(XenbusState::parse(bad), None, "{bad:?}");
        }
    }
}
