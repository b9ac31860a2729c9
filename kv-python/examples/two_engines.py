"""Two engines in one process: P computes a prompt's KV, D gets it over TCP. Needs numpy, and nothing else.

python examples/two_engines.py
"""

import numpy as np

from kv_connector import BlocksReleased, Identity, LoadEnded, SchedulerCore, WorkerCore

BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 64, 16, 2, 8


class Engine:
    """What an engine has to do: a cache, the two halves, and a step that carries bytes between them."""

    def __init__(self, name: str) -> None:
        self.cache = np.zeros((BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE), np.float32)
        block = self.cache[0].nbytes
        region = dict(layer="layers.0", kind="key_value", group=0, memory=0, base=0, block_stride=block,
                      block_bytes=block, dtype="f32", heads=HEADS, head_size=HEAD_SIZE)  # fmt: skip
        layout = dict(block_tokens=BLOCK_TOKENS, blocks=BLOCKS, order="tokens_heads", regions=[region])
        config = {"engine_id": name}
        identity = Identity.draw(config)
        self.worker = WorkerCore(config, identity, 0, "a-model", layout, [self.cache])
        self.scheduler = SchedulerCore(config, identity, [self.worker.card()])

    def step(self) -> list:
        """One engine step: the plan to the worker, its report back, and what happened."""
        if plan := self.scheduler.plan_step():
            self.worker.begin_step(plan)
        self.worker.wait_report(0.01)  # An engine that computes has no need to wait.
        if report := self.worker.report():
            self.scheduler.take_report(report.data)
        return self.scheduler.events()


def main() -> None:
    p, d = Engine("p"), Engine("d")
    prompt = list(range(100, 140))  # 40 tokens: two blocks and a half.

    # P: the request says that somebody else will decode. Its blocks are held until D has read them.
    p.scheduler.request_arrived("r-1", prompt, {"do_remote_decode": True})
    p.cache[[3, 5, 7]] = np.random.default_rng(1).random((3, BLOCK_TOKENS, HEADS, HEAD_SIZE))
    finished = p.scheduler.request_finished("r-1", len(prompt), [[3, 5, 7]])
    print("P holds", finished.hold)

    # D: the router brings P's parameters; D allocates blocks and waits.
    d.scheduler.request_arrived("r-1", prompt, finished.params)
    tokens = d.scheduler.remote_tokens("r-1", 0)
    d.scheduler.blocks_allocated("r-1", 0, tokens, [[10, 20, 30]])

    released = loaded = False
    while not (released and loaded):
        released |= any(isinstance(event, BlocksReleased) for event in p.step())
        for event in d.step():
            if isinstance(event, LoadEnded):
                assert event.loaded, event.detail
                print(f"D has {event.remote_tokens} tokens, {event.bytes} bytes")
                loaded = True
    assert np.array_equal(d.cache[[10, 20, 30]], p.cache[[3, 5, 7]])
    print("equal, and P's blocks are free")


if __name__ == "__main__":
    main()
