//! How a process lets another look into its memory: descriptors and places, handed out over a Unix socket to processes of the
//! same user that know this instance's address.
//!
//! One question and one answer per connection, little endian:
//!
//! ```text
//! question (64 bytes): "kvSHM\r\n\x01" | nonce of the instance 16 | kind u64 (0 the registry, 1 a region) |
//!                      region u64 | region nonce u64 | zero 16
//! answer   (64 bytes): "kvSHM\r\n\x01" | kind u64 (0 none, 1 a file, 2 a place in this process) | slot u64 |
//!                      bytes u64 | mapped bytes u64 | place u64 | zero 16
//! ```
//!
//! A file comes along as a descriptor. The answer about the registry is a file, and the place of its probe.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::registry::Registry;
use crate::contract::RegionId;
use crate::error::LossReason;
use crate::memory::Memory;
use crate::stream::establish::unix;
use crate::stream::key::{Key, Nonce};
use crate::stream::socket::same_user;

const MAGIC: [u8; 8] = *b"kvSHM\r\n\x01";
const FRAME_BYTES: usize = 64;
/// Questions that are answered at a time.
const ASKERS_MAX: usize = 64;
/// How long one who connects may take.
const ASKER_LIMIT: Duration = Duration::from_secs(2);
/// Pause after the system had no descriptor left for a connection that waits.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    Registry,
    Region(Key),
}

/// What is answered.
#[derive(Debug)]
pub(super) enum Answer {
    /// The connection has to carry what is wanted: there is no such region, or it is not listed.
    None,
    /// A file to map.
    File { file: OwnedFd, slot: u32, len: u64, mapped: u64, place: u64 },
    /// A place in the answering process.
    Place { slot: u32, len: u64, place: u64 },
}

struct Grant {
    nonce: u64,
    /// Keeps the memory until it is off the registry.
    memory: Memory,
    slot: u32,
}

/// What this process lets others see.
pub(super) struct Grants {
    nonce: Nonce,
    registry: Registry,
    state: Mutex<State>,
    /// A process that was forked off must not take its parent's regions off.
    process: u32,
}

#[derive(Default)]
struct State {
    regions: HashMap<RegionId, Grant>,
    closed: bool,
}

impl Grants {
    pub(super) fn new(nonce: Nonce, registry: Registry) -> Self {
        Self { nonce, registry, state: Mutex::default(), process: std::process::id() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a region. One that finds no room, or lies on a device, is read over the connection.
    pub(super) fn add(&self, region: RegionId, nonce: u64, memory: Memory) {
        let mut state = self.lock();
        if state.closed || memory.on_device().is_some() {
            return;
        }
        match self.registry.list(nonce) {
            Some(slot) => drop(state.regions.insert(region, Grant { nonce, memory, slot })),
            None => tracing::warn!(%region, "too many regions to list; this one is read over the connection"),
        }
    }

    /// Takes a region off; until this returns its memory is held here.
    pub(super) fn remove(&self, region: RegionId) {
        let grant = self.lock().regions.remove(&region);
        if let Some(grant) = grant {
            self.registry.strike(grant.slot);
        }
    }

    /// Takes all off, for good: the transport ends.
    pub(super) fn clear(&self) {
        if std::process::id() != self.process {
            return;
        }
        let mut state = self.lock();
        state.closed = true;
        self.registry.strike_all();
        state.regions.clear();
    }

    fn answer(&self, question: Question) -> io::Result<Answer> {
        let (memory, slot, place);
        let file = match question {
            Question::Registry => {
                let Some(file) = self.registry.file() else { return Ok(Answer::None) };
                let len = super::registry::REGISTRY_BYTES as u64;
                let (file, place) = (file.try_clone()?, self.registry.probe_at());
                return Ok(Answer::File { file, slot: 0, len, mapped: len, place });
            }
            Question::Region(key) => {
                let state = self.lock();
                let grant = state.regions.get(&RegionId(key.region)).filter(|grant| grant.nonce == key.nonce);
                let Some(grant) = grant else { return Ok(Answer::None) };
                (memory, slot) = (grant.memory.clone(), grant.slot);
                place = memory.place().address;
                memory.shared_file().map(|(file, mapped)| file.try_clone().map(|file| (file, mapped)))
            }
        };
        let len = memory.len() as u64;
        Ok(match file.transpose()? {
            Some((file, mapped)) => Answer::File { file, slot, len, mapped: mapped as u64, place },
            None => Answer::Place { slot, len, place },
        })
    }

    /// Answers until it is dropped.
    pub(super) async fn serve(self: Arc<Self>, listener: UnixListener) {
        let room = Arc::new(Semaphore::new(ASKERS_MAX));
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let grants = Arc::clone(&self);
                    tokio::spawn(async move {
                        match timeout(ASKER_LIMIT, grants.serve_one(stream)).await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => {
                                tracing::debug!(%error, "a question about memory was not answered")
                            }
                            Err(_) => tracing::debug!("a question about memory did not come in time"),
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a question about memory");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn serve_one(&self, mut stream: UnixStream) -> io::Result<()> {
        same_user(&stream)?;
        let mut bytes = [0; FRAME_BYTES];
        stream.read_exact(&mut bytes).await?;
        let answer = match decode_question(&bytes, self.nonce) {
            Some(question) => self.answer(question)?,
            None => return Err(io::ErrorKind::InvalidData.into()),
        };
        send(&stream, &answer).await
    }
}

impl std::fmt::Debug for Grants {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grants").field("regions", &self.lock().regions.len()).finish_non_exhaustive()
    }
}

/// Asks the instance that listens at a name; also says which process that is, 0 if it cannot be seen from here.
pub(super) async fn ask(name: &[u8], nonce: Nonce, question: Question) -> Result<(Answer, i32), LossReason> {
    let failed =
        |error: io::Error| LossReason::Unreachable { kind: error.kind(), code: error.raw_os_error() };
    let mut stream = unix(name)?;
    same_user(&stream).map_err(failed)?;
    let pid = stream.peer_cred().map_err(failed)?.pid().unwrap_or(0);
    stream.write_all(&encode_question(question, nonce)).await.map_err(failed)?;
    let answer = receive(&stream).await.map_err(failed)?;
    Ok((answer, pid))
}

fn encode_question(question: Question, nonce: Nonce) -> [u8; FRAME_BYTES] {
    let words = match question {
        Question::Registry => [0, 0, 0],
        Question::Region(key) => [1, key.region, key.nonce],
    };
    let mut bytes = [0; FRAME_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..24].copy_from_slice(&nonce);
    for (index, word) in words.iter().enumerate() {
        bytes[24 + 8 * index..32 + 8 * index].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn word(bytes: &[u8; FRAME_BYTES], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

fn decode_question(bytes: &[u8; FRAME_BYTES], nonce: Nonce) -> Option<Question> {
    if bytes[..8] != MAGIC || bytes[8..24] != nonce {
        return None;
    }
    match word(bytes, 24) {
        0 => Some(Question::Registry),
        1 => Some(Question::Region(Key { region: word(bytes, 32), nonce: word(bytes, 40) })),
        _ => None,
    }
}

async fn send(stream: &UnixStream, answer: &Answer) -> io::Result<()> {
    let (words, file) = match answer {
        Answer::None => ([0; 5], None),
        Answer::File { file, slot, len, mapped, place } => {
            ([1, u64::from(*slot), *len, *mapped, *place], Some(file.as_fd()))
        }
        Answer::Place { slot, len, place } => ([2, u64::from(*slot), *len, 0, *place], None),
    };
    let mut bytes = [0; FRAME_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    for (index, word) in words.iter().enumerate() {
        bytes[8 + 8 * index..16 + 8 * index].copy_from_slice(&word.to_le_bytes());
    }
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let files = file.map(|file| [file]);
            if let Some(files) = &files
                && !control.push(SendAncillaryMessage::ScmRights(files))
            {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            Ok(rustix::net::sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?)
        })
        .await?;
    // An empty socket takes as little as this at once.
    if sent == FRAME_BYTES { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

async fn receive(stream: &UnixStream) -> io::Result<Answer> {
    let mut bytes = [0; FRAME_BYTES];
    let mut file = None;
    let read = stream
        .async_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut pieces = [IoSliceMut::new(&mut bytes)];
            let read = rustix::net::recvmsg(stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    file = files.last();
                }
            }
            Ok(read.bytes)
        })
        .await?;
    // It was sent as one, so it comes as one.
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    if read == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if read != FRAME_BYTES || bytes[..8] != MAGIC {
        return Err(bad());
    }
    let slot = u32::try_from(word(&bytes, 16)).map_err(|_| bad())?;
    let (len, mapped, place) = (word(&bytes, 24), word(&bytes, 32), word(&bytes, 40));
    match (word(&bytes, 8), file) {
        (0, None) => Ok(Answer::None),
        (1, Some(file)) if mapped >= len => Ok(Answer::File { file, slot, len, mapped, place }),
        (2, None) => Ok(Answer::Place { slot, len, place }),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_of_strangers_and_of_another_life_are_none() {
        let question = Question::Region(Key { region: 3, nonce: 4 });
        let bytes = encode_question(question, [5; 16]);
        assert_eq!(decode_question(&bytes, [5; 16]), Some(question));
        assert_eq!(decode_question(&bytes, [6; 16]), None);
        let mut kind = bytes;
        kind[24] = 9;
        assert_eq!(decode_question(&kind, [5; 16]), None);
        assert_eq!(decode_question(&[0; FRAME_BYTES], [0; 16]), None);
    }
}
