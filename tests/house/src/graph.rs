//! The import table: dependencies that each crate of the workspace may have.

use crate::Finding;
use serde::Deserialize;

/// Output of `cargo metadata --no-deps`, as far as it is needed here.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    pub packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
pub struct Package {
    pub name: String,
    /// Path of its `Cargo.toml`.
    pub manifest_path: String,
    pub dependencies: Vec<Dependency>,
    /// Registries that it may be published to; `None`: any.
    pub publish: Option<Vec<String>>,
    pub description: Option<String>,
}

/// A dependency of a crate.
#[derive(Debug, Deserialize)]
pub struct Dependency {
    /// Name of the crate depended on.
    pub name: String,
    /// `dev` or `build`; `None` for a normal dependency.
    pub kind: Option<String>,
    /// The versions that will do; `*` without a word about them.
    pub req: String,
}

/// The crates of the workspace and the dependencies that each may have. A new crate needs a line here.
pub const ALLOWED: &[(&str, &[&str])] = &[
    ("pvblk-sys", &[]),
    ("pvblk-block", &["pvblk-sys"]),
    ("pvblk-protocol", &["pvblk-sys", "pvblk-block"]),
    (
        "pvblk-client",
        &["pvblk-sys", "pvblk-block", "pvblk-protocol"],
    ),
    (
        "pvblk-backend",
        &["pvblk-sys", "pvblk-block", "pvblk-protocol"],
    ),
    ("pvblk-cache", &["pvblk-sys", "pvblk-block"]),
    ("pvblk-raid5", &["pvblk-sys", "pvblk-block"]),
    (
        "pvblk-volume",
        &[
            "pvblk-sys",
            "pvblk-block",
            "pvblk-client",
            "pvblk-cache",
            "pvblk-raid5",
        ],
    ),
    // The library for other programs: of what it uses, nothing is in its interface.
    ("pvblk-disk", &["pvblk-sys", "pvblk-block", "pvblk-volume"]),
    ("pvblk-trace", &["pvblk-sys", "pvblk-block"]),
    // HTTP, without knowledge of disks.
    ("pvblk-web", &["pvblk-sys"]),
    (
        "pvblk-export",
        &[
            "pvblk-sys",
            "pvblk-block",
            "pvblk-protocol",
            "pvblk-backend",
        ],
    ),
    (
        "pvblk-sim",
        &[
            "pvblk-sys",
            "pvblk-block",
            "pvblk-protocol",
            "pvblk-client",
            "pvblk-backend",
            "pvblk-cache",
            "pvblk-raid5",
            "pvblk-volume",
            "pvblk-export",
        ],
    ),
    // Load and charts; no statistics, which are the lab's.
    ("pvblk-bench", &["pvblk-sys", "pvblk-block", "pvblk-volume"]),
    (
        "pvblk-lab",
        &[
            "pvblk-sys",
            "pvblk-block",
            "pvblk-protocol",
            "pvblk-client",
            "pvblk-backend",
            "pvblk-cache",
            "pvblk-raid5",
            "pvblk-volume",
            "pvblk-export",
            "pvblk-trace",
            "pvblk-bench",
        ],
    ),
    (
        "pvblk",
        &[
            "pvblk-sys",
            "pvblk-block",
            "pvblk-protocol",
            "pvblk-client",
            "pvblk-backend",
            "pvblk-cache",
            "pvblk-raid5",
            "pvblk-volume",
            "pvblk-export",
            "pvblk-trace",
            "pvblk-web",
            "pvblk-bench",
        ],
    ),
    // A model, without a line of the product.
    ("pvblk-raid5-model", &[]),
    // Hostile peers of each parser and of each side of the rings.
    (
        "pvblk-fuzz",
        &[
            "pvblk-sys",
            "pvblk-block",
            "pvblk-protocol",
            "pvblk-client",
            "pvblk-backend",
            "pvblk-raid5",
            "pvblk-volume",
            "pvblk-export",
            "pvblk-trace",
            "pvblk-web",
            "pvblk-testing",
        ],
    ),
    // Part of no product: other crates use it only in tests.
    ("pvblk-testing", &[]),
    // These two use the product only from outside: its sources and its command.
    ("pvblk-house", &[]),
    ("pvblk-e2e", &["pvblk-testing"]),
];

/// Pairs that must not depend on each other, even in tests: each implements one side of the rings, and must not rely
/// on the other's code.
const APART: &[(&str, &str)] = &[("pvblk-client", "pvblk-backend")];

/// Checks the graph against the table. Dev-dependencies may be others, except the pairs of [`APART`] and the command.
pub fn check(metadata: &Metadata) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_ours = |name: &str| name == "pvblk" || name.starts_with("pvblk-");
    for package in &metadata.packages {
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == package.name) else {
            findings.push(Finding::new(
                &package.name,
                "is not in the import table; add it to tests/house/src/graph.rs with what it may use",
            ));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| is_ours(&d.name)) {
            let (from, to) = (package.name.as_str(), dependency.name.as_str());
            let dev = dependency.kind.as_deref() == Some("dev");
            let apart = APART
                .iter()
                .any(|&(a, b)| (from, to) == (a, b) || (from, to) == (b, a));
            if to == "pvblk" {
                findings.push(Finding::new(
                    from,
                    "depends on the command, which no crate may",
                ));
            } else if apart {
                findings.push(Finding::new(
                    from,
                    format!("depends on {to}; they meet only over rings, also in tests"),
                ));
            } else if !dev && !allowed.contains(&to) {
                findings.push(Finding::new(
                    from,
                    format!("depends on {to}; it may use only {allowed:?}"),
                ));
            }
        }
    }
    findings
}

/// Crates that can be published: the library, and those that it is made of.
const PUBLISHED: &[&str] = &[
    "pvblk-sys",
    "pvblk-block",
    "pvblk-protocol",
    "pvblk-client",
    "pvblk-cache",
    "pvblk-raid5",
    "pvblk-volume",
    "pvblk-disk",
];

/// Checks that the crates of [`PUBLISHED`], and no others, can be published: with a description, and on nothing that can't be. Dev-dependencies of our own
/// have no version, and so are left out of what is published; some go in circles.
pub fn check_published(metadata: &Metadata) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_ours = |name: &str| ALLOWED.iter().any(|(n, _)| *n == name);
    for package in &metadata.packages {
        let name = package.name.as_str();
        let mut refuse = |text: String| findings.push(Finding::new(name, text));
        let planned = PUBLISHED.contains(&name);
        if planned != package.publish.as_ref().is_none_or(|to| !to.is_empty()) {
            refuse(match planned {
                true => "can't be published, and pvblk-disk needs it: drop `publish`".into(),
                false => "can be published; add `publish.workspace = true`".into(),
            });
        }
        if planned && package.description.as_ref().is_none_or(String::is_empty) {
            refuse("has no description, which registries want".into());
        }
        for to in package.dependencies.iter().filter(|d| is_ours(&d.name)) {
            let dev = to.kind.as_deref() == Some("dev");
            if planned && dev != (to.req == "*") {
                let (to, verb) = (&to.name, if dev { "has" } else { "lacks" });
                refuse(format!("{verb} a version for {to}: see check_published"));
            }
        }
    }
    findings
}

/// Checks that a member inherits the workspace's lints; without them `unsafe_code = "deny"` wouldn't apply to it.
pub fn check_manifest(place: &str, manifest: &str) -> Vec<Finding> {
    let mut lines = manifest.lines().map(str::trim);
    let inherits = lines.any(|l| l == "[lints]") && lines.next() == Some("workspace = true");
    if inherits {
        Vec::new()
    } else {
        vec![Finding::new(
            place,
            "doesn't inherit the workspace's lints; add `[lints]` with `workspace = true`",
        )]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &str, Option<&str>)]) -> Metadata {
        let mut packages: Vec<Package> = Vec::new();
        for &(from, to, kind) in edges {
            let edge = Dependency {
                name: to.into(),
                kind: kind.map(Into::into),
                req: if kind == Some("dev") { "*" } else { "^0.1.0" }.into(),
            };
            match packages.iter_mut().find(|p| p.name == from) {
                Some(p) => p.dependencies.push(edge),
                None => packages.push(Package {
                    name: from.into(),
                    manifest_path: String::new(),
                    dependencies: vec![edge],
                    publish: (!PUBLISHED.contains(&from)).then(Vec::new),
                    description: Some("text".into()),
                }),
            }
        }
        Metadata { packages }
    }

    fn one(from: &str, to: &str, kind: Option<&str>) -> Vec<Finding> {
        check(&graph(&[(from, to, kind)]))
    }

    #[test]
    fn the_plan_passes() {
        let edges = [
            ("pvblk-block", "pvblk-sys", None),
            ("pvblk-client", "pvblk-protocol", None),
            ("pvblk-export", "pvblk-backend", None),
            ("pvblk-lab", "pvblk-volume", None),
            ("pvblk-lab", "pvblk-bench", None),
            ("pvblk", "pvblk-bench", None),
            ("pvblk-volume", "libc", None),
            ("pvblk-backend", "pvblk-volume", Some("dev")),
            ("pvblk-backend", "pvblk-testing", Some("dev")),
            ("pvblk-e2e", "pvblk-testing", None),
        ];
        assert_eq!(check(&graph(&edges)), []);
    }

    #[test]
    fn sides_stay_apart_also_in_tests() {
        for kind in [None, Some("dev"), Some("build")] {
            assert_eq!(one("pvblk-client", "pvblk-backend", kind).len(), 1);
            assert_eq!(one("pvblk-backend", "pvblk-client", kind).len(), 1);
        }
    }

    #[test]
    fn nobody_depends_on_the_command() {
        assert_eq!(one("pvblk-lab", "pvblk", None).len(), 1);
        assert_eq!(one("pvblk-e2e", "pvblk", Some("dev")).len(), 1);
    }

    #[test]
    fn upward_edges_are_found() {
        for (from, to) in [
            ("pvblk-sys", "pvblk-block"),
            ("pvblk-protocol", "pvblk-backend"),
            ("pvblk-block", "pvblk-protocol"),
            ("pvblk-volume", "pvblk-backend"),
            ("pvblk-export", "pvblk-volume"),
            ("pvblk-export", "pvblk-client"),
            ("pvblk-client", "pvblk-export"),
            ("pvblk-raid5", "pvblk-volume"),
            ("pvblk-bench", "pvblk-client"),
            ("pvblk-disk", "pvblk-client"),
            ("pvblk-volume", "pvblk-disk"),
            ("pvblk-backend", "pvblk-export"),
            ("pvblk-e2e", "pvblk-lab"),
            ("pvblk-testing", "pvblk-sys"),
            ("pvblk-sim", "pvblk-testing"),
            ("pvblk", "pvblk-lab"),
            ("pvblk-bench", "pvblk-lab"),
        ] {
            assert_eq!(one(from, to, None).len(), 1, "{from} -> {to}");
            assert_eq!(one(from, to, Some("build")).len(), 1, "{from} -> {to}");
        }
    }

    #[test]
    fn unknown_crates_are_found() {
        let found = one("pvblk-surprise", "libc", None);
        assert!(found[0].text.contains("import table"), "{found:?}");
    }

    #[test]
    fn the_library_and_its_parts_can_be_published() {
        let plan = [
            ("pvblk-disk", "pvblk-volume", None),
            ("pvblk-disk", "pvblk-testing", Some("dev")),
            ("pvblk-disk", "parking_lot", Some("dev")),
            ("pvblk-lab", "pvblk-volume", None),
        ];
        let found = |change: fn(&mut Package)| {
            let mut metadata = graph(&plan);
            metadata.packages.iter_mut().for_each(change);
            let all = check_published(&metadata);
            let all = all.into_iter().map(|f| f.to_string());
            all.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found(|_| {}), "");
        assert!(found(|p| p.publish = None).contains("pvblk-lab"));
        assert!(found(|p| p.publish = Some(vec![])).contains("pvblk-disk"));
        assert!(found(|p| p.description = None).contains("description"));
        let versions = found(|p| {
            let swap = |d: &mut Dependency| {
                d.req = if d.req == "*" { "^0.1.0" } else { "*" }.into();
            };
            p.dependencies.iter_mut().for_each(swap);
        });
        assert!(versions.contains("lacks a version for pvblk-volume"));
        assert!(versions.contains("has a version for pvblk-testing"));
        assert!(!versions.contains("pvblk-lab"), "{versions}");
    }

    #[test]
    fn a_manifest_must_inherit_lints() {
        assert_eq!(
            check_manifest("x", "[package]\n\n[lints]\nworkspace = true\n"),
            []
        );
        assert_eq!(check_manifest("x", "[package]\n").len(), 1);
        assert_eq!(check_manifest("x", "[lints]\n[lints.rust]\n").len(), 1);
    }
}
