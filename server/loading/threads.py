"""How computing threads behave beside the event loop, set before torch loads its OpenMP runtime. Imports no
torch.

Threads that wait for work sleep: spinning ones would take the cores from HTTP, and on a busy machine from
each other. Whatever the user's environment says comes first.
"""

import os


def configure_threads() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
