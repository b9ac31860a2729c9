//! Which producer a load is begun at, and what becomes of a request when its load has ended.

use kv_connector::recovery::Policy;
use kv_connector::{LoadResult, RequestId};
use kv_proto::{LoadFailure, PeerLocator};

use super::super::recovering::Next;
use super::super::request::{Happening, Stage};
use super::{Core, Tables};

impl Core {
    /// Whether the load of a request that waits may begin, by the breaker of its producer. With policy `retry` it may
    /// also begin at another that has the same to offer; that one is then the request's producer.
    pub(super) fn may_load(&mut self, number: u64, id: &RequestId, local: u32, remote: u32) -> bool {
        let (Some(request), Some(connector)) = (self.requests.get_mut(&number), &mut self.connector) else {
            return true;
        };
        let Some(first) = &request.producer else { return true };
        if self.recovering.admits(number, first) {
            return true;
        }
        let others = if self.settings.policy == Policy::Retry { connector.sources(id) } else { Vec::new() };
        for (n, peer) in others.into_iter().enumerate().skip(1) {
            // Those that were in front of it stay in front of all that are looked at later.
            let same = connector.use_source(id, n).is_ok() && connector.remote_tokens(id, local) == remote;
            if same && self.recovering.admits(number, &peer) {
                request.producer = Some(peer);
                return true;
            }
        }
        false
    }

    /// Starts a request whose load is not begun, because loads from its producers fail: it is given back, and computed
    /// here.
    pub(super) fn start_without(&mut self, number: u64, id: &RequestId, local: u32, mut blocks: Tables) {
        // A window's were for the end of the prompt; it is computed from its start.
        let lost = blocks.keep(&self.cut, usize::MAX);
        self.release(lost);
        if let Some(connector) = &mut self.connector {
            connector.request_declined(id);
        }
        self.start(number, local, 0, blocks);
        if self.settings.policy == Policy::Fail {
            self.stats.recovered.ended += 1;
            let message =
                "the KV cache of the prompt could not be loaded: loads from its producer fail at present";
            self.happenings.push((number, Happening::Failed { client: false, message: message.to_owned() }));
            self.finish(number, false);
        }
    }

    pub(super) fn load_ended(&mut self, number: u64, result: LoadResult) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        if request.stage != Stage::Loading {
            return;
        }
        match result {
            LoadResult::Loaded { tokens, stats, .. } => {
                // From one producer or, where a load failed before, from several.
                request.usage.external_tokens = tokens.saturating_sub(request.usage.cached_tokens);
                if let Some(peer) = &request.producer {
                    self.recovering.succeeded(number, peer);
                }
                request.usage.load_bytes = stats.bytes;
                request.usage.load_ranges = stats.ranges;
                request.usage.read_us = stats.read_us;
                request.usage.confirm_us = stats.confirm_us;
                self.happenings.push((number, Happening::Loaded { stats }));
                if !self.restore(number, tokens) {
                    self.in_place(number, tokens);
                }
            }
            LoadResult::Failed { reason, detail, valid_tokens, hold, others, .. } => {
                let kept = (valid_tokens / self.settings.block_tokens) as usize;
                let caches_prefixes = self.cut.caches_prefixes();
                // A window's host blocks are of no use either.
                let untouched = (hold.is_some() || !caches_prefixes) && self.leave_host_blocks(number, hold);
                let Some(request) = self.requests.get_mut(&number) else { return };
                match hold {
                    Some(hold) if !untouched => {
                        let lost = request.blocks.keep(&self.cut, kept);
                        self.hold(hold, lost);
                    }
                    // All of it may be written again, but a window's blocks are not those that are needed now.
                    _ if !caches_prefixes => {
                        let lost = request.blocks.keep(&self.cut, usize::MAX);
                        self.release(lost);
                    }
                    _ => {}
                }
                self.load_failed(number, reason, &detail, valid_tokens, &others);
            }
        }
    }

    /// So many tokens of a request's prompt are in its blocks, confirmed: it runs.
    pub(super) fn in_place(&mut self, number: u64, tokens: u32) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        // The last token will be run again; until then its block is nobody else's.
        request.computed = tokens.min(request.known() - 1);
        // Only now, when the bytes are confirmed, may others find these blocks.
        self.publish(number);
        self.run(number, tokens);
    }

    fn load_failed(
        &mut self,
        number: u64,
        reason: LoadFailure,
        detail: &str,
        valid_tokens: u32,
        others: &[PeerLocator],
    ) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let id = request.ask.id.clone();
        let kept = valid_tokens.saturating_sub(request.usage.cached_tokens);
        let missing = request.loading.saturating_sub(kept);
        let wanted = request.usage.cached_tokens + request.loading;
        let producer = request.producer.clone();
        request.usage.external_tokens = kept;
        let next = match producer.clone() {
            Some(peer) => self.recovering.failed(number, peer, reason, others, (valid_tokens, wanted)),
            None if self.settings.policy == Policy::Fail => Next::End,
            None => Next::ResumeFrom(valid_tokens),
        };
        self.happenings.push((number, Happening::LoadFailed { reason, detail: detail.to_owned() }));
        let next = match next {
            Next::Elsewhere(n) if !self.load_from(number, n, others, valid_tokens) => {
                // The attempt that was decided on is not made.
                self.recovering.gone(number);
                Next::ResumeFrom(valid_tokens)
            }
            next => next,
        };
        let (elsewhere, recomputed) = match next {
            Next::Elsewhere(n) => (others.get(n).map(|peer| peer.engine.as_str()), 0),
            Next::ResumeFrom(_) | Next::End => (None, missing),
        };
        if let Some(unsaid) = self.recovering.may_say(producer.as_ref(), reason, recomputed) {
            let (others, tokens) = (unsaid.requests, unsaid.tokens);
            let (reason, goes_on) = (reason.name(), next != Next::End);
            tracing::warn!(%id, reason, goes_on, elsewhere, kept, recomputed, others, tokens, %detail, "a load failed");
        }
        match next {
            Next::Elsewhere(_) => self.stats.recovered.retried_elsewhere += 1,
            Next::ResumeFrom(tokens) => {
                let recovered = &mut self.stats.recovered;
                recovered.requests += 1;
                recovered.tokens_recomputed += u64::from(recomputed);
                recovered.tokens_kept += u64::from(kept);
                if let Some(connector) = &mut self.connector {
                    connector.request_declined(&id);
                }
                if !self.restore(number, tokens) {
                    self.run(number, tokens);
                }
            }
            Next::End => {
                self.stats.recovered.ended += 1;
                let message = format!("the KV cache of the prompt could not be loaded: {detail}");
                self.happenings.push((number, Happening::Failed { client: false, message }));
                self.finish(number, false);
            }
        }
    }

    /// Begins to load what is not valid from another producer. False if that cannot be: it has too little to offer,
    /// or there is no room.
    fn load_from(&mut self, number: u64, n: usize, others: &[PeerLocator], valid_tokens: u32) -> bool {
        let (Some(request), Some(connector), Some(peer)) =
            (self.requests.get_mut(&number), &mut self.connector, others.get(n))
        else {
            return false;
        };
        let id = &request.ask.id;
        if connector.use_source(id, n).is_err() {
            return false;
        }
        let block_tokens = self.settings.block_tokens;
        let local = valid_tokens / block_tokens * block_tokens;
        let remote = connector.remote_tokens(id, local);
        let all = local + remote;
        let missing = request.blocks.missing(&self.cut, all, all);
        let wanted = request.usage.cached_tokens + request.loading;
        // Host blocks are for what the first load was to bring.
        if remote == 0 || (connector.is_staged() && (all != wanted || request.staged.host().is_none())) {
            return false;
        }
        let Some(new) = self.pool.allocate(missing) else { return false };
        request.blocks.fill(&self.cut, all, all, new);
        let lists = request.staged.host().unwrap_or_else(|| request.blocks.lists());
        if connector.blocks_allocated(id, local, remote, &lists).is_err() {
            // They were a window's at the end of a load that does not come about.
            let lost = request.blocks.keep(&self.cut, usize::MAX);
            self.release(lost);
            return false;
        }
        request.producer = Some(peer.clone());
        request.loading = (local + remote).saturating_sub(request.usage.cached_tokens);
        self.happenings.push((number, Happening::Loading { tokens: remote }));
        true
    }
}
