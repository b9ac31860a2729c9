//! The plain program that a transport is compared with: one TCP stream, one blocking thread on each side, one request
//! with the list of blocks, the blocks back with vectored calls. It has no limits, no cancel and no messages.
//!
//! ```text
//! request: block bytes u64 | number of blocks u64 | block ids u32 each        answer: the blocks
//! ```

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use kv_connector::transport::Memory;

use super::pages;

/// Serves blocks of `memory` to whoever connects, until the process ends. Returns the port.
pub(super) fn serve(memory: Memory) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::Builder::new().name("plain-tcp".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let memory = memory.clone();
            let serving = move || {
                // It ends when the other side closes; whether that was an error does not matter here.
                serve_one(stream, &memory).ok();
            };
            if std::thread::Builder::new().name("plain-tcp".into()).spawn(serving).is_err() {
                return;
            }
        }
    })?;
    Ok(port)
}

fn serve_one(mut stream: TcpStream, memory: &Memory) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut head, mut ids) = ([0; 16], vec![]);
    loop {
        stream.read_exact(&mut head)?;
        let (first, second) = head.split_at(8);
        let number = |half: &[u8]| half.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let (block_bytes, count) = (number(first), number(second));
        // Nobody but the consumer knows the port, but a port can be found.
        if block_bytes == 0 || block_bytes > memory.len() as u64 || count > memory.len() as u64 / block_bytes
        {
            return Err(io::ErrorKind::InvalidData.into());
        }
        ids.resize(count as usize * 4, 0);
        stream.read_exact(&mut ids)?;
        let blocks: Vec<u32> =
            ids.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        pages::send_blocks(&mut stream, memory, &blocks, block_bytes as usize)?;
    }
}

/// The reading side.
#[derive(Debug)]
pub(super) struct Client(TcpStream);

impl Client {
    pub(super) fn connect(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    /// Reads blocks `remote` of the other side into blocks `local` of `memory`.
    pub(super) fn read(
        &mut self,
        memory: &Memory,
        remote: &[u32],
        local: &[u32],
        block_bytes: u64,
    ) -> io::Result<()> {
        let mut request = Vec::with_capacity(16 + 4 * remote.len());
        request.extend_from_slice(&block_bytes.to_le_bytes());
        request.extend_from_slice(&(remote.len() as u64).to_le_bytes());
        remote.iter().for_each(|id| request.extend_from_slice(&id.to_le_bytes()));
        self.0.write_all(&request)?;
        pages::receive_blocks(&mut self.0, memory, local, block_bytes as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_arrive_in_their_places_and_nonsense_ends_the_connection() {
        let (from, into) = (pages::map(64 << 10, false).unwrap(), pages::map(64 << 10, false).unwrap());
        from.write(3 * 4096, &[7; 4096]).unwrap();
        from.write(9 * 4096, &[9; 4096]).unwrap();
        let port = serve(from).unwrap();
        let mut client = Client::connect(port).unwrap();
        client.read(&into, &[3, 9], &[8, 1], 4096).unwrap();
        let at = |block: u64| {
            let mut bytes = [0; 4096];
            into.read(block * 4096, &mut bytes).unwrap();
            bytes
        };
        assert_eq!((at(8), at(1), at(0), at(9)), ([7; 4096], [9; 4096], [0; 4096], [0; 4096]));
        assert!(client.read(&into, &[99], &[0], 4096).is_err());
        let mut client = Client::connect(port).unwrap();
        assert!(client.read(&into, &[0; 99], &[0], 4096).is_err());
    }
}
