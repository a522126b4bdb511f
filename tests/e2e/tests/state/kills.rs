//! Servers that are killed in the middle of commands.

use super::*;

/// Number of kills: `PVBLK_STATE_CYCLES`, or as many as a usual test run has time for.
pub(super) fn cycles(usual: u32) -> Result<u32, Stop> {
    match std::env::var("PVBLK_STATE_CYCLES") {
        Ok(text) => text
            .parse()
            .map_err(|_| Stop::Fail(format!("PVBLK_STATE_CYCLES is {text:?}"))),
        Err(_) => Ok(usual),
    }
}

/// Moments of kills: from the begin of a command until a little after the answers of those before it.
struct Moments {
    usual: Duration,
}

impl Moments {
    fn draw(&self, rng: &mut fastrand::Rng) -> Duration {
        self.usual.mul_f64(1.3 * rng.f64())
    }

    fn learn(&mut self, took: Duration) {
        self.usual = (self.usual * 3 + took) / 4;
    }
}

const CONFIGURED: [&str; 3] = ["a", "b", "c"];

/// The error code of a command on a disk that is used.
const IN_USE: i64 = 4;

pub(super) fn commands() -> Result<(), Stop> {
    let mut rng = random();
    let text: String = CONFIGURED
        .iter()
        .map(|n| format!("[disk.{n}]\nvolume = 'mem:1M'\n"))
        .collect();
    let mut server = Server::new(&text)?;
    let mut moments = Moments {
        usual: Duration::from_millis(10),
    };
    let (mut answered, mut refused, mut new_unanswered) = (0, 0, 0);
    let cycles = cycles(60)?;
    for cycle in 0..cycles {
        let mut control = server.control()?;
        // Clients that looked whether their exports are there have left.
        let begin = Instant::now();
        while is_used(&mut control)? && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        let old = look(&mut control)?;
        let (method, params, new) = any_command(&mut rng, &old, server.dir.path());
        let after = moments.draw(&mut rng);
        // Some are killed as soon as they have answered.
        let at_answer = rng.u8(..3) == 0;
        let pid = server.daemon.pid();
        let begin = Instant::now();
        control.send(method, &params)?;
        let killer = std::thread::spawn(move || {
            if !at_answer {
                std::thread::sleep(after);
                let _ = kill(pid);
            }
        });
        let answer = control.receive();
        let mut is_refused = false;
        if let Ok(Some(answer)) = &answer {
            if at_answer {
                kill(pid)?;
            }
            moments.learn(begin.elapsed());
            // A client that has just left is still attached for a moment. A refused command changes nothing.
            is_refused = answer["error"]["code"] == IN_USE;
            check(is_refused || answer.get("error").is_none(), || {
                format!("cycle {cycle}: {method} {params}: {answer}")
            })?;
            refused += u32::from(is_refused);
            answered += 1;
        }
        let new = if is_refused { old.clone() } else { new };
        let is_answered = matches!(answer, Ok(Some(_)));
        let _ = killer.join();
        server.daemon.kill()?;
        server.again()?;
        let found = server.disks()?;
        let case = || {
            format!(
                "cycle {cycle}: {method} {params}, answered {is_answered}: {found:?}, after {old:?}"
            )
        };
        check(found == new || (found == old && !is_answered), case)?;
        new_unanswered += u32::from(!is_answered && found == new && old != new);
        exports(&server, &found)?;
    }
    println!(
        "({cycles} kills; {answered} commands had answered, {refused} of them that the disk is used; {new_unanswered} had an effect without)"
    );
    server.daemon.stop()
}

fn kill(pid: u32) -> Result<(), Stop> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let Some(pid) = pid else {
        return Stop::fail("no process");
    };
    Ok(rustix::process::kill_process(pid, Signal::KILL)?)
}

/// Every disk is an export, and no other name is one.
fn exports(server: &Server, disks: &Look) -> Result<(), Stop> {
    for name in ["a", "b", "c", "d", "e"] {
        let is_there = Connection::open(&server.path("nbd"), name).is_ok();
        check(is_there == disks.contains_key(name), || {
            format!("export {name}: {is_there}, disks {disks:?}")
        })?;
    }
    Ok(())
}

/// A command that works on these disks, and the disks after it.
fn any_command(rng: &mut fastrand::Rng, old: &Look, dir: &Path) -> (&'static str, Value, Look) {
    let mut new = old.clone();
    let absent = ["a", "b", "c", "d", "e"]
        .into_iter()
        .filter(|n| !old.contains_key(*n));
    let absent: BTreeSet<&str> = absent.collect();
    let present: Vec<&String> = old.keys().collect();
    match rng.u8(..4) {
        0 if !present.is_empty() => {
            let name = rng.choice(present).map_or_else(String::new, Clone::clone);
            new.remove(&name);
            ("disk.remove", json!({"name": name}), new)
        }
        1 if !present.is_empty() => {
            let name = rng.choice(present).map_or_else(String::new, Clone::clone);
            let exclusive = rng.bool();
            if let Some(disk) = new.get_mut(&name) {
                disk.1 = exclusive;
            }
            let params = json!({"name": name, "exclusive": exclusive});
            ("disk.set", params, new)
        }
        2 if !absent.is_empty() => {
            let name = rng.choice(absent).unwrap_or("d");
            let volume = format!("file:{},size=1M", dir.join(name).display());
            let exclusive = rng.bool();
            new.insert(name.to_owned(), (volume.clone(), exclusive));
            let params = json!({"name": name, "volume": volume, "exclusive": exclusive});
            ("disk.add", params, new)
        }
        _ => {
            // Removed disks of the configuration come back.
            for name in CONFIGURED {
                let configured = || ("mem:1M".to_owned(), false);
                new.entry(name.to_owned()).or_insert_with(configured);
            }
            ("reload", json!({}), new)
        }
    }
}

pub(super) fn replacements() -> Result<(), Stop> {
    let mut rng = random();
    let mut array = ArrayServer::new(7)?;
    let mut moments = Moments {
        usual: Duration::from_millis(100),
    };
    // Each takes a rebuild.
    let cycles = cycles(60)?.div_ceil(6);
    for cycle in 0..cycles {
        let begin = Instant::now();
        let members = array.members()?;
        let is_free = |n: &usize| {
            let file = name(&array.disks, *n);
            !members.iter().any(|m| m.contains(&file))
        };
        let free: Vec<usize> = (0..7).filter(is_free).collect();
        let with = *rng.choice(&free).unwrap_or(&0);
        let with = format!("file:{}", name(&array.disks, with));
        let mut control = array.server.control()?;
        let question = match rng.bool() {
            true => {
                json!({"raid": "replace", "member": rng.u8(..4).to_string(), "with": with, "force": true})
            }
            false => json!({"raid": "add", "member": with, "force": true}),
        };
        let params = json!({"name": "r", "question": question});
        control.send("disk.ask", &params)?;
        let pause = moments.draw(&mut rng);
        std::thread::sleep(pause);
        array.server.daemon.kill()?;
        array.server.again().map_err(|e| match e {
            Stop::Fail(why) => Stop::Fail(format!(
                "cycle {cycle}: {params}, killed after {pause:?}: {why}"
            )),
            other => other,
        })?;
        array.verify()?;
        array.settle()?;
        moments.learn(begin.elapsed() / 2);
        // A spare that isn't used is given back.
        let detail = array.detail()?;
        for member in detail["members"].as_array().into_iter().flatten() {
            if member["state"] == "spare" {
                let spare = member["name"].as_str().unwrap_or_default();
                array.server.done(&["raid", "remove", "r", spare])?;
            }
        }
    }
    array.verify()?;
    println!("({cycles} kills)");
    array.server.daemon.stop()
}
