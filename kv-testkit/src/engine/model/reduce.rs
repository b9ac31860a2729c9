//! Adding up what the groups computed, in an order that does not depend on the number of ranks.

/// Why partial results could not be added up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReduceError {
    /// The partials handed in are not `groups x len` numbers.
    #[error("{given} partial results were given for {groups} groups of {len}")]
    Size {
        /// Numbers given.
        given: usize,
        /// Groups of this rank.
        groups: usize,
        /// Numbers per group.
        len: usize,
    },
    /// A rank contributed another amount than was agreed, so the ranks are not at the same step.
    #[error("rank {rank} sent {given} partial results instead of {expected}")]
    OutOfStep {
        /// The rank at fault.
        rank: usize,
        /// Numbers it sent.
        given: usize,
        /// Numbers expected of it.
        expected: usize,
    },
    /// The other ranks could not be reached.
    #[error("partial results could not be gathered: {reason}")]
    Gather {
        /// What happened, in words.
        reason: String,
    },
}

/// Adds up the partials of all ranks, always in the order of the groups.
///
/// Floating-point addition is not associative: adding per rank first would give other bits for other numbers
/// of ranks. So no rank adds its own groups beforehand, and the sum starts with group 0 and takes one group
/// after another, as [`sum_in_order`] does.
pub trait GroupReduce {
    /// Takes this rank's partials, shape `[groups][len]` with its own groups in order, and gives the sum over
    /// all groups of all ranks, shape `[len]`. Every rank gets the same bits.
    ///
    /// All ranks call this the same number of times with the same `len`.
    ///
    /// # Errors
    ///
    /// [`ReduceError`] if the sizes do not fit or another rank cannot be reached.
    fn reduce(&mut self, partials: &[f32], groups: usize, len: usize) -> Result<Vec<f32>, ReduceError>;
}

/// The reduction of a model that runs on one rank alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SoloReduce;

impl GroupReduce for SoloReduce {
    fn reduce(&mut self, partials: &[f32], groups: usize, len: usize) -> Result<Vec<f32>, ReduceError> {
        if groups.checked_mul(len) != Some(partials.len()) {
            return Err(ReduceError::Size { given: partials.len(), groups, len });
        }
        if len == 0 {
            return Ok(Vec::new());
        }
        let parts: Vec<&[f32]> = partials.chunks_exact(len).collect();
        Ok(sum_in_order(&parts, len))
    }
}

/// The sum of `parts`, one per group in the order of all groups: part 0, plus part 1, plus part 2, and so on.
///
/// Gives `len` numbers. A part that is shorter counts as zero beyond its end, and what is beyond `len` is
/// left out; callers check sizes before. Without parts the sum is zero.
pub fn sum_in_order(parts: &[&[f32]], len: usize) -> Vec<f32> {
    let Some((first, rest)) = parts.split_first() else { return vec![0.0; len] };
    let mut sum: Vec<f32> = first.iter().copied().take(len).collect();
    sum.resize(len, 0.0);
    for part in rest {
        for (total, &value) in sum.iter_mut().zip(part.iter()) {
            *total += value;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_taken_from_the_first_to_the_last() {
        // (1e8 + -1e8) + 1 = 1, whereas 1e8 + (-1e8 + 1) = 0 in f32.
        let sum = sum_in_order(&[&[1e8, 1.0], &[-1e8, 2.0], &[1.0, 3.0]], 2);
        assert_eq!(sum, [1.0, 6.0]);
        assert_eq!(sum_in_order(&[], 2), [0.0, 0.0]);
    }

    #[test]
    fn solo_adds_its_groups() {
        let sum = SoloReduce.reduce(&[1.0, 2.0, 10.0, 20.0], 2, 2).unwrap();
        assert_eq!(sum, [11.0, 22.0]);
        assert!(SoloReduce.reduce(&[], 2, 0).unwrap().is_empty());
    }

    #[test]
    fn sizes_are_checked() {
        let error = SoloReduce.reduce(&[1.0, 2.0, 3.0], 2, 2).unwrap_err();
        assert_eq!(error.to_string(), "3 partial results were given for 2 groups of 2");
    }
}
