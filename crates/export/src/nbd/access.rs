//! Rights of NBD clients: who may read or write which disk.

use std::fmt;
use std::str::FromStr;

/// The most that a client may do with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rights {
    /// The disk isn't there for the client.
    None,
    ReadOnly,
    ReadWrite,
}

/// The clients that a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    Any,
    /// Processes of this user, at a Unix socket.
    User(u32),
    /// Processes with this group, at a Unix socket.
    Group(u32),
    /// Clients whose certificate, signed by the authority, has this name: a subject's common name, or an alternative name (DNS, e-mail, URI).
    Certificate(String),
}

/// One rule: these clients have at least these rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub who: Who,
    /// The disk's name; `None`: all disks.
    pub disk: Option<String>,
    pub rights: Rights,
}

/// The rules of a listener. Without any, all clients may read and write all disks; otherwise a client has the most that a rule
/// gives it, and nothing without a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// A client, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Of a process at a Unix socket.
    pub user: Option<u32>,
    /// Of a process at a Unix socket: its group and its further groups.
    pub groups: Vec<u32>,
    /// Of its certificate.
    pub names: Vec<String>,
}

impl Rules {
    /// The empty list, for clients of listeners without rules.
    pub fn everyone() -> &'static Rules {
        static EVERYONE: Rules = Rules(Vec::new());
        &EVERYONE
    }

    pub fn new(rules: Vec<Rule>) -> Rules {
        Rules(rules)
    }

    /// The rights of a client to a disk.
    pub fn rights(&self, client: &Identity, disk: &str) -> Rights {
        if self.0.is_empty() {
            return Rights::ReadWrite;
        }
        let fits = |rule: &&Rule| {
            rule.disk.as_ref().is_none_or(|name| name == disk) && rule.who.includes(client)
        };
        let rights = self.0.iter().filter(fits).map(|rule| rule.rights);
        rights.max().unwrap_or(Rights::None)
    }

    /// True if a rule is about certificates.
    pub fn need_certificates(&self) -> bool {
        let is = |rule: &Rule| matches!(rule.who, Who::Certificate(_));
        self.0.iter().any(is)
    }

    /// True if a rule is about users or groups.
    pub fn need_processes(&self) -> bool {
        let is = |rule: &Rule| matches!(rule.who, Who::User(_) | Who::Group(_));
        self.0.iter().any(is)
    }
}

impl Who {
    fn includes(&self, client: &Identity) -> bool {
        match self {
            Who::Any => true,
            Who::User(user) => client.user == Some(*user),
            Who::Group(group) => client.groups.contains(group),
            Who::Certificate(name) => client.names.contains(name),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.names.first(), self.user) {
            (Some(name), _) => write!(f, "a client with the certificate of {name:?}"),
            (None, Some(user)) => write!(f, "a client of user {user}"),
            (None, None) => f.write_str("a client without a name"),
        }
    }
}

impl FromStr for Rights {
    type Err = ();

    fn from_str(text: &str) -> Result<Rights, ()> {
        match text {
            "ro" => Ok(Rights::ReadOnly),
            "rw" => Ok(Rights::ReadWrite),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(who: Who, disk: Option<&str>, rights: Rights) -> Rule {
        let disk = disk.map(str::to_owned);
        Rule { who, disk, rights }
    }

    #[test]
    fn a_client_has_the_most_that_a_rule_gives_it() {
        let everyone = Rules::default();
        assert_eq!(
            everyone.rights(&Identity::default(), "a"),
            Rights::ReadWrite
        );
        let rules = Rules::new(vec![
            rule(Who::Any, Some("iso"), Rights::ReadOnly),
            rule(Who::User(7), Some("a"), Rights::ReadWrite),
            rule(Who::Group(9), None, Rights::ReadOnly),
            rule(
                Who::Certificate("vm1".into()),
                Some("iso"),
                Rights::ReadWrite,
            ),
        ]);
        let nobody = Identity::default();
        let user = Identity {
            user: Some(7),
            groups: vec![1, 9],
            ..Identity::default()
        };
        let host = Identity {
            names: vec!["x".into(), "vm1".into()],
            ..Identity::default()
        };
        for (client, disk, rights) in [
            (&nobody, "iso", Rights::ReadOnly),
            (&nobody, "a", Rights::None),
            (&user, "a", Rights::ReadWrite),
            (&user, "b", Rights::ReadOnly),
            (&host, "iso", Rights::ReadWrite),
            (&host, "a", Rights::None),
        ] {
            assert_eq!(rules.rights(client, disk), rights, "{client} {disk}");
        }
        assert!(rules.need_certificates() && rules.need_processes());
    }
}
