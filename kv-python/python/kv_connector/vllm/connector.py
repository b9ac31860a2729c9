"""The class that vLLM loads: each hook goes to the half whose process this is."""

import functools
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from .. import ConfigError
from . import options
from .log import log
from .meta import Handshake, StepMeta
from .metrics import PromMetrics, Stats
from .scheduler_side import SchedulerSide
from .worker_side import WorkerSide

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _P2P: Any = CacheHitSource.P2P
except ImportError:  # The counter's label is a convenience; nothing else depends on it.
    _P2P = None


def hook(otherwise: Any = None) -> Any:
    """A fault of ours costs what it is about, and never vLLM's loop: it is logged, and vLLM gets the harmless answer."""

    def guarded(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                log.exception("hook %s failed", method.__name__)
                return otherwise() if callable(otherwise) else otherwise

        return call

    return guarded


class KvConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV blocks from a prefill engine to a decode engine under leases.

    vLLM makes one object in its scheduler process and one in each worker process. `kv_connector_extra_config` takes the
    options that the package's README lists; an unknown or impossible one stops the start with its name.
    """

    if _P2P is not None:
        _cache_hit_source = _P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = options.parse(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            groups = kv_cache_config.kv_cache_groups
            if len(groups) != 1:
                raise ConfigError(f"the model has {len(groups)} KV cache groups; kv_connector supports 1")
            self._scheduler = SchedulerSide(self._options, groups[0].kv_cache_spec.block_size)
        else:
            self._worker = WorkerSide(self._options, kv_cache_config, vllm_config)

    # ---- scheduler process

    @hook()
    def on_new_request(self, request: Any) -> None:
        self._sched.arrived(request)

    @hook((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._sched.matched_tokens(request, num_computed_tokens)

    @hook()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._sched.allocated(request, blocks, num_external_tokens)

    @hook(StepMeta)
    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        return self._sched.step()

    @hook()
    def update_connector_output(self, connector_output: Any) -> None:
        self._sched.heard(connector_output)

    @hook((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finished(request, (block_ids,))

    @hook((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        ours = {rank: told for rank, told in metadata.items() if isinstance(told, Handshake)}
        if ours:
            self._sched.publish(ours)

    @hook(False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work()

    @property
    def _sched(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a hook of the scheduler was called in a worker process")
        return self._scheduler

    # ---- worker processes

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._work.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        return self._work.handshake()

    @hook()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        if isinstance(meta, StepMeta):
            self._work.begin_step(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps; no layer waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Consumers read; nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    @hook(lambda: (set(), set()))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self._work.results()
        return results.finished_sending, results.finished_recving

    @hook(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._work.results()

    @hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.take_bad_blocks()

    @hook()
    def build_connector_worker_meta(self) -> Any:
        return self._work.take_reports()

    @property
    def _work(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a hook of a worker was called in the scheduler process")
        return self._worker

    # ---- both

    @hook()
    def get_kv_connector_stats(self) -> Stats | None:
        side = self._scheduler or self._worker
        return side.take_stats() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @hook(False)
    def reset_cache(self) -> bool:
        """vLLM calls it when blocks lose their meaning, such as after new weights: what is offered, loaded or lent ends."""
        return self._scheduler is None or self._scheduler.reset()

    def shutdown(self) -> None:
        try:
            if self._scheduler is not None:
                self._scheduler.shut_down()
            if self._worker is not None:
                self._worker.shut_down()
        except Exception:  # vLLM goes on with its own end whatever ours does.
            log.exception("the connector did not end cleanly")
