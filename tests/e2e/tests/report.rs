//! `pvblk report`: pages of what the commands wrote. A browser looks at them, if there is one.

use pvblk_e2e::daemon::{lab, pvblk};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{Finished, need, run};
use pvblk_e2e::{Stop, run_all};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
/// A disk's or a job's name that would be more than text if it weren't taken as text.
const HOSTILE: &str = "<img src=x onerror=document.title=1>";

fn main() -> ExitCode {
    run_all(&[
        ("benchmarks_stand_side_by_side", benchmarks),
        ("a_comparison_has_its_verdicts", comparison),
        ("a_capture_shows_its_hops", capture),
        ("mistakes_are_one_line", mistakes),
        ("a_browser_loads_nothing_and_runs_nothing", browser),
    ])
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Result<Folder, Stop> {
        Ok(Folder(tempfile::tempdir()?))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Two results of `bench`: `a.json`, and `b.json` of another depth.
    fn benchmarks(&self) -> Result<[String; 2], Stop> {
        let files = [self.path("a.json"), self.path("b.json")];
        for (file, depth) in files.iter().zip(["1", "32"]) {
            let job = format!("[{HOSTILE}]\nrw=randread\nbs=4k\niodepth={depth}\nsize=4m\n");
            let jobs = self.path("job.fio");
            std::fs::write(&jobs, job)?;
            let args = ["bench", &jobs, "--target", "mem:8M", "--json", file];
            run(pvblk(args)?, PATIENCE)?.success()?;
        }
        Ok(files)
    }

    /// Runs `pvblk report ARGS`; returns the page.
    fn report(&self, args: &[&str]) -> Result<String, Stop> {
        let page = self.path("page.html");
        report(&[args, &["--output", &page]].concat())?.success()?;
        Ok(std::fs::read_to_string(page)?)
    }
}

fn report(args: &[&str]) -> Result<Finished, Stop> {
    run(pvblk(std::iter::once(&"report").chain(args))?, PATIENCE)
}

fn has(page: &str, words: &[&str]) -> Result<(), Stop> {
    for word in words {
        check(page.contains(word), || format!("no {word:?}"))?;
    }
    let loads = [
        "<script", "<img", "<link", "src=\"", "url(", "http://", "https://",
    ];
    for load in loads {
        // The namespace of SVG is a name, not a place.
        let page = page.replace("http://www.w3.org/2000/svg", "");
        check(!page.contains(load), || format!("the page has {load}"))?;
    }
    Ok(())
}

fn benchmarks() -> Result<(), Stop> {
    let folder = Folder::new()?;
    let [a, b] = folder.benchmarks()?;
    let one = folder.report(&[&a])?;
    has(
        &one,
        &[
            "<title>a.json</title>",
            "Completion times",
            "99.9 %",
            "machine",
            "download=\"a.json\"",
        ],
    )?;
    check(!one.contains(" beside "), || "one is beside nothing".into())?;
    let two = folder.report(&[&a, &b, "--title", "1 & 32"])?;
    has(
        &two,
        &[
            "<title>1 &amp; 32</title>",
            "a beside b",
            "Requests a second",
            "download=\"b.json\"",
        ],
    )?;
    // What is in the page is the file.
    let data = two
        .split("base64,")
        .nth(1)
        .and_then(|t| t.split('"').next());
    let encoded = folder.path("encoded");
    std::fs::write(&encoded, data.unwrap_or_default())?;
    let mut decode = Command::new("base64");
    let decoded = run(
        {
            decode.args(["-d", &encoded]);
            decode
        },
        PATIENCE,
    )?
    .success()?;
    check(decoded.stdout == std::fs::read_to_string(&a)?, || {
        "another file".into()
    })
}

fn comparison() -> Result<(), Stop> {
    let folder = Folder::new()?;
    let (a, b, json) = (
        folder.path("a.txt"),
        folder.path("b.txt"),
        folder.path("v.json"),
    );
    std::fs::write(&a, "100\n101\n99\n100\n")?;
    std::fs::write(&b, "120\n121\n119\n120\n")?;
    run(lab(["compare", &a, &b, "--json", &json])?, PATIENCE)?.success()?;
    let page = folder.report(&[&json])?;
    has(
        &page,
        &[
            "+20.00",
            "99.000",
            "in percent of the first side",
            "download=\"v.json\"",
        ],
    )
}

fn capture() -> Result<(), Stop> {
    let folder = Folder::new()?;
    let (trace, json, direct) = (
        folder.path("t"),
        folder.path("t.json"),
        folder.path("d.html"),
    );
    run(
        lab(["trace-sample", &trace, "--requests", "200"])?,
        PATIENCE,
    )?
    .success()?;
    let page = folder.report(&[&trace])?;
    let words = [
        "The way of requests to",
        "sample/front: down to ring",
        "D2C",
        "download=\"t.blktrace.0\"",
    ];
    has(&page, &words)?;
    let args = [
        "latency", &trace, "--json", &json, "--report", &direct, "--slow", "1ns",
    ];
    run(pvblk(args)?, PATIENCE)?.success()?;
    has(
        &std::fs::read_to_string(&direct)?,
        &[words[0], words[1], "Slow requests"],
    )?;
    has(&folder.report(&[&json])?, &words[..3])
}

fn mistakes() -> Result<(), Stop> {
    let folder = Folder::new()?;
    let (other, text) = (folder.path("other.json"), folder.path("text"));
    std::fs::write(&other, "{\"a\": 1}")?;
    std::fs::write(&text, "nothing")?;
    let [a, _] = folder.benchmarks()?;
    for (args, why) in [
        (&[other.as_str()][..], "other.json: it is JSON, but not of"),
        (&[&text], "read as a capture"),
        (&["/nonexistent/x"], "/nonexistent/x"),
        (&[&a, "--guest", "vm1=x"], "--guest needs"),
        (&[&a, "--output", "/nonexistent/x"], "/nonexistent/x"),
    ] {
        let said = report(args)?;
        let failed = said.status.and_then(|s| s.code()) == Some(1);
        let lines = said.stderr.lines().count();
        check(failed && lines == 1 && said.stderr.contains(why), || {
            format!("{args:?}: {}", said.stderr)
        })?;
    }
    Ok(())
}

/// The style sheets have the digests that the page names, its policy lets nothing else in, and hostile names stay text.
fn browser() -> Result<(), Stop> {
    need(&["chromium"])?;
    let folder = Folder::new()?;
    let [a, b] = folder.benchmarks()?;
    let page = folder.path("page.html");
    report(&[&a, &b, "--title", HOSTILE, "--output", &page])?.success()?;
    let profile = folder.path("profile");
    let mut command = Command::new("chromium");
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]);
    command.arg(format!("--user-data-dir={profile}"));
    command.args(["--dump-dom", &format!("file://{page}")]);
    let said = run(command, Duration::from_secs(120))?.success()?;
    let title = HOSTILE.replace('<', "&lt;").replace('>', "&gt;");
    check(
        said.stdout.contains(&format!("<title>{title}</title>")),
        || "the name isn't text".into(),
    )?;
    let refused = said
        .stderr
        .lines()
        .find(|l| l.contains("Content Security Policy"));
    check(refused.is_none(), || format!("{refused:?}"))?;
    check(
        Path::new(&page).exists() && said.stdout.contains("<svg "),
        || said.stderr.clone(),
    )
}
