//! The user whose rights the child has.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// User and group by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pub user: u32,
    pub group: u32,
}

impl User {
    /// By name or number, with its group of `/etc/passwd`.
    pub fn find(name: &str) -> Result<User> {
        let text = std::fs::read_to_string("/etc/passwd").context("reading /etc/passwd")?;
        let found = User::of(name, &text)?;
        if found.user == 0 {
            bail!(
                "--sandbox {name}: give a user without privileges, such as one that `adduser --system` makes"
            );
        }
        Ok(found)
    }

    fn of(name: &str, passwd: &str) -> Result<User> {
        let found = passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            let called = fields.next()?;
            let (user, group) = (fields.nth(1)?, fields.next()?);
            (called == name || user == name).then_some((user, group))
        });
        let Some((user, group)) = found else {
            bail!("--sandbox {name}: there is no such user in /etc/passwd");
        };
        let number = |text: &str| text.parse().context("a line of /etc/passwd");
        Ok(User {
            user: number(user)?,
            group: number(group)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_by_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\npvblk:x:123:45::/nowhere:/bin/false\n";
        let expected = User {
            user: 123,
            group: 45,
        };
        for name in ["pvblk", "123"] {
            assert_eq!(User::of(name, passwd).unwrap(), expected);
        }
        let error = User::of("nobody", passwd).unwrap_err().to_string();
        assert!(error.contains("no such user"), "{error}");
        let error = User::find("root").unwrap_err().to_string();
        assert!(error.contains("without privileges"), "{error}");
    }
}
