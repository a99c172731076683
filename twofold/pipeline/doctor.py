"""What this machine is, and what follows from it for Twofold. Reads only; nothing is changed or sent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`mark` "ok": fine; "no": cannot, `text` says why and what to do; "info": neither."""

    name: str
    mark: Literal["ok", "no", "info"]
    text: str


def examine() -> list[Finding]:
    findings = [_python(), *_packages(), _memory(), _disk()]
    broken = [f.name for f in findings if f.mark == "no"]
    if "torch" not in broken:
        findings += [_cpu(), *_gpus(), *_compilers(), _gpu_kernels()]
    text = f"not before this is put right: {', '.join(broken)}" if broken else "yes: twofold run pocket"
    return [*findings, Finding(name="pocket line", mark="no" if broken else "ok", text=text)]


def _python() -> Finding:
    from packaging.specifiers import SpecifierSet

    wanted = importlib.metadata.metadata("twofold")["Requires-Python"]
    fine = SpecifierSet(wanted).contains(platform.python_version())
    text = platform.python_version() + ("" if fine else f": Twofold needs {wanted}")
    return Finding(name="python", mark="ok" if fine else "no", text=text)


def _packages() -> list[Finding]:
    """The versions that are installed, against the ranges that Twofold itself declares."""
    from packaging.requirements import Requirement

    findings = []
    for requirement in map(Requirement, importlib.metadata.requires("twofold") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        fine = version is not None and requirement.specifier.contains(version, prereleases=True)
        text = version or "missing"
        if not fine:
            text += f": needs {requirement.specifier}; run: pip install '{requirement}'"
        findings.append(Finding(name=requirement.name, mark="ok" if fine else "no", text=text))
    return findings


def _cpu() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    flags = _flags()
    fast = [name for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")) if flag in flags]
    native = f"bf16 in hardware ({', '.join(fast)})" if fast else "no bf16 in hardware: fp32 is used"
    text = f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}; {native}"
    return Finding(name="cpu", mark="info", text=text)


def _flags() -> set[str]:
    file = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:\s*(.*)$", file.read_text(), re.M) if file.exists() else None
    return set(found[1].split()) if found else set()


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)$", file.read_text(), re.M) if file.exists() else None
    return found[1] if found else platform.machine()


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    fine = total >= 4
    text = f"{total:.0f} GiB" + ("" if fine else ": the pocket recipe needs about 4 GiB")
    return Finding(name="memory", mark="ok" if fine else "no", text=text)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    fine = free >= 1
    text = f"{free:.0f} GiB free here" + ("" if fine else ": the pocket recipe needs about 1 GiB")
    return Finding(name="disk", mark="ok" if fine else "no", text=text)


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        cuda = torch.version.cuda
        why = f"torch {torch.__version__} has no CUDA" if cuda is None else f"no CUDA {cuda} driver answers"
        return [Finding(name="gpu", mark="info", text=f"none: {why}")]
    findings = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        findings.append(Finding(name=f"gpu {index}", mark="ok", text=text))
    return findings


def _compilers() -> list[Finding]:
    triton = importlib.util.find_spec("triton")
    return [
        Finding(name="triton", mark="info", text="not there" if triton is None else f"{triton.origin}"),
        Finding(name="nvcc", mark="info", text=shutil.which("nvcc") or "not there"),
    ]


def _gpu_kernels() -> Finding:
    """Whether the fast kernels can run; without them the reference and CPU kernels do."""
    import torch

    from twofold.ops.decode.products import why_no_products

    def finding(mark: Literal["ok", "no", "info"], text: str) -> Finding:
        return Finding(name="GPU kernels", mark=mark, text=text)

    if not torch.cuda.is_available():
        return finding("info", "cannot run here: they need an NVIDIA GPU; models run on the CPU")
    capability = torch.cuda.get_device_capability()
    if capability < (7, 5):
        return finding("no", f"need compute capability 7.5, this is {capability[0]}.{capability[1]}")
    if importlib.util.find_spec("triton") is None:
        return finding("no", "need Triton; run: pip install triton")
    if (lack := why_no_products("cuda")) is not None:
        return finding("no", f"all but the products with packed weights can run: {lack}")
    return finding("ok", "can run")
