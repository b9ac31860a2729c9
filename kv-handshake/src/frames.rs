//! Receiving a message of many frames without keeping them all.

/// The first frames of a message, and how many it had.
pub(crate) struct Frames {
    pub(crate) kept: Vec<zmq::Message>,
    pub(crate) count: usize,
}

/// Takes a message if one is there. Frames after the first `keep` are read and thrown away one by one, so that
/// a peer that sends a million of them does not make this process hold them twice.
pub(crate) fn receive(socket: &zmq::Socket, keep: usize) -> zmq::Result<Option<Frames>> {
    let mut frames = Frames { kept: Vec::new(), count: 0 };
    loop {
        let message = match socket.recv_msg(zmq::DONTWAIT) {
            Ok(message) => message,
            Err(zmq::Error::EINTR) => continue,
            // Only possible before the first frame: libzmq hands out a message when all of it is there.
            Err(zmq::Error::EAGAIN) => return Ok(None),
            Err(e) => return Err(e),
        };
        let more = message.get_more();
        frames.count += 1;
        if frames.kept.len() < keep {
            frames.kept.push(message);
        }
        if !more {
            return Ok(Some(frames));
        }
    }
}

/// The one frame of a message that has just one, behind the empty delimiter of a REQ or REP socket if there is
/// such. `skip` frames at the front are not looked at.
pub(crate) fn payload(frames: &Frames, skip: usize) -> Result<&[u8], usize> {
    let parts = frames.count.saturating_sub(skip + usize::from(delimited(frames, skip)));
    match frames.kept.get(frames.count.wrapping_sub(1)) {
        Some(last) if parts == 1 => Ok(last),
        _ => Err(parts),
    }
}

/// Whether an empty delimiter stands in front of the payload. A message of one empty frame is an empty payload.
pub(crate) fn delimited(frames: &Frames, skip: usize) -> bool {
    frames.count >= skip + 2 && frames.kept.get(skip).is_some_and(|f| f.is_empty())
}
