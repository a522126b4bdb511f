//! Words for hops: where a request is, for people who don't know blktrace's letters.

use crate::latency::Part;

/// The kinds of layers that have words of their own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind<'a> {
    /// A virtual machine's own trace of its disk.
    Guest,
    /// A front end, above a ring.
    Front,
    /// A lane of the server, or of `pvblk attach`.
    Lane,
    Cache,
    Array,
    /// The member of an array, by name.
    Member(&'a str),
    /// A volume that another server has.
    Remote,
    /// An image of a Ceph cluster.
    Cluster,
    Volume,
}

impl<'a> Kind<'a> {
    /// The kind of layer `DISK/LAYER` or `DISK/[MEMBER]/LAYER`.
    fn of(name: &'a str) -> Kind<'a> {
        let layer = name.split_once('/').map_or(name, |(_, layer)| layer);
        if let Some(inside) = layer.strip_prefix('[') {
            return match (inside.strip_suffix(']'), inside.rsplit_once("]/")) {
                (Some(member), _) => Kind::Member(member),
                (None, Some((_, layer))) => Kind::of_layer(layer),
                (None, None) => Kind::of_layer(layer),
            };
        }
        Kind::of_layer(layer)
    }

    fn of_layer(layer: &str) -> Kind<'static> {
        match layer {
            "guest" => Kind::Guest,
            "front" => Kind::Front,
            "back" | "attach" => Kind::Lane,
            "cache" => Kind::Cache,
            "raid5" => Kind::Array,
            l if l.starts_with("rbd:") => Kind::Cluster,
            l if l.starts_with("nbd") || l.starts_with("vhost-user") => Kind::Remote,
            _ => Kind::Volume,
        }
    }

    fn word(self) -> String {
        match self {
            Kind::Guest => "guest".into(),
            Kind::Front => "front end".into(),
            Kind::Lane => "worker".into(),
            Kind::Cache => "cache".into(),
            Kind::Array => "array".into(),
            Kind::Member(name) => format!("member {name}"),
            Kind::Remote => "remote server".into(),
            Kind::Cluster => "cluster".into(),
            Kind::Volume => "volume".into(),
        }
    }
}

/// The label of a part of the way on layer `layer`; `other` is the name of the layer that the part leads to or comes from.
pub fn label(layer: &str, part: Part, other: &str) -> String {
    let (here, there) = (Kind::of(layer), Kind::of(other));
    let is_ring = matches!(here, Kind::Front | Kind::Guest) && there == Kind::Lane;
    match part {
        Part::Get if here == Kind::Lane => "limit".into(),
        Part::Get => format!("{}, waits for a tag", here.word()),
        Part::Wait if matches!(here, Kind::Remote | Kind::Cluster) => "waits to be sent".into(),
        Part::Wait => here.word(),
        Part::Down(_) if is_ring => "ring, down".into(),
        Part::Up(_) if is_ring => "ring, up".into(),
        Part::Down(_) => format!("to {}", there.word()),
        Part::Up(_) => format!("from {}", there.word()),
        Part::Answer if here == Kind::Cache => "cache hit".into(),
        Part::Work => match here {
            Kind::Volume => "medium".into(),
            Kind::Front | Kind::Guest => "ring and server".into(),
            Kind::Lane => "below, not followed".into(),
            Kind::Cache => "in the cache".into(),
            here => here.word(),
        },
        Part::Answer => format!("{}, answers itself", here.word()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn a_request_is_somewhere() {
        let other = Device::new(Device::MAJOR, 1);
        let (down, up) = (Part::Down(other), Part::Up(other));
        for (layer, part, other, expected) in [
            ("vm1/back", Part::Wait, "", "worker"),
            ("vm1/back", Part::Get, "", "limit"),
            ("vm1/front", down, "vm1/back", "ring, down"),
            ("vm1/guest", up, "vm1/back", "ring, up"),
            ("vm1/front", Part::Get, "", "front end, waits for a tag"),
            ("vm1/back", down, "vm1/cache", "to cache"),
            ("vm1/cache", Part::Answer, "", "cache hit"),
            ("vm1/cache", Part::Work, "", "in the cache"),
            ("vm1/raid5", down, "vm1/[a]", "to member a"),
            ("vm1/raid5", up, "vm1/[b[0]]", "from member b[0]"),
            ("vm1/[a]", Part::Work, "", "member a"),
            ("vm1/[a]/mem:64M", Part::Work, "", "medium"),
            ("vm1/[a]/nbd://h/x", Part::Wait, "", "waits to be sent"),
            (
                "vm1/nbd+unix:///x?socket=s",
                Part::Work,
                "",
                "remote server",
            ),
            ("vm1/rbd:pool/image", Part::Work, "", "cluster"),
            ("vm1//srv/disk.img", Part::Work, "", "medium"),
            ("vm1/mem:64M", Part::Answer, "", "volume, answers itself"),
        ] {
            assert_eq!(label(layer, part, other), expected, "{layer} {part:?}");
        }
    }
}
