//! Reads protobuf's wire format, for tests: an encoder's mistakes shouldn't be its decoder's, too.

/// A field's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// A message's fields, with their numbers.
#[derive(Clone, Debug, Default)]
pub struct Message<'a>(Vec<(u64, Value<'a>)>);

impl<'a> Message<'a> {
    /// Panics if the bytes are no message.
    pub fn read(mut bytes: &'a [u8]) -> Message<'a> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let value = match key & 7 {
                0 => Value::Number(varint(&mut bytes)),
                1 => {
                    let (number, rest) = bytes.split_at(8);
                    bytes = rest;
                    Value::Number(u64::from_le_bytes(number.try_into().unwrap()))
                }
                2 => {
                    let length = varint(&mut bytes) as usize;
                    let (text, rest) = bytes.split_at(length);
                    bytes = rest;
                    Value::Bytes(text)
                }
                other => panic!("wire type {other}"),
            };
            fields.push((key >> 3, value));
        }
        Message(fields)
    }

    pub fn numbers(&self, field: u64) -> Vec<u64> {
        let of = self.0.iter().filter(|(number, _)| *number == field);
        of.map(|(_, value)| match value {
            Value::Number(n) => *n,
            Value::Bytes(_) => panic!("field {field} is no number"),
        })
        .collect()
    }

    pub fn number(&self, field: u64) -> Option<u64> {
        self.numbers(field).last().copied()
    }

    pub fn messages(&self, field: u64) -> Vec<Message<'a>> {
        self.bytes(field).into_iter().map(Message::read).collect()
    }

    pub fn message(&self, field: u64) -> Option<Message<'a>> {
        self.messages(field).pop()
    }

    pub fn text(&self, field: u64) -> Option<&'a str> {
        let bytes = self.bytes(field).pop()?;
        Some(std::str::from_utf8(bytes).unwrap())
    }

    fn bytes(&self, field: u64) -> Vec<&'a [u8]> {
        let of = self.0.iter().filter(|(number, _)| *number == field);
        of.map(|(_, value)| match value {
            Value::Bytes(bytes) => *bytes,
            Value::Number(_) => panic!("field {field} has no bytes"),
        })
        .collect()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for at in 0..10 {
        let (first, rest) = bytes.split_first().expect("a number that is cut off");
        *bytes = rest;
        number |= u64::from(first & 0x7f) << (7 * at);
        if first & 0x80 == 0 {
            return number;
        }
    }
    panic!("a number of more than ten bytes");
}
