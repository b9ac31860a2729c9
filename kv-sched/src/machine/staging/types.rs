//! What goes into the staging machine and what comes out of it.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use kv_proto::{BlockId, BlockList, CopyError, CopyFailure, CopyId, Rank};
use thiserror::Error;

/// Sizes and limits of host staging. All of it is plain data.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StagingConfig {
    /// Ranks of the engine. Each copies its part of every block.
    pub ranks: u32,
    /// Block groups.
    pub groups: u32,
    /// Blocks of the engine's cache on the device.
    pub device_blocks: u32,
    /// Blocks of the host pool, the same on every rank.
    pub host_blocks: u32,
    /// How long a request may wait for room. Then a producer hands nothing over, and a consumer computes.
    pub room_limit: Duration,
    /// How long a copy may take, from its order to the last rank's answer.
    pub copy_limit: Duration,
    /// How long after that a silent rank is spoken of.
    pub report_grace: Duration,
}

/// Why a configuration cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StagingConfigError {
    /// Something that must not be zero is.
    #[error("{field} is 0")]
    Zero {
        /// The field.
        field: &'static str,
    },
}

impl StagingConfig {
    /// Checks ranges.
    pub fn check(&self) -> Result<(), StagingConfigError> {
        let numbers = [
            ("ranks", self.ranks),
            ("groups", self.groups),
            ("device_blocks", self.device_blocks),
            ("host_blocks", self.host_blocks),
        ];
        let limits = [
            ("room_limit", self.room_limit),
            ("copy_limit", self.copy_limit),
            ("report_grace", self.report_grace),
        ];
        let zero = numbers.iter().find(|(_, value)| *value == 0).map(|(field, _)| *field);
        let short = limits.iter().find(|(_, value)| value.as_millis() == 0).map(|(field, _)| *field);
        match zero.or(short) {
            Some(field) => Err(StagingConfigError::Zero { field }),
            None => Ok(()),
        }
    }
}

/// Blocks of one group that hold consecutive places of a request's sequence, on one side.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct StagedBlocks {
    /// Place of the first of them, counted in blocks from the start of the sequence.
    pub first: u32,
    /// The blocks.
    pub blocks: BlockList,
}

impl StagedBlocks {
    /// As a list from the start of the sequence, as the scheduler's hooks take it. Block 0 stands for what is not staged;
    /// the hooks look at none of those places.
    pub fn from_start(&self) -> BlockList {
        (0..self.first).map(|_| BlockId(0)).chain(self.blocks.iter()).collect()
    }
}

/// What is to become of device blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "device blocks freed against a Hold are read or written by a copy"]
pub enum DeviceVerdict {
    /// No copy touches them: they may be used again.
    Free,
    /// A copy may touch them until [`StagingEvent::Over`] names it.
    Hold,
}

/// A call that changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StagingError {
    /// Lists that cannot be.
    #[error(transparent)]
    Blocks(#[from] CopyError),
    /// Another number of groups.
    #[error("{got} lists of blocks for {ours} groups")]
    Groups {
        /// Groups of the engine.
        ours: u32,
        /// Lists given.
        got: usize,
    },
    /// More than the host pool has.
    #[error("{needed} blocks are to be staged, the host pool has {blocks}")]
    TooLarge {
        /// Blocks needed.
        needed: u32,
        /// Blocks that there are.
        blocks: u32,
    },
    /// What was asked for does not go with the state that the copy is in.
    #[error("{copy} is {state}: {asked} is not possible")]
    WrongState {
        /// The copy.
        copy: CopyId,
        /// Its state; `over` if it is not known.
        state: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
}

/// Why a request is not staged.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StagingFailure {
    /// There was no room in time.
    NoRoom {
        /// Blocks that it needed.
        needed: u32,
        /// Blocks that were free in the end.
        free: u32,
    },
    /// A rank's copy failed.
    Copy {
        /// The rank.
        rank: Rank,
        /// Why.
        reason: CopyFailure,
        /// For a person.
        detail: String,
    },
    /// The copy takes too long.
    Late {
        /// Ranks that have not ended it, as far as they are known to be the late ones.
        ranks: Vec<Rank>,
    },
}

impl std::fmt::Display for StagingFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoRoom { needed, free } => {
                write!(f, "no room in the host pool: {needed} blocks needed, {free} free")
            }
            Self::Copy { rank, reason, detail } => {
                write!(f, "the copy failed on {rank} ({}): {detail}", reason.name())
            }
            Self::Late { ranks } => write!(f, "the copy is late on {ranks:?}"),
        }
    }
}

/// What the engine is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StagingEvent {
    /// A load may begin into these host blocks.
    RoomGiven {
        /// Whose.
        copy: CopyId,
        /// The blocks, by group.
        host: Vec<StagedBlocks>,
    },
    /// Every rank has copied its part to the host: the device blocks are free, and these can be handed over. The engine
    /// ends the request with them and then calls [`Staging::let_go`](super::Staging::let_go).
    Saved {
        /// Whose.
        copy: CopyId,
        /// The blocks, by group.
        host: Vec<StagedBlocks>,
    },
    /// Every rank has copied its part to the device: the request may run.
    Restored {
        /// Whose.
        copy: CopyId,
    },
    /// The request is not staged: a producer hands nothing over, a consumer computes what it does not have.
    Failed {
        /// Whose.
        copy: CopyId,
        /// Why.
        failure: StagingFailure,
        /// Whether the copy may still touch the request's device blocks: they are to be kept from any use, by this
        /// request too, until [`StagingEvent::Over`].
        busy: bool,
    },
    /// A copy whose request failed or is gone is over: its device blocks may be used again.
    Over {
        /// Which one.
        copy: CopyId,
    },
    /// Ranks have not said that such a copy is over although they must have: they are dead or stuck.
    RanksSilent {
        /// Which one.
        copy: CopyId,
        /// The ranks that are missing.
        missing: Vec<Rank>,
    },
}

impl StagingEvent {
    /// Whose news it is.
    pub const fn copy(&self) -> CopyId {
        match self {
            Self::RoomGiven { copy, .. }
            | Self::Saved { copy, .. }
            | Self::Restored { copy }
            | Self::Failed { copy, .. }
            | Self::Over { copy }
            | Self::RanksSilent { copy, .. } => *copy,
        }
    }
}

/// Counters of host staging. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct StagingStats {
    /// Requests whose blocks were saved.
    pub saved: u64,
    /// Requests whose blocks were restored.
    pub restored: u64,
    /// Requests that got no room in time, or never could.
    pub no_room: u64,
    /// Copies that failed.
    pub failed: u64,
    /// Copies that took too long.
    pub late: u64,
    /// Bytes copied, over all ranks.
    pub bytes: u64,
    /// Ranges copied, over all ranks.
    pub ranges: u64,
    /// Words of ranks that were known, or of copies that were not: harmless.
    pub stray_news: u64,
}

impl Hash for StagingStats {
    /// Counters are not state: two machines that differ in nothing else behave alike.
    fn hash<H: Hasher>(&self, _: &mut H) {}
}
