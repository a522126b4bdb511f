//! Disks that come and go at run time, and are what they were after a restart: in order, by a reload, and by `kill -9` at any moment.

mod kills;

use pvblk_e2e::arrays::{Disks, raid};
use pvblk_e2e::control::Control;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::managed::{array, name, names};
use pvblk_e2e::nbd::Connection;
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::tools::{Finished, compare, need, run, run_ok};
use pvblk_e2e::{Daemon, Stop, run_all};
use pvblk_testing::random;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// For what takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_all(&[
        ("a_restart_serves_what_was_wanted", restart),
        ("a_configuration_is_read_again", reload),
        ("a_state_that_cannot_be_used_is_refused", refused),
        ("a_disk_that_is_not_there_is_shown_and_tried_again", gone),
        ("members_replaced_while_serving_are_remembered", replaced),
        (
            "a_spare_that_takes_over_by_itself_is_remembered",
            taken_over,
        ),
        (
            "kills_in_the_middle_of_commands_leave_the_old_or_the_new",
            kills::commands,
        ),
        (
            "kills_in_the_middle_of_replacements_lose_no_array",
            kills::replacements,
        ),
    ])
}

/// A server with a configuration file and a state, in a folder of its own.
struct Server {
    daemon: Daemon,
    dir: TempDir,
}

impl Server {
    fn new(configuration: &str) -> Result<Server, Stop> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("pvblk.toml"), configuration)?;
        let daemon = start(dir.path())?;
        Ok(Server { daemon, dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configure(&self, text: &str) -> Result<(), Stop> {
        Ok(std::fs::write(self.path("pvblk.toml"), text)?)
    }

    /// Starts it again, after it ended in whatever way.
    fn again(&mut self) -> Result<(), Stop> {
        self.daemon = start(self.dir.path())?;
        Ok(())
    }

    fn control(&self) -> Result<Control, Stop> {
        Control::open(&self.path("control"))
    }

    /// A command of `pvblk` to this server.
    fn ask(&self, args: &[&str]) -> Result<Finished, Stop> {
        let mut command = pvblk(args)?;
        command.args(["--control", &unix(&self.path("control"))]);
        run(command, PATIENCE)
    }

    fn done(&self, args: &[&str]) -> Result<String, Stop> {
        Ok(self.ask(args)?.success()?.stdout)
    }

    /// Disks with their volumes and whether they are exclusive.
    fn disks(&self) -> Result<Look, Stop> {
        look(&mut self.control()?)
    }

    fn expect(&self, expected: &[(&str, &str, bool)]) -> Result<(), Stop> {
        let found = self.disks()?;
        let expected: Look = expected
            .iter()
            .map(|(n, v, e)| ((*n).to_owned(), ((*v).to_owned(), *e)))
            .collect();
        check(found == expected, || {
            format!("{found:?}, and expected were {expected:?}")
        })
    }
}

type Look = BTreeMap<String, (String, bool)>;

fn look(control: &mut Control) -> Result<Look, Stop> {
    let list = control.must("disk.list", json!({}))?;
    let mut look = Look::new();
    for disk in list["disks"].as_array().into_iter().flatten() {
        let text = |key: &str| disk[key].as_str().unwrap_or_default().to_owned();
        if text("state") == "serving" {
            let exclusive = disk["exclusive"] == true;
            look.insert(text("name"), (text("volume"), exclusive));
        }
    }
    Ok(look)
}

fn is_used(control: &mut Control) -> Result<bool, Stop> {
    let list = control.must("disk.list", json!({}))?;
    let disks = list["disks"].as_array().map_or(&[][..], Vec::as_slice);
    let mut users = disks.iter().filter_map(|disk| disk["users"].as_array());
    Ok(users.any(|users| !users.is_empty()))
}

fn start(dir: &Path) -> Result<Daemon, Stop> {
    let path = |name: &str| dir.join(name);
    let (config, state) = (path("pvblk.toml"), path("state"));
    let mut command = pvblk(["serve"])?;
    command
        .arg("--config")
        .arg(config)
        .arg("--state")
        .arg(state);
    command.args(["--control", &unix(&path("control"))]);
    command.args(["--nbd", &unix(&path("nbd"))]);
    Daemon::run(command)
}

const TWO: &str = "[disk.a]\nvolume = 'mem:1M'\n[disk.b]\nvolume = 'mem:2M'\n";

fn restart() -> Result<(), Stop> {
    let mut server = Server::new(TWO)?;
    let file = format!("file:{},size=1M", server.path("c.img").display());
    server.done(&["disk", "add", &format!("c={file}")])?;
    server.done(&["disk", "remove", "a"])?;
    server.done(&["disk", "set", "b", "--exclusive", "on"])?;
    let expected = [("b", "mem:2M", true), ("c", file.as_str(), false)];
    server.expect(&expected)?;
    server.daemon.stop()?;
    server.again()?;
    server.expect(&expected)?;
    let held = "disk a isn't served: it is configured, and was removed at run time";
    let lines = server.daemon.lines();
    check(lines.iter().any(|l| l.contains(held)), || lines.join("\n"))?;
    // It can't be reached, and the others can.
    check(Connection::open(&server.path("nbd"), "a").is_err(), || {
        "a is an export".into()
    })?;
    drop(Connection::open(&server.path("nbd"), "c")?);
    let dry = server.done(&["ctl", "reload", "--dry-run", "--json"])?;
    let dry: Value = serde_json::from_str(&dry)?;
    check(
        dry["added"][0]["disk"] == "a" && dry["added"][0]["was_removed"] == true,
        || dry.to_string(),
    )?;
    server.expect(&expected)?;
    let said = server.done(&["ctl", "reload"])?;
    check(said.contains("it was removed at run time"), || said.clone())?;
    let all = [("a", "mem:1M", false), expected[0], expected[1]];
    server.expect(&all)?;
    server.daemon.kill()?;
    server.again()?;
    server.expect(&all)?;
    server.daemon.stop()
}

fn reload() -> Result<(), Stop> {
    let mut server = Server::new(TWO)?;
    // A client of a disk that doesn't change isn't disturbed.
    let mut client = Connection::open(&server.path("nbd"), "b")?;
    let mut undisturbed = || client.read(1, 0, 4096).map(drop);
    undisturbed()?;
    server.configure(&format!("{TWO}colour = 1\n"))?;
    let wrong = server.ask(&["ctl", "reload"])?;
    check(
        wrong.status.and_then(|s| s.code()) == Some(1)
            && wrong.stderr.lines().count() == 1
            && wrong.stderr.contains("pvblk.toml, line 5"),
        || wrong.stderr.clone(),
    )?;
    server.expect(&[("a", "mem:1M", false), ("b", "mem:2M", false)])?;
    let changed = "workers = 3\n[disk.b]\nvolume = 'mem:2M'\nexclusive = true\n[disk.c]\nvolume = 'null:1M'\n";
    server.configure(changed)?;
    let words = |text: &str| -> Vec<String> {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().map(words).collect()
    };
    let table = [
        "added c null:1M",
        "removed a",
        "changed b exclusive: false -> true",
        "unchanged: 0",
        "needs a restart: workers",
    ];
    let said = words(&server.done(&["ctl", "reload", "--dry-run"])?);
    check(said[..5] == table, || said.join("\n"))?;
    server.expect(&[("a", "mem:1M", false), ("b", "mem:2M", false)])?;
    server.daemon.signal(Signal::HUP)?;
    let expected = [("b", "mem:2M", true), ("c", "null:1M", false)];
    let begin = Instant::now();
    while server.expect(&expected).is_err() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    server.expect(&expected)?;
    undisturbed()?;
    // The client uses it: it stays until it may go, and that is told.
    server.configure("[disk.c]\nvolume = 'null:1M'\n")?;
    let busy = server.ask(&["ctl", "reload"])?;
    check(
        busy.status.and_then(|s| s.code()) == Some(1)
            && busy.stdout.contains("failed: disk b: remove"),
        || format!("{busy:?}"),
    )?;
    undisturbed()?;
    drop(client);
    let begin = Instant::now();
    while server.ask(&["ctl", "reload"])?.success().is_err() && begin.elapsed() < PATIENCE {}
    server.expect(&[("c", "null:1M", false)])?;
    server.daemon.stop()
}

fn refused() -> Result<(), Stop> {
    let mut server = Server::new(TWO)?;
    server.done(&["disk", "remove", "a"])?;
    let refusal = |server: &Server| -> Result<String, Stop> {
        match start(server.dir.path()) {
            Ok(_) => Stop::fail("a second server started"),
            Err(Stop::Fail(said)) => Ok(said),
            Err(other) => Err(other),
        }
    };
    let said = refusal(&server)?;
    check(said.contains("another server uses it"), || said.clone())?;
    server.daemon.kill()?;
    let file = server.path("state").join("state.json");
    let good = std::fs::read_to_string(&file)?;
    for (text, expect) in [
        (&good[..good.len() / 2], "it is damaged"),
        (
            &good.replace("\"version\": 1", "\"version\": 7"),
            "it has version 7",
        ),
    ] {
        std::fs::write(&file, text)?;
        let said = refusal(&server)?;
        check(
            said.contains(expect) && said.contains("move it away"),
            || said.clone(),
        )?;
        let left = std::fs::read_to_string(&file)?;
        check(left == text, || "the file was written".into())?;
    }
    std::fs::write(&file, good)?;
    server.again()?;
    server.expect(&[("b", "mem:2M", false)])?;
    server.daemon.stop()
}

fn gone() -> Result<(), Stop> {
    let mut server = Server::new("[disk.a]\nvolume = 'mem:1M'\n")?;
    let (here, away) = (server.path("c.img"), server.path("away.img"));
    server.done(&["disk", "add", &format!("c=file:{},size=1M", here.display())])?;
    server.daemon.stop()?;
    // As if its file system weren't mounted. `size=` doesn't make another file, which would be empty.
    std::fs::rename(&here, &away)?;
    server.again()?;
    let list: Value = serde_json::from_str(&server.done(&["disk", "list", "--json"])?)?;
    let shown = &list["disks"][1];
    let reason = shown["reason"].as_str().unwrap_or_default();
    check(
        shown["state"] == "failed" && shown["health"] == "failed" && reason.contains("c.img"),
        || list.to_string(),
    )?;
    for (args, words) in [
        (&["disk", "list"][..], "disk c isn't open: "),
        (&["stat"], "one more disk isn't open"),
    ] {
        let said = server.done(args)?;
        check(said.contains(words), || said.clone())?;
    }
    // In vain; and then not.
    let said = server.ask(&["disk", "add", "c"])?.stderr;
    check(said.lines().count() == 1 && said.contains("c.img"), || {
        said.clone()
    })?;
    check(!here.exists(), || "a file was made".to_owned())?;
    std::fs::rename(&away, &here)?;
    let said = server.done(&["disk", "add", "c"])?;
    check(said.contains("disk c: serving"), || said.clone())?;
    drop(Connection::open(&server.path("nbd"), "c")?);
    // An empty one is made when the disk is removed and added again.
    server.daemon.stop()?;
    std::fs::remove_file(&here)?;
    server.again()?;
    let said = server.ask(&["disk", "add", "c"])?.stderr;
    check(said.contains("bring it back"), || said.clone())?;
    server.done(&["disk", "remove", "c"])?;
    server.done(&["disk", "add", &format!("c=file:{},size=1M", here.display())])?;
    server.daemon.stop()
}

/// An array of four members, its server, and the image that it holds.
struct ArrayServer {
    server: Server,
    disks: Disks,
    image: PathBuf,
}

impl ArrayServer {
    fn new(files: usize) -> Result<ArrayServer, Stop> {
        ArrayServer::of(files, |disks| {
            let members = names(disks, &[0, 1, 2, 3]);
            Ok(members.iter().map(|m| format!("[file:{m}]")).collect())
        })
    }

    /// Its server has the list of members that `each` returns.
    fn of(
        files: usize,
        each: impl FnOnce(&Disks) -> Result<String, Stop>,
    ) -> Result<ArrayServer, Stop> {
        need(&["nbdcopy", "cmp"])?;
        let (disks, image) = array(files, "ppl")?;
        let each = each(&disks)?;
        let server = Server::new(&format!("[disk.r]\nvolume = 'raid5:{each}'\n"))?;
        let array = ArrayServer {
            server,
            disks,
            image,
        };
        let args = [
            "--flush".into(),
            array.image.display().to_string(),
            array.uri(),
        ];
        run_ok("nbdcopy", &args)?;
        Ok(array)
    }

    fn uri(&self) -> String {
        let socket = self.server.path("nbd");
        format!("nbd+unix:///r?socket={}", socket.display())
    }

    /// The array holds what was written to it.
    fn verify(&self) -> Result<(), Stop> {
        let back = self.server.path("back");
        run_ok("nbdcopy", [&self.uri(), &back.display().to_string()])?;
        compare(&self.image, &back)
    }

    fn detail(&self) -> Result<Value, Stop> {
        let said = self.server.done(&["raid", "detail", "--json", "r"])?;
        Ok(serde_json::from_str(&said)?)
    }

    /// Waits until nothing is under way.
    fn settle(&self) -> Result<Value, Stop> {
        let begin = Instant::now();
        loop {
            let detail = self.detail()?;
            let members = detail["members"].as_array().cloned().unwrap_or_default();
            let rebuilds = members.iter().any(|m| m["state"] == "spare rebuilding");
            if detail["serving"]["sync"].is_null() && !rebuilds && detail["degraded"] == false {
                return Ok(detail);
            }
            if begin.elapsed() > PATIENCE {
                return Err(self.server.daemon.failure(&format!("never done: {detail}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Files that are its members, by place.
    fn members(&self) -> Result<Vec<String>, Stop> {
        let detail = self.settle()?;
        let members = detail["members"].as_array().cloned().unwrap_or_default();
        let active = members.iter().filter(|m| m["state"] == "active sync");
        let name = |m: &Value| m["name"].as_str().unwrap_or_default().to_owned();
        Ok(active.map(name).collect())
    }
}

/// The second member fails after some requests, and a spare is there.
fn taken_over() -> Result<(), Stop> {
    let mut rng = random();
    let cycles = kills::cycles(3)?;
    for cycle in 0..cycles {
        let mut array = ArrayServer::of(5, |disks| {
            let spare = ["--spare", &name(disks, 4)].map(str::to_owned);
            let args: Vec<&str> = ["add"]
                .into_iter()
                .chain(spare.iter().map(String::as_str))
                .collect();
            raid(&args, &disks.paths(0..4))?;
            let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|n| name(disks, n));
            Ok(format!(
                "[file:{a}][fault:after=200,error=1:file:{b}][file:{c}][file:{d}][file:{e}]"
            ))
        })?;
        if cycle > 0 {
            // Before, while and after the new list is stored: the old one and the new one start.
            std::thread::sleep(Duration::from_millis(rng.u64(0..300)));
            array.server.daemon.kill()?;
            array.server.again()?;
            array.verify()?;
        }
        let spare = name(&array.disks, 4);
        let begin = Instant::now();
        let is_stored = |array: &ArrayServer| -> Result<bool, Stop> {
            let file = array.server.path("state").join("state.json");
            let Ok(text) = std::fs::read_to_string(file) else {
                return Ok(false);
            };
            let stored: Value = serde_json::from_str(&text)?;
            let volume = stored["changes"]["disks"]["r"]["wanted"]["volume"].as_str();
            let volume = volume.unwrap_or_default();
            Ok(volume.contains(&spare) && !volume.contains(&name(&array.disks, 1)))
        };
        while !is_stored(&array)? {
            if begin.elapsed() > PATIENCE {
                return Err(array
                    .server
                    .daemon
                    .failure(&format!("never stored: {}", array.detail()?)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let members = array.members()?;
        check(members.iter().any(|m| m.contains(&spare)), || {
            format!("{members:?}")
        })?;
        array.verify()?;
        array.server.daemon.stop()?;
        // The configuration still names the member that failed.
        std::fs::remove_file(array.disks.path(1))?;
        array.server.again()?;
        array.verify()?;
        array.server.daemon.stop()?;
    }
    Ok(())
}

fn replaced() -> Result<(), Stop> {
    let mut array = ArrayServer::new(6)?;
    // Without --control: a name that no file has is a disk of the server that the variable names.
    let mut command = pvblk(["raid", "detail", "r"])?;
    command.env("PVBLK_CONTROL", unix(&array.server.path("control")));
    let said = run(command, PATIENCE)?.success()?.stdout;
    check(said.contains("Raid Level : raid5"), || said.clone())?;
    for (old, new) in [(0, 4), (2, 5)] {
        let (old, new) = (name(&array.disks, old), name(&array.disks, new));
        array
            .server
            .done(&["raid", "replace", "r", &old, "--with", &new])?;
        array.members()?;
    }
    let members = array.members()?;
    for (wanted, is) in [
        (1, true),
        (3, true),
        (4, true),
        (5, true),
        (0, false),
        (2, false),
    ] {
        let file = name(&array.disks, wanted);
        let found = members.iter().any(|m| m.contains(&file));
        check(found == is, || format!("{file}: {members:?}"))?;
    }
    array.verify()?;
    array.server.daemon.stop()?;
    // The devices that were replaced are thrown away; the file still names them.
    for gone in [0, 2] {
        std::fs::remove_file(array.disks.path(gone))?;
    }
    array.server.again()?;
    array.verify()?;
    array.server.daemon.kill()?;
    array.server.again()?;
    array.verify()?;
    // A reload with the file as it was doesn't undo it.
    let said = array.server.done(&["ctl", "reload"])?;
    check(said.trim() == "unchanged: 1", || said.clone())?;
    array.server.daemon.stop()
}
