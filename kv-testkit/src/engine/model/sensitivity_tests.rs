//! The seeded model's answers must depend on all of the KV cache, or comparing answers would prove little.

use super::support::{Sequence, TEXT, answer, seeded_shard, tiny_shard};
use super::{ModelConfig, ModelKind, Shard};

const SEEDS: [u64; 2] = [1, 2];
const COUNT: usize = 24;

/// Pieces of text of the given lengths, two of each.
fn prompts(lengths: &[usize]) -> Vec<Vec<u32>> {
    let text: Vec<u32> = TEXT.bytes().map(u32::from).collect();
    let piece = |turn: usize, len: usize| {
        let from = (turn * 811 + len * 13) % (text.len() - len);
        text[from..from + len].to_vec()
    };
    (0..2).flat_map(|turn| lengths.iter().map(move |&len| piece(turn, len))).collect()
}

/// The answer when some positions' keys and values are lost after the prefill.
fn answer_without(shard: &mut Shard, prompt: &[u32], lost: std::ops::Range<usize>) -> Vec<u32> {
    let mut sequence = Sequence::new(shard, prompt.len() + COUNT);
    let first = sequence.step(prompt, 0);
    sequence.zero(lost);
    sequence.decode(first, prompt.len(), COUNT)
}

#[test]
fn different_prompts_have_different_answers() {
    for seed in SEEDS {
        let mut shard = tiny_shard(seed);
        let prompts = prompts(&[5, 6, 8, 12, 17, 30, 50, 90, 200, 350, 600]);
        let mut answers: Vec<_> = prompts.iter().map(|prompt| answer(&mut shard, prompt, COUNT)).collect();
        let distinct = |answers: &mut Vec<Vec<u32>>| {
            answers.sort();
            answers.dedup();
            answers.len()
        };
        assert!(answers.iter().flatten().all(|&token| token != 256), "an answer ended early");
        assert_eq!(distinct(&mut answers), prompts.len());
        // Nor do they end in the same loop.
        let mut tails: Vec<_> = answers.iter().map(|answer| answer[COUNT - 6..].to_vec()).collect();
        assert_eq!(distinct(&mut tails), prompts.len());
    }
}

#[test]
fn one_early_token_changes_the_answer() {
    let (mut changed, mut total) = (0, 0);
    for seed in SEEDS {
        let mut shard = tiny_shard(seed);
        for prompt in prompts(&[5, 8, 17, 50, 90, 200, 350, 600]) {
            let mut other = prompt.clone();
            let early = prompt.len() / 10;
            other[early] = if prompt[early] == u32::from(b'e') { b'a'.into() } else { b'e'.into() };
            changed += usize::from(answer(&mut shard, &prompt, COUNT) != answer(&mut shard, &other, COUNT));
            total += 1;
        }
    }
    assert!(changed * 10 >= total * 9, "{changed} of {total}");
}

#[test]
fn losing_all_but_the_last_token_changes_every_answer() {
    for seed in SEEDS {
        let mut shard = tiny_shard(seed);
        for prompt in prompts(&[5, 6, 7, 8, 12, 17, 33, 90, 200, 600]) {
            let lost = answer_without(&mut shard, &prompt, 0..prompt.len() - 1);
            assert_ne!(answer(&mut shard, &prompt, COUNT), lost, "{} tokens", prompt.len());
        }
    }
}

#[test]
fn losing_one_block_changes_most_answers() {
    for kind in [ModelKind::Gqa, ModelKind::Mla, ModelKind::Hybrid] {
        let (mut changed, mut total) = (0, 0);
        for seed in SEEDS {
            let mut shard = seeded_shard(&ModelConfig::tiny_of(kind, 4), seed);
            for prompt in prompts(&[196, 200, 203, 207]) {
                let whole = answer(&mut shard, &prompt, COUNT);
                changed += usize::from(whole != answer_without(&mut shard, &prompt, 96..112));
                total += 1;
            }
        }
        assert!(changed * 10 >= total * 9, "{kind:?}: {changed} of {total}");
    }
}

#[test]
fn thousands_of_positions_back_still_count() {
    let text: Vec<u32> = TEXT.bytes().cycle().map(u32::from).take(2048).collect();
    let mut shard = tiny_shard(1);
    let whole = answer(&mut shard, &text, COUNT);
    assert_ne!(whole, answer_without(&mut shard, &text, 0..16), "the first block");
    assert_ne!(whole, answer_without(&mut shard, &text, 0..1024), "the first half");
}
