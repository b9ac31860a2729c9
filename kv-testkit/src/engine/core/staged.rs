//! An engine whose cache lies on a device: requests pass through a pool of host blocks on their way out and in.

use std::collections::BTreeMap;

use kv_connector::recovery::Policy;
use kv_connector::staging::host_lists;
use kv_connector::{DeviceVerdict, HoldId, RequestEnd, StagedBlocks, StagingEvent, Verdict};
use kv_proto::{BlockId, BlockList, CopyId, LoadFailure};

use super::super::request::{Happening, Request, Stage};
use super::Core;

/// What a request has to do with the host pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in super::super) enum Staged {
    /// Nothing.
    #[default]
    No,
    /// It waits for room to load into, for so many tokens beyond the local ones.
    Room { copy: CopyId, local: u32, remote: u32 },
    /// A load fills its host blocks.
    Loading { copy: CopyId, host: Vec<StagedBlocks> },
    /// They are on their way to the device; then it goes on from that token.
    Restoring { copy: CopyId, tokens: u32 },
    /// It has finished, with so many tokens computed, and is on its way to the host.
    Saving { copy: CopyId, computed: u32 },
}

impl Staged {
    fn copy(&self) -> Option<CopyId> {
        match self {
            Self::No => None,
            Self::Room { copy, .. }
            | Self::Loading { copy, .. }
            | Self::Restoring { copy, .. }
            | Self::Saving { copy, .. } => Some(*copy),
        }
    }

    /// The lists of host blocks that a load fills.
    pub(super) fn host(&self) -> Option<Vec<BlockList>> {
        match self {
            Self::Loading { host, .. } => Some(host_lists(host)),
            Self::No | Self::Room { .. } | Self::Restoring { .. } | Self::Saving { .. } => None,
        }
    }
}

/// Who waits for copies, and what only a copy's end gives back.
#[derive(Debug, Default)]
pub(super) struct Copies {
    requests: BTreeMap<CopyId, u64>,
    /// Device blocks that a copy may touch although its request has no use for them.
    device: BTreeMap<CopyId, Vec<BlockId>>,
}

impl Core {
    fn is_staged(&self) -> bool {
        self.connector.as_ref().is_some_and(kv_connector::SchedulerConnector::is_staged)
    }

    /// A request has finished. Whether its blocks go to the host first, and it ends later.
    pub(super) fn save(&mut self, number: u64) -> bool {
        let Some(request) = self.requests.get_mut(&number) else { return false };
        let Some(connector) = self.connector.as_mut().filter(|connector| connector.is_staged()) else {
            return false;
        };
        if !request.role.hands_over() || request.stage != Stage::Running {
            return false;
        }
        let computed = request.computed;
        let end = RequestEnd::Complete {
            computed_tokens: computed,
            blocks: request.blocks.lists(),
            sampled: request.output.clone(),
        };
        let copy = match connector.save(&request.ask.id, &end) {
            Ok(Some(copy)) => copy,
            Ok(None) => return false,
            Err(error) => {
                tracing::warn!(id = %request.ask.id, %error, "nothing is handed over");
                return false;
            }
        };
        request.stage = Stage::Saving;
        request.staged = Staged::Saving { copy, computed };
        // What a step ahead sampled is nobody's.
        request.epoch += 1;
        request.pending = 0;
        self.running.retain(|n| *n != number);
        self.copies.requests.insert(copy, number);
        true
    }

    /// What the hook that ends a request is told: host blocks, or the device's own where there is no host pool.
    pub(super) fn end_of(&self, request: &Request, saved: Option<&[StagedBlocks]>) -> RequestEnd {
        let (computed_tokens, blocks) = match (&request.staged, saved) {
            (Staged::Saving { computed, .. }, Some(host)) => (*computed, host_lists(host)),
            // Device blocks mean nothing to whoever reads host blocks.
            _ if self.is_staged() => (0, Vec::new()),
            _ => (request.computed, request.blocks.lists()),
        };
        RequestEnd::Complete { computed_tokens, blocks, sampled: request.output.clone() }
    }

    /// Where the device blocks of a request that ends go; `verdict` is of its host blocks, if it has any.
    pub(super) fn give_up(&mut self, request: &mut Request, verdict: Verdict) {
        let blocks = request.blocks.take();
        match (request.staged.copy(), verdict) {
            (Some(copy), verdict) => self.let_go(copy, verdict, blocks),
            (None, Verdict::Free) => self.release(blocks),
            (None, Verdict::Hold(hold)) => {
                if request.ask.max_tokens > 1 && matches!(hold, HoldId::Lease(_)) {
                    self.kept_answers.push_back(hold);
                }
                self.hold(hold, blocks);
            }
        }
    }

    /// Lets go of a copy. The device blocks are free, or wait for its end.
    fn let_go(&mut self, copy: CopyId, verdict: Verdict, device: Vec<BlockId>) {
        self.copies.requests.remove(&copy);
        let Some(connector) = &mut self.connector else { return };
        match connector.let_go(copy, verdict) {
            Ok(DeviceVerdict::Free) => self.release(device),
            Ok(DeviceVerdict::Hold) => drop(self.copies.device.insert(copy, device)),
            // A defect of this engine; blocks that nobody uses do no harm.
            Err(error) => tracing::error!(%copy, %error, "a copy could not be let go"),
        }
    }

    /// A request has device blocks for a load. True: it waits for host blocks, or is computed, and the load is not begun
    /// here.
    pub(super) fn stage_load(&mut self, number: u64, local: u32, remote: u32) -> bool {
        if remote == 0 || !self.is_staged() {
            return false;
        }
        let (Some(request), Some(connector)) = (self.requests.get_mut(&number), &mut self.connector) else {
            return false;
        };
        request.loading = remote;
        match connector.make_room(&request.ask.id, local, &request.blocks.lists()) {
            Ok(Some(copy)) => {
                request.stage = Stage::Loading;
                request.staged = Staged::Room { copy, local, remote };
                self.copies.requests.insert(copy, number);
            }
            Ok(None) => self.go_on_without(number, local, "nothing is offered any more"),
            Err(error) => self.go_on_without(number, local, &error.to_string()),
        }
        true
    }

    /// The load into a request's host blocks has ended with so many tokens in place. True: they go to the device, and the
    /// request goes on when they are there.
    pub(super) fn restore(&mut self, number: u64, tokens: u32) -> bool {
        let (Some(request), Some(connector)) = (self.requests.get_mut(&number), &mut self.connector) else {
            return false;
        };
        let Staged::Loading { copy, .. } = request.staged else { return false };
        match connector.restore(copy, tokens) {
            Ok(true) => {
                request.staged = Staged::Restoring { copy, tokens };
                true
            }
            Ok(false) => {
                request.staged = Staged::No;
                self.copies.requests.remove(&copy);
                false
            }
            Err(error) => {
                tracing::error!(%copy, %error, "a copy could not be ordered");
                false
            }
        }
    }

    /// The request leaves the host blocks of its load, to the load if that may still write them. The device's were never
    /// touched. False: it has none.
    pub(super) fn leave_host_blocks(&mut self, number: u64, hold: Option<HoldId>) -> bool {
        let Some(request) = self.requests.get_mut(&number) else { return false };
        let Staged::Loading { copy, .. } = request.staged else { return false };
        request.staged = Staged::No;
        self.let_go(copy, hold.map_or(Verdict::Free, Verdict::Hold), Vec::new());
        true
    }

    /// A hold of the hand-over is over.
    pub(super) fn hold_over(&mut self, hold: HoldId) {
        self.kept_answers.retain(|kept| *kept != hold);
        if let Some(connector) = &mut self.connector {
            connector.hold_over(hold);
        }
        if let Some(blocks) = self.held.remove(&hold) {
            self.release(blocks);
        }
    }

    /// Takes what happened to copies.
    pub(super) fn hear_copies(&mut self) {
        let events = self.connector.as_mut().map(kv_connector::SchedulerConnector::staging_events);
        for event in events.unwrap_or_default() {
            let number = self.copies.requests.get(&event.copy()).copied();
            match (event, number) {
                (StagingEvent::RoomGiven { host, .. }, Some(number)) => self.room_given(number, host),
                (StagingEvent::Saved { host, .. }, Some(number)) => self.end(number, true, Some(&host)),
                (StagingEvent::Restored { copy }, Some(number)) => self.restored(copy, number),
                (StagingEvent::Failed { failure, .. }, Some(number)) => {
                    self.copy_failed(number, &failure.to_string());
                }
                (StagingEvent::Over { copy }, _) => {
                    if let Some(blocks) = self.copies.device.remove(&copy) {
                        self.release(blocks);
                    }
                }
                (StagingEvent::RanksSilent { copy, missing }, _) => {
                    tracing::error!(%copy, ?missing, "workers do not end a copy");
                }
                // Of a request that is gone; what it had was let go with it.
                (_, None) => {}
            }
        }
    }

    fn room_given(&mut self, number: u64, host: Vec<StagedBlocks>) {
        let (Some(request), Some(connector)) = (self.requests.get_mut(&number), &mut self.connector) else {
            return;
        };
        let Staged::Room { copy, local, remote } = request.staged else { return };
        let id = request.ask.id.clone();
        // The offer may have been given back meanwhile, by a limit or a drain.
        let begun = connector.remote_tokens(&id, local) == remote
            && connector.blocks_allocated(&id, local, remote, &host_lists(&host)).is_ok();
        if begun {
            request.staged = Staged::Loading { copy, host };
            self.happenings.push((number, Happening::Loading { tokens: remote }));
        } else {
            request.staged = Staged::No;
            self.let_go(copy, Verdict::Free, Vec::new());
            self.go_on_without(number, local, "the offer is void");
        }
    }

    fn restored(&mut self, copy: CopyId, number: u64) {
        self.copies.requests.remove(&copy);
        let Some(request) = self.requests.get_mut(&number) else { return };
        let Staged::Restoring { tokens, .. } = std::mem::take(&mut request.staged) else { return };
        self.in_place(number, tokens);
    }

    fn copy_failed(&mut self, number: u64, why: &str) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        match std::mem::take(&mut request.staged) {
            staged @ Staged::Saving { .. } => {
                tracing::warn!(id = %request.ask.id, why, "nothing is handed over");
                request.staged = staged;
                self.end(number, true, None);
            }
            Staged::Room { copy, local, .. } => {
                self.let_go(copy, Verdict::Free, Vec::new());
                self.go_on_without(number, local, why);
            }
            Staged::Restoring { copy, .. } => {
                // What the copy may still write is not this request's any more; the cached prefix before it is.
                let local = request.usage.cached_tokens;
                let kept = (local / self.settings.block_tokens) as usize;
                let lost = request.blocks.keep(&self.cut, kept);
                request.usage.external_tokens = 0;
                self.let_go(copy, Verdict::Free, lost);
                self.go_on_without(number, local, why);
            }
            other @ (Staged::No | Staged::Loading { .. }) => request.staged = other,
        }
    }

    /// A request whose load is not begun, or did not reach the device, is computed from so many tokens on.
    fn go_on_without(&mut self, number: u64, local: u32, why: &str) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let id = request.ask.id.clone();
        let tokens = request.loading;
        // A window's were for the end of the prompt; it is computed from its start.
        if !self.cut.caches_prefixes() {
            let lost = request.blocks.keep(&self.cut, usize::MAX);
            self.release(lost);
        }
        self.recovering.gone(number);
        if let Some(connector) = &mut self.connector {
            connector.request_declined(&id);
        }
        tracing::warn!(%id, why, recomputed = tokens, "a load does not come about");
        let reason = LoadFailure::Other;
        self.happenings.push((number, Happening::LoadFailed { reason, detail: why.to_owned() }));
        if self.settings.policy == Policy::Fail {
            self.stats.recovered.ended += 1;
            let message = format!("the KV cache of the prompt could not be loaded: {why}");
            self.happenings.push((number, Happening::Failed { client: false, message }));
            self.finish(number, false);
        } else {
            self.stats.recovered.requests += 1;
            self.stats.recovered.tokens_recomputed += u64::from(tokens);
            self.run(number, local);
        }
    }
}
