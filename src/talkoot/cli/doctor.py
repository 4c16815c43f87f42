"""``talkoot doctor``: is this machine fit, and how fast is it?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from pathlib import Path

from talkoot.cli.output import print_json, print_table
from talkoot.core.errors import Exit
from talkoot.core.keys import Key, verify

NEEDED = ("torch", "pyzmq", "msgspec", "cryptography", "safetensors", "tokenizers", "numpy", "starlette", "uvicorn")
OPTIONAL = {"transformers": "hf", "pyarrow": "data", "datasets": "data"}
Finding = tuple[str, str, bool]


def run(*, as_json: bool) -> None:
    """Run the verb; exits with 4 when something needed does not work."""
    findings = [*_machine(), *_libraries(), *_works()]
    if as_json:
        print_json([{"check": what, "found": found, "ok": ok} for what, found, ok in findings])
    else:
        print_table([("ok" if ok else "BAD", what, found) for what, found, ok in findings])
    if not all(ok for _, _, ok in findings):
        sys.exit(Exit.FAILED_CHECK)


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
