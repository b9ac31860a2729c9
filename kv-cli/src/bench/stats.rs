//! Medians and the like, and what a process has used.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Bytes of a GB here: figures are decimal, as those of links are.
pub(super) const GB: f64 = 1e9;

/// A figure over the rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Of nothing there is no figure.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        Some(Self {
            median: quantile(values, 0.5)?,
            min: quantile(values, 0.0)?,
            max: quantile(values, 1.0)?,
        })
    }
}

/// The value below which a share of the values lies, between neighbours in proportion.
pub(super) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len().checked_sub(1)?) as f64 * share.clamp(0.0, 1.0);
    let low = sorted.get(place.floor() as usize)?;
    let high = sorted.get(place.ceil() as usize)?;
    Some(low + (high - low) * place.fract())
}

/// Middle value; zero of nothing.
pub(super) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5).unwrap_or(0.0)
}

/// CPU seconds of this process so far: user and system, all threads.
pub(super) fn own_cpu_s() -> f64 {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
}

/// Largest resident memory of this process since [`forget_own_peak`], in bytes; zero where the system does not tell.
pub(super) fn own_peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let kib = line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0);
    kib.saturating_mul(1024)
}

/// Lets [`own_peak_bytes`] count from now on. Whether the system can do that; if not, it counts since the start.
pub(super) fn forget_own_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// CPU seconds that the whole machine was busy so far; `None` where the system does not tell.
pub(super) fn machine_busy_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    busy_ticks(text.lines().next()?)
        .map(|ticks| ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// User, nice, system, interrupts: what is neither idle nor waiting.
fn busy_ticks(line: &str) -> Option<u64> {
    let fields: Vec<u64> =
        line.strip_prefix("cpu ")?.split_whitespace().map_while(|f| f.parse().ok()).collect();
    [0, 1, 2, 5, 6].into_iter().map(|index| fields.get(index)).sum::<Option<u64>>()
}

/// Seconds since `from`, as a number.
pub(super) fn seconds(span: Duration) -> f64 {
    span.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(quantile(&values, 0.5), Some(2.5));
        assert_eq!(quantile(&values, 0.99), Some(3.0 + 0.97));
        assert_eq!(Spread::of(&values), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn idle_and_waiting_time_is_not_busy_time() {
        assert_eq!(busy_ticks("cpu  1 2 3 100 100 4 5 100 0 0"), Some(15));
        assert_eq!(busy_ticks("cpu  1 2"), None);
        assert_eq!(busy_ticks("intr 5"), None);
    }

    #[test]
    fn a_peak_that_was_forgotten_does_not_come_back() {
        const BYTES: usize = 64 << 20;
        drop(std::hint::black_box(vec![1u8; BYTES]));
        let before = own_peak_bytes();
        let forgotten = forget_own_peak();
        let after = own_peak_bytes();
        assert!(before > BYTES as u64 && after > 0, "{before}, {after}");
        assert_eq!(forgotten, after < before - BYTES as u64 / 2, "{before}, {after}");
    }

    #[test]
    fn a_process_that_works_has_used_something() {
        let before = own_cpu_s();
        let mut sum = 0u64;
        while own_cpu_s() <= before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(own_peak_bytes() > 0);
    }
}
