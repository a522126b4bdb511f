//! Target `xenstore`: what comes from xenstore's side: messages in pieces of any size, their texts, and names of devices.

use pvblk_export::xen::node::{Node, device_name, parse_device};
use pvblk_protocol::xenstore::{HEAD, Head, MAX_PAYLOAD, Message, take_message, texts};

/// The target. The first byte says how large the pieces are.
pub fn xenstore(data: &[u8]) {
    let Some((&step, data)) = data.split_first() else {
        return;
    };
    let expected = model(data);
    assert_eq!(taken(data, data.len().max(1)), expected, "at once");
    assert_eq!(taken(data, usize::from(step) + 1), expected, "in pieces");
    for message in expected.0 {
        words(&message.payload);
    }
}

/// Messages, and whether one was refused.
type Taken = (Vec<Message>, bool);

fn taken(data: &[u8], step: usize) -> Taken {
    let (mut input, mut all) = (Vec::new(), Vec::new());
    for piece in data.chunks(step) {
        input.extend(piece);
        loop {
            match take_message(&mut input) {
                Ok(Some(message)) => all.push(message),
                Ok(None) => break,
                Err(_) => return (all, true),
            }
        }
        assert!(input.len() < HEAD + MAX_PAYLOAD, "a whole message is left");
    }
    (all, false)
}

fn model(data: &[u8]) -> Taken {
    let (mut at, mut all) = (0, Vec::new());
    while data.len() - at >= HEAD {
        let word = |i: usize| {
            let from = at + 4 * i;
            u32::from_ne_bytes([data[from], data[from + 1], data[from + 2], data[from + 3]])
        };
        let len = word(3) as usize;
        if len > MAX_PAYLOAD {
            return (all, true);
        }
        let begin = at + HEAD;
        if data.len() - begin < len {
            break;
        }
        let head = Head {
            operation: word(0),
            request: word(1),
            transaction: word(2),
            len: len as u32,
        };
        assert_eq!(head.encode(), data[at..begin]);
        let payload = data[begin..begin + len].to_vec();
        all.push(Message { head, payload });
        at = begin + len;
    }
    (all, false)
}

fn words(payload: &[u8]) {
    let all = texts(payload);
    if let Ok(text) = std::str::from_utf8(payload) {
        let joined = all.join("\0");
        assert_eq!(joined, text.strip_suffix('\0').unwrap_or(text));
    }
    for word in &all {
        if let Ok(devid) = parse_device(word) {
            let name = device_name(devid);
            assert_eq!(parse_device(&name).ok(), Some(devid), "{word} is {name}");
        }
    }
    for pair in all.windows(2) {
        if let Some(node) = Node::parse(&pair[0], &pair[1]) {
            let path = node.back_end(0);
            let mut names = path.rsplit('/');
            let (devid, domid) = (names.next(), names.next());
            let again = domid.zip(devid).and_then(|(a, b)| Node::parse(a, b));
            assert_eq!(again, Some(node), "{path}");
        }
    }
}
