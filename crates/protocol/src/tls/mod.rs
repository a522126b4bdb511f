//! TLS 1.3 for both ends of a connection, without I/O.

mod pipe;
mod session;

pub use pipe::{Gather, MOST_ENCRYPTED, Room, TlsPipe};
pub use session::{Shaken, TlsEnd, TlsSession};

use pvblk_block::{Error, ErrorKind};
use rustls::SupportedCipherSuite;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fmt;

/// The cryptography of every session. AES of 128 bits comes first: it needs the least of the CPU.
pub fn provider() -> CryptoProvider {
    use rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
    let mut provider = ring::default_provider();
    let rank = |suite: &SupportedCipherSuite| suite.suite() != TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(rank);
    provider
}

/// An error about credentials, in one line.
pub fn unusable(what: &str, why: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Config, format!("TLS: {what}: {why}"))
}

/// The certificates of a file in PEM, at least one.
pub fn certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|e| unusable(what, e))?;
    if all.is_empty() {
        return Err(unusable(what, "the file has none in PEM"));
    }
    Ok(all)
}
