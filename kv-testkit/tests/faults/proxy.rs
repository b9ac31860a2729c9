//! The proxy in this process.

use kv_testkit::faults::proxy::{Direction, FaultProxy, Place, ProxyFault, ProxyPlan, ProxyRule};
use kv_testkit::faults::{RULES_MAX, Which};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::rig::LIMIT;

/// A server that sends back what it gets.
async fn echo() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                // The proxy under test may break either way.
                if tokio::io::copy(&mut from, &mut to).await.is_ok() {
                    let _ = to.shutdown().await;
                }
            });
        }
    });
    address
}

/// What comes back for bytes sent through a proxy.
async fn ask(proxy: &FaultProxy, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    let mut answer = Vec::new();
    let both = async {
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut answer).await;
    };
    tokio::time::timeout(LIMIT, both).await.expect("the stream ends");
    answer
}

#[tokio::test]
async fn a_plan_by_chance_is_repeated_by_its_seed_and_by_its_recording() {
    let cut = ProxyRule::new(ProxyFault::Cut).direction(Direction::Down).place(Place::After(7));
    let corrupt = ProxyRule::new(ProxyFault::Corrupt).direction(Direction::Up).place(Place::PerChunk(0.5));
    let plan = ProxyPlan::seeded(3)
        .rule(cut.which(Which::Probability(0.4)))
        .and_then(|plan| plan.rule(corrupt.limit(8)))
        .unwrap();
    let run = async |plan: &ProxyPlan| {
        let proxy = FaultProxy::start("127.0.0.1:0", &echo().await, plan).await.unwrap();
        let mut answers = Vec::new();
        for _ in 0..16 {
            answers.push(ask(&proxy, &[9; 20]).await);
        }
        (answers, proxy.stop().await)
    };
    let (answers, report) = run(&plan).await;
    let (cut, corrupted) = (report.faults["cut"], report.faults["corrupt"]);
    assert!((1..16).contains(&cut) && (1..=8).contains(&corrupted), "{report:?}");
    assert_eq!(answers.iter().filter(|answer| answer.len() == 7).count() as u64, cut);
    assert_eq!(run(&plan).await.0, answers);
    let replay = ProxyPlan::from_recording(&report.recorded);
    assert_eq!(ProxyPlan::parse(&replay.to_json().to_string()).unwrap(), replay);
    assert_eq!(run(&replay).await.0, answers);
}

#[tokio::test]
async fn a_proxy_that_stops_ends_its_connections() {
    for drop_it in [false, true] {
        let stall = ProxyRule::new(ProxyFault::Stall { for_ms: None });
        let plan = ProxyPlan::seeded(1).rule(stall).unwrap();
        let proxy = FaultProxy::start("127.0.0.1:0", &echo().await, &plan).await.unwrap();
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        stream.write_all(b"hello?").await.unwrap();
        while proxy.report().faults.get("stall") != Some(&2) {
            tokio::task::yield_now().await;
        }
        if drop_it {
            drop(proxy);
        } else {
            assert_eq!(proxy.stop().await.bytes_up, 0);
        }
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok() && answer.is_empty());
    }
}

#[test]
fn the_example_is_a_plan_and_there_is_an_end_to_rules() {
    let plan = ProxyPlan::parse(ProxyPlan::EXAMPLE).unwrap();
    assert_eq!(ProxyPlan::parse(&plan.to_json().to_string()).unwrap(), plan);
    let many = "[[rules]]\nfault = 'cut'\n".repeat(RULES_MAX + 1);
    let refused = ProxyPlan::parse(&many).unwrap_err().to_string();
    assert!(refused.contains("rules is 10001; at most 10000"), "{refused}");
}
