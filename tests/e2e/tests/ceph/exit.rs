//! The exit of a process that has loaded Ceph's libraries, whose threads run on meanwhile.

use super::on_cluster;
use pvblk_e2e::Stop;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{Finished, need, run, tool};
use std::path::Path;
use std::time::Duration;

/// A library that shows whether destructors run.
const SHOWN: &str = r#"
#include <unistd.h>
__attribute__((destructor)) static void end(void) { (void)!write(2, "destructors run\n", 16); }
"#;

/// A thread of librbd may still close an image that was refused when the process exits: destructors that ran then have made the server end by SIGSEGV.
pub fn exit() -> Result<(), Stop> {
    need(&["gcc"])?;
    on_cluster(|cluster| {
        cluster.rbd(&[
            "create",
            "--size=16M",
            "--image-feature=layering",
            "rbd/refused",
        ])?;
        let dir = tempfile::tempdir()?;
        let [source, library] = ["shown.c", "shown.so"].map(|name| dir.path().join(name));
        std::fs::write(&source, SHOWN)?;
        let mut compile = tool("gcc", ["-shared", "-fPIC", "-o"]);
        compile.arg(&library).arg(&source);
        run(compile, Duration::from_secs(60))?.success()?;
        let said = served(&cluster.spec("refused", ""), &library)?;
        let shown = said.stderr.contains("destructors run");
        check(is_failure(&said) && !shown, || format!("{said:?}"))?;
        // Without the libraries all is as usual.
        let said = served("mem:0", &library)?;
        let shown = said.stderr.contains("destructors run");
        check(is_failure(&said) && shown, || format!("{said:?}"))
    })
}

fn is_failure(said: &Finished) -> bool {
    said.status.and_then(|s| s.code()) == Some(1) && said.stderr.contains("pvblk: disk a")
}

fn served(spec: &str, library: &Path) -> Result<Finished, Stop> {
    let disk = format!("a={spec}");
    let mut serve = pvblk(["serve", "--disk", &disk, "--nbd=unix:none"])?;
    serve.env("LD_PRELOAD", library);
    run(serve, Duration::from_secs(120))
}
