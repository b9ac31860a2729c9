#!/usr/bin/env python3
"""Optional: let the ordinary (CUDA) torch wheel load on a machine without a GPU and
without the CUDA libraries, which take 2.7 GB. Makes one small stub library for each
CUDA library that torch is linked with; every stub function returns 1, an error code.
torch.cuda.is_available() stays False, CPU code is not touched. Needs gcc and readelf.

  pip install --no-deps torch==2.13.0 nvidia-cuda-runtime==13.0.96 && python slim.py
"""

import glob, os, re, subprocess, sysconfig, tempfile

site = sysconfig.get_path("purelib")
lib = os.path.join(site, "torch", "lib")
mine = sorted(glob.glob(os.path.join(lib, "*.so*")))
have = {os.path.basename(p) for p in mine}


def readelf(*a):
    return subprocess.run(["readelf", *a], capture_output=True, text=True).stdout


cuda = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt)")
need, undef, defined, versions = set(), set(), set(), {}
for p in mine:
    need |= {n for n in re.findall(r"NEEDED.*\[(.+?)\]", readelf("-d", p)) if cuda.match(n) and n not in have}
    for line in readelf("--dyn-syms", "-W", p).splitlines():
        f = line.split()
        if len(f) < 8 or not f[0].rstrip(":").isdigit():
            continue
        name, _, ver = f[7].partition("@")
        if f[6] == "UND":
            if f[4] != "WEAK":
                undef.add((name, ver.lstrip("@")))
        else:
            defined.add(name)
    for block in re.split(r"(?=Version needs section)", readelf("-V", p))[1:]:
        for part in re.split(r"Version: 1\s+File: ", block)[1:]:
            so = part.split()[0]
            for v in re.findall(r"Name: (\S+)", part):
                if so in need or cuda.match(so):
                    versions.setdefault(so, set()).add(v)
need -= {"libcuda.so.1", "libcudart.so.13"}  # the real cudart knows how to say "no device"
owner = {v: so for so, vs in versions.items() for v in vs}
plan = {so: {} for so in need}
prefix = [
    (re.compile(r), so)
    for so in need
    for r in [
        {
            "libcudnn": "cudnn",
            "libnccl": "nccl|pnccl",
            "libcusparseLt": "cusparseLt",
            "libnvshmem_host": "_?_?nvshmem|_Z.*nvshmem",
            "libcufile": "cuFile",
            "libcufft": "cufft",
            "libcurand": "curand",
            "libnvrtc": "nvrtc",
            "libcublasLt": "cublasLt",
            "libcublas": "cublas",
            "libcusparse": "cusparse",
            "libcusolver": "cusolver",
            "libcudart": "cuda|__cuda",
            "libcupti": "cupti",
        }.get(so.split(".so")[0], "$^")
    ]
]
for name, ver in sorted(undef):
    if ver and owner.get(ver) in plan:
        plan[owner[ver]].setdefault(ver, []).append(name)
    elif not ver and name not in defined:
        hit = [so for r, so in sorted(prefix, key=lambda x: -len(x[0].pattern)) if r.match(name)]
        if hit:
            plan[hit[0]].setdefault("", []).append(name)
for so, by_ver in plan.items():
    with tempfile.TemporaryDirectory() as d:
        asm, ver = [".text"], ""
        for v, names in by_ver.items():
            for n in names:
                asm += [f".globl {n}", f".type {n},@function", f"{n}: movl $1,%eax", "ret"]
            if v:
                ver += v + " { global: " + " ".join(n + ";" for n in names) + " };\n"
        for v in versions.get(so, ()):
            if v not in by_ver:
                ver += v + " { };\n"
        open(f"{d}/s.s", "w").write("\n".join(asm + ['.section .note.GNU-stack,"",@progbits', ""]))
        open(f"{d}/s.map", "w").write(ver)
        cmd = ["gcc", "-shared", "-nostdlib", "-o", os.path.join(lib, so), f"-Wl,-soname,{so}", f"{d}/s.s"]
        subprocess.run(cmd + ([f"-Wl,--version-script={d}/s.map"] if ver else []), check=True)
    print(so, sum(map(len, by_ver.values())), "functions")
