//! Files of certificates and keys: [`CredentialReader`] reads them, in this process or by way of another one.

use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

/// Most bytes of a file of credentials: some thousand certificates.
const MOST: u64 = 1 << 20;

/// Reads the credentials of clients, anew for each connection. This crate reads them in no other way, so that a process that can't open them has another one do it.
pub trait CredentialReader: fmt::Debug + Send + Sync {
    /// The contents of a file, as [`read_credential`] has them. It may wait for a medium.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
}

/// Reads in this process.
pub fn in_process() -> Arc<dyn CredentialReader> {
    Arc::new(InProcess)
}

#[derive(Debug)]
struct InProcess;

impl CredentialReader for InProcess {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        read_credential(File::open(path)?)
    }
}

/// The contents of an open file of credentials; one of more than 1 MiB is `EFBIG`, and is read no further.
pub fn read_credential(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MOST + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MOST {
        true => Err(Errno::FBIG.into()),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_up_to_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca-cert.pem");
        let reader = in_process();
        assert_eq!(
            reader.read(&path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        std::fs::write(&path, vec![7; MOST as usize]).unwrap();
        assert_eq!(reader.read(&path).unwrap().len() as u64, MOST);
        // It is as new as the last look.
        std::fs::write(&path, "renewed").unwrap();
        assert_eq!(reader.read(&path).unwrap(), b"renewed");
        for endless in [path.as_path(), Path::new("/dev/zero")] {
            std::fs::write(&path, vec![7; MOST as usize + 1]).unwrap();
            let e = reader.read(endless).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(Errno::FBIG.raw_os_error()));
        }
    }
}
