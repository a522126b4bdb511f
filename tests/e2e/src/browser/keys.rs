//! Keys by their names, as the DevTools protocol wants them.

use serde_json::{Value, json};

/// Bit of the Shift key.
const SHIFT: u32 = 8;

/// A key, with or without Shift.
pub struct Key {
    name: String,
    code: u32,
    text: Option<String>,
    modifiers: u32,
}

impl Key {
    /// `Enter`, `Shift+ArrowLeft`, or a letter.
    pub fn of(name: &str) -> Key {
        let (modifiers, name) = match name.strip_prefix("Shift+") {
            Some(rest) => (SHIFT, rest),
            None => (0, name),
        };
        let code = match name {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            " " => 32,
            "PageDown" => 34,
            "End" => 35,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let text = match name {
            "Enter" => Some("\r".to_owned()),
            one if one.chars().count() == 1 => Some(one.to_owned()),
            _ => None,
        };
        Key {
            name: name.to_owned(),
            code,
            text,
            modifiers,
        }
    }

    pub fn down(&self) -> Value {
        let mut event = self.event(if self.text.is_some() {
            "keyDown"
        } else {
            "rawKeyDown"
        });
        if let Some(text) = &self.text {
            event["text"] = json!(text);
        }
        event
    }

    pub fn up(&self) -> Value {
        self.event("keyUp")
    }

    fn event(&self, kind: &str) -> Value {
        json!({"type": kind, "key": self.name, "windowsVirtualKeyCode": self.code, "modifiers": self.modifiers})
    }
}
