//! Each way of bytes, in one process: what arrives, what is said of it, and what is refused.

use kv_transport::shm::{ShmConfig, ShmTransport};
use kv_transport::{Memory, MemoryError, Pages, ReadError, ReadLimits, Transport};

use crate::support::{LIMIT, bind, completion, contents, event, filled, link, loss, range, request};

const BYTES: usize = 8 << 20;

/// Scattered odd ranges, some of them neighbours, more than one turn's worth.
fn scattered() -> Vec<kv_transport::ReadRange> {
    let step = 37_777;
    (0..200).map(|i| range((i * 40_001) % (BYTES as u64 - step), i * step, step - i % 2)).collect()
}

async fn reads_as(config: ShmConfig, source: Memory, lane: &str) {
    let (p, d) = (bind(), ShmTransport::bind(config).unwrap());
    let key = p.key(p.register(source.clone()).unwrap()).unwrap();
    let destination = Memory::allocate(BYTES).unwrap();
    let region = d.register(destination.clone()).unwrap();
    let peer = link(&d, &p).await;
    let mut expected = vec![0; BYTES];
    let source = contents(&source);
    for r in scattered() {
        let (from, to, len) = (r.remote_offset as usize, r.local_offset as usize, r.len as usize);
        expected[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    // The first read asks the peer, the second does not.
    for op in 0..2 {
        destination.write(0, &vec![0; BYTES]).unwrap();
        d.read(request(op, peer, &key, region, scattered())).unwrap();
        let outcome = completion(&d, op).await;
        assert_eq!(outcome.result, Ok(()));
        assert!(outcome.arrived.is_all());
        assert!(contents(&destination) == expected, "other bytes, or bytes elsewhere, over {lane}");
    }
    assert_eq!(d.lane(peer).as_deref(), Some(lane));
    // A small one is done by the caller.
    d.read(request(9, peer, &key, region, vec![range(5, 7, 100)])).unwrap();
    assert_eq!(completion(&d, 9).await.result, Ok(()));
    assert_eq!(contents(&destination)[7..107], source[5..105]);
}

#[tokio::test]
async fn t2_shared_memory_is_mapped() {
    reads_as(ShmConfig::default(), filled(BYTES, true, 3), "mapped").await;
}

#[tokio::test]
async fn t2_other_memory_is_read_out_of_the_process() {
    reads_as(ShmConfig::default(), filled(BYTES, false, 3), "process_vm_readv").await;
}

#[tokio::test]
async fn t2_shared_memory_that_may_not_be_mapped_is_read_out_of_the_process() {
    let config = ShmConfig { map: false, ..ShmConfig::default() };
    reads_as(config, filled(BYTES, true, 3), "process_vm_readv").await;
}

#[tokio::test]
async fn t2_where_neither_is_possible_the_socket_carries_it() {
    let config = ShmConfig { map: false, read_process: false, ..ShmConfig::default() };
    reads_as(config, filled(BYTES, true, 3), "socket").await;
}

#[tokio::test]
async fn t2_memory_of_huge_pages_is_mapped_and_where_none_are_set_aside_that_is_said() {
    match Memory::allocate_shared(BYTES, Pages::Huge) {
        Ok(source) => {
            let pattern: Vec<u8> = (0..BYTES).map(|i| (i / 251 + i * 7) as u8 ^ 3).collect();
            source.write(0, &pattern).unwrap();
            reads_as(ShmConfig::default(), source, "mapped").await;
        }
        Err(error) => {
            println!("no huge pages here (`vm.nr_hugepages`): {error}");
            assert!(matches!(error, MemoryError::System { bytes: BYTES, .. }), "{error:?}");
        }
    }
}

#[tokio::test]
async fn t9_a_region_that_is_gone_is_an_error_and_its_like_is_found() {
    for shared in [true, false] {
        let (p, d) = (bind(), bind());
        let source = p.register(filled(BYTES, shared, 1)).unwrap();
        let key = p.key(source).unwrap();
        let destination = Memory::allocate(BYTES).unwrap();
        let region = d.register(destination.clone()).unwrap();
        let peer = link(&d, &p).await;
        let all = || vec![range(0, 0, BYTES as u64)];
        d.read(request(1, peer, &key, region, all())).unwrap();
        assert_eq!(completion(&d, 1).await.result, Ok(()));
        p.deregister(source).unwrap();
        for op in 2..4 {
            d.read(request(op, peer, &key, region, all())).unwrap();
            let outcome = completion(&d, op).await;
            assert_eq!(outcome.result, Err(ReadError::UnknownKey));
            assert_eq!(outcome.arrived.count(), 0);
        }
        let again = filled(BYTES, shared, 2);
        let key = p.key(p.register(again.clone()).unwrap()).unwrap();
        d.read(request(5, peer, &key, region, all())).unwrap();
        assert_eq!(completion(&d, 5).await.result, Ok(()));
        assert!(contents(&destination) == contents(&again));
    }
}

#[tokio::test]
async fn t1_a_refused_deregistration_changes_nothing_for_those_who_read() {
    let (p, d) = (bind(), bind());
    let memory = filled(BYTES, true, 1);
    let (into, back) = (Memory::allocate(BYTES).unwrap(), filled(BYTES, false, 2));
    let destination = d.register(into).unwrap();
    let other_key = d.key(d.register(back).unwrap()).unwrap();
    let to_p = link(&d, &p).await;
    let to_d = link(&p, &d).await;
    let mut refused = 0;
    for op in 0..50 {
        let region = p.register(memory.clone()).unwrap();
        let key = p.key(region).unwrap();
        // P fills the very region that D reads, so that it cannot be let go.
        p.read(request(op, to_d, &other_key, region, scattered())).unwrap();
        d.read(request(op, to_p, &key, destination, vec![range(0, 0, 1 << 20)])).unwrap();
        let held = p.deregister(region).is_err();
        let outcome = completion(&d, op).await;
        if held {
            refused += 1;
            assert_eq!(outcome.result, Ok(()));
        }
        assert_eq!(completion(&p, op).await.result, Ok(()));
    }
    assert!(refused > 0, "every read had ended before");
}

#[tokio::test]
async fn t9_a_region_that_goes_during_a_read_never_yields_a_success() {
    // Deregistered at moments that differ: the read either ended before, or says that the region is unknown.
    let (p, d) = (bind(), bind());
    let destination = Memory::allocate(BYTES).unwrap();
    let region = d.register(destination).unwrap();
    let peer = link(&d, &p).await;
    let memory = filled(BYTES, true, 1);
    let (mut good, mut gone) = (0, 0);
    for op in 0..200u64 {
        let source = p.register(memory.clone()).unwrap();
        let key = p.key(source).unwrap();
        d.read(request(2 * op, peer, &key, region, vec![range(0, 0, 64)])).unwrap();
        assert_eq!(completion(&d, 2 * op).await.result, Ok(()));
        d.read(request(2 * op + 1, peer, &key, region, scattered())).unwrap();
        for _ in 0..op * 40 {
            std::hint::spin_loop();
        }
        p.deregister(source).unwrap();
        match completion(&d, 2 * op + 1).await.result {
            Ok(()) => good += 1,
            Err(ReadError::UnknownKey) => gone += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(gone > 0, "no deregistration fell into a read; {good} ended before");
}

#[tokio::test]
async fn t3_a_cancelled_read_writes_nothing_later() {
    let (p, d) = (bind(), bind());
    let key = p.key(p.register(filled(BYTES, true, 1)).unwrap()).unwrap();
    let destination = Memory::allocate(BYTES).unwrap();
    let region = d.register(destination.clone()).unwrap();
    let peer = link(&d, &p).await;
    let mut cancelled = 0;
    for op in 0..300 {
        d.read(request(op, peer, &key, region, scattered())).unwrap();
        for _ in 0..(op % 60) * 100 {
            std::hint::spin_loop();
        }
        d.cancel(kv_transport::OpId(op));
        let outcome = completion(&d, op).await;
        if outcome.result == Err(ReadError::Cancelled) {
            cancelled += 1;
        }
        destination.write(0, &vec![0xee; BYTES]).unwrap();
        // Another read, so that the copying thread has gone on.
        d.read(request(1000 + op, peer, &key, region, vec![range(0, BYTES as u64 - 70_000, 70_000)]))
            .unwrap();
        assert_eq!(completion(&d, 1000 + op).await.result, Ok(()));
        let bytes = contents(&destination);
        assert!(
            bytes[..BYTES - 70_000].iter().all(|b| *b == 0xee),
            "written after the completion of op-{op}"
        );
    }
    assert!(cancelled > 0, "no cancel came in time");
}

#[tokio::test]
async fn t8_a_limit_holds_for_what_waits_behind_others() {
    let (p, d) = (bind(), bind());
    let key = p.key(p.register(filled(BYTES, true, 1)).unwrap()).unwrap();
    let peer = link(&d, &p).await;
    let region = |_| d.register(Memory::allocate(BYTES).unwrap()).unwrap();
    let regions: Vec<_> = (0..20).map(region).collect();
    let warm = d.register(Memory::allocate(64).unwrap()).unwrap();
    d.read(request(99, peer, &key, warm, vec![range(0, 0, 64)])).unwrap();
    completion(&d, 99).await;
    let tiny = std::time::Duration::from_nanos(1);
    for (op, region) in regions.iter().enumerate() {
        let mut request = request(op as u64, peer, &key, *region, vec![range(0, 0, BYTES as u64)]);
        if op == 19 {
            request.limits = ReadLimits { total: tiny, stall: LIMIT };
        }
        d.read(request).unwrap();
    }
    let mut ends = std::collections::HashMap::new();
    for _ in 0..20 {
        if let kv_transport::Event::ReadCompleted { op, outcome } = event(&d).await {
            ends.insert(op.0, outcome.result);
        }
    }
    assert_eq!(ends.remove(&19), Some(Err(ReadError::TimedOut)));
    assert!(ends.values().all(Result::is_ok) && ends.len() == 19);
}

#[tokio::test]
async fn t6_disconnecting_ends_reads_first_and_writes_nothing_later() {
    let (p, d) = (bind(), bind());
    let key = p.key(p.register(filled(BYTES, true, 1)).unwrap()).unwrap();
    let destination = Memory::allocate(BYTES).unwrap();
    let region = d.register(destination.clone()).unwrap();
    for op in 0..30 {
        let peer = link(&d, &p).await;
        d.read(request(op, peer, &key, region, scattered())).unwrap();
        d.disconnect(peer).unwrap();
        completion(&d, op).await;
        loss(&d, peer).await;
        destination.write(0, &vec![0xee; BYTES]).unwrap();
        assert!(matches!(event(&p).await, kv_transport::Event::PeerLost { .. }));
        assert!(contents(&destination).iter().all(|b| *b == 0xee), "written after the loss");
    }
}

#[tokio::test]
async fn t10_a_range_beyond_the_region_is_refused_on_every_lane() {
    let lanes = [
        ShmConfig::default(),
        ShmConfig { map: false, ..ShmConfig::default() },
        ShmConfig { map: false, read_process: false, ..ShmConfig::default() },
    ];
    for config in lanes {
        let (p, d) = (bind(), ShmTransport::bind(config).unwrap());
        // The file behind it has whole pages, the region has not.
        let key = p.key(p.register(filled(5000, true, 1)).unwrap()).unwrap();
        let region = d.register(Memory::allocate(8192).unwrap()).unwrap();
        let peer = link(&d, &p).await;
        for (op, bad) in
            [range(4000, 0, 1001), range(u64::MAX, 0, 1), range(u64::MAX - 9, 0, 100)].iter().enumerate()
        {
            d.read(request(op as u64, peer, &key, region, vec![range(0, 4096, 10), *bad])).unwrap();
            assert_eq!(completion(&d, op as u64).await.result, Err(ReadError::RemoteRange));
        }
    }
}

#[tokio::test]
async fn t11_dropping_leaves_no_thread_descriptor_or_mapping() {
    let count = |of: &str| std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("kv-memory").count();
    let (files, mappings) = (count("fd"), maps());
    for op in 0..10 {
        let (p, d) = (bind(), bind());
        let key = p.key(p.register(filled(BYTES, true, 1)).unwrap()).unwrap();
        let region = d.register(Memory::allocate(BYTES).unwrap()).unwrap();
        let peer = link(&d, &p).await;
        d.read(request(op, peer, &key, region, scattered())).unwrap();
        drop((d, p));
    }
    // Other tests of this process come and go meanwhile.
    let end = std::time::Instant::now() + LIMIT;
    while (count("fd") > files + 40 || maps() > mappings + 12) && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(
        count("fd") <= files + 40 && maps() <= mappings + 12,
        "{} files, {} mappings",
        count("fd"),
        maps()
    );
}
