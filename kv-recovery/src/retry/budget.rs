//! A token bucket that is filled by time alone.

use std::time::Duration;

use kv_proto::Moment;

/// So many at once, and one more after each interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bucket {
    left: u32,
    /// Since when the next one has been coming. Without meaning while the bucket is full.
    since: Moment,
}

impl Bucket {
    pub(super) fn full(burst: u32, now: Moment) -> Self {
        Self { left: burst, since: now }
    }

    fn fill(&mut self, now: Moment, burst: u32, refill: Duration) {
        let step = refill.as_nanos().max(1);
        let steps = now.since(self.since).as_nanos() / step;
        let more = u32::try_from(steps).unwrap_or(u32::MAX);
        if more >= burst.saturating_sub(self.left) {
            *self = Self::full(burst, self.since.max(now));
        } else {
            self.left += more;
            // What has passed of the next interval is kept, so that asking often does not slow the filling.
            self.since = self.since + refill.saturating_mul(more);
        }
    }

    /// Whether one could be taken.
    pub(super) fn has(&mut self, now: Moment, burst: u32, refill: Duration) -> bool {
        self.fill(now, burst, refill);
        self.left > 0
    }

    /// Takes one that [`has`](Self::has) found.
    pub(super) fn take(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_one_for_each_interval() {
        let (burst, refill) = (2, Duration::from_secs(10));
        let at = |s| Moment::START + Duration::from_secs(s);
        let mut bucket = Bucket::full(burst, at(0));
        let mut taken = Vec::new();
        for second in 0..40 {
            while bucket.has(at(second), burst, refill) {
                bucket.take();
                taken.push(second);
            }
        }
        assert_eq!(taken, [0, 0, 10, 20, 30]);
        assert!(bucket.has(at(1000), burst, refill));
        bucket.take();
        bucket.take();
        assert!(!bucket.has(at(1000), burst, refill), "it never holds more than the burst");
        assert!(!bucket.has(at(5), burst, refill), "time that goes back fills nothing");
    }
}
