//! What a producer answers: a pure function of its card, its availability and the query's bytes.

use kv_proto::Fingerprint;
use kv_proto::handshake::{Answer, EngineCard, HandshakeError, Query, RefusalCode};

/// Longest message of a refusal, in characters; what `Answer::decode` keeps of it.
const MESSAGE_MAX_CHARS: usize = 1000;

/// Longest value of a field that differs, in characters, so that one long value does not push the others out.
const VALUE_MAX_CHARS: usize = 80;

/// A refusal before it is bytes.
pub(crate) struct Refusal {
    pub(crate) code: RefusalCode,
    pub(crate) message: String,
    /// Whether the own fingerprint goes along. A reader reports a difference of fingerprints before it looks at
    /// the refusal, which is right only when the engine it reached is the one that it wanted.
    with_fingerprint: bool,
}

impl Refusal {
    fn new(code: RefusalCode, message: &str) -> Self {
        let with_fingerprint =
            matches!(code, RefusalCode::Incompatible | RefusalCode::Unavailable | RefusalCode::Version);
        Self { code, message: clean(message, MESSAGE_MAX_CHARS), with_fingerprint }
    }

    /// A query that is not one frame.
    pub(crate) fn parts(parts: usize) -> Self {
        Self::new(RefusalCode::Malformed, &format!("a query is 1 frame, this one has {parts}"))
    }

    pub(crate) fn encode(self, card: &EngineCard) -> Vec<u8> {
        let ours = fingerprint(card).filter(|_| self.with_fingerprint);
        let answer = Answer::Refused { code: self.code, message: self.message };
        // A bounded message in a fixed envelope always fits; the fingerprint was checked with the card. Should
        // it fail all the same, the peer still gets one answer, which it reports as malformed.
        answer.encode(ours).or_else(|_| answer.encode(None)).unwrap_or_default()
    }
}

fn fingerprint(card: &EngineCard) -> Option<&Fingerprint> {
    card.workers.first().map(|worker| &worker.fingerprint)
}

/// Cuts a text and makes control characters visible: parts of it come from a peer and end up in logs.
fn clean(text: &str, limit: usize) -> String {
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i >= limit.saturating_sub(3) && text.chars().nth(limit).is_some() {
            out.push_str("...");
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Names every field that differs with both values. "Ours" and "theirs" would mean the wrong side to the reader.
fn list_differences(ours: &Fingerprint, theirs: &Fingerprint) -> String {
    let show = |value: &Option<String>| {
        value.as_ref().map_or_else(|| "(absent)".to_owned(), |v| clean(v, VALUE_MAX_CHARS))
    };
    let listed: Vec<String> = ours
        .differences(theirs)
        .iter()
        .map(|d| {
            let field = clean(&d.field, VALUE_MAX_CHARS);
            format!("{field}: producer {}, consumer {}", show(&d.ours), show(&d.theirs))
        })
        .collect();
    listed.join("; ")
}

/// Decides. The order matters: what cannot be read comes first, then what is true whoever asks, then whom the
/// asker wants, and only then whether the two fit.
pub(crate) fn judge(card: &EngineCard, available: bool, query: &[u8]) -> Result<(), Refusal> {
    let (query, theirs) = Query::decode(query).map_err(|e| match e {
        HandshakeError::Version { theirs } => Refusal::new(
            RefusalCode::Version,
            &format!("protocol version: producer {}, consumer {theirs}", kv_proto::PROTOCOL_VERSION),
        ),
        other => Refusal::new(RefusalCode::Malformed, &other.to_string()),
    })?;
    let Some(ours) = fingerprint(card).filter(|_| available) else {
        return Err(Refusal::new(
            RefusalCode::Unavailable,
            &format!("engine {} in life {} is not ready, or is draining", card.engine, card.incarnation),
        ));
    };
    if query.wanted != card.engine {
        return Err(Refusal::new(
            RefusalCode::WrongEngine,
            &format!(
                "engine {} is wanted, but this is engine {} in life {}",
                query.wanted, card.engine, card.incarnation
            ),
        ));
    }
    let Some(theirs) = theirs else {
        return Err(Refusal::new(
            RefusalCode::Malformed,
            "the query has no fingerprint, or one too large to be true",
        ));
    };
    if query.rank.0 >= query.topology.ranks {
        return Err(Refusal::new(
            RefusalCode::Malformed,
            &format!("{} asks, but its engine has {} ranks", query.rank, query.topology.ranks),
        ));
    }
    let differences = list_differences(ours, &theirs);
    if !differences.is_empty() {
        return Err(Refusal::new(RefusalCode::Incompatible, &differences));
    }
    // Whether the two caches can be brought together is found out by the asker, who has both layouts.
    card.topology
        .sources_of(query.rank, query.topology)
        .map_err(|error| Refusal::new(RefusalCode::Incompatible, &format!("topology: {error}")))?;
    Ok(())
}

/// The answer to a query, whatever the query's bytes are: always exactly one, never a panic.
///
/// `available` is false while the engine is not ready or is draining; queries that can be read are then refused
/// with [`RefusalCode::Unavailable`].
pub fn answer(card: &EngineCard, available: bool, query: &[u8]) -> Vec<u8> {
    match judge(card, available, query) {
        Ok(()) => accepted(card).unwrap_or_else(|e| {
            Refusal::new(RefusalCode::Unavailable, &format!("the producer's own description: {e}"))
                .encode(card)
        }),
        Err(refusal) => refusal.encode(card),
    }
}

/// The answer to every query that fits; it is the same for all of them.
pub(crate) fn accepted(card: &EngineCard) -> Result<Vec<u8>, kv_proto::CodecError> {
    Answer::Accepted(card.clone()).encode(fingerprint(card))
}
