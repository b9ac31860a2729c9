//! Tests of the whole model: the same bits however the work is cut up, and the right ones.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use super::support::{
    BLOCK_TOKENS, Counting, Sequence, TEXT, TempFolder, answer, entry, naive_kv, store_for, tiny_shard,
};
use super::*;

/// The first tokens of the text, repeated as often as it takes.
fn prompt(len: usize) -> Vec<u32> {
    TEXT.bytes().cycle().take(len).map(u32::from).collect()
}

/// A model whose sizes are multiples of nothing convenient, with three query heads to a KV head.
fn odd() -> ModelConfig {
    ModelConfig {
        hidden_size: 41,
        intermediate_size: 46,
        num_hidden_layers: 3,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: Some(18),
        tie_word_embeddings: true,
        max_position_embeddings: 600,
        ..ModelConfig::tiny()
    }
}

fn shard(config: &ModelConfig) -> Shard {
    Shard::new(config, &Weights::seeded(config, 11).unwrap(), 0, 1).unwrap()
}

/// Runs a sequence alone, in chunks of `step` tokens, and gives its token and the store.
fn alone(shard: &mut Shard, tokens: &[u32], step: usize) -> (u32, VecStore) {
    let mut sequence = Sequence::new(shard, tokens.len());
    // What was never written must not matter, even if it is not a number.
    sequence.fill(f32::NAN);
    let mut last = 0;
    for (index, chunk) in tokens.chunks(step).enumerate() {
        last = sequence.step(chunk, index * step);
    }
    (last, sequence.store)
}

/// All bits of a store's blocks.
fn bits(store: &VecStore, layers: usize, blocks: impl Iterator<Item = u32> + Clone) -> Vec<u32> {
    (0..layers)
        .flat_map(|layer| blocks.clone().flat_map(move |block| store.block(layer, block)))
        .map(|value| value.to_bits())
        .collect()
}

#[test]
fn chunks_do_not_change_a_bit() {
    for config in [ModelConfig::tiny(), odd()] {
        let mut shard = shard(&config);
        let tokens = prompt(300);
        let blocks = 1..=19;
        let (token, store) = alone(&mut shard, &tokens, tokens.len());
        let expected = bits(&store, config.num_hidden_layers, blocks.clone());
        for step in [1, 7, 64, 129] {
            let (other, store) = alone(&mut shard, &tokens, step);
            assert_eq!(other, token, "chunks of {step}");
            assert!(bits(&store, config.num_hidden_layers, blocks.clone()) == expected, "chunks of {step}");
        }
    }
}

#[test]
fn the_size_of_blocks_does_not_change_a_bit() {
    let mut shard = tiny_shard(1);
    let config = ModelConfig::tiny();
    let tokens = prompt(290);
    let mut seen: Option<(u32, Vec<u32>)> = None;
    for block_tokens in [1, 5, 16, 100, 300] {
        let blocks: Vec<u32> = (0..290_u32.div_ceil(block_tokens as u32)).collect();
        let mut store = store_for(&shard, blocks.len(), block_tokens);
        let mut token = None;
        for (start, part) in [(0, &tokens[..100]), (100, &tokens[100..])] {
            let chunk = Chunk { tokens: part, start, blocks: &blocks, window_blocks: &[], wants_token: true };
            token = shard.forward(&[chunk], block_tokens, &mut store, &mut SoloReduce).unwrap()[0];
        }
        let mut rows = Vec::new();
        for layer in 0..config.num_hidden_layers {
            for position in 0..tokens.len() {
                let block = store.block(layer, blocks[position / block_tokens]);
                for side in 0..8 {
                    let at = (side * block_tokens + position % block_tokens) * 16;
                    rows.extend(block[at..at + 16].iter().map(|value| value.to_bits()));
                }
            }
        }
        let now = (token.unwrap(), rows);
        assert!(*seen.get_or_insert_with(|| now.clone()) == now, "blocks of {block_tokens}");
    }
}

#[test]
fn a_batch_does_not_change_a_bit() {
    for config in [ModelConfig::tiny(), odd()] {
        let mut shard = shard(&config);
        let layers = config.num_hidden_layers;
        let tokens = prompt(400);
        let sequences = [&tokens[..150], &tokens[20..53], &tokens[200..209], &tokens[100..333]];
        let mut store = store_for(&shard, 64, BLOCK_TOKENS);
        let blocks: Vec<Vec<u32>> = (0..4).map(|i| (i * 16..i * 16 + 15).rev().collect()).collect();
        // First all but one token of each, in unequal steps; then a batch that mixes prefill and decode.
        let mut done = [0; 4];
        let mut last = [None; 4];
        for step in [[100, 3, 8, 1], [1, 29, 0, 200], [49, 0, 0, 31], [0, 1, 1, 1]] {
            let chunks: Vec<(usize, Chunk<'_>)> = (0..4)
                .filter(|&i| step[i] > 0)
                .map(|i| {
                    let tokens = &sequences[i][done[i]..done[i] + step[i]];
                    let wants_token = done[i] + step[i] == sequences[i].len();
                    (i, Chunk { tokens, start: done[i], blocks: &blocks[i], window_blocks: &[], wants_token })
                })
                .collect();
            let batch: Vec<Chunk<'_>> = chunks.iter().map(|(_, chunk)| *chunk).collect();
            let out = shard.forward(&batch, BLOCK_TOKENS, &mut store, &mut SoloReduce).unwrap();
            for ((i, chunk), token) in chunks.iter().zip(out) {
                assert_eq!(token.is_some(), chunk.wants_token);
                done[*i] += step[*i];
                last[*i] = token;
            }
        }
        for (i, sequence) in sequences.iter().enumerate() {
            let (token, single) = alone(&mut shard, sequence, sequence.len());
            assert_eq!(last[i], Some(token));
            for layer in 0..layers {
                for position in 0..sequence.len() {
                    let count = sequence.len().div_ceil(BLOCK_TOKENS);
                    let ours = store.block(layer, blocks[i][position / BLOCK_TOKENS]);
                    let theirs = single.block(layer, (count - position / BLOCK_TOKENS) as u32);
                    let head_dim = config.head_size();
                    for side in 0..2 * config.num_key_value_heads {
                        let at = (side * BLOCK_TOKENS + position % BLOCK_TOKENS) * head_dim;
                        assert_eq!(ours[at..at + head_dim], theirs[at..at + head_dim]);
                    }
                }
            }
        }
    }
}

#[test]
fn two_chunks_of_one_sequence_may_share_a_batch() {
    let mut shard = tiny_shard(1);
    let tokens = prompt(50);
    let (expected, _) = alone(&mut shard, &tokens, 50);
    let mut store = store_for(&shard, 4, BLOCK_TOKENS);
    let chunk = |start, tokens| Chunk {
        tokens,
        start,
        blocks: &[0, 1, 2, 3],
        window_blocks: &[],
        wants_token: start > 0,
    };
    let batch = [chunk(0, &tokens[..20]), chunk(20, &tokens[20..])];
    let out = shard.forward(&batch, BLOCK_TOKENS, &mut store, &mut SoloReduce).unwrap();
    assert_eq!(out, [None, Some(expected)]);
}

/// A rank's end of a reduction between threads.
struct Gather {
    rank: usize,
    parts: Arc<Mutex<Vec<Vec<f32>>>>,
    barrier: Arc<Barrier>,
}

impl GroupReduce for Gather {
    fn reduce(&mut self, partials: &[f32], groups: usize, len: usize) -> Result<Vec<f32>, ReduceError> {
        assert_eq!(partials.len(), groups * len);
        self.parts.lock().unwrap()[self.rank] = partials.to_vec();
        self.barrier.wait();
        let all = self.parts.lock().unwrap().concat();
        self.barrier.wait();
        Ok(sum_in_order(&all.chunks_exact(len).collect::<Vec<_>>(), len))
    }
}

/// Prefills in two chunks and decodes, on so many ranks; gives each rank's tokens and store.
fn on_ranks(weights: &Weights, ranks: usize) -> Vec<(Vec<u32>, VecStore)> {
    let parts = Arc::new(Mutex::new(vec![Vec::new(); ranks]));
    let barrier = Arc::new(Barrier::new(ranks));
    let tokens = prompt(140);
    let blocks: Vec<u32> = (0..10).rev().collect();
    let run = |rank| {
        let mut reduce = Gather { rank, parts: Arc::clone(&parts), barrier: Arc::clone(&barrier) };
        let mut shard = Shard::new(weights.config(), weights, rank, ranks).unwrap();
        let mut store = store_for(&shard, 10, BLOCK_TOKENS);
        let mut step = |tokens: &[u32], start| {
            let chunk = Chunk { tokens, start, blocks: &blocks, window_blocks: &blocks, wants_token: true };
            shard.forward(&[chunk], BLOCK_TOKENS, &mut store, &mut reduce).unwrap()[0].unwrap()
        };
        step(&tokens[..70], 0);
        let mut answer = vec![step(&tokens[70..], 70)];
        for position in 140..155 {
            answer.push(step(&answer[answer.len() - 1..], position));
        }
        (answer, store)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_do_not_change_a_bit() {
    for (config, counts) in [(ModelConfig::tiny(), &[2, 4][..]), (odd(), &[2][..])] {
        let weights = Weights::seeded(&config, 12).unwrap();
        let (answer, whole) = on_ranks(&weights, 1).remove(0);
        for &ranks in counts {
            let heads = config.num_key_value_heads / ranks;
            for (rank, (other, store)) in on_ranks(&weights, ranks).into_iter().enumerate() {
                assert_eq!(other, answer, "rank {rank} of {ranks}");
                let head = BLOCK_TOKENS * config.head_size();
                for (layer, block) in (0..config.num_hidden_layers).flat_map(|l| (0..10).map(move |b| (l, b)))
                {
                    let (keys, values) =
                        whole.block(layer, block).split_at(config.num_key_value_heads * head);
                    let local = rank * heads * head..(rank + 1) * heads * head;
                    let expected = [&keys[local.clone()], &values[local]].concat();
                    assert!(store.block(layer, block) == expected, "rank {rank} of {ranks}");
                }
            }
        }
    }
}

/// Models of every kind, and one whose KV heads several ranks can hold.
fn kinds() -> Vec<ModelConfig> {
    let all = [(ModelKind::Gqa, 4), (ModelKind::Mla, 4), (ModelKind::Hybrid, 4), (ModelKind::Gqa, 2)];
    let mut configs: Vec<_> = all.map(|(kind, heads)| ModelConfig::tiny_of(kind, heads)).into();
    configs.push(odd());
    configs
}

#[test]
fn the_numbers_are_those_of_the_formulas() {
    for config in kinds() {
        let weights = Weights::seeded(&config, 13).unwrap();
        let tokens = prompt(140);
        let mut shard = Shard::new(&config, &weights, 0, 1).unwrap();
        let (token, store) = alone(&mut shard, &tokens, 33);
        let (expected, next) = naive_kv(&config, &weights, &tokens);
        assert_eq!(token, next);
        for (layer, rows) in expected.iter().enumerate() {
            for (position, row) in rows.iter().enumerate() {
                let block = (tokens.len().div_ceil(BLOCK_TOKENS) - position / BLOCK_TOKENS) as u32;
                let found = entry(&store, &config, layer, block, position % BLOCK_TOKENS);
                assert_eq!(found.len(), row.len());
                for (&ours, &exact) in found.iter().zip(row) {
                    let error = (f64::from(ours) - exact).abs();
                    assert!(error < 4e-3, "layer {layer}, position {position}: {ours} for {exact}");
                }
            }
        }
    }
}

#[test]
fn neither_ranks_nor_chunks_change_an_answer_of_any_kind() {
    for config in kinds() {
        let weights = Weights::seeded(&config, 12).unwrap();
        let (answer, _) = on_ranks(&weights, 1).remove(0);
        let ranks = [2, 4, 8].into_iter().filter(|ranks| config.groups_per_rank(*ranks).is_ok());
        for (ranks, rank, other) in ranks.flat_map(|ranks| {
            on_ranks(&weights, ranks)
                .into_iter()
                .enumerate()
                .map(move |(rank, (other, _))| (ranks, rank, other))
        }) {
            assert_eq!(other, answer, "rank {rank} of {ranks}");
        }
        let mut shard = Shard::new(&config, &weights, 0, 1).unwrap();
        for step in [1, 7, 129] {
            assert_eq!(alone(&mut shard, &prompt(140), step).0, answer[0], "chunks of {step}");
        }
    }
}

#[test]
fn several_ranks_may_hold_one_kv_head_but_no_rank_parts_of_two() {
    let config = ModelConfig::tiny_of(ModelKind::Gqa, 2);
    let weights = Weights::seeded(&config, 1).unwrap();
    let shard = |rank, ranks| Shard::new(&config, &weights, rank, ranks);
    assert_eq!(shard(3, 8).unwrap().cache_heads(), 1);
    assert_eq!((shard(0, 1).unwrap().cache_heads(), shard(0, 1).unwrap().local_groups()), (2, 8));
    assert!(shard(0, 3).is_err());
    let latent = ModelConfig::tiny_of(ModelKind::Mla, 4);
    let weights = Weights::seeded(&latent, 1).unwrap();
    assert_eq!(Shard::new(&latent, &weights, 3, 4).unwrap().cache_heads(), 1, "all of them have the latent");
}

#[test]
fn what_a_window_has_left_is_not_looked_at() {
    let config = ModelConfig::tiny_of(ModelKind::Hybrid, 4);
    let mut shard = shard(&config);
    let tokens = prompt(200);
    let (_, store) = alone(&mut shard, &tokens[..199], 199);
    // The blocks of 199 positions, and block 0, which holds nothing that is a number.
    let blocks: Vec<u32> = (1..=13).rev().collect();
    // The last token sees 160 to 199 in the layers with a window: block 10 is the first that it looks at.
    let mut window = blocks.clone();
    window[..10].fill(0);
    let mut last = |window: &[u32]| {
        let mut store = store.clone();
        let chunk = Chunk {
            tokens: &tokens[199..],
            start: 199,
            blocks: &blocks,
            window_blocks: window,
            wants_token: true,
        };
        shard.forward(&[chunk], BLOCK_TOKENS, &mut store, &mut SoloReduce).unwrap()[0].unwrap()
    };
    let right = last(&blocks);
    assert_eq!(last(&window), right);
    window[10] = 0;
    assert_ne!(last(&window), right, "and one block more is missed (or this prompt does not show it)");
}

#[test]
fn a_model_from_a_folder_answers_as_before() {
    let folder = TempFolder::new();
    let config = ModelConfig::tiny();
    let weights = Weights::seeded(&config, 1).unwrap();
    weights.to_folder(folder.path()).unwrap();
    let read = Weights::from_folder(folder.path()).unwrap();
    let mut again = Shard::new(read.config(), &read, 0, 1).unwrap();
    assert_eq!(answer(&mut again, &prompt(40), 8), answer(&mut tiny_shard(1), &prompt(40), 8));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let mut shard = tiny_shard(1);
    let mut store = store_for(&shard, 2, BLOCK_TOKENS);
    let empty = store.clone();
    let good = Chunk { tokens: &[1, 2], start: 0, blocks: &[0], window_blocks: &[], wants_token: false };
    let mut message = |chunk: Chunk<'_>, block_tokens| {
        let mut reduce = Counting(0);
        let error = shard.forward(&[good, chunk], block_tokens, &mut store, &mut reduce).unwrap_err();
        assert_eq!(reduce.0, 0);
        error.to_string()
    };
    assert_eq!(message(good, 0), "block_tokens is 0, it must be at least 1");
    assert_eq!(message(Chunk { tokens: &[], ..good }, 16), "chunk 1 of the batch holds no token");
    let token = Chunk { tokens: &[1, 257], start: 3, ..good };
    assert_eq!(message(token, 16), "token 257 at position 4 lies outside vocab_size = 257");
    let late = Chunk { start: 15, ..good };
    assert_eq!(message(late, 16), "2 blocks of 16 tokens are needed, 1 are given");
    let beyond = Chunk { start: 8191, ..good };
    assert_eq!(message(beyond, 16), "position 8192 is beyond max_position_embeddings = 8192");
    assert!(message(Chunk { start: usize::MAX, ..good }, 16).contains("max_position_embeddings"));
    assert_eq!(store, empty);
}

#[test]
fn a_failed_reduction_is_passed_on_and_leaves_the_shard_usable() {
    struct Broken;
    impl GroupReduce for Broken {
        fn reduce(&mut self, _: &[f32], _: usize, _: usize) -> Result<Vec<f32>, ReduceError> {
            Err(ReduceError::Gather { reason: "rank 1 is gone".to_owned() })
        }
    }
    let mut shard = tiny_shard(1);
    let expected = answer(&mut shard, &prompt(20), 4);
    let mut store = store_for(&shard, 2, BLOCK_TOKENS);
    let chunk = Chunk { tokens: &[1], start: 0, blocks: &[0], window_blocks: &[], wants_token: true };
    let error = shard.forward(&[chunk], BLOCK_TOKENS, &mut store, &mut Broken).unwrap_err();
    assert_eq!(error.to_string(), "partial results could not be gathered: rank 1 is gone");
    assert_eq!(answer(&mut shard, &prompt(20), 4), expected);
}

#[test]
fn a_reduction_of_another_length_is_refused() {
    struct Short;
    impl GroupReduce for Short {
        fn reduce(&mut self, _: &[f32], _: usize, _: usize) -> Result<Vec<f32>, ReduceError> {
            Ok(vec![0.0; 3])
        }
    }
    let mut shard = tiny_shard(1);
    let mut store = store_for(&shard, 2, BLOCK_TOKENS);
    let chunk = Chunk { tokens: &[1], start: 0, blocks: &[0], window_blocks: &[], wants_token: true };
    let error = shard.forward(&[chunk], BLOCK_TOKENS, &mut store, &mut Short).unwrap_err();
    assert_eq!(error.to_string(), "the reduction gave 3 numbers instead of 64");
}

#[test]
fn the_reduction_is_called_twice_per_layer() {
    let mut shard = tiny_shard(1);
    let mut store = store_for(&shard, 2, BLOCK_TOKENS);
    let mut reduce = Counting(0);
    let chunk = Chunk { tokens: &[1, 2, 3], start: 0, blocks: &[1], window_blocks: &[], wants_token: false };
    assert_eq!(shard.forward(&[chunk], BLOCK_TOKENS, &mut store, &mut reduce).unwrap(), [None]);
    assert_eq!(reduce.0, 2 * 4);
    assert!(shard.forward(&[], BLOCK_TOKENS, &mut store, &mut reduce).unwrap().is_empty());
    assert_eq!(reduce.0, 2 * 4);
}

/// Not a test: prints how fast the model is. Run with `--ignored --nocapture`.
#[test]
#[ignore = "measures speed"]
fn speed() {
    let mut shard = tiny_shard(1);
    for len in [500, 4000] {
        let mut sequence = Sequence::new(&mut shard, len + 100);
        let begin = Instant::now();
        let first = sequence.step(&prompt(len), 0);
        let prefill = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        sequence.decode(first, len, 41);
        let decode = begin.elapsed().as_secs_f64() / 40.0;
        println!(
            "{len} tokens: prefill {prefill:.3} s, {:.0} tokens/s; decode {:.3} ms per token",
            len as f64 / prefill,
            decode * 1000.0
        );
    }
}
