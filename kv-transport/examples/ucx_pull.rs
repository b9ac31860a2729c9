//! Reads random blocks from another process over UCX, and says how fast.
//!
//! `cargo run --release -p kv-transport --example ucx_pull -- posix,cma,self 65536` starts the other process itself.
//! The arguments are UCX's transports (`UCX_TLS`) and the block's length; `SPIN_US` sets how long the threads look
//! for news before they sleep.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // An example that fails may say so.

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let lanes = args.first().map_or("tcp,self", String::as_str);
    if args.get(1).is_some_and(|word| word == "serve") {
        return pull::serve(lanes);
    }
    let block = args.get(1).map_or(65_536, |word| word.parse().unwrap());
    pull::pull(lanes, block).await;
}

#[cfg(target_os = "linux")]
mod pull {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use kv_transport::ucx::{UcxConfig, UcxTransport};
    use kv_transport::{
        Address, Event, Memory, OpId, ReadLimits, ReadPart, ReadRange, ReadRequest, RegionKey, Transport,
    };

    const POOL: u64 = 256 << 20;
    const ROUNDS: u64 = 9;
    const LIMIT: Duration = Duration::from_secs(30);

    fn open(lanes: &str) -> UcxTransport {
        let settings = vec![("TLS".into(), lanes.into())];
        let spin = std::env::var("SPIN_US").map_or(0, |text| text.parse().unwrap());
        UcxTransport::open(UcxConfig { settings, spin: Duration::from_micros(spin), ..UcxConfig::default() })
            .unwrap()
    }

    fn byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    fn pool(fill: impl Fn(u64) -> u8) -> Memory {
        let memory = Memory::allocate(POOL as usize).unwrap();
        let bytes: Vec<u8> = (0..POOL).map(fill).collect();
        memory.write(0, &bytes).unwrap();
        memory
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn unhex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    pub(super) fn serve(lanes: &str) {
        let server = open(lanes);
        let key = server.key(server.register(pool(byte)).unwrap()).unwrap();
        println!("{} {}", hex(server.address().as_bytes()), hex(key.as_bytes()));
        std::io::stdin().lines().next();
    }

    /// Processor seconds of a process, all its threads together.
    fn cpu(pid: u32) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let words: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        (words[11].parse::<f64>().unwrap() + words[12].parse::<f64>().unwrap()) / 100.0
    }

    pub(super) async fn pull(lanes: &str, block: u64) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([lanes, "serve"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let line = BufReader::new(child.stdout.take().unwrap()).lines().next().unwrap().unwrap();
        let (address, key) = line.split_once(' ').unwrap();
        let key = RegionKey::from_bytes(unhex(key)).unwrap();

        let client = open(lanes);
        let peer = client.connect(&Address::from_bytes(unhex(address)).unwrap(), LIMIT).unwrap();
        assert_eq!(client.next_event().await, Some(Event::Connected { peer }));
        let used = client.lanes(peer).unwrap().join(" ");
        let local = pool(|_| 0);
        let region = client.register(local.clone()).unwrap();

        let count = POOL / block;
        let (mut random, mut speeds) = (88_172_645_463_325_252u64, vec![]);
        let pids = [std::process::id(), child.id()];
        let before: f64 = pids.iter().map(|pid| cpu(*pid)).sum();
        for round in 0..ROUNDS {
            let mut order: Vec<u64> = (0..count).collect();
            for at in (1..order.len()).rev() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                order.swap(at, (random % (at as u64 + 1)) as usize);
            }
            let at = |(to, from): (usize, &u64)| ReadRange {
                remote_offset: from * block,
                local_offset: to as u64 * block,
                len: block,
            };
            let ranges: Vec<_> = order.iter().enumerate().map(at).collect();
            let parts = vec![ReadPart { key: key.clone(), region, ranges }];
            let limits = ReadLimits { total: LIMIT, stall: LIMIT };
            let start = Instant::now();
            client.read(ReadRequest { op: OpId(round), peer, parts, limits }).unwrap();
            match client.next_event().await {
                Some(Event::ReadCompleted { outcome, .. }) => outcome.result.unwrap(),
                other => panic!("{other:?}"),
            }
            speeds.push((count * block) as f64 / start.elapsed().as_secs_f64() / 1e9);
            if round == 0 {
                let mut bytes = vec![0; POOL as usize];
                local.read(0, &mut bytes).unwrap();
                let right = |(at, got): (usize, &u8)| {
                    let at = at as u64;
                    *got == byte(order[(at / block) as usize] * block + at % block)
                };
                assert!(bytes[..(count * block) as usize].iter().enumerate().all(right), "bytes differ");
            }
        }
        let after: f64 = pids.iter().map(|pid| cpu(*pid)).sum();
        speeds.sort_by(f64::total_cmp);
        let gigabytes = (ROUNDS * count * block) as f64 / 1e9;
        println!(
            "UCX {:?} {lanes} ({used}), blocks of {block}: {:.2} GB/s ({:.2} - {:.2}), {:.2} CPU s/GB",
            client.ucx_version(),
            speeds[speeds.len() / 2],
            speeds[0],
            speeds[speeds.len() - 1],
            (after - before) / gigabytes,
        );
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
