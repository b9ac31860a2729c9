//! Twelve transports, each of which breaks one rule. All stand over the tcp transport, which keeps them all.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_testkit::conformance::Rule;
use kv_testkit::passthrough::{Interpose, Passthrough, Through};
use kv_transport::{
    Address, Capabilities, Event, Memory, OpId, PeerId, RangeSet, ReadError, ReadLimits, ReadOutcome,
    ReadRequest, RegionId, Transport, TransportError,
};

/// Breaks one rule.
#[derive(Debug)]
pub(crate) struct Offender {
    through: Through,
    rule: Rule,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    memories: HashMap<RegionId, Memory>,
    reads: HashMap<OpId, VecDeque<ReadRequest>>,
    held: Vec<(PeerId, Event)>,
}

impl State {
    /// The oldest read of this id: another may have been submitted just when it ended.
    fn taken(&mut self, op: OpId) -> Option<ReadRequest> {
        self.reads.get_mut(&op)?.pop_front()
    }
}

impl Offender {
    /// One that breaks this rule, before a transport.
    pub(crate) fn before(inner: Arc<dyn Transport>, rule: Rule) -> Arc<dyn Transport> {
        if rule == Rule::T11 {
            // Nobody ever ends what this one keeps.
            std::mem::forget(Arc::clone(&inner));
        }
        Arc::new(Passthrough::over(Self { through: Through::new(inner), rule, state: Mutex::default() }))
    }

    fn breaks(&self, rule: Rule) -> bool {
        self.rule == rule
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a byte of the destination.
    fn spoil(&self, request: &ReadRequest, range: usize) {
        let part = &request.parts[0];
        let Some(memory) = self.state().memories.get(&part.region).cloned() else { return };
        let at = part.ranges[range].local_offset;
        let mut byte = [0];
        memory.read(at, &mut byte).unwrap();
        memory.write(at, &[byte[0].wrapping_add(1)]).unwrap();
    }

    fn completed(&self, op: OpId, mut outcome: ReadOutcome) -> Option<Event> {
        let request = self.state().taken(op)?;
        match self.rule {
            // Told twice.
            Rule::T1 => self.through.tell(Event::ReadCompleted { op, outcome: outcome.clone() }),
            // The second of several ranges is wrong.
            Rule::T2 if outcome.result.is_ok() && request.parts[0].ranges.len() > 1 => {
                self.spoil(&request, 1)
            }
            // What was still on its way arrives.
            Rule::T3
                if matches!(
                    outcome.result,
                    Err(ReadError::Cancelled
                        | ReadError::TimedOut
                        | ReadError::Stalled
                        | ReadError::PeerLost(_))
                ) =>
            {
                if let Some(memory) = self.state().memories.get(&request.parts[0].region).cloned() {
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(10));
                        memory.write(0, &[0xee; 16]).unwrap();
                    });
                }
            }
            // Told after the loss of the peer.
            Rule::T6 if matches!(outcome.result, Err(ReadError::PeerLost(_))) => {
                self.state().held.push((request.peer, Event::ReadCompleted { op, outcome }));
                return None;
            }
            // A cancel is taken for the end of the matter.
            Rule::T7 if outcome.result == Err(ReadError::Cancelled) => return None,
            // A key that the peer does not know brings whatever is there.
            Rule::T9 if outcome.result == Err(ReadError::UnknownKey) => {
                outcome = ReadOutcome { result: Ok(()), arrived: RangeSet::all(request.range_count()) };
            }
            _ => {}
        }
        Some(Event::ReadCompleted { op, outcome })
    }
}

impl Interpose for Offender {
    fn through(&self) -> &Through {
        &self.through
    }

    fn capabilities(&self) -> Capabilities {
        let mut claims = self.through.inner().capabilities();
        if self.breaks(Rule::T12) {
            claims.message_max_bytes *= 2;
        }
        claims
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let region = self.through.inner().register(memory.clone())?;
        if matches!(self.rule, Rule::T2 | Rule::T3) {
            self.state().memories.insert(region, memory);
        }
        Ok(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        match self.through.inner().deregister(region) {
            Err(TransportError::RegionInUse { .. }) if self.breaks(Rule::T4) => Ok(()),
            result => result,
        }
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        match self.through.inner().connect(address, limit) {
            // What the author never thought of.
            Err(TransportError::BadAddress { .. }) if self.breaks(Rule::T10) => panic!("index out of bounds"),
            result => result,
        }
    }

    fn read(&self, mut request: ReadRequest) -> Result<(), TransportError> {
        if self.breaks(Rule::T8) {
            let hour = Duration::from_secs(3600);
            let longer = |limit: Duration| if limit.is_zero() { limit } else { limit.max(hour) };
            let ReadLimits { total, stall } = request.limits;
            request.limits = ReadLimits { total: longer(total), stall: longer(stall) };
        }
        // Before it can complete.
        let op = request.op;
        self.state().reads.entry(op).or_default().push_back(request.clone());
        let result = self.through.inner().read(request);
        if result.is_err() {
            // An id that is in flight keeps the read that has it.
            self.state().reads.entry(op).or_default().pop_back();
        }
        result
    }

    fn event(&self, event: Event) -> Option<Event> {
        match event {
            Event::ReadCompleted { op, outcome } => self.completed(op, outcome),
            Event::Message { .. } if self.breaks(Rule::T5) => {
                self.through.tell(event.clone());
                Some(event)
            }
            Event::PeerLost { peer, .. } => {
                self.through.tell(event);
                let held = std::mem::take(&mut self.state().held);
                let (of, others) = held.into_iter().partition(|(lost, _)| *lost == peer);
                self.state().held = others;
                let of: Vec<(PeerId, Event)> = of;
                of.into_iter().for_each(|(_, event)| self.through.tell(event));
                None
            }
            event => Some(event),
        }
    }
}
