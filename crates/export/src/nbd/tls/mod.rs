//! TLS of a listener: its credentials, read again when they change, and who its clients are.

#[cfg(test)]
mod tests;

use parking_lot::Mutex;
use pvblk_backend::{RateLimit, ratelimited};
use pvblk_block::Error;
use pvblk_protocol::tls::{certificates, provider, unusable};
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

/// Names of one certificate that are looked at.
const MOST_NAMES: usize = 32;
/// Bytes of a name that is looked at.
const LONGEST_NAME: usize = 255;
/// Credentials are looked at again at the first client after this time.
const FRESH: Duration = Duration::from_secs(10);

/// The server's end of a session.
pub(super) type TlsSession = pvblk_protocol::tls::TlsSession<UnbufferedServerConnection>;

/// Credentials in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The server's certificate, and those between it and its authority.
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
    /// Certificates of the authorities that sign clients' certificates.
    pub authorities: Option<Vec<u8>>,
    /// Their lists of certificates that are revoked.
    pub revoked: Option<Vec<u8>>,
}

/// Reads the credentials. It may wait for a medium.
pub type ReadCredentials = dyn Fn() -> Result<Credentials, Error> + Send + Sync;

/// The choice about clients' certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// A client without a certificate of the authority isn't let in.
    MustHaveCertificates,
    /// Certificates are neither asked for nor looked at.
    NeedNoCertificates,
}

/// The TLS of a listener.
pub struct Tls {
    /// Requests for disks in the clear are refused.
    required: bool,
    clients: Clients,
    read: Box<ReadCredentials>,
    now: Mutex<Now>,
    bad: RateLimit,
}

struct Now {
    credentials: Credentials,
    config: Arc<ServerConfig>,
    looked: Instant,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("required", &self.required)
            .field("clients", &self.clients)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the credentials once; fails if they are of no use.
    pub fn new(required: bool, clients: Clients, read: Box<ReadCredentials>) -> Result<Tls, Error> {
        let credentials = read()?;
        let config = server_config(&credentials, clients)?;
        Ok(Tls {
            required,
            clients,
            read,
            now: Mutex::new(Now {
                credentials,
                config,
                looked: Instant::now(),
            }),
            bad: RateLimit::default(),
        })
    }

    pub fn is_required(&self) -> bool {
        self.required
    }

    /// True if no client is let in without a certificate.
    pub fn knows_clients(&self) -> bool {
        self.required && self.clients == Clients::MustHaveCertificates
    }

    /// The terms for the next client. Credentials that have changed count from now on; those that are of no use are told, and the
    /// ones before them stay. It may wait for a medium.
    pub(super) fn config(&self) -> Arc<ServerConfig> {
        let mut now = self.now.lock();
        let before = Arc::clone(&now.config);
        if now.looked.elapsed() < FRESH {
            return before;
        }
        now.looked = Instant::now();
        drop(now);
        let changed = (self.read)().and_then(|credentials| {
            if self.now.lock().credentials == credentials {
                return Ok(None);
            }
            let config = server_config(&credentials, self.clients)?;
            Ok(Some((credentials, config)))
        });
        match changed {
            Ok(None) => before,
            Ok(Some((credentials, config))) => {
                tracing::info!("NBD: new TLS credentials are in use");
                let mut now = self.now.lock();
                now.credentials = credentials;
                now.config = Arc::clone(&config);
                config
            }
            Err(e) => {
                ratelimited!(
                    error,
                    self.bad,
                    "NBD: the TLS credentials that were read before stay in use: {e}"
                );
                before
            }
        }
    }
}

fn server_config(c: &Credentials, clients: Clients) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(provider());
    let chain = certificates("the server's certificate", &c.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&c.key).map_err(|e| unusable("the server's key", e))?;
    // TLS 1.2 can't change its keys: a connection would end after 2^24 messages.
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| unusable("TLS 1.3", e))?;
    let builder = match clients {
        Clients::NeedNoCertificates => builder.with_no_client_auth(),
        Clients::MustHaveCertificates => {
            let what = "certificates of the authorities for clients";
            let missing = || {
                unusable(
                    what,
                    "there is none: write verify-peer=no to let in clients that nobody vouches for",
                )
            };
            let mut roots = RootCertStore::empty();
            let pem = c.authorities.as_ref().ok_or_else(missing)?;
            for root in certificates(what, pem)? {
                roots.add(root).map_err(|e| unusable(what, e))?;
            }
            let mut verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            if let Some(revoked) = &c.revoked {
                let lists: Result<Vec<_>, _> =
                    CertificateRevocationListDer::pem_slice_iter(revoked).collect();
                let lists = lists.map_err(|e| unusable("the list of revoked certificates", e))?;
                verifier = verifier
                    .with_crls(lists)
                    .only_check_end_entity_revocation()
                    .allow_unknown_revocation_status();
            }
            let verifier = verifier.build().map_err(|e| unusable(what, e))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|e| unusable("the server's certificate and key", e))?;
    config.ignore_client_order = true;
    // Each client is looked at anew: a session that is resumed would pass a list of revoked certificates by.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// A session with the next client.
pub(super) fn session(config: Arc<ServerConfig>) -> Result<TlsSession, Error> {
    let connection = UnbufferedServerConnection::new(config);
    let connection = connection.map_err(|e| Error::protocol(format!("TLS: {e}")))?;
    Ok(TlsSession::new(connection))
}

/// The names of a client's certificate, which was verified.
pub(super) fn client_names(session: &TlsSession) -> Vec<String> {
    session.peer_certificate().map(names).unwrap_or_default()
}

/// The names of a certificate that was verified: the subject's common names, then alternative names.
fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
        return Vec::new();
    };
    let common = parsed.subject().iter_common_name();
    let common = common.filter_map(|name| name.as_str().ok());
    let others = parsed
        .extensions()
        .iter()
        .filter_map(|e| match e.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
            _ => None,
        });
    let others = others.flatten().filter_map(|name| match name {
        GeneralName::DNSName(name) | GeneralName::RFC822Name(name) | GeneralName::URI(name) => {
            Some(*name)
        }
        _ => None,
    });
    let fits = |name: &&str| !name.is_empty() && name.len() <= LONGEST_NAME;
    let all = common.chain(others).filter(fits).take(MOST_NAMES);
    all.map(str::to_owned).collect()
}
