//! Twelve transports that each break one rule of the contract: the suite catches each by the group of its own rule,
//! and by no other. And one that breaks none passes. On memory of a device that does not wait for its copies, any is caught.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by panicking.

mod hasty;
mod offenders;

use std::collections::BTreeSet;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kv_testkit::conformance::device::OnDevice;
use kv_testkit::conformance::tcp::TcpHarness;
use kv_testkit::conformance::{
    self, CaseReport, ChildPeer, Harness, HarnessError, Link, Remote, Rule, Unavailable, Verdict,
};
use kv_transport::{Address, Transport};
use libtest_mimic::{Arguments, Failed, Trial};

use offenders::Offender;

/// Tries an offender, with all that the harness of the transport behind it has.
#[derive(Debug, Clone, Copy)]
struct Broken(Option<Rule>);

impl Harness for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        let inner = TcpHarness.endpoint()?;
        Ok(match self.0 {
            Some(rule) => Offender::before(inner, rule),
            None => inner,
        })
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        ChildPeer::start()
    }

    fn link(&self, to: &Address) -> Result<Box<dyn Link>, Unavailable> {
        TcpHarness.link(to)
    }

    fn black_hole(&self) -> Result<Box<dyn Link>, Unavailable> {
        TcpHarness.black_hole()
    }

    fn harmless_bytes(&self, address: &Address) -> Range<usize> {
        TcpHarness.harmless_bytes(address)
    }

    fn silence_limit(&self) -> Option<Duration> {
        TcpHarness.silence_limit()
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
    let harness: &'static Broken = Box::leak(Box::new(Broken(Some(rule))));
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
    let reports = conformance::report(&Broken(None), &Rule::ALL, 8);
    let fine = |verdict: &Verdict| matches!(verdict, Verdict::Kept | Verdict::Skipped { .. });
    if reports.iter().all(|report| fine(&report.verdict)) { Ok(()) } else { Err(describe(&reports).into()) }
}

/// Completions that are told before the last copy into a device are seen by the groups of T-2 and T-3.
fn what_completes_before_its_copies_is_caught() -> Result<(), Failed> {
    static HASTY: OnDevice<TcpHarness> =
        OnDevice { inner: TcpHarness, name: "hasty", memory: hasty::memory, missing: || None };
    let reports = conformance::report(&HASTY, &[Rule::T2, Rule::T3], 4);
    if caught(&reports) == BTreeSet::from([Rule::T2, Rule::T3]) {
        return Ok(());
    }
    Err(format!("not caught by both:{}", describe(&reports)).into())
}

fn main() -> ExitCode {
    // The peer in another process keeps the rules: one offender at a time is enough.
    if let Some(code) = conformance::serve_if_asked(&Broken(None)) {
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
    libtest_mimic::run(&arguments, trials).exit_code()
}
