"""Loaded by every engine process, since pd_run.py puts this folder on PYTHONPATH.

vLLM's processes wait for each other in loops around os.sched_yield(). On few cores, under
Linux's EEVDF scheduler, a thread that yields all the time pushes its own deadline far into
the future; one thread that never yields (the progress thread of a polling connector) then
starves it, and engines stall for tens of seconds. A short sleep has the same meaning and
no such effect. KV_HARNESS_YIELD=sched leaves vLLM as it is (pd_run.py --real-yield).
"""

import os
import time

if os.environ.get("KV_HARNESS_YIELD") == "sleep":
    os.sched_yield = lambda: time.sleep(0.0001)
