//! Events of a server: `pvblk events`, the program of `on_event`, and the thread that looks for requests that hang.

mod form;
mod program;
mod stream;
mod watch;

pub use form::EventForm;
#[cfg(test)]
pub use form::FieldForm;
pub use program::{Program, RunEvent, check_program};
pub use stream::{EventsQuery, answer};
pub use watch::hang_after;

use crate::control::{ASK_PATIENCE, Client, ControlArg};
use crate::output::print_or_end;
use anyhow::{Context, Result};
use clap::Args;
use program::OnEvent;
use pvblk_backend::Service;
use std::io::BufRead;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use watch::Watch;

/// Shown under the flags.
pub const HELP: &str = "\
The server keeps its last 1,024 events, from its start on. docs/reference/events.md has all kinds.

Examples:
  pvblk events --control unix:/run/pvblk.ctl
  pvblk events --control unix:/run/pvblk.ctl --follow --disk vm1
  pvblk events --control unix:/run/pvblk.ctl --follow --json | while read -r event; do ...; done";

#[derive(Args, Debug)]
pub struct EventsArgs {
    #[command(flatten)]
    pub control: ControlArg,
    /// Go on with events as they happen, until interrupted
    #[arg(long)]
    pub follow: bool,
    /// Only events about this disk
    #[arg(long, value_name = "NAME")]
    pub disk: Option<String>,
    /// One JSON object in each line
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &EventsArgs) -> Result<()> {
    let socket = args.control.path()?;
    let query = EventsQuery {
        follow: args.follow,
        disk: args.disk.clone(),
        after: None,
    };
    let client = Client::connect(&socket, ASK_PATIENCE)?;
    for line in client
        .stream("events", serde_json::to_value(&query)?)?
        .lines()
    {
        let line = line.with_context(|| format!("{}: reading events", socket.display()))?;
        let line = match args.json {
            true => line,
            false => {
                let event: EventForm = serde_json::from_str(&line)
                    .with_context(|| format!("{}: {line} is no event", socket.display()))?;
                event.to_string()
            }
        };
        print_or_end(&(line + "\n"))?;
    }
    Ok(())
}

/// A server's threads for events, until it is dropped.
pub struct Told {
    _watch: Watch,
    on_event: Option<OnEvent>,
    service: Arc<Service>,
}

impl Told {
    /// Looks for requests older than `hang_after`, and has `program` run for each event.
    pub fn start(
        service: &Arc<Service>,
        program: Option<(PathBuf, Arc<dyn RunEvent>)>,
        hang_after: Duration,
    ) -> Result<Told> {
        let on_event = program.map(|(path, runs)| OnEvent::start(path, runs, service.events()));
        Ok(Told {
            _watch: Watch::start(service, hang_after)?,
            on_event: on_event.transpose()?,
            service: Arc::clone(service),
        })
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.service.events().close();
        self.on_event = None;
    }
}
