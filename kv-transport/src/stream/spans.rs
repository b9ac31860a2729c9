//! A list of byte ranges of one region, used up from the front.

/// Ranges of one region and how far they have been transferred.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Spans {
    list: Vec<(u64, u32)>,
    next: usize,
    within: u32,
    left: u64,
}

impl Spans {
    /// Adds a range; one that continues the last is merged with it.
    pub(crate) fn push(&mut self, offset: u64, len: u32) {
        self.left += u64::from(len);
        if let Some((start, size)) = self.list.last_mut()
            && start.checked_add(u64::from(*size)) == Some(offset)
            && let Some(sum) = size.checked_add(len)
        {
            *size = sum;
            return;
        }
        self.list.push((offset, len));
    }

    /// Bytes not yet transferred.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Ranges not yet transferred, a half finished one included.
    pub(crate) fn pieces(&self) -> usize {
        self.list.len() - self.next
    }

    /// The ranges not yet transferred.
    pub(crate) fn rest(&self) -> impl Iterator<Item = (u64, u32)> {
        let skip = |index: usize| if index == 0 { self.within } else { 0 };
        self.list[self.next..].iter().enumerate().map(move |(index, (offset, len))| {
            // A wrapped offset is found out where the memory is known.
            (offset.wrapping_add(u64::from(skip(index))), len - skip(index))
        })
    }

    /// Notes that bytes were transferred, at most those left.
    pub(crate) fn advance(&mut self, bytes: u64) {
        let mut bytes = bytes.min(self.left);
        self.left -= bytes;
        while bytes > 0 {
            let here = u64::from(self.list[self.next].1 - self.within);
            if bytes < here {
                self.within += bytes as u32;
                return;
            }
            bytes -= here;
            self.next += 1;
            self.within = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_merge_and_progress_is_kept() {
        let mut spans = Spans::default();
        spans.push(10, 5);
        spans.push(15, 5);
        spans.push(30, 2);
        assert_eq!((spans.pieces(), spans.left()), (2, 12));
        spans.advance(9);
        assert_eq!(spans.rest().collect::<Vec<_>>(), [(19, 1), (30, 2)]);
        spans.advance(1);
        assert_eq!(spans.rest().collect::<Vec<_>>(), [(30, 2)]);
        spans.advance(100);
        assert_eq!((spans.pieces(), spans.left()), (0, 0));
    }

    #[test]
    fn a_span_that_would_grow_beyond_its_type_is_not_merged() {
        let mut spans = Spans::default();
        spans.push(0, u32::MAX);
        spans.push(u64::from(u32::MAX), 1);
        spans.push(u64::MAX, 1);
        spans.push(0, 1);
        assert_eq!(spans.pieces(), 4);
    }

    proptest! {
        #[test]
        fn any_steps_visit_the_same_bytes(
            list in proptest::collection::vec((0u64..50, 1u32..9), 1..9),
            steps in proptest::collection::vec(1u64..20, 1..60),
        ) {
            let bytes = |list: &[(u64, u32)]| -> Vec<u64> {
                list.iter().flat_map(|(offset, len)| *offset..*offset + u64::from(*len)).collect()
            };
            let mut spans = Spans::default();
            list.iter().for_each(|(offset, len)| spans.push(*offset, *len));
            let mut seen = vec![];
            for step in steps.into_iter().chain([1000]) {
                let rest = bytes(&spans.rest().collect::<Vec<_>>());
                prop_assert_eq!(rest.len() as u64, spans.left());
                let step = step.min(spans.left());
                seen.extend_from_slice(&rest[..step as usize]);
                spans.advance(step);
            }
            prop_assert_eq!(seen, bytes(&list));
        }
    }
}
