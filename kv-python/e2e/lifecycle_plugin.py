"""pytest plugin: vLLM's own tests of connectors, with ours behind the names of the stock one.

    python -m pytest -p lifecycle_plugin tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py ...

Nothing of vLLM is changed. Its tests build a scheduler without workers and write requests' parameters by hand; the plugin
adds what a whole engine would have: a worker, whose card the scheduler's half gets, and parameters that a producer of ours
answered. At the end it says how many connectors the tests made; none means that they never touched ours.
"""

from collections import Counter

import numpy as np

from kv_connector import Identity, SchedulerCore, WorkerCore
from kv_connector.vllm import KvConnector
from kv_connector.vllm.meta import Handshake

made: Counter = Counter()
_alive: list = []
_producers: dict = {}


def _layout(block_tokens: int, blocks: int) -> tuple[dict, np.ndarray]:
    memory = np.zeros((blocks, block_tokens, 2), np.float32)
    region = dict(
        layer="layer",
        kind="key_value",
        group=0,
        memory=0,
        base=0,
        block_stride=memory[0].nbytes,
        block_bytes=memory[0].nbytes,
        dtype="f32",
        heads=1,
        head_size=2,
    )
    return dict(block_tokens=block_tokens, blocks=blocks, order="tokens_heads", regions=[region]), memory


def _worker(config: dict, block_tokens: int, blocks: int) -> tuple[Identity, WorkerCore]:
    layout, memory = _layout(block_tokens, blocks)
    identity = Identity.draw(config)
    worker = WorkerCore(config, identity, 0, "tests", layout, [memory])
    _alive.append(worker)
    return identity, worker


class ReadyConnector(KvConnector):
    """Ours, whose worker has registered its caches by the time that the tests begin."""

    def __init__(self, vllm_config, role, kv_cache_config):
        # The tests ask one engine, by its role a consumer, for both sides; ours does what its role says.
        vllm_config.kv_transfer_config.kv_role = "kv_both"
        vllm_config.kv_transfer_config.kv_connector_extra_config = {}
        super().__init__(vllm_config, role, kv_cache_config)
        made[role.name] += 1
        if self._scheduler is None:
            return
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        identity, worker = _worker(self._options.config, block_tokens, kv_cache_config.num_blocks)
        self.set_xfer_handshake_metadata({0: Handshake(identity.to_bytes(), worker.card())})


def _offer(name: str, prompt: list[int], block_tokens: int) -> dict:
    """What a producer of ours answers for this prompt."""
    if block_tokens not in _producers:
        config = {"engine_id": f"producer-{block_tokens}"}
        identity, worker = _worker(config, block_tokens, 4096)
        _producers[block_tokens] = SchedulerCore(config, identity, [worker.card()])
    producer = _producers[block_tokens]
    blocks = list(range(-(-len(prompt) // block_tokens)))
    producer.request_arrived(name, prompt, {"do_remote_decode": True})
    return producer.request_finished(name, len(prompt), [blocks]).params


def pytest_sessionstart(session):
    import tests.v1.kv_connector.unit.utils as utils
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("NixlConnector", "NixlPullConnector"):
        KVConnectorFactory._registry[name] = lambda: ReadyConnector
    by_hand = utils.create_request
    count = 0

    def create_request(*args, **kwargs):
        nonlocal count
        count += 1
        request = by_hand(*args, **kwargs)
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            block_tokens = kwargs.get("block_size", 16)
            request.kv_transfer_params = _offer(f"offer-{count}", request.prompt_token_ids, block_tokens)
        return request

    utils.create_request = create_request


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"connectors made by the tests: {dict(made) or 'none'}")
