//! T-3: after a read's completion, successful or not, its destination is never written again.
//!
//! Each completion is followed at once by the next owner, who overwrites the destination; what he wrote is looked at
//! while more reads run over the same connection, before the place is used again, and when all is over.

use std::time::{Duration, Instant};

use kv_transport::{OpId, ReadError, ReadLimits};

use super::bench::{Bench, Node, Pair, Place, contents, fill, is_filled, pattern, range};
use super::case::{End, Outcome, broken, cases, check};
use crate::sim::Dice;

cases!(T3:
    t3_cancelled_read_writes_nothing_later,
    t3_timed_out_read_writes_nothing_later,
    t3_stalled_read_of_a_peer_that_goes_on_writes_nothing_later,
    t3_the_next_read_into_a_cancelled_ones_place_is_whole,
    t3_disconnected_read_writes_nothing_later,
    t3_read_from_a_peer_that_shuts_down_writes_nothing_later,
    t3_read_from_a_killed_peer_writes_nothing_later,
    t3_read_over_a_cut_link_writes_nothing_later,
    t3_successful_read_writes_nothing_later,
);

const BYTES: usize = 2 << 20;
const PLACES: usize = 8;
/// How long places are looked at when all is over.
const WATCH: Duration = Duration::from_millis(200);

/// What the next owner of a place writes: never zero, and another byte from turn to turn.
fn mark(turn: u32) -> u8 {
    (turn % 250) as u8 + 1
}

/// Whether a read was ended: by a cancel, a limit or the loss of its peer. One that failed for a reason of its own tried
/// nothing here.
fn is_ended(result: &Result<(), ReadError>) -> bool {
    matches!(
        result,
        Err(ReadError::Cancelled
            | ReadError::TimedOut
            | ReadError::Stalled
            | ReadError::PeerLost(_)
            | ReadError::Closed)
    )
}

/// Where every read was over too early, nothing was tried.
fn check_tried(early: u32) -> Outcome {
    match early {
        0 => Err(End::Cannot("every read was over before it could be ended".into())),
        _ => Ok(()),
    }
}

/// Places whose owners have changed, and what the owners wrote.
#[derive(Default)]
struct Watch(Vec<(Place, u8)>);

impl Watch {
    fn check(&self) -> Outcome {
        for (place, byte) in &self.0 {
            check!(T3, is_filled(&place.memory, *byte), "a place was written after its read had completed");
        }
        Ok(())
    }

    /// The read into a place is over, and somebody else's bytes go there.
    fn give_away(&mut self, place: Place, byte: u8) -> Outcome {
        fill(&place.memory, byte)?;
        self.0.push((place, byte));
        Ok(())
    }

    /// Takes the oldest place back, if there are enough, after a last look.
    fn take_back(&mut self) -> Result<Option<Place>, End> {
        if self.0.len() < PLACES {
            return Ok(None);
        }
        self.check()?;
        Ok(Some(self.0.remove(0).0))
    }

    /// Looks until time is over; a write is what ends it early.
    fn watch(&self) -> Outcome {
        let start = Instant::now();
        while start.elapsed() < WATCH {
            self.check()?;
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Reads that `end` makes end early at a moment of chance, over and over.
fn end_early(
    bench: &Bench,
    pair: &Pair,
    limits: impl Fn(&mut Dice) -> ReadLimits,
    end: impl Fn(&Node, OpId, &mut Dice) -> Outcome,
) -> Outcome {
    let source = bench.offer(&pair.server, pattern(BYTES, 1))?;
    let (mut dice, mut watch, mut early) = (Dice::new(3), Watch::default(), 0);
    for turn in 0..bench.repeats {
        let place = match watch.take_back()? {
            Some(place) => place,
            None => bench.place(&pair.client, BYTES)?,
        };
        let ranges = (0..64).map(|i| range((63 - i) << 15, i << 15, 1 << 15)).collect();
        let op = pair.client.read_within(pair.peer, &source.key, place.region, ranges, limits(&mut dice))?;
        end(&pair.client, op, &mut dice)?;
        let outcome = pair.client.cancelled(op)?;
        early += u32::from(is_ended(&outcome.result));
        watch.give_away(place, mark(turn))?;
    }
    // What comes behind on the same connection: when it is here, so is all that was before it.
    pair.client.works(bench, pair.peer, &source)?;
    watch.watch()?;
    pair.client.shutdown()?;
    watch.watch()?;
    check_tried(early)
}

fn t3_cancelled_read_writes_nothing_later(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let patient = pair.client.patient();
    end_early(
        bench,
        &pair,
        |_| patient,
        |client, op, dice| {
            wait_a_moment(dice);
            client.transport.cancel(op);
            Ok(())
        },
    )
}

/// Up to half a millisecond, in which a read gets somewhere.
fn wait_a_moment(dice: &mut Dice) {
    let (start, moment) = (Instant::now(), Duration::from_micros(dice.below(500)));
    while start.elapsed() < moment {
        std::hint::spin_loop();
    }
}

fn t3_timed_out_read_writes_nothing_later(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let patient = pair.client.patient();
    let limits =
        |dice: &mut Dice| ReadLimits { total: Duration::from_micros(dice.between(20, 900)), ..patient };
    end_early(bench, &pair, limits, |_, _, _| Ok(()))
}

fn t3_stalled_read_of_a_peer_that_goes_on_writes_nothing_later(bench: &Bench) -> Outcome {
    let mut away = bench.away_two_sided()?;
    let mut watch = Watch::default();
    for turn in 0..bench.repeats.div_ceil(8) {
        away.remote.stop()?;
        let limits = ReadLimits { stall: Duration::from_millis(50), ..away.node.patient() };
        let (place, op) = away.read(bench, limits)?;
        let outcome = away.node.completed_within(op, away.node.patience);
        let outcome = outcome.ok_or_else(|| broken!(T8, "a stalled read does not end"))?;
        if outcome.result.is_ok() {
            // It claims nothing, and did not need the peer this time.
            return Err(End::Cannot("a read of a stopped peer was not held".into()));
        }
        watch.give_away(place, mark(turn))?;
        // It answers now what was asked long ago, then this.
        away.remote.resume()?;
        let (other, op) = away.read(bench, away.node.patient())?;
        away.node.completion(op)?;
        watch.check()?;
        watch.give_away(other, mark(turn + 100))?;
        if watch.0.len() > PLACES {
            watch.0.drain(..2);
        }
    }
    watch.watch()
}

fn t3_the_next_read_into_a_cancelled_ones_place_is_whole(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let sources =
        [bench.offer(&pair.server, pattern(BYTES, 1))?, bench.offer(&pair.server, pattern(BYTES, 2))?];
    let place = bench.place(&pair.client, BYTES)?;
    let (mut dice, mut early, whole) = (Dice::new(4), 0, vec![range(0, 0, BYTES as u64)]);
    for turn in 0..bench.repeats {
        let op = pair.client.read(pair.peer, &sources[0].key, place.region, whole.clone())?;
        wait_a_moment(&mut dice);
        pair.client.transport.cancel(op);
        early += u32::from(is_ended(&pair.client.cancelled(op)?.result));
        let outcome = pair.client.fetch(pair.peer, &sources[1].key, place.region, whole.clone())?;
        check!(T3, outcome.result == Ok(()), "the next read ended with {:?}", outcome.result);
        check!(T3, contents(&place.memory) == sources[1].bytes, "turn {turn}: bytes of the read before");
    }
    check_tried(early)
}

/// Big reads from one pair whose connection `sever` ends at a moment of chance.
fn sever(bench: &Bench, times: u32, sever: impl Fn(&Pair) -> Outcome) -> Outcome {
    let (mut watch, mut early) = (Watch::default(), 0);
    for turn in 0..times {
        let pair = bench.pair()?;
        let source = bench.offer(&pair.server, pattern(BYTES, 1))?;
        let mut reads = vec![];
        for _ in 0..3 {
            let place = bench.place(&pair.client, BYTES)?;
            let op =
                pair.client.read(pair.peer, &source.key, place.region, vec![range(0, 0, BYTES as u64)])?;
            reads.push((op, place));
        }
        wait_a_moment(&mut Dice::new(u64::from(turn)));
        sever(&pair)?;
        for (index, (op, place)) in reads.into_iter().enumerate() {
            early += u32::from(is_ended(&pair.client.completion(op)?.result));
            watch.give_away(place, (turn % 60) as u8 * 4 + index as u8)?;
        }
        watch.check()?;
        if watch.0.len() > PLACES {
            watch.0.drain(..3);
        }
    }
    watch.watch()?;
    check_tried(early)
}

fn t3_disconnected_read_writes_nothing_later(bench: &Bench) -> Outcome {
    sever(bench, bench.repeats.div_ceil(4), |pair| {
        let left = pair.client.transport.disconnect(pair.peer);
        left.map_err(|error| broken!(T6, "a peer cannot be let go of: {error}"))
    })
}

fn t3_read_from_a_peer_that_shuts_down_writes_nothing_later(bench: &Bench) -> Outcome {
    sever(bench, bench.repeats.div_ceil(4), |pair| pair.server.shutdown())
}

fn t3_read_from_a_killed_peer_writes_nothing_later(bench: &Bench) -> Outcome {
    let (mut watch, mut early) = (Watch::default(), 0);
    for turn in 0..bench.repeats.div_ceil(10) {
        let mut away = bench.away()?;
        let (place, op) = away.read_all(bench)?;
        away.remote.kill()?;
        let outcome = away.node.completed_within(op, away.node.patience);
        let outcome = outcome.ok_or_else(|| broken!(T6, "the read from a killed peer does not end"))?;
        early += u32::from(is_ended(&outcome.result));
        watch.give_away(place, mark(turn))?;
        watch.check()?;
        if watch.0.len() > 2 {
            watch.0.remove(0);
        }
    }
    watch.watch()?;
    check_tried(early)
}

fn t3_read_over_a_cut_link_writes_nothing_later(bench: &Bench) -> Outcome {
    let (server, client) = (bench.node()?, bench.node()?);
    let source = bench.offer(&server, pattern(8 * BYTES, 1))?;
    let (mut watch, mut early) = (Watch::default(), 0);
    for turn in 0..bench.repeats.div_ceil(4) {
        let mut link = bench.harness.link(&server.transport.address())?;
        let peer = client.connect(&link.address())?;
        let place = bench.place(&client, 8 * BYTES)?;
        let op = client.read(peer, &source.key, place.region, vec![range(0, 0, 8 * BYTES as u64)])?;
        wait_a_moment(&mut Dice::new(u64::from(turn)));
        link.cut()?;
        let outcome = client.completed_within(op, client.patience);
        let outcome = outcome.ok_or_else(|| broken!(T6, "a read over a cut link does not end"))?;
        early += u32::from(is_ended(&outcome.result));
        watch.give_away(place, mark(turn))?;
        watch.check()?;
        if watch.0.len() > 2 {
            watch.0.remove(0);
        }
    }
    watch.watch()?;
    check_tried(early)
}

fn t3_successful_read_writes_nothing_later(bench: &Bench) -> Outcome {
    let pair = bench.pair()?;
    let source = bench.offer(&pair.server, pattern(BYTES, 1))?;
    let mut watch = Watch::default();
    for turn in 0..bench.repeats {
        let place = match watch.take_back()? {
            Some(place) => place,
            None => bench.place(&pair.client, BYTES)?,
        };
        let ranges = (0..64).map(|i| range((63 - i) << 15, i << 15, 1 << 15)).collect();
        let outcome = pair.client.fetch(pair.peer, &source.key, place.region, ranges)?;
        check!(T2, outcome.result == Ok(()), "a good read ended with {:?}", outcome.result);
        watch.give_away(place, mark(turn))?;
    }
    watch.watch()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_that_were_ended_count_as_such() {
        let lost = ReadError::PeerLost(kv_transport::LossReason::Silent);
        for ended in [ReadError::Cancelled, ReadError::TimedOut, ReadError::Stalled, lost, ReadError::Closed]
        {
            assert!(is_ended(&Err(ended)));
        }
        for own in [ReadError::UnknownKey, ReadError::RemoteRange, ReadError::RemoteDevice] {
            assert!(!is_ended(&Err(own)));
        }
        assert!(!is_ended(&Ok(())));
    }

    #[test]
    fn owners_write_other_bytes_from_turn_to_turn_however_many_there_are() {
        for turn in [0, 149, 155, 249, 254, 255, 100_000] {
            assert!(
                mark(turn) > 0 && mark(turn) != mark(turn + 1) && mark(turn) != mark(turn + 100),
                "{turn}"
            );
        }
    }
}
