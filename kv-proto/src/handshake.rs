//! The handshake: a consumer's worker asks the producer's scheduler process who it is, whether the two fit, and
//! where its workers are.
//!
//! Decoded in two phases. The outer map carries the service's name, the version and the fingerprint and never
//! changes its form; the body, whose form depends on the version, is looked at only when those match. So a
//! mismatch is a readable difference of fields and not a decoding error.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::PROTOCOL_VERSION;
use crate::codec::{self, CodecError, HANDSHAKE_MAX_BYTES};
use crate::fingerprint::{FieldDifference, Fingerprint};
use crate::ids::{EngineId, Incarnation, Rank};
use crate::layout::{BlockLayout, LayoutError};
use crate::topology::{Topology, TopologyError};

/// First field of each frame: says which service this is, so that a wrong port is noticed at once.
pub const SERVICE: &str = "kv-connector";

/// Most ranks one engine may have.
pub const RANKS_MAX: u32 = 4096;

/// The form that no version changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Outer {
    service: String,
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fingerprint: Option<Fingerprint>,
    #[serde(with = "serde_bytes")]
    body: Vec<u8>,
}

/// What a consumer's worker asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// Who asks.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its rank.
    pub rank: Rank,
    /// How it is cut.
    pub topology: Topology,
    /// The engine that it wants to reach.
    pub wanted: EngineId,
}

/// How one worker can be reached by one transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportCard {
    /// The transport's name.
    pub name: String,
    /// Its address: opaque.
    #[serde(with = "serde_bytes")]
    pub address: Vec<u8>,
    /// Keys of the registered memories, by the memory's index: opaque.
    pub keys: Vec<serde_bytes::ByteBuf>,
}

/// What one worker publishes about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerCard {
    /// Its rank.
    pub rank: Rank,
    /// Sizes of its registered memories, in bytes, by index.
    pub memory_sizes: Vec<u64>,
    /// Where its blocks lie.
    pub layout: BlockLayout,
    /// What must be equal on both sides.
    pub fingerprint: Fingerprint,
    /// How to reach it.
    pub transports: Vec<TransportCard>,
}

impl WorkerCard {
    /// As bytes, for the engine to carry from a worker to the scheduler half.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode("worker card", HANDSHAKE_MAX_BYTES, self)
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode("worker card", HANDSHAKE_MAX_BYTES, bytes)
    }
}

/// What an engine publishes about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineCard {
    /// Its id.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// How it is cut.
    pub topology: Topology,
    /// Its workers, by rank.
    pub workers: Vec<WorkerCard>,
    /// How often a consumer should renew its leases, in milliseconds, so that several renewals may be lost before
    /// one lapses; 0: as it likes.
    #[serde(default)]
    pub renew_every_ms: u64,
}

/// Why workers' cards do not make an engine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CardError {
    /// A topology that cannot be.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A rank does not hold the heads that the topology gives it.
    #[error(
        "{rank}: region {layer} has {heads} of {total} heads; with {tensor} tensor-parallel ranks it should have {share}"
    )]
    Heads {
        /// Whose.
        rank: Rank,
        /// The layer.
        layer: String,
        /// Heads it has.
        heads: u32,
        /// Heads over all ranks.
        total: u32,
        /// Ranks that share them.
        tensor: u32,
        /// Its share.
        share: u32,
    },
    /// Heads that cannot be shared out over the ranks, neither each rank some of them nor several ranks one.
    #[error(
        "{rank}: region {layer} has {total} heads, which do not come out even over {tensor} tensor-parallel ranks"
    )]
    Uneven {
        /// Whose.
        rank: Rank,
        /// The layer.
        layer: String,
        /// Heads over all ranks.
        total: u32,
        /// Ranks that share them.
        tensor: u32,
    },
    /// A region of an engine with several tensor-parallel ranks that does not say how many heads there are.
    #[error("{rank}: region {layer} has heads_total 0; with {tensor} tensor-parallel ranks it must be told")]
    HeadsTotal {
        /// Whose.
        rank: Rank,
        /// The layer.
        layer: String,
        /// Ranks that share the heads.
        tensor: u32,
    },
    /// Tokens are dealt out over ranks that do not all hold the same heads.
    #[error(
        "{rank}: region {layer} has {total} heads; tokens can be dealt out over ranks only where there is one head"
    )]
    Dealt {
        /// Whose.
        rank: Rank,
        /// The layer.
        layer: String,
        /// Heads over all ranks.
        total: u32,
    },
    /// A worker's blocks are not those of rank 0.
    #[error("{rank} has {field} {got}, rank-0 has {first}")]
    Blocks {
        /// Whose.
        rank: Rank,
        /// What differs.
        field: &'static str,
        /// Its value.
        got: u32,
        /// Rank 0's.
        first: u32,
    },
    /// A rank is missing, repeated or beyond the topology.
    #[error("worker cards: expected rank {expected} of {ranks}, got {got:?}")]
    Ranks {
        /// The rank that should come next.
        expected: u32,
        /// Ranks in all.
        ranks: u32,
        /// The rank that came, if any did.
        got: Option<u32>,
    },
    /// A worker's layout cannot be.
    #[error("{rank}: {source}")]
    Layout {
        /// Whose.
        rank: Rank,
        /// What is wrong with it.
        source: LayoutError,
    },
    /// A worker differs from rank 0.
    #[error("{rank} differs from rank-0 in {difference}")]
    Differs {
        /// Whose.
        rank: Rank,
        /// The first field that differs; ours is rank 0's.
        difference: FieldDifference,
    },
    /// A fingerprint too large to be true.
    #[error("{rank}: fingerprint too large")]
    FingerprintSize {
        /// Whose.
        rank: Rank,
    },
    /// A transport's list of keys does not match the memories.
    #[error("{rank}: transport {transport} has {keys} keys for {memories} memories")]
    Keys {
        /// Whose.
        rank: Rank,
        /// The transport.
        transport: String,
        /// Keys given.
        keys: usize,
        /// Memories described.
        memories: usize,
    },
}

impl EngineCard {
    /// Checks that the workers are complete, sound and alike. Used on the own cards at start, and on a peer's
    /// before anything in them is believed.
    pub fn check(&self) -> Result<&Fingerprint, CardError> {
        self.topology.check()?;
        let ranks = self.topology.ranks;
        for expected in 0..ranks {
            let got = self.workers.get(expected as usize).map(|w| w.rank.0);
            if got != Some(expected) {
                return Err(CardError::Ranks { expected, ranks, got });
            }
        }
        if let Some(extra) = self.workers.get(ranks as usize) {
            return Err(CardError::Ranks { expected: ranks, ranks, got: Some(extra.rank.0) });
        }
        let (first, blocks) = (&self.workers[0].fingerprint, &self.workers[0].layout);
        for worker in &self.workers {
            let rank = worker.rank;
            if !worker.fingerprint.is_bounded() {
                return Err(CardError::FingerprintSize { rank });
            }
            worker.layout.check(&worker.memory_sizes).map_err(|source| CardError::Layout { rank, source })?;
            if let Some(difference) = first.differences(&worker.fingerprint).into_iter().next() {
                return Err(CardError::Differs { rank, difference });
            }
            let layout = &worker.layout;
            for (field, got, first) in [
                ("block_tokens", layout.block_tokens, blocks.block_tokens),
                ("blocks", layout.blocks, blocks.blocks),
            ] {
                if got != first {
                    return Err(CardError::Blocks { rank, field, got, first });
                }
            }
            check_heads(self.topology, rank, layout)?;
            for transport in &worker.transports {
                if transport.keys.len() != worker.memory_sizes.len() {
                    return Err(CardError::Keys {
                        rank,
                        transport: transport.name.clone(),
                        keys: transport.keys.len(),
                        memories: worker.memory_sizes.len(),
                    });
                }
            }
        }
        Ok(first)
    }
}

/// Whether a rank holds the heads that its engine's topology gives it, in each of its regions.
pub fn check_heads(topology: Topology, rank: Rank, layout: &BlockLayout) -> Result<(), CardError> {
    for region in &layout.regions {
        let (heads, total) = (region.heads, region.all_heads());
        if region.heads_total == 0 && topology.tensor() > 1 {
            let (layer, tensor) = (region.layer.clone(), topology.tensor());
            return Err(CardError::HeadsTotal { rank, layer, tensor });
        }
        let (layer, tensor) = (region.layer.clone(), topology.tensor());
        let Some((_, share)) = topology.heads_of(rank, total) else {
            return Err(CardError::Uneven { rank, layer, total, tensor });
        };
        if heads != share {
            return Err(CardError::Heads { rank, layer, heads, total, tensor, share });
        }
        if topology.context > 1 && total != 1 {
            return Err(CardError::Dealt { rank, layer, total });
        }
    }
    Ok(())
}

/// Why a producer refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RefusalCode {
    /// The query cannot be understood.
    Malformed,
    /// The query is of another version.
    Version,
    /// Another engine is wanted.
    WrongEngine,
    /// The two do not fit.
    Incompatible,
    /// The engine is not ready, or draining.
    Unavailable,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

/// What a producer answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Here I am.
    Accepted(EngineCard),
    /// No.
    Refused {
        /// Why.
        code: RefusalCode,
        /// For a person, with both values.
        message: String,
    },
}

/// Why a frame was not understood, or what it says does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The frame is damaged.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// Another service.
    #[error("this is service {got:?}, not {SERVICE:?}")]
    Service {
        /// What it calls itself, shortened.
        got: String,
    },
    /// Another version.
    #[error("protocol version: ours {PROTOCOL_VERSION}, theirs {theirs}")]
    Version {
        /// The peer's.
        theirs: u32,
    },
    /// The engines do not fit.
    #[error("incompatible engines: {}", list(differences))]
    Incompatible {
        /// Every field that differs.
        differences: Vec<FieldDifference>,
    },
    /// The peer's fingerprint is absent or too large to be true.
    #[error("the peer sent no usable fingerprint")]
    NoFingerprint,
    /// The peer refused.
    #[error("refused ({code:?}): {message}")]
    Refused {
        /// Why.
        code: RefusalCode,
        /// In its own words.
        message: String,
    },
    /// The peer's description of itself does not hold together.
    #[error("the peer's description is unsound: {0}")]
    Card(#[from] CardError),
    /// Another engine, or another life of it, answers at that address.
    #[error("wanted engine {wanted} in life {wanted_life}, but {got} in life {got_life} answers")]
    WrongEngine {
        /// The engine wanted.
        wanted: EngineId,
        /// Its life.
        wanted_life: Incarnation,
        /// The engine that answers.
        got: EngineId,
        /// Its life.
        got_life: Incarnation,
    },
}

fn list(differences: &[FieldDifference]) -> String {
    differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn wrap<T: Serialize>(fingerprint: Option<&Fingerprint>, body: &T) -> Result<Vec<u8>, CodecError> {
    let body = codec::encode("handshake body", HANDSHAKE_MAX_BYTES, body)?;
    let outer = Outer {
        service: SERVICE.to_owned(),
        version: PROTOCOL_VERSION,
        fingerprint: fingerprint.cloned(),
        body,
    };
    codec::encode("handshake", HANDSHAKE_MAX_BYTES, &outer)
}

fn unwrap_outer(bytes: &[u8]) -> Result<Outer, HandshakeError> {
    let outer: Outer = codec::decode("handshake", HANDSHAKE_MAX_BYTES, bytes)?;
    if outer.service != SERVICE {
        return Err(HandshakeError::Service { got: outer.service.chars().take(40).collect() });
    }
    if outer.version != PROTOCOL_VERSION {
        return Err(HandshakeError::Version { theirs: outer.version });
    }
    Ok(outer)
}

impl Query {
    /// As bytes, with the asker's fingerprint.
    pub fn encode(&self, ours: &Fingerprint) -> Result<Vec<u8>, CodecError> {
        wrap(Some(ours), self)
    }

    /// From bytes: the query, and the asker's fingerprint if it sent a believable one.
    pub fn decode(bytes: &[u8]) -> Result<(Self, Option<Fingerprint>), HandshakeError> {
        let outer = unwrap_outer(bytes)?;
        let query = codec::decode("handshake query", HANDSHAKE_MAX_BYTES, &outer.body)?;
        Ok((query, outer.fingerprint.filter(Fingerprint::is_bounded)))
    }
}

impl Answer {
    /// As bytes, with the answerer's fingerprint where it has one.
    pub fn encode(&self, ours: Option<&Fingerprint>) -> Result<Vec<u8>, CodecError> {
        wrap(ours, self)
    }

    /// Reads the answer to a query for `wanted` in the life `life`: version first, then fingerprint, then the
    /// rest, which is checked before it is returned.
    pub fn decode(
        bytes: &[u8],
        ours: &Fingerprint,
        wanted: &EngineId,
        life: Incarnation,
    ) -> Result<EngineCard, HandshakeError> {
        let outer = unwrap_outer(bytes)?;
        let theirs = outer.fingerprint.filter(Fingerprint::is_bounded);
        let differences = theirs.as_ref().map(|theirs| ours.differences(theirs));
        if let Some(differences) = differences.clone().filter(|d| !d.is_empty()) {
            return Err(HandshakeError::Incompatible { differences });
        }
        match codec::decode("handshake answer", HANDSHAKE_MAX_BYTES, &outer.body)? {
            Self::Refused { code, message } => {
                let message = message.chars().take(1000).collect();
                Err(HandshakeError::Refused { code, message })
            }
            Self::Accepted(card) => {
                if differences.is_none() {
                    return Err(HandshakeError::NoFingerprint);
                }
                let inner = card.check()?;
                let differences = ours.differences(inner);
                if !differences.is_empty() {
                    return Err(HandshakeError::Incompatible { differences });
                }
                if card.engine != *wanted || card.incarnation != life {
                    return Err(HandshakeError::WrongEngine {
                        wanted: wanted.clone(),
                        wanted_life: life,
                        got: card.engine,
                        got_life: card.incarnation,
                    });
                }
                Ok(card)
            }
        }
    }
}
