//! Whatever readers do, the process that they read from goes on.

use std::time::{Duration, Instant};

use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{Address, Event, OpId, PeerId, RegionKey, Transport};

use crate::processes::{Other, from_hex};
use crate::support::*;

const SIZE: u64 = 64 << 20;

/// The owner, and how often it had to be started again because it had ended.
struct Owner {
    lanes: &'static str,
    process: Other,
    words: Vec<String>,
    deaths: u32,
}

impl Owner {
    fn start(lanes: &'static str) -> Self {
        let mut process = Other::start_on("serve", lanes);
        let words = process.words();
        Self { lanes, process, words, deaths: 0 }
    }

    /// Whether it still serves; if not, another one is started.
    async fn check(&mut self) {
        let fresh = transport(self.lanes).unwrap();
        let peer = connect(&fresh, &self.words).await;
        let read = match peer {
            Some(peer) => {
                let (address, key) = (0, RegionKey::from_bytes(from_hex(&self.words[1])).unwrap());
                let region = fresh.register(memory(&[0; 4096])).unwrap();
                fresh.read(request(1, peer, &key, region, vec![range(address, 0, 4096)])).unwrap();
                matches!(event(&fresh).await, Event::ReadCompleted { outcome, .. } if outcome.result.is_ok())
            }
            None => false,
        };
        if !read || self.process.ended().is_some() {
            let deaths = self.deaths + 1;
            *self = Self::start(self.lanes);
            self.deaths = deaths;
        }
    }
}

/// Lets some time go by, so that the end finds the reads at another point each time.
async fn pass(wait: Duration) {
    let start = Instant::now();
    while start.elapsed() < wait {
        tokio::task::yield_now().await;
    }
}

async fn connect(reader: &UcxTransport, words: &[String]) -> Option<PeerId> {
    let peer = reader.connect(&Address::from_bytes(from_hex(&words[0])).unwrap(), LIMIT).unwrap();
    matches!(event(reader).await, Event::Connected { .. }).then_some(peer)
}

/// How a reader ends, in the middle of reads.
#[derive(Debug, Clone, Copy)]
enum End {
    Cancel,
    /// Without patience for what is under way.
    CancelByForce,
    Disconnect,
    Drop,
    Kill,
}

async fn ends_in_the_middle(owner: &mut Owner, end: End, wait: Duration) {
    if matches!(end, End::Kill) {
        let mut reader = Other::start_on("read", owner.lanes);
        reader.tell(&owner.words[..2].join(" "));
        reader.words();
        pass(wait).await;
        return reader.kill();
    }
    let quiet_limit = match end {
        End::CancelByForce => Duration::from_millis(1),
        _ => config(owner.lanes).quiet_limit,
    };
    let reader = open(UcxConfig { quiet_limit, ..config(owner.lanes) }).unwrap();
    let Some(peer) = connect(&reader, &owner.words).await else { return };
    let key = RegionKey::from_bytes(from_hex(&owner.words[1])).unwrap();
    let destination = memory(&vec![0; SIZE as usize]);
    let region = reader.register(destination.clone()).unwrap();
    for op in 0..4 {
        reader.read(request(op, peer, &key, region, vec![range(0, 0, SIZE)])).unwrap();
    }
    let (start, mut first) = (Instant::now(), [0; 64]);
    while first == [0; 64] && start.elapsed() < LIMIT {
        destination.read(0, &mut first).unwrap();
        tokio::task::yield_now().await;
    }
    pass(wait).await;
    match end {
        End::Cancel | End::CancelByForce => (0..4).for_each(|op| reader.cancel(OpId(op))),
        End::Disconnect => reader.disconnect(peer).unwrap(),
        End::Drop | End::Kill => return drop(reader),
    }
    for _ in 0..4 {
        let told = event(&reader).await;
        assert!(matches!(told, Event::ReadCompleted { .. }), "{told:?}");
    }
}

/// A few rounds of each end over each lanes; the variable `KV_ROUNDS` asks for more, which is how to look for rare ends.
#[tokio::test]
async fn readers_that_end_in_the_middle_do_not_end_the_owner() {
    let rounds = std::env::var("KV_ROUNDS").map_or(3, |text| text.parse().unwrap());
    let mut all = 0;
    for lanes in [TCP, SHARED] {
        if transport(lanes).is_none() {
            return;
        }
        for end in [End::Cancel, End::CancelByForce, End::Disconnect, End::Drop, End::Kill] {
            let mut owner = Owner::start(lanes);
            for round in 0..rounds {
                ends_in_the_middle(&mut owner, end, Duration::from_micros(1700 * (round % 16))).await;
                owner.check().await;
            }
            println!("{lanes}, {end:?}: the owner ended {} times in {rounds}", owner.deaths);
            all += owner.deaths;
        }
    }
    assert_eq!(all, 0);
}
