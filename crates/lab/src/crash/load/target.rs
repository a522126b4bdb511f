//! The workload's connections to the disk.

use super::{LoadOptions, PATIENCE};
use crate::crash::stage::Export;
use anyhow::{Result, bail};
use pvblk_block::BlockDevice;
use pvblk_client::local::{ConnectOptions, Keeper, KeeperEvent, connect};
use pvblk_client::nbd::{NbdClient, NbdClientConfig, NbdUri};
use pvblk_client::rings::Frontend;
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use pvblk_protocol::nbd::NbdAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of memory for buffers.
const MEMORY: u64 = 16 << 20;
/// The longest time to wait for a server in its handshake; a server that is being killed doesn't
/// finish it.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// A connection, or the address to connect to.
pub(super) enum Target {
    Rings(Arc<Frontend>, Keeper),
    Vhost(Arc<VhostClient>),
    /// Path of the socket. Each worker has connections of its own, one after another.
    Nbd(PathBuf),
}

impl Target {
    pub fn connect(options: &LoadOptions) -> Result<Target> {
        match options.export {
            Export::Rings => {
                let wishes = ConnectOptions {
                    queues: options.queues,
                    ring_pages: options.ring_pages,
                    memory_bytes: MEMORY,
                    name: "crash load".into(),
                    timeout: PATIENCE,
                    ..ConnectOptions::default()
                };
                let (parts, link) = connect(&options.socket, "a", &wishes)?;
                let front = Frontend::new(parts)?;
                let keeper = Keeper::start(link, front.clone(), Some(PATIENCE), |event| {
                    if let KeeperEvent::Ended { reason } = event {
                        eprintln!("pvblk: {reason}");
                        std::process::exit(3);
                    }
                })?;
                Ok(Target::Rings(front, keeper))
            }
            Export::VhostUser => {
                let config = VhostClientConfig {
                    fewer: false,
                    queues: 1,
                    entries: 16 << options.ring_pages.min(4),
                    memory_bytes: MEMORY,
                    timeout: HANDSHAKE,
                    patience: Some(PATIENCE),
                    ..VhostClientConfig::default()
                };
                let connect = || VhostClient::connect(&options.socket, &config);
                Ok(Target::Vhost(Arc::new(with_patience(connect)?)))
            }
            Export::Nbd => Ok(Target::Nbd(options.socket.clone())),
        }
    }

    /// The disk for one more worker, or for one whose connection is lost.
    pub fn device(&self) -> Result<Disk> {
        Ok(match self {
            Target::Rings(front, _) => Disk::Lasting(front.clone()),
            Target::Vhost(client) => Disk::Lasting(client.clone()),
            Target::Nbd(socket) => {
                let uri = NbdUri::new(NbdAddr::Unix(socket.clone()), "a");
                let connect = || {
                    NbdClient::connect(
                        &uri,
                        NbdClientConfig {
                            timeout: HANDSHAKE,
                            ..NbdClientConfig::default()
                        },
                    )
                };
                Disk::Once(Arc::new(with_patience(connect)?))
            }
        })
    }

    /// Ends the connection; an error if the connection had failed.
    pub fn close(self) -> Result<()> {
        let why = match self {
            Target::Rings(_, keeper) => keeper.stop(),
            Target::Vhost(client) => client.failure(),
            Target::Nbd(_) => None,
        };
        match why {
            Some(why) => bail!("{why}"),
            None => Ok(()),
        }
    }
}

/// A device, by whether it outlives its server.
pub(super) enum Disk {
    Lasting(Arc<dyn BlockDevice>),
    /// A device that ends when its connection is lost.
    Once(Arc<NbdClient>),
}

impl Disk {
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        match self {
            Disk::Lasting(device) => Arc::clone(device),
            Disk::Once(client) => client.clone(),
        }
    }

    /// True if the connection is over for good, as after the server's end.
    pub fn is_lost(&self) -> bool {
        matches!(self, Disk::Once(client) if client.failure().is_some())
    }
}

/// Calls `connect` again and again while no server listens.
fn with_patience<T, E: Into<anyhow::Error>>(
    mut connect: impl FnMut() -> Result<T, E>,
) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match connect() {
            Ok(connected) => return Ok(connected),
            Err(e) if Instant::now() > deadline => return Err(e.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
