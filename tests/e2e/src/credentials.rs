//! Folders of credentials for NBD over TLS, with the names that QEMU and libnbd look for.

use crate::Stop;
use pvblk_testing::certs::{Authority, Signed};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Those of a client; without a certificate of its own it only knows servers.
pub fn write_client(
    folder: &Path,
    authority: &Authority,
    client: Option<&Signed>,
) -> Result<(), Stop> {
    std::fs::create_dir_all(folder)?;
    // Tests start clients of other users, too, which read here.
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))?;
    renew(folder, "ca-cert.pem", &authority.certificate)?;
    if let Some(client) = client {
        renew(folder, "client-cert.pem", &client.certificate)?;
        renew(folder, "client-key.pem", &client.key)?;
    }
    Ok(())
}

/// Those of a server at `localhost`.
pub fn write_server(folder: &Path, authority: &Authority) -> Result<(), Stop> {
    std::fs::create_dir_all(folder)?;
    let server = authority.server();
    renew(folder, "ca-cert.pem", &authority.certificate)?;
    renew(folder, "server-cert.pem", &server.certificate)?;
    renew(folder, "server-key.pem", &server.key)
}

/// As certificates are renewed: a whole file takes the place of the old one.
fn renew(folder: &Path, name: &str, text: &str) -> Result<(), Stop> {
    let new = folder.join("new");
    std::fs::write(&new, text)?;
    Ok(std::fs::rename(new, folder.join(name))?)
}
