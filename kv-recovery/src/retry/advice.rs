//! What a reason says: whether another attempt can help, and what it tells about the peer.

use kv_proto::LoadFailure;

/// What a failed load says about the peer that was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// This life of it cannot be reached or is over: the next load would most likely spend its whole time limit.
    Gone,
    /// It did something wrong, or was too slow, but may still be there.
    Fault,
    /// It answered: what failed is not its health.
    Answered,
    /// Nothing.
    Nothing,
}

/// What a reason says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice {
    /// Whether the same load from the same producer can go well, if the lease still lives.
    pub same: bool,
    /// Whether another producer that holds the same prefix can help.
    pub elsewhere: bool,
    /// What it says about the peer.
    pub evidence: Evidence,
}

/// The table. Whether the same producer can help is said by [`LoadFailure::may_pass`], for workers and engines alike.
pub const fn advice(reason: LoadFailure) -> Advice {
    let (elsewhere, evidence) = match reason {
        LoadFailure::HandshakeUnreachable | LoadFailure::ConnectFailed | LoadFailure::PeerLost => {
            (true, Evidence::Gone)
        }
        // A life that is over does not come back.
        LoadFailure::WrongPeer => (true, Evidence::Gone),
        LoadFailure::ReadTimedOut | LoadFailure::ReadFailed | LoadFailure::ConfirmTimedOut => {
            (true, Evidence::Fault)
        }
        LoadFailure::HandshakeMalformed | LoadFailure::Corrupt => (true, Evidence::Fault),
        LoadFailure::HandshakeRefused | LoadFailure::Incompatible | LoadFailure::Lapsed => {
            (true, Evidence::Answered)
        }
        // Wrong for these two pools or this transport; another offer names other blocks.
        LoadFailure::BadBlocks | LoadFailure::ReadRefused => (true, Evidence::Nothing),
        // Our own doing, or unknown (the list of reasons may grow). After a missing report the destination blocks may
        // still be written: nothing may be read into them again.
        _ => (false, Evidence::Nothing),
    };
    Advice { same: reason.may_pass(), elsewhere, evidence }
}
