//! Consumers' questions whether their blocks are like ours, until they are answered.
//!
//! ```text
//!  (asked) ──► Digesting ──digested, lease held or over──► (answered)
//!                 │  └─────digested, lease announced────► Waiting ──granted, forgotten──► (answered)
//!                 │                                          └──late, connection lost──► (dropped)
//!                 └──late, connection lost──► Digesting for nobody ──digested──► (dropped)
//! ```
//!
//! A question whose digests are being computed stays in the table until they are, also when nobody waits for them: the
//! table's bound is the bound on that work.

use std::collections::BTreeMap;

use kv_proto::message::{BlockDigest, COMPARED_MAX, GroupList, OfferName, WorkerMessage};
use kv_proto::{Attempt, BlockLayout, Moment};

use super::{Readers, TimerKey};
use crate::config::WorkerConfig;
use crate::digest::positions;
use crate::machine::io::{Decision, DigestOf, Failure, LinkId};
use crate::machine::ledger::Reader;

/// Most questions of one connection, and of all: a consumer asks anew what was not answered.
const QUESTIONS_PER_LINK: usize = 64;
const QUESTIONS_MAX: usize = 512;

/// What a consumer asks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Asked {
    pub(super) name: OfferName,
    pub(super) attempt: Attempt,
    /// The position in the load of the first digest.
    pub(super) from: u32,
    pub(super) theirs: Vec<BlockDigest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Digesting {
        /// Where an answer is waited for, if it still is.
        link: Option<LinkId>,
    },
    /// For the lease's grant.
    Waiting { link: LinkId, equal: u32 },
}

impl State {
    fn link(self) -> Option<LinkId> {
        match self {
            Self::Digesting { link } => link,
            Self::Waiting { link, .. } => Some(link),
        }
    }
}

#[derive(Debug, Clone, Hash)]
struct Question {
    asked: Asked,
    reader: Reader,
    until: Moment,
    state: State,
}

/// The table.
#[derive(Debug, Clone, Hash, Default)]
pub(super) struct Questions {
    next: u64,
    open: BTreeMap<u64, Question>,
}

/// Whether a question is one: of blocks that this pool has, each group once, and a digest for each position.
pub(super) fn fits(layout: &BlockLayout, groups: &[GroupList], digests: &[BlockDigest]) -> bool {
    let known = |group: &GroupList| {
        group.blocks.fits(layout.blocks) && layout.regions.iter().any(|region| region.group == group.group)
    };
    !digests.is_empty()
        && digests.len() <= COMPARED_MAX as usize
        && groups.is_sorted_by(|one, next| one.group < next.group)
        && groups.iter().all(known)
        && positions(groups) as usize == digests.len()
}

impl Readers {
    /// A consumer asks whether its blocks are like ours.
    #[allow(clippy::too_many_arguments)] // The question's own parts, with time, configuration and output.
    pub(super) fn compare(
        &mut self,
        now: Moment,
        config: &WorkerConfig,
        link: LinkId,
        reader: Reader,
        asked: Asked,
        groups: Vec<GroupList>,
        out: &mut Vec<Decision>,
    ) {
        let (lease, offer) = asked.name;
        if self.ledger.holds(lease, reader, offer) == Some(false) {
            return out.push(Decision::Send { link, message: told(&asked, 0, false) });
        }
        let open = &self.questions.open;
        let of_link = || open.values().filter(|question| question.state.link() == Some(link));
        let same = |question: &Question| {
            question.asked.name == asked.name
                && question.asked.attempt == asked.attempt
                && question.asked.from == asked.from
        };
        if of_link().any(same) || of_link().count() >= QUESTIONS_PER_LINK || open.len() >= QUESTIONS_MAX {
            return;
        }
        let number = self.questions.next;
        self.questions.next += 1;
        let until = now + config.limits.confirm;
        self.timers.set(until, TimerKey::Question(number));
        let question = Question { asked, reader, until, state: State::Digesting { link: Some(link) } };
        self.questions.open.insert(number, question);
        out.push(Decision::Digest { of: DigestOf::Question(number), groups });
    }

    /// Our own digests were computed, or could not be.
    pub fn digested(
        &mut self,
        number: u64,
        digests: Result<Vec<BlockDigest>, Failure>,
        out: &mut Vec<Decision>,
    ) {
        let Some(Question { asked, until, state, .. }) = self.questions.open.get_mut(&number) else { return };
        let State::Digesting { link } = *state else { return };
        match (link, digests) {
            (Some(link), Ok(ours)) => {
                let equal =
                    asked.theirs.iter().zip(&ours).take_while(|(theirs, ours)| theirs == ours).count();
                self.stats.compared += 1;
                self.stats.unequal += u64::from(equal < asked.theirs.len());
                *state = State::Waiting { link, equal: equal as u32 };
                self.answer_question(number, out);
            }
            // Nobody waits for it, or there is nothing to say; who asked finds that out by its own limit.
            (None, _) | (_, Err(_)) => {
                self.timers.clear(*until, TimerKey::Question(number));
                self.questions.open.remove(&number);
            }
        }
    }

    /// Answers a question if its lease can be spoken of: that it is held *now*, after our blocks were looked at, makes
    /// the digests ours.
    fn answer_question(&mut self, number: u64, out: &mut Vec<Decision>) {
        let Some(Question { asked, reader, until, state }) = self.questions.open.get(&number) else { return };
        let State::Waiting { link, equal } = *state else { return };
        let (lease, offer) = asked.name;
        let Some(held) = self.ledger.holds(lease, *reader, offer) else { return };
        out.push(Decision::Send { link, message: told(asked, equal, held) });
        self.timers.clear(*until, TimerKey::Question(number));
        self.questions.open.remove(&number);
    }

    /// Leases were granted, or will not be.
    pub(super) fn answer_waiting(&mut self, out: &mut Vec<Decision>) {
        let all: Vec<u64> = self.questions.open.keys().copied().collect();
        for number in all {
            self.answer_question(number, out);
        }
    }

    /// Nobody waits for an answer over this connection any more.
    pub(super) fn questions_lost(&mut self, lost: LinkId) {
        let of_link =
            |(number, question): (&u64, &Question)| (question.state.link() == Some(lost)).then_some(*number);
        let all: Vec<u64> = self.questions.open.iter().filter_map(of_link).collect();
        for number in all {
            self.drop_question(number);
        }
    }

    /// A question's time is over; who asked has given up, or asks again.
    pub(super) fn question_late(&mut self, now: Moment, number: u64) {
        if self.questions.open.get(&number).is_some_and(|question| question.until <= now) {
            self.drop_question(number);
        }
    }

    fn drop_question(&mut self, number: u64) {
        let Some(question) = self.questions.open.get_mut(&number) else { return };
        self.timers.clear(question.until, TimerKey::Question(number));
        match &mut question.state {
            State::Digesting { link } => *link = None,
            State::Waiting { .. } => drop(self.questions.open.remove(&number)),
        }
    }
}

fn told(Asked { name: (lease, _), attempt, from, .. }: &Asked, equal: u32, held: bool) -> WorkerMessage {
    WorkerMessage::Compared { lease: *lease, attempt: *attempt, from: *from, equal, held }
}
