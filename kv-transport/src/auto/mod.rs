//! Several transports as one: each peer is reached by the best that both sides have.
//!
//! The address and the keys are those of all members together. Connecting tries them in this side's order, the next one if
//! one fails, within one limit; which one it became, and why no better one, is in the log and in [`AutoTransport::lane`]. To
//! demand one, configure that one: there is no silent way from it to another.
//!
//! Members that listen are reached by peers that have only one of them, too: [`Transport::faces`] and [`Transport::adopt`].

mod codec;
mod state;

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::Notify;

use self::codec::{List, Tag};
use self::state::{Route, State};
use crate::contract::{
    Address, Capabilities, Event, Face, OpId, PeerId, ReadRequest, RegionId, RegionKey, Transport,
};
use crate::error::{LossReason, TransportError};
use crate::memory::Memory;

/// The word by which a configuration names this transport.
const NAME: &str = "auto";

/// A [`Transport`] that uses others. See the [module](self).
pub struct AutoTransport {
    members: Vec<Arc<dyn Transport>>,
    address: Address,
    state: Mutex<State>,
    news: Notify,
}

impl AutoTransport {
    /// Over these transports, the best first. Refuses none at all, and two of one name.
    pub fn over(mut members: Vec<Arc<dyn Transport>>) -> Result<Self, TransportError> {
        let bad = |what| TransportError::BadConfig { transport: NAME, what };
        loop {
            let addresses: List = members
                .iter()
                .map(|member| (member.name().to_owned(), member.address().as_bytes().to_vec()))
                .collect();
            if members.is_empty() {
                return Err(bad("it has no transport to use"));
            }
            if addresses.len() < members.len() {
                return Err(bad("two of its transports have the same name"));
            }
            let bytes = codec::encode(Tag::Address, &addresses).ok_or(bad("an address is too long"))?;
            match Address::from_bytes(bytes) {
                Ok(address) => {
                    return Ok(Self { address, state: Mutex::default(), news: Notify::new(), members });
                }
                Err(error) => {
                    // Rather one way less than none at all.
                    let longest = (0..members.len()).max_by_key(|at| members[*at].address().as_bytes().len());
                    let left_out = longest.filter(|_| members.len() > 1).map(|at| members.remove(at));
                    let left_out = left_out.ok_or(error)?;
                    tracing::warn!(
                        transport = left_out.name(),
                        "left out: its address leaves no room for others"
                    );
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn member_named(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name() == name)
    }

    /// Tries the next transports of a peer that is being connected, until one accepts the address. Tells the loss if none is
    /// left.
    fn try_next(&self, state: &mut State, peer: PeerId) {
        loop {
            let now = Instant::now();
            let Some(attempt) = state.attempt(peer, now) else { return };
            let member = &self.members[attempt.member];
            match member.connect(&attempt.address, attempt.limit) {
                Ok(theirs) => return state.begun(peer, attempt.member, theirs),
                Err(error) => state.refused(peer, member.name(), &error.to_string()),
            }
        }
    }

    /// What an event of a member means to our caller.
    fn translate(&self, member: usize, event: Event) -> Option<Event> {
        let mut state = self.lock();
        match event {
            Event::Accepted { peer } => Some(Event::Accepted { peer: state.accepted(member, peer) }),
            Event::Connected { peer } => {
                let ours = state.ours(member, peer)?;
                let name = self.members[member].name();
                match state.connected(ours) {
                    None => tracing::info!(peer = %ours, transport = name, "a peer is reached"),
                    Some(why) => {
                        tracing::warn!(peer = %ours, transport = name, %why, "a peer is not reached by a better one")
                    }
                }
                Some(Event::Connected { peer: ours })
            }
            Event::Message { peer, bytes } => Some(Event::Message { peer: state.ours(member, peer)?, bytes }),
            Event::ReadCompleted { op, outcome } => {
                state.completed(op);
                Some(Event::ReadCompleted { op, outcome })
            }
            Event::PeerLost { peer, reason } => {
                let ours = state.ours(member, peer)?;
                let failed = format!("{}: {reason}", self.members[member].name());
                match state.lost(ours, reason, failed) {
                    Some(event) => Some(event),
                    None => {
                        self.try_next(&mut state, ours);
                        state.events.pop_front()
                    }
                }
            }
        }
    }

    fn open(&self) -> Result<(), TransportError> {
        if self.lock().closed { Err(TransportError::Closed { transport: NAME }) } else { Ok(()) }
    }

    fn route(&self, peer: PeerId) -> Result<(usize, PeerId), TransportError> {
        self.open()?;
        match self.lock().peers.get(&peer) {
            Some(Route::Standing { member, theirs, leaving: false, .. }) => Ok((*member, *theirs)),
            _ => Err(TransportError::UnknownPeer { peer }),
        }
    }
}

#[async_trait]
impl Transport for AutoTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        let all: Vec<_> = self.members.iter().map(|member| member.capabilities()).collect();
        Capabilities {
            message_max_bytes: all.iter().map(|c| c.message_max_bytes).min().unwrap_or(0),
            host_memory: all.iter().all(|c| c.host_memory),
            device_memory: all.iter().all(|c| c.device_memory),
            one_sided: all.iter().all(|c| c.one_sided),
            across_hosts: all.iter().any(|c| c.across_hosts),
        }
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        self.open()?;
        let mut theirs = vec![];
        for member in &self.members {
            match member.register(memory.clone()) {
                Ok(region) => theirs.push(Some(region)),
                // The others go on without a member that has ended.
                Err(TransportError::Closed { .. }) => theirs.push(None),
                Err(error) => {
                    for (member, region) in self.members.iter().zip(theirs) {
                        if let Some(region) = region {
                            // It was registered a moment ago and nobody knows of it.
                            member.deregister(region).ok();
                        }
                    }
                    return Err(error);
                }
            }
        }
        if theirs.iter().all(Option::is_none) {
            return Err(TransportError::Closed { transport: NAME });
        }
        Ok(self.lock().registered(theirs))
    }

    fn key(&self, region: RegionId) -> Result<RegionKey, TransportError> {
        self.open()?;
        let theirs = self.lock().region(region)?;
        let mut keys = List::new();
        for (member, region) in self.members.iter().zip(theirs) {
            let Some(region) = region else { continue };
            match member.key(region) {
                Ok(key) => drop(keys.insert(member.name().to_owned(), key.as_bytes().to_vec())),
                Err(TransportError::Closed { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if keys.is_empty() {
            return Err(TransportError::Closed { transport: NAME });
        }
        loop {
            let bytes = codec::encode(Tag::Key, &keys).ok_or(TransportError::BadKey { transport: NAME })?;
            match RegionKey::from_bytes(bytes) {
                Ok(key) => return Ok(key),
                Err(error) => {
                    let longest = keys.iter().max_by_key(|(_, key)| key.len()).map(|(name, _)| name.clone());
                    let name = longest.filter(|_| keys.len() > 1).ok_or(error)?;
                    tracing::warn!(transport = name, %region, "left out of a key: there is no room for it");
                    keys.remove(&name);
                }
            }
        }
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransportError> {
        self.open()?;
        let theirs = self.lock().deregistered(region)?;
        let mut result = Ok(());
        for (member, region) in self.members.iter().zip(theirs) {
            let Some(region) = region else { continue };
            match member.deregister(region) {
                Ok(()) | Err(TransportError::Closed { .. }) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    fn connect(&self, address: &Address, limit: Duration) -> Result<PeerId, TransportError> {
        let bad = |reason| TransportError::BadAddress { transport: NAME, reason };
        let list =
            codec::decode(Tag::Address, address.as_bytes()).ok_or(bad("it is no list of addresses"))?;
        let mut candidates = vec![];
        for (index, member) in self.members.iter().enumerate() {
            if let Some(bytes) = list.get(member.name()) {
                candidates.push((index, Address::from_bytes(bytes.clone())?));
            }
        }
        if candidates.is_empty() {
            return Err(bad("it names no transport that this side has"));
        }
        let mut state = self.lock();
        if state.closed {
            return Err(TransportError::Closed { transport: NAME });
        }
        let peer = state.connecting(candidates, Instant::now(), limit);
        self.try_next(&mut state, peer);
        let told = !state.events.is_empty();
        drop(state);
        if told {
            self.news.notify_one();
        }
        Ok(peer)
    }

    fn disconnect(&self, peer: PeerId) -> Result<(), TransportError> {
        self.open()?;
        let (member, theirs, may_have_failed) = self.lock().leave(peer)?;
        match self.members[member].disconnect(theirs) {
            // Its failure is about to be told, and ends this peer as well.
            Err(_) if may_have_failed => Ok(()),
            other => other.map_err(|_| TransportError::UnknownPeer { peer }),
        }
    }

    fn read(&self, mut request: ReadRequest) -> Result<(), TransportError> {
        let (member, theirs) = self.route(request.peer)?;
        let op = request.op;
        let ours: Vec<RegionId> = request.parts.iter().map(|part| part.region).collect();
        let names = BTreeMap::from_iter({
            let state = self.lock();
            ours.iter()
                .map(|region| Ok((state.region_at(*region, member)?, *region)))
                .collect::<Result<Vec<_>, _>>()?
        });
        for part in &mut request.parts {
            part.region = self.lock().region_at(part.region, member)?;
            let keys = codec::decode(Tag::Key, part.key.as_bytes());
            let bytes = keys.and_then(|mut keys| keys.remove(self.members[member].name()));
            let bytes = bytes.ok_or(TransportError::BadKey { transport: NAME })?;
            part.key = RegionKey::from_bytes(bytes)?;
        }
        let peer = std::mem::replace(&mut request.peer, theirs);
        // Noted first: it may be over before the call returns.
        self.lock().reading(op, member, ours)?;
        self.members[member].read(request).map_err(|error| {
            self.lock().completed(op);
            match error {
                TransportError::UnknownPeer { .. } => TransportError::UnknownPeer { peer },
                TransportError::Overlap { op, region, offset } => TransportError::Overlap {
                    op,
                    region: names.get(&region).copied().unwrap_or(region),
                    offset,
                },
                other => other,
            }
        })
    }

    fn cancel(&self, op: OpId) {
        let member = self.lock().member_of(op);
        if let Some(member) = member {
            self.members[member].cancel(op);
        }
    }

    fn send(&self, peer: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        let (member, theirs) = self.route(peer)?;
        self.members[member].send(theirs, message).map_err(|error| match error {
            TransportError::UnknownPeer { .. } => TransportError::UnknownPeer { peer },
            TransportError::SendQueueFull { queued, .. } => TransportError::SendQueueFull { peer, queued },
            other => other,
        })
    }

    async fn next_event(&self) -> Option<Event> {
        loop {
            if let Some(event) = self.lock().events.pop_front() {
                return Some(event);
            }
            match self.any_event().await {
                Next::Of(member, event) => {
                    if let Some(event) = self.translate(member, event) {
                        return Some(event);
                    }
                }
                Next::News => {}
                Next::Over => {
                    // What members did not say is said here: every peer is lost once.
                    let mut state = self.lock();
                    state.closed = true;
                    state.end();
                    match state.events.pop_front() {
                        Some(event) => return Some(event),
                        None => return None,
                    }
                }
            }
        }
    }

    async fn shutdown(&self, limit: Duration) {
        self.lock().closed = true;
        let mut ends: Vec<_> = self.members.iter().map(|member| Some(member.shutdown(limit))).collect();
        poll_fn(|context| {
            for end in &mut ends {
                if end.as_mut().is_some_and(|end| end.as_mut().poll(context).is_ready()) {
                    *end = None;
                }
            }
            if ends.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.news.notify_one();
    }

    fn lane(&self, peer: PeerId) -> Option<String> {
        let (member, theirs) = self.route(peer).ok()?;
        let member = &self.members[member];
        let lane = member.lane(theirs).map_or_else(String::new, |lane| format!(" ({lane})"));
        let why = self.lock().why(peer).map_or_else(String::new, |why| format!("; {why}"));
        Some(format!("{}{lane}{why}", member.name()))
    }

    fn faces(&self, regions: &[RegionId]) -> Result<Vec<Face>, TransportError> {
        let mut faces = vec![];
        for (index, member) in self.members.iter().enumerate() {
            let keys = regions.iter().map(|region| {
                let theirs = self.lock().region_at(*region, index)?;
                member.key(theirs)
            });
            let keys = match keys.collect::<Result<_, _>>() {
                Ok(keys) => keys,
                // It has ended, now or before the region came.
                Err(TransportError::Closed { .. } | TransportError::UnknownRegion { .. }) => continue,
                Err(error) => return Err(error),
            };
            faces.push(Face { name: member.name(), address: member.address(), keys });
        }
        Ok(faces)
    }

    fn adopt(&self, name: &str, address: &Address, keys: &[RegionKey]) -> Option<(Address, Vec<RegionKey>)> {
        self.member_named(name)?;
        let one = |tag, bytes: &[u8]| codec::encode(tag, &[(name.to_owned(), bytes.to_vec())].into());
        let address = Address::from_bytes(one(Tag::Address, address.as_bytes())?).ok()?;
        let keys = keys.iter().map(|key| RegionKey::from_bytes(one(Tag::Key, key.as_bytes())?).ok());
        Some((address, keys.collect::<Option<_>>()?))
    }
}

/// What comes next.
enum Next {
    Of(usize, Event),
    /// Something of our own is to be told.
    News,
    /// All members have ended.
    Over,
}

impl AutoTransport {
    /// The next event of any member. Dropping it loses nothing, since members' do not.
    async fn any_event(&self) -> Next {
        type Waiting<'a> = Pin<Box<dyn Future<Output = Option<Event>> + Send + 'a>>;
        let mut waiting: Vec<Option<Waiting<'_>>> =
            self.members.iter().map(|member| Some(member.next_event())).collect();
        let mut news = Box::pin(self.news.notified());
        // Members take turns to be asked first.
        let first = self.lock().turn(self.members.len());
        poll_fn(move |context| {
            for step in 0..waiting.len() {
                let index = (first + step) % waiting.len();
                let Some(event) = waiting[index].as_mut() else { continue };
                match event.as_mut().poll(context) {
                    Poll::Ready(Some(event)) => return Poll::Ready(Next::Of(index, event)),
                    Poll::Ready(None) => waiting[index] = None,
                    Poll::Pending => {}
                }
            }
            if waiting.iter().all(Option::is_none) {
                return Poll::Ready(Next::Over);
            }
            news.as_mut().poll(context).map(|()| Next::News)
        })
        .await
    }
}

impl fmt::Debug for AutoTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.members.iter().map(|member| member.name()).collect();
        f.debug_struct("AutoTransport").field("members", &names).finish_non_exhaustive()
    }
}

/// Said of a connection for which nothing is left to try.
const NONE_LEFT: LossReason = LossReason::Unreachable { kind: std::io::ErrorKind::NotConnected, code: None };
