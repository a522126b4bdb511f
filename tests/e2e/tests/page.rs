//! The page in a real browser: every view, by keyboard, at three widths, in both schemes. Pictures are left in `target/page`.

use pvblk_e2e::arrays::{Disks, raid, spec};
use pvblk_e2e::browser::axe::{Axe, folder};
use pvblk_e2e::browser::{Browser, Scheme};
use pvblk_e2e::control::Control;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::{Daemon, Stop, full, run_all};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("a_thousand_disks_are_listed_and_found", many),
        (
            "a_slow_member_is_named_and_its_requests_are_shown",
            slow_member,
        ),
        ("a_limit_and_a_small_cache_are_named", limit_and_cache),
        ("a_rebuild_memory_and_events_are_shown", others),
        ("names_of_peers_stay_text", hostile),
        ("changes_need_the_token_and_are_asked_back", changes),
        ("a_server_that_goes_is_told", gone),
        ("no_source_makes_markup_of_texts", sources),
    ])
}

const WIDTHS: [u32; 3] = [1440, 768, 360];
const TOKEN: &str = "an-example-token-of-32-letters..";

/// A server with a page, and the load on one of its disks.
struct Scene {
    daemon: Daemon,
    dir: TempDir,
    url: String,
    loads: Vec<Child>,
}

impl Scene {
    fn start(disks: &[&str], more: &[&str]) -> Result<Scene, Stop> {
        let dir = tempfile::tempdir()?;
        let (nbd, control) = (unix(&dir.path().join("nbd")), unix(&dir.path().join("ctl")));
        let mut args = vec!["serve", "--nbd", &nbd, "--control", &control];
        if !more.contains(&"--web") {
            args.extend(["--web", "tcp:127.0.0.1:0"]);
        }
        args.extend(disks.iter().flat_map(|disk| ["--disk", disk]));
        let daemon = Daemon::start(args.iter().chain(more))?;
        let lines = daemon.lines();
        let url = lines
            .iter()
            .find_map(|l| l.split_once("page and metrics on "));
        let Some((_, url)) = url else {
            return Err(daemon.failure("doesn't say where its page is"));
        };
        Ok(Scene {
            url: url.to_owned(),
            daemon,
            dir,
            loads: Vec::new(),
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn control(&self) -> Result<Control, Stop> {
        Control::open(&self.path("ctl"))
    }

    /// Reads at random from a disk until the scene ends.
    fn load(&mut self, disk: &str) -> Result<(), Stop> {
        let uri = format!("nbd+unix:///{disk}?socket={}", self.path("nbd").display());
        let args = [
            "bench",
            "--target",
            &uri,
            "--rw",
            "randread",
            "--iodepth",
            "4",
            "--runtime",
            "600",
        ];
        let mut command = pvblk(args)?;
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.loads.push(command.spawn()?);
        Ok(())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for load in &mut self.loads {
            // It may have ended already.
            let _ = load.kill();
            let _ = load.wait();
        }
    }
}

/// The page at `address` (its fragment), 1440 pixels wide.
fn open(scene: &Scene, address: &str) -> Result<Browser, Stop> {
    let mut browser = Browser::start()?;
    browser.size(1440, 900, Scheme::Light)?;
    browser.open(&format!("{}#{address}", scene.url))?;
    browser.until("document.querySelector('main h1') && document.getElementById('connection').dataset.state === 'live'")?;
    Ok(browser)
}

/// Goes by Tab until the expression is true of the element with the focus, `e`.
fn tab_to(browser: &mut Browser, what: &str) -> Result<(), Stop> {
    for _ in 0..80 {
        browser.press("Tab")?;
        if browser.eval(&format!("(e => Boolean({what}))(document.activeElement)"))? == true {
            return Ok(());
        }
    }
    Stop::fail(format!("Tab never comes to where {what}"))
}

/// Pictures of the view at all widths, with full sizes in both schemes; nothing may stick out at the side.
fn pictures(browser: &mut Browser, name: &str) -> Result<(), Stop> {
    let folder = folder("page")?;
    for (at, width) in WIDTHS.into_iter().enumerate() {
        for scheme in [Scheme::Light, Scheme::Dark] {
            if !full() && (scheme == Scheme::Dark) != (at == 1) {
                continue;
            }
            browser.size(width, 900, scheme)?;
            // What is drawn when the size changes is drawn in the second frame.
            browser.eval(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))",
            )?;
            let wide = browser.eval("document.documentElement.scrollWidth")?;
            check(wide.as_u64() <= Some(width.into()), || {
                format!("{name}: {wide} pixels at a width of {width}")
            })?;
            let word = if scheme == Scheme::Dark {
                "dark"
            } else {
                "light"
            };
            browser.picture(&folder.join(format!("{name}-{width}-{word}.png")), 3000)?;
        }
    }
    browser.size(1440, 900, Scheme::Light)
}

/// axe in both schemes, wide and narrow. Where axe can't be had this ends the test as skipped, so it comes last.
fn axe(browser: &mut Browser, views: &[(&str, &str)]) -> Result<(), Stop> {
    let axe = Axe::find()?;
    for (width, scheme) in [(1440, Scheme::Light), (360, Scheme::Dark)] {
        browser.size(width, 900, scheme)?;
        for (address, ready) in views {
            browser.eval(&format!("location.hash = {}", json!(address)))?;
            browser.until(ready)?;
            axe.check(browser, &format!("{address}, {width}, {scheme:?}"))?;
        }
    }
    Ok(())
}

fn many() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let mut text = String::new();
    for n in 0..1000 {
        let _ = writeln!(text, "[disk.vm{n:04}]\nvolume = \"null:1G\"");
    }
    let config = dir.path().join("many.toml");
    std::fs::write(&config, text)?;
    let mut scene = Scene::start(&[], &["--config", &config.display().to_string()])?;
    scene.load("vm0500")?;
    let mut browser = Browser::start()?;
    browser.size(1440, 900, Scheme::Light)?;
    for round in ["first", "second", "third"] {
        browser.open(&scene.url)?;
        let listed = browser.until("performance.getEntriesByName('disks')[0]?.startTime")?;
        let paint = browser
            .until("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")?;
        println!("{round} load: first picture after {paint:.0} ms, disks after {listed:.0} ms");
        browser.eval("performance.clearMarks()")?;
    }
    browser.until("document.querySelector('.found').innerText === '1\\u202f000 disks'")?;
    let rows = browser.eval("document.querySelectorAll('.disks .row').length")?;
    check((20..120).contains(&rows.as_u64().unwrap_or(0)), || {
        format!("{rows} rows are drawn")
    })?;

    // By load: twice, since a click on the same head turns the order round.
    browser.eval("document.querySelector('.disks .reads button').click()")?;
    browser.until(
        "document.querySelector('.disks .reads').getAttribute('aria-sort') === 'descending'",
    )?;
    browser.until("(document.querySelector('.disks .reads button').click(), document.querySelector('.disks .reads button').click(), document.querySelector('.disks .row a').innerText === 'vm0500')")?;
    pictures(&mut browser, "disks")?;

    // Keys: find, go to the row, open it.
    browser.press("/")?;
    browser.enter("vm07")?;
    browser.until("document.querySelector('.found').innerText === '100 of 1\\u202f000 disks'")?;
    tab_to(&mut browser, "e.closest('.disks .row')")?;
    browser.press("End")?;
    browser.until("document.activeElement.innerText.startsWith('vm07')")?;
    browser.press("Home")?;
    browser.press("ArrowDown")?;
    let second =
        browser.eval("document.activeElement.closest('.row').getAttribute('aria-rowindex')")?;
    check(second == "3", || {
        format!("Home and Down lead to row {second}")
    })?;
    let name = browser.eval("document.activeElement.innerText")?;
    browser.press("Enter")?;
    browser.until(&format!(
        "document.querySelector('h1').innerText === {name}"
    ))?;
    browser.press("d")?;
    browser.until("document.querySelector('h1').innerText === 'Disks'")?;
    browser.eval("window.scrollTo(0, document.documentElement.scrollHeight)")?;
    browser.until(
        "[...document.querySelectorAll('.disks .row')].some((row) => row.ariaRowIndex === '1001')",
    )?;
    browser.quiet()
}

/// An array whose member 1 takes 10 ms.
fn slow_array(disks: &Disks) -> Result<String, Stop> {
    let members = disks.paths(0..3);
    raid(
        &["create", "--raid-devices", "3", "--assume-clean"],
        &members,
    )?;
    let paths = [0, 1, 2].map(|n| disks.path(n).display().to_string());
    Ok(format!(
        "db=raid5:[{}][delay:10ms:file:{}][{}]",
        paths[0], paths[1], paths[2]
    ))
}

fn slow_member() -> Result<(), Stop> {
    let disks = Disks::fast(3, 24)?;
    let array = slow_array(&disks)?;
    let mut scene = Scene::start(&[&array, "vm1=mem:64M"], &[])?;
    needs_hops(&scene)?;
    scene.load("db")?;
    let mut browser = open(&scene, "/disk/db")?;
    browser.until("document.querySelectorAll('.flow .row').length > 2")?;
    // One read of three is at the slow member, and takes a hundred times longer.
    let says = "document.querySelector('.answer').innerText";
    browser.until(&format!("/^(9\\d|100) %/.test({says})"))?;
    let answer = browser.eval(says)?;
    check(
        answer.as_str().is_some_and(|a| a.contains("delay:10ms")),
        || answer.to_string(),
    )?;

    // The hop with most of the time is chosen by keys, and drawn.
    browser.eval("window.most = () => [...document.querySelectorAll('.flow .row')].sort((a, b) => b.querySelector('.fill').offsetWidth - a.querySelector('.fill').offsetWidth)[0]; true")?;
    let average = browser.eval("most().children[3].innerText")?;
    check(ms(&average).is_some_and(|ms| ms >= 10.0), || {
        format!("the slow hop takes {average}")
    })?;
    tab_to(&mut browser, "e === most().querySelector('button')")?;
    browser.press("Enter")?;
    browser.until("document.querySelector('#heat-title').innerText.includes('delay:10ms')")?;
    browser.until(DRAWN)?;

    // A region by keys; the slowest requests are those in it.
    tab_to(&mut browser, "e.classList.contains('heatframe')")?;
    browser.press("ArrowUp")?;
    browser.press("Shift+ArrowRight")?;
    for _ in 0..6 {
        browser.press("Shift+ArrowDown")?;
    }
    let selected = "document.querySelector('.selection').innerText";
    browser.until(&format!("/about [1-9].* requests/.test({selected})"))?;
    browser.until("document.querySelectorAll('.slowline').length > 1")?;
    browser.press("Escape")?;
    let nothing = format!("{selected}.startsWith('Nothing')");
    browser.until(&nothing)?;
    // The same by the pointer: a rectangle, and a line from top to bottom, which is a column. A click takes it back.
    for (from, to) in [((0.3, 0.02), (0.999, 0.98)), ((0.985, 0.02), (0.985, 0.98))] {
        browser.drag(".heatframe canvas", from, to)?;
        browser.until(&format!("/about [1-9].* requests/.test({selected})"))?;
        browser.until("document.querySelectorAll('.slowline').length > 1")?;
        browser.drag(".heatframe canvas", to, to)?;
        browser.until(&nothing)?;
    }
    browser.eval("[...document.querySelectorAll('button')].find((b) => b.innerText === 'Whole requests').click()")?;
    browser
        .until("document.querySelector('#heat-title').innerText === 'Latency: whole requests'")?;
    browser.until(DRAWN)?;
    pictures(&mut browser, "slow-member")?;
    browser.quiet()?;
    axe(
        &mut browser,
        &[
            (
                "/disk/db",
                "document.querySelectorAll('.flow .row').length > 2 && document.querySelector('.falls')",
            ),
            ("/", "document.querySelector('.disks .row')"),
        ],
    )
}

/// A disk that its limit holds back, and one whose cache is too small, are told apart in the list.
fn limit_and_cache() -> Result<(), Stop> {
    let disks = [
        "held=mem:16M",
        "missing=cache:1M,readahead=0:delay:2ms:mem:64M",
        "idle=mem:16M",
    ];
    let mut scene = Scene::start(&disks, &["--limit", "held:iops=100"])?;
    needs_hops(&scene)?;
    scene.load("held")?;
    scene.load("missing")?;
    let mut browser = open(&scene, "/")?;
    let cell = |disk: &str, column: &str| {
        format!(
            "[...document.querySelectorAll('.disks .row')].find((row) => row.querySelector('a').innerText === '{disk}')?.querySelector('.{column}').innerText"
        )
    };
    for (disk, column, text) in [
        ("held", "state", "limited"),
        ("held", "most", "% limit"),
        ("missing", "state", "healthy"),
        ("missing", "most", "% medium"),
        ("idle", "most", "–"),
    ] {
        browser.until(&format!("({})?.includes('{text}')", cell(disk, column)))?;
    }
    // By load, the disk at which clients wait most is above the others.
    browser.eval("document.querySelector('.disks .flight button').click()")?;
    browser.eval("document.querySelector('.disks .head .state button').click()")?;
    let order = "[...document.querySelectorAll('.disks .row')].sort((a, b) => a.ariaRowIndex - b.ariaRowIndex).map((row) => row.querySelector('a').innerText).join()";
    browser.until(&format!(
        "['held,missing,idle', 'missing,held,idle'].includes({order})"
    ))?;

    browser.eval("location.hash = '#/disk/missing'")?;
    let facts = "document.querySelector('[aria-labelledby=cache-title]').innerText";
    browser.until(&format!("/hits lately\\s+[0-9<]/.test({facts})"))?;
    let facts = browser.eval(facts)?;
    let facts = facts.as_str().unwrap_or_default();
    // Its 64 MiB are read at random, and it has 1 MiB for them.
    let hits = facts
        .split("hits ever")
        .nth(1)
        .and_then(|f| f.split('%').next());
    let hits = hits.map(|h| h.trim().trim_start_matches("< "));
    let hits: Option<f64> = hits.and_then(|h| h.parse().ok());
    check(
        hits.is_some_and(|h| h < 20.0) && facts.contains(" of 1 MiB"),
        || facts.to_owned(),
    )?;
    browser.quiet()
}

/// True when the heat map has cells of many colors.
const DRAWN: &str = "(() => { const c = document.querySelector('canvas.heat'); const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer); return new Set(d).size > 20; })()";

/// `hops` may be a method that the server doesn't have.
fn needs_hops(scene: &Scene) -> Result<(), Stop> {
    let version = scene.control()?.must("pvblk.version", json!({}))?;
    let methods = version["methods"].as_array().cloned().unwrap_or_default();
    if methods.contains(&json!("hops")) {
        return Ok(());
    }
    Stop::skip("the server has no method hops")
}

/// Milliseconds of a text such as `10.2 ms`.
fn ms(text: &Value) -> Option<f64> {
    let (number, unit) = text.as_str()?.split_once(' ')?;
    let factor = match unit {
        "µs" => 1e-3,
        "ms" => 1.0,
        "s" => 1e3,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

fn others() -> Result<(), Stop> {
    let disks = Disks::fast(4, 64)?;
    let members = disks.paths(0..3);
    raid(
        &["create", "--raid-devices", "3", "--assume-clean"],
        &members,
    )?;
    let array = format!("mend={}", spec(&members, Some(1)));
    let mut scene = Scene::start(&[&array, "kept=cache:8M:mem:64M"], &[])?;
    scene.load("kept")?;
    let mut control = scene.control()?;
    let mut ask =
        |question: Value| control.must("disk.ask", json!({"name": "mend", "question": question}));
    // So slow that it lasts as long as the test.
    ask(json!({"raid": "speed", "min_kib": 100, "max_kib": 100}))?;
    let mut browser = open(&scene, "/disk/mend")?;
    browser.until("document.querySelector('.members p')?.innerText.includes('no redundancy')")?;
    ask(json!({"raid": "add", "member": format!("file:{}", disks.path(3).display())}))?;
    browser.until("/Rebuild .* left/.test(document.querySelector('.members .sync')?.innerText)")?;
    browser.until("document.querySelector('.members')?.innerText.includes('spare rebuilding')")?;
    browser.until("document.querySelector('.brief')?.innerText.includes('rebuild-started')")?;
    pictures(&mut browser, "rebuild")?;

    browser.press("m")?;
    browser.until("document.querySelector('h1').innerText === 'Memory' && document.querySelectorAll('#bill + .scroll tbody tr').length > 2")?;
    let squeezes = "document.querySelectorAll('.totals dd')[3].innerText";
    let before = browser.eval(squeezes)?;
    scene
        .control()?
        .must("memory.ask", json!({"question": {"memory": "squeeze"}}))?;
    browser.until(&format!("{squeezes} !== {before}"))?;
    browser.until("document.querySelector('main').innerText.includes('The last squeeze since this page is open was')")?;
    pictures(&mut browser, "memory")?;

    browser.press("e")?;
    browser.until("document.querySelector('.events')?.innerText.includes('rebuild-started')")?;
    let all = browser.eval("document.querySelectorAll('.event').length")?;
    tab_to(&mut browser, "e.id === 'severity'")?;
    browser.press("ArrowDown")?;
    browser.until(&format!(
        "document.querySelectorAll('.event').length < {all}"
    ))?;
    pictures(&mut browser, "events")?;

    tab_to(
        &mut browser,
        "e.id === 'help-open' || e.closest('nav, .skip')",
    )?;
    browser
        .press("?")
        .and_then(|()| browser.until("document.querySelector('#help').open"))?;
    browser.press("Escape")?;
    browser.until("!document.querySelector('#help').open")?;
    // The switch goes from the system's colors to light to dark.
    let background = "getComputedStyle(document.body).backgroundColor";
    let light = browser.eval(background)?;
    browser.eval(
        "document.querySelector('#colours').click(); document.querySelector('#colours').click()",
    )?;
    let dark = browser.eval(background)?;
    check(light != dark, || format!("both are {light}"))?;
    browser.eval("document.querySelector('#colours').click()")?;
    browser.quiet()?;
    let ready = "document.querySelector('main h1')";
    axe(
        &mut browser,
        &[
            ("/disk/mend", "document.querySelector('.members .sync')"),
            ("/memory", ready),
            ("/events", ready),
        ],
    )
}

fn hostile() -> Result<(), Stop> {
    let markup = "<img src=x onerror=window.broken=1><script>window.broken=1</script>";
    let scene = Scene::start(&["vm1=mem:64M"], &[])?;
    let mut browser = open(&scene, "/events")?;
    // All views, of a server whose every text is markup.
    let module = r#"(async (text) => {
        const info = {name: text, volume: `raid5:${text}`, state: 'failed', reason: text, health: text, limit: text, size_bytes: 1, state_secs: 1,
            exclusive: true, read_only: true, users: [{name: text, count: 1}], exports: [text]};
        const memory = {owners: [{owner: text, kind: text, live_bytes: 1, cap_bytes: 2}], disks: [{disk: text, pool_pages: 1, in_use_pages: 1, peak_pages: 1, squeezed_pages: 1, allocation_stalls: 1}],
            sources: [{name: text, missing: text}], settings: {max_buffer_pages: 1, buffer_squeeze_duration_ms: 1, buffer_floor_pages: 1}, private_bytes: 1, shared_bytes: 1, cap_bytes: 1, squeezes: 1, squeezing: true};
        const event = {id: '1', at: Date.now(), time: text, kind: text, severity: text, disk: text, text, left_out: 2};
        const detail = {level: 5, raid_devices: 3, chunk_bytes: 1, consistency_policy: text, degraded: true, missing: text, clean: true, notes: [text],
            members: [{place: 0, name: text, state: text}], serving: {trouble: text, away: [{place: 1, name: text}], sync: {action: text, done_bytes: 1, of_bytes: 2, speed_kib: 1}}};
        const hop = {name: text, layer: text, label: text, depth: 0, count: 1, sum_ns: 1, latency_ns: [[1024, 1]], member: text};
        const slow = {op: text, sector: 1, bytes: 1, begin_ns: 0, total_ns: 9, hops: [{layer: text, label: text, begin_ns: 0, ns: 9}]};
        const [{Store}, {Disks}, {DiskView}, {Memory}, {Events}, {Axis}] = await Promise.all(['store', 'disks', 'disk', 'memory', 'events', 'plot'].map((name) => import(`/${name}.js`)));
        const store = new Store();
        store.disks.set(text, {name: text, info, state: text, load: 0, rates: null, way: {label: text, share: 1, isLimited: true}, history: []});
        Object.assign(store, {listed: true, memory, memoryHistory: [{from: 0, to: Date.now(), answer: memory, squeezed: 1}], events: [event]});
        const axis = new Axis();
        const views = [new Disks(store), new Memory(store, axis), new Events(store), new DiskView(store, axis, text)];
        const main = document.getElementById('view');
        for (const view of views) {
            main.replaceChildren(view.element);
            view.open();
            if (!view.hops) continue;
            view.hops.add({every: 1, elapsed_ns: 1e9, disks: [{disk: text, requests: 1, hops: [hop], slowest: [slow]}]});
            view.members.draw(detail);
            view.members.element.hidden = false;
        }
        await new Promise((done) => setTimeout(done, 300));
        return [main.innerText.split(text).length - 1, main.querySelectorAll('img, script').length, window.broken ?? 0];
    })"#;
    let seen = browser.eval(&format!("{module}({})", json!(markup)))?;
    let shown = seen[0].as_u64().unwrap_or(0);
    check(shown > 15 && seen[1] == 0 && seen[2] == 0, || {
        format!("shown, elements, run: {seen}")
    })?;
    browser.press("e")?;
    browser.quiet()
}

fn changes() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("token");
    std::fs::write(&file, TOKEN)?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
    let scene = Scene::start(
        &["vm1=mem:64M", "vm2=mem:64M"],
        &["--web-token-file", &file.display().to_string()],
    )?;
    let mut browser = open(&scene, "/disk/vm1")?;
    browser.until("document.querySelector('.facts dd')")?;
    let button = |words: &str| {
        format!(
            "[...document.querySelectorAll('main button')].find((b) => b.innerText.startsWith({}) && b.offsetWidth)",
            json!(words)
        )
    };
    let (limits, remove) = (button("Change limits"), button("Remove"));
    check(
        browser.eval(&format!("{limits} === undefined && {remove} === undefined"))? == true,
        || "changes are offered without a token".into(),
    )?;

    // A wrong token is found out by its first use, and forgotten.
    give_token(&mut browser, "a wrong one")?;
    press_on(&mut browser, &limits)?;
    browser.enter("read-iops=1k")?;
    browser.press("Enter")?;
    browser
        .until("document.querySelector('dialog[open] .problem')?.innerText.includes('token')")?;
    browser.press("Escape")?;
    browser.until(&format!(
        "!document.querySelector('dialog[open]') && {limits} === undefined"
    ))?;

    give_token(&mut browser, TOKEN)?;
    press_on(&mut browser, &limits)?;
    browser.enter("read-iops=1k")?;
    browser.until(
        "document.querySelector('dialog[open]').innerText.includes('from none to read-iops=1k')",
    )?;
    browser.press("Enter")?;
    browser.until("document.querySelector('[aria-labelledby=facts-title] .facts').innerText.includes('read-iops=1k')")?;
    let shown = scene.control()?.must("disk.show", json!({"name": "vm1"}))?;
    check(
        shown["limit"]
            .as_str()
            .is_some_and(|l| l.contains("read-iops")),
        || shown.to_string(),
    )?;

    press_on(&mut browser, &remove)?;
    let refused = browser.eval("document.querySelector('dialog[open] .danger').disabled")?;
    check(refused == true, || "the name isn't asked for".into())?;
    browser.enter("vm1")?;
    browser.press("Enter")?;
    browser
        .until("document.querySelector('main').innerText.includes('isn\\'t served any more')")?;
    let left = scene.control()?.must("disk.list", json!({}))?;
    check(
        left["disks"].as_array().is_some_and(|d| d.len() == 1),
        || left.to_string(),
    )?;
    browser.quiet()
}

fn give_token(browser: &mut Browser, token: &str) -> Result<(), Stop> {
    press_on(browser, "document.querySelector('#token-open')")?;
    browser.enter(token)?;
    browser.press("Enter")?;
    browser
        .until("!document.querySelector('dialog[open]')")
        .map(drop)
}

/// Opens a dialog by the key Enter on a button, and waits until its first field has the focus.
fn press_on(browser: &mut Browser, button: &str) -> Result<(), Stop> {
    browser.until(&format!(
        "((b) => b && (b.focus(), document.activeElement === b))({button})"
    ))?;
    browser.press("Enter")?;
    browser.until("document.querySelector('dialog[open] input') === document.activeElement")?;
    browser.eval("document.activeElement.select()").map(drop)
}

fn gone() -> Result<(), Stop> {
    let mut scene = Scene::start(&["vm1=mem:64M"], &[])?;
    let mut browser = open(&scene, "/")?;
    browser.until("document.querySelector('.disks .row')")?;
    scene.daemon.kill()?;
    browser.until("document.getElementById('connection').innerText.includes('reached')")?;
    let address = scene
        .url
        .trim_start_matches("http://")
        .trim_end_matches('/');
    let web = format!("tcp:{address}");
    let next = Scene::start(&["vm2=mem:64M"], &["--web", &web])?;
    browser.until("document.getElementById('connection').dataset.state === 'live' && document.querySelector('.disks .row a').innerText === 'vm2'")?;
    drop(next);
    browser.quiet()
}

/// Ways to make markup or code of a text.
const FORBIDDEN: &[&str] = &[
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "createContextualFragment",
    "DOMParser",
    "srcdoc",
    "eval(",
    "Function(",
    "javascript:",
    "//cdn",
    "https://",
];

fn sources() -> Result<(), Stop> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/web/page");
    let mut modules = Vec::new();
    for entry in std::fs::read_dir(&page)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(page.join(&name))?;
        for word in FORBIDDEN {
            check(!text.contains(word), || format!("{name} has {word}"))?;
        }
        check(text.lines().count() < 700, || format!("{name} is long"))?;
        modules.extend(name.ends_with(".js").then_some(name));
    }
    let index = std::fs::read_to_string(page.join("index.html"))?;
    check(
        !index.contains("style=") && !index.contains("onclick"),
        || "inline code or style".into(),
    )?;
    for name in &modules {
        check(index.contains(&format!("\"/{name}\"")), || {
            format!("index.html doesn't load {name} ahead")
        })?;
    }
    check(modules.len() > 10, || format!("{modules:?}"))
}
