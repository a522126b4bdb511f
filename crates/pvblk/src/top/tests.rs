//! Pages from canned answers, in the form that the control methods have.

use super::feed::News;
use super::hops::HopsReport;
use super::model::Model;
use super::ui::{Page, Sort, Step, Ui};
use super::view;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use serde_json::{Value, json};
use std::time::Duration;

const SIZE: (u16, u16) = (100, 24);

struct Screen {
    model: Model,
    ui: Ui,
    size: (u16, u16),
}

impl Screen {
    fn new(size: (u16, u16)) -> Screen {
        Screen {
            model: Model::new("ctl.sock"),
            ui: Ui::new(Duration::from_secs(1), size),
            size,
        }
    }

    fn news(&mut self, news: News) {
        self.model.news(news);
    }

    fn key(&mut self, code: KeyCode) -> Step {
        let step = self
            .ui
            .key(KeyEvent::new(code, KeyModifiers::NONE), &self.model);
        self.model.show(self.ui.disk.as_deref());
        step
    }

    fn keys(&mut self, text: &str) {
        for c in text.chars() {
            self.key(KeyCode::Char(c));
        }
    }

    fn resize(&mut self, size: (u16, u16)) {
        self.size = size;
        self.ui.size = size;
    }

    fn lines_with(&self, utf8: bool) -> Vec<String> {
        let area = Rect::new(0, 0, self.size.0, self.size.1);
        let mut buffer = Buffer::empty(area);
        view::draw(&mut buffer, &self.model, &self.ui, utf8);
        let line = |y| {
            let cells = (0..area.width).map(|x| buffer[(x, y)].symbol());
            cells.collect::<String>().trim_end().to_owned()
        };
        (0..area.height).map(line).collect()
    }

    fn text(&self) -> String {
        self.lines_with(true).join("\n")
    }
}

/// The counters of a disk after `seconds` with so many reads a second of 4 KiB, each of `ns`.
fn counted(disk: &str, seconds: u64, reads: u64, ns: u64) -> Value {
    let requests = reads * seconds;
    let read = json!({
        "requests": requests, "bytes": requests * 4096, "errors": 0, "merges": 0, "in_flight": 2,
        "time_ns": requests * ns, "latency_ns": [[ns + 1, requests]],
    });
    let operations = match requests {
        0 => json!({}),
        _ => json!({ "read": read }),
    };
    json!({
        "disk": disk, "elapsed_ns": seconds * 1_000_000_000, "in_flight": 2, "busy_ns": 0,
        "operations": operations,
        "connections": [{"name": "nbd tcp 1.2.3.4", "in_flight": 2, "busy_ns": 0, "operations": operations}],
    })
}

fn answer(disks: Vec<Value>) -> News {
    News::Counted(serde_json::from_value(json!({"disks": disks, "failed": 0})).unwrap())
}

fn listed(disks: &[(&str, &str, &str)]) -> News {
    let disk = |(name, state, health): &(&str, &str, &str)| {
        json!({
            "name": name, "state": state, "health": health, "volume": format!("file:/srv/{name}.img"),
            "size_bytes": 1u64 << 30, "read_only": false, "exclusive": false, "limit": null,
            "users": [{"name": "nbd", "count": 1}], "exports": [], "state_secs": 9,
        })
    };
    let disks = disks
        .iter()
        .map(|d| serde_json::from_value(disk(d)).unwrap());
    News::Listed(disks.collect())
}

fn hop(name: &str, layer: &str, label: &str, sum_ns: u64, member: Value) -> Value {
    json!({
        "name": name, "layer": layer, "label": label, "depth": 0, "count": 100, "sum_ns": sum_ns,
        "latency_ns": [[sum_ns / 100, 100]], "member": member,
    })
}

fn hops_of(disk: &str, hops: Vec<Value>) -> HopsReport {
    let slow = json!({
        "op": "read", "sector": 2048, "bytes": 4096, "begin_ns": 5, "total_ns": 1_000_000,
        "hops": [
            {"layer": "a/back", "label": "worker", "begin_ns": 0, "ns": 250_000},
            {"layer": "file:a", "label": "medium", "begin_ns": 250_000, "ns": 750_000},
        ],
    });
    serde_json::from_value(json!({
        "at_ns": 1_000_000_000u64, "elapsed_ns": 1_000_000_000u64, "every": 8, "lost": 0, "unknown": 0,
        "disks": [{"disk": disk, "requests": 800, "hops": hops, "slowest": [slow]}],
    }))
    .unwrap()
}

fn event(number: u64, disk: &str, kind: &str, text: &str) -> News {
    let event = json!({
        "number": number, "run": "x", "time": "2026-01-02T03:04:05Z", "kind": kind, "severity": "warning",
        "disk": disk, "text": text,
    });
    News::Event(serde_json::from_value(event).unwrap(), true)
}

/// Two disks: `a` with 1000 reads a second of 2 ms, `b` with 4000 of 100 µs.
fn two_disks() -> Screen {
    let mut screen = Screen::new(SIZE);
    screen.news(News::Live("0.1.0".into()));
    screen.news(listed(&[
        ("a", "serving", "healthy"),
        ("b", "serving", "degraded"),
    ]));
    let at = |s| {
        answer(vec![
            counted("a", s, 1000, 2_000_000),
            counted("b", s, 4000, 100_000),
        ])
    };
    screen.news(at(10));
    screen.news(at(12));
    let hops = vec![
        hop("Q2D", "a/back", "worker", 100_000, Value::Null),
        hop("D2C", "file:a", "medium", 300_000, Value::Null),
    ];
    screen.news(News::Hops(None, hops_of("a", hops)));
    screen
}

#[test]
fn disks_are_listed_by_load_with_the_hop_that_takes_most() {
    let screen = two_disks();
    let lines = screen.lines_with(true);
    let expected = [
        "2 disks, 2 busy: 5.00k requests/s, 20.5 MB/s, 2.4 at work                               ctl.sock 1s",
        "b degraded",
        "DISK STATE     LOAD   r/s   w/s  MB/s FLIGHT    AVG    P99 err/s MOST TIME IN         TIME BY HOP",
        "a    healthy    2.0 1.00k     0   4.1      2 2.00ms 2.10ms     0  75% medium          wo…│medium   │",
        "b    degraded   0.4 4.00k     0  16.4      2  100µs  106µs     0",
    ];
    assert_eq!(lines[..5], expected, "{}", lines.join("\n"));
    assert!(
        lines[23].starts_with("Enter disk  ←→ sort"),
        "{}",
        lines[23]
    );
}

#[test]
fn keys_sort_filter_and_choose() {
    let mut screen = two_disks();
    let first = |s: &Screen| s.lines_with(true)[3].chars().next();
    assert_eq!(first(&screen), Some('a'));
    screen.key(KeyCode::Right);
    assert_eq!((screen.ui.sort, first(&screen)), (Sort::Reads, Some('b')));
    screen.keys("r");
    assert_eq!(first(&screen), Some('a'));
    screen.keys("r<<");
    // The worst state is first.
    assert_eq!((screen.ui.sort, first(&screen)), (Sort::State, Some('b')));
    screen.keys("/A");
    assert!(screen.text().contains("filter: A█"));
    screen.key(KeyCode::Enter);
    assert_eq!(
        (first(&screen), screen.lines_with(true)[4].as_str()),
        (Some('a'), "")
    );
    screen.keys("/zz");
    screen.key(KeyCode::Enter);
    assert!(screen.text().contains("no disk passes the filter"));
    screen.key(KeyCode::Esc);
    assert_eq!(screen.ui.filter, "");
    screen.key(KeyCode::Down);
    screen.key(KeyCode::Enter);
    assert_eq!(
        (screen.ui.page, screen.ui.disk.as_deref()),
        (Page::Disk, Some("a"))
    );
    screen.keys("p");
    assert_eq!(screen.ui.disk.as_deref(), Some("b"));
    screen.keys("e");
    assert_eq!(screen.ui.page, Page::Events);
    screen.key(KeyCode::Esc);
    screen.key(KeyCode::Esc);
    assert_eq!(
        (screen.ui.page, screen.ui.disk.as_deref()),
        (Page::Disks, None)
    );
    assert_eq!(screen.key(KeyCode::Char('q')), Step::Quit);
    let control = KeyEvent::new(KeyCode::Char('z'), KeyModifiers::CONTROL);
    assert_eq!(screen.ui.key(control, &screen.model), Step::Stop);
}

#[test]
fn intervals_and_pauses_are_keys() {
    let mut screen = two_disks();
    screen.keys("+");
    assert_eq!(screen.ui.interval, Duration::from_secs(2));
    screen.keys("--- -");
    assert_eq!(screen.ui.interval, Duration::from_millis(250));
    assert!(screen.ui.paused && screen.lines_with(true)[0].contains("paused"));
}

/// The page of disk `a` with everything that a disk can have.
fn whole_disk(size: (u16, u16)) -> Screen {
    let mut screen = two_disks();
    screen.resize(size);
    screen.key(KeyCode::Enter);
    let at = |s| answer(vec![counted("a", s, 1000, 2_000_000)]);
    screen.news(at(13));
    screen.news(at(14));
    let hops = vec![
        hop("Q2D", "a/back", "worker", 100_000, Value::Null),
        hop("D2C", "file:c", "medium", 300_000, json!("file:c")),
    ];
    screen.news(News::Hops(Some("a".into()), hops_of("a", hops)));
    let member = |place: u64, state: &str, name: &str| json!({"number": place, "place": place, "state": state, "name": name, "rebuilt_bytes": null, "corrected_reads": 0});
    let detail = json!({
        "name": "r", "uuid": "", "created_secs": 0, "updated_secs": 0, "events": 1, "level": 5, "raid_devices": 3,
        "layout": "left-symmetric", "chunk_bytes": 65536, "array_bytes": 1, "member_bytes": 1, "consistency_policy": "ppl",
        "clean": true, "degraded": true, "in_sync_bytes": 0, "missing": 1, "notes": [],
        "members": [member(0, "active sync", "file:a"), member(1, "spare rebuilding", "file:b"), member(2, "active sync", "file:c")],
        "serving": {
            "failed": false, "mismatch_sectors": 0, "trouble": null, "stripes": 256, "active_stripes": 0,
            "write_path": "direct", "frozen": false, "speed_min_kib": 0, "speed_max_kib": 0,
            "sync": {"action": "recover", "done_bytes": 1u64 << 29, "of_bytes": 1u64 << 30, "mismatch_sectors": 0,
                "speed_kib": 1024, "seconds_left": 62},
        },
    });
    screen.news(News::Array(
        "a".into(),
        serde_json::from_value(detail).unwrap(),
    ));
    let cache = |hits: u64, misses: u64| {
        let counters = json!({"hits": hits, "misses": misses, "hit_ratio": 0.5, "nr_dirty": 3});
        News::Cache("a".into(), serde_json::from_value(counters).unwrap())
    };
    screen.news(cache(50, 50));
    screen.news(cache(60, 140));
    screen.news(event(
        1,
        "a",
        "member-failed",
        "its member at place 1, file:b, failed",
    ));
    screen
}

#[test]
fn the_page_of_a_disk_has_its_parts() {
    let text = whole_disk((100, 80)).text();
    for part in [
        "a  healthy  load 2.0, 2 in flight",
        "file:/srv/a.img, 1 GiB",
        "── operations ──",
        "read          1.00k    4.1    4 KiB      2 2.00ms 2.10ms      0",
        "── time by hop, 1 request of 8 followed ──",
        "medium file:c ",
        "75% ██████",
        "── times of requests (h: of a hop) ──",
        "── slowest requests of the last minute (w: unfold) ──",
        "▼1.00ms read 4 KiB at 2048",
        "   medium file:a",
        "── members of the array: 3 of RAID-5 ──",
        "rebuild 50%, 512 MiB of 1 GiB",
        "    1 spare rebuilding file:b",
        "── page cache ──",
        "hits 10% of reads lately, 50% ever",
        "dirty 12 KiB",
        "── connections ──",
        "nbd tcp 1.2.3.4 ",
        "── events ──",
        "member-failed",
    ] {
        assert!(text.contains(part), "{part} isn't in\n{text}");
    }
    // The member at which the time is.
    let slow = text
        .lines()
        .find(|l| l.contains("active sync") && l.contains("file:c"));
    assert!(slow.is_some_and(|l| l.contains(" 75% ")), "{text}");
}

#[test]
fn a_heat_map_of_each_hop_can_be_had() {
    let mut screen = whole_disk((100, 80));
    screen.keys("h");
    assert!(
        screen
            .text()
            .contains("── times of worker in a/back (h: next) ──")
    );
    screen.keys("h");
    assert!(
        screen
            .text()
            .contains("── times of medium file:c in file:c (h: next) ──")
    );
    screen.keys("h");
    assert!(screen.text().contains("── times of requests "));
}

#[test]
fn every_size_is_drawn_on_every_page() {
    let mut screen = whole_disk((40, 10));
    screen.news(News::NoHops("there is no method hops".into()));
    let pages = [
        Page::Disk,
        Page::Disks,
        Page::Events,
        Page::Memory,
        Page::Help,
    ];
    for page in pages {
        screen.ui.page = page;
        for utf8 in [true, false] {
            for width in [0, 1, 2, 7, 20, 39, 40, 41, 63, 80, 100, 131, 300] {
                for height in [0, 1, 2, 3, 4, 5, 10, 24, 100] {
                    screen.resize((width, height));
                    let lines = screen.lines_with(utf8);
                    assert!(utf8 || lines.iter().all(|l| l.is_ascii()), "{lines:?}");
                    for key in [KeyCode::PageDown, KeyCode::End, KeyCode::Tab, KeyCode::Home] {
                        screen
                            .ui
                            .key(KeyEvent::new(key, KeyModifiers::NONE), &screen.model);
                    }
                }
            }
        }
    }
}

#[test]
fn a_small_terminal_keeps_what_matters() {
    let mut screen = two_disks();
    screen.resize((40, 10));
    let text = screen.text();
    let line = text.lines().find(|l| l.starts_with("a ")).unwrap();
    assert!(line.contains("2.0") && line.contains("2.10ms"), "{text}");
    let many: Vec<(String, &str, &str)> = (0..1000)
        .map(|n| (format!("d{n:03}"), "serving", "healthy"))
        .collect();
    let many: Vec<(&str, &str, &str)> = many.iter().map(|(n, s, h)| (n.as_str(), *s, *h)).collect();
    screen.news(listed(&many));
    screen.ui.sort = Sort::Disk;
    screen.key(KeyCode::End);
    assert!(
        screen.lines_with(true)[8].starts_with("d999"),
        "{}",
        screen.text()
    );
    screen.key(KeyCode::PageUp);
    assert!(screen.text().contains("d992"), "{}", screen.text());
}

#[test]
fn names_cannot_steer_the_terminal() {
    let hostile = "\x1b[2J\x1b]0;x\x07\u{202e}evil\r\n";
    let mut screen = Screen::new((300, 100));
    screen.news(News::Live("0".into()));
    screen.news(listed(&[(hostile, "serving", "healthy")]));
    screen.news(answer(vec![counted(hostile, 1, 10, 1000)]));
    screen.news(answer(vec![counted(hostile, 2, 10, 1000)]));
    let hops = vec![hop("Q2D", hostile, hostile, 100, json!(hostile))];
    screen.news(News::Hops(None, hops_of(hostile, hops.clone())));
    screen.news(event(1, hostile, "limit-reached", hostile));
    let is_clean = |screen: &Screen| {
        let text = screen.text();
        let bad = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(bad), "{text:?}");
        assert!(text.contains("\\u{1b}[2J"), "{text}");
        let plain = view::as_text(&screen.model, &screen.ui, 132, true);
        assert!(!plain.contains(bad), "{plain:?}");
    };
    is_clean(&screen);
    screen.key(KeyCode::Enter);
    screen.news(News::Hops(Some(hostile.into()), hops_of(hostile, hops)));
    is_clean(&screen);
    screen.keys("e");
    is_clean(&screen);
}

#[test]
fn a_server_that_goes_away_is_told_and_rates_begin_anew() {
    let mut screen = two_disks();
    screen.news(News::Gone("connecting to the server".into()));
    let text = screen.text();
    assert!(
        text.contains("the server is gone, trying again: connecting"),
        "{text}"
    );
    assert!(text.contains("2.00ms"), "the last picture stays: {text}");
    screen.news(News::Live("0.2.0".into()));
    // It has counted longer than the one before: another run all the same.
    screen.news(answer(vec![counted("a", 50, 1000, 2_000_000)]));
    let text = screen.text();
    assert!(!text.contains("gone") && !text.contains("2.00ms"), "{text}");
    screen.news(answer(vec![counted("a", 51, 1000, 2_000_000)]));
    assert!(screen.text().contains("1.00k"));
}

#[test]
fn disks_come_and_go() {
    let mut screen = two_disks();
    screen.news(answer(vec![counted("a", 13, 1000, 2_000_000)]));
    screen.news(listed(&[
        ("a", "serving", "healthy"),
        ("c", "failed", "failed"),
    ]));
    let text = screen.text();
    assert!(
        !text.contains("\nb ") && text.contains("c failed"),
        "{text}"
    );
    screen.ui.show("b");
    screen.model.show(Some("b"));
    assert!(screen.text().contains("the server has no such disk"));
}

#[test]
fn limits_that_hold_requests_back_are_shown() {
    let mut screen = two_disks();
    screen.news(event(
        7,
        "a",
        "limit-reached",
        "its limits hold requests back",
    ));
    assert!(screen.text().contains("a    limited "), "{}", screen.text());
    // Hops tell of waits for a limit, too, and their end.
    let mut screen = two_disks();
    let wait = hop("Q2G", "a/back", "limit", 900, Value::Null);
    screen.news(News::Hops(None, hops_of("a", vec![wait])));
    assert!(screen.text().contains("a    limited "), "{}", screen.text());
    screen.news(News::Hops(None, hops_of("a", Vec::new())));
    assert!(screen.text().contains("a    healthy "), "{}", screen.text());
}

#[test]
fn without_hops_the_counters_stay() {
    let mut screen = two_disks();
    screen.news(event(1, "b", "x", "y"));
    screen.news(listed(&[
        ("a", "serving", "healthy"),
        ("b", "serving", "healthy"),
    ]));
    screen.news(News::NoHops(
        "ctl.sock: there is no method hops: see pvblk.version".into(),
    ));
    let text = screen.text();
    assert!(
        text.contains("no hops, counters only: ctl.sock: there is no method hops"),
        "{text}"
    );
    assert!(
        text.contains("2.00ms") && !text.contains("medium"),
        "{text}"
    );
}

#[test]
fn events_are_kept_once_and_the_newest_is_first() {
    let mut screen = two_disks();
    for n in [1, 2, 3, 2, 1] {
        screen.news(event(n, "a", "peer-attached", &format!("number {n}")));
    }
    assert_eq!(screen.model.events.len(), 3);
    screen.keys("e");
    let text = screen.text();
    let at = |n: u64| text.find(&format!("number {n}")).unwrap();
    assert!(at(3) < at(2) && at(2) < at(1), "{text}");
    for n in 4..3000 {
        screen.news(event(n, "a", "peer-attached", "x"));
    }
    assert_eq!(screen.model.events.len(), 1024);
}
