//! What device memory costs: reads between two `tcp` endpoints of one process, from and to the first CUDA device and host memory,
//! beside the copies alone.
//!
//! ```text
//! cargo run --release -p kv-transport --example device_pull -- [MIB [ROUNDS]]
//! ```
//!
//! Without a device it says why and exits with 3.

#[cfg(target_os = "linux")]
mod pull {
    use std::error::Error;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use kv_transport::cuda::CudaDevice;
    use kv_transport::device::{CopyRange, Direction};
    use kv_transport::tcp::{TcpConfig, TcpTransport};
    use kv_transport::{
        Device, Event, Memory, OpId, PeerId, ReadLimits, ReadPart, ReadRange, ReadRequest, Transport,
    };

    const LIMIT: Duration = Duration::from_secs(30);

    pub(super) struct Bench {
        device: CudaDevice,
        bytes: usize,
        rounds: u32,
        server: TcpTransport,
        client: TcpTransport,
        peer: PeerId,
    }

    fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
        (0..bytes as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    impl Bench {
        pub(super) async fn new(
            device: CudaDevice,
            bytes: usize,
            rounds: u32,
        ) -> Result<Self, Box<dyn Error>> {
            let server = TcpTransport::bind(TcpConfig::default())?;
            let client = TcpTransport::bind(TcpConfig::default())?;
            let peer = client.connect(&server.address(), LIMIT)?;
            match client.next_event().await {
                Some(Event::Connected { .. }) => Ok(Self { device, bytes, rounds, server, client, peer }),
                other => Err(format!("not connected: {other:?}").into()),
            }
        }

        fn memory(&self, on_device: bool) -> Result<Memory, Box<dyn Error>> {
            Ok(if on_device { self.device.allocate(self.bytes)? } else { Memory::allocate(self.bytes)? })
        }

        /// GB/s of the rounds, sorted. Every round brings other bytes, which are compared.
        pub(super) async fn read(&self, from: bool, to: bool) -> Result<Vec<f64>, Box<dyn Error>> {
            let (source, into) = (self.memory(from)?, self.memory(to)?);
            let (there, here) = (self.server.register(source.clone())?, self.client.register(into.clone())?);
            let key = self.server.key(there)?;
            let mut rates = vec![];
            let mut back = vec![0; self.bytes];
            for round in 0..self.rounds {
                let bytes = pattern(self.bytes, round);
                source.write(0, &bytes)?;
                let range = ReadRange { remote_offset: 0, local_offset: 0, len: self.bytes as u64 };
                let parts = vec![ReadPart { key: key.clone(), region: here, ranges: vec![range] }];
                let limits = ReadLimits { total: LIMIT, stall: LIMIT };
                let start = Instant::now();
                self.client.read(ReadRequest { op: OpId(1), peer: self.peer, parts, limits })?;
                match self.client.next_event().await {
                    Some(Event::ReadCompleted { outcome, .. }) => outcome.result?,
                    other => return Err(format!("{other:?}").into()),
                }
                rates.push(self.bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
                into.read(0, &mut back)?;
                if back != bytes {
                    return Err("the bytes differ".into());
                }
            }
            self.client.deregister(here)?;
            self.server.deregister(there)?;
            rates.sort_by(f64::total_cmp);
            Ok(rates)
        }

        /// GB/s of copies of the same length between pinned memory and the device.
        pub(super) fn copy(&self, direction: Direction) -> Result<Vec<f64>, Box<dyn Error>> {
            let device: Arc<dyn Device> = Arc::new(self.device.clone());
            let (memory, pinned) = (self.memory(true)?, device.allocate_pinned(self.bytes)?);
            let range = CopyRange { device: memory.place().address, host: pinned.base()?, len: self.bytes };
            let mut rates = vec![];
            for _ in 0..self.rounds {
                let start = Instant::now();
                // SAFETY: both memories live until the copy has ended, or else for ever.
                #[allow(unsafe_code)]
                let mut copying = unsafe { device.copy(direction, &[range]) }?;
                if !copying.wait(LIMIT)? {
                    std::mem::forget((memory, pinned));
                    return Err("a copy does not end".into());
                }
                rates.push(self.bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
            }
            rates.sort_by(f64::total_cmp);
            Ok(rates)
        }
    }
}

#[cfg(target_os = "linux")]
#[allow(clippy::print_stdout, clippy::print_stderr)] // A command speaks to its user.
#[tokio::main(flavor = "current_thread")]
async fn main() -> std::process::ExitCode {
    use std::process::ExitCode;

    use kv_transport::cuda::CudaDevice;
    use kv_transport::device::Direction;

    let number = |at: usize, otherwise: usize| {
        std::env::args().nth(at).and_then(|word| word.parse().ok()).unwrap_or(otherwise)
    };
    let (mib, rounds) = (number(1, 64).clamp(1, 4095), number(2, 9).max(1));
    let device = match CudaDevice::probe() {
        Ok(driver) => {
            println!("CUDA {}, devices {:?}", driver.version, driver.devices);
            CudaDevice::open(0)
        }
        Err(error) => Err(error),
    };
    let device = match device {
        Ok(device) => device,
        Err(error) => {
            eprintln!("no device: {error}");
            return ExitCode::from(3);
        }
    };
    let show = |what: &str, rates: &[f64]| {
        let (low, high) = (rates.first().unwrap_or(&0.0), rates.last().unwrap_or(&0.0));
        let median = rates.get(rates.len() / 2).unwrap_or(&0.0);
        println!("{what:24} {median:7.2} GB/s  ({low:.2} to {high:.2}, {} rounds)", rates.len());
    };
    let measured = async {
        let bench = pull::Bench::new(device, mib << 20, rounds as u32).await?;
        println!("{mib} MiB a read, every byte compared");
        show("copy device to host", &bench.copy(Direction::ToHost)?);
        show("copy host to device", &bench.copy(Direction::ToDevice)?);
        for (from, to) in [(false, false), (true, false), (false, true), (true, true)] {
            let name = |on: bool| if on { "device" } else { "host" };
            let what = format!("tcp {} to {}", name(from), name(to));
            show(&what, &bench.read(from, to).await?);
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    };
    match measured.await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn main() {}
