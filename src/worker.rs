//! The connector of an engine's worker process.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use kv_handshake::Dialler;
use kv_proto::handshake::{EngineCard, Query};
use kv_proto::{BlockLayout, Fingerprint, PeerLocator, Rank};
use kv_transport::auto::AutoTransport;
#[cfg(target_os = "linux")]
use kv_transport::shm::{ShmConfig, ShmTransport};
use kv_transport::tcp::{TcpConfig, TcpTransport};
#[cfg(target_os = "linux")]
use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{Memory, Transport, TransportError};
use kv_worker::staging::DeviceCache;
use kv_worker::{Dial, Failure, Worker, WorkerConfig, WorkerLimits, WorkerParts, WorkerStats};

use crate::config::{Config, ConfigError, TRANSPORTS, ms};
use crate::error::ConnectorError;
use crate::identity::EngineIdentity;

/// What a worker process brings along.
pub struct WorkerSetup {
    /// Its rank.
    pub rank: Rank,
    /// What names the model and its weights beyond doubt; equal on both sides of a hand-over.
    pub model: String,
    /// Where its blocks lie.
    pub layout: BlockLayout,
    /// The memories that the layout speaks of, by index.
    pub memories: Vec<Memory>,
    /// Called when a report begins to wait, so that an idle engine can make a step; on a thread of the connector's,
    /// and it must not block.
    pub on_report: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for WorkerSetup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerSetup")
            .field("rank", &self.rank)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

/// The worker half of one rank: leases, peers and pulls, on a thread of its own.
///
/// No call blocks or waits for the network. Dropping it ends its threads and sockets within seconds.
#[derive(Debug)]
pub struct WorkerConnector {
    worker: Worker,
}

/// The handshake over ZeroMQ, as the worker's driver wants it.
struct ZmqDial(Dialler);

impl Dial for ZmqDial {
    fn dial(
        &self,
        peer: &PeerLocator,
        query: Query,
        ours: &Fingerprint,
        limit: Duration,
    ) -> Result<EngineCard, Failure> {
        let dial = kv_handshake::Dial {
            host: peer.host.clone(),
            port: peer.port,
            query,
            fingerprint: ours.clone(),
            wanted_life: peer.incarnation,
            limit,
        };
        self.0.dial(&dial).map_err(|error| Failure::new(error.failure(), error.to_string()))
    }
}

impl WorkerConnector {
    /// Starts the worker half of one rank over the transport that the configuration names.
    pub fn start(
        config: &Config,
        identity: &EngineIdentity,
        setup: WorkerSetup,
    ) -> Result<Self, ConnectorError> {
        config.check()?;
        let transport = open_transport(config)?;
        Self::start_over(config, identity, setup, transport)
    }

    /// As [`WorkerConnector::start`], over a transport of the caller's own.
    pub fn start_over(
        config: &Config,
        identity: &EngineIdentity,
        setup: WorkerSetup,
        transport: Arc<dyn Transport>,
    ) -> Result<Self, ConnectorError> {
        config.check()?;
        let WorkerSetup { rank, model, layout, memories, on_report } = setup;
        let fingerprint = Fingerprint::of(&model, &layout);
        let worker = Worker::start(WorkerParts {
            config: WorkerConfig {
                engine: identity.engine.clone(),
                incarnation: identity.incarnation,
                rank,
                topology: identity.topology,
                checksums: config.checksums,
                limits: limits(config),
            },
            layout,
            fingerprint,
            memories,
            transport,
            dialler: Arc::new(ZmqDial(Dialler::new())),
            on_report,
        })?;
        Ok(Self { worker })
    }

    /// What this worker publishes about itself, as bytes for [`crate::SchedulerConnector::start`].
    pub fn card(&self) -> Result<Vec<u8>, ConnectorError> {
        Ok(self.worker.card().encode()?)
    }

    /// Whether its thread runs; see [`Worker::is_running`].
    pub fn is_running(&self) -> bool {
        self.worker.is_running()
    }

    /// Says that the memories of the setup are a host pool, and that the engine's cache lies on a device; see
    /// [`Worker::stage`]. To be called before the first plan, on an engine whose scheduler half stages
    /// ([`SchedulerConnector::stage`](crate::SchedulerConnector::stage)).
    pub fn stage(&self, cache: DeviceCache) -> Result<(), ConnectorError> {
        Ok(self.worker.stage(cache)?)
    }

    /// Takes the plan of a step.
    pub fn begin_step(&self, plan: &[u8]) -> Result<(), ConnectorError> {
        Ok(self.worker.begin_step(plan)?)
    }

    /// What ended since the last call, as bytes for [`crate::SchedulerConnector::take_report`]; `None` if nothing
    /// did.
    pub fn report(&self) -> Result<Option<Vec<u8>>, ConnectorError> {
        let Some(report) = self.worker.take_report() else { return Ok(None) };
        match report.encode() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => {
                self.worker.put_back(report);
                Err(error.into())
            }
        }
    }

    /// Counters, as of a moment ago.
    pub fn stats(&self) -> WorkerStats {
        self.worker.stats()
    }

    /// Ends reads, connections and threads within `limit`.
    pub fn shut_down(&mut self, limit: Duration) {
        self.worker.shut_down(limit);
    }
}

fn limits(config: &Config) -> WorkerLimits {
    WorkerLimits {
        handshake: ms(config.handshake_limit_ms),
        connect: ms(config.connect_limit_ms),
        retry_min: ms(config.retry_min_ms),
        retry_max: ms(config.retry_max_ms),
        peer_wait: ms(config.peer_wait_ms),
        read: ms(config.read_limit_ms),
        stall: ms(config.stall_limit_ms),
        confirm: ms(config.confirm_limit_ms),
        renew_every: ms(config.renew_every_ms),
        retries: config.load_retries,
        portion_bytes: config.portion_bytes,
        ..WorkerLimits::default()
    }
}

/// Opens the transport that the configuration names.
pub fn open_transport(config: &Config) -> Result<Arc<dyn Transport>, ConnectorError> {
    match config.transport.as_str() {
        "tcp" => Ok(Arc::new(open_tcp(config)?)),
        #[cfg(target_os = "linux")]
        "shm" => Ok(Arc::new(ShmTransport::bind(ShmConfig::default())?)),
        #[cfg(target_os = "linux")]
        "ucx" => {
            let mut ucx = UcxConfig::default();
            // UCX listens on every interface that it may use, and whoever reaches it can reach this process's memory.
            if resolve(&config.transport_host)?.ip().is_loopback()
                && std::env::var_os("UCX_NET_DEVICES").is_none()
            {
                tracing::info!(
                    "transport_host is a loopback: UCX keeps to it (UCX_NET_DEVICES says otherwise)"
                );
                ucx.settings.push(("NET_DEVICES".to_owned(), "lo".to_owned()));
            }
            Ok(Arc::new(UcxTransport::open(ucx)?))
        }
        "auto" => {
            let mut members: Vec<Arc<dyn Transport>> = vec![];
            #[cfg(target_os = "linux")]
            match ShmTransport::bind(ShmConfig::default()) {
                Ok(shm) => members.push(Arc::new(shm)),
                Err(error) => tracing::warn!(%error, "no shared memory; peers are reached in other ways"),
            }
            // It listens on every interface; who wants to stay on this host does not want that.
            #[cfg(target_os = "linux")]
            if has_rdma() && !resolve(&config.transport_host)?.ip().is_loopback() {
                match UcxTransport::open(UcxConfig::default()) {
                    Ok(ucx) => members.push(Arc::new(ucx)),
                    Err(error) => tracing::warn!(%error, "a device for RDMA is here, but UCX is not"),
                }
            }
            members.push(Arc::new(open_tcp(config)?));
            Ok(Arc::new(AutoTransport::over(members)?))
        }
        _ => {
            let name = config.transport.clone();
            Err(ConfigError::UnknownTransport { name, known: TRANSPORTS }.into())
        }
    }
}

/// Whether the machine has a device for remote direct memory access. Without one UCX only does over TCP what `tcp` does
/// better.
#[cfg(target_os = "linux")]
fn has_rdma() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

fn open_tcp(config: &Config) -> Result<TcpTransport, ConnectorError> {
    let told = &config.transport_advertise_host;
    let usual = TcpConfig::default();
    let connections_per_peer = match config.transport_connections {
        0 => usual.connections_per_peer,
        chosen => chosen,
    };
    let tcp = TcpConfig {
        connections_per_peer,
        bind: resolve(&config.transport_host)?,
        advertise: (!told.is_empty()).then(|| told.trim_start_matches('[').trim_end_matches(']').to_owned()),
        ..usual
    };
    Ok(TcpTransport::bind(tcp)?)
}

fn resolve(host: &str) -> Result<SocketAddr, ConnectorError> {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = plain.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, 0));
    }
    let failed = |kind, code| TransportError::System {
        operation: "resolve transport_host",
        subject: host.to_owned(),
        kind,
        code,
    };
    let mut found = (plain, 0).to_socket_addrs().map_err(|e| failed(e.kind(), e.raw_os_error()))?;
    Ok(found.next().ok_or_else(|| failed(std::io::ErrorKind::NotFound, None))?)
}
