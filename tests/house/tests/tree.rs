//! Applies the rules to this tree.

use pvblk_house::{
    Finding, devices, exported, graph, interface, links, opens, source, tree, words,
};
use std::process::Command;

fn assert_none(findings: &[Finding]) {
    let list: Vec<String> = findings.iter().map(Finding::to_string).collect();
    assert!(list.is_empty(), "broken rules:\n  {}", list.join("\n  "));
}

fn metadata() -> graph::Metadata {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(tree::root())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

#[test]
fn imports_follow_the_table() {
    let metadata = metadata();
    assert!(metadata.packages.len() >= 9, "the workspace has its crates");
    assert_none(&graph::check(&metadata));
}

#[test]
fn the_library_can_be_published() {
    assert_none(&graph::check_published(&metadata()));
}

#[test]
fn every_member_inherits_the_lints() {
    let mut findings = Vec::new();
    for package in metadata().packages {
        let text = std::fs::read_to_string(&package.manifest_path).expect("a manifest is readable");
        findings.extend(graph::check_manifest(&package.name, &text));
    }
    assert_none(&findings);
}

#[test]
fn sources_follow_the_rules() {
    let files = tree::files(&tree::root(), &[".rs"]).expect("the tree is readable");
    assert!(files.len() > 20, "the sources were found: {}", files.len());
    let findings: Vec<Finding> = files
        .iter()
        .flat_map(|(path, text)| source::check_rust(path, text))
        .collect();
    assert_none(&findings);
}

#[test]
fn no_capability_is_forgotten() {
    let files = tree::files(&tree::root(), &[".rs"]).expect("the tree is readable");
    let findings: Vec<Finding> = files
        .iter()
        .flat_map(|(path, text)| devices::check_devices(path, text))
        .collect();
    assert_none(&findings);
}

#[test]
fn the_library_shows_no_type_of_the_crates_below() {
    let files = tree::files(&tree::root(), &[".rs"]).expect("the tree is readable");
    let of_library = files
        .iter()
        .filter(|(path, _)| path.starts_with(interface::LIBRARY));
    assert!(of_library.count() > 5, "the library has moved");
    let findings: Vec<Finding> = files
        .iter()
        .flat_map(|(path, text)| interface::check(path, text))
        .collect();
    assert_none(&findings);
}

/// With `PVBLK_WRITE_INTERFACE=1` the file is written anew.
#[test]
fn the_interface_of_the_library_is_written_down() {
    let files = tree::files(&tree::root(), &[".rs"]).expect("the tree is readable");
    let now = exported::lines(&files);
    assert!(now.len() > 50, "the library has moved: {now:?}");
    let path = tree::root().join(exported::INTERFACE);
    if std::env::var_os("PVBLK_WRITE_INTERFACE").is_some_and(|v| v == "1") {
        std::fs::write(&path, now.join("\n") + "\n").expect("the interface is written");
    }
    let text = std::fs::read_to_string(&path).expect("the interface is readable");
    let told: Vec<&str> = text.lines().collect();
    let gone = told.iter().filter(|line| now.iter().all(|n| n != *line));
    let new = now.iter().filter(|line| !told.contains(&line.as_str()));
    let gone = gone.map(|line| format!("- {line}"));
    let changes: Vec<String> = gone.chain(new.map(|line| format!("+ {line}"))).collect();
    assert!(
        changes.is_empty(),
        "the public interface of pvblk-disk has changed: write {} anew (PVBLK_WRITE_INTERFACE=1 cargo test -p pvblk-house), and a line to CHANGELOG.md:\n  {}",
        exported::INTERFACE,
        changes.join("\n  ")
    );
}

#[test]
fn the_server_opens_by_its_opener() {
    let files = tree::files(&tree::root(), &[".rs"]).expect("the tree is readable");
    let paths: Vec<&str> = files.iter().map(|(path, _)| path.as_str()).collect();
    let mut findings = opens::check_list(&paths);
    findings.extend(
        files
            .iter()
            .flat_map(|(path, text)| opens::check(path, text)),
    );
    assert_none(&findings);
}

#[test]
fn doc_comments_follow_the_rules() {
    let files = tree::files(&tree::root(), &[".rs"]).expect("the tree is readable");
    let findings: Vec<Finding> = files
        .iter()
        .flat_map(|(path, text)| words::check(path, text))
        .collect();
    assert_none(&findings);
}

#[test]
fn scripts_are_short() {
    let files = tree::files(&tree::root(), &[".sh"]).expect("the tree is readable");
    let findings: Vec<Finding> = files
        .iter()
        .flat_map(|(path, text)| source::check_length(path, text))
        .collect();
    assert_none(&findings);
}

#[test]
fn links_lead_somewhere() {
    let root = tree::root();
    let files = tree::files(&root, &[".md"]).expect("the tree is readable");
    let findings: Vec<Finding> = files
        .iter()
        .flat_map(|(path, text)| links::check(path, text, |p| root.join(p).exists()))
        .collect();
    assert_none(&findings);
}
