//! A transport that claims every read without doing it: the control of an end-to-end test. If answers are still
//! right with it, the test does not see whether anything was moved.

use std::sync::Arc;

use kv_transport::{Event, RangeSet, ReadOutcome, ReadRequest, Transport, TransportError};

use crate::passthrough::{Interpose, Passthrough, Through};

/// What [`Unmoved`] puts before a transport: claims.
#[derive(Debug)]
pub struct Claims(Through);

impl Interpose for Claims {
    fn through(&self) -> &Through {
        &self.0
    }

    fn read(&self, request: ReadRequest) -> Result<(), TransportError> {
        let outcome = ReadOutcome { result: Ok(()), arrived: RangeSet::all(request.range_count()) };
        self.0.tell(Event::ReadCompleted { op: request.op, outcome });
        Ok(())
    }
}

/// Passes everything through to another transport, except reads: those it reports as done at once.
pub type Unmoved = Passthrough<Claims>;

impl Unmoved {
    /// Wraps a transport.
    pub fn new(inner: Arc<dyn Transport>) -> Self {
        Self::over(Claims(Through::new(inner)))
    }
}
