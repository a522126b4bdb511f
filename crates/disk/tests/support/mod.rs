// A pvblk server in this process, for tests and for the examples of the documentation.

use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Pressure, Service};
use pvblk_block::BlockDevice;
use pvblk_export::local::LocalServer;
use pvblk_protocol::xenbus::BackendOffers;
use std::path::PathBuf;
use std::sync::Arc;

/// A server of disk vm1 over rings, with a folder for its socket.
pub struct Server {
    dir: tempfile::TempDir,
    service: Arc<Service>,
    local: Option<LocalServer>,
}

impl Server {
    /// Serves the volume that `spec` names.
    pub fn start(spec: &str) -> Server {
        Server::start_on(pvblk_volume::open(spec).unwrap())
    }

    pub fn start_on(device: Arc<dyn BlockDevice>) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let service = serve(device);
        let mut server = Server {
            dir,
            service,
            local: None,
        };
        server.listen();
        server
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("pvblk.sock")
    }

    /// Clients' connections end, as those of a server that goes away.
    pub fn go_away(&mut self) {
        if let Some(mut local) = self.local.take() {
            local.stop();
        }
    }

    /// The same server is there again.
    pub fn come_back(&mut self) {
        self.listen();
    }

    /// Another server comes, with another volume under the name.
    pub fn come_back_with(&mut self, spec: &str) {
        self.service = serve(pvblk_volume::open(spec).unwrap());
        self.listen();
    }

    fn listen(&mut self) {
        let offers = BackendOffers::default();
        self.local = Some(LocalServer::bind(&self.socket(), &self.service, offers).unwrap());
    }
}

fn serve(device: Arc<dyn BlockDevice>) -> Arc<Service> {
    let disk = Disk::new("vm1", device, pvblk_block::trace::Tracing::off());
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    let backend = Backend::start(&options).unwrap();
    let disks = Disks::new(vec![Arc::new(disk)]);
    Service::new(backend, disks, Arc::new(Pressure::new(0)))
}
