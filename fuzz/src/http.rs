//! Target `http`: the beginning of a request from anybody. A head is found at one length only, however it comes in pieces; parameters are decoded once; and
//! no foreign name passes for an address.

use pvblk_web::{Hosts, Limits, decode_query, parse_head, quality};
use std::net::IpAddr;

pub fn http(data: &[u8]) {
    head(data);
    // Any bytes as a target, and as the value of a header.
    let text = String::from_utf8_lossy(data);
    let text = text.as_ref();
    head(format!("GET /{text} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
    head(format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {text}\r\n\r\n").as_bytes());
    query(text);
    host(text);
    for form in ["text/plain", "application/openmetrics-text"] {
        assert!(quality(Some(text), form, &["0.0.4"]) <= 1000);
    }
}

fn head(bytes: &[u8]) {
    let limits = Limits::default();
    let whole = parse_head(bytes, &limits);
    let end = match &whole {
        Ok(Some((head, length))) => {
            assert!(*length <= bytes.len() && *length <= limits.head_bytes);
            assert!(head.body <= limits.body_bytes && head.path.starts_with('/'));
            let hosts = head
                .headers
                .iter()
                .filter(|(name, _)| name == "host")
                .count();
            assert!(hosts == 1 || (hosts == 0 && !head.takes_chunks));
            assert!(
                !head
                    .headers
                    .iter()
                    .any(|(name, _)| name == "transfer-encoding")
            );
            *length
        }
        // As long as more may make it whole, there is room for more.
        Ok(None) => {
            assert!(bytes.len() < limits.head_bytes);
            return;
        }
        Err(refusal) => {
            assert_eq!(refusal.why.lines().count(), 1, "{refusal:?}");
            return;
        }
    };
    // What comes later doesn't change it, and nothing before its end is one.
    assert_eq!(parse_head(&bytes[..end], &limits), whole);
    for cut in (0..end).step_by(1 + end / 64) {
        assert_eq!(
            parse_head(&bytes[..cut], &limits),
            Ok(None),
            "{cut} of {end}"
        );
    }
}

fn query(text: &str) {
    let Ok(pairs) = decode_query(text) else {
        return;
    };
    let escape = |text: &str| -> String { text.bytes().map(|b| format!("%{b:02X}")).collect() };
    let each = pairs
        .iter()
        .map(|(name, value)| format!("{}={}", escape(name), escape(value)));
    let again = each.collect::<Vec<_>>().join("&");
    assert_eq!(decode_query(&again), Ok(pairs));
}

fn host(text: &str) {
    let hosts = Hosts::default();
    for host in [
        text.to_owned(),
        format!("{text}:80"),
        format!("[{text}]"),
        format!("127.0.0.1{text}"),
    ] {
        if !hosts.allows(&host) {
            continue;
        }
        // An address or `localhost`, and after it nothing but a port.
        let rest = match host.strip_prefix('[') {
            Some(rest) => rest
                .split_once(']')
                .map(|(name, port)| (name.to_owned(), port.to_owned())),
            None => {
                let (name, port) = host.split_once(':').unwrap_or((&host, ""));
                Some((name.to_ascii_lowercase(), format!(":{port}")))
            }
        };
        let (name, port) = rest.expect("a name in brackets");
        assert!(
            name == "localhost" || name.parse::<IpAddr>().is_ok(),
            "{host:?}"
        );
        assert!(
            port.trim_start_matches(':')
                .bytes()
                .all(|b| b.is_ascii_digit()),
            "{host:?}"
        );
    }
}
