//! [`Token`]: the secret of those who may change something.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes that a token has at least and at most.
const BYTES: std::ops::RangeInclusive<usize> = 16..=256;

/// A secret that is known to those who may change something.
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// Reads a file of one line that only its owner can read: this process' user, or root. `file`: the one that was opened at `path`. Errors say in one
    /// line what to do.
    pub fn read(path: &Path, file: io::Result<File>) -> io::Result<Token> {
        let wrong = |why: &str| io::Error::other(format!("{}: {why}", path.display()));
        let file = file.map_err(|e| wrong(&e.to_string()))?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(wrong("is no file"));
        }
        if about.mode() & 0o077 != 0 {
            return Err(wrong("others can read the token: chmod 600 it"));
        }
        let user = rustix::process::geteuid().as_raw();
        if about.uid() != user && about.uid() != 0 {
            return Err(wrong(
                "the token is another user's file: make one of your own",
            ));
        }
        let mut text = String::new();
        let bound = *BYTES.end() as u64 + 2;
        file.take(bound)
            .read_to_string(&mut text)
            .map_err(|e| wrong(&e.to_string()))?;
        Token::of(text.trim_end_matches(['\n', '\r'])).map_err(|why| wrong(&why))
    }

    fn of(text: &str) -> Result<Token, String> {
        let fits = BYTES.contains(&text.len());
        match fits && text.bytes().all(|b| b.is_ascii_graphic()) {
            true => Ok(Token(text.into())),
            false => Err(format!(
                "a token is one line of {} to {} letters, digits and signs, such as `head -c 24 /dev/urandom | base64` prints",
                BYTES.start(),
                BYTES.end()
            )),
        }
    }

    /// True if the header `Authorization` has this token. Takes as long for any wrong one of the same length.
    pub fn is_in(&self, authorization: Option<&str>) -> bool {
        let Some((scheme, given)) = authorization.and_then(|a| a.split_once(' ')) else {
            return false;
        };
        let given = given.trim().as_bytes();
        if !scheme.eq_ignore_ascii_case("bearer") || given.len() != self.0.len() {
            return false;
        }
        let differs = given
            .iter()
            .zip(&self.0)
            .fold(0, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(differs) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_is_a_private_file_of_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |path: &Path| Token::read(path, File::open(path));
        let write = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            read(&path).map_err(|e| e.to_string())
        };
        let secret = "0123456789abcdef+/";
        let token = write(&format!("{secret}\n"), 0o600).unwrap();
        assert!(token.is_in(Some(&format!("Bearer {secret}"))));
        assert!(token.is_in(Some(&format!("bearer  {secret}"))));
        for wrong in [
            "Bearer 0123456789abcdef+.",
            "Bearer 0123456789abcdef+",
            "Bearer ",
            "Basic 0123456789abcdef+/",
            secret,
        ] {
            assert!(!token.is_in(Some(wrong)), "{wrong}");
        }
        assert!(!token.is_in(None));
        let refused = |text: &str, mode| write(text, mode).err().unwrap();
        assert!(refused(secret, 0o640).contains("chmod 600"));
        assert!(refused(secret, 0o604).contains("chmod 600"));
        for bad in ["short", "two lines\nof a text here", "", &"x".repeat(300)] {
            assert!(refused(bad, 0o600).contains("a token is one line"), "{bad}");
        }
        assert!(read(dir.path()).is_err());
        let none = dir.path().join("none");
        let error = read(&none).err().unwrap().to_string();
        let why = io::Error::from_raw_os_error(2);
        assert_eq!(error, format!("{}: {why}", none.display()));
    }
}
