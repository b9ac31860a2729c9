//! Adding up the results of ranks that are processes: rank 0 gathers over a Unix socket, adds in the order of the
//! groups, and gives everybody the sum.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::model::{GroupReduce, ReduceError, SoloReduce, sum_in_order};

/// How long the ranks of an engine wait for each other to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long one rank waits for another in the middle of a step; far more than a step takes.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// One rank's part of the gathering.
#[derive(Debug)]
pub enum SocketReduce {
    /// The only rank.
    Solo(SoloReduce),
    /// Rank 0, with the others by rank.
    Root(Vec<UnixStream>),
    /// Another rank.
    Leaf(UnixStream),
}

impl SocketReduce {
    /// Joins the ranks of an engine; returns when all are there.
    pub fn join(socket: &Path, rank: u32, ranks: u32) -> io::Result<Self> {
        if ranks == 1 {
            return Ok(Self::Solo(SoloReduce));
        }
        let until = Instant::now() + START_LIMIT;
        if rank == 0 {
            let listener = UnixListener::bind(socket)?;
            listener.set_nonblocking(true)?;
            let mut leaves: Vec<Option<UnixStream>> = (1..ranks).map(|_| None).collect();
            while leaves.iter().any(Option::is_none) {
                let mut stream = accept(&listener, until)?;
                let mut from = [0; 4];
                stream.read_exact(&mut from)?;
                let from = u32::from_le_bytes(from);
                let slot = from.checked_sub(1).and_then(|i| leaves.get_mut(i as usize));
                stream.set_read_timeout(Some(STEP_LIMIT))?;
                *slot.ok_or_else(|| io::Error::other(format!("rank {from} of {ranks} joined")))? =
                    Some(stream);
            }
            return Ok(Self::Root(leaves.into_iter().flatten().collect()));
        }
        loop {
            match UnixStream::connect(socket) {
                Ok(mut stream) => {
                    stream.write_all(&rank.to_le_bytes())?;
                    stream.set_read_timeout(Some(STEP_LIMIT))?;
                    return Ok(Self::Leaf(stream));
                }
                Err(error) if Instant::now() >= until => return Err(error),
                // Rank 0 has not bound it yet; there is nothing to wait on but time.
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

fn accept(listener: &UnixListener, until: Instant) -> io::Result<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    return Err(io::Error::other("not all ranks joined in time"));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error),
        }
    }
}

fn gather_error(error: io::Error) -> ReduceError {
    ReduceError::Gather { reason: error.to_string() }
}

fn send_numbers(stream: &mut UnixStream, numbers: &[f32]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4 + numbers.len() * 4);
    bytes.extend((numbers.len() as u32).to_le_bytes());
    bytes.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
    stream.write_all(&bytes)
}

fn receive_numbers(stream: &mut UnixStream, most: usize) -> io::Result<Vec<f32>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > most {
        return Err(io::Error::other(format!("{len} numbers where at most {most} are expected")));
    }
    let mut bytes = vec![0; len * 4];
    stream.read_exact(&mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

impl GroupReduce for SocketReduce {
    fn reduce(&mut self, partials: &[f32], groups: usize, len: usize) -> Result<Vec<f32>, ReduceError> {
        if groups.checked_mul(len) != Some(partials.len()) {
            return Err(ReduceError::Size { given: partials.len(), groups, len });
        }
        match self {
            Self::Solo(solo) => solo.reduce(partials, groups, len),
            Self::Leaf(root) => {
                send_numbers(root, partials).map_err(gather_error)?;
                receive_numbers(root, len).map_err(gather_error)
            }
            Self::Root(leaves) => {
                let mut all = partials.to_vec();
                for (index, leaf) in leaves.iter_mut().enumerate() {
                    let theirs = receive_numbers(leaf, partials.len()).map_err(gather_error)?;
                    if theirs.len() != partials.len() {
                        let (rank, given, expected) = (index + 1, theirs.len(), partials.len());
                        return Err(ReduceError::OutOfStep { rank, given, expected });
                    }
                    all.extend(theirs);
                }
                let sum = if len == 0 {
                    Vec::new()
                } else {
                    sum_in_order(&all.chunks_exact(len).collect::<Vec<_>>(), len)
                };
                for leaf in leaves {
                    send_numbers(leaf, &sum).map_err(gather_error)?;
                }
                Ok(sum)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_gets_the_sum_of_all_groups_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("gather");
        let sums: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let run = |rank: u32| {
                let socket = &socket;
                scope.spawn(move || {
                    let mut reduce = SocketReduce::join(socket, rank, 3).unwrap();
                    let base = rank as f32 * 10.0;
                    reduce.reduce(&[base, 1.0, base + 1.0, 2.0], 2, 2).unwrap()
                })
            };
            let threads: Vec<_> = (0..3).map(run).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(sums, vec![vec![63.0, 9.0]; 3]);
    }
}
