//! The system calls that move KV bytes straight between a socket and registered memory.
#![allow(unsafe_code)] // Slices over raw KV memory are made here and nowhere else; each block states its reason.

use std::io::{self, IoSlice, IoSliceMut, Read};

use socket2::SockRef;
use tokio::io::Interest;

use super::socket::Socket;

use super::spans::Spans;
use crate::memory::Memory;

/// Most pieces in one call. The system takes 1024; beyond some dozens there is nothing left to gain.
const PIECES_MAX: usize = 256;

/// Linux's `MSG_NOSIGNAL`: a connection that is gone is an error of the call, whatever the process does with signals.
const NO_SIGNAL: i32 = if cfg!(target_os = "linux") { 0x4000 } else { 0 };
/// Linux's `MSG_MORE`: what does not fill a segment waits for what is sent next.
const MORE: i32 = if cfg!(target_os = "linux") { 0x8000 } else { 0 };

/// Receives. A call that got less than it could hold has emptied the socket, so that no other call is made until the
/// system says that more has come.
pub(crate) fn read(stream: &Socket, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    let room: usize = pieces.iter().map(|piece| piece.len()).sum();
    let mut got = 0;
    let outcome = stream.try_io(Interest::READABLE, || {
        got = (&*SockRef::from(stream)).read_vectored(pieces)?;
        if got > 0 && got < room { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    });
    if got > 0 { Ok(got) } else { outcome.map(|()| 0) }
}

/// Receives into the spans and, when they are full, into `tail`. Returns the bytes received in all.
pub(crate) fn receive(
    stream: &Socket,
    into: Option<(&Memory, &Spans)>,
    tail: &mut [u8],
) -> io::Result<usize> {
    let mut pieces = Vec::with_capacity(into.map_or(0, |(_, spans)| spans.pieces()).min(PIECES_MAX) + 1);
    let mut whole = true;
    if let Some((memory, spans)) = into {
        whole = spans.pieces() <= PIECES_MAX;
        for (offset, len) in spans.rest().take(PIECES_MAX) {
            let base = checked(memory, offset, len)?;
            // SAFETY: `checked` found the bytes inside the memory, which the caller's borrow keeps alive. They are
            // the destination of a read: its region's owner has given them to this transport until the
            // completion, and the spans of one read were checked not to overlap, so that nobody else, and no
            // other slice of this list, refers to them. The slice ends with this function.
            let piece = unsafe { std::slice::from_raw_parts_mut(base, len as usize) };
            pieces.push(IoSliceMut::new(piece));
        }
    }
    if whole {
        pieces.push(IoSliceMut::new(tail));
    }
    read(stream, &mut pieces)
}

/// Sends `heads`, then the spans. Returns the bytes sent in all. Data is always followed by its end, which so gets
/// into the same segment: a small read costs the reader one wake-up instead of two.
pub(crate) fn send<'a>(
    stream: &Socket,
    heads: impl Iterator<Item = &'a [u8]>,
    from: Option<(&Memory, &Spans)>,
) -> io::Result<usize> {
    let mut pieces: Vec<IoSlice<'_>> = heads.take(PIECES_MAX).map(IoSlice::new).collect();
    if let Some((memory, spans)) = from {
        let room = PIECES_MAX.saturating_sub(pieces.len());
        for (offset, len) in spans.rest().take(room) {
            let base = checked(memory, offset, len)?;
            // SAFETY: `checked` found the bytes inside the memory, which the caller's borrow keeps alive, and
            // `Memory` is initialised. They are the source of a read: who owns the blocks keeps others from
            // writing them while their lease lasts. The slice ends with this function; only the system reads it.
            let piece = unsafe { std::slice::from_raw_parts(base, len as usize) };
            pieces.push(IoSlice::new(piece));
        }
    }
    let flags = if from.is_some() { NO_SIGNAL | MORE } else { NO_SIGNAL };
    stream.try_io(Interest::WRITABLE, || SockRef::from(stream).send_vectored_with_flags(&pieces, flags))
}

/// First byte of a span, if the span lies inside the memory.
fn checked(memory: &Memory, offset: u64, len: u32) -> io::Result<*mut u8> {
    if !memory.contains(offset, u64::from(len)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let base = memory.base().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Ok(base.wrapping_add(offset as usize))
}
