//! [`Hosts`]: names under which a server may be asked.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Names for the header `Host`. A foreign page can point a name of its own at this server's address, and its scripts would then be of the same origin as the
/// answers. So only names are served that no foreign page can have: addresses, `localhost`, and those that the server was told.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Vec<String>);

impl Hosts {
    /// Serves these names, too.
    pub fn with(names: impl IntoIterator<Item = String>) -> Hosts {
        Hosts(names.into_iter().map(|n| n.to_ascii_lowercase()).collect())
    }

    /// True if a request with this header is served.
    pub fn allows(&self, host: &str) -> bool {
        let Some(name) = name(host) else {
            return false;
        };
        if let Some(address) = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')) {
            return address.parse::<Ipv6Addr>().is_ok();
        }
        let name = name.to_ascii_lowercase();
        name.parse::<Ipv4Addr>().is_ok() || name == "localhost" || self.0.contains(&name)
    }
}

/// The header without its port.
fn name(host: &str) -> Option<&str> {
    let end = host.rfind(']').map_or(0, |e| e + 1);
    match host[end..].rfind(':') {
        None => Some(host),
        Some(colon) => {
            let (name, port) = (&host[..end + colon], &host[end + colon + 1..]);
            port.bytes().all(|b| b.is_ascii_digit()).then_some(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_are_served_that_no_foreign_page_can_have() {
        let hosts = Hosts::with(["Storage1.example".to_owned()]);
        for good in [
            "127.0.0.1",
            "127.0.0.1:9100",
            "10.1.2.3:80",
            "[::1]:9100",
            "[fe80::1]",
            "localhost",
            "LocalHost:1",
            "storage1.example:9100",
            "STORAGE1.example",
        ] {
            assert!(hosts.allows(good), "{good}");
        }
        for bad in [
            "",
            "evil.example",
            "evil.example:9100",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[evil]",
            "::1",
            "1::88:80",
            "localhost:evil",
            "127.0.0.1:9100:evil",
            "storage1.example.",
            "[::1]evil",
        ] {
            assert!(!hosts.allows(bad), "{bad}");
        }
    }
}
