//! Host staging: copies between an engine's KV blocks in device memory and its host pool.
//!
//! To the hand-over, the KV memory of such an engine is its host pool: what the workers register, and what the block ids
//! of offers and loads name. These copies are made around it, by orders that travel in the plan and answers that travel in
//! the report. No peer ever sees them.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::blocks::BlockList;
use crate::ids::{BlockId, CopyId};

/// Which way the blocks of a copy go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyWay {
    /// Device to host: what a producer is about to hand over.
    Save,
    /// Host to device: what a consumer has loaded, and had confirmed.
    Restore,
}

impl CopyWay {
    /// A word for tables and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Restore => "restore",
        }
    }
}

/// A side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopySide {
    /// The engine's KV cache.
    Device,
    /// The host pool.
    Host,
}

impl fmt::Display for CopySide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}

/// One group's part of a copy: item `i` of one list and item `i` of the other hold the same place of the sequence.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CopyGroup {
    /// The block group.
    pub group: u32,
    /// Blocks of the engine's cache.
    pub device: BlockList,
    /// Blocks of the host pool.
    pub host: BlockList,
}

/// A copy that every rank is to make of its part of the blocks. Answered by [`CopyNews`] of each.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CopyOrder {
    /// Its id. A copy is ordered once.
    pub copy: CopyId,
    /// Number of the order. It ascends from order to order, which the id need not do: so a worker tells an order that comes
    /// again from a new one.
    pub number: u64,
    /// Which way.
    pub way: CopyWay,
    /// Which blocks.
    pub groups: Vec<CopyGroup>,
}

/// Why the lists of a copy cannot be. Nothing of such a copy is made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// No block at all.
    #[error("the copy names no block")]
    Nothing,
    /// A group that there is not.
    #[error("group {group} of the copy: there are {groups} groups")]
    Group {
        /// The group named.
        group: u32,
        /// Groups that there are.
        groups: u32,
    },
    /// One group has two parts.
    #[error("group {group} stands twice in the copy")]
    GroupTwice {
        /// The group.
        group: u32,
    },
    /// Lists that cannot pair.
    #[error("group {group}: {device} device blocks for {host} host blocks")]
    Lengths {
        /// The group.
        group: u32,
        /// Blocks in the list `device`.
        device: u32,
        /// Blocks in the list `host`.
        host: u32,
    },
    /// A block beyond its pool.
    #[error("group {group}: {side} names block {highest}, its pool has {blocks} blocks")]
    Beyond {
        /// The group.
        group: u32,
        /// Which list.
        side: CopySide,
        /// The highest id named; the largest number for a list that no pool could hold.
        highest: u64,
        /// Blocks in that side's pool.
        blocks: u32,
    },
    /// A block that is named twice.
    #[error("group {group}: {side} names {block} twice")]
    Repeated {
        /// The group of the second naming.
        group: u32,
        /// Which list.
        side: CopySide,
        /// The block.
        block: BlockId,
    },
}

/// Checks that a list can be used with a pool of so many blocks and names none of them twice.
pub fn check_list(group: u32, side: CopySide, list: &BlockList, blocks: u32) -> Result<(), CopyError> {
    if !list.fits(blocks) {
        let highest = list.highest().map_or(u64::MAX, |b| u64::from(b.0));
        return Err(CopyError::Beyond { group, side, highest, blocks });
    }
    match list.repeated() {
        Some(block) => Err(CopyError::Repeated { group, side, block }),
        None => Ok(()),
    }
}

impl CopyOrder {
    /// Checks the lists against pools of so many blocks and against the number of groups. Host blocks belong to one group at
    /// a time, so that none may stand in two of them; a device may have a pool for each group.
    pub fn check(&self, device: u32, host: u32, groups: u32) -> Result<(), CopyError> {
        let mut seen = Vec::with_capacity(self.groups.len());
        let mut all: Vec<BlockId> = Vec::new();
        for part in &self.groups {
            let group = part.group;
            if group >= groups {
                return Err(CopyError::Group { group, groups });
            }
            if seen.contains(&group) {
                return Err(CopyError::GroupTwice { group });
            }
            seen.push(group);
            let (of_device, of_host) = (part.device.len(), part.host.len());
            if of_device != of_host {
                return Err(CopyError::Lengths { group, device: of_device, host: of_host });
            }
            check_list(group, CopySide::Device, &part.device, device)?;
            check_list(group, CopySide::Host, &part.host, host)?;
            all.extend(part.host.iter());
            if let Some(block) = BlockList::from_ids(all.iter().copied()).repeated() {
                return Err(CopyError::Repeated { group, side: CopySide::Host, block });
            }
        }
        if all.is_empty() { Err(CopyError::Nothing) } else { Ok(()) }
    }
}

/// Why a copy failed. Each is one counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CopyFailure {
    /// The lists cannot be; nothing was copied.
    BadBlocks,
    /// The worker has no device memory; nothing was copied.
    NoDevice,
    /// It waited for its turn until its time was over; nothing was copied.
    NotBegun,
    /// The device failed. What was written is of no use.
    Device,
    /// The worker is shutting down.
    Closed,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

impl CopyFailure {
    /// A word for tables and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BadBlocks => "bad_blocks",
            Self::NoDevice => "no_device",
            Self::NotBegun => "not_begun",
            Self::Device => "device",
            Self::Closed => "closed",
            Self::Other => "other",
        }
    }
}

/// What a copy moved on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CopyStats {
    /// Bytes.
    pub bytes: u64,
    /// Ranges, after neighbours were merged.
    pub ranges: u64,
    /// From its start on the device to its end, in microseconds.
    pub copy_us: u64,
}

impl Hash for CopyStats {
    /// What moved, not how long it took: two machines that differ in measured times alone behave alike.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
        self.ranges.hash(state);
    }
}

/// What one rank says of a copy. `Done` and `Failed` are its last words: from then on neither side's blocks are touched by
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyNews {
    /// All bytes are in place.
    Done(CopyStats),
    /// It is over, and what it has written is of no use.
    Failed {
        /// Why.
        reason: CopyFailure,
        /// For a person: both values, or the device's words.
        detail: String,
    },
    /// Its time is over and the device still works on it. Another word follows when it is over, if ever.
    Late,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: &[u32]) -> BlockList {
        ids.iter().copied().map(BlockId).collect()
    }

    fn order(groups: &[(u32, &[u32], &[u32])]) -> CopyOrder {
        let part = |(group, device, host): &(u32, &[u32], &[u32])| CopyGroup {
            group: *group,
            device: list(device),
            host: list(host),
        };
        CopyOrder {
            copy: CopyId(1),
            number: 1,
            way: CopyWay::Save,
            groups: groups.iter().map(part).collect(),
        }
    }

    #[test]
    fn lists_that_cannot_be_are_refused_with_the_field_and_both_values() {
        let refused = |groups: &[(u32, &[u32], &[u32])]| {
            order(groups).check(10, 4, 2).expect_err("it was taken").to_string()
        };
        assert_eq!(refused(&[]), "the copy names no block");
        assert_eq!(refused(&[(0, &[], &[])]), "the copy names no block");
        assert_eq!(refused(&[(2, &[1], &[1])]), "group 2 of the copy: there are 2 groups");
        assert_eq!(refused(&[(0, &[1], &[1]), (0, &[2], &[2])]), "group 0 stands twice in the copy");
        assert_eq!(refused(&[(0, &[1, 2], &[1])]), "group 0: 2 device blocks for 1 host blocks");
        let beyond = "group 0: device names block 10, its pool has 10 blocks";
        assert_eq!(refused(&[(0, &[1, 10], &[1, 2])]), beyond);
        let beyond = "group 0: host names block 4, its pool has 4 blocks";
        assert_eq!(refused(&[(0, &[1, 2], &[4, 3])]), beyond);
        assert_eq!(refused(&[(0, &[5, 5], &[1, 2])]), "group 0: device names block-5 twice");
        assert_eq!(refused(&[(0, &[5, 6], &[2, 2])]), "group 0: host names block-2 twice");
        let twice = "group 1: host names block-2 twice";
        assert_eq!(refused(&[(0, &[5], &[2]), (1, &[6], &[2])]), twice);
        // A device may have a pool for each group.
        assert_eq!(order(&[(1, &[5, 1], &[2, 3]), (0, &[5], &[0])]).check(10, 4, 2), Ok(()));
    }
}
