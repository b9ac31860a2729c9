//! Runs cases: each with its own limit, so that one that hangs or panics fails alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use super::bench::Bench;
use super::case::{Case, CaseReport, End, Rule, Verdict};
use super::{Harness, child};

/// How long a case may take, besides its repetitions.
const LIMIT: Duration = Duration::from_secs(60);
/// What one repetition may add to it.
const LIMIT_PER_REPEAT: Duration = Duration::from_millis(100);
/// Repetitions of the cases that hunt for races, unless `KV_CONFORMANCE_REPEATS` says otherwise.
const REPEATS: u32 = 40;

/// Held by all who run a case; alone by those who count what the process has.
static ALONE: RwLock<()> = RwLock::new(());

/// The `main` of a test without libtest's harness: tries every case and says how it went, as `cargo test` and
/// `cargo nextest` expect it. It honours filter words, `--exact`, `--skip`, `--list`, `--test-threads` and the like.
///
/// Call it first of all in `main`: a [`ChildPeer`](super::ChildPeer) is this same program, started again.
pub fn main(harness: &'static dyn Harness) -> ExitCode {
    if let Some(code) = child::serve_if_asked(harness) {
        return code;
    }
    let arguments = Arguments::from_args();
    let all = super::all();
    let everything = arguments.filter.is_none()
        && arguments.skip.is_empty()
        && !(arguments.ignored || arguments.list || arguments.exact);
    let missing = harness.missing();
    let trials = all.into_iter().map(|case| {
        let missing = missing.clone();
        Trial::ignorable_test(case.name, move || trial(&case, harness, missing)).with_kind(harness.name())
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    if everything && missing.is_none() && conclusion.num_passed + conclusion.num_failed == 0 {
        // A suite that tried nothing must not look like one that found nothing.
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

fn trial(case: &Case, harness: &'static dyn Harness, missing: Option<String>) -> Result<Completion, Failed> {
    if let Some(reason) = missing {
        return Ok(Completion::ignored_with(reason));
    }
    match judge(case, harness) {
        Verdict::Kept => Ok(Completion::Completed),
        Verdict::Skipped { reason } => Ok(Completion::ignored_with(reason)),
        Verdict::Broken { what } => Err(format!("{} is broken: {what}", case.rule).into()),
        Verdict::NotJudged { rule, what } => {
            Err(format!("{} could not be judged, {rule} is broken: {what}", case.rule).into())
        }
        Verdict::Hung { limit } => Err(format!("hangs: no end within {limit:?}").into()),
    }
}

/// Tries the cases of some rules, `threads` at a time, and reports on each. For those who test the suite itself, or
/// want its verdicts in a form of their own.
pub fn report(harness: &'static dyn Harness, rules: &[Rule], threads: usize) -> Vec<CaseReport> {
    let cases: Vec<Case> = super::all().into_iter().filter(|case| rules.contains(&case.rule)).collect();
    let next = Mutex::new(cases.iter().enumerate());
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let taken = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((index, case)) = taken else { return };
                    let verdict = match harness.missing() {
                        Some(reason) => Verdict::Skipped { reason },
                        None => judge(case, harness),
                    };
                    let report = CaseReport { rule: case.rule, name: case.name, verdict };
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((index, report));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, report)| report).collect()
}

/// Tries one case, for as long as a case may take.
fn judge(case: &Case, harness: &'static dyn Harness) -> Verdict {
    let repeats = repeats();
    judge_within(case, harness, repeats, LIMIT + LIMIT_PER_REPEAT * repeats)
}

/// Tries one case, on a thread of its own that is left behind if it hangs.
fn judge_within(case: &Case, harness: &'static dyn Harness, repeats: u32, limit: Duration) -> Verdict {
    let (_one, _many) = if case.alone {
        (Some(ALONE.write().unwrap_or_else(PoisonError::into_inner)), None)
    } else {
        (None, Some(ALONE.read().unwrap_or_else(PoisonError::into_inner)))
    };
    let (done, end) = channel();
    let case = *case;
    let thread = std::thread::Builder::new().name(case.name.into()).spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| match Bench::new(harness, repeats) {
            Ok(bench) => (case.run)(&bench),
            Err(end) => Err(end),
        }));
        done.send(outcome).ok();
    });
    let thread = match thread {
        Ok(thread) => thread,
        Err(error) => return Verdict::NotJudged { rule: case.rule, what: format!("no thread: {error}") },
    };
    let outcome = match end.recv_timeout(limit) {
        Err(RecvTimeoutError::Timeout) => return Verdict::Hung { limit },
        outcome => outcome,
    };
    thread.join().ok();
    match outcome {
        Ok(Ok(Ok(()))) => Verdict::Kept,
        Ok(Ok(Err(End::Cannot(reason)))) => Verdict::Skipped { reason },
        Ok(Ok(Err(End::Broken { rule, what }))) if rule == case.rule => Verdict::Broken { what },
        Ok(Ok(Err(End::Broken { rule, what }))) => Verdict::NotJudged { rule, what },
        Ok(Err(panic)) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
            Verdict::Broken { what: format!("panicked: {text}") }
        }
        Err(_) => Verdict::Broken { what: "ended without a word".into() },
    }
}

fn repeats() -> u32 {
    let asked = std::env::var("KV_CONFORMANCE_REPEATS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(REPEATS).max(1)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kv_transport::Transport;

    use super::*;
    use crate::conformance::HarnessError;
    use crate::conformance::bench::range;
    use crate::conformance::case::{Outcome, broken};

    /// Nothing can be made of it.
    struct Nothing(Option<&'static str>);

    impl Harness for Nothing {
        fn name(&self) -> &'static str {
            "nothing"
        }

        fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
            Err("no endpoint".into())
        }

        fn missing(&self) -> Option<String> {
            self.0.map(str::to_owned)
        }
    }

    fn judged(rule: Rule, run: fn(&Bench) -> Outcome) -> Verdict {
        let case = Case { rule, name: "case", alone: false, run };
        judge_within(&case, &Nothing(None), 1, Duration::from_millis(300))
    }

    #[test]
    fn what_hangs_or_panics_fails_alone() {
        let hung = judged(Rule::T3, |_| {
            loop {
                std::thread::park();
            }
        });
        assert_eq!(hung, Verdict::Hung { limit: Duration::from_millis(300) });
        let panicked = judged(Rule::T3, |_| {
            let none: Vec<u8> = vec![];
            assert_eq!(range(0, 0, 1).len, u64::from(none[0]));
            Ok(())
        });
        assert!(
            matches!(panicked, Verdict::Broken { ref what } if what.contains("panicked")),
            "{panicked:?}"
        );
        assert_eq!(judged(Rule::T3, |_| Ok(())), Verdict::Kept);
    }

    #[test]
    fn a_broken_rule_is_charged_to_itself() {
        let verdict = judged(Rule::T3, |_| Err(broken!(T3, "seen")));
        assert_eq!(verdict, Verdict::Broken { what: "seen".into() });
        let verdict = judged(Rule::T3, |_| Err(broken!(T7, "seen")));
        assert_eq!(verdict, Verdict::NotJudged { rule: Rule::T7, what: "seen".into() });
        let verdict = judged(Rule::T3, |_| Err(End::Cannot("why".into())));
        assert_eq!(verdict, Verdict::Skipped { reason: "why".into() });
    }

    #[test]
    fn a_transport_that_is_missing_is_skipped_and_one_that_fails_is_not() {
        let skipped = Verdict::Skipped { reason: "no library".into() };
        let reports = report(&Nothing(Some("no library")), &Rule::ALL, 2);
        assert!(reports.len() > 90 && reports.iter().all(|report| report.verdict == skipped));
        let reports = report(&Nothing(None), &[Rule::T2, Rule::T11], 2);
        let skipped =
            reports.iter().filter(|report| matches!(report.verdict, Verdict::Skipped { .. })).count();
        let failed =
            reports.iter().filter(|report| matches!(report.verdict, Verdict::NotJudged { .. })).count();
        // Those that want a peer to stop or to kill ask for that first.
        assert_eq!((skipped, failed), (3, reports.len() - 3), "{reports:#?}");
    }

    #[test]
    fn every_case_is_named_after_its_rule_and_every_rule_has_cases() {
        let all = crate::conformance::all();
        for case in &all {
            let prefix = format!("{}_", case.rule.to_string().replace('-', "").to_lowercase());
            assert!(case.name.starts_with(&prefix), "{}", case.name);
        }
        for rule in Rule::ALL {
            assert!(all.iter().filter(|case| case.rule == rule).count() >= 6, "{rule}");
        }
        let names: std::collections::BTreeSet<_> = all.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), all.len());
    }
}
