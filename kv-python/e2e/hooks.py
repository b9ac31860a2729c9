#!/usr/bin/env python3
"""What the connector costs an engine step: the time spent in its hooks, with nothing to do and with loads in flight.

  python hooks.py [--requests 100] [--json FILE]

Both halves of a consumer run here as vLLM calls them, the scheduler's and one worker's, without an engine around them. The
requests' producer takes connections and never answers, so that their loads stay in flight while steps are measured.
"""

import argparse
import json
import socket
import statistics
import time
from types import SimpleNamespace

import lifecycle_plugin as plugin
from kv_connector.vllm.meta import Handshake, StepMeta
from kv_connector.vllm.options import Options
from kv_connector.vllm.scheduler_side import SchedulerSide
from kv_connector.vllm.worker_side import WorkerSide

BLOCK_TOKENS = 16


def sides(blocks: int) -> tuple[SchedulerSide, WorkerSide]:
    config = {"engine_id": "consumer", "load_limit_ms": 60_000}
    options = Options(config=config, model="tests", produces=True, consumes=True, ranks=1)
    identity, core = plugin._worker(config, BLOCK_TOKENS, blocks)
    scheduler = SchedulerSide(options, BLOCK_TOKENS)
    scheduler.publish({0: Handshake(identity.to_bytes(), core.card())})
    worker = WorkerSide(options, None, None)
    worker._core = core
    return scheduler, worker


def step(scheduler: SchedulerSide, worker: WorkerSide) -> None:
    """Every hook of a step, in vLLM's order."""
    meta: StepMeta = scheduler.step()
    worker.begin_step(meta)
    worker.results()
    worker.take_bad_blocks()
    worker.take_stats()
    reports = worker.take_reports()
    scheduler.heard(SimpleNamespace(kv_connector_worker_meta=reports))
    scheduler.take_stats()
    scheduler.has_work()


def measured(scheduler: SchedulerSide, worker: WorkerSide, steps: int) -> list[float]:
    spans = []
    for _ in range(steps):
        begun = time.perf_counter()
        step(scheduler, worker)
        spans.append((time.perf_counter() - begun) * 1e6)
        time.sleep(0.0002)
    return sorted(spans)


def line(what: str, spans: list[float]) -> dict:
    p50, p99 = statistics.median(spans), spans[int(len(spans) * 0.99)]
    print(f"{what:<44} p50 {p50:7.1f} us   p99 {p99:7.1f} us")
    return {"what": what, "p50_us": p50, "p99_us": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    per_request = -(-args.prompt_tokens // BLOCK_TOKENS)
    scheduler, worker = sides(args.requests * per_request)
    lines = [line("a step with nothing to do", measured(scheduler, worker, args.steps))]
    arrive, allocate = [], []
    silent = socket.create_server(("127.0.0.1", 0))
    for number in range(args.requests):
        prompt = [number + token for token in range(args.prompt_tokens)]
        params = plugin._offer(f"offer-{number}", prompt, BLOCK_TOKENS)
        params["remote_port"] = silent.getsockname()[1]
        name = f"request-{number}"
        request = SimpleNamespace(
            request_id=name, kv_transfer_params=params, prompt_token_ids=prompt, num_tokens=len(prompt)
        )
        begun = time.perf_counter()
        scheduler.arrived(request)
        arrive.append((time.perf_counter() - begun) * 1e6)
        blocks = list(range(number * per_request, (number + 1) * per_request))
        begun = time.perf_counter()
        tokens, _ = scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), tokens)
        allocate.append((time.perf_counter() - begun) * 1e6)
    begun = time.perf_counter()
    meta = scheduler.step()
    planned = time.perf_counter()
    worker.begin_step(meta)
    taken = time.perf_counter()
    lines.append(line(f"the plan of {args.requests} loads is made", [(planned - begun) * 1e6]))
    lines.append(line("and taken", [(taken - planned) * 1e6]))
    lines.append(line(f"a step with {args.requests} loads in flight", measured(scheduler, worker, args.steps)))
    lines.append(line(f"an arrival, {args.prompt_tokens} tokens", sorted(arrive)))
    lines.append(line(f"an allocation, {per_request} blocks", sorted(allocate)))
    print(f"in flight at the end: {worker.counters()['pulls']} loads")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
