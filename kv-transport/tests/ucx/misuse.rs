//! What must be refused, and by what name.

use std::time::Duration;

use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{
    Address, LossReason, OpId, PeerId, ReadError, ReadLimits, ReadPart, ReadRequest, RegionId, RegionKey,
    Transport, TransportError,
};

use crate::support::*;

#[test]
fn a_library_that_is_not_there_is_named() {
    // In a process of its own, for here another one may be loaded already.
    assert_eq!(crate::processes::Other::start("no library").words(), ["refused"]);
}

#[test]
fn settings_that_ucx_refuses_are_refused() {
    let settings = vec![("KEEPALIVE_INTERVAL".into(), "soon".into())];
    match UcxTransport::open(UcxConfig { settings, ..UcxConfig::default() }) {
        Err(TransportError::BadConfig { what, .. }) => assert!(what.contains("settings")),
        Err(TransportError::Library { .. }) => {}
        other => panic!("{other:?}"),
    }
}

async fn t1_a_refused_read_changes_nothing(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let (_, key) = offer(&source, &pattern(64, 1));
    let destination = memory(&[7; 64]);
    let region = reader.register(destination.clone()).unwrap();
    let good = || request(1, peer, &key, region, vec![range(0, 0, 8)]);
    let other_op = |change: fn(&mut ReadRequest)| {
        let mut read = good();
        change(&mut read);
        reader.read(read).unwrap_err()
    };
    let op = OpId(1);
    assert_eq!(other_op(|r| r.peer = PeerId(999)), TransportError::UnknownPeer { peer: PeerId(999) });
    assert_eq!(other_op(|r| r.parts[0].ranges.clear()), TransportError::NoRanges { op });
    assert_eq!(
        other_op(|r| r.parts[0].region = RegionId(77)),
        TransportError::UnknownRegion { region: RegionId(77) }
    );
    assert!(matches!(
        other_op(|r| r.limits.total = Duration::ZERO),
        TransportError::ZeroLimit { limit: "total", .. }
    ));
    assert!(matches!(
        other_op(|r| r.limits.stall = Duration::ZERO),
        TransportError::ZeroLimit { limit: "stall", .. }
    ));
    for bad in [range(0, 0, 0), range(0, 64, 1), range(0, u64::MAX, 2), range(0, 1, u64::MAX)] {
        let refused = reader.read(request(1, peer, &key, region, vec![range(0, 8, 1), bad])).unwrap_err();
        assert!(matches!(refused, TransportError::LocalRange { index: 1, .. }), "{refused}");
    }
    let refused = reader.read(request(1, peer, &key, region, vec![range(0, 10, 5), range(9, 0, 11)]));
    assert_eq!(refused, Err(TransportError::Overlap { op, region, offset: 10 }));
    assert_eq!(contents(&destination), [7; 64]);
    // No region is in use after all that, and the id is free.
    reader.read(good()).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
    reader.deregister(region).unwrap();
}

async fn t4_ids_and_regions_in_use_are_guarded(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let size = 16 << 20;
    let (_, key) = offer(&source, &pattern(size, 1));
    let region = reader.register(memory(&vec![0; size])).unwrap();
    let read = || request(1, peer, &key, region, vec![range(0, 0, size as u64)]);
    reader.read(read()).unwrap();
    // Completed or not, its end has not been taken; but an end may have happened, so only these two are right.
    let again = reader.read(read());
    assert!(matches!(again, Err(TransportError::DuplicateOp { .. }) | Ok(())), "{again:?}");
    let gone = reader.deregister(region);
    assert!(matches!(gone, Err(TransportError::RegionInUse { .. }) | Ok(())), "{gone:?}");
    assert!(again.is_err() || gone.is_err(), "a read of 16 MiB was over at once, twice");
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
}

async fn t10_bytes_of_others_are_distrusted(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let (peer, _) = link(&reader, &source).await;
    let (address, (_, key)) = (source.address(), offer(&source, &pattern(64, 1)));
    let region = reader.register(memory(&[0; 64])).unwrap();
    let bad = |good: &[u8]| {
        let mut all: Vec<Vec<u8>> = (1..good.len()).map(|cut| good[..cut].to_vec()).collect();
        for at in 0..good.len() {
            let mut bytes = good.to_vec();
            bytes[at] ^= 0x55;
            all.push(bytes);
        }
        all.extend([[good, &[0]].concat(), pattern(good.len(), 3), vec![0; 1024], vec![255; 1024]]);
        all
    };
    for bytes in bad(address.as_bytes()) {
        let refused = reader.connect(&Address::from_bytes(bytes).unwrap(), LIMIT);
        assert!(matches!(refused, Err(TransportError::BadAddress { .. })), "{refused:?}");
    }
    for bytes in bad(key.as_bytes()) {
        let key = RegionKey::from_bytes(bytes).unwrap();
        let refused = reader.read(request(1, peer, &key, region, vec![range(0, 0, 1)]));
        assert!(matches!(refused, Err(TransportError::BadKey { .. })), "{refused:?}");
    }
    reader.read(request(1, peer, &key, region, vec![range(0, 0, 1)])).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
}

async fn t9_keys_of_others_and_of_former_lives_fail(lanes: &str) {
    let (Some(source), Some(reader), Some(third)) = (transport(lanes), transport(lanes), transport(lanes))
    else {
        return;
    };
    let (peer, _) = link(&reader, &source).await;
    let destination = memory(&[7; 64]);
    let region = reader.register(destination.clone()).unwrap();
    // A key of another instance, and one of an instance that is gone.
    let (_, of_third) = offer(&third, &pattern(64, 1));
    let address = third.address();
    drop(third);
    let read = request(1, peer, &of_third, region, vec![range(0, 0, 64)]);
    reader.read(read).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Err(ReadError::UnknownKey));
    assert_eq!(contents(&destination), [7; 64]);
    // Nobody is at that address any more, which is known at once.
    let start = std::time::Instant::now();
    let gone = reader.connect(&address, LIMIT).unwrap();
    let reason = loss(&reader, gone).await;
    assert!(matches!(reason, LossReason::Unreachable { .. }), "{reason:?}");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

async fn t9_an_address_of_a_former_life_keeps_nobody_from_the_next(lanes: &str) {
    let (Some(reader), Some(former)) = (transport(lanes), transport(lanes)) else { return };
    let address = former.address();
    drop(former);
    // It takes the descriptors of the former one.
    let Some(reborn) = transport(lanes) else { return };
    let gone = reader.connect(&address, LIMIT).unwrap();
    let reason = loss(&reader, gone).await;
    assert!(matches!(reason, LossReason::Unreachable { .. }), "{reason:?}");
    let (peer, _) = link(&reader, &reborn).await;
    let (_, key) = offer(&reborn, &pattern(64, 1));
    let region = reader.register(memory(&[0; 64])).unwrap();
    reader.read(request(1, peer, &key, region, vec![range(0, 0, 64)])).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
}

async fn t9_an_address_of_a_former_life_is_a_strangers(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    // As if UCX had given a new life the very address of an old one: its bytes are right, the life is not.
    let mut bytes = source.address().as_bytes().to_vec();
    bytes[4] ^= 1;
    // As seen from another host, which cannot know that the old life is over.
    bytes[20..44].fill(0);
    let end = bytes.len() - 8;
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let sum = bytes[..end].iter().fold(0xcbf2_9ce4_8422_2325, step);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    for _ in 0..3 {
        let peer = reader.connect(&Address::from_bytes(bytes.clone()).unwrap(), LIMIT).unwrap();
        let reason = loss(&reader, peer).await;
        assert!(matches!(reason, LossReason::Stranger(_)), "{reason:?}");
    }
    // And who asks for the right one is let in as ever.
    let (peer, _) = link(&reader, &source).await;
    let (_, key) = offer(&source, &pattern(64, 1));
    let region = reader.register(memory(&[0; 64])).unwrap();
    reader.read(request(1, peer, &key, region, vec![range(0, 0, 64)])).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
}

async fn t8_peers_are_bounded_until_their_loss_is_taken(lanes: &str) {
    let one = || open(UcxConfig { peers_max: 1, ..config(lanes) });
    let (Some(full), Some(first), Some(second)) = (one(), one(), transport(lanes)) else { return };
    link(&first, &full).await;
    assert_eq!(first.connect(&second.address(), LIMIT), Err(TransportError::TooManyPeers { limit: 1 }));
    let refused = second.connect(&full.address(), LIMIT).unwrap();
    assert_eq!(loss(&second, refused).await, LossReason::ClosedByPeer);
}

async fn t8_zero_time_to_connect_is_over_at_once(lanes: &str) {
    let (Some(a), Some(b)) = (transport(lanes), transport(lanes)) else { return };
    let peer = a.connect(&b.address(), Duration::ZERO).unwrap();
    assert_eq!(loss(&a, peer).await, LossReason::ConnectTimedOut);
    // What was begun and given up disturbs no later connection.
    let there = a.connect(&b.address(), LIMIT).unwrap();
    assert_eq!(event(&a).await, kv_transport::Event::Connected { peer: there });
    let (_, key) = offer(&b, &pattern(64, 1));
    let region = a.register(memory(&[0; 64])).unwrap();
    a.read(request(1, there, &key, region, vec![range(0, 0, 64)])).unwrap();
    assert_eq!(completion(&a, 1).await.result, Ok(()));
}

async fn t8_limits_beyond_the_calendar_are_taken(lanes: &str) {
    let (Some(source), Some(reader)) = (transport(lanes), transport(lanes)) else { return };
    let peer = reader.connect(&source.address(), Duration::MAX).unwrap();
    assert_eq!(event(&reader).await, kv_transport::Event::Connected { peer });
    let (_, key) = offer(&source, &pattern(64, 1));
    let region = reader.register(memory(&[0; 64])).unwrap();
    let parts = vec![ReadPart { key, region, ranges: vec![range(0, 0, 64)] }];
    let limits = ReadLimits { total: Duration::MAX, stall: Duration::MAX };
    reader.read(ReadRequest { op: OpId(1), peer, parts, limits }).unwrap();
    assert_eq!(completion(&reader, 1).await.result, Ok(()));
}

on_both_lanes!(
    t1_a_refused_read_changes_nothing,
    t4_ids_and_regions_in_use_are_guarded,
    t10_bytes_of_others_are_distrusted,
    t9_keys_of_others_and_of_former_lives_fail,
    t9_an_address_of_a_former_life_keeps_nobody_from_the_next,
    t9_an_address_of_a_former_life_is_a_strangers,
    t8_peers_are_bounded_until_their_loss_is_taken,
    t8_zero_time_to_connect_is_over_at_once,
    t8_limits_beyond_the_calendar_are_taken,
);
