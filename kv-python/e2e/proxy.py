#!/usr/bin/env python3
"""Tiny disaggregated prefill/decode proxy (OpenAI completions), loopback only.

For each request: (1) send it to a prefill engine P with max_tokens=1 and
kv_transfer_params.do_remote_decode=true; (2) send it unchanged, plus the
kv_transfer_params that P returned, to a decode engine D; (3) relay D's answer.
Engines are taken in turn, so several P and D can be given.

  python proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

With --at-once it asks both at the same time, and D asks P for the offer by the request's name:

  python proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --at-once http://127.0.0.1:8998

`pd_run.py` uses the class in-process, with a hook between (1) and (2) for faults.
"""

import argparse, asyncio, itertools, json, uuid

import aiohttp
from aiohttp import web

PREFILL_PARAMS = dict(
    do_remote_decode=True,
    do_remote_prefill=False,
    remote_engine_id=None,
    remote_block_ids=None,
    remote_host=None,
    remote_port=None,
)


class PDProxy:
    def __init__(
        self,
        prefill,
        decode,
        after_prefill=None,
        after_decode_sent=None,
        timeout=600.0,
        prefill_timeout=30.0,
        trace=None,
        at_once=(),
    ):
        self.p = itertools.cycle(list(itertools.zip_longest(prefill, at_once)))
        self.d = itertools.cycle(decode)
        self.after_prefill = after_prefill  # async hook(request_id, kv_transfer_params)
        self.after_decode_sent = after_decode_sent  # sync hook(request_id), D's request is under way
        self.timeout = aiohttp.ClientTimeout(total=timeout)
        self.prefill_timeout = aiohttp.ClientTimeout(total=prefill_timeout)
        self.trace = trace if trace is not None else []
        self.session = None
        self.prefills = set()

    def app(self):
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_get("/health", lambda r: web.Response())

        async def close(_):
            if self.session:
                await self.session.close()

        app.on_cleanup.append(close)
        return app

    async def prefill(self, url, body, headers, rid):
        """P's parameters, and why there are none."""
        try:
            async with self.session.post(url, json=body, headers=headers, timeout=self.prefill_timeout) as r:
                text = await r.text()
                if r.status != 200:
                    return None, "prefill answered %d: %s" % (r.status, text[:500])
                params = json.loads(text).get("kv_transfer_params")
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            return None, "prefill unreachable: %r" % e
        self.trace.append((rid, params))
        if self.after_prefill:
            await self.after_prefill(rid, params)
        return params, None

    async def handle(self, request):
        if self.session is None:
            self.session = aiohttp.ClientSession(timeout=self.timeout, connector=aiohttp.TCPConnector(limit=0))
        body = await request.json()
        rid = request.headers.get("x-request-id") or uuid.uuid4().hex
        headers = {"x-request-id": rid}
        pre = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "min_tokens")}
        pre["max_tokens"] = 1
        if "max_completion_tokens" in body:
            pre["max_completion_tokens"] = 1
        pre["kv_transfer_params"] = dict(PREFILL_PARAMS)
        prefill, meeting = next(self.p)
        dec = dict(body)
        if meeting:
            name = {"transfer_id": "xfer-" + rid}
            pre["kv_transfer_params"] |= name
            dec["kv_transfer_params"] = dict(
                do_remote_decode=False, do_remote_prefill=True, remote_bootstrap_addr=meeting, **name
            )
            # Nobody waits for its answer, which D hears of from P.
            task = asyncio.create_task(self.prefill(prefill + request.path, pre, headers, rid))
            self.prefills.add(task)
            task.add_done_callback(self.prefills.discard)
        else:
            params, problem = await self.prefill(prefill + request.path, pre, headers, rid)
            if problem:
                return web.json_response({"error": problem}, status=502)
            if params:
                dec["kv_transfer_params"] = params
        resp = None
        try:
            post = self.session.post(next(self.d) + request.path, json=dec, headers=headers)
            if self.after_decode_sent:
                self.after_decode_sent(rid)
            async with post as r:
                resp = web.StreamResponse(
                    status=r.status, headers={"content-type": r.headers.get("content-type", "application/json")}
                )
                await resp.prepare(request)
                async for chunk in r.content.iter_any():
                    await resp.write(chunk)
                await resp.write_eof()
                return resp
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            what = "decode timed out" if isinstance(e, asyncio.TimeoutError) else "decode unreachable: %r" % e
            if resp is None:
                return web.json_response({"error": what}, status=502)
            try:
                await resp.write(b"\n\ndata: " + json.dumps({"error": what}).encode() + b"\n\n")
            except ConnectionError:
                pass  # it was our client that went away
            return resp


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--port", type=int, default=8000)
    ap.add_argument("--prefill", nargs="+", required=True)
    ap.add_argument("--decode", nargs="+", required=True)
    ap.add_argument("--at-once", nargs="+", default=[], metavar="URL", help="where each prefill engine tells its offers")
    a = ap.parse_args()
    web.run_app(PDProxy(a.prefill, a.decode, at_once=a.at_once).app(), host="127.0.0.1", port=a.port, print=None)
