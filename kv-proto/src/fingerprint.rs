//! What two engines must have in common, as text that can be compared and shown.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::hex;
use crate::layout::BlockLayout;

/// What two engines must agree on before a block of one makes sense to the other, as named text fields.
///
/// Equality is the whole test, and a difference can be printed as it is. It is looked at first, on both sides, before
/// anything else of a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(BTreeMap<String, String>);

/// Most fields a fingerprint may have, and most bytes of a name or a value.
const FINGERPRINT_FIELDS_MAX: usize = 64;
const FINGERPRINT_TEXT_MAX_BYTES: usize = 4096;

/// One field in which two fingerprints differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldDifference {
    /// The field's name.
    pub field: String,
    /// Our value, if we have the field.
    pub ours: Option<String>,
    /// The peer's value, if it has the field.
    pub theirs: Option<String>,
}

impl fmt::Display for FieldDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |v: &Option<String>| v.clone().unwrap_or_else(|| "(absent)".to_owned());
        write!(f, "{}: ours {}, theirs {}", self.field, or_none(&self.ours), or_none(&self.theirs))
    }
}

impl Fingerprint {
    /// Derives it from the model's name and from what both engines' block tables must have in common.
    ///
    /// `model` is whatever names the weights beyond doubt: a path is not enough where two hosts differ, a digest
    /// of the weights is best. How each side cuts and lays out its cache is not in here: whether the one can be brought
    /// into the other is found out layer by layer when two workers meet.
    pub fn of(model: &str, layout: &BlockLayout) -> Self {
        let mut fields = BTreeMap::new();
        fields.insert("model".to_owned(), model.to_owned());
        let groups: Vec<String> = layout.group_kinds().map(|kind| kind.to_string()).collect();
        fields.insert("block_groups".to_owned(), groups.join("; "));
        Self(fields)
    }

    /// Adds a field of the engine's own, such as a quantisation scheme or the draft model.
    pub fn with(mut self, field: &str, value: impl Into<String>) -> Self {
        self.0.insert(field.to_owned(), value.into());
        self
    }

    /// The fields, in order of their names.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// Whether it is small enough to be believed; peers' fingerprints are checked with this first.
    pub fn is_bounded(&self) -> bool {
        self.0.len() <= FINGERPRINT_FIELDS_MAX
            && self.0.iter().all(|(k, v)| k.len().max(v.len()) <= FINGERPRINT_TEXT_MAX_BYTES)
    }

    /// The fields in which a peer's differs, in order of their names; empty when they are equal.
    pub fn differences(&self, theirs: &Self) -> Vec<FieldDifference> {
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(theirs.0.keys()).collect();
        names
            .into_iter()
            .filter(|name| self.0.get(*name) != theirs.0.get(*name))
            .map(|name| FieldDifference {
                field: name.clone(),
                ours: self.0.get(name).cloned(),
                theirs: theirs.0.get(name).cloned(),
            })
            .collect()
    }

    /// A short digest of all fields, for logs.
    pub fn digest(&self) -> String {
        let mut digest = Sha256::new();
        for (name, value) in &self.0 {
            digest.update((name.len() as u64).to_le_bytes());
            digest.update(name);
            digest.update((value.len() as u64).to_le_bytes());
            digest.update(value);
        }
        hex(&digest.finalize()[..8])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{BlockOrder, GroupKind};

    fn layout(groups: Vec<GroupKind>) -> BlockLayout {
        let order = BlockOrder::HeadsTokens;
        BlockLayout { block_tokens: 16, kernel_tokens: 0, blocks: 4, order, groups, regions: vec![] }
    }

    #[test]
    fn a_mismatch_prints_the_fields_that_differ_with_both_values() {
        let ours = Fingerprint::of("llama", &layout(vec![GroupKind::Full]));
        let theirs = Fingerprint::of("qwen", &layout(vec![GroupKind::Full, GroupKind::Window { tokens: 64 }]));
        let theirs = theirs.with("draft", "none");
        let text: Vec<String> = ours.differences(&theirs).iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                "block_groups: ours full attention, theirs full attention; window of 64 tokens",
                "draft: ours (absent), theirs none",
                "model: ours llama, theirs qwen"
            ]
        );
        assert!(ours.differences(&ours.clone()).is_empty());
        assert_ne!(ours.digest(), theirs.digest());
    }

    #[test]
    fn another_cut_of_the_same_model_has_the_same_fingerprint() {
        let ours = layout(vec![GroupKind::Full]);
        let theirs = BlockLayout { block_tokens: 32, order: BlockOrder::TokensHeads, ..ours.clone() };
        assert_eq!(Fingerprint::of("m", &ours), Fingerprint::of("m", &theirs));
    }
}
