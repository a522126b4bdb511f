//! The files and servers that a volume uses, without opening it.

use super::{Members, VolumeSpec};
use pvblk_client::dial::NbdAddr;
use pvblk_client::nbd::NbdTls;
use pvblk_client::rbd::RbdSpec;
use std::path::{Path, PathBuf};

/// Names outside of the process that a volume and those below it use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    pub files: Vec<PathBuf>,
    /// Files that it reads only: TLS credentials, of which some needn't be there.
    pub credentials: Vec<PathBuf>,
    /// Folders of patterns in which an array's members are looked for.
    pub folders: Vec<PathBuf>,
    /// Servers that it connects to.
    pub servers: Vec<NbdAddr>,
    /// Images of Ceph clusters, whose library opens files and connects for itself.
    pub images: Vec<RbdSpec>,
}

impl VolumeSpec {
    /// The files and servers that it uses.
    pub fn reach(&self) -> Reach {
        let mut reach = Reach::default();
        self.add_to(&mut reach);
        reach
    }

    fn add_to(&self, reach: &mut Reach) {
        match self {
            VolumeSpec::Null(_) | VolumeSpec::Mem(_) => {}
            VolumeSpec::File(file) => reach.files.push(file.path.clone()),
            VolumeSpec::Delay(_, inner)
            | VolumeSpec::Fault(_, inner)
            | VolumeSpec::Cache(_, inner) => inner.add_to(reach),
            VolumeSpec::Raid5(array) => match &array.of {
                Members::Named(members) => {
                    members.iter().flatten().for_each(|m| m.add_to(reach));
                }
                Members::Found(candidates) => {
                    let mut patterns = Reach::default();
                    candidates
                        .within
                        .iter()
                        .for_each(|w| w.add_to(&mut patterns));
                    let folders = patterns.files.iter().map(|p| folder_of(p));
                    reach.folders.extend(folders);
                }
            },
            VolumeSpec::Nbd(nbd) => {
                reach.servers.push(nbd.uri.addr.clone());
                let tls = nbd.uri.tls.iter();
                reach.credentials.extend(tls.flat_map(NbdTls::files));
            }
            VolumeSpec::Vhost(vhost) => reach.servers.push(NbdAddr::Unix(vhost.path.clone())),
            VolumeSpec::Rings(rings) => reach.servers.push(NbdAddr::Unix(rings.path.clone())),
            VolumeSpec::Rbd(image) => reach.images.push(image.clone()),
        }
    }
}

/// The part of a pattern before the first component with a special character.
fn folder_of(pattern: &Path) -> PathBuf {
    let special = |part: &Path| part.to_string_lossy().contains(['*', '?', '[']);
    let fixed = pattern.ancestors().skip(1).find(|folder| !special(folder));
    fixed.unwrap_or(Path::new("")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_folders_and_servers_are_found_below_all_decorators() {
        let of = |spec: &str| spec.parse::<VolumeSpec>().unwrap().reach();
        let array = of("cache:64M:delay:1ms:raid5:[file:/a,direct][/b][missing]");
        assert_eq!(array.files, [PathBuf::from("/a"), PathBuf::from("/b")]);
        let uuid = "12345678:12345678:12345678:12345678";
        let found = of(&format!("raid5:uuid={uuid},in=/srv/*/m-*,in=/dev/disk/x"));
        let folders = ["/srv", "/dev/disk"].map(PathBuf::from);
        assert_eq!((found.files, found.folders), (vec![], folders.to_vec()));
        assert_eq!(of("mem:1M"), Reach::default());
        let remote = of(
            "raid5:[cache:64M:nbd+unix:///a?socket=/s][nbd://h/a][rings:unix:/r,disk=a][vhost-user:unix:/v][/f]",
        );
        let servers = remote.servers.iter().map(ToString::to_string);
        let expected = ["unix:/s", "tcp:h:10809", "unix:/r", "unix:/v"];
        assert_eq!(servers.collect::<Vec<_>>(), expected);
        assert_eq!((remote.files, remote.images), (vec!["/f".into()], vec![]));
        let secured = of("raid5:[cache:64M:nbds://h/a?tls-certificates=/d][/f][missing]");
        let expected = ["ca-cert", "client-cert", "client-key", "ca-crl"];
        let expected = expected.map(|name| PathBuf::from(format!("/d/{name}.pem")));
        assert_eq!(secured.credentials, expected);
        assert_eq!(secured.files, [PathBuf::from("/f")]);
        let images = of("raid5:[cache:64M:rbd:p/a][rbd:p/b,ro][missing]").images;
        let images = images.iter().map(ToString::to_string);
        assert_eq!(images.collect::<Vec<_>>(), ["rbd:p/a", "rbd:p/b,ro"]);
    }
}
