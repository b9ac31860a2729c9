//! A transport of one's own at work: what another endpoint offers is read, and a message says so.
//!
//! The transport is in `transport.rs`. `tests/custom_transport.rs` runs the conformance suite on it, and
//! `tests/hand_over.rs` an engine; `docs/write-a-transport.md` says how to come from the one to the other.
#![allow(clippy::print_stdout)] // An example shows what it does.

use std::error::Error;
use std::time::Duration;

use kv_transport::{Event, Memory, OpId, ReadLimits, ReadPart, ReadRange, ReadRequest, Transport};

mod transport;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (source, reader) = (transport::Inproc::new()?, transport::Inproc::new()?);
    let memory = Memory::allocate(4096)?;
    memory.write(100, b"sixteen KV bytes")?;
    let key = source.key(source.register(memory)?)?;

    let destination = Memory::allocate(4096)?;
    let region = reader.register(destination.clone())?;
    let limit = Duration::from_secs(5);
    let peer = reader.connect(&source.address(), limit)?;
    let ranges = vec![ReadRange { remote_offset: 100, local_offset: 0, len: 16 }];
    let parts = vec![ReadPart { key, region, ranges }];
    reader.read(ReadRequest {
        op: OpId(1),
        peer,
        parts,
        limits: ReadLimits { total: limit, stall: limit },
    })?;
    reader.send(peer, b"read".to_vec())?;

    while let Some(event) = reader.next_event().await {
        println!("reader: {event:?}");
        if let Event::ReadCompleted { outcome, .. } = event {
            outcome.result?;
            break;
        }
    }
    let mut bytes = [0; 16];
    destination.read(0, &mut bytes)?;
    println!("reader: {:?}", String::from_utf8_lossy(&bytes));

    source.shutdown(limit).await;
    while let Some(event) = source.next_event().await {
        println!("source: {event:?}");
    }
    Ok(())
}
