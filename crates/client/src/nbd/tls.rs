//! TLS to a server: the directory with the credentials, in the files that libnbd and QEMU look for.

use super::CredentialReader;
use pvblk_block::Error;
use pvblk_protocol::tls::{certificates, provider, unusable};
use rustix::io::Errno;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CA: &str = "ca-cert.pem";
const CERTIFICATE: &str = "client-cert.pem";
const KEY: &str = "client-key.pem";
const REVOKED: &str = "ca-crl.pem";

/// Credentials for the server's port, and the name that its certificate must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdTls {
    /// `ca-cert.pem`, and if they are there `client-cert.pem` with `client-key.pem`, and `ca-crl.pem`.
    pub directory: PathBuf,
    /// The server's name, where it isn't the one that the connection is made to.
    pub hostname: Option<String>,
}

/// `None` if there is no such file.
fn read_some(reader: &dyn CredentialReader, path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match reader.read(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::os(format!("TLS: reading {}", path.display()), e)),
        Ok(bytes) => Ok(Some(bytes)),
    }
}

fn read(reader: &dyn CredentialReader, path: &Path) -> Result<Vec<u8>, Error> {
    read_some(reader, path)?.ok_or_else(|| {
        let missing = io::Error::from(Errno::NOENT);
        Error::os(format!("TLS: reading {}", path.display()), missing)
    })
}

impl NbdTls {
    /// The files that are read, as far as they are there.
    pub fn files(&self) -> [PathBuf; 4] {
        [CA, CERTIFICATE, KEY, REVOKED].map(|name| self.directory.join(name))
    }

    /// One end of a session with the server of this name. The files are read each time, so that renewed ones count at the next connection.
    pub(super) fn session(
        &self,
        host: &str,
        reader: &dyn CredentialReader,
    ) -> Result<UnbufferedClientConnection, Error> {
        let must = |name| read(reader, &self.directory.join(name));
        let may = |name| read_some(reader, &self.directory.join(name));
        let provider = Arc::new(provider());
        let mut roots = RootCertStore::empty();
        let what = "certificates of the authorities";
        for root in certificates(what, &must(CA)?)? {
            roots.add(root).map_err(|e| unusable(what, e))?;
        }
        let verifier = rustls::client::WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::clone(&provider),
        );
        let verifier = match may(REVOKED)? {
            None => verifier,
            Some(revoked) => {
                let what = "the list of revoked certificates";
                let lists: Result<Vec<_>, _> =
                    CertificateRevocationListDer::pem_slice_iter(&revoked).collect();
                verifier
                    .with_crls(lists.map_err(|e| unusable(what, e))?)
                    .only_check_end_entity_revocation()
                    .allow_unknown_revocation_status()
            }
        };
        let verifier = verifier.build().map_err(|e| unusable(what, e))?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| unusable("TLS 1.3", e))?
            .with_webpki_verifier(verifier);
        let mut config = match may(CERTIFICATE)? {
            None => builder.with_no_client_auth(),
            Some(chain) => {
                let what = "the client's certificate and key";
                let key = PrivateKeyDer::from_pem_slice(&must(KEY)?);
                let key = key.map_err(|e| unusable("the client's key", e))?;
                let chain = certificates(what, &chain)?;
                let config = builder.with_client_auth_cert(chain, key);
                config.map_err(|e| unusable(what, e))?
            }
        };
        // Each connection proves anew who it is.
        config.resumption = Resumption::disabled();
        let host = self.hostname.as_deref().unwrap_or(host);
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|e| unusable(&format!("the server's name {host:?}"), e))?;
        let connection = UnbufferedClientConnection::new(Arc::new(config), name);
        connection.map_err(|e| unusable("the session", e))
    }
}
