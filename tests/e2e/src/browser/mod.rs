//! A headless Chromium, driven over the DevTools protocol on a pair of pipes.
//!
//! `--remote-debugging-pipe` makes it read messages from descriptor 3 and write them to descriptor 4, each JSON and a NUL. A shell makes these of its
//! standard input and output.

pub mod axe;
mod keys;
mod pipe;

use crate::outcome::check;
use crate::tools::need;
use crate::{Stop, tools};
use keys::Key;
use pipe::Pipe;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest time for what takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Nothing is asked of the network, and pages are drawn without a graphics card.
const ARGUMENTS: &[&str] = &[
    "--headless",
    // The sandbox can't be had by root. The only pages are ours.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
];

/// Colors that the system asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Light,
    Dark,
}

/// A browser with one page. It is killed when dropped.
pub struct Browser {
    pipe: Pipe,
    session: String,
    /// Uncaught exceptions, and violations of the page's policies.
    pub complaints: Vec<String>,
    // Its profile.
    _dir: TempDir,
}

impl Browser {
    /// Skips the test where there is no Chromium.
    pub fn start() -> Result<Browser, Stop> {
        need(&["chromium", "sh"])?;
        let dir = tempfile::tempdir()?;
        let mut command = Command::new("sh");
        command
            .args([
                "-c",
                r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#,
                "sh",
            ])
            .arg(tools::find("chromium").unwrap_or_default())
            .args(ARGUMENTS)
            .arg(format!("--user-data-dir={}", dir.path().display()))
            .arg("about:blank")
            .env("HOME", dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut browser = Browser {
            pipe: Pipe::start(command)?,
            session: String::new(),
            complaints: Vec::new(),
            _dir: dir,
        };
        let target = browser.ask("Target.createTarget", json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.ask("Target.attachToTarget", attach)?;
        browser.session = text(&session["sessionId"]);
        for domain in ["Page", "Runtime", "Log"] {
            browser.ask(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Sends a command and waits for its result.
    fn ask(&mut self, method: &str, params: Value) -> Result<Value, Stop> {
        let id = self.pipe.send(method, &self.session, &params)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let message = self
                .pipe
                .receive(deadline)
                .map_err(|why| Stop::Fail(format!("{method}: {why}")))?;
            if message["id"] == id {
                return match message.get("result") {
                    Some(result) => Ok(result.clone()),
                    None => Stop::fail(format!("{method}: {}", message["error"])),
                };
            }
            self.notice(&message);
        }
    }

    fn notice(&mut self, message: &Value) {
        let params = &message["params"];
        let complaint = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                let thrown = &params["exceptionDetails"];
                text(&thrown["exception"]["description"]) + &text(&thrown["text"])
            }
            // Requests that fail are the page's to handle; a broken policy is a mistake in it.
            Some("Log.entryAdded") if text(&params["entry"]["text"]).contains("Policy") => {
                text(&params["entry"]["text"])
            }
            _ => return,
        };
        self.complaints.push(complaint);
    }

    /// Fails if the page has complained.
    pub fn quiet(&self) -> Result<(), Stop> {
        check(self.complaints.is_empty(), || self.complaints.join("\n"))
    }

    /// Opens a page; doesn't wait for it.
    pub fn open(&mut self, url: &str) -> Result<(), Stop> {
        let opened = self.ask("Page.navigate", json!({"url": url}))?;
        check(opened.get("errorText").is_none(), || {
            format!("{url}: {opened}")
        })
    }

    /// The value of an expression in the page; promises are awaited.
    pub fn eval(&mut self, expression: &str) -> Result<Value, Stop> {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.ask("Runtime.evaluate", params)?;
        match answer.get("exceptionDetails") {
            None => Ok(answer["result"]["value"].clone()),
            Some(thrown) => Stop::fail(format!(
                "{expression}: {}",
                text(&thrown["exception"]["description"])
            )),
        }
    }

    /// Waits until an expression is true, and returns its value.
    pub fn until(&mut self, expression: &str) -> Result<Value, Stop> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.eval(expression)?;
            let is_true = !matches!(&value, Value::Null | Value::Bool(false))
                && value != json!(0)
                && value != json!("");
            if is_true {
                return Ok(value);
            }
            if Instant::now() > deadline {
                let page = text(&self.eval("document.body.innerText.slice(0, 2000)")?);
                return Stop::fail(format!("never true: {expression}\n{page}"));
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Text of the first element that the selector finds.
    pub fn text(&mut self, selector: &str) -> Result<String, Stop> {
        let found = self.eval(&format!(
            "document.querySelector({})?.innerText ?? null",
            json!(selector)
        ))?;
        match found {
            Value::String(text) => Ok(text),
            _ => Stop::fail(format!("there is no {selector}")),
        }
    }

    /// Size of the window in CSS pixels; less than 700 is a phone.
    pub fn size(&mut self, width: u32, height: u32, scheme: Scheme) -> Result<(), Stop> {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700});
        self.ask("Emulation.setDeviceMetricsOverride", size)?;
        let value = match scheme {
            Scheme::Light => "light",
            Scheme::Dark => "dark",
        };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": value}]});
        self.ask("Emulation.setEmulatedMedia", features).map(drop)
    }

    /// Presses a key by its name, such as `ArrowDown`, `Shift+ArrowUp` or `m`.
    pub fn press(&mut self, name: &str) -> Result<(), Stop> {
        let key = Key::of(name);
        self.ask("Input.dispatchKeyEvent", key.down())?;
        self.ask("Input.dispatchKeyEvent", key.up()).map(drop)
    }

    /// Types into the element that has the focus.
    pub fn enter(&mut self, words: &str) -> Result<(), Stop> {
        self.ask("Input.insertText", json!({"text": words}))
            .map(drop)
    }

    /// Drags with the left button over an element, between two places in it: shares of its width and height.
    pub fn drag(&mut self, selector: &str, from: (f64, f64), to: (f64, f64)) -> Result<(), Stop> {
        let place = format!(
            "(() => {{ const e = document.querySelector({}); e.scrollIntoView({{block: 'center'}}); \
             const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()",
            json!(selector)
        );
        let place = self.eval(&place)?;
        let at = |n: usize| place[n].as_f64().unwrap_or(0.0);
        let point = |(x, y): (f64, f64)| (at(0) + at(2) * x, at(1) + at(3) * y);
        let middle = ((from.0 + to.0) / 2.0, (from.1 + to.1) / 2.0);
        let steps = [
            ("mousePressed", from),
            ("mouseMoved", middle),
            ("mouseMoved", to),
            ("mouseReleased", to),
        ];
        for (kind, place) in steps {
            let (x, y) = point(place);
            let event = json!({"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1});
            self.ask("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// Writes a picture of the whole page, at most `most` pixels high.
    pub fn picture(&mut self, path: &Path, most: u32) -> Result<(), Stop> {
        let size = self.eval("[innerWidth, document.documentElement.scrollHeight]")?;
        let height = size[1].as_u64().unwrap_or(0).min(u64::from(most));
        let clip = json!({"x": 0, "y": 0, "width": size[0], "height": height, "scale": 1});
        let params = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let taken = self.ask("Page.captureScreenshot", params)?;
        std::fs::write(path, pipe::decode(&text(&taken["data"])))?;
        Ok(())
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
