"""A fork server of ranks, with everything they need imported: `python -m ranks_support.template
SOCKET`. Importing torch and offbeat takes seconds of a core, and tests start hundreds of ranks.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import socket
import sys
import threading
import typing
import weakref
from collections.abc import Iterator
from typing import NoReturn

gc.disable()  # while modules are imported, which leaves no garbage: a quarter of their time

import offbeat  # noqa: E402
from offbeat_lab.forking import serve  # noqa: E402
from ranks_support.templates import WORKER_SERVER  # noqa: E402

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "scipy.optimize",
    "offbeat_lab.worker",
    "pytest",
    "ranks_support.process",
)
"""What most ranks import sooner or later, beside offbeat: optimizers the first in their first step,
K-FAC `scipy.optimize` where it fits what links cost, islands and checkpoints parts of
`torch.distributed`, jobs of tests what starts ranks, and servers of the lab's workers the lab.
"""

NOT_PRELOADED = ("integrations", "triton_kernels", "__main__")
"""Parts of offbeat that need packages which may be missing, or run when they are imported."""


def main() -> None:
    for name in (*PRELOADED, *modules_of_offbeat()):
        importlib.import_module(name)
    from offbeat.codec import jit
    from ranks_support import rank
    from ranks_support.measurements import measure_little

    jit.warm()
    measure_little()
    warm_sharded_tensors()
    forget_finalizers()
    gc.enable()  # for what is forked
    with socket.socket(fileno=int(sys.argv[1])) as control:
        order = serve(control)
    if order is not None:
        if order.arguments[0] == WORKER_SERVER:
            sys.argv = [WORKER_SERVER, str(order.descriptors[0]), *order.arguments[1:]]
            try:
                importlib.import_module(WORKER_SERVER).main()
            except SystemExit as ended:  # of a worker that has run a script
                if not isinstance(ended.code, int):
                    raise
                end(ended.code)
        orders = json.loads(order.arguments[0])
        rank.run(rank.Orders(**orders | {"result_fd": order.descriptors[0]}))
        end()


def warm_sharded_tensors() -> None:
    """Train one step with a fake process group of six ranks, which is no test's size: PyTorch has
    looked then for what it looks for at the first sharded tensor of a process.

    A build for GPUs starts threads in the first backward pass, and a server must have none.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rank_jobs import islands

    if torch.backends.cuda.is_built():
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    model = islands.make_model()
    islands.shard(model, islands.make_mesh(6, 3))
    islands.loss_of(model, 0, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    islands.make_mesh.cache_clear()
    dist.destroy_process_group()


def modules_of_offbeat() -> Iterator[str]:
    """All that a session may import when it needs it."""
    for module in pkgutil.walk_packages(offbeat.__path__, "offbeat."):
        if not set(module.name.split(".")) & set(NOT_PRELOADED):
            yield module.name


def forget_finalizers() -> None:
    """What was imported so far has nothing to finalize at the end of a rank.

    torch would take its operators out of its tables one by one, and so write to thousands of pages
    that the rank shares with its template.
    """
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    # Triton's library empties these caches of imported modules at exit, which writes to as many.
    typing._cleanups.clear()  # type: ignore[attr-defined]  # private


def end(status: int = 0) -> NoReturn:
    """End this rank as an interpreter ends, save that modules are not taken apart.

    Taking them apart writes to every page that the rank still shares with its template, all of
    which the kernel copies first: 0.5 seconds of a core a rank, ten times what else it costs to
    start and to end one.
    """
    threading._shutdown()  # waits for threads, as at the end of a main module
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream.closed:  # by a script
            continue
        try:
            stream.flush()
        except OSError:
            status = status or 120  # as an interpreter's
    os._exit(status)


if __name__ == "__main__":
    main()
