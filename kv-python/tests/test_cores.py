"""The native halves as Python sees them: two engines in one process, over real sockets."""

import gc
import runpy
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kv_connector
from kv_connector import (
    BlocksReleased,
    ConfigError,
    Identity,
    KvConnectorError,
    LoadEnded,
    RequestError,
    SchedulerCore,
    WorkerCore,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_engines.py"
BLOCKS, TOKENS = 32, 4
LIMIT_S = 20.0


def layout(blocks=BLOCKS, **changes):
    region = dict(
        layer="layers.0",
        kind="key_value",
        group=0,
        memory=0,
        base=0,
        block_stride=TOKENS * 8,
        block_bytes=TOKENS * 8,
        dtype="f32",
        heads=1,
        head_size=2,
    )
    return dict(block_tokens=TOKENS, blocks=blocks, order="tokens_heads", regions=[region | changes])


class Engine:
    def __init__(self, name, model="m", **config):
        self.cache = np.zeros((BLOCKS, TOKENS, 2), np.float32)
        config = {"engine_id": name} | config
        self.identity = Identity.draw(config)
        self.worker = WorkerCore(config, self.identity, 0, model, layout(), [self.cache])
        self.scheduler = SchedulerCore(config, self.identity, [self.worker.card()])
        self.log = []

    def step(self):
        plan = self.scheduler.plan_step()
        if plan is not None:
            self.worker.begin_step(plan)
        self.worker.wait_report(0.005)
        report = self.worker.report()
        if report is not None:
            self.scheduler.take_report(report.data)
        self.log += self.scheduler.events()

    def offer(self, request, prompt, blocks):
        self.scheduler.request_arrived(request, prompt, {"do_remote_decode": True})
        self.step()
        end = self.scheduler.request_finished(request, len(prompt), [blocks])
        self.step()
        return end

    def load(self, request, prompt, params, blocks):
        assert self.scheduler.request_arrived(request, prompt, params) == "consumer"
        tokens = self.scheduler.remote_tokens(request, 0)
        return self.scheduler.blocks_allocated(request, 0, tokens, [blocks])


def until(fact, *engines):
    end = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < end, [engine.log for engine in engines]
        for engine in engines:
            engine.step()


def ended(engine, request):
    return next((e for e in engine.log if isinstance(e, LoadEnded) and e.request == request), None)


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "equal, and P's blocks are free" in capsys.readouterr().out


def test_bytes_arrive_and_the_producers_blocks_come_back():
    p, d = Engine("p"), Engine("d")
    p.cache[[4, 2]] = np.arange(16, dtype=np.float32).reshape(2, TOKENS, 2)
    prompt = [1, 2, 3, 4, 5, 6]
    end = p.offer("r", prompt, [4, 2])
    assert end.hold == f"lease-{end.lease}"
    assert d.load("r", prompt, end.params, [9, 8]) == 1
    until(lambda: ended(d, "r") and any(isinstance(e, BlocksReleased) for e in p.log), p, d)
    assert ended(d, "r").loaded and ended(d, "r").remote_tokens == 6
    assert np.array_equal(d.cache[[9, 8]], p.cache[[4, 2]])
    assert not d.cache[[0, 1, 2, 3, 4, 5, 6, 7, 10]].any()
    assert p.scheduler.stats()["producer"]["confirmed"] == 1
    assert d.worker.stats()["pulls"] == 0


def test_a_dead_producer_fails_the_load_with_a_reason():
    p, d = Engine("p"), Engine("d", retry_min_ms=50)
    end = p.offer("r", [1, 2, 3], [4])
    p.worker.shut_down(1.0)
    del p.scheduler
    d.load("r", [1, 2, 3], end.params, [9])
    until(lambda: ended(d, "r"), d)
    failed = ended(d, "r")
    assert not failed.loaded and failed.reason and failed.detail
    assert failed.invalid == [[9]] and failed.valid_tokens == 0 and failed.hold is None


def test_another_model_is_refused_by_name():
    p, d = Engine("p", model="one"), Engine("d", model="two")
    end = p.offer("r", [1, 2, 3], [4])
    d.load("r", [1, 2, 3], end.params, [9])
    until(lambda: ended(d, "r"), p, d)
    failed = ended(d, "r")
    assert failed.reason == "incompatible"
    assert "one" in failed.detail and "two" in failed.detail


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"lease_ttl": 1}, "lease_ttl"),
        ({"lease_ttl_ms": "soon"}, "lease_ttl_ms"),
        ({"lease_ttl_ms": 0}, "lease_ttl_ms"),
        ({"transport": "pigeon"}, "pigeon"),
        (7, "configuration"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(config, words):
    with pytest.raises(ConfigError, match=words):
        kv_connector.check_config(config)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (b"read only", "cannot be written"),
        ("text", "memoryview|buffer"),
        ((0, 100, None), "no memory"),
        (np.zeros((4, 4), np.float32).T, "memoryview|contiguous|cast"),
    ],
)
def test_memory_that_cannot_be_is_refused(memory, words):
    with pytest.raises((ConfigError, TypeError), match=words):
        WorkerCore(None, Identity.draw(), 0, "m", layout(), [memory])


def test_a_layout_that_does_not_fit_its_memory_is_refused_with_both_values():
    cache = np.zeros(100, np.uint8)
    with pytest.raises(KvConnectorError, match=f"{BLOCKS * TOKENS * 8}.* 100"):
        WorkerCore(None, Identity.draw(), 0, "m", layout(), [cache])


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_host": 5},
        {"do_remote_prefill": "yes"},
        [1],
        "text",
        {"do_remote_prefill": True, "remote_block_ids": [[-1]]},
        {"do_remote_prefill": True, 5: "a key that is no text"},
        {"do_remote_prefill": True, "x": object()},
    ],
)
def test_parameters_that_cannot_be_cost_their_request(params):
    d = Engine("d")
    with pytest.raises(RequestError):
        d.scheduler.request_arrived("r", [1, 2, 3], params)
    # The next one is served.
    assert d.scheduler.request_arrived("r", [1, 2, 3], None) == "plain"


@pytest.mark.parametrize("plan", [b"", b"plan", b"\xc1" * 100])
def test_bytes_that_are_no_plan_and_no_report_are_refused(plan):
    d = Engine("d")
    with pytest.raises(KvConnectorError):
        d.worker.begin_step(plan)
    with pytest.raises(KvConnectorError):
        d.scheduler.take_report(plan)


def test_an_engine_keeps_its_cache_alive():
    p, d = Engine("p"), Engine("d")
    p.cache[:] = 5.0
    end = p.offer("r", [1, 2, 3], [4])
    del p.cache
    gc.collect()
    d.load("r", [1, 2, 3], end.params, [9])
    until(lambda: ended(d, "r"), p, d)
    assert (d.cache[9] == 5.0).all()


def test_calls_release_the_interpreters_lock():
    d = Engine("d")
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(None)
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    assert d.worker.wait_report(0.2) is False
    during = len(ticks) - before
    stop.set()
    thread.join()
    assert during > 10


def test_an_identity_travels_as_bytes():
    drawn = Identity.draw({"engine_id": "e"}, 2)
    again = Identity.from_bytes(drawn.to_bytes())
    assert again == drawn and again.ranks == 2 and again.engine_id == "e"
    assert Identity.draw({"engine_id": "e"}, 2) != drawn, "another life"
    with pytest.raises(ConfigError):
        Identity.from_bytes(b"nobody")
