//! Twelve transports that each break one rule of the contract: the suite catches each by the group of its own rule,
//! and by no other. And one that breaks none passes. Others break less than a rule: the case that they are for sees it. On
//! memory of a device that does not wait for its copies, any is caught.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod hasty;
mod offenders;
mod particular;
#[path = "../../examples/custom_transport/transport.rs"]
mod transport;

use std::collections::BTreeSet;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kv_testkit::conformance::device::{OnDevice, host_device};
use kv_testkit::conformance::tcp::TcpHarness;
use kv_testkit::conformance::{
    self, CaseReport, ChildPeer, Harness, HarnessError, Link, Remote, Rule, Unavailable, Verdict,
};
use kv_transport::{Address, Transport};
use libtest_mimic::{Arguments, Failed, Trial};

use offenders::Offender;
use particular::{Duplicates, Failing, NoHost};

/// What is wrong with a transport.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    Breaks(Rule),
    Duplicates,
    Failing,
    NoHost,
}

/// Tries an offender, with all that the harness of the transport behind it has.
#[derive(Debug, Clone, Copy)]
struct Broken(Fault);

impl Harness for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        let inner = TcpHarness::ONE.endpoint()?;
        Ok(match self.0 {
            Fault::None => inner,
            Fault::Breaks(rule) => Offender::before(inner, rule),
            Fault::Duplicates => Duplicates::before(inner),
            Fault::Failing => Failing::before(inner),
            Fault::NoHost => NoHost::before(inner),
        })
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        ChildPeer::start()
    }

    fn link(&self, to: &Address) -> Result<Box<dyn Link>, Unavailable> {
        TcpHarness::ONE.link(to)
    }

    fn black_hole(&self) -> Result<Box<dyn Link>, Unavailable> {
        TcpHarness::ONE.black_hole()
    }

    fn harmless_bytes(&self, address: &Address) -> Range<usize> {
        TcpHarness::ONE.harmless_bytes(address)
    }

    fn silence_limit(&self) -> Option<Duration> {
        TcpHarness::ONE.silence_limit()
    }

    /// What an offender never tells is waited for in vain, so this is short.
    fn patience(&self) -> Duration {
        Duration::from_secs(4)
    }
}

/// The rules by whose groups something was caught.
fn caught(reports: &[CaseReport]) -> BTreeSet<Rule> {
    reports.iter().filter(|report| report.caught()).map(|report| report.rule).collect()
}

fn describe(reports: &[CaseReport]) -> String {
    let told = reports.iter().filter(|report| !matches!(report.verdict, Verdict::Kept));
    told.map(|report| format!("\n  {}: {:?}", report.name, report.verdict)).collect()
}

fn is_caught_by_its_own_group_alone(rule: Rule) -> Result<(), Failed> {
    let harness: &'static Broken = Box::leak(Box::new(Broken(Fault::Breaks(rule))));
    // Most of the time nothing is waited for but limits.
    let reports = conformance::report(harness, &Rule::ALL, 8);
    let groups = caught(&reports);
    if groups != BTreeSet::from([rule]) {
        let groups: Vec<_> = groups.iter().map(Rule::to_string).collect();
        return Err(format!("what breaks {rule} is caught by {groups:?}:{}", describe(&reports)).into());
    }
    // A harness that lets nothing be tried would be no proof.
    let kept = reports.iter().filter(|report| report.verdict == Verdict::Kept).count();
    if kept < 40 {
        return Err(format!("only {kept} cases could be judged:{}", describe(&reports)).into());
    }
    Ok(())
}

fn what_breaks_nothing_is_not_caught() -> Result<(), Failed> {
    let reports = conformance::report(&Broken(Fault::None), &Rule::ALL, 8);
    let fine = |verdict: &Verdict| matches!(verdict, Verdict::Kept | Verdict::Skipped { .. });
    if reports.iter().all(|report| fine(&report.verdict)) { Ok(()) } else { Err(describe(&reports).into()) }
}

/// What a trial runs.
type Tried = fn() -> Result<(), Failed>;

/// Tries the cases of one rule, and judges the verdicts of some of them by name.
fn verdicts(
    harness: &'static dyn Harness,
    rule: Rule,
    names: &[&str],
    right: fn(&Verdict) -> bool,
) -> Result<(), Failed> {
    let reports = conformance::report(harness, &[rule], 8);
    for name in names {
        let report = reports.iter().find(|report| report.name == *name);
        let report = report.ok_or_else(|| Failed::from(format!("there is no case {name}")))?;
        if !right(&report.verdict) {
            return Err(format!("{name}: {:?}{}", report.verdict, describe(&reports)).into());
        }
    }
    Ok(())
}

fn an_id_that_is_taken_twice_is_caught() -> Result<(), Failed> {
    let caught = |verdict: &Verdict| matches!(verdict, Verdict::Broken { .. });
    verdicts(&Broken(Fault::Duplicates), Rule::T1, &["t1_an_id_of_a_held_read_is_refused"], caught)?;
    // Without a peer that can be held it depends on whether a read is over first; it must never pass.
    let not_kept = |verdict: &Verdict| matches!(verdict, Verdict::Broken { .. } | Verdict::Skipped { .. });
    verdicts(&Broken(Fault::Duplicates), Rule::T1, &["t1_an_id_in_flight_is_refused"], not_kept)
}

fn reads_that_all_fail_prove_nothing_of_successful_ones() -> Result<(), Failed> {
    let names = ["t3_successful_read_writes_nothing_later"];
    let not_judged = |verdict: &Verdict| matches!(verdict, Verdict::NotJudged { rule: Rule::T2, .. });
    verdicts(&Broken(Fault::Failing), Rule::T3, &names, not_judged)
}

fn host_memory_that_is_claimed_and_refused_is_caught() -> Result<(), Failed> {
    static HARNESS: OnDevice<Broken> = OnDevice::of_host_memory(Broken(Fault::NoHost), "no host");
    host_device()?;
    let caught = |verdict: &Verdict| matches!(verdict, Verdict::Broken { .. });
    verdicts(&HARNESS, Rule::T12, &["t12_host_memory_works_as_claimed"], caught)
}

/// Reads are over when the call returns.
struct AtOnce;

impl Harness for AtOnce {
    fn name(&self) -> &'static str {
        "at once"
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        Ok(Arc::new(transport::Inproc::new()?))
    }
}

fn reads_that_are_never_in_flight_prove_nothing() -> Result<(), Failed> {
    let skipped = |verdict: &Verdict| matches!(verdict, Verdict::Skipped { .. });
    let names = [
        "t3_cancelled_read_writes_nothing_later",
        "t3_the_next_read_into_a_cancelled_ones_place_is_whole",
        "t3_disconnected_read_writes_nothing_later",
        "t3_read_from_a_peer_that_shuts_down_writes_nothing_later",
    ];
    verdicts(&AtOnce, Rule::T3, &names, skipped)?;
    verdicts(&AtOnce, Rule::T1, &["t1_an_id_in_flight_is_refused"], skipped)
}

/// Completions that are told before the last copy into a device are seen by the groups of T-2 and T-3.
fn what_completes_before_its_copies_is_caught() -> Result<(), Failed> {
    static HASTY: OnDevice<TcpHarness> =
        OnDevice { inner: TcpHarness::ONE, name: "hasty", memory: hasty::memory, missing: || None };
    let reports = conformance::report(&HASTY, &[Rule::T2, Rule::T3], 4);
    if caught(&reports) == BTreeSet::from([Rule::T2, Rule::T3]) {
        return Ok(());
    }
    Err(format!("not caught by both:{}", describe(&reports)).into())
}

fn main() -> ExitCode {
    // The peer in another process keeps the rules: one offender at a time is enough.
    if let Some(code) = conformance::serve_if_asked(&Broken(Fault::None)) {
        return code;
    }
    let mut arguments = Arguments::from_args();
    // Cases run beside each other; offenders do not, because some cases count what the process has.
    arguments.test_threads = Some(1);
    let mut trials: Vec<Trial> = Rule::ALL
        .into_iter()
        .map(|rule| {
            let name =
                format!("what_breaks_{}_is_caught_by_its_own_group_alone", rule.to_string().replace('-', ""));
            Trial::test(name.to_lowercase(), move || is_caught_by_its_own_group_alone(rule))
        })
        .collect();
    trials.push(Trial::test(
        "what_completes_before_its_copies_is_caught",
        what_completes_before_its_copies_is_caught,
    ));
    trials.push(Trial::test("what_breaks_nothing_is_not_caught", what_breaks_nothing_is_not_caught));
    let particular: [(&str, Tried); 4] = [
        ("an_id_that_is_taken_twice_is_caught", an_id_that_is_taken_twice_is_caught),
        (
            "reads_that_all_fail_prove_nothing_of_successful_ones",
            reads_that_all_fail_prove_nothing_of_successful_ones,
        ),
        (
            "host_memory_that_is_claimed_and_refused_is_caught",
            host_memory_that_is_claimed_and_refused_is_caught,
        ),
        ("reads_that_are_never_in_flight_prove_nothing", reads_that_are_never_in_flight_prove_nothing),
    ];
    trials.extend(particular.map(|(name, test)| Trial::test(name, test)));
    libtest_mimic::run(&arguments, trials).exit_code()
}
