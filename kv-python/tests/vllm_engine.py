"""vLLM's two processes around our two objects, for the tests of the hooks. To be imported where vLLM is installed."""

import time
from types import SimpleNamespace

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from kv_connector import Identity, WorkerCore
from kv_connector.vllm import KvConnector
from kv_connector.vllm.meta import Handshake
from kv_connector.vllm.metrics import Stats

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
TOKENS, BLOCKS = 4, 32
LIMIT_S = 20.0


def vllm_config(name, role="kv_both", ranks=1, **extra):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=name,
            kv_connector_extra_config={"handshake_host": "127.0.0.1", "transport_host": "127.0.0.1"} | extra,
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
        ),
        model_config=SimpleNamespace(model="a-model", revision=None, quantization=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=extra.pop("pipeline", 1)),
    )


def cache_config(groups=1):
    spec = SimpleNamespace(block_size=TOKENS)
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])] * groups, num_blocks=BLOCKS
    )


class Engine:
    """vLLM's two processes around our two objects, and the order in which it calls them."""

    def __init__(self, name, **options):
        config = vllm_config(name, **options)
        self.scheduler = KvConnector(config, KVConnectorRole.SCHEDULER, cache_config())
        self.worker = KvConnector(config, KVConnectorRole.WORKER, cache_config())
        self.cache = np.zeros((BLOCKS, TOKENS, 2), np.float32)
        block = self.cache[0].nbytes
        region = dict(
            layer="layer",
            kind="key_value",
            group=0,
            memory=0,
            base=0,
            block_stride=block,
            block_bytes=block,
            dtype="f32",
            heads=1,
            head_size=2,
        )
        layout = dict(block_tokens=TOKENS, blocks=BLOCKS, order="tokens_heads", regions=[region])
        side = self.worker._work
        side._core = self.core = WorkerCore(
            side._options.config, identity := Identity.draw(side._options.config), 0, "a-model", layout, [self.cache]
        )
        side._handshake = Handshake(identity.to_bytes(), self.core.card())
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.sent, self.received, self.bad, self.stats = set(), set(), set(), Stats()

    def step(self):
        meta = self.scheduler.build_connector_meta(None)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        for side in (self.worker, self.scheduler):
            observed = side.get_kv_connector_stats()
            if observed is not None:
                self.stats.aggregate(observed)
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        # vLLM ends on an id that it hears of twice.
        assert not self.sent & results.finished_sending and not self.received & results.finished_recving
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.bad |= output.invalid_block_ids

    def prefill(self, name, prompt, blocks):
        request = a_request(name, prompt, {"do_remote_decode": True})
        self.scheduler.on_new_request(request)
        self.step()
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        held, params = self.scheduler.request_finished_all_groups(request, (blocks,))
        self.step()
        return held, params

    def begin_load(self, name, prompt, params, blocks, local_tokens=0):
        request = a_request(name, prompt, params)
        self.scheduler.on_new_request(request)
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, local_tokens)
        if is_async:
            allocated = SimpleNamespace(get_block_ids=lambda: (blocks,))
            self.scheduler.update_state_after_alloc(request, allocated, tokens)
        return request, tokens


def a_request(name, prompt, params):
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=prompt,
        kv_transfer_params=params,
        num_tokens=len(prompt),
        num_computed_tokens=len(prompt),
        status=SimpleNamespace(name="WAITING"),
    )


def until(fact, *engines):
    end = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < end, [(e.sent, e.received, e.bad) for e in engines]
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def aborted(engine, request):
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    return engine.scheduler.request_finished_all_groups(request, ([],))
