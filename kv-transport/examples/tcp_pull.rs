//! How fast one transport reads from another over the loopback interface.
//!
//! `cargo run --release -p kv-transport --example tcp_pull` measures within one process. To measure between two,
//! start `tcp_pull serve` in one terminal and give the line it prints to `tcp_pull pull` in another.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A measurement: any failure ends it.
#![allow(clippy::print_stdout)] // Its results are what it is for.

use std::time::{Duration, Instant};

use kv_transport::tcp::{TcpConfig, TcpTransport};
use kv_transport::{
    Address, Event, Memory, OpId, PeerId, ReadLimits, ReadPart, ReadRange, ReadRequest, RegionId, RegionKey,
    Transport,
};

const REGION_BYTES: usize = 256 << 20;
const BLOCK_BYTES: u64 = 64 << 10;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let (server, key) = serve();
            measure(&server.address(), &key).await;
        }
        ["serve"] => {
            let (server, key) = serve();
            println!("{} {}", to_hex(server.address().as_bytes()), to_hex(key.as_bytes()));
            while server.next_event().await.is_some() {}
        }
        ["pull", address, key] => {
            let address = Address::from_bytes(from_hex(address)).unwrap();
            measure(&address, &RegionKey::from_bytes(from_hex(key)).unwrap()).await;
        }
        _ => println!("usage: tcp_pull [serve | pull ADDRESS KEY]"),
    }
}

fn serve() -> (TcpTransport, RegionKey) {
    let server = TcpTransport::bind(TcpConfig::default()).unwrap();
    let memory = Memory::allocate(REGION_BYTES).unwrap();
    memory.write(0, &vec![1; REGION_BYTES]).unwrap();
    let region = server.register(memory).unwrap();
    let key = server.key(region).unwrap();
    (server, key)
}

async fn measure(address: &Address, key: &RegionKey) {
    let client = TcpTransport::bind(TcpConfig::default()).unwrap();
    let memory = Memory::allocate(REGION_BYTES).unwrap();
    memory.write(0, &vec![0; REGION_BYTES]).unwrap();
    let region = client.register(memory).unwrap();
    let peer = client.connect(address, Duration::from_secs(5)).unwrap();
    assert_eq!(client.next_event().await, Some(Event::Connected { peer }));

    // Blocks in an order that makes no two of them neighbours.
    let blocks = REGION_BYTES as u64 / BLOCK_BYTES;
    let scattered: Vec<_> = (0..blocks)
        .map(|block| ReadRange {
            remote_offset: block * 1237 % blocks * BLOCK_BYTES,
            local_offset: block * 2741 % blocks * BLOCK_BYTES,
            len: BLOCK_BYTES,
        })
        .collect();
    let mut best = 0.0f64;
    for _ in 0..12 {
        let taken = read(&client, peer, region, key, scattered.clone()).await;
        best = best.max(REGION_BYTES as f64 / 1e9 / taken.as_secs_f64());
    }
    println!("blocks of 64 KiB, scattered: {best:.2} GB/s at best");

    for (name, bytes) in [("4 KiB", 4096), ("64 KiB", 65536)] {
        let mut times = vec![];
        for _ in 0..3000 {
            let range = ReadRange { remote_offset: 0, local_offset: 0, len: bytes };
            times.push(read(&client, peer, region, key, vec![range]).await);
        }
        times.sort();
        println!(
            "one read of {name}: p50 {:?}, p99 {:?}",
            times[times.len() / 2],
            times[times.len() * 99 / 100]
        );
    }
}

async fn read(
    client: &TcpTransport,
    peer: PeerId,
    region: RegionId,
    key: &RegionKey,
    ranges: Vec<ReadRange>,
) -> Duration {
    let start = Instant::now();
    let limits = ReadLimits { total: Duration::from_secs(60), stall: Duration::from_secs(10) };
    let parts = vec![ReadPart { key: key.clone(), region, ranges }];
    client.read(ReadRequest { op: OpId(1), peer, parts, limits }).unwrap();
    match client.next_event().await {
        Some(Event::ReadCompleted { outcome, .. }) => outcome.result.unwrap(),
        other => panic!("{other:?}"),
    }
    start.elapsed()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}
