"""vLLM engines as processes: start, health, signals, what they use, their metrics."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))


def free_ports(n, taken=set()):
    """n free ports below the ephemeral range, so that no client socket takes one meanwhile."""
    ports, rng = [], random.SystemRandom()
    while len(ports) < n:
        p = rng.randrange(18000, 32000)
        with socket.socket() as s:
            if p not in taken and s.connect_ex(("127.0.0.1", p)) != 0:
                taken.add(p)
                ports.append(p)
    return ports


def tree(pid):
    """pid and all its descendants, children last."""
    kids = {}
    for d in os.listdir("/proc"):
        if d.isdigit():
            try:
                with open(f"/proc/{d}/stat") as f:
                    kids.setdefault(int(f.read().rsplit(")", 1)[1].split()[1]), []).append(int(d))
            except (OSError, IndexError):
                pass
    out, todo = [], [pid]
    while todo:
        p = todo.pop()
        out.append(p)
        todo += kids.get(p, [])
    return out


def pss_mib(pids):
    total = 0
    for p in pids:
        try:
            with open(f"/proc/{p}/smaps_rollup") as f:
                total += sum(int(l.split()[1]) for l in f if l.startswith("Pss:"))
        except OSError:
            pass
    return total // 1024


def cpu_s(pids):
    """CPU seconds used so far by these processes (all threads)."""
    total = 0
    for p in pids:
        try:
            with open(f"/proc/{p}/stat") as f:
                v = f.read().rsplit(")", 1)[1].split()
            total += int(v[11]) + int(v[12])
        except (OSError, IndexError):
            pass
    return total / os.sysconf("SC_CLK_TCK")


def threads_cpu_s(pids, prefix):
    """CPU seconds used so far by those threads of these processes whose name begins so."""
    total = 0
    for p in pids:
        try:
            threads = os.listdir(f"/proc/{p}/task")
        except OSError:
            continue
        for t in threads:
            try:
                with open(f"/proc/{p}/task/{t}/stat") as f:
                    name, v = f.read().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            if name.startswith(prefix):
                total += int(v.split()[11]) + int(v.split()[12])
    return total / os.sysconf("SC_CLK_TCK")


class Engine:
    def __init__(self, name, a, port, side_port, kv_config=None):
        self.name, self.a, self.port, self.side_port, self.kv = name, a, port, side_port, kv_config
        self.url = f"http://127.0.0.1:{port}"
        self.proc = None
        self.runs = 0

    def start(self):
        a = self.a
        self.runs += 1
        cmd = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            a.model,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--served-model-name",
            "m",
            "--dtype",
            a.dtype,
            "--max-model-len",
            str(a.max_model_len),
            "--enforce-eager",
            "--block-size",
            str(a.block_size),
            "--no-enable-log-requests",
            "--max-num-batched-tokens",
            str(a.max_batched),
            "--seed",
            "0",
        ]
        if a.kv_blocks:
            cmd += ["--num-gpu-blocks-override", str(a.kv_blocks)]
        cmd += ["--enable-prefix-caching" if a.prefix_caching else "--no-enable-prefix-caching"]
        if self.kv:
            cmd += ["--kv-transfer-config", json.dumps(self.kv)]
        cmd += a.engine_arg + {"P": a.p_arg, "D": a.d_arg}.get(self.name, [])
        env = dict(os.environ)
        env["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles vLLM and torch anew
        env.update(
            VLLM_CPU_KVCACHE_SPACE=str(a.kv_gib),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS=str(a.threads),
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            VLLM_HOST_IP="127.0.0.1",
            UCX_NET_DEVICES="lo",
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(self.side_port),
            KV_HARNESS_ROLE=self.name,
            KV_HARNESS_YIELD="sched" if a.real_yield else "sleep",
        )
        env["PYTHONPATH"] = os.pathsep.join(a.pythonpath + [HERE] + [p for p in [env.get("PYTHONPATH")] if p])
        for kv in a.env:
            k, v = kv.split("=", 1)
            env[k] = v
        self.log = os.path.join(a.logs, f"{a.tag}-{self.name}-{self.runs}.log")
        self.t0 = time.time()
        self.proc = subprocess.Popen(
            cmd,
            env=env,
            stdout=open(self.log, "w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def healthy(self, timeout=2):
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=timeout) as r:
                return r.status == 200
        except OSError:
            return False

    def wait(self):
        while not self.healthy():
            if self.proc.poll() is not None:
                raise SystemExit(
                    f"FAIL: engine {self.name} ended with {self.proc.returncode} at start; "
                    f"last lines of {self.log}:\n" + "".join(open(self.log).readlines()[-25:])
                )
            if time.time() - self.t0 > self.a.start_timeout:
                raise SystemExit(f"FAIL: engine {self.name} not healthy after {self.a.start_timeout} s ({self.log})")
            time.sleep(0.3)
        self.start_s = time.time() - self.t0
        self.mem = pss_mib(tree(self.proc.pid))
        print(
            f"  {self.name}: up in {self.start_s:.1f} s, {self.mem} MiB (PSS of {len(tree(self.proc.pid))} processes)",
            flush=True,
        )
        return self

    def signal_all(self, sig):
        for p in tree(self.proc.pid):
            try:
                os.kill(p, sig)
            except ProcessLookupError:
                pass

    def stop(self):
        if self.proc is None:
            return
        pids = tree(self.proc.pid)
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
            try:
                self.proc.wait(15)
            except subprocess.TimeoutExpired:
                pass
        for p in pids:
            try:
                os.kill(p, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.proc.wait()

    def metrics(self):
        try:
            with urllib.request.urlopen(self.url + "/metrics", timeout=5) as r:
                text = r.read().decode()
        except OSError:
            return {}
        m = {}
        for line in text.splitlines():
            if line and line[0] != "#":
                k, v = line.rsplit(" ", 1)
                m[k] = m.get(k, 0.0) + float(v)
        return m


class Router(Engine):
    """A router of somebody else's as a process: one prefill engine, where that tells its offers, and one decode engine."""

    def __init__(self, a, prefill, decode, port, meeting_port):
        super().__init__("router", a, port, 0)
        self.cmd = [sys.executable, a.router, "--port", str(port), "--prefill", prefill.url, str(meeting_port)]
        self.cmd += ["--decode", decode.url]

    def start(self):
        self.log = os.path.join(self.a.logs, f"{self.a.tag}-{self.name}.log")
        self.t0 = time.time()
        with open(self.log, "w") as log:
            self.proc = subprocess.Popen(
                self.cmd, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return self

    def healthy(self, timeout=2):
        # It answers 503 until it knows its prefill engine, and has no path that says so.
        body = json.dumps(dict(model="m", prompt=[5, 6, 7], max_tokens=1)).encode()
        request = urllib.request.Request(self.url + "/v1/completions", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.a.hang_limit) as r:
                # A client that leaves before the end would leave P's blocks to their lease.
                return bool(r.read()) and r.status == 200
        except OSError:
            return False


def msum(m, name, *must):
    return sum(v for k, v in m.items() if k.split("{")[0] == name and all(x in k for x in must))
