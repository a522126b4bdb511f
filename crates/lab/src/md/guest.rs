//! The kernel's md in user-mode Linux: drives `tests/vm/scripts/md-speed.sh`, whose head describes the
//! contents of the two files.

use crate::child;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Bytes of an order and of an answer: a page, which the guest writes at once.
const PAGE: usize = 4096;
/// The script's status if this machine can't run guests.
const CANNOT: i32 = 125;
/// Limit for the first start, which fetches packages and makes the guest.
const START: Duration = Duration::from_secs(600);
/// Limit for an order that takes a moment, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Runs of one sample, of which all but the last may end too early.
const SAMPLES: usize = 10;
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// fio's counts of a sample, and its cost on this machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleCost {
    /// Writes a second, by the guest's clock.
    pub rate: f64,
    /// CPUs that all of the guest's processes used while it wrote.
    pub cpus: f64,
    /// Bytes that our array has moved for each byte written, without what its members do.
    pub moved: Option<f64>,
}

/// An answer of the guest.
#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Begun,
    /// KiB, milliseconds and writes a second; or the result of a check.
    Done([f64; 3]),
    Failed(String),
}

/// The answer to order number `order`, if the page has it and it is complete.
fn parse(page: &[u8], order: u64) -> Result<Option<Answer>> {
    let text = String::from_utf8_lossy(page);
    let line = text.lines().next().unwrap_or("");
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [number, words @ .., "end"] = words.as_slice() else {
        return Ok(None);
    };
    if number.parse() != Ok(order) {
        return Ok(None);
    }
    Ok(Some(match words {
        ["begun"] => Answer::Begun,
        ["failed", what @ ..] => Answer::Failed(what.join(" ")),
        ["done", figures @ ..] => {
            let figures: Option<Vec<f64>> = figures.iter().map(|f| f.parse().ok()).collect();
            let figures = figures.and_then(|f| f.try_into().ok());
            Answer::Done(figures.with_context(|| format!("an answer is unreadable: {text}"))?)
        }
        _ => bail!("an answer is unreadable: {text}"),
    }))
}

/// A guest that waits for orders. It is ended when it is dropped.
pub struct Guest {
    child: Child,
    folder: PathBuf,
    orders: File,
    answers: File,
    order: u64,
}

impl Guest {
    /// Starts the guest on one CPU, with an array, for at most `limit`. `uml` is `tests/vm/uml.sh`; files go
    /// into `folder`, which must be empty.
    pub fn start(uml: &Path, cpu: usize, folder: &Path, limit: Duration) -> Result<Guest> {
        ensure!(
            uml.is_file(),
            "there is no {}: run this in the source tree, or say with --uml where its tests/vm/uml.sh is",
            uml.display()
        );
        let script = uml.with_file_name("scripts").join("md-speed.sh");
        let file = |name: &str| {
            let path = folder.join(name);
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(path)?;
            file.set_len(PAGE as u64)?;
            anyhow::Ok(file)
        };
        let (orders, answers) = (file("orders")?, file("answers")?);
        // If this program is killed, the guest ends too.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "taskset", "-c", &cpu.to_string()])
            .arg(uml)
            .arg("--script")
            .arg(script)
            .arg("--out")
            .arg(folder.join("out"))
            .arg("--disk")
            .arg(folder.join("orders"))
            .arg("--disk")
            .arg(folder.join("answers"))
            .args(["--memory", "1024"])
            .args(["--seconds", &limit.as_secs().max(1).to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("said"))?)
            .spawn()
            .context("starting setpriv: is it installed?")?;
        let folder = folder.to_owned();
        let mut guest = Guest {
            child,
            folder,
            orders,
            answers,
            order: 0,
        };
        // The guest takes orders from here on.
        guest.give("set safe_mode_delay 0")?;
        guest.done(START)?;
        Ok(guest)
    }

    /// Writes a value into a file of the array in the guest's `/sys`.
    pub fn set(&mut self, file: &str, value: &str) -> Result<()> {
        self.give(&format!("set {file} {value}"))?;
        self.done(PATIENCE).map(drop)
    }

    /// One run of fio in the guest, on `md0` or on `ram4`, for `seconds` seconds with blocks of `block` bytes. A run that ended before its CPU time was
    /// read is repeated; an error if that is so time after time.
    pub fn sample(
        &mut self,
        device: &str,
        fio: &str,
        block: u64,
        seconds: f64,
    ) -> Result<SampleCost> {
        for _ in 0..SAMPLES {
            if let Some(cost) = self.sample_once(device, fio, block, seconds)? {
                return Ok(cost);
            }
        }
        bail!("{SAMPLES} runs of {seconds} s ended before they were measured: measure longer")
    }

    fn sample_once(
        &mut self,
        device: &str,
        fio: &str,
        block: u64,
        seconds: f64,
    ) -> Result<Option<SampleCost>> {
        let runtime = (seconds * 1e3).ceil();
        self.give(&format!(
            "sample {device} --runtime={runtime}ms --bs={block} {fio}"
        ))?;
        let begun = self.answer(PATIENCE)?;
        ensure!(
            begun == Answer::Begun,
            "the guest can't: {begun:?}: {}",
            self.last_words()
        );
        // The middle of the run is measured, neither its start nor its end.
        let wait = |share: f64| std::thread::sleep(Duration::from_secs_f64(seconds * share));
        wait(0.15);
        let processes = descendants(self.child.id())?;
        let (from, before) = (Instant::now(), run_ns(&processes));
        wait(0.7);
        let (to, after) = (Instant::now(), run_ns(&processes));
        let [kib, milliseconds, rate] = self.done(PATIENCE)?;
        agree(kib, milliseconds, rate, block)?;
        // The time of a process that has ended can't be read any more.
        let ran = before.zip(after).map(|(before, after)| after - before);
        Ok(ran.map(|ran| SampleCost {
            rate,
            cpus: ran / (to - from).as_nanos() as f64,
            moved: None,
        }))
    }

    /// The number of sectors with wrong parity that md's check of the whole array finds.
    pub fn check(&mut self) -> Result<u64> {
        self.give("check")?;
        Ok(self.done(PATIENCE)?[2] as u64)
    }

    /// Ends the guest; returns its description of itself.
    pub fn quit(mut self) -> Result<String> {
        self.give("quit")?;
        self.done(PATIENCE)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the guest failed: {}", self.last_words());
        let about = std::fs::read_to_string(self.folder.join("out/about"));
        about.context("what the guest left about itself")
    }

    fn give(&mut self, order: &str) -> Result<()> {
        self.order += 1;
        let mut page = format!("{} {order} end\n", self.order).into_bytes();
        ensure!(page.len() <= 512, "an order is too long: {order}");
        page.resize(PAGE, 0);
        self.orders.write_all_at(&page, 0)?;
        Ok(())
    }

    /// The last answer to the current order, after `Begun`.
    fn done(&mut self, limit: Duration) -> Result<[f64; 3]> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.answer(left)? {
                Answer::Begun => std::thread::sleep(LOOK_AGAIN),
                Answer::Done(figures) => return Ok(figures),
                Answer::Failed(what) => bail!("the guest can't {what}: {}", self.last_words()),
            }
        }
    }

    fn answer(&mut self, limit: Duration) -> Result<Answer> {
        let deadline = Instant::now() + limit;
        let mut page = [0; PAGE];
        loop {
            self.answers.read_exact_at(&mut page, 0)?;
            if let Some(answer) = parse(&page, self.order)? {
                return Ok(answer);
            }
            if let Some(status) = self.child.try_wait()? {
                let said = self.last_words();
                match status.code() {
                    Some(CANNOT) => bail!("no guest: {said}"),
                    _ => bail!("the guest ended: {status}: {said}"),
                }
            }
            ensure!(Instant::now() < deadline, "the guest doesn't answer");
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn last_words(&self) -> String {
        let said = std::fs::read_to_string(self.folder.join("said")).unwrap_or_default();
        let last = said.lines().last().unwrap_or("it said nothing");
        last.trim_start_matches("vm: ").to_owned()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let id = self.child.id().try_into().ok().and_then(Pid::from_raw);
        if let (Some(id), Ok(None)) = (id, self.child.try_wait()) {
            // The script ends the guest and removes its files.
            let _ = kill_process(id, Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

/// Checks that fio's figures in KiB and in writes agree: otherwise the script has taken the wrong fields.
fn agree(kib: f64, milliseconds: f64, rate: f64, block: u64) -> Result<()> {
    let writes = kib * 1024.0 / block as f64;
    let of_rate = rate * milliseconds / 1e3;
    ensure!(
        writes >= 1.0 && (writes - of_rate).abs() <= 1.0 + writes * 0.02,
        "fio in the guest wrote {kib} KiB, in {milliseconds} ms, {rate} times a second: that can't be"
    );
    Ok(())
}

/// A process and all its descendants.
fn descendants(root: u32) -> Result<Vec<u32>> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        // Processes that end meanwhile have no file.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| {
            let mut fields = rest.split_whitespace();
            fields.nth(1)?.parse().ok()
        });
        parents.push((pid, parent.unwrap_or(0)));
    }
    let mut tree = vec![root];
    let mut at = 0;
    while at < tree.len() {
        let children = parents.iter().filter(|(_, parent)| *parent == tree[at]);
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        tree.extend(children);
        at += 1;
    }
    Ok(tree)
}

/// Nanoseconds that all threads of `processes` ran; `None` if one of them has ended.
fn run_ns(processes: &[u32]) -> Option<f64> {
    processes.iter().map(|pid| child::threads_ns(*pid)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_processes_that_have_ended_is_not_known() {
        let own = std::process::id();
        assert!(run_ns(&[own]) > Some(0.0));
        // Above the kernel's largest number of a process.
        assert_eq!(run_ns(&[own, 1 << 30]), None);
    }

    fn page(text: &str) -> Vec<u8> {
        format!("{text:<4095}\n").into_bytes()
    }

    #[test]
    fn only_a_complete_answer_to_the_order_counts() {
        let of = |text: &str| parse(&page(text), 7).unwrap();
        assert_eq!(of("7 begun end"), Some(Answer::Begun));
        assert_eq!(
            of("7 done 6144 500 3072 end"),
            Some(Answer::Done([6144.0, 500.0, 3072.0]))
        );
        assert_eq!(
            of("7 failed fio end"),
            Some(Answer::Failed("fio".to_owned()))
        );
        for other in ["6 done 1 2 3 end", "7 done 1 2", "", "77 begun end"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(parse(&[0; PAGE], 7).unwrap(), None);
        for bad in ["7 done 1 2 end", "7 done a b c end", "7 dance end"] {
            assert!(parse(&page(bad), 7).is_err(), "{bad}");
        }
    }

    #[test]
    fn figures_that_contradict_each_other_are_refused() {
        assert!(agree(122_872.0, 2001.0, 15_351.0, 4096).is_ok());
        for (kib, milliseconds, rate) in [
            (0.0, 2001.0, 0.0),
            (122_872.0, 2001.0, 61_405.0),
            (122_872.0, 1000.0, 15_351.0),
            (61_405.0, 2001.0, 15_351.0),
        ] {
            assert!(agree(kib, milliseconds, rate, 4096).is_err());
        }
    }

    #[test]
    fn cpu_time_of_grandchildren_counts() {
        let mut shell = Command::new("sh")
            .args(["-c", "sh -c 'while :; do :; done' & wait"])
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        let (mut tree, mut ran) = (Vec::new(), 0.0);
        while ran < 1e8 && Instant::now() < deadline {
            tree = descendants(shell.id()).unwrap();
            ran = run_ns(&tree).unwrap_or(0.0);
        }
        let own = run_ns(&[shell.id()]).unwrap_or(f64::MAX);
        for pid in &tree {
            let id = Pid::from_raw(*pid as i32).unwrap();
            let _ = kill_process(id, Signal::KILL);
        }
        shell.wait().unwrap();
        assert!(
            tree.len() == 2 && ran >= 1e8 && own < ran / 2.0,
            "{tree:?}: {own} of {ran}"
        );
    }
}
