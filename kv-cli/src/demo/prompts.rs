//! Prompts: pieces of a real text, of lengths around the block's.

use std::path::Path;

use crate::error::Failure;

/// Cicero, De finibus bonorum et malorum, book 1; in the public domain.
const TEXT: &str = include_str!("../../../data/de-finibus-1.txt");

/// Tokens in a block of the demonstration's engines.
pub(crate) const BLOCK_TOKENS: usize = 16;

/// Lengths in tokens (the tokenizer takes bytes): shorter than a block, multiples of it, one more and one less,
/// and some of 4,000.
const LENGTHS: &[usize] = &[
    5, 15, 16, 17, 31, 32, 33, 47, 64, 80, 100, 127, 128, 129, 200, 256, 300, 400, 511, 512, 700, 900, 1024,
    4000, 4000,
];

/// Tokens that the prompts of a family share.
const SHARED: usize = 96;
/// Prompts of a family.
const FAMILY: usize = 3;

/// `count` prompts, all different.
pub(crate) fn cut(count: usize) -> Vec<String> {
    // Offsets walk through the text with a step that has no common divisor with its length, so that repeated
    // lengths begin elsewhere.
    let text = TEXT.as_bytes();
    let piece = |number: usize, length: usize| -> Vec<u8> {
        let start = (number * 1_511) % text.len();
        text.iter().cycle().skip(start).take(length).copied().collect()
    };
    let round = LENGTHS.len() + FAMILY;
    (0..count)
        .map(|number| {
            let bytes = match LENGTHS.get(number % round) {
                Some(length) => piece(number, *length),
                None => {
                    // One of a family: the same beginning, another end.
                    let mut bytes = piece(number / round + 17, SHARED);
                    bytes.extend(piece(number + 3, 60 + number % round));
                    bytes
                }
            };
            String::from_utf8_lossy(&bytes).into_owned()
        })
        .collect()
}

/// What a client says in the turns after the first: other words for each conversation and turn, some shorter than a block.
pub(crate) fn words(number: usize, turns: u32) -> Vec<String> {
    let text = TEXT.as_bytes();
    let say = |turn: usize| {
        let start = (number * 977 + turn * 4_099) % text.len();
        let bytes: Vec<u8> =
            text.iter().cycle().skip(start).take(7 + (number * 13 + turn * 29) % 60).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    (1..turns as usize).map(say).collect()
}

/// One prompt per line; blank lines are passed over.
pub(crate) fn read(file: &Path) -> Result<Vec<String>, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|e| Failure::new(format!("read --prompts {}", file.display()), e))?;
    let prompts: Vec<String> = text.lines().filter(|l| !l.trim().is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(Failure::new(format!("--prompts {}", file.display()), "the file has no prompt"));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_differ_and_cover_the_edges_of_a_block() {
        let prompts = cut(120);
        let distinct: std::collections::BTreeSet<&String> = prompts.iter().collect();
        assert_eq!(distinct.len(), prompts.len());
        let lengths: Vec<usize> = cut(28).iter().map(String::len).collect();
        assert!(lengths.iter().any(|l| *l < BLOCK_TOKENS));
        for around in [BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1] {
            assert!(lengths.contains(&around), "{around}");
        }
        assert_eq!(lengths.iter().filter(|l| **l == 4000).count(), 2);
    }

    #[test]
    fn a_family_shares_its_beginning() {
        let prompts = cut(28);
        let family = &prompts[25..28];
        assert!(family.iter().all(|p| p[..SHARED] == family[0][..SHARED]));
        assert!(family.iter().all(|p| p.len() > SHARED));
    }
}
