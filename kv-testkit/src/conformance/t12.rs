//! T-12: what a capability claims works; what is not claimed is refused by name.

use kv_transport::{MESSAGE_MAX_BYTES, Memory, TransportError};

use super::bench::{Bench, Pair, contents, pattern, range};
use super::case::{End, Outcome, broken, cases, check};

cases!(T12:
    t12_claims_are_stated_and_do_not_change,
    t12_the_longest_message_that_is_claimed_arrives,
    t12_messages_beyond_the_claim_are_refused_by_name,
    t12_host_memory_works_as_claimed,
    t12_device_memory_works_as_claimed,
    t12_one_sided_reads_need_no_step_of_the_peer,
    t12_other_hosts_are_reached_as_claimed,
);

fn t12_claims_are_stated_and_do_not_change(bench: &Bench) -> Outcome {
    let (one, two) = (bench.node()?, bench.node()?);
    let name = one.transport.name();
    let word = !name.is_empty() && name.len() <= 32 && name.bytes().all(|b| b.is_ascii_graphic());
    check!(T12, word, "{name:?} is no word that a configuration could name");
    check!(T12, two.transport.name() == name, "two endpoints have two names");
    let claims = one.transport.capabilities();
    check!(
        T12,
        claims.message_max_bytes >= MESSAGE_MAX_BYTES,
        "messages of {} bytes",
        claims.message_max_bytes
    );
    check!(T12, claims.host_memory || claims.device_memory, "no kind of memory is claimed");
    let (there, _) = one.link(&two)?;
    check!(T12, one.transport.capabilities() == claims, "claims change when a peer is connected");
    one.transport.disconnect(there).map_err(|error| broken!(T6, "a peer cannot be let go of: {error}"))
}

fn t12_the_longest_message_that_is_claimed_arrives(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    let limit = client.transport.capabilities().message_max_bytes;
    if limit > 1 << 30 {
        return Err(End::Cannot(format!("a message of {limit} bytes is more than this case tries")));
    }
    let message = pattern(limit, 1);
    let sent = client.transport.send(peer, message.clone());
    check!(T12, sent.is_ok(), "a message of {limit} bytes, as claimed, is refused: {sent:?}");
    let arrived = server.message();
    check!(
        T12,
        arrived.is_some_and(|(_, bytes)| bytes == message),
        "a message of {limit} bytes did not arrive"
    );
    Ok(())
}

fn t12_messages_beyond_the_claim_are_refused_by_name(bench: &Bench) -> Outcome {
    let Pair { client, peer, .. } = bench.pair()?;
    let limit = client.transport.capabilities().message_max_bytes;
    match client.transport.send(peer, vec![0; limit + 1]) {
        Err(TransportError::MessageTooLong { limit: named, .. }) => {
            check!(T12, named == limit, "{limit} bytes are claimed, and {named} named");
            Ok(())
        }
        other => Err(broken!(T12, "a message beyond the claimed {limit} bytes: {other:?}")),
    }
}

fn t12_host_memory_works_as_claimed(bench: &Bench) -> Outcome {
    let Pair { server, client, peer, .. } = bench.pair()?;
    // Not the harness's memory, which may lie on a device.
    let memory = || Memory::allocate(4096).map_err(|error| broken!(T12, "no host memory: {error}"));
    let (from, into) = (memory()?, memory()?);
    if !client.transport.capabilities().host_memory {
        return match client.transport.register(into) {
            Err(TransportError::Unsupported { .. }) => Ok(()),
            other => Err(broken!(T12, "host memory is not claimed, and register says {other:?}")),
        };
    }
    let bytes = pattern(from.len(), 1);
    from.write(0, &bytes).map_err(|error| broken!(T12, "host memory: {error}"))?;
    let key = server.transport.key(server.register(from)?);
    let key = key.map_err(|error| broken!(T12, "no key of host memory: {error}"))?;
    let outcome = client.fetch(peer, &key, client.register(into.clone())?, vec![range(0, 0, 4096)])?;
    check!(T12, outcome.result == Ok(()), "host memory is claimed, and a read fails: {:?}", outcome.result);
    check!(T2, contents(&into) == bytes, "from host to host: other bytes");
    Ok(())
}

fn t12_device_memory_works_as_claimed(bench: &Bench) -> Outcome {
    let memory = bench.harness.device_memory(5 << 20)?;
    check!(T12, memory.base().is_err(), "the memory that the harness gave lies on no device");
    let Pair { server, client, peer, .. } = bench.pair()?;
    if !client.transport.capabilities().device_memory {
        return match client.transport.register(memory) {
            Err(TransportError::Unsupported { .. }) => Ok(()),
            other => Err(broken!(T12, "device memory is not claimed, and register says {other:?}")),
        };
    }
    let host = client.transport.capabilities().host_memory;
    let failed = |error| broken!(T12, "device memory: {error}");
    let bytes = pattern(memory.len(), 1);
    memory.write(0, &bytes).map_err(failed)?;
    let region = server.transport.register(memory.clone()).map_err(|error| {
        let hint = "what it is tried with is Harness::device_memory, by default not of a real device";
        broken!(T12, "device memory is claimed and not registered: {error}; {hint}")
    })?;
    let key = server.transport.key(region);
    let key = key.map_err(|error| broken!(T12, "no key of device memory: {error}"))?;
    // Out of a device into another place of it, in pieces out of order; then into the host; then from the host to it.
    let there = bench.harness.device_memory(bytes.len())?;
    let half = bytes.len() as u64 / 2;
    let ranges = vec![range(half, 3, half - 3), range(0, half, half), range(half, 0, 3)];
    let outcome = client.fetch(peer, &key, client.register(there.clone())?, ranges)?;
    check!(T12, outcome.result == Ok(()), "from device to device: {:?}", outcome.result);
    let mut expected = bytes.clone();
    expected.copy_within(half as usize.., 0);
    expected[3..half as usize].copy_from_slice(&bytes[half as usize..2 * half as usize - 3]);
    expected[half as usize..].copy_from_slice(&bytes[..half as usize]);
    check!(T2, contents(&there) == expected, "from device to device: other bytes");
    if !host {
        return Ok(());
    }
    let failed = |error| broken!(T12, "no host memory: {error}");
    let near = Memory::allocate(bytes.len()).map_err(failed)?;
    let whole = vec![range(0, 0, bytes.len() as u64)];
    let outcome = client.fetch(peer, &key, client.register(near.clone())?, whole.clone())?;
    check!(T12, outcome.result == Ok(()), "from device to host: {:?}", outcome.result);
    check!(T2, contents(&near) == bytes, "from device to host: other bytes");
    let key = server.transport.key(server.register(near)?);
    let key = key.map_err(|error| broken!(T12, "no key of host memory: {error}"))?;
    let there = bench.harness.device_memory(bytes.len())?;
    let outcome = client.fetch(peer, &key, client.register(there.clone())?, whole)?;
    check!(T12, outcome.result == Ok(()), "from host to device: {:?}", outcome.result);
    check!(T2, contents(&there) == bytes, "from host to device: other bytes");
    Ok(())
}

fn t12_one_sided_reads_need_no_step_of_the_peer(bench: &Bench) -> Outcome {
    let mut away = bench.away()?;
    if !away.node.transport.capabilities().one_sided {
        return Err(End::Cannot("one-sided reads are not claimed".into()));
    }
    let place = bench.place(&away.node, 4096)?;
    // What a first read sets up may need the peer.
    for stopped in [false, true] {
        if stopped {
            away.remote.stop()?;
        }
        let outcome = away.node.fetch(away.peer, &away.key, place.region, vec![range(0, 0, 4096)])?;
        check!(T12, outcome.result == Ok(()), "one-sided, peer stopped is {stopped}: {:?}", outcome.result);
    }
    away.remote.resume()?;
    Ok(())
}

fn t12_other_hosts_are_reached_as_claimed(bench: &Bench) -> Outcome {
    let claimed = bench.node()?.transport.capabilities().across_hosts;
    Err(End::Cannot(format!("across_hosts is {claimed}, and there is one host here")))
}
