//! One side of a measurement: a process that owns a pool, and does what it is asked on its standard input until that
//! ends.

use std::io::{BufRead, Write, stdin, stdout};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_connector::transport::{
    Address, Event, OpId, PeerId, ReadLimits, ReadPart, ReadRange, ReadRequest, RegionId, RegionKey,
    Transport,
};
use kv_connector::worker::open_transport;

use super::pages;
use super::plain;
use super::pool::Pool;
use super::shape::{Draws, Shape};
use super::stats::{forget_own_peak, own_cpu_s, own_peak_bytes, seconds};
use super::wire::{Answer, Ask, Job, MARK, ProducerAt, Setup, Way};
use crate::error::Failure;

/// A connection on the same machine.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Far above any transfer that the bench makes; a transport must end it all the same.
const READ_LIMITS: ReadLimits =
    ReadLimits { total: Duration::from_secs(120), stall: Duration::from_secs(30) };
/// For the transport to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Draws that are made before the first transfer is timed. Later transfers use them again.
const DRAWS: u64 = 16;

/// Runs until standard input ends.
pub(crate) fn run() -> Result<(), Failure> {
    // No socket is its own: it only waits for the transport's events.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(|e| Failure::new("start a runtime", e))?;
    let mut side = None;
    for line in stdin().lock().lines() {
        let line = line.map_err(|e| Failure::new("read a question", e))?;
        let ask: Ask = serde_json::from_str(&line).map_err(|e| Failure::new("understand a question", e))?;
        let answer = match (ask, &mut side) {
            (Ask::Setup(setup), None) => runtime.block_on(Side::set_up(*setup)).map(|(made, answer)| {
                side = Some(made);
                answer
            }),
            (Ask::Lane, Some(side)) => Ok(Answer::Lane(side.lane())),
            (Ask::Used, _) => Ok(Answer::Used { cpu_s: own_cpu_s(), peak_bytes: own_peak_bytes() }),
            (Ask::ForgetPeak, _) => Ok(Answer::PeakForgotten(forget_own_peak())),
            (Ask::Check(job), Some(side)) => runtime.block_on(side.check(job)),
            (Ask::Time { job, least, most, seconds }, Some(side)) => {
                runtime.block_on(side.time(job, least, most, seconds))
            }
            (Ask::Count { job, seconds }, Some(side)) => runtime.block_on(side.count(job, seconds)),
            (Ask::Beside { large, small, reads }, Some(side)) => {
                runtime.block_on(side.beside(large, small, reads))
            }
            (Ask::Setup(_), Some(_)) => Err("it is set up already".to_owned()),
            (_, None) => Err("it is not set up".to_owned()),
        };
        let text = serde_json::to_string(&answer.unwrap_or_else(Answer::Failed))
            .map_err(|e| Failure::new("put an answer into words", e))?;
        // At once, so that what others print does not come between.
        let (mut out, line) = (stdout().lock(), format!("{MARK}{text}\n"));
        out.write_all(line.as_bytes()).and_then(|()| out.flush()).map_err(|e| Failure::new("answer", e))?;
    }
    if let Some(side) = side {
        runtime.block_on(side.transport.shutdown(END_LIMIT));
    }
    Ok(())
}

/// A connected consumer's view of the producer.
struct Source {
    peer: PeerId,
    key: RegionKey,
    plain: plain::Client,
    pool_bytes: u64,
}

pub(super) struct Side {
    transport: Arc<dyn Transport>,
    pool: Pool,
    region: RegionId,
    source: Option<Source>,
    /// What memcpy copies from: bytes equal to the producer's.
    twin: Option<Pool>,
    draws: Draws,
    ops: u64,
}

/// The ids of one transfer.
pub(super) struct Ids {
    remote: Vec<u32>,
    local: Vec<u32>,
}

impl Side {
    async fn set_up(setup: Setup) -> Result<(Self, Answer), String> {
        let Setup { config, pool_bytes, huge_pages, shared_memory, seed, producer, floors } = setup;
        let failed = |e| format!("a pool of {pool_bytes} bytes: {e}");
        let map = || Pool::map(pool_bytes, huge_pages).map_err(failed);
        let fill = |pool: &Pool| pool.fill().map_err(|e| format!("fill a pool: {e}"));
        let pool = if shared_memory && producer.is_none() {
            Pool::map_shared(pool_bytes, huge_pages).map_err(failed)?
        } else {
            map()?
        };
        let transport = open_transport(&config).map_err(|e| e.to_string())?;
        let region = transport.register(pool.memory.clone()).map_err(|e| e.to_string())?;
        let mut side =
            Self { transport, pool, region, source: None, twin: None, draws: Draws::new(seed), ops: 0 };
        let producer = match producer {
            None => {
                fill(&side.pool)?;
                let key = side.transport.key(region).map_err(|e| e.to_string())?;
                let plain_port =
                    plain::serve(side.pool.memory.clone()).map_err(|e| format!("listen: {e}"))?;
                side.take_events()?;
                let address = side.transport.address().as_bytes().to_vec();
                Some(ProducerAt { address, key: key.as_bytes().to_vec(), plain_port, pool_bytes })
            }
            Some(at) => {
                side.pool.poison().map_err(|e| format!("fill a pool: {e}"))?;
                side.source = Some(side.connect(at).await?);
                // What carries the bytes is known once some were carried.
                let shape = Shape { block_bytes: 4096, blocks: 1 };
                let job = Job { way: Way::Transport, shape, inflight: 1 };
                let ids = side.draw(&job);
                side.read(&job, &ids).await?;
                side.pool.poison().map_err(|e| format!("fill a pool: {e}"))?;
                None
            }
        };
        if floors {
            let twin = map()?;
            fill(&twin)?;
            side.twin = Some(twin);
        }
        Ok((side, Answer::Ready { producer }))
    }

    /// The transport's name if it has nothing to say of the producer.
    fn lane(&self) -> String {
        let lane = self.source.as_ref().and_then(|source| self.transport.lane(source.peer));
        lane.unwrap_or_else(|| self.transport.name().to_owned())
    }

    /// A producer must take the events of those who connect.
    fn take_events(&self) -> Result<(), String> {
        let transport = Arc::clone(&self.transport);
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(|e| e.to_string())?;
        let taking = move || runtime.block_on(async move { while transport.next_event().await.is_some() {} });
        std::thread::Builder::new().name("events".into()).spawn(taking).map_err(|e| e.to_string())?;
        Ok(())
    }

    async fn connect(&self, at: ProducerAt) -> Result<Source, String> {
        let ProducerAt { address, key, plain_port, pool_bytes } = at;
        let address = Address::from_bytes(address).map_err(|e| e.to_string())?;
        let key = RegionKey::from_bytes(key).map_err(|e| e.to_string())?;
        let peer = self.transport.connect(&address, CONNECT_LIMIT).map_err(|e| e.to_string())?;
        loop {
            match self.transport.next_event().await {
                Some(Event::Connected { peer: connected }) if connected == peer => break,
                Some(Event::PeerLost { reason, .. }) => return Err(format!("connect: {reason}")),
                Some(_) => {}
                None => return Err("the transport has closed".to_owned()),
            }
        }
        let plain = plain::Client::connect(plain_port).map_err(|e| format!("connect: {e}"))?;
        Ok(Source { peer, key, plain, pool_bytes })
    }

    fn draw(&mut self, job: &Job) -> Ids {
        let there = self.source.as_ref().map_or(0, |source| source.pool_bytes);
        let remote = self.draws.ids(job.shape.blocks, there / job.shape.block_bytes);
        let local = self.draws.ids(job.shape.blocks, self.pool.bytes() / job.shape.block_bytes);
        Ids { remote, local }
    }

    /// Ids of both sides that lie between two places.
    pub(super) fn draw_between(&mut self, shape: Shape, from: u64, to: u64) -> Result<Ids, String> {
        let first = from.div_ceil(shape.block_bytes);
        let count = (to / shape.block_bytes).saturating_sub(first);
        if count < shape.blocks {
            let Shape { block_bytes, blocks } = shape;
            return Err(format!(
                "{blocks} blocks of {block_bytes} bytes between {from} and {to}: {count} fit"
            ));
        }
        let mut ids = || self.draws.ids(shape.blocks, count).iter().map(|id| id + first as u32).collect();
        Ok(Ids { remote: ids(), local: ids() })
    }

    pub(super) fn pool_bytes(&self) -> u64 {
        self.pool.bytes()
    }

    /// One transfer, from block ids to the bytes in their places. Returns its seconds.
    async fn transfer(&mut self, job: &Job, ids: &Ids) -> Result<f64, String> {
        let began = Instant::now();
        let block_bytes = job.shape.block_bytes;
        match job.way {
            Way::Transport => self.read(job, ids).await?,
            Way::PlainTcp => {
                let source = self.source.as_mut().ok_or("there is no producer")?;
                let read = source.plain.read(&self.pool.memory, &ids.remote, &ids.local, block_bytes);
                read.map_err(|e| format!("plain TCP: {e}"))?;
            }
            Way::Memcpy => {
                let twin = self.twin.as_ref().ok_or("there is nothing to copy from")?;
                let (from, into) = (&twin.memory, &self.pool.memory);
                pages::copy(from, &ids.remote, into, &ids.local, block_bytes as usize)
                    .map_err(|e| format!("memcpy: {e}"))?;
            }
        }
        Ok(seconds(began.elapsed()))
    }

    /// Submits a transfer as one or more reads.
    pub(super) fn submit(&mut self, job: &Job, ids: &Ids) -> Result<Vec<OpId>, String> {
        let source = self.source.as_ref().ok_or("there is no producer")?;
        let block_bytes = job.shape.block_bytes;
        let each = ids.remote.len().div_ceil(job.inflight.max(1) as usize).max(1);
        let mut ops = vec![];
        for (remote, local) in ids.remote.chunks(each).zip(ids.local.chunks(each)) {
            let ranges = remote.iter().zip(local).map(|(remote, local)| ReadRange {
                remote_offset: u64::from(*remote) * block_bytes,
                local_offset: u64::from(*local) * block_bytes,
                len: block_bytes,
            });
            let part = ReadPart { key: source.key.clone(), region: self.region, ranges: ranges.collect() };
            self.ops += 1;
            let op = OpId(self.ops);
            let request = ReadRequest { op, peer: source.peer, parts: vec![part], limits: READ_LIMITS };
            self.transport.read(request).map_err(|e| e.to_string())?;
            ops.push(op);
        }
        Ok(ops)
    }

    pub(super) async fn event(&self) -> Result<Event, String> {
        self.transport.next_event().await.ok_or_else(|| "the transport has closed".to_owned())
    }

    /// The operation of the next read that ends, well; anything else is an error.
    pub(super) async fn next_end(&self) -> Result<OpId, String> {
        loop {
            match self.event().await? {
                Event::ReadCompleted { op, outcome } => {
                    outcome.result.map_err(|e| e.to_string())?;
                    return Ok(op);
                }
                Event::PeerLost { reason, .. } => return Err(format!("the producer is lost: {reason}")),
                _ => {}
            }
        }
    }

    async fn read(&mut self, job: &Job, ids: &Ids) -> Result<(), String> {
        for _ in self.submit(job, ids)? {
            self.next_end().await?;
        }
        Ok(())
    }

    async fn check(&mut self, job: Job) -> Result<Answer, String> {
        self.pool.poison().map_err(|e| e.to_string())?;
        let ids = self.draw(&job);
        self.transfer(&job, &ids).await?;
        let found = self.pool.check(job.shape.block_bytes, &ids.remote, &ids.local);
        let found = found.map_err(|e| e.to_string())?;
        Ok(Answer::Checked { bad: found.bad, spilled: found.spilled })
    }

    async fn time(&mut self, job: Job, least: u64, most: u64, limit_s: f64) -> Result<Answer, String> {
        let ids: Vec<Ids> = (0..most.clamp(1, DRAWS)).map(|_| self.draw(&job)).collect();
        let (cpu, began) = (own_cpu_s(), Instant::now());
        let mut times = vec![];
        for (done, ids) in (0..most).zip(ids.iter().cycle()) {
            if done >= least && seconds(began.elapsed()) >= limit_s {
                break;
            }
            times.push(self.transfer(&job, ids).await?);
        }
        let (cpu_s, wall_s) = (own_cpu_s() - cpu, seconds(began.elapsed()));
        Ok(Answer::Timed { seconds: times, cpu_s, wall_s })
    }

    async fn count(&mut self, job: Job, limit_s: f64) -> Result<Answer, String> {
        let ids: Vec<Ids> = (0..DRAWS).map(|_| self.draw(&job)).collect();
        let (mut transfers, began) = (0, Instant::now());
        for ids in ids.iter().cycle() {
            self.transfer(&job, ids).await?;
            transfers += 1;
            if seconds(began.elapsed()) >= limit_s {
                break;
            }
        }
        Ok(Answer::Counted { transfers, wall_s: seconds(began.elapsed()) })
    }
}
