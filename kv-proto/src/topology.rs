//! How an engine is cut into ranks, and which ranks of two engines have to do with each other.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::handshake::RANKS_MAX;
use crate::ids::Rank;

/// How an engine is cut into ranks: `stages` pipeline stages of equally many tensor-parallel ranks. Rank `r` is
/// tensor-parallel rank `r % tensor()` of stage `r / tensor()`.
///
/// Data parallelism is not seen here: each of its ranks is an engine of its own, with its own id and address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Topology {
    /// Ranks in all.
    pub ranks: u32,
    /// Pipeline stages, each with some of the layers.
    #[serde(default = "one")]
    pub stages: u32,
    /// Ranks over which the tokens of a sequence are dealt out, block by block in turn (decode context parallelism). It is
    /// 1, or as many as a stage has ranks.
    #[serde(default = "one")]
    pub context: u32,
}

const fn one() -> u32 {
    1
}

/// Two topologies of which one cannot be, or a rank that is not in its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// No ranks, or too many.
    #[error("an engine has {ranks} ranks, 1 to {RANKS_MAX} are allowed")]
    Ranks {
        /// Ranks given.
        ranks: u32,
    },
    /// Stages of unequal size.
    #[error("{ranks} ranks cannot be shared out over {stages} pipeline stages")]
    Stages {
        /// Ranks given.
        ranks: u32,
        /// Stages given.
        stages: u32,
    },
    /// A context-parallel size that is neither 1 nor that of a stage.
    #[error("context parallelism over {context} ranks, where a stage has {tensor}: only 1 or all of them are supported")]
    Context {
        /// Size given.
        context: u32,
        /// Ranks of a stage.
        tensor: u32,
    },
    /// A rank that the engine does not have.
    #[error("{rank} of an engine that has {ranks} ranks")]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// Ranks there are.
        ranks: u32,
    },
}

impl Topology {
    /// Tensor-parallel ranks alone.
    pub const fn of(ranks: u32) -> Self {
        Self { ranks, stages: 1, context: 1 }
    }

    /// Ranks of one stage. To be used on a topology that [`Topology::check`] has passed.
    pub const fn tensor(self) -> u32 {
        if self.stages == 0 { self.ranks } else { self.ranks / self.stages }
    }

    /// A rank's place among the tensor-parallel ranks of its stage.
    pub const fn tensor_rank(self, rank: Rank) -> u32 {
        if self.tensor() == 0 { 0 } else { rank.0 % self.tensor() }
    }

    /// A rank's stage.
    pub const fn stage(self, rank: Rank) -> u32 {
        if self.tensor() == 0 { 0 } else { rank.0 / self.tensor() }
    }

    /// A rank's place among those over which a sequence's tokens are dealt out; 0 where they are not.
    pub const fn context_rank(self, rank: Rank) -> u32 {
        if self.context == 0 { 0 } else { self.tensor_rank(rank) % self.context }
    }

    /// Whether the numbers can be.
    pub const fn check(self) -> Result<(), TopologyError> {
        let Self { ranks, stages, context } = self;
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(TopologyError::Ranks { ranks });
        }
        if stages == 0 || !ranks.is_multiple_of(stages) {
            return Err(TopologyError::Stages { ranks, stages });
        }
        let tensor = self.tensor();
        if context != 1 && context != tensor {
            return Err(TopologyError::Context { context, tensor });
        }
        Ok(())
    }

    /// The heads that a rank holds of `total`, as the first one and how many: an equal share, or one head that several
    /// ranks hold alike. `None` if neither comes out even.
    pub const fn heads_of(self, rank: Rank, total: u32) -> Option<(u32, u32)> {
        let (tensor, t) = (self.tensor(), self.tensor_rank(rank));
        if tensor == 0 || total == 0 {
            None
        } else if total.is_multiple_of(tensor) {
            let share = total / tensor;
            Some((t * share, share))
        } else if tensor.is_multiple_of(total) {
            Some((t / (tensor / total), 1))
        } else {
            None
        }
    }

    /// The producer's ranks that a consumer's rank has to do with, in ascending order: it reads from them, or, where
    /// others hold the same, only tells them that it has nothing to read. `self` is the producer's topology.
    ///
    /// Both sides derive it from the two topologies with this one function: the consumer whom to connect to, the
    /// producer how many endings a lease needs. Two tensor-parallel ranks have to do with each other where their shares
    /// of the heads overlap; with a producer that deals tokens out, where both hold a token.
    pub fn sources_of(self, rank: Rank, consumer: Self) -> Result<Vec<Rank>, TopologyError> {
        fits(self, consumer, consumer, rank)?;
        let of = consumer.tensor_rank(rank);
        let linked = (0..self.tensor()).filter(|source| self.is_linked(*source, consumer, of));
        let linked: Vec<u32> = linked.collect();
        let stages = 0..self.stages;
        Ok(stages.flat_map(|stage| linked.iter().map(move |v| Rank(stage * self.tensor() + v))).collect())
    }

    /// The consumer's ranks that have to do with a producer's rank, in ascending order; see [`Topology::sources_of`].
    pub fn readers_of(self, rank: Rank, consumer: Self) -> Result<Vec<Rank>, TopologyError> {
        fits(self, consumer, self, rank)?;
        let of = self.tensor_rank(rank);
        let linked = (0..consumer.tensor()).filter(|reader| self.is_linked(of, consumer, *reader));
        let linked: Vec<u32> = linked.collect();
        let stages = 0..consumer.stages;
        Ok(stages.flat_map(|stage| linked.iter().map(move |v| Rank(stage * consumer.tensor() + v))).collect())
    }

    fn is_linked(self, source: u32, consumer: Self, reader: u32) -> bool {
        if self.context > 1 {
            let common = gcd(self.context, consumer.context);
            return (source % self.context) % common == (reader % consumer.context) % common;
        }
        let (p, d) = (u64::from(self.tensor()), u64::from(consumer.tensor()));
        let (source, reader) = (u64::from(source), u64::from(reader));
        reader * p < (source + 1) * d && source * d < (reader + 1) * p
    }
}

fn fits(producer: Topology, consumer: Topology, whose: Topology, rank: Rank) -> Result<(), TopologyError> {
    producer.check()?;
    consumer.check()?;
    if rank.0 >= whose.ranks {
        return Err(TopologyError::NoSuchRank { rank, ranks: whose.ranks });
    }
    Ok(())
}

/// The greatest common divisor; of 0 and a number, that number.
pub const fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(producer: Topology, consumer: Topology) -> Vec<Vec<u32>> {
        let of = |rank| producer.sources_of(Rank(rank), consumer).unwrap();
        (0..consumer.ranks).map(|rank| of(rank).into_iter().map(|r| r.0).collect()).collect()
    }

    fn dealt(ranks: u32) -> Topology {
        Topology { context: ranks, ..Topology::of(ranks) }
    }

    #[test]
    fn a_rank_has_to_do_with_those_whose_share_overlaps_its_own() {
        assert_eq!(sources(Topology::of(2), Topology::of(2)), [[0], [1]]);
        assert_eq!(sources(Topology::of(2), Topology::of(4)), [[0], [0], [1], [1]]);
        assert_eq!(sources(Topology::of(4), Topology::of(2)), [[0, 1], [2, 3]]);
        assert_eq!(sources(Topology::of(2), Topology::of(3)), [vec![0], vec![0, 1], vec![1]]);
        assert_eq!(sources(Topology::of(3), Topology::of(1)), [[0, 1, 2]]);
    }

    #[test]
    fn every_stage_has_to_do_with_every_stage() {
        let staged = Topology { stages: 2, ..Topology::of(4) };
        assert_eq!(sources(staged, Topology::of(2)), [[0, 2], [1, 3]]);
        assert_eq!(sources(Topology::of(2), staged), [[0], [1], [0], [1]]);
        assert_eq!((staged.stage(Rank(3)), staged.tensor_rank(Rank(3))), (1, 1));
    }

    #[test]
    fn tokens_that_are_dealt_out_are_read_where_they_are() {
        assert_eq!(sources(Topology::of(4), dealt(4)), [[0], [1], [2], [3]]);
        assert_eq!(sources(dealt(4), Topology::of(2)), [[0, 1, 2, 3], [0, 1, 2, 3]]);
        assert_eq!(sources(dealt(4), dealt(2)), [[0, 2], [1, 3]]);
        assert_eq!(sources(dealt(2), dealt(4)), [[0], [1], [0], [1]]);
    }

    #[test]
    fn both_sides_see_the_same_pairs() {
        let all = [1, 2, 3, 4, 6, 8].map(Topology::of).into_iter();
        let all = all.chain([dealt(2), dealt(4), Topology { stages: 2, ..Topology::of(4) }]);
        let all: Vec<Topology> = all.collect();
        for p in &all {
            for d in &all {
                let forth: Vec<(u32, u32)> = (0..d.ranks)
                    .flat_map(|r| p.sources_of(Rank(r), *d).unwrap().into_iter().map(move |s| (s.0, r)))
                    .collect();
                for rank in 0..p.ranks {
                    let back: Vec<u32> = p.readers_of(Rank(rank), *d).unwrap().iter().map(|r| r.0).collect();
                    let expected: Vec<u32> = forth.iter().filter(|(s, _)| *s == rank).map(|(_, r)| *r).collect();
                    assert_eq!(back, expected, "{p:?} {d:?} {rank}");
                    assert!(!back.is_empty(), "a lease of {rank} would end by time alone: {p:?} {d:?}");
                }
            }
        }
    }

    #[test]
    fn heads_are_shared_out_evenly_or_held_by_several() {
        let heads = |ranks, total| -> Vec<Option<(u32, u32)>> {
            (0..ranks).map(|r| Topology::of(ranks).heads_of(Rank(r), total)).collect()
        };
        assert_eq!(heads(2, 8), [Some((0, 4)), Some((4, 4))]);
        assert_eq!(heads(4, 2), [Some((0, 1)), Some((0, 1)), Some((1, 1)), Some((1, 1))]);
        assert_eq!(heads(2, 1), [Some((0, 1)); 2]);
        assert_eq!(heads(2, 3), [None; 2]);
    }

    #[test]
    fn what_cannot_be_is_refused_with_both_values() {
        let refuse = |t: Topology| t.check().unwrap_err().to_string();
        assert_eq!(refuse(Topology::of(0)), "an engine has 0 ranks, 1 to 4096 are allowed");
        assert_eq!(
            refuse(Topology { stages: 2, ..Topology::of(3) }),
            "3 ranks cannot be shared out over 2 pipeline stages"
        );
        assert_eq!(
            refuse(Topology { context: 2, ..Topology::of(4) }),
            "context parallelism over 2 ranks, where a stage has 4: only 1 or all of them are supported"
        );
        let beyond = Topology::of(2).sources_of(Rank(3), Topology::of(3)).unwrap_err().to_string();
        assert_eq!(beyond, "rank-3 of an engine that has 3 ranks");
        assert!(Topology::of(2).readers_of(Rank(2), Topology::of(4)).is_err());
    }
}
