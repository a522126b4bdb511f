//! The loop on a terminal: answers, keys and signals come by one channel, and the screen is drawn after them.

use super::feed::{Feed, News};
use super::ui::Step;
use super::{Top, plain, view};
use crate::terminal::{self, Drawing, Terminal};
use anyhow::{Context, Result, bail};
use crossterm::event::{Event, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use std::io::stdout;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

type Screen = ratatui_core::terminal::Terminal<Drawing<std::io::Stdout>>;

enum Message {
    News(News),
    Input(Event),
    /// The terminal has no more input, and why.
    NoInput(String),
    Signal(i32),
}

pub fn run(mut top: Top, path: &Path) -> Result<()> {
    let (send, messages) = channel();
    // Before the screen is taken, so that an error is seen.
    let wanted = top.wanted();
    let feed = Feed::start(path, wanted, send.clone(), Message::News)?;
    let Some(terminal) = Terminal::take(true)? else {
        drop(feed);
        return plain::run(top, path, None);
    };
    listen(&send)?;
    let mut screen = Screen::new(Drawing::new(stdout())).context("the terminal")?;
    let end = turn(&mut top, &feed, &terminal, &mut screen, &messages);
    drop(terminal);
    match end? {
        Some(signal) => signal_hook::low_level::emulate_default_handler(signal).context("a signal"),
        None => Ok(()),
    }
}

/// Threads that read keys and signals.
fn listen(send: &Sender<Message>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGTSTP]).context("signals")?;
    let told = send.clone();
    spawn("pvblk-top-signal", move || {
        for signal in signals.forever() {
            if told.send(Message::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    let told = send.clone();
    spawn("pvblk-top-key", move || {
        loop {
            let (message, is_last) = match crossterm::event::read() {
                Ok(event) => (Message::Input(event), false),
                Err(e) => (Message::NoInput(e.to_string()), true),
            };
            if told.send(message).is_err() || is_last {
                return;
            }
        }
    })
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    thread.map(drop).context("starting a thread")
}

/// Until the end: by a key, or by the signal that is returned.
fn turn(
    top: &mut Top,
    feed: &Feed,
    terminal: &Terminal,
    screen: &mut Screen,
    messages: &Receiver<Message>,
) -> Result<Option<i32>> {
    loop {
        draw(top, screen)?;
        let first = messages.recv().context("no more input")?;
        // Everything that waits is taken in before the screen is drawn again.
        for message in std::iter::once(first).chain(messages.try_iter()) {
            let step = match message {
                Message::News(news) => {
                    top.news(news);
                    Step::Draw
                }
                Message::Input(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    top.ui.key(key, &top.model)
                }
                Message::Input(Event::Resize(..)) => Step::Redraw,
                Message::Input(_) => Step::Draw,
                Message::NoInput(why) => bail!("reading keys from the terminal: {why}"),
                Message::Signal(SIGTSTP) => Step::Stop,
                Message::Signal(signal) => return Ok(Some(signal)),
            };
            match step {
                Step::Draw => {}
                Step::Redraw => screen.clear().context("the terminal")?,
                Step::Stop => {
                    terminal.stop()?;
                    screen.clear().context("the terminal")?;
                }
                Step::Quit => return Ok(None),
            }
            top.resume();
            top.ui.size = terminal::size();
            feed.want(&top.wanted());
        }
        if !terminal.is_taken() {
            bail!("a thread of top ended; its message is above");
        }
    }
}

fn draw(top: &Top, screen: &mut Screen) -> Result<()> {
    let drawn = screen.draw(|frame| {
        view::draw(frame.buffer_mut(), &top.model, &top.ui, top.utf8);
    });
    drawn.map(drop).context("drawing on the terminal")
}
