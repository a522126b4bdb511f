//! The methods of the control protocol. docs/reference/control.md has one section for each.

use super::rpc::{INVALID_PARAMS, NO_METHOD, PROTOCOL, Params, RpcError};
use super::server::{Shared, no_disk};
use crate::disks::{DiskChange, Export, Refused, Registry, SharedRegistry, Why};
use crate::hops::{self, HopsQuery};
use crate::stat;
use crate::wanted::DiskWanted;
use pvblk_block::error_line;
use pvblk_block::trace::MOST_EVERY;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

type Outcome = Result<Value, RpcError>;
pub(super) type Method = fn(&Arc<Shared>, Value) -> Outcome;

/// The way in which a method is called.
#[derive(Clone, Copy)]
pub(super) enum Call {
    /// Never waits: runs on the connection's thread.
    Quick(Method),
    /// May wait for a disk or a peer: on a thread of its own.
    Slow(Method),
    /// The connection becomes a stream of records.
    Trace,
    /// The connection becomes a stream of events.
    Events,
    /// An answer after a second, or the connection becomes a stream of hops.
    Hops,
}

const METHODS: &[(&str, Call)] = &[
    ("pvblk.version", Call::Quick(version)),
    ("disk.add", Call::Slow(disk_add)),
    ("disk.remove", Call::Slow(disk_remove)),
    ("disk.list", Call::Quick(disk_list)),
    ("disk.show", Call::Quick(disk_show)),
    ("disk.set", Call::Slow(disk_set)),
    ("disk.ask", Call::Slow(disk_ask)),
    ("export.add", Call::Slow(export_add)),
    ("export.remove", Call::Slow(export_remove)),
    ("reload", Call::Slow(reload)),
    ("memory.ask", Call::Slow(memory_ask)),
    ("stat", Call::Slow(statistics)),
    ("trace", Call::Trace),
    ("events", Call::Events),
    ("hops", Call::Hops),
];

/// Time for a command without a word of its asker.
const TIMEOUT_SECS: f64 = 60.0;
/// Longest time that can be asked for.
const MOST_SECS: f64 = 24.0 * 3600.0;

pub(super) fn find(name: &str) -> Result<Call, RpcError> {
    let found = METHODS.iter().find(|(n, _)| *n == name);
    found.map(|(_, call)| *call).ok_or_else(|| {
        let text = format!("there is no method {name}: see pvblk.version");
        RpcError::new(NO_METHOD, text)
    })
}

fn version(_: &Arc<Shared>, params: Value) -> Outcome {
    Params::of(params)?.end()?;
    let methods: Vec<&str> = METHODS.iter().map(|(name, _)| *name).collect();
    let version = env!("CARGO_PKG_VERSION");
    Ok(json!({"version": version, "protocol": PROTOCOL, "methods": methods}))
}

fn registry(shared: &Shared) -> Result<&Arc<Registry>, RpcError> {
    let registry = shared.reached.registry.as_ref();
    registry.ok_or_else(|| {
        let text = "the disks of this process don't come and go: ask a `pvblk serve`";
        RpcError::new(NO_METHOD, text)
    })
}

fn answer(value: &impl Serialize) -> Outcome {
    serde_json::to_value(value).map_err(|e| RpcError::new(-32603, e.to_string()))
}

fn patience(params: &mut Params) -> Result<Duration, RpcError> {
    let secs = params.take::<f64>("timeout_secs")?.unwrap_or(TIMEOUT_SECS);
    match secs > 0.0 && secs <= MOST_SECS {
        true => Ok(Duration::from_secs_f64(secs)),
        false => Err(RpcError::new(
            INVALID_PARAMS,
            "params: timeout_secs: above 0, at most 86400",
        )),
    }
}

fn disk_add(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let name: String = params.need("name")?;
    let patience = patience(&mut params)?;
    if params.is_empty() {
        return answer(&registry(shared)?.add_again(&name, patience)?);
    }
    let wanted: DiskWanted = params.rest()?;
    answer(&registry(shared)?.add(&name, &wanted, patience)?)
}

fn disk_remove(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let name: String = params.need("name")?;
    let force = params.take("force")?.unwrap_or(false);
    let patience = patience(&mut params)?;
    params.end()?;
    answer(&registry(shared)?.remove(&name, force, patience)?)
}

fn disk_list(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let after: Option<String> = params.take("after")?;
    let most = params.take("most")?.unwrap_or(usize::MAX);
    params.end()?;
    answer(&registry(shared)?.list(after.as_deref(), most))
}

fn disk_show(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let name: String = params.need("name")?;
    params.end()?;
    answer(&registry(shared)?.show(&name)?)
}

fn disk_set(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let name: String = params.need("name")?;
    let change = DiskChange {
        exclusive: params.take("exclusive")?,
        limit: params.take("limit")?,
    };
    params.end()?;
    answer(&registry(shared)?.set(&name, &change)?)
}

fn disk_ask(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let name: String = params.need("name")?;
    let question: Value = params.need("question")?;
    params.end()?;
    let text = shared.ask(&name, &question.to_string());
    json_of(text.map_err(|e| Refused::new(Why::Failed, e.to_string()))?)
}

fn reload(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let dry_run = params.take("dry_run")?.unwrap_or(false);
    params.end()?;
    let registry = SharedRegistry(Arc::clone(registry(shared)?));
    let Some(reload) = &shared.reached.reload else {
        return Err(RpcError::new(
            NO_METHOD,
            "this process has no configuration to read again",
        ));
    };
    let difference = reload.run(&registry, dry_run);
    let refused = |e: anyhow::Error| Refused::new(Why::Invalid, error_line(&*e));
    answer(&difference.map_err(refused)?)
}

fn memory_ask(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let question: Value = params.need("question")?;
    params.end()?;
    let text = shared.reached.memory.answer(&question.to_string());
    json_of(text.map_err(|e| Refused::new(Why::Failed, e.to_string()))?)
}

fn statistics(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let disk: Option<String> = params.take("disk")?;
    params.end()?;
    let registry = shared.reached.registry.as_ref();
    let failure = || registry?.failure(disk.as_deref()?);
    let counters = stat::answer(shared.reached.service.disks(), disk.as_deref());
    let counters = counters
        .map_err(|e| failure().unwrap_or_else(|| Refused::new(Why::NoDisk, e.to_string())))?;
    let failed = match &disk {
        None => registry.map_or(0, |r| r.failed()),
        Some(_) => 0,
    };
    let counters = counters.with_failed(failed);
    answer(&match disk {
        None => counters.with_events(shared.reached.service.events()),
        Some(_) => counters,
    })
}

/// One request of so many is to be traced.
pub(super) fn trace_every(params: Value) -> Result<u32, RpcError> {
    let mut params = Params::of(params)?;
    let every = params.take("every")?.unwrap_or(1);
    params.end()?;
    match (1..=MOST_EVERY).contains(&every) {
        true => Ok(every),
        false => {
            let text = format!("params: every: a number from 1 to {MOST_EVERY}");
            Err(RpcError::new(INVALID_PARAMS, text))
        }
    }
}

/// A question for hops; errors if its disk isn't served.
pub(super) fn hops_query(shared: &Shared, params: Value) -> Result<HopsQuery, RpcError> {
    let query = HopsQuery::parse(params);
    let query = query.map_err(|e| RpcError::new(INVALID_PARAMS, e.to_string()))?;
    let disks = shared.reached.service.disks();
    match &query.disk {
        Some(disk) if disks.find(disk).is_none() => {
            let text = no_disk(disks, disk).to_string();
            Err(Refused::new(Why::NoDisk, text).into())
        }
        _ => Ok(query),
    }
}

/// One object of hops, after a second.
pub(super) fn hops_once(shared: &Arc<Shared>, params: Value) -> Outcome {
    let query = hops_query(shared, params)?;
    let report = hops::once(&shared.reached.feed, &query, || shared.is_stopping());
    answer(&report.map_err(|e| Refused::new(Why::Failed, format!("starting a trace: {e}")))?)
}

fn json_of(text: String) -> Outcome {
    serde_json::from_str(&text).or(Ok(Value::String(text)))
}

fn export_add(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let patience = patience(&mut params)?;
    let export = export(&mut params)?;
    params.end()?;
    answer(&registry(shared)?.add_export(&export, patience)?)
}

fn export_remove(shared: &Arc<Shared>, params: Value) -> Outcome {
    let mut params = Params::of(params)?;
    let patience = patience(&mut params)?;
    let force = params.take("force")?.unwrap_or(false);
    let export = export(&mut params)?;
    params.end()?;
    answer(&registry(shared)?.remove_export(&export, force, patience)?)
}

/// One export, by exactly one of its kinds.
fn export(params: &mut Params) -> Result<Export, RpcError> {
    let disk: Option<String> = params.take("disk")?;
    let kinds = ["vhost_user", "xen_attach", "nbd", "local"];
    let mut given = Vec::new();
    for kind in kinds {
        if let Some(text) = params.take::<String>(kind)? {
            given.push((kind, text));
        }
    }
    match (disk, given.pop(), given.is_empty()) {
        (Some(disk), Some(("vhost_user", socket)), true) => Ok(Export::VhostUser { disk, socket }),
        (Some(disk), Some(("xen_attach", guest)), true) => Ok(Export::XenAttach { disk, guest }),
        (None, Some(("nbd", address)), true) => Ok(Export::Nbd(address)),
        (None, Some(("local", socket)), true) => Ok(Export::Local(socket)),
        _ => Err(RpcError::new(
            INVALID_PARAMS,
            "params: give disk and either vhost_user or xen_attach; or nbd; or local",
        )),
    }
}
