//! Conversations over real processes: D keeps an answer, and with the next turn P reads it back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod common;

use common::proc::{children, is_alive};
use common::{Server, block_on, my_turn, prompt, reference, tokens};
use serde_json::{Value, json};

/// P, D and the router between them.
struct Stage {
    p: Server,
    d: Server,
    router: Server,
}

impl Stage {
    fn new(p: &[&str], d: &[&str]) -> Self {
        let (p, d) = (Server::connected("p", p), Server::connected("d", d));
        let router = Server::route(&["--prefill", &p.url, "--decode", &d.url]);
        Self { p, d, router }
    }

    /// One turn, whose answer is to be kept; gives the answer, and where it is kept.
    async fn turn(&self, id: &str, history: &[u32], earlier: &Value) -> (Vec<u32>, Value) {
        let mut params = earlier.clone();
        params["do_remote_decode"] = json!(true);
        let (status, answer) = self.router.ask(id, history, ANSWER, &params).await;
        assert_eq!(status, 200, "{answer}");
        (tokens(&answer), answer["kv_transfer_params"].clone())
    }

    /// Tokens that P has read back so far.
    async fn read_back(&self) -> u64 {
        self.p.stats().await["connector"]["loads"]["remote_tokens"].as_u64().unwrap()
    }
}

/// Tokens of an answer.
const ANSWER: u32 = 21;
/// What a router made of a history, and how many of its tokens are still those that D holds.
type Change = (&'static str, fn(&mut Vec<u32>), u64);

/// What is the start of a conversation.
fn nothing() -> Value {
    json!({})
}

/// A history and what is said next.
fn and(history: &[u32], answer: &[u32], words: u32) -> Vec<u32> {
    [history, answer, &prompt(words, 9 + words as usize)].concat()
}

// H-32
#[test]
fn each_turn_is_read_back_by_engines_of_unequal_shapes_and_answered_as_if_alone() {
    let _turn = my_turn();
    let shapes: [(&[&str], &[&str]); 3] = [
        (&["--ranks", "2", "--block-tokens", "32"], &["--block-tokens", "16"]),
        (&["--block-tokens", "16"], &["--ranks", "2", "--block-tokens", "32", "--async-schedule"]),
        (&["--cache-layout", "nhd"], &["--cache-layout", "hnd-apart", "--block-tokens", "24"]),
    ];
    for (p, d) in shapes {
        let stage = Stage::new(p, d);
        let block = |arguments: &[&str]| {
            let at = arguments.iter().position(|a| *a == "--block-tokens");
            at.map_or(16, |at| arguments[at + 1].parse::<u64>().unwrap())
        };
        block_on(async {
            let (mut history, mut earlier, mut read) = (prompt(3, 70), nothing(), 0);
            for turn in 1..=3 {
                let had = stage.read_back().await;
                let (answer, kept) = stage.turn(&format!("turn-{turn}"), &history, &earlier).await;
                assert_eq!(answer, reference(&history, ANSWER), "turn {turn} of {p:?} and {d:?}");
                assert_eq!(stage.read_back().await - had, read, "turn {turn} of {p:?} and {d:?}");
                assert_eq!(kept["remote_num_tokens"], history.len() as u64 + u64::from(ANSWER) - 1);
                // P's cache has the full blocks of what it computed; all that D holds beyond is read.
                read =
                    history.len() as u64 + u64::from(ANSWER) - 1 - history.len() as u64 / block(p) * block(p);
                history = and(&history, &answer, turn);
                earlier = kept;
            }
            let leases = stage.d.settled().await["connector"]["leases"].clone();
            // Nobody came for the last answer.
            assert_eq!((&leases["confirmed"], &leases["expired"]), (&json!(2), &json!(1)), "{leases}");
            let leases = stage.p.settled().await["connector"]["leases"].clone();
            assert_eq!(leases["confirmed"], 3, "{leases}");
        });
    }
}

// H-32
#[test]
fn what_was_read_back_is_what_the_next_answer_is_made_of() {
    let _turn = my_turn();
    // The control: P claims its reads without doing them.
    let stage = Stage::new(&["--unmoved"], &[]);
    block_on(async {
        let history = prompt(3, 70);
        let (answer, kept) = stage.turn("first", &history, &nothing()).await;
        assert_eq!(answer, reference(&history, ANSWER));
        let history = and(&history, &answer, 1);
        let (answer, _) = stage.turn("second", &history, &kept).await;
        assert_ne!(answer, reference(&history, ANSWER));
    });
}

// H-32, H-11
#[test]
fn of_a_history_that_a_router_changed_only_the_common_prefix_is_read_back() {
    let _turn = my_turn();
    let stage = Stage::new(&[], &[]);
    block_on(async {
        let changes: [Change; 5] = [
            // Of 65 + 20 tokens P's cache has 64.
            ("nothing", |_| {}, 85),
            ("an edited answer", |h| h[82] = 77, 80),
            ("a token more", |h| h.insert(70, 77), 64),
            (
                "a token less",
                |h| {
                    let rest = h.split_off(82);
                    h.truncate(81);
                    h.extend(rest);
                },
                80,
            ),
            ("the prompt", |h| h[20] = 77, 16),
        ];
        for (number, (what, change, common)) in changes.into_iter().enumerate() {
            let first = prompt(number as u32, 65);
            let (answer, kept) = stage.turn(&format!("{number}-1"), &first, &nothing()).await;
            let mut history = and(&first, &answer, 2);
            change(&mut history);
            let had = stage.read_back().await;
            let (answer, _) = stage.turn(&format!("{number}-2"), &history, &kept).await;
            assert_eq!(answer, reference(&history, ANSWER), "{what}");
            // What P has itself is not read.
            let cached = if common < 64 { common } else { 64 };
            assert_eq!(stage.read_back().await - had, common - cached, "{what}");
        }
        // Each was read or given back; only the five last answers had to wait for their time.
        let leases = stage.d.settled().await["connector"]["leases"].clone();
        assert_eq!((&leases["granted"], &leases["expired"]), (&json!(10), &json!(5)), "{leases}");
        assert_eq!((&leases["confirmed"], &leases["released"]), (&json!(3), &json!(2)), "{leases}");
    });
}

// H-32
#[test]
fn a_next_turn_may_go_to_another_prefill_engine_which_reads_all_of_it() {
    let _turn = my_turn();
    let stage = Stage::new(&[], &[]);
    let other = Server::connected("p-2", &["--ranks", "2"]);
    let elsewhere = Server::route(&["--prefill", &other.url, "--decode", &stage.d.url]);
    block_on(async {
        let history = prompt(5, 50);
        let (answer, mut kept) = stage.turn("first", &history, &nothing()).await;
        let history = and(&history, &answer, 1);
        // The client's last turn: nothing is to be kept of it, but the router has P read all the same.
        kept["do_remote_decode"] = json!(false);
        let (status, answer) = elsewhere.ask("second", &history, ANSWER, &kept).await;
        assert_eq!((status, tokens(&answer)), (200, reference(&history, ANSWER)), "{answer}");
        assert!(answer["kv_transfer_params"].is_null(), "{answer}");
        assert_eq!(other.settled().await["connector"]["loads"]["remote_tokens"], 70);
        let leases = stage.d.settled().await["connector"]["leases"].clone();
        assert_eq!((&leases["granted"], &leases["confirmed"]), (&json!(1), &json!(1)), "{leases}");
    });
}

// H-32, P8
#[test]
fn p8_a_decode_engine_that_died_between_two_turns_costs_the_computation_of_what_it_held() {
    let _turn = my_turn();
    let mut stage = Stage::new(&[], &[]);
    block_on(async {
        let history = prompt(7, 60);
        let (answer, kept) = stage.turn("first", &history, &nothing()).await;
        let workers = children(stage.d.child.id());
        stage.d.child.kill().unwrap();
        stage.d.child.wait().unwrap();
        while workers.iter().any(|pid| is_alive(*pid)) {}
        stage.d = Server::connected("d", &[]);
        stage.router = Server::route(&["--prefill", &stage.p.url, "--decode", &stage.d.url]);
        let history = and(&history, &answer, 1);
        let (answer, kept) = stage.turn("second", &history, &kept).await;
        assert_eq!(answer, reference(&history, ANSWER));
        let stats = stage.p.stats().await;
        assert_eq!(stats["recovered"]["tokens_recomputed"], 80 - 48, "{stats}");
        // With the D of now it goes on as before.
        let history = and(&history, &answer, 2);
        let (answer, _) = stage.turn("third", &history, &kept).await;
        assert_eq!(answer, reference(&history, ANSWER));
        assert_eq!(stage.p.settled().await["connector"]["loads"]["loaded"], 1);
    });
}

// H-32
#[test]
fn kept_answers_are_taken_back_when_requests_wait_for_room() {
    let _turn = my_turn();
    // Room for three of them.
    let stage = Stage::new(&[], &["--kv-blocks", "16"]);
    block_on(async {
        let started = std::time::Instant::now();
        let mut kept = Vec::new();
        for number in 0..8 {
            let history = prompt(number, 60);
            let (answer, params) = stage.turn(&format!("{number}-1"), &history, &nothing()).await;
            assert_eq!(answer, reference(&history, ANSWER));
            kept.push((history, answer, params));
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(4), "they waited for a lease's end");
        let (history, answer, params) = kept.remove(0);
        let history = and(&history, &answer, 1);
        let (answer, _) = stage.turn("0-2", &history, &params).await;
        assert_eq!(answer, reference(&history, ANSWER), "what was taken back is computed");
        let leases = stage.d.settled().await["connector"]["leases"].clone();
        assert!(leases["revoked"].as_u64() >= Some(5), "{leases}");
    });
}
