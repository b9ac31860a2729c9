//! The small engine's scheduler alone: however it cuts, batches, repeats and throws away work, the answers are
//! those of the model run by itself, and every block comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use common::{PLENTY, Rig, ask, id, prompt, reference, settings, tiny};
use kv_testkit::engine::core::CoreSettings;
use kv_testkit::engine::model::{ModelConfig, ModelKind, Tokenizer, Weights};
use kv_testkit::engine::request::{Ask, Happening};
use kv_testkit::engine::store::group_kinds;

/// Prompts of lengths around the block's, with what the model answers.
fn cases(max_tokens: u32) -> Vec<(Vec<u32>, Vec<u32>)> {
    let weights = tiny();
    [1, 15, 16, 17, 32, 50, 64, 100]
        .into_iter()
        .enumerate()
        .map(|(number, len)| {
            let prompt = prompt(number as u32, len);
            let answer = reference(&weights, &prompt, max_tokens);
            (prompt, answer)
        })
        .collect()
}

/// Asks for all cases at once and compares every answer.
fn all_at_once(settings: CoreSettings, cases: &[(Vec<u32>, Vec<u32>)]) -> Rig {
    let mut rig = Rig::alone(settings);
    let numbers: Vec<u64> = cases
        .iter()
        .enumerate()
        .map(|(n, (prompt, answer))| rig.arrive(ask(&format!("r{n}"), prompt, answer.len() as u32)))
        .collect();
    rig.drain();
    for (number, (prompt, answer)) in numbers.into_iter().zip(cases) {
        assert_eq!(&rig.tokens(number), answer, "prompt of {} tokens", prompt.len());
        let (usage, _) = rig.finished(number).unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens),
            (prompt.len() as u32, answer.len() as u32)
        );
    }
    rig
}

#[test]
fn a_prompt_computed_in_chunks_is_answered_as_in_one_piece() {
    for (prompt, answer) in cases(10) {
        for step_tokens in [1, 7, 16, 33, 512] {
            let mut rig = Rig::alone(CoreSettings { step_tokens, ..settings() });
            let got = rig.answer(ask("r", &prompt, 10));
            assert_eq!(got, answer, "{} tokens by {step_tokens}", prompt.len());
            let chunks = (prompt.len() as u64).div_ceil(u64::from(step_tokens));
            assert!(rig.core.stats().steps >= chunks + 9, "the prompt really was cut up");
        }
    }
}

#[test]
fn requests_in_one_batch_are_answered_as_if_alone() {
    let cases = cases(12);
    for step_tokens in [20, 512] {
        all_at_once(CoreSettings { step_tokens, ..settings() }, &cases);
    }
}

#[test]
fn a_step_ordered_before_the_tokens_of_the_last_are_known_changes_no_answer() {
    let cases = cases(12);
    for step_tokens in [20, 512] {
        all_at_once(CoreSettings { run_ahead: true, step_tokens, ..settings() }, &cases);
    }
    // And there really are two in flight, the second without knowing what it continues.
    let mut rig = Rig::alone(CoreSettings { run_ahead: true, ..settings() });
    rig.arrive(ask("r", &prompt(0, 20), 5));
    rig.order();
    assert_eq!(rig.orders.len(), 2);
    assert!(rig.orders[1].work[0].tokens.is_empty());
    rig.drain();
    assert_eq!(
        rig.core.stats().steps,
        6,
        "a step per token, none beyond, and one that says that it has ended"
    );
}

#[test]
fn what_the_prefix_cache_holds_is_not_computed_again_and_changes_no_answer() {
    let weights = tiny();
    for run_ahead in [false, true] {
        let mut rig = Rig::alone(CoreSettings { run_ahead, ..settings() });
        let first = prompt(1, 70);
        rig.answer(ask("first", &first, 4));
        // The same beginning, and another end, of various lengths.
        for shared in [15, 16, 40, 64, 70] {
            let mut second = first[..shared].to_vec();
            second.extend(prompt(9, 21));
            let number = rig.arrive(ask("second", &second, 6));
            rig.drain();
            assert_eq!(rig.tokens(number), reference(&weights, &second, 6), "{shared} tokens shared");
            let (usage, _) = rig.finished(number).unwrap();
            assert!(usage.cached_tokens as usize >= shared / 16 * 16, "{usage:?}");
        }
    }
}

#[test]
fn a_prompt_that_is_cached_whole_is_answered_and_its_last_block_is_not_written_while_shared() {
    let weights = tiny();
    for len in [16, 32, 64] {
        let prompt = prompt(3, len);
        let answer = reference(&weights, &prompt, 5);
        let mut rig = Rig::alone(settings());
        assert_eq!(rig.answer(ask("first", &prompt, 5)), answer);
        // Twice at the same time; the rig checks that neither writes a block that can be found.
        let numbers = [rig.arrive(ask("second", &prompt, 5)), rig.arrive(ask("third", &prompt, 5))];
        rig.drain();
        for number in numbers {
            assert_eq!(rig.tokens(number), answer);
            assert_eq!(rig.finished(number).unwrap().0.cached_tokens as usize, len - 16);
        }
    }
}

// R024
#[test]
fn a_pool_too_small_for_all_preempts_and_still_answers_right() {
    let cases: Vec<_> = cases(40).into_iter().filter(|(prompt, _)| prompt.len() >= 15).collect();
    for run_ahead in [false, true] {
        for (blocks, step_tokens) in [(9, 512), (12, 30), (16, 512)] {
            let rig = all_at_once(CoreSettings { run_ahead, blocks, step_tokens, ..settings() }, &cases);
            assert!(rig.core.stats().preempted > 0, "{blocks} blocks were enough");
            assert_eq!(rig.core.pool().free(), blocks as usize);
        }
    }
}

/// A model whose layers see everything and the last 40 positions in turn, and an engine for it.
fn hybrid() -> (Weights, CoreSettings) {
    let weights = Weights::seeded(&ModelConfig::tiny_of(ModelKind::Hybrid, 4), 7).unwrap();
    let groups = group_kinds(weights.config());
    (weights, CoreSettings { groups, ..settings() })
}

#[test]
fn a_window_gives_back_the_blocks_that_it_has_left() {
    let (weights, settings) = hybrid();
    for (run_ahead, step_tokens) in [(false, 512), (true, 512), (true, 20)] {
        let mut rig = Rig::of(CoreSettings { run_ahead, step_tokens, ..settings.clone() }, &weights);
        let number = rig.arrive(ask("r", &prompt(0, 100), 41));
        let mut held = Vec::new();
        while rig.turn() {
            held.push(rig.held());
        }
        assert_eq!(rig.tokens(number), reference(&weights, &prompt(0, 100), 41));
        // Of 140 positions in 9 blocks the window sees those from 100 on, which are in 3; a step in flight may still
        // look at a fourth.
        let last = held.iter().rev().find(|held| **held > 0).unwrap();
        assert!((12..=13).contains(last), "{held:?}");
    }
}

#[test]
fn block_groups_change_no_answer_in_a_pool_too_small_for_all() {
    let (weights, settings) = hybrid();
    let lengths = [15, 16, 17, 32, 50, 64, 100];
    for run_ahead in [false, true] {
        for (blocks, step_tokens) in [(19, 512), (23, 30), (128, 20)] {
            let mut rig =
                Rig::of(CoreSettings { run_ahead, blocks, step_tokens, ..settings.clone() }, &weights);
            let cases: Vec<_> = lengths.iter().enumerate().map(|(n, len)| prompt(n as u32, *len)).collect();
            let ask = |(n, prompt): (usize, &Vec<u32>)| rig.arrive(ask(&format!("r{n}"), prompt, 40));
            let numbers: Vec<u64> = cases.iter().enumerate().map(ask).collect();
            rig.drain();
            for (number, prompt) in numbers.into_iter().zip(&cases) {
                assert_eq!(rig.tokens(number), reference(&weights, prompt, 40), "{} tokens", prompt.len());
            }
            assert_eq!(rig.core.stats().preempted > 0, blocks < 128);
            assert_eq!(rig.core.pool().free() as u32, blocks - 1, "all but the placeholder");
        }
    }
}

#[test]
fn no_more_are_preempted_than_room_is_needed_for() {
    // Three requests of one block each fill the pool. When the first needs a second block while a step is in
    // flight, the blocks of one other are enough, though they come back only when the step has ended.
    let mut rig = Rig::alone(CoreSettings { blocks: 3, run_ahead: true, ..settings() });
    for (n, len) in [15, 8, 8].into_iter().enumerate() {
        rig.arrive(ask(&format!("r{n}"), &prompt(n as u32, len), 4));
    }
    while rig.core.stats().preempted == 0 {
        assert!(rig.turn(), "nobody was preempted");
    }
    for _ in 0..3 {
        rig.order();
    }
    assert_eq!(rig.core.stats().preempted, 1);
    rig.drain();
}

#[test]
fn an_aborted_request_leaves_nothing_behind_wherever_it_was() {
    for run_ahead in [false, true] {
        let settings = CoreSettings { blocks: 8, run_ahead, ..settings() };
        // In the queue, behind one that takes the whole pool.
        let mut rig = Rig::alone(settings.clone());
        let big = rig.arrive(ask("big", &prompt(0, 100), 20));
        let queued = rig.arrive(ask("queued", &prompt(1, 100), 20));
        rig.turn();
        rig.core.abort(&id("queued"));
        rig.gather();
        assert_eq!(rig.failed(queued).unwrap(), "the request was aborted");
        rig.drain();
        assert_eq!(rig.tokens(big), reference(&tiny(), &prompt(0, 100), 20));

        // Running, before its first step, with steps in flight, and between steps.
        for steps in 0..4 {
            let mut rig = Rig::alone(settings.clone());
            let number = rig.arrive(ask("r", &prompt(2, 40), 20));
            for _ in 0..steps {
                rig.order();
                rig.run();
            }
            rig.order();
            assert!(!rig.orders.is_empty());
            let before = rig.tokens(number);
            rig.core.abort(&id("r"));
            rig.drain();
            assert_eq!(rig.tokens(number), before, "what is in flight for it is not told");
            assert_eq!(rig.core.stats().aborted, 1);
        }
    }
}

// R026
#[test]
fn an_abort_of_nobody_changes_nothing() {
    let mut rig = Rig::alone(settings());
    let number = rig.arrive(ask("r", &prompt(0, 20), 5));
    rig.turn();
    rig.core.abort(&id("another"));
    rig.drain();
    rig.core.abort(&id("r"));
    assert_eq!(rig.tokens(number), reference(&tiny(), &prompt(0, 20), 5));
    assert_eq!((rig.core.stats().aborted, rig.core.stats().stray_aborts), (0, 2));
    assert_eq!(rig.held(), 0);
}

// R024
#[test]
fn blocks_that_a_step_in_flight_may_write_are_given_to_nobody_until_it_has_ended() {
    // The first request takes all but one block, so that the second must wait for those.
    let mut rig = Rig::alone(CoreSettings { blocks: 4, ..settings() });
    let first = rig.arrive(ask("first", &prompt(0, 47), 2));
    rig.order();
    assert_eq!(rig.orders.len(), 1);
    rig.core.abort(&id("first"));
    let second = rig.arrive(ask("second", &prompt(1, 40), 2));
    assert!(!rig.order(), "there is no room as long as the step is in flight");
    assert_eq!((rig.held(), rig.core.pool().returning()), (3, 3));
    rig.run();
    assert_eq!(rig.held(), 0);
    rig.drain();
    assert!(rig.finished(first).is_none());
    assert_eq!(rig.tokens(second), reference(&tiny(), &prompt(1, 40), 2));

    // With two in flight both must have ended.
    let mut rig = Rig::alone(CoreSettings { blocks: 4, run_ahead: true, ..settings() });
    rig.arrive(ask("first", &prompt(0, 47), 5));
    rig.order();
    assert_eq!(rig.orders.len(), 2);
    rig.core.abort(&id("first"));
    rig.arrive(ask("second", &prompt(1, 40), 2));
    rig.run();
    assert!(rig.core.pool().held() >= 3, "the second step still writes");
    rig.order();
    assert!(rig.orders.iter().all(|order| order.work.iter().all(|work| work.request != 2)));
    rig.run();
    rig.drain();
}

// R076
#[test]
fn what_cannot_be_done_is_refused_with_its_figures_and_changes_nothing() {
    let mut rig = Rig::alone(CoreSettings { blocks: 8, max_positions: 200, ..settings() });
    let running = rig.arrive(ask("here", &prompt(0, 20), 6));
    rig.turn();
    let before = (rig.core.stats().clone(), rig.held(), rig.core.request_count());
    let refused: Vec<(Ask, &str)> = vec![
        (ask("r", &[], 5), "prompt is empty"),
        (ask("r", &[1, 2], 0), "max_tokens is 0"),
        (ask("r", &[1, 257, 3], 5), "token 257 is beyond the vocabulary of 257"),
        (ask("r", &prompt(0, 150), 51), "prompt and max_tokens make 201 tokens, at most 200 are allowed"),
        (ask("r", &[1], u32::MAX), "prompt and max_tokens make 4294967296 tokens, at most 200 are allowed"),
        (ask("r", &prompt(0, 120), 9), "the request needs 9 blocks, the pool has 8"),
        (ask("here", &[1, 2], 5), "request here is already here"),
    ];
    for (ask, reason) in refused {
        assert_eq!(rig.core.arrive(ask).unwrap_err(), reason);
        assert_eq!((rig.core.stats().clone(), rig.held(), rig.core.request_count()), before);
    }
    rig.drain();
    assert_eq!(rig.tokens(running), reference(&tiny(), &prompt(0, 20), 6));
    // The edge itself is allowed, and a name may be used again.
    assert_eq!(rig.answer(ask("here", &prompt(0, 120), 8)).len(), 8);
}

/// The tiny model changed so that the end of text wins where `token` would have won: written to a folder, its
/// output matrix patched, and read again.
fn ending_instead_of(token: u32) -> Weights {
    let folder = tempfile::tempdir().unwrap();
    tiny().to_folder(folder.path()).unwrap();
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let (at, width) = {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let head = file.tensor("lm_head.weight").unwrap();
        (head.data().as_ptr() as usize - bytes.as_ptr() as usize, head.shape()[1] * 4)
    };
    let row = |number: u32| at + number as usize * width..at + (number as usize + 1) * width;
    // Twice the row gives twice the score, and a score that wins is positive.
    let doubled: Vec<u8> = bytes[row(token)]
        .chunks_exact(4)
        .flat_map(|b| (2.0 * f32::from_le_bytes([b[0], b[1], b[2], b[3]])).to_le_bytes())
        .collect();
    bytes[row(Tokenizer::END_OF_TEXT)].copy_from_slice(&doubled);
    std::fs::write(&path, bytes).unwrap();
    Weights::from_folder(folder.path()).unwrap()
}

#[test]
fn the_end_of_text_ends_an_answer_unless_it_is_to_be_ignored() {
    let mut ended_late = 0;
    for salt in 0..6 {
        let prompt = prompt(salt, 30);
        let token = reference(&tiny(), &prompt, 4)[3];
        let weights = ending_instead_of(token);
        let whole = reference(&weights, &prompt, 12);
        let end = whole.iter().position(|t| *t == Tokenizer::END_OF_TEXT).unwrap();
        ended_late += usize::from(end > 0);
        for run_ahead in [false, true] {
            let mut rig = Rig::of(CoreSettings { run_ahead, ..settings() }, &weights);
            let stopping = Ask { ignore_eos: false, ..ask("stopping", &prompt, 12) };
            let numbers = [rig.arrive(stopping), rig.arrive(ask("ignoring", &prompt, 12))];
            rig.drain();
            assert_eq!(rig.tokens(numbers[0]), whole[..=end], "up to the end and no further");
            assert_eq!(rig.finished(numbers[0]).unwrap().0.completion_tokens as usize, end + 1);
            assert_eq!(rig.tokens(numbers[1]), whole);
            let ends = rig.log[&numbers[0]].iter().filter(|h| matches!(h, Happening::Finished { .. }));
            assert_eq!(ends.count(), 1);
        }
    }
    assert!(ended_late > 0, "no answer had anything before its end");
}

#[test]
fn every_request_of_a_long_mixed_run_is_answered_right() {
    // Short pools, both ways of scheduling, requests that come while others run, and some that go away.
    let weights = tiny();
    for run_ahead in [false, true] {
        let mut rig = Rig::alone(CoreSettings { blocks: 14, step_tokens: 40, run_ahead, ..settings() });
        let mut asked = Vec::new();
        for n in 0..30u32 {
            let prompt = prompt(n % 7, 5 + (n as usize * 37) % 120);
            let max_tokens = 1 + (n * 5) % 23;
            let number = rig.arrive(ask(&format!("r{n}"), &prompt, max_tokens));
            asked.push((number, prompt, max_tokens));
            for _ in 0..n % 5 {
                rig.turn();
            }
            if n % 6 == 5 {
                rig.core.abort(&id(&format!("r{}", n - 2)));
            }
        }
        rig.drain();
        let mut answered = 0;
        for (number, prompt, max_tokens) in asked {
            let expected = reference(&weights, &prompt, max_tokens);
            let got = rig.tokens(number);
            if rig.finished(number).is_some() {
                answered += 1;
                assert_eq!(got, expected);
            } else {
                assert!(rig.failed(number).is_some() && expected.starts_with(&got));
            }
        }
        assert!(answered >= 25, "{answered}");
        assert!(PLENTY > 14 && rig.core.stats().preempted > 0);
    }
}
