//! Certificates for tests of TLS.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// An authority that signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate, in PEM.
    pub certificate: String,
}

/// A certificate and its key, in PEM.
pub struct Signed {
    pub certificate: String,
    pub key: String,
}

/// The time for which a certificate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    Now,
    /// It ended years ago.
    Past,
}

impl Default for Authority {
    fn default() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let name = &mut params.distinguished_name;
        name.push(DnType::CommonName, "authority of a test");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        Authority {
            issuer: Issuer::new(params, key),
            certificate,
        }
    }
}

impl Authority {
    /// For a server that is reached as `localhost` and 127.0.0.1.
    pub fn server(&self) -> Signed {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let usage = ExtendedKeyUsagePurpose::ServerAuth;
        self.sign("localhost", names, usage, Time::Now)
    }

    /// For a client with this common name.
    pub fn client(&self, name: &str, time: Time) -> Signed {
        self.sign(name, Vec::new(), ExtendedKeyUsagePurpose::ClientAuth, time)
    }

    fn sign(
        &self,
        name: &str,
        others: Vec<String>,
        usage: ExtendedKeyUsagePurpose,
        time: Time,
    ) -> Signed {
        let mut params = CertificateParams::new(others).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        if time == Time::Past {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer);
        Signed {
            certificate: signed.expect("a certificate").pem(),
            key: key.serialize_pem(),
        }
    }
}
