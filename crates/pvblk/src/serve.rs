//! `pvblk serve`.

use crate::cli::ServeArgs;
use crate::config::{ServeConfig, unix_listen};
use crate::control::{self, ControlSocket, Methods, Reached};
use crate::disks::{Registry, SharedRegistry};
use crate::early_stop::EarlyStop;
use crate::events::Told;
use crate::exports::{ExportLimits, Exports};
use crate::memory::Desk;
use crate::opener::Opener;
use crate::sandbox::{self, Entrance, Role};
use crate::traces::Traces;
use crate::wanted::{Reload, WantedState, members, takeovers};
use crate::{bill, daemon, log};
use anyhow::{Context, Result, bail};
use pvblk_backend::{Backend, BackendOptions, Disks, Pressure, PressureSources, Service};
use pvblk_block::{BlockDevice, ErrorKind};
use std::process::ExitCode;
use std::sync::Arc;

/// Serves until a signal says stop; with `--sandbox` in a child process, whose status is returned.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    match sandbox::role(args)? {
        Role::Over(status) => Ok(status),
        Role::Library(role) => {
            role.enter()?;
            serve(args, None)
        }
        Role::Alone => serve(args, None),
        Role::Child(entrance) => serve(args, Some(&entrance)),
    }
}

fn serve(args: &ServeArgs, entrance: Option<&Entrance>) -> Result<ExitCode> {
    let opener = Opener::default();
    let mut config = ServeConfig::resolve(args, &opener)?;
    log::start(Some((&config.log, &opener)))?;
    let mut sandbox = entrance.map(Entrance::enter).transpose()?;
    let opener = match &sandbox {
        Some(sandbox) => Opener::over(sandbox.link()),
        None => opener,
    };
    let base = daemon::base_memory();
    let mut signals = daemon::signals()?;
    // Each front end's ring, NBD connection and guest's queue takes one queue.
    let opener = opener.serving(config.max_queues as u16, config.allow_remote);
    let opener = Arc::new(opener);
    let folder = config.state.as_deref().map(|path| opener.state(path));
    let state = WantedState::open(config.configured.clone(), folder.transpose()?)?;
    let state = Arc::new(state);
    config.take(args, &state)?;
    let traces = Arc::new(Traces::of_server());
    let opened = open_all(&mut config, &opener, &state)?;
    let served = |name: &str| opened.iter().any(|(n, _)| n == name);
    config.vhost_user.retain(|(disk, _)| served(disk));
    config.xen_attach.retain(|o| served(&o.disk));
    let backend = Backend::start(&BackendOptions {
        workers: config.workers,
        spin_max: config.spin_max,
        ..BackendOptions::default()
    })?;
    let buffers = &config.buffers;
    let pressure = Arc::new(Pressure::new(buffers.floor_pages * backend.workers()));
    pressure.set_max_buffer_pages(buffers.max_pages);
    pressure.set_duration(buffers.squeeze);
    let watch = match buffers.listen {
        true => {
            let sources = match &mut sandbox {
                Some(sandbox) => sandbox.sources(),
                None => PressureSources::find(),
            };
            Some(daemon::listen_for_pressure(sources, &pressure)?)
        }
        false => None,
    };
    let desk = Desk::new(&pressure, watch.as_ref(), base);
    let first = config.disks.first().map(|(name, _)| name.clone());
    let disks = Disks::default().with_default(first.unwrap_or_default());
    let service = Service::new(backend, disks, pressure);
    let on_event = config.on_event.take().map(|program| {
        let runs = opener.event_program(&program);
        (program, runs)
    });
    let told = Told::start(&service, on_event, config.hang_after)?;
    let exports = Arc::new(Exports::new(&service, &opener, &ExportLimits::of(&config)));
    let budgets = config.clients.budgets(config.disks.len());
    let registry = Registry::new(&service, &opener, &exports, &traces, budgets);
    for (name, device) in opened {
        let wanted = config.wanted.iter().find(|(n, _)| *n == name);
        let wanted = wanted.map(|(_, disk)| disk.clone()).unwrap_or_default();
        registry.add_opened(&name, device, &wanted)?;
    }
    for (name, wanted, why) in &config.wrong {
        registry.add_failed(name, wanted, why)?;
    }
    if let Some(sandbox) = &sandbox {
        daemon::tell_by(sandbox.link());
        // Nobody's bytes were read yet.
        sandbox.lock()?;
    }
    exports.start(&config)?;
    for socket in state.listeners().local.iter().skip(1) {
        exports.add_local(&unix_listen("--local", socket)?)?;
    }
    registry.keep_in(&state);
    if config.state.is_some() {
        takeovers::watch(&registry, &service)?;
    }
    let reload = Arc::new(Reload::new(args, &opener, &state, &config));
    let reached = Reached {
        feed: Arc::clone(traces.feed()),
        service: Arc::clone(&service),
        memory: desk,
        registry: Some(Arc::clone(&registry)),
        reload: Some(Arc::clone(&reload)),
    };
    let methods = Methods::new(reached);
    let control = listen(&config.control, &opener, &methods)?;
    let web = config.web.as_ref().map(|web| web.start(&opener, &methods));
    let web = web.transpose()?;
    let slow = traces.start(config.slow)?;
    if let Some(watch) = &watch {
        daemon::tell_sources(watch);
    }
    log::put(&bill::render(base));
    daemon::ready();
    let server = Arc::new(SharedRegistry(Arc::clone(&registry)));
    daemon::wait_for_stop(&mut signals, &service, base, || reload.soon(&server));
    // Peers first, then the data.
    registry.stop();
    exports.stop();
    drop((web, control, slow, watch, told));
    daemon::finish(&service)?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the disks that are wanted, one after another. Those that can't be opened go to [`ServeConfig::wrong`].
fn open_all(
    config: &mut ServeConfig,
    opener: &Opener,
    state: &WantedState,
) -> Result<Vec<(String, Arc<dyn BlockDevice>)>> {
    let (mut opened, mut failed) = (Vec::new(), Vec::new());
    let stop = EarlyStop::start()?;
    for (name, spec) in &config.disks {
        if stop.is_due() {
            failed.push((name.clone(), "the server is stopping".into()));
            continue;
        }
        stop.next(name);
        let is_configured = config.configured.disk(name).is_some();
        let device = match members::open(opener, Some(state), name, spec) {
            // A guest can write what keeps its own disk from being served; the others' aren't to suffer from that. Nor from a disk that was added at run
            // time, without anybody who looks at this start.
            Err(e)
                if !is_configured || (e.kind() == ErrorKind::Content && config.disks.len() > 1) =>
            {
                tracing::error!("disk {name} is not served: {e}");
                failed.push((name.clone(), e.to_string()));
                continue;
            }
            opened => opened.with_context(|| format!("disk {name}"))?,
        };
        let mib = device.capacity_sectors() / 2048;
        log::line(format_args!(
            "disk {name}: {}, {mib} MiB",
            device.describe()
        ));
        opened.push((name.clone(), device));
    }
    if opened.is_empty() && stop.is_due() {
        bail!("stopped before a disk was open");
    }
    if opened.is_empty() && !config.disks.is_empty() {
        bail!("none of the disks can be served: see the errors above");
    }
    for (name, why) in failed {
        let wanted = config.wanted.iter().find(|(n, _)| *n == name);
        let wanted = wanted.map(|(_, disk)| disk.clone()).unwrap_or_default();
        config.wrong.push((name, wanted, why));
    }
    Ok(opened)
}

/// Opens the control socket. At the usual place somebody else may be: that is told, and no reason not to serve.
fn listen(
    socket: &ControlSocket,
    opener: &Opener,
    methods: &Methods,
) -> Result<Option<control::Server>> {
    let (path, file) = match socket {
        ControlSocket::None => return Ok(None),
        ControlSocket::Told(path) => (path, opener.stream(path)?),
        ControlSocket::Usual(path) => match opener.usual_control(path) {
            Ok(file) => (path, file),
            Err(e) => {
                tracing::warn!(
                    "no control socket: {e}; give --control unix:PATH for one of its own, or --control none"
                );
                return Ok(None);
            }
        },
    };
    let server = control::Server::start(file, methods)?;
    log::line(format_args!("control on unix:{}", path.display()));
    Ok(Some(server))
}
