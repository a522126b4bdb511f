//! Messages to and from the browser.

use crate::Stop;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// The browser's process and the pair of pipes. It is killed when dropped.
pub struct Pipe {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    last: u64,
}

impl Pipe {
    /// Starts a command whose standard input and output are pipes.
    pub fn start(mut command: Command) -> Result<Pipe, Stop> {
        let mut child = command.spawn()?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Stop::fail("the browser has no pipes");
        };
        let (sender, receiver) = channel();
        // It ends with the browser, which closes its end.
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut message = Vec::new();
            while matches!(from.read_until(0, &mut message), Ok(1..)) {
                message.pop();
                let value = serde_json::from_slice(&message).unwrap_or(Value::Null);
                if sender.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        Ok(Pipe {
            child,
            to,
            from: receiver,
            last: 0,
        })
    }

    /// Sends a command, and returns its number.
    pub fn send(&mut self, method: &str, session: &str, params: &Value) -> Result<u64, Stop> {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": params});
        if !session.is_empty() {
            message["sessionId"] = json!(session);
        }
        write!(self.to, "{message}\0")?;
        Ok(self.last)
    }

    /// The next message.
    pub fn receive(&mut self, deadline: Instant) -> Result<Value, String> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.from
            .recv_timeout(left)
            .map_err(|e| format!("the browser doesn't answer: {e}"))
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes of a text in base64.
pub fn decode(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff) as u8);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn base64_is_decoded() {
        assert_eq!(decode("cHZibGs="), b"pvblk");
        assert_eq!(decode("AP+/"), [0, 0xff, 0xbf]);
        assert_eq!(decode(""), b"");
    }
}
