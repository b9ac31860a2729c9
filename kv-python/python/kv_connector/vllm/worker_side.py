"""The half in each of vLLM's worker processes: registers the caches, carries plans in and reports out."""

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from .. import ConfigError, Identity, KvConnectorError, WorkerCore
from .caches import describe
from .log import Limited, log
from .meta import Handshake, Loading, Reports, StepMeta
from .metrics import Stats
from .options import Options, fingerprint

SHUT_DOWN_S = 2.0
# After the native thread has died its transport goes down with it; until then it might still write.
QUIET_AFTER_DEATH_S = 5.0


class WorkerSide:
    """One per rank. Its native core has threads of its own; nothing here waits for them."""

    def __init__(self, options: Options, kv_cache_config: Any, vllm_config: Any) -> None:
        self._options = options
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._core: WorkerCore | None = None
        self._handshake: Handshake | None = None
        self._loads: dict[int, Loading] = {}
        self._leases: dict[int, str] = {}
        self._refused: list[Loading] = []
        # Requests whose lease was never granted here.
        self._unleased: list[str] = []
        self._died_at: float | None = None
        # For the hooks that vLLM calls one after the other in a step.
        self._bad_blocks: set[int] = set()
        self._reports: list[bytes] = []
        self._stats = Stats()
        self._limited = Limited()

    def register(self, kv_caches: dict[str, Any]) -> None:
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        caches = describe(kv_caches, self._kv_cache_config, self._options.ranks, heads)
        rank, identity = self._agree()
        model = fingerprint(self._options.model, self._vllm_config, list(kv_caches))
        self._core = WorkerCore(self._options.config, identity, rank, model, caches.layout, caches.memories)
        self._handshake = Handshake(identity.to_bytes(), self._core.card())
        log.info(
            "rank %d of engine %s registered %d regions in %d memories, %d blocks of %d tokens",
            rank,
            identity.engine_id,
            len(caches.layout["regions"]),
            len(caches.memories),
            caches.layout["blocks"],
            caches.layout["block_tokens"],
        )

    def _agree(self) -> tuple[int, Identity]:
        """This rank, and the engine's identity: the first rank draws it, the others take it over."""
        ranks = self._options.ranks
        if ranks == 1:
            return 0, Identity.draw(self._options.config, 1)
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        rank = group.rank_in_group
        drawn: bytes | str | None = None
        if rank == 0:
            try:
                drawn = Identity.draw(self._options.config, ranks).to_bytes()
            except KvConnectorError as error:
                # The others wait for a word.
                drawn = str(error)
        told = group.broadcast_object(drawn, src=0)
        if not isinstance(told, bytes):
            raise ConfigError(f"the first tensor-parallel rank has no identity of the engine: {told}")
        return rank, Identity.from_bytes(told)

    def handshake(self) -> Handshake | None:
        return self._handshake

    def begin_step(self, meta: StepMeta) -> None:
        self._loads |= meta.loads
        self._leases |= meta.leases
        self._refused += meta.refused
        if meta.plan is None:
            return
        try:
            if self._core is None:
                raise KvConnectorError("the worker's half has ended")
            self._core.begin_step(meta.plan)
        except KvConnectorError as error:
            # Nothing of it was begun, so that nobody reads or writes. The scheduler's half waits for what was in it, and
            # says so at its limit.
            log.error("a plan was refused: %s", error)
            for load in meta.loads:
                self._refused.append(self._loads.pop(load))
            for lease in meta.leases:
                self._unleased.append(self._leases.pop(lease))

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for loading in self._refused:
            self._fail(loading, 0, results)
            self._stats.failed("not_begun")
        self._refused = []
        results.finished_sending.update(self._unleased)
        self._unleased = []
        report = self._core.report() if self._core is not None else None
        if report is None:
            if self._loads or self._leases:
                self._bury(results)
            return results
        self._reports.append(report.data)
        for end in report.loads:
            loading = self._loads.pop(end.load, None)
            if loading is None:
                self._limited.warning("unknown", "load %d ended, which is not known", end.load)
                continue
            if end.loaded:
                results.finished_recving.add(loading.request)
                self._stats.loaded(end.bytes, end.read_us / 1e6, end.confirm_us / 1e6)
            else:
                self._fail(loading, end.verified, results)
                if end.reason == "cancelled":
                    # Its client went away; no failure of anybody's.
                    self._stats.cancelled()
                else:
                    self._stats.failed(end.reason)
        for lease, how in report.leases:
            request = self._leases.pop(lease, None)
            if request is not None:
                results.finished_sending.add(request)
            self._stats.lease_ended(how)
        return results

    def _bury(self, results: KVConnectorTransferResults) -> None:
        """Ends what was in the hands of a native thread that has died, once nothing can be written or read any more."""
        if self._core is None or self._core.is_running():
            return
        now = time.monotonic()
        if self._died_at is None:
            self._died_at = now
            log.error("the connector's thread has died: loads fail from now on; restart this engine")
        if now - self._died_at < QUIET_AFTER_DEATH_S:
            return
        for loading in self._loads.values():
            self._fail(loading, 0, results)
            self._stats.failed("report_missing")
        results.finished_sending.update(self._leases.values())
        self._loads, self._leases = {}, {}

    def _fail(self, loading: Loading, verified: int, results: KVConnectorTransferResults) -> None:
        results.finished_recving.add(loading.request)
        if len(loading.blocks) == 1:
            # By blocks, so that what is before them stays.
            bad = loading.blocks[0][verified:]
            self._bad_blocks.update(bad)
        else:
            results.failed_recving.add(loading.request)

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> Reports | None:
        if not self._reports:
            return None
        reports, self._reports = self._reports, []
        return Reports(reports)

    def take_stats(self) -> Stats | None:
        return self._stats.take()

    def counters(self) -> dict[str, Any]:
        """The native core's counters; empty before the caches are registered."""
        return self._core.stats() if self._core is not None else {}

    def shut_down(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.shut_down(SHUT_DOWN_S)
