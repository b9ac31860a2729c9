"""The connector's hooks as vLLM calls them, over real sockets. Needs vLLM; without it these tests are skipped."""

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

from kv_connector import ConfigError, Identity, InternalError, WorkerCore  # noqa: E402
from kv_connector.vllm import KvConnector  # noqa: E402
from kv_connector.vllm.meta import Handshake  # noqa: E402
from kv_connector.vllm.metrics import PromMetrics, Stats  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

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


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_it_is_what_vllm_looks_for():
    assert issubclass(KvConnector, KVConnectorBase_V1) and supports_hma(KvConnector)
    assert not KvConnector.__abstractmethods__


def test_a_hand_over_ends_both_requests_transfers_in_the_step_that_heard_of_it():
    p, d = Engine("p"), Engine("d")
    p.cache[[4, 5, 6]] = np.arange(24, dtype=np.float32).reshape(3, TOKENS, 2)
    held, params = p.prefill("pr", PROMPT, [4, 5, 6])
    assert held and params["do_remote_prefill"] is True
    request, tokens = d.begin_load("dr", PROMPT, params, [9, 8, 7])
    assert tokens == len(PROMPT)
    until(lambda: p.sent == {"pr"} and d.received == {"dr"}, p, d)
    assert np.array_equal(d.cache[[9, 8, 7]], p.cache[[4, 5, 6]]) and not d.bad
    # Asked again after the load, as vLLM does, nothing remote is left.
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.update_state_after_alloc(request, None, 0)
    request.status = SimpleNamespace(name="FINISHED_STOPPED")
    assert d.scheduler.request_finished_all_groups(request, ([9, 8, 7],)) == (False, None)
    assert len(d.stats.data["load_bytes"]) == 1 and d.stats.data["load_bytes"][0] == 3 * TOKENS * 8
    assert p.stats.data["leases_ended"] == {"confirmed": 1}
    until(lambda: not p.scheduler.has_pending_push_work() and not d.scheduler.has_pending_push_work(), p, d)


def test_blocks_that_are_here_are_not_loaded_again():
    p, d = Engine("p"), Engine("d")
    p.cache[:] = 1.0
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    _, tokens = d.begin_load("dr", PROMPT, params, [9, 8, 7], local_tokens=TOKENS)
    assert tokens == len(PROMPT) - TOKENS
    until(lambda: d.received == {"dr"}, p, d)
    assert not d.cache[9].any() and d.cache[[8, 7]].all()


def test_a_request_whose_whole_prompt_is_here_gives_the_offer_back():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request = a_request("dr", PROMPT, params)
    d.scheduler.on_new_request(request)
    d.scheduler.update_state_after_alloc(request, None, 0)
    assert d.scheduler.has_pending_push_work(), "P must hear of it although nothing runs"
    until(lambda: p.sent == {"pr"}, p, d)
    assert p.stats.data["leases_ended"] == {"released": 1} and not d.received


def test_an_abort_while_loading_is_reported_once_and_p_has_its_blocks_back():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request, _ = d.begin_load("dr", PROMPT, params, [9, 8, 7])
    # vLLM itself keeps the blocks of a request that it waits for.
    assert aborted(d, request) == (False, None)
    until(lambda: p.sent == {"pr"} and d.received == {"dr"}, p, d)


def test_an_abort_before_the_load_gives_the_offer_back():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request = a_request("dr", PROMPT, params)
    d.scheduler.on_new_request(request)
    assert aborted(d, request) == (False, None)
    until(lambda: p.sent == {"pr"}, p, d)
    assert not d.received


def test_an_aborted_prefill_holds_nothing():
    p = Engine("p")
    request = a_request("pr", PROMPT, {"do_remote_decode": True})
    p.scheduler.on_new_request(request)
    p.step()
    assert aborted(p, request) == (False, None)
    p.step()
    assert not p.sent


def test_a_load_from_a_dead_producer_ends_with_the_blocks_that_are_wrong():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    p.worker.shutdown()
    p.scheduler.shutdown()
    d.begin_load("dr", PROMPT, params, [3, 9, 8, 7], local_tokens=TOKENS)
    until(lambda: d.received == {"dr"}, d)
    assert d.bad == {9, 8}, "neither what was here nor what is for later tokens"
    assert sum(d.stats.data["loads_failed"].values()) == 1


def test_a_load_that_cannot_begin_ends_in_the_next_step():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    # Fewer blocks than the tokens need.
    d.begin_load("dr", PROMPT, params, [9, 8])
    d.step()
    assert d.received == {"dr"} and d.bad == {9, 8}
    until(lambda: p.sent == {"pr"}, p, d)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.pop("kv_connector"),
        lambda p: p.update(remote_port="x"),
        lambda p: p.update(remote_block_ids=[[-1]]),
        lambda p: p.update(do_remote_decode=True),
        lambda p: p.update(remote_num_tokens=10**9),
    ],
)
def test_parameters_that_cannot_be_are_computed_here_and_counted(spoil):
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    spoil(params)
    request, tokens = d.begin_load("dr", PROMPT, params, [9, 8, 7])
    assert tokens == 0
    d.step()
    assert d.stats.data["requests_refused"] == 1 and not d.received
    assert aborted(d, request) == (False, None)


def test_an_engine_does_what_its_role_says_and_no_more():
    p, d = Engine("p", role="kv_producer"), Engine("d", role="kv_consumer")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    assert p.begin_load("x", PROMPT, params, [9, 8, 7])[1] == 0
    assert d.prefill("y", PROMPT, [4, 5, 6]) == (False, None)


def test_requests_of_no_concern_cost_nothing():
    d = Engine("d")
    for params in (None, {}, {"other": 1}, {"do_remote_prefill": False, "do_remote_decode": False}):
        request, tokens = d.begin_load("r", PROMPT, params, [1])
        assert tokens == 0 and aborted(d, request) == (False, None)
    assert not d.scheduler.has_pending_push_work() and d.stats.data["requests_refused"] == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lease_tll_ms": 5}, "lease_tll_ms is not known; known are advertise_host, checksums"),
        ({"lease_ttl_ms": -5}, "lease_ttl_ms"),
        ({"kv_lease_duration": 0}, "kv_lease_duration is 0"),
        ({"engine_id": "x"}, "engine_id belongs into kv_transfer_config"),
        ({"model": 5}, "model is 5"),
        ({"transport": "rdma"}, "rdma"),
        ({"rendezvous_port": 70000}, "rendezvous_port is 70000"),
        ({"rendezvous_wait_ms": 0}, "rendezvous_wait_ms is 0"),
    ],
)
def test_options_that_cannot_be_stop_the_start_by_name(extra, words):
    with pytest.raises(ConfigError, match=words):
        KvConnector(vllm_config("e", **extra), KVConnectorRole.SCHEDULER, cache_config())


def test_a_prompt_that_its_tokens_do_not_name_is_computed_here():
    d = Engine("d")
    _, params = Engine("p").prefill("pr", PROMPT, [4, 5, 6])
    for extra in ({"mm_features": ["a picture"]}, {"lora_request": "an adapter"}, {"prompt_embeds": "numbers"}):
        request = a_request("dr", PROMPT, params)
        request.__dict__.update(extra)
        d.scheduler.on_new_request(request)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.step()
    assert d.stats.data["requests_refused"] == 3


@pytest.mark.parametrize("prompt", [[-1], [2**40], ["a"], [1.5], [None]])
def test_tokens_that_are_none_cost_their_request_alone(prompt):
    d = Engine("d")
    request = a_request("r", prompt, {"do_remote_decode": True})
    d.scheduler.on_new_request(request)
    assert aborted(d, request) == (False, None)
    d.step()
    assert d.stats.data["requests_refused"] == 1


def test_a_fault_of_ours_does_not_reach_vllms_loop():
    d = Engine("d")
    d.scheduler._scheduler._core = object()
    request = a_request("r", PROMPT, {"do_remote_decode": True})
    d.scheduler.on_new_request(request)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert d.scheduler.has_pending_push_work() is False
    assert d.scheduler.build_connector_meta(None).plan is None


def test_what_a_step_must_tell_the_workers_outlives_a_fault_of_ours():
    d = Engine("d")
    side = d.scheduler._scheduler
    side._meta.leases[7] = "pr"

    class Faulty:
        def events(self):
            raise InternalError("a panic")

        def plan_step(self):
            raise InternalError("another")

    side._core = Faulty()
    assert d.scheduler.build_connector_meta(None).leases == {7: "pr"}


def test_a_worker_whose_thread_is_gone_ends_what_was_in_its_hands(monkeypatch):
    monkeypatch.setattr("kv_connector.vllm.worker_side.QUIET_AFTER_DEATH_S", 0.05)
    p, d = Engine("p"), Engine("d")
    held, params = p.prefill("pr", PROMPT, [4, 5, 6])
    assert held
    # As after a panic: the thread has ended, nobody asked for it here, and nothing is reported.
    p.core.shut_down(1.0)
    p.core.report()
    d.begin_load("dr", PROMPT, params, [9, 8, 7])
    d.core.shut_down(1.0)
    d.core.report()
    until(lambda: p.sent == {"pr"} and d.received == {"dr"}, p, d)
    assert d.bad == {9, 8, 7}


def test_before_weights_change_everything_that_is_lent_or_loaded_ends():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request = a_request("dr", PROMPT, params)
    d.scheduler.on_new_request(request)
    assert d.scheduler.reset_cache() is True
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    _, again = p.prefill("pr2", PROMPT, [7, 8, 9])
    assert p.scheduler.reset_cache() is False, "a lease is being taken back"
    until(lambda: p.sent == {"pr", "pr2"}, p, d)
    assert p.scheduler.reset_cache() is True
    # And it works again.
    assert p.prefill("pr3", PROMPT, [4, 5, 6])[0]


def test_what_decides_the_meaning_of_bytes_is_in_the_fingerprint():
    from kv_connector.vllm.options import fingerprint

    def config(cache_dtype="auto", isa="vec", rope=1e4):
        attention = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa=isa)
        hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": rope, "_name_or_path": str(time.time())})
        return SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            model_config=SimpleNamespace(dtype="bfloat16", hf_config=hf_config),
            compilation_config=SimpleNamespace(static_forward_context={"layer": attention}),
        )

    one = fingerprint("m", config(), ["layer"])
    assert one == fingerprint("m", config(), ["layer"])
    others = [config(cache_dtype="fp8_e5m2"), config(isa="amx"), config(rope=1e6)]
    assert len({one, *(fingerprint("m", other, ["layer"]) for other in others)}) == 4
    assert "CPU_ATTN/vec" in one and "kv_cache_dtype=auto" in one


def test_it_is_known_by_name_too():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert KVConnectorFactory.get_connector_class_by_name("KvConnector") is KvConnector


def test_the_stock_connectors_name_of_the_lease_is_taken():
    made = KvConnector(vllm_config("e", kv_lease_duration=12), KVConnectorRole.SCHEDULER, cache_config())
    assert made._options.config["lease_ttl_ms"] == made._options.config["lease_renewal_ms"] == 12_000


def test_models_of_several_groups_and_pipelines_are_refused_by_name():
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        KvConnector(vllm_config("e"), KVConnectorRole.SCHEDULER, cache_config(2))
    config = vllm_config("e")
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        KvConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_observations_of_ranks_and_intervals_add_up():
    one, two = Stats(), Stats()
    assert one.take() is None and one.is_empty()
    one.loaded(1_000_000, 0.5, 0.1)
    two.loaded(3_000_000, 1.5, 0.1)
    two.failed("lapsed")
    two.lease_ended("expired")
    two.refused()
    # As vLLM does, by way of plain data.
    total = KvConnector.build_kv_connector_stats(one.to_dict()).aggregate(Stats(two.to_dict()))
    said = total.reduce()
    assert said["loads"] == 2 and said["MB/s"] == 2.0 and said["MB per load"] == 2.0
    assert said["failed: lapsed"] == 1 and said["leases expired"] == 1 and said["requests refused"] == 1
    assert total.take() is not None and total.is_empty()


def test_prometheus_has_our_names_with_units():
    registry = CollectorRegistry()

    def bound(kind):
        return lambda **kwargs: kind(registry=registry, **kwargs)

    config = SimpleNamespace(kv_transfer_config=None)
    types = {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)}
    metrics = PromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    observed = Stats()
    observed.loaded(4096, 0.002, 0.001)
    observed.failed("peer_lost")
    observed.failed("other")
    observed.lease_ended("confirmed")
    metrics.observe(observed.to_dict(), 0)

    def value(name, **labels):
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0"} | labels)

    assert value("vllm:kv_connector_load_bytes_sum") == 4096
    assert value("vllm:kv_connector_load_seconds_count") == 1
    assert value("vllm:kv_connector_loads_failed_total", reason="peer_lost") == 1
    assert value("vllm:kv_connector_loads_failed_total", reason="other") == 1
    assert value("vllm:kv_connector_loads_failed_total", reason="lapsed") == 0
    assert value("vllm:kv_connector_leases_ended_total", end="confirmed") == 1


def test_the_measurement_of_a_step_runs(monkeypatch, capsys):
    import hooks

    monkeypatch.setattr(sys, "argv", ["hooks.py", "--requests", "3", "--steps", "20", "--prompt-tokens", "40"])
    hooks.main()
    assert "in flight at the end: 3 loads" in capsys.readouterr().out


class Both(SimpleNamespace):
    """P and D, and a router that asks both at once."""

    def __init__(self, p=None, **options):
        p, d = Engine("p", rendezvous_port=0, **(p or {})), Engine("d", **options)
        super().__init__(p=p, d=d, address=f"http://127.0.0.1:{p.scheduler._scheduler._rendezvous.port}")

    def for_p(self):
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}

    def for_d(self, **more):
        params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "x"}
        return params | {"remote_bootstrap_addr": self.address, "remote_engine_id": "p"} | more

    def ask_d(self, **more):
        request = a_request("dr", PROMPT, self.for_d(**more))
        self.d.scheduler.on_new_request(request)
        return request

    def prefill(self, end="FINISHED_LENGTH_CAPPED"):
        request = a_request("pr", PROMPT, self.for_p())
        self.p.scheduler.on_new_request(request)
        self.p.step()
        request.status = SimpleNamespace(name=end)
        held, _ = self.p.scheduler.request_finished_all_groups(request, ([4, 5, 6],))
        self.p.step()
        return held

    def matched(self, request):
        """What D is told once it need not wait."""
        told = []

        def asked():
            told.append(self.d.scheduler.get_num_new_matched_tokens(request, 0))
            return told[-1][0] is not None

        until(asked, self.d)
        return told[-1]


@pytest.mark.parametrize("first", ["p", "d"])
def test_asked_at_once_d_waits_for_ps_offer_and_loads_it(first):
    both = Both()
    both.p.cache[[4, 5, 6]] = np.arange(24, dtype=np.float32).reshape(3, TOKENS, 2)
    if first == "p":
        assert both.prefill()
    request = both.ask_d()
    if first == "d":
        assert both.d.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        assert both.prefill()
    assert both.matched(request) == (len(PROMPT), True)
    both.d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([9, 8, 7],)), len(PROMPT))
    until(lambda: both.p.sent == {"pr"} and both.d.received == {"dr"}, both.p, both.d)
    assert np.array_equal(both.d.cache[[9, 8, 7]], both.p.cache[[4, 5, 6]]) and not both.d.bad


def test_asked_at_once_a_prefill_that_ended_without_an_offer_makes_d_compute():
    both = Both()
    request = both.ask_d()
    assert not both.prefill(end="FINISHED_ABORTED")
    assert both.matched(request) == (0, False)
    both.d.step()
    assert both.d.stats.data["offers_missed"] == 1


def test_asked_at_once_d_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("kv_connector.vllm.rendezvous.SILENT_S", 0.2)
    monkeypatch.setattr("kv_connector.vllm.rendezvous.UNKNOWN_S", 0.2)
    both = Both(rendezvous_wait_ms=700)
    # P has not heard of it; nobody is there; another engine is there; P never ends it.
    assert both.matched(both.ask_d()) == (0, False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert both.matched(both.ask_d(remote_bootstrap_addr=address)) == (0, False)
        # One that takes connections and says nothing.
        monkeypatch.setattr("kv_connector.vllm.rendezvous.ASK_S", 0.1)
        monkeypatch.setattr("kv_connector.vllm.rendezvous.LATE_S", 0.1)
        nobody.listen()
        mute = Both(rendezvous_wait_ms=700)
        assert mute.matched(mute.ask_d(remote_bootstrap_addr=address)) == (0, False)
    assert both.matched(both.ask_d(remote_engine_id="q")) == (0, False)
    both.p.scheduler.on_new_request(a_request("pr", PROMPT, both.for_p()))
    assert both.matched(both.ask_d()) == (0, False)
    both.d.step()
    assert both.d.stats.data["offers_missed"] == 4


def test_asked_at_once_a_client_that_left_gives_the_late_offer_back():
    both = Both()
    request = both.ask_d()
    assert aborted(both.d, request) == (False, None)
    assert not both.d.scheduler.has_pending_push_work(), "nothing is to be done while P computes"
    assert both.prefill()
    until(both.d.scheduler.has_pending_push_work)
    until(lambda: both.p.sent == {"pr"}, both.p, both.d)
    assert both.p.stats.data["leases_ended"] == {"released": 1} and not both.d.received
    until(lambda: not both.d.scheduler.has_pending_push_work(), both.d)


def test_asked_at_once_an_offer_is_told_no_longer_than_its_lease_lives():
    both = Both(p=dict(lease_ttl_ms=300, lease_renewal_ms=300))
    assert both.prefill()
    until(lambda: both.p.sent == {"pr"}, both.p)
    assert both.matched(both.ask_d()) == (0, False)
    # Nor after the blocks have lost their meaning, nor in place of a later one of the same name.
    other = Both()
    assert other.prefill()
    other.p.scheduler.reset_cache()
    assert other.matched(other.ask_d()) == (0, False)
    other.d.step()
    assert other.d.stats.data["offers_missed"] == 1
    again = a_request("pr2", PROMPT, other.for_p())
    other.p.scheduler.on_new_request(again)
    request = other.ask_d()
    assert other.d.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    other.p.step()
    again.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    other.p.scheduler.request_finished_all_groups(again, ([4, 5, 6],))
    other.p.step()
    assert other.matched(request) == (len(PROMPT), True)


@pytest.mark.parametrize(
    "answer",
    [
        {"state": "offered", "kv_transfer_params": {"do_remote_decode": True}},
        {"state": "offered", "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}},
        {"state": "offered", "kv_transfer_params": [1]},
        {"state": "other"},
        {"state": "promised"},
        [1, 2],
    ],
)
def test_asked_at_once_a_stranger_that_answers_anything_costs_its_request_a_limit(answer):
    body = json.dumps(answer | {"engine_id": "p"} if isinstance(answer, dict) else answer).encode()
    asked = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(time.monotonic())
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        both = Both(rendezvous_wait_ms=600)
        request = both.ask_d(remote_bootstrap_addr=f"http://127.0.0.1:{server.server_port}")
        assert both.matched(request) == (0, False)
        # It is asked again with pauses, whatever it does.
        assert 1 <= len(asked) <= 8
        # And D has become no producer by it.
        request.status = SimpleNamespace(name="FINISHED_STOPPED")
        assert both.d.scheduler.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "spoil",
    [
        {"transfer_id": 5},
        {"transfer_id": ""},
        {"transfer_id": "x" * 300},
        {"transfer_id": "a\nb"},
        {"remote_bootstrap_addr": 5},
        {"remote_bootstrap_addr": "http://"},
        {"remote_bootstrap_addr": "file:///etc/passwd"},
        {"remote_bootstrap_addr": "http://host:99999999"},
        {"remote_bootstrap_addr": "http://name:word@host:80"},
        {"remote_bootstrap_addr": "http://host:80/admin/shutdown"},
    ],
)
def test_names_and_addresses_that_cannot_be_are_computed_here(spoil):
    both = Both()
    assert both.matched(both.ask_d(**spoil)) == (0, False)
    both.d.step()
    assert both.d.stats.data["requests_refused"] == 1 and both.d.stats.data["offers_missed"] == 0


def test_the_port_that_offers_are_told_at_answers_as_routers_expect_and_bears_garbage():
    both = Both()
    with urllib.request.urlopen(both.address + "/query") as answer:
        assert json.load(answer)["0"]["engine_id"] == "p"
    for path in ("/offers/..%2f..%2fx", "/offers/" + "y" * 5000, "/nothing", "/offers/%ff"):
        try:
            urllib.request.urlopen(both.address + path).read()
        except urllib.error.HTTPError as error:
            assert error.code < 500
    with socket.create_connection(("127.0.0.1", both.p.scheduler._scheduler._rendezvous.port)) as raw:
        raw.sendall(b"\x00\xff garbage\r\n\r\n")
        raw.recv(100)
    assert both.prefill()
    assert both.matched(both.ask_d()) == (len(PROMPT), True)


def test_a_port_that_is_taken_stops_the_start_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"rendezvous_port is {port}, which cannot be bound"):
            Engine("p", rendezvous_port=port)
