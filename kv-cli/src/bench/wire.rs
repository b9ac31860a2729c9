//! What the bench and its two sides say to each other: a question is a JSON object on a line, an answer the same behind
//! a mark.

use std::time::Duration;

use kv_connector::Config;
use serde::{Deserialize, Serialize};

use super::shape::Shape;

/// Stands before an answer: a library that a transport uses may print to standard output too, as UCX does.
pub(super) const MARK: &str = "@@ ";

/// No answer takes longer than this, besides the time that was asked for.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// What a side is to be.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) config: Config,
    pub(super) pool_bytes: u64,
    pub(super) huge_pages: bool,
    /// Whether a producer's pool is memory that other processes can map.
    pub(super) shared_memory: bool,
    pub(super) seed: u64,
    /// The producer to read from; a producer has none.
    pub(super) producer: Option<ProducerAt>,
    /// Whether a consumer also keeps a pool to copy from, for the machine's memcpy.
    pub(super) floors: bool,
}

/// How a producer is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProducerAt {
    pub(super) address: Vec<u8>,
    pub(super) key: Vec<u8>,
    pub(super) plain_port: u16,
    pub(super) pool_bytes: u64,
}

/// By what a transfer is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Way {
    Memcpy,
    PlainTcp,
    Transport,
}

/// Transfers of one shape, one after another.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) way: Way,
    pub(super) shape: Shape,
    /// Reads into which a transfer is divided, all submitted at once.
    pub(super) inflight: u64,
}

/// What a side is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Ask {
    /// First of all.
    Setup(Box<Setup>),
    /// What carries the bytes by now: a transport may know only after some have passed.
    Lane,
    /// What the process has used.
    Used,
    /// To forget the largest memory that it has had so far.
    ForgetPeak,
    /// One transfer, compared byte for byte.
    Check(Job),
    /// Transfers with times: at least `least`, at most `most`, and no more once so many seconds are over.
    Time { job: Job, least: u64, most: u64, seconds: f64 },
    /// Transfers until so many seconds are over, and at least one; only counted, since there can be any number of them.
    Count { job: Job, seconds: f64 },
    /// So many small reads with times, while a large one is always under way.
    Beside { large: Shape, small: Shape, reads: u64 },
}

impl Ask {
    /// After how long it is given up if there is no answer.
    pub(super) fn limit(&self) -> Duration {
        let asked = match self {
            Self::Time { seconds, .. } | Self::Count { seconds, .. } => *seconds,
            _ => 0.0,
        };
        ANSWER_LIMIT.saturating_add(Duration::try_from_secs_f64(asked).unwrap_or_default())
    }
}

/// What a side answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Answer {
    Ready { producer: Option<ProducerAt> },
    Lane(String),
    Used { cpu_s: f64, peak_bytes: u64 },
    PeakForgotten(bool),
    Checked { bad: u64, spilled: u64 },
    Beside { seconds: Vec<f64>, gbps: f64 },
    Timed { seconds: Vec<f64>, cpu_s: f64, wall_s: f64 },
    Counted { transfers: u64, wall_s: f64 },
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_may_take_as_long_as_was_asked_for() {
        let shape = Shape { block_bytes: 4096, blocks: 1 };
        let job = Job { way: Way::Transport, shape, inflight: 1 };
        let hour = Ask::Count { job, seconds: 3600.0 };
        assert_eq!(hour.limit(), Duration::from_secs(3900));
        assert_eq!(Ask::Time { job, least: 1, most: 9, seconds: 3.0 }.limit(), Duration::from_secs(303));
        assert_eq!((Ask::Check(job).limit(), Ask::Used.limit()), (ANSWER_LIMIT, ANSWER_LIMIT));
    }
}
