//! **P1, P8: what a load brought is what the prompt needs.** When a load is reported good, every cell of its blocks
//! must hold this prompt's content for its position, layer and rank. Freed blocks lose their content at once, so that a
//! stale read is always visible. Judged where the engine hears of the load, by comparing memory with stamps; the
//! machines' own opinion plays no part.

pub(super) const NAME: &str = "content";
