"""``talkoot doctor``: is this machine fit, and how fast is it?"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from talkoot.cli.output import print_json, print_table
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.keys import Key, verify

if TYPE_CHECKING:
    from talkoot.plan.profile import Profile

NEEDED = ("torch", "pyzmq", "msgspec", "cryptography", "safetensors", "tokenizers", "numpy", "starlette", "uvicorn")
OPTIONAL = {"transformers": "hf", "pyarrow": "data", "datasets": "data"}
Finding = tuple[str, str, bool]


def run(*, as_json: bool, probe: Path | None = None, nodes: int = 3) -> None:
    """Run the verb; exits with 4 when something needed does not work."""
    if probe is not None:
        return _probe(probe, nodes, as_json=as_json)
    findings = [*_machine(), *_libraries(), *_works()]
    if as_json:
        print_json([{"check": what, "found": found, "ok": ok} for what, found, ok in findings])
    else:
        print_table([("ok" if ok else "BAD", what, found) for what, found, ok in findings])
    if not all(ok for _, _, ok in findings):
        sys.exit(Exit.FAILED_CHECK)
    return None


def _probe(path: Path, nodes: int, *, as_json: bool) -> None:
    """Measure links and speed with ``nodes`` peer processes on this machine, and write the profile to ``path``."""
    from talkoot.plan.profile import dump_profile

    if path.exists() or not path.parent.is_dir():
        raise TalkootError(
            "the profile cannot be written",
            where=str(path),
            why="it exists already" if path.exists() else f"there is no folder {path.parent}",
            next="name another file, or remove that one" if path.exists() else "make the folder, or name another one",
        )
    profile = measure(nodes)
    with path.open("x", encoding="utf-8") as file:
        file.write(f"# Measured by `talkoot doctor --probe`: {nodes} processes on one machine.\n")
        file.write(dump_profile(profile))
    if as_json:
        print_json({"profile": str(path), **msgspec.to_builtins(profile)})
        return
    rows = [
        (name, f"{link.latency_s * 1e3:.3f} ms", f"{link.bytes_per_s / 2**20:.1f} MiB/s")
        for name, link in profile.links.items()
    ]
    print_table(rows, ("link", "latency", "bandwidth"))
    seconds = [(node.name, f"{node.layer_sample_s * 1e3:.3f} ms", node.slots) for node in profile.nodes]
    print()
    print_table(seconds, ("node", "layer, one sample", "slots"))


def measure(nodes: int) -> Profile:
    """A measured profile of that many peer processes on this machine, timing a layer of the default recipe's model."""
    from talkoot.model.config import ModelConfig
    from talkoot.train.probe import Probe, probe
    from talkoot.train.recipe import Recipe, peer_names
    from talkoot.world.real.host import RealHost
    from talkoot.world.real.peer import Settings

    recipe = Recipe()
    config = ModelConfig.from_depth(recipe.model.depth, 1024)
    job = Probe(config=config, context=recipe.model.context, samples=recipe.train.microbatch_size, shared_by=nodes)

    async def main() -> Profile:
        host = RealHost(Settings(run="probe", name="lead"), preload=("torch", "talkoot.model.stage", probe.__module__))
        try:
            await host.ready()
            return await probe(host, peer_names(nodes), job)
        finally:
            await host.dismiss()
            await host.close()

    return asyncio.run(main())


def _machine() -> list[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return [
        ("Python", platform.python_version(), sys.version_info >= (3, 11)),
        ("processors", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()), True),
        ("memory", f"{memory:.1f} GiB", memory >= 2),
        ("free disk here", f"{free:.1f} GiB", free >= 1),
    ]


def _libraries() -> list[Finding]:
    rows: list[Finding] = []
    for name in (*NEEDED, *OPTIONAL):
        try:
            rows.append((name, importlib.metadata.version(name), True))
        except importlib.metadata.PackageNotFoundError:
            extra = OPTIONAL.get(name)
            rows.append((name, f"absent; pip install 'talkoot[{extra}]'" if extra else "absent", extra is not None))
    return rows


def _works() -> list[Finding]:
    key = Key()
    signed = verify(key.peer, key.sign(b"talkoot"), b"talkoot")
    rows = [("signatures", "Ed25519 signs and verifies", signed), _sockets()]
    try:
        import torch
    except ImportError as problem:
        return [*rows, ("torch", str(problem), False)]
    device = "CUDA" if torch.cuda.is_available() else "MPS" if torch.backends.mps.is_available() else "CPU"
    tokens, flops = training_speed()
    return [
        *rows,
        ("torch device", device, True),
        ("training speed, 1 thread", f"{tokens:,.0f} tokens/s at 1.0M parameters, {flops / 1e9:.1f} GFLOP/s", True),
    ]


def _sockets() -> Finding:
    import zmq

    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(b"ping")
        arrived = bool(receiver.poll(2000))
        return ("loopback sockets", f"ZeroMQ {zmq.zmq_version()}" if arrived else "nothing arrived in 2 s", arrived)
    except zmq.ZMQError as problem:
        return ("loopback sockets", str(problem), False)
    finally:
        context.destroy(linger=0)


def training_speed(seconds: float = 2.0) -> tuple[float, float]:
    """Training tokens and floating-point operations per second of one thread on a 1.0M-parameter model."""
    import torch
    import torch.nn.functional as F

    from talkoot.model.config import ModelConfig
    from talkoot.model.stage import Stage

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config, context, batch = ModelConfig.from_depth(4, 1024), 128, 4
        model = Stage(config, 0, config.layer_count, seed=0)
        rows = torch.randint(1024, (batch, context + 1), generator=torch.Generator().manual_seed(0))
        steps, started = -1, 0.0
        while steps < 3 or time.process_time() - started < seconds:
            if steps == 0:
                started = time.process_time()  # the first round warms caches
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            steps += 1
        rate = steps * batch * context / (time.process_time() - started)
        return rate, 3 * rate * config.flops_per_token(context)
    finally:
        torch.set_num_threads(threads)
