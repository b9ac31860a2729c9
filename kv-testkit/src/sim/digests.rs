//! Digests of simulated memory: what a worker with checksums asks its driver for.

use kv_proto::LoadFailure;
use kv_proto::message::{BlockDigest, GroupList};
use kv_worker::Failure;
use kv_worker::machine::io::{DigestOf, Fact};

use super::dice::Dice;
use super::world::{Event, MS, WorkerAt, World};

/// What a worker's driver is computing.
#[derive(Debug, Clone)]
pub(super) struct Digesting {
    at: WorkerAt,
    of: DigestOf,
    groups: Vec<GroupList>,
    /// The digests, if the memory was looked at already.
    seen: Option<Result<Vec<BlockDigest>, Failure>>,
}

impl World {
    /// A worker wants digests of its blocks. They take a while, and may be of its memory as it is at the beginning of
    /// that time or at its end.
    pub(super) fn digest(&mut self, at: WorkerAt, of: DigestOf, groups: Vec<GroupList>) {
        let seen = self.dice.chance(500).then(|| self.digests(at, &groups));
        let wait = self.dice.between(1, 40) * MS;
        self.after(wait, Event::Digested(Box::new(Digesting { at, of, groups, seen })));
    }

    /// Digests were computed.
    pub(super) fn digested(&mut self, mut ended: Box<Digesting>) {
        let at = ended.at;
        let digests = match ended.seen.take() {
            Some(seen) => seen,
            None => self.digests(at, &ended.groups),
        };
        if let Some(until) = self.stands_still(at) {
            ended.seen = Some(digests);
            return self.at(until, Event::Digested(ended));
        }
        self.give(at, Fact::Digested { of: ended.of, digests });
    }

    /// One digest for each position: the cells of its block in every layer, in order. A world with checksums has one group.
    fn digests(&mut self, at: WorkerAt, groups: &[GroupList]) -> Result<Vec<BlockDigest>, Failure> {
        let nowhere = || Failure::new(LoadFailure::BadBlocks, "a block beyond the memory");
        let (size, shape) =
            self.engines.get(at.engine).map(|e| (e.pool.size, e.shape)).ok_or_else(nowhere)?;
        let worker = self.worker(at).ok_or_else(nowhere)?;
        let mut digests = Vec::new();
        for block in groups.iter().flat_map(|group| group.blocks.iter()) {
            let mut digest = 0;
            for layer in shape.layers_of(at.rank) {
                for head in 0..shape.heads_of(at.rank).1 {
                    for slot in shape.slots_of(at.rank) {
                        let cell = shape.cell(size, at.rank, layer, block.0, head, slot);
                        let cell = cell.and_then(|cell| worker.memory.get(cell)).ok_or_else(nowhere)?;
                        digest = Dice::new(digest ^ cell).number();
                    }
                }
            }
            digests.push(BlockDigest(digest));
        }
        Ok(digests)
    }
}
