//! How much of an offered prefix is a request's own: digests of the prefix at several lengths.
//!
//! Counting tokens says nothing: a router may have added one, a chat template may have taken some out of the middle. Two
//! prompts share what has the same digest, and the longest such prefix can be read.

use sha2::{Digest, Sha256};

/// Most marks of one offer; of longer prompts each mark stands for more blocks.
pub const MARKS_MAX: usize = 64;

/// Digests of an offer's first `every`, `2 * every`, ... tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct PrefixMarks {
    /// Tokens between two marks, a multiple of the producer's block; 0 where there are none.
    pub every: u32,
    /// For each mark the first 16 bytes of the SHA-256 over the token ids from the start of the prompt, as little-endian
    /// 32-bit numbers.
    pub digests: Vec<u128>,
}

impl PrefixMarks {
    /// The marks of these tokens. The last ones, which make no whole step, have none: the offer's own digest stands for
    /// all of them.
    pub fn of(tokens: &[u32], block_tokens: u32) -> Self {
        let blocks = tokens.len().checked_div(block_tokens as usize).unwrap_or(0);
        if blocks == 0 {
            return Self::default();
        }
        let step = blocks.div_ceil(MARKS_MAX);
        let every = step * block_tokens as usize;
        let Ok(told) = u32::try_from(every) else { return Self::default() };
        Self { every: told, digests: digests(tokens, every).collect() }
    }

    /// How many of these tokens, from the first one, the offer was made for as well, as far as the marks say.
    pub fn common(&self, tokens: &[u32]) -> u32 {
        if self.every == 0 {
            return 0;
        }
        let ours = digests(tokens, self.every as usize);
        let equal = self.digests.iter().zip(ours).take_while(|(theirs, ours)| **theirs == *ours).count();
        u32::try_from(equal).unwrap_or(u32::MAX).saturating_mul(self.every)
    }
}

fn digests(tokens: &[u32], every: usize) -> impl Iterator<Item = u128> + '_ {
    let mut digest = Sha256::new();
    tokens.chunks_exact(every).map(move |piece| {
        for token in piece {
            digest.update(token.to_le_bytes());
        }
        let whole = digest.clone().finalize();
        whole.iter().take(16).fold(0, |number, byte| number << 8 | u128::from(*byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_common_prefix_is_found_at_the_step_of_the_marks() {
        let tokens: Vec<u32> = (0..100).collect();
        let marks = PrefixMarks::of(&tokens, 8);
        assert_eq!((marks.every, marks.digests.len()), (8, 12));
        assert_eq!(marks.common(&tokens), 96);
        assert_eq!(marks.common(&tokens[..50]), 48);
        let mut other = tokens.clone();
        other[40] = 7;
        assert_eq!(marks.common(&other), 40, "what comes behind a difference is another prefix");
        other.remove(3);
        assert_eq!(marks.common(&other), 0);
        assert_eq!(PrefixMarks::default().common(&tokens), 0);
        assert_eq!(PrefixMarks::of(&tokens[..7], 8), PrefixMarks::default());
        assert_eq!(PrefixMarks::of(&tokens, 0), PrefixMarks::default());
    }

    #[test]
    fn a_long_prompt_has_as_many_marks_as_are_allowed() {
        let tokens: Vec<u32> = (0..16 * 1000).collect();
        let marks = PrefixMarks::of(&tokens, 16);
        assert_eq!((marks.every, marks.digests.len()), (256, 62));
        assert_eq!(marks.common(&tokens), 62 * 256);
    }
}
