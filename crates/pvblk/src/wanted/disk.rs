//! [`DiskWanted`]: one disk as its user wants it.

use crate::config::unix_listen;
use anyhow::{Context, Result, bail};
use pvblk_backend::ThrottleLimits;
use pvblk_export::kit::UnixListen;
use pvblk_export::xen::StandingOrder;
use pvblk_export::xen::node::parse_device;
use pvblk_volume::VolumeSpec;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A disk as its user wants it: a table `[disk.NAME]` of the configuration file, an entry of the state file, and the parameters of the control
/// protocol's `disk.add`. Texts are as the user wrote them; [`DiskWanted::parse`] checks them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskWanted {
    /// The text of its [`VolumeSpec`].
    pub volume: String,
    /// One front end or virtual machine at a time, or NBD clients only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub exclusive: bool,
    /// Sockets at which virtual machines get it, each `unix:PATH` with its options. A single text is read as a list of one.
    #[serde(
        default,
        deserialize_with = "one_or_more",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub vhost_user: Vec<String>,
    /// Xen guests that get it, each `GUEST` or `GUEST:DEVICE`.
    #[serde(
        default,
        deserialize_with = "one_or_more",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub xen_attach: Vec<String>,
    /// Limits of its rate: [`ThrottleLimits`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
}

/// The texts of a [`DiskWanted`], parsed.
#[derive(Debug)]
pub struct ParsedDisk {
    pub spec: VolumeSpec,
    pub vhost_user: Vec<UnixListen>,
    pub xen_attach: Vec<StandingOrder>,
    pub limits: ThrottleLimits,
}

impl DiskWanted {
    /// A disk on a volume, and nothing else.
    pub fn new(volume: impl Into<String>) -> DiskWanted {
        DiskWanted {
            volume: volume.into(),
            ..DiskWanted::default()
        }
    }

    /// Parses all texts. Opens nothing.
    pub fn parse(&self, name: &str) -> Result<ParsedDisk> {
        check_name(name)?;
        let spec = self
            .volume
            .parse()
            .with_context(|| format!("disk {name}"))?;
        let sockets = self.vhost_user.iter();
        let vhost_user = sockets
            .map(|s| unix_listen(&format!("--vhost-user {name}="), s))
            .collect::<Result<_>>()?;
        let orders = self.xen_attach.iter().map(|text| {
            let order = order(name, text);
            order.with_context(|| format!("--xen-attach {name}={text}"))
        });
        let limits = self.limit.as_deref().unwrap_or("none").parse();
        Ok(ParsedDisk {
            spec,
            vhost_user,
            xen_attach: orders.collect::<Result<_>>()?,
            limits: limits.with_context(|| format!("disk {name}"))?,
        })
    }
}

/// Refuses a name that no disk may have.
pub fn check_name(name: &str) -> Result<()> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(good) {
        bail!("disk name {name:?}: use 1 to 64 letters, digits, '-', '_' or '.'");
    }
    Ok(())
}

/// `GUEST[:DEVICE]`.
fn order(disk: &str, text: &str) -> Result<StandingOrder> {
    // Device names have no colon, guests' may.
    let (guest, device) = match text.rsplit_once(':') {
        Some((guest, device)) => (guest, Some(parse_device(device)?)),
        None => (text, None),
    };
    if guest.is_empty() || guest.bytes().all(|b| b.is_ascii_digit()) {
        bail!("give the guest's name: its number is another after each start");
    }
    Ok(StandingOrder {
        disk: disk.into(),
        guest: guest.into(),
        device,
    })
}

fn is_false(b: &bool) -> bool {
    !*b
}

/// A list of texts, or one text. (An untagged enum would lose the line of a mistake.)
fn one_or_more<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<String>, D::Error> {
    struct Texts;
    impl<'de> Visitor<'de> for Texts {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a list of texts")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
            Ok(vec![text.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Vec<String>, A::Error> {
            let mut texts = Vec::new();
            while let Some(text) = all.next_element()? {
                texts.push(text);
            }
            Ok(texts)
        }
    }
    input.deserialize_any(Texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_and_written() {
        let old = "volume = 'mem:1M'\nvhost_user = 'unix:/a'\n";
        let disk: DiskWanted = toml::from_str(old).unwrap();
        assert_eq!(disk.vhost_user, ["unix:/a"]);
        let json = serde_json::to_string(&disk).unwrap();
        assert_eq!(json, r#"{"volume":"mem:1M","vhost_user":["unix:/a"]}"#);
        assert_eq!(serde_json::from_str::<DiskWanted>(&json).unwrap(), disk);
        let full = DiskWanted {
            exclusive: true,
            vhost_user: vec!["unix:/a".into(), "unix:/b".into()],
            xen_attach: vec!["debian:xvda".into()],
            limit: Some("iops=5".into()),
            ..DiskWanted::new("null:1M")
        };
        let text = toml::to_string(&full).unwrap();
        assert_eq!(toml::from_str::<DiskWanted>(&text).unwrap(), full);
        for wrong in [
            "volume = 'mem:1M'\ncolour = 1",
            "exclusive = true",
            "volume = 'mem:1M'\nvhost_user = 7",
        ] {
            assert!(toml::from_str::<DiskWanted>(wrong).is_err(), "{wrong}");
        }
    }
}
