//! Host staging of an engine whose KV cache lies in device memory: the hooks beside those of the hand-over.
//!
//! To the hand-over the KV memory of such an engine is its host pool: its workers register that, and the blocks that the
//! other hooks take and return are host blocks. The copies between the two are ordered by these hooks and travel in the same
//! plans and reports.
//!
//! *A producer* calls [`SchedulerConnector::save`] when a request has finished, and
//! [`request_finished`](SchedulerConnector::request_finished) only when [`StagingEvent::Saved`] has come, with the host
//! blocks that it names; then [`SchedulerConnector::let_go`] with the verdict. *A consumer* calls
//! [`SchedulerConnector::make_room`] when it has device blocks,
//! [`blocks_allocated`](SchedulerConnector::blocks_allocated) with the host blocks of [`StagingEvent::RoomGiven`], and when
//! the load has ended [`SchedulerConnector::restore`]; the request runs when [`StagingEvent::Restored`] has come. Whoever
//! ends a request in between calls [`SchedulerConnector::let_go`] behind the hook that ends it. Holds that are over are told by
//! [`SchedulerConnector::hold_over`].

use std::time::Duration;

use kv_proto::{BlockList, CopyId, CopyNews, CopyOrder, Moment, Rank, RequestId};
use kv_sched::{
    DeviceVerdict, HoldId, RequestEnd, StagedBlocks, Staging, StagingConfig, StagingEvent, StagingStats,
    Verdict,
};

use crate::error::ConnectorError;
use crate::scheduler::SchedulerConnector;

/// What staging needs to know beyond what the cards of the workers say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagingSetup {
    /// Blocks of the engine's cache on the device.
    pub device_blocks: u32,
    /// How long a request may wait for room in the host pool.
    pub room_limit: Duration,
    /// How long a copy may take, from its order to the last rank's answer. More than the workers' own limit.
    pub copy_limit: Duration,
}

impl StagingSetup {
    /// Limits for a cache of so many blocks that suit one data centre.
    pub const fn new(device_blocks: u32) -> Self {
        Self {
            device_blocks,
            room_limit: Duration::from_secs(10),
            // The workers say after 10 seconds that a copy is late.
            copy_limit: Duration::from_secs(30),
        }
    }
}

/// Figures of host staging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct StagingFigures {
    /// Counters.
    pub counters: StagingStats,
    /// Blocks of the host pool.
    pub blocks: u32,
    /// Host blocks that somebody has.
    pub held: u32,
    /// Requests that wait for room, have some, or left some in a copy that is not over.
    pub records: usize,
    /// Of these, how many wait.
    pub waiting: usize,
}

impl SchedulerConnector {
    /// Says that the workers' registered memory is a host pool and that the engine's cache lies on a device. To be called
    /// before the first request, on an engine whose workers stage.
    pub fn stage(&mut self, setup: StagingSetup) -> Result<(), ConnectorError> {
        let config = self.scheduler.config();
        self.staging = Some(Staging::new(StagingConfig {
            ranks: config.topology.ranks,
            groups: u32::try_from(config.groups.len()).unwrap_or(u32::MAX),
            device_blocks: setup.device_blocks,
            host_blocks: config.blocks,
            room_limit: setup.room_limit,
            copy_limit: setup.copy_limit,
            report_grace: config.report_grace,
        })?);
        Ok(())
    }

    /// Whether the engine stages its blocks in host memory.
    pub fn is_staged(&self) -> bool {
        self.staging.is_some()
    }

    /// A request has finished, and `end` lists its device blocks: what it hands over is to be copied to the host pool. `None`
    /// if it hands nothing over: it is ended at once. See [`Staging::save`].
    pub fn save(&mut self, request: &RequestId, end: &RequestEnd) -> Result<Option<CopyId>, ConnectorError> {
        let now = self.now();
        let staging = self.staging.as_mut().ok_or(ConnectorError::NotStaged)?;
        let blocks = self.scheduler.to_hand_over(request, end, staging.config().device_blocks);
        if blocks.is_empty() {
            return Ok(None);
        }
        Ok(Some(staging.save(now, blocks)?))
    }

    /// A request has device blocks (by group, from the start of the sequence) of which a load is to fill those behind
    /// `local_tokens`: it needs host blocks for these. `None` if nothing remote is left. See [`Staging::room`].
    pub fn make_room(
        &mut self,
        request: &RequestId,
        local_tokens: u32,
        blocks: &[BlockList],
    ) -> Result<Option<CopyId>, ConnectorError> {
        let now = self.now();
        let staging = self.staging.as_mut().ok_or(ConnectorError::NotStaged)?;
        let blocks = self.scheduler.to_load(request, local_tokens, blocks, staging.config().device_blocks)?;
        if blocks.is_empty() {
            return Ok(None);
        }
        Ok(Some(staging.room(now, blocks)?))
    }

    /// A load has ended with so many tokens from the start of the prompt in place: their blocks are to be copied to the
    /// device. False: there is nothing to copy, and the request goes on at once. See [`Staging::restore`].
    pub fn restore(&mut self, copy: CopyId, valid_tokens: u32) -> Result<bool, ConnectorError> {
        let now = self.now();
        let end = valid_tokens.div_ceil(self.scheduler.config().block_tokens);
        let staging = self.staging.as_mut().ok_or(ConnectorError::NotStaged)?;
        Ok(staging.restore(now, copy, end)?)
    }

    /// The request has ended, or wants no copy any more; `verdict` is what the hook said that ended it, of its host blocks. The
    /// answer is of its device blocks. See [`Staging::let_go`].
    pub fn let_go(&mut self, copy: CopyId, verdict: Verdict) -> Result<DeviceVerdict, ConnectorError> {
        let now = self.now();
        let hold = match verdict {
            Verdict::Free => None,
            Verdict::Hold(hold) => Some(hold),
        };
        let staging = self.staging.as_mut().ok_or(ConnectorError::NotStaged)?;
        Ok(staging.let_go(now, copy, hold)?)
    }

    /// What held blocks is over, as [`SchedEvent::BlocksReleased`](kv_sched::SchedEvent::BlocksReleased) said: to be called as the
    /// engine comes to that event, in their order. Does nothing without staging.
    pub fn hold_over(&mut self, hold: HoldId) {
        let now = self.now();
        if let Some(staging) = &mut self.staging {
            staging.released(now, hold);
        }
    }

    /// What happened to copies since the last call, in order. To be taken behind [`SchedulerConnector::events`].
    pub fn staging_events(&mut self) -> Vec<StagingEvent> {
        let now = self.now();
        let Some(staging) = &mut self.staging else { return Vec::new() };
        staging.time_passed(now);
        staging.take_events()
    }

    /// Figures; `None` if the engine does not stage.
    pub fn staging_figures(&self) -> Option<StagingFigures> {
        let staging = self.staging.as_ref()?;
        let (records, waiting) = staging.counts();
        let (blocks, held) = (staging.config().host_blocks, staging.host_blocks_held());
        Some(StagingFigures { counters: staging.stats(), blocks, held, records, waiting })
    }

    /// What the next plan carries.
    pub(crate) fn copies(&mut self) -> Vec<CopyOrder> {
        self.staging.as_mut().map(Staging::take_orders).unwrap_or_default()
    }

    pub(crate) fn put_back_copies(&mut self, copies: Vec<CopyOrder>) {
        if let Some(staging) = &mut self.staging {
            staging.put_back(copies);
        }
    }

    pub(crate) fn copy_news(&mut self, now: Moment, rank: Rank, news: Vec<(CopyId, CopyNews)>) {
        let Some(staging) = &mut self.staging else { return };
        for (copy, news) in news {
            staging.news(now, rank, copy, news);
        }
    }
}

/// The lists of host blocks that the hooks take, from the start of the sequence.
pub fn host_lists(host: &[StagedBlocks]) -> Vec<BlockList> {
    host.iter().map(StagedBlocks::from_start).collect()
}
