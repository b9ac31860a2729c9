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

/// The table. A reason that this version does not know is never tried again: to compute is always right.
pub const fn advice(reason: LoadFailure) -> Advice {
    let (same, elsewhere, evidence) = match reason {
        // Roads that may be free again.
        LoadFailure::HandshakeUnreachable => (true, true, Evidence::Gone),
        LoadFailure::ConnectFailed => (true, true, Evidence::Gone),
        LoadFailure::PeerLost => (true, true, Evidence::Gone),
        LoadFailure::ReadTimedOut => (true, true, Evidence::Fault),
        LoadFailure::ReadFailed => (true, true, Evidence::Fault),
        LoadFailure::ConfirmTimedOut => (true, true, Evidence::Fault),
        // The producer has compared: its own blocks are good, what came over the road is not.
        LoadFailure::Corrupt => (true, true, Evidence::Fault),
        // The same question gets the same answer.
        LoadFailure::HandshakeRefused => (false, true, Evidence::Answered),
        LoadFailure::Incompatible => (false, true, Evidence::Answered),
        LoadFailure::Lapsed => (false, true, Evidence::Answered),
        LoadFailure::HandshakeMalformed => (false, true, Evidence::Fault),
        // A life that is over does not come back.
        LoadFailure::WrongPeer => (false, true, Evidence::Gone),
        // Wrong for these two pools or this transport; another offer names other blocks.
        LoadFailure::BadBlocks => (false, true, Evidence::Nothing),
        LoadFailure::ReadRefused => (false, true, Evidence::Nothing),
        // Our own doing. After a missing report the destination blocks may still be written: nothing may be read
        // into them again.
        LoadFailure::Cancelled => (false, false, Evidence::Nothing),
        LoadFailure::Closed => (false, false, Evidence::Nothing),
        LoadFailure::ReportMissing => (false, false, Evidence::Nothing),
        LoadFailure::Other => (false, false, Evidence::Nothing),
        // The list of reasons may grow.
        _ => (false, false, Evidence::Nothing),
    };
    Advice { same, elsewhere, evidence }
}
