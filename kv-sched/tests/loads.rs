//! The consumer's policy from the load on: how it ends over all ranks, aborts, and workers that are late.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test that fails should do so loudly.

mod common;

use common::*;
use kv_proto::{LoadFailure, LoadStats, PullEnd, Rank};
use kv_sched::{ConsumerStats, Finish, HoldId, LoadResult, RequestEnd, SchedEvent, Scheduler, Verdict};

fn ended(result: LoadResult) -> SchedEvent {
    SchedEvent::LoadEnded { request: req("r"), result }
}

/// A failure of the load of 8 tokens that [`start_load`] began.
fn failure(reason: LoadFailure, detail: &str, hold: Option<HoldId>) -> SchedEvent {
    let detail = detail.to_owned();
    ended(LoadResult::Failed {
        reason,
        detail,
        invalid: vec![run(40, 2)],
        valid_tokens: 0,
        hold,
        others: vec![],
    })
}

fn silent(missing: &[u32]) -> SchedEvent {
    SchedEvent::WorkersSilent { hold: load_hold(1), missing: missing.iter().copied().map(Rank).collect() }
}

fn loading(ranks: u32) -> Scheduler {
    let mut s = scheduler(ranks);
    start_load(&mut s, 0, "r", 5, 8);
    s
}

fn finish(s: &mut Scheduler, now: u64) {
    let finish = s.request_finished(at(now), &req("r"), &complete(8, &[run(40, 2)]));
    assert_eq!(finish, Finish { verdict: Verdict::Free, params: None });
}

// H-18
#[test]
fn a_load_has_ended_well_when_every_rank_says_so() {
    let mut s = loading(2);
    s.take_report(at(1), load_report(1, 1, loaded(10)));
    assert_eq!((s.take_events(), s.holds()), (vec![], 1));
    s.take_report(at(2), load_report(0, 1, loaded(30)));
    let stats = LoadStats { bytes: 40, ranges: 2, read_us: 60, confirm_us: 90 };
    assert_eq!(s.take_events(), [ended(LoadResult::Loaded { tokens: 8, remote_tokens: 8, stats })]);
    let counted =
        ConsumerStats { loads: 1, loaded: 1, remote_tokens: 8, bytes: 40, ..ConsumerStats::default() };
    assert_eq!(s.consumer_stats(), &counted);
    finish(&mut s, 3);
    assert_forgotten(&s);
}

#[test]
fn a_load_behind_a_local_prefix_counts_only_what_it_brought() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 7);
    s.blocks_allocated(at(0), &req("r"), 0, 7, &[run(40, 2)]).unwrap();
    s.take_report(at(1), load_report(0, 1, loaded(0)));
    let mut t = scheduler(1);
    queue(&mut t, 0, "r", 5, 8);
    t.blocks_allocated(at(0), &req("r"), 4, 4, &[run(40, 2)]).unwrap();
    t.take_report(at(1), load_report(0, 1, loaded(0)));
    let brought = |s: &mut Scheduler| match s.take_events().remove(0) {
        SchedEvent::LoadEnded { result: LoadResult::Loaded { tokens, remote_tokens, .. }, .. } => {
            (tokens, remote_tokens)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!((brought(&mut s), brought(&mut t)), ((7, 7), (8, 4)));
}

// H-18, H-19, R013, R017
#[test]
fn p8_one_failed_rank_fails_the_load_after_all_have_reported() {
    for (first, second) in [(0, 1), (1, 0)] {
        let mut s = loading(2);
        s.take_report(at(1), load_report(first, 1, failed(LoadFailure::Lapsed)));
        assert_eq!((s.take_events(), s.holds()), (vec![], 1), "the other rank still writes");
        s.take_report(at(2), load_report(second, 1, loaded(10)));
        assert_eq!(s.take_events(), [failure(LoadFailure::Lapsed, "lapsed", None)]);
        assert_eq!(s.consumer_stats().failed, [(LoadFailure::Lapsed, 1)].into());
        assert_eq!(s.consumer_stats().loaded, 0);
    }
}

// H-18, R018, R085
#[test]
fn p8_a_failure_sticks() {
    let mut s = loading(2);
    s.take_report(at(1), load_report(0, 1, failed(LoadFailure::ReadFailed)));
    s.take_report(at(2), load_report(0, 1, loaded(10)));
    s.take_report(at(3), load_report(1, 1, loaded(10)));
    assert_eq!(s.take_events(), [failure(LoadFailure::ReadFailed, "read_failed", None)]);
    assert_eq!(s.consumer_stats().stray_ends, 1);
}

#[test]
fn when_several_ranks_fail_the_lowest_ones_reason_is_told() {
    let mut s = loading(2);
    s.take_report(at(1), load_report(1, 1, failed(LoadFailure::PeerLost)));
    s.take_report(at(1), load_report(0, 1, failed(LoadFailure::ConnectFailed)));
    let reason = failure(LoadFailure::ConnectFailed, "connect_failed", None);
    assert_eq!(s.take_events(), [reason]);
}

#[test]
fn p8_a_verified_prefix_stays_valid() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 8);
    s.blocks_allocated(at(0), &req("r"), 4, 4, &[run(40, 2)]).unwrap();
    s.take_report(at(1), load_report(0, 1, failed(LoadFailure::ReadFailed)));
    let detail = "read_failed".to_owned();
    let invalid = vec![list(&[41])];
    let result = LoadResult::Failed {
        reason: LoadFailure::ReadFailed,
        detail,
        invalid,
        valid_tokens: 4,
        hold: None,
        others: vec![],
    };
    assert_eq!(s.take_events(), [ended(result)]);
}

#[test]
fn r026_r028_unknown_and_repeated_ends_are_counted_and_do_nothing() {
    let mut s = loading(1);
    s.take_report(at(1), load_report(0, 9, loaded(1)));
    s.take_report(at(1), load_report(1, 1, loaded(1)));
    assert_eq!((s.take_events(), s.holds()), (vec![], 1));
    s.take_report(at(2), load_report(0, 1, loaded(1)));
    s.take_events();
    s.take_report(at(3), load_report(0, 1, failed(LoadFailure::Other)));
    assert_eq!(s.take_events(), []);
    assert_eq!(s.consumer_stats().stray_ends, 3);
}

#[test]
fn r087_one_report_with_many_ends_takes_each() {
    let mut s = scheduler(1);
    start_load(&mut s, 0, "a", 5, 8);
    start_load(&mut s, 0, "b", 6, 8);
    let mut report = load_report(0, 1, loaded(1));
    report.loads.push((kv_proto::LoadId(77), loaded(1)));
    report.loads.push((kv_proto::LoadId(2), failed(LoadFailure::PeerLost)));
    s.take_report(at(1), report);
    assert_eq!((s.take_events().len(), s.holds()), (2, 0));
}

#[test]
fn absurd_figures_of_a_worker_do_no_harm() {
    let most = LoadStats { bytes: u64::MAX, ranges: u64::MAX, read_us: u64::MAX, confirm_us: u64::MAX };
    let mut s = loading(2);
    s.take_report(at(1), load_report(0, 1, PullEnd::Loaded(most)));
    s.take_report(at(1), load_report(1, 1, PullEnd::Loaded(most)));
    assert_eq!(s.take_events(), [ended(LoadResult::Loaded { tokens: 8, remote_tokens: 8, stats: most })]);
}

// H-19
#[test]
fn r019_an_abort_while_loading_holds_the_blocks_until_every_rank_is_quiet() {
    let mut s = loading(2);
    let aborted = s.request_finished(at(1), &req("r"), &RequestEnd::Aborted);
    assert_eq!(aborted, Finish { verdict: Verdict::Hold(load_hold(1)), params: None });
    assert_eq!(s.planned(at(1)), consumer(&[cancel(1)]));
    s.take_report(at(2), load_report(0, 1, failed(LoadFailure::Cancelled)));
    assert_eq!((s.take_events(), s.holds()), (vec![], 1));
    s.take_report(at(3), load_report(1, 1, loaded(1)));
    assert_eq!(s.take_events(), [blocks_released(load_hold(1), "r", run(40, 2))], "once, and no LoadEnded");
    s.take_report(at(4), load_report(1, 1, loaded(1)));
    assert_eq!(s.take_events(), []);
    assert_forgotten(&s);
}

#[test]
fn r068_an_abort_that_comes_after_the_last_report_finds_the_blocks_free() {
    let mut s = loading(1);
    s.take_report(at(1), load_report(0, 1, loaded(1)));
    assert_eq!(s.request_finished(at(1), &req("r"), &RequestEnd::Aborted).verdict, Verdict::Free);
    assert!(!s.has_plan());
}

// H-19, R020
#[test]
fn p3_workers_that_stay_silent_about_an_aborted_load_are_told_and_the_blocks_stay_held() {
    let mut s = loading(2);
    let _ = s.request_finished(at(1), &req("r"), &RequestEnd::Aborted);
    s.planned(at(1));
    let overdue = 1 + LOAD_MS + GRACE_MS;
    s.time_passed(at(overdue - 1));
    assert_eq!(s.take_events(), []);
    s.time_passed(at(overdue));
    assert_eq!(s.take_events(), [silent(&[0, 1])]);
    s.time_passed(at(10 * overdue));
    assert_eq!((s.take_events(), s.holds(), s.next_deadline()), (vec![], 1, None));
    s.take_report(at(10 * overdue), load_report(0, 1, failed(LoadFailure::Cancelled)));
    s.take_report(at(10 * overdue), load_report(1, 1, failed(LoadFailure::Cancelled)));
    assert_eq!(s.take_events(), [blocks_released(load_hold(1), "r", run(40, 2))]);
    assert_forgotten(&s);
}

// H-20, R072
#[test]
fn p4_a_load_that_takes_too_long_is_cancelled_once() {
    let mut s = loading(1);
    assert!(s.planned(at(LOAD_MS - 1)).is_empty());
    assert_eq!(s.planned(at(LOAD_MS)), consumer(&[cancel(1)]));
    assert_eq!((s.take_events(), s.holds()), (vec![], 1), "the request waits for the word that it is quiet");
    assert!(s.planned(at(LOAD_MS + 1)).is_empty());
}

#[test]
fn a_late_load_that_is_cancelled_in_time_fails_with_its_workers_reason() {
    let mut s = loading(1);
    s.planned(at(LOAD_MS));
    s.take_report(at(LOAD_MS + 1), load_report(0, 1, failed(LoadFailure::Cancelled)));
    assert_eq!(s.take_events(), [failure(LoadFailure::Cancelled, "cancelled", None)]);
    finish(&mut s, LOAD_MS + 2);
    assert_forgotten(&s);
}

#[test]
fn a_load_that_was_confirmed_before_the_cancel_reached_it_is_good() {
    let mut s = loading(1);
    s.planned(at(LOAD_MS));
    s.take_report(at(LOAD_MS + 1), load_report(0, 1, loaded(0)));
    assert!(matches!(s.take_events()[..], [SchedEvent::LoadEnded { result: LoadResult::Loaded { .. }, .. }]));
}

// H-19, H-20, R025
#[test]
fn r012_ranks_that_never_report_end_the_wait_but_not_the_hold() {
    let mut s = loading(2);
    s.take_report(at(1), load_report(0, 1, loaded(1)));
    s.planned(at(LOAD_MS));
    s.time_passed(at(LOAD_MS + GRACE_MS - 1));
    assert_eq!(s.take_events(), []);
    s.time_passed(at(LOAD_MS + GRACE_MS));
    let detail = "no report from [Rank(1)]";
    let told = failure(LoadFailure::ReportMissing, detail, Some(load_hold(1)));
    assert_eq!(s.take_events(), [silent(&[1]), told]);
    assert_eq!((s.holds(), s.next_deadline()), (1, None));
    assert_eq!(s.consumer_stats().failed, [(LoadFailure::ReportMissing, 1)].into());
    finish(&mut s, 5_000);
    assert_eq!(s.holds(), 1, "the blocks are not the request's any more");
    s.take_report(at(9_000), load_report(1, 1, loaded(1)));
    assert_eq!(s.take_events(), [blocks_released(load_hold(1), "r", run(40, 2))]);
    assert_eq!((s.consumer_stats().loaded, s.consumer_stats().stray_ends), (0, 0));
    assert_forgotten(&s);
}

// H-16
#[test]
fn r015_a_report_that_has_arrived_counts_before_the_deadlines_that_have_passed() {
    let mut s = loading(1);
    s.take_report(at(10 * LOAD_MS), load_report(0, 1, loaded(0)));
    assert!(matches!(s.take_events()[..], [SchedEvent::LoadEnded { result: LoadResult::Loaded { .. }, .. }]));
    assert!(!s.has_plan());
}

// H-19
#[test]
fn an_abort_while_being_cancelled_for_lateness_holds_the_blocks() {
    let mut s = loading(1);
    s.planned(at(LOAD_MS));
    let aborted = s.request_finished(at(LOAD_MS + 1), &req("r"), &RequestEnd::Aborted);
    assert_eq!(aborted.verdict, Verdict::Hold(load_hold(1)));
    assert_eq!(s.planned(at(LOAD_MS + 1)), consumer(&[cancel(1)]));
    s.time_passed(at(LOAD_MS + GRACE_MS));
    assert_eq!(s.take_events(), [], "the first limit has been replaced");
    s.take_report(at(LOAD_MS + 600), load_report(0, 1, failed(LoadFailure::Cancelled)));
    assert_eq!(s.take_events(), [blocks_released(load_hold(1), "r", run(40, 2))]);
    assert_forgotten(&s);
}

fn kept(events: &[SchedEvent]) -> (u32, Vec<kv_proto::BlockList>) {
    match events {
        [
            SchedEvent::LoadEnded {
                result: LoadResult::Failed { valid_tokens, invalid, hold: None, .. },
                ..
            },
        ] => (*valid_tokens, invalid.clone()),
        other => panic!("{other:?}"),
    }
}

// H-27
#[test]
fn p8_what_every_rank_has_verified_is_kept_and_no_more() {
    let lost = LoadFailure::PeerLost;
    for (ends, tokens, invalid) in [
        ([failed_after(lost, 2), failed_after(lost, 1)], 4, run(41, 2)),
        ([failed_after(lost, 2), loaded(1)], 8, run(42, 1)),
        ([loaded(1), failed_after(lost, 0)], 0, run(40, 3)),
        // The last block is filled in part, and a worker's figure may be anything.
        ([failed_after(lost, 3), failed_after(lost, u32::MAX)], 10, run(43, 0)),
    ] {
        let mut s = scheduler(2);
        start_load(&mut s, 0, "r", 5, 10);
        for (rank, end) in (0..).zip(ends) {
            s.take_report(at(1), load_report(rank, 1, end));
        }
        assert_eq!(kept(&s.take_events()), (tokens, vec![invalid]));
        assert_eq!(s.consumer_stats().kept_tokens, u64::from(tokens));
    }
}

// H-11, H-27
#[test]
fn p8_verified_blocks_count_from_where_the_load_begins() {
    let mut s = scheduler(1);
    queue(&mut s, 0, "r", 5, 12);
    s.blocks_allocated(at(0), &req("r"), 4, 8, &[run(40, 3)]).unwrap();
    s.planned(at(0));
    s.take_report(at(1), load_report(0, 1, failed_after(LoadFailure::ReadFailed, 1)));
    assert_eq!(kept(&s.take_events()), (8, vec![run(42, 1)]));
}
