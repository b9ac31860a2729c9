use super::*;

const TERMS: LeaseTerms = LeaseTerms { ttl_ms: 1_000, renewal_ms: 800, max_ms: 3_000, grace_ms: 300 };
const L: LeaseId = LeaseId(7);
const OFFER: OfferDigest = OfferDigest::from_bytes([9; 16]);

fn at(ms: u64) -> Moment {
    Moment::START + Duration::from_millis(ms)
}

fn ledger() -> Ledger {
    Ledger::new(Duration::from_secs(60))
}

fn granted() -> Ledger {
    let mut ledger = ledger();
    ledger.announce(L);
    ledger.grant(at(0), L, TERMS, OFFER);
    ledger
}

fn reader(life: u64, rank: u32) -> Reader {
    Reader { incarnation: Incarnation::from_random(life), rank: Rank(rank) }
}

fn done(reader: Reader, attempt: u64, expected: u32) -> ReaderEnding {
    ReaderEnding { reader, attempt: Attempt(attempt), ending: Ending::ReadDone, expected, offer: OFFER }
}

fn released(reader: Reader, attempt: u64, expected: u32) -> ReaderEnding {
    ReaderEnding { ending: Ending::Released, ..done(reader, attempt, expected) }
}

// H-12
#[test]
fn p1_a_held_lease_confirms_and_ends() {
    let mut ledger = granted();
    assert_eq!(ledger.ending(at(10), L, done(reader(1, 0), 5, 1)), Some(Answer::Confirmed));
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Confirmed)]);
    assert_eq!(ledger.stats().confirmed, 1);
}

#[test]
fn h18_a_read_of_another_offer_is_not_confirmed_and_does_not_end_the_lease() {
    let mut ledger = granted();
    let forged = ReaderEnding { offer: OfferDigest::from_bytes([8; 16]), ..done(reader(1, 0), 5, 1) };
    assert_eq!(ledger.ending(at(10), L, forged), Some(Answer::Lapsed));
    assert!(ledger.take_ended().is_empty());
    let guessed = ReaderEnding { ending: Ending::Released, ..forged };
    ledger.ending(at(11), L, guessed);
    assert!(ledger.take_ended().is_empty(), "who guesses a lease's number gives nothing back");
    assert_eq!(ledger.stats().foreign_offers, 2);
    assert_eq!(
        ledger.ending(at(20), L, done(reader(2, 0), 5, 1)),
        Some(Answer::Confirmed),
        "the true reader"
    );
}

// H-12, H-18
#[test]
fn p1_an_expired_or_unknown_lease_lapses() {
    let mut ledger = granted();
    ledger.time_passed(at(1_000));
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Expired)]);
    assert_eq!(ledger.ending(at(1_000), L, done(reader(1, 0), 5, 1)), Some(Answer::Lapsed));
    assert_eq!(ledger.ending(at(1_000), LeaseId(99), done(reader(1, 0), 5, 1)), Some(Answer::Lapsed));
    assert!(ledger.take_ended().is_empty(), "an end is reported once");
}

// H-16
#[test]
fn r015_what_arrived_in_time_counts_although_it_is_looked_at_late() {
    let mut ledger = granted();
    assert_eq!(ledger.ending(at(1_500), L, done(reader(1, 0), 5, 1)), Some(Answer::Confirmed));
    ledger.time_passed(at(1_500));
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Confirmed)]);
}

// H-14
#[test]
fn p2_a_repeated_read_done_gets_the_same_answer_and_another_load_does_not() {
    let mut ledger = granted();
    let first = done(reader(1, 0), 5, 1);
    assert_eq!(ledger.ending(at(10), L, first), Some(Answer::Confirmed));
    assert_eq!(ledger.ending(at(20), L, first), Some(Answer::Confirmed));
    assert_eq!(ledger.ending(at(30), L, done(reader(1, 0), 6, 1)), Some(Answer::Lapsed), "another load");
    assert_eq!(ledger.ending(at(30), L, done(reader(2, 0), 5, 1)), Some(Answer::Lapsed), "another life");
    assert_eq!(ledger.take_ended().len(), 1);
}

// H-12, H-14, R084
#[test]
fn p2_readers_are_a_set_and_not_a_number() {
    let mut ledger = granted();
    let zero = done(reader(1, 0), 5, 2);
    for _ in 0..3 {
        assert_eq!(ledger.ending(at(10), L, zero), Some(Answer::Confirmed));
    }
    assert!(ledger.take_ended().is_empty(), "the other reader has not ended");
    ledger.ending(at(20), L, released(reader(1, 1), 5, 2));
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Released)]);
    assert_eq!(ledger.ending(at(30), L, zero), Some(Answer::Confirmed), "what was confirmed stays so");
}

// H-12, R031
#[test]
fn p2_readers_of_two_consumers_do_not_add_up() {
    let mut ledger = granted();
    ledger.ending(at(10), L, done(reader(1, 0), 5, 2));
    ledger.ending(at(11), L, done(reader(2, 1), 5, 2));
    assert!(ledger.take_ended().is_empty());
}

// H-15
#[test]
fn p5_an_early_end_waits_with_the_request_and_is_matched() {
    let mut ledger = ledger();
    ledger.announce(L);
    assert_eq!(ledger.ending(at(1), L, done(reader(1, 0), 5, 1)), None);
    assert_eq!(ledger.ending(at(2), L, done(reader(1, 0), 5, 1)), None, "repeated: kept once");
    ledger.grant(at(3), L, TERMS, OFFER);
    let answer =
        LateAnswer { reader: reader(1, 0), lease: L, attempt: Attempt(5), answer: Answer::Confirmed };
    assert_eq!(ledger.take_late_answers(), [answer]);
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Confirmed)]);
}

// H-15
#[test]
fn p5_an_early_release_ends_the_lease_when_it_is_granted() {
    let mut ledger = ledger();
    ledger.announce(L);
    assert_eq!(ledger.ending(at(1), L, released(reader(1, 0), 0, 1)), None);
    ledger.grant(at(3), L, TERMS, OFFER);
    assert!(ledger.take_late_answers().is_empty());
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Released)]);
}

// H-15
#[test]
fn a_forgotten_request_answers_lapsed_to_early_and_late_enders_and_is_gone_later() {
    let mut ledger = ledger();
    ledger.announce(L);
    ledger.ending(at(1), L, done(reader(1, 0), 5, 1));
    ledger.forget(at(2), L);
    assert_eq!(ledger.take_late_answers()[0].answer, Answer::Lapsed);
    assert!(ledger.take_ended().is_empty(), "what was never granted has no end to report");
    assert_eq!(ledger.ending(at(3), L, done(reader(1, 1), 5, 1)), Some(Answer::Lapsed));
    ledger.time_passed(at(100_000));
    assert!(ledger.is_empty());
    assert_eq!(ledger.next_deadline(), None);
}

fn names(leases: &[u64]) -> Vec<OfferName> {
    leases.iter().map(|lease| (LeaseId(*lease), OFFER)).collect()
}

fn end_of(ledger: &mut Ledger, now: u64) -> Option<LeaseEnd> {
    ledger.time_passed(at(now));
    ledger.take_ended().pop().map(|(_, end)| end)
}

// H-13, R002
#[test]
fn renewals_extend_never_shorten_and_have_a_maximum() {
    let mut ledger = granted();
    let r = reader(1, 0);
    assert!(ledger.want(at(100), r, &[(L, OFFER)]).is_empty());
    assert_eq!(end_of(&mut ledger, 900), None, "silent for 800, but its own time is longer");
    assert_eq!(ledger.next_deadline(), Some(at(1_000)));
    assert!(ledger.want(at(950), r, &[(L, OFFER)]).is_empty());
    ledger.heard(at(1_500), r);
    assert_eq!(end_of(&mut ledger, 2_299), None, "one sign of life, however many leases");
    ledger.heard(at(2_299), r);
    assert_eq!(end_of(&mut ledger, 3_000), Some(LeaseEnd::Expired), "the maximum");
    assert_eq!(ledger.take_notices(), [(r, (L, OFFER))], "its reader hears of it");
    assert_eq!(ledger.want(at(3_001), r, &names(&[7, 8])), names(&[7, 8]), "both get a definite negative");
    assert!(ledger.living.is_empty(), "who wants nothing that is held is not remembered");
}

// H-13
#[test]
fn a_reader_that_falls_silent_keeps_nothing() {
    let mut ledger = granted();
    ledger.want(at(900), reader(1, 0), &[(L, OFFER)]);
    assert_eq!(end_of(&mut ledger, 1_699), None);
    assert_eq!(end_of(&mut ledger, 1_700), Some(LeaseEnd::Expired));
}

// H-13, H-25, R003
#[test]
fn r003_a_dead_readers_leases_end_after_the_grace_and_a_busy_ones_live() {
    let (dead, back, busy) = (reader(1, 0), reader(2, 0), reader(3, 0));
    let mut ledger = ledger();
    for (id, who) in [(1, dead), (2, back), (3, busy), (4, dead), (4, busy)] {
        ledger.announce(LeaseId(id));
        ledger.grant(at(0), LeaseId(id), TERMS, OFFER);
        ledger.want(at(10), who, &[(LeaseId(id), OFFER)]);
    }
    ledger.reader_lost(at(100), dead);
    ledger.reader_lost(at(100), back);
    ledger.heard(at(390), back);
    ledger.time_passed(at(400));
    assert_eq!(ledger.take_ended(), [(LeaseId(1), LeaseEnd::ConsumerLost)], "4 is wanted by another");
    assert_eq!(ledger.stats().consumer_lost, 1);
    ledger.time_passed(at(1_300));
    let ended: Vec<_> = ledger.take_ended().into_iter().map(|(lease, _)| lease.0).collect();
    assert_eq!(ended, [2, 3, 4], "nobody was heard of for long");
    assert!(ledger.living.is_empty());
}

// H-13
#[test]
fn who_names_another_offer_keeps_nothing() {
    let mut ledger = granted();
    let forged = (L, OfferDigest::from_bytes([8; 16]));
    assert_eq!(ledger.want(at(900), reader(1, 0), &[forged]), [forged]);
    assert_eq!(end_of(&mut ledger, 1_000), Some(LeaseEnd::Expired));
    // Before the grant nobody knows what is true; afterwards the liar hears of it.
    ledger.announce(LeaseId(8));
    let (liar, other) = ((LeaseId(8), OfferDigest::from_bytes([8; 16])), reader(1, 0));
    assert!(ledger.want(at(1_001), other, &[liar]).is_empty());
    assert!(ledger.want(at(1_001), other, &names(&[8])).is_empty(), "another request of the same reader");
    ledger.grant(at(1_002), LeaseId(8), TERMS, OFFER);
    assert_eq!(ledger.take_notices(), [(other, liar)]);
    assert_eq!(ledger.living.len(), 1, "the true one is kept");
    ledger.announce(LeaseId(9));
    ledger.want(at(1_003), reader(2, 0), &[(LeaseId(9), liar.1)]);
    ledger.grant(at(1_004), LeaseId(9), TERMS, OFFER);
    assert_eq!(ledger.living.len(), 1);
}

// H-13
#[test]
fn a_renewal_for_a_request_still_being_computed_is_no_negative_and_counts_when_it_is_granted() {
    let mut ledger = ledger();
    ledger.announce(L);
    assert!(ledger.want(at(1), reader(1, 0), &[(L, OFFER)]).is_empty());
    ledger.grant(at(2), L, TERMS, OFFER);
    assert_eq!(ledger.living[&reader(1, 0)].until, at(802), "the first grant says how long it may be silent");
    ledger.heard(at(900), reader(1, 0));
    assert_eq!(end_of(&mut ledger, 1_699), None);
    assert_eq!(end_of(&mut ledger, 1_700), Some(LeaseEnd::Expired));
    ledger.announce(LeaseId(8));
    ledger.want(at(1_701), reader(1, 0), &names(&[8]));
    ledger.forget(at(1_702), LeaseId(8));
    assert_eq!(ledger.take_notices(), [(reader(1, 0), (LeaseId(8), OFFER))]);
}

// H-13
#[test]
fn what_is_dropped_or_not_named_again_lives_for_the_grace_or_its_own_time() {
    let r = reader(1, 0);
    let mut ledger = granted();
    ledger.want(at(10), r, &[(L, OFFER)]);
    ledger.drop_wishes(at(20), r, &[(L, OfferDigest::from_bytes([8; 16]))]);
    assert_eq!(ledger.living.len(), 1, "another offer's name drops nothing");
    ledger.drop_wishes(at(20), r, &[(L, OFFER)]);
    ledger.drop_wishes(at(21), r, &[(L, OFFER)]);
    assert_eq!(end_of(&mut ledger, 999), None);
    assert_eq!(end_of(&mut ledger, 1_000), Some(LeaseEnd::Expired));
    let mut ledger = granted();
    ledger.want(at(10), r, &[(L, OFFER)]);
    ledger.heard(at(790), r);
    ledger.heard(at(1_580), r);
    ledger.relisted(at(1_700), r);
    assert_eq!(end_of(&mut ledger, 2_379), None, "as long as the last sign of life promised");
    assert_eq!(end_of(&mut ledger, 2_380), Some(LeaseEnd::Expired));
}

// H-26
#[test]
fn a_lease_that_is_taken_back_ends_and_confirms_nothing_more() {
    let mut ledger = granted();
    ledger.want(at(10), reader(1, 0), &[(L, OFFER)]);
    ledger.revoke(at(20), L);
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Revoked)]);
    assert_eq!(ledger.take_notices(), [(reader(1, 0), (L, OFFER))]);
    assert_eq!(ledger.ending(at(30), L, done(reader(1, 0), 5, 1)), Some(Answer::Lapsed));
    ledger.revoke(at(40), L);
    ledger.revoke(at(40), LeaseId(99));
    assert!(ledger.take_ended().is_empty());
}

// H-12
#[test]
fn a_reader_with_several_requests_ends_the_lease_with_the_last_of_them() {
    let mut ledger = granted();
    let more = |attempt| ReaderEnding { ending: Ending::ReadMore, ..done(reader(1, 0), attempt, 1) };
    for _ in 0..2 {
        assert_eq!(ledger.ending(at(10), L, more(5)), Some(Answer::Confirmed));
    }
    assert!(ledger.take_ended().is_empty());
    assert_eq!(ledger.ending(at(20), L, done(reader(1, 0), 6, 1)), Some(Answer::Confirmed));
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::Confirmed)]);
    assert_eq!(ledger.ending(at(30), L, more(5)), Some(Answer::Confirmed), "the same answer again");
    assert_eq!(ledger.ending(at(30), L, more(7)), Some(Answer::Lapsed), "too late");
    assert_eq!(ledger.stats().confirmed, 2);
}

// H-12, H-25
#[test]
fn p4_a_reader_that_has_ended_does_not_keep_a_lease_for_one_that_is_dead() {
    let (a, b) = (reader(1, 0), reader(1, 1));
    let mut ledger = granted();
    for r in [a, b] {
        ledger.want(at(10), r, &[(L, OFFER)]);
    }
    ledger.announce(LeaseId(8));
    ledger.grant(at(10), LeaseId(8), TERMS, OFFER);
    ledger.want(at(10), a, &names(&[8]));
    assert_eq!(ledger.ending(at(20), L, done(a, 5, 2)), Some(Answer::Confirmed));
    ledger.reader_lost(at(100), b);
    ledger.heard(at(390), a);
    ledger.time_passed(at(400));
    assert_eq!(ledger.take_ended(), [(L, LeaseEnd::ConsumerLost)], "a lives on for another lease");
    assert_eq!(ledger.want(at(410), a, &[(L, OFFER)]), [(L, OFFER)]);
}

// H-12
#[test]
fn however_many_requests_of_a_reader_read_under_a_lease_all_are_confirmed() {
    let mut ledger = granted();
    for attempt in 0..2 * READERS_MAX as u64 {
        let more = ReaderEnding { ending: Ending::ReadMore, ..done(reader(1, 0), attempt, 1) };
        assert_eq!(ledger.ending(at(10), L, more), Some(Answer::Confirmed));
    }
    let Some(Lease::Held { confirmed, .. }) = ledger.leases.get(&L) else { panic!("held") };
    assert_eq!(confirmed.len(), READERS_MAX, "and a bounded number is remembered");
}

// H-14
#[test]
fn p2_another_attempt_of_a_reader_that_has_ended_lapses_while_others_still_read() {
    let mut ledger = granted();
    assert_eq!(ledger.ending(at(10), L, done(reader(1, 0), 5, 2)), Some(Answer::Confirmed));
    assert_eq!(ledger.ending(at(11), L, done(reader(1, 0), 6, 2)), Some(Answer::Lapsed));
    assert!(ledger.take_ended().is_empty(), "the lease is held for the other reader");
}

// H-2
#[test]
fn a_second_grant_changes_nothing() {
    let mut ledger = granted();
    ledger.grant(at(900), L, TERMS, OFFER);
    assert_eq!(ledger.next_deadline(), Some(at(1_000)));
    ledger.ending(at(950), L, released(reader(1, 0), 0, 1));
    ledger.grant(at(960), L, TERMS, OFFER);
    assert_eq!(ledger.take_ended().len(), 1, "an ended lease is not granted again");
}

// H-12
#[test]
fn the_reaper_does_not_stop_at_the_first_live_entry() {
    let mut ledger = ledger();
    for id in [1, 2, 3] {
        ledger.announce(LeaseId(id));
        ledger.grant(at(0), LeaseId(id), TERMS, OFFER);
    }
    ledger.want(at(500), reader(1, 0), &names(&[1]));
    ledger.time_passed(at(1_100));
    let ended: Vec<LeaseId> = ledger.take_ended().into_iter().map(|(lease, _)| lease).collect();
    assert_eq!(ended, [LeaseId(2), LeaseId(3)]);
}

#[test]
fn endings_are_bounded_whatever_strangers_send() {
    let mut ledger = ledger();
    ledger.announce(L);
    for n in 0..1_000 {
        ledger.ending(at(1), L, done(reader(n, 0), n, 1));
    }
    ledger.grant(at(2), L, TERMS, OFFER);
    assert!(ledger.take_late_answers().len() <= EARLY_MAX);
    let mut ledger = granted();
    for n in 0..1_000 {
        ledger.ending(at(1), L, done(reader(n, 0), n, 2));
    }
    let Some(Lease::Held { ends, .. }) = ledger.leases.get(&L) else { panic!("held") };
    assert_eq!(ends.len(), READERS_MAX);
}
