"""What is said of the network, for plans that expect so many bytes a second of it (the arguments)."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace

from harness import make_plan, run_config

from pdmpi.plan.cluster import Cluster, Level
from pdmpi.runtime.network import network_notes
from pdmpi.transport.mpi import MpiTransport

transport = MpiTransport(60.0)
names = transport.gather(socket.gethostname().encode())
hosts = json.loads(transport.broadcast(json.dumps([name.decode() for name in names]).encode()))
plan = make_plan(run_config("conv"), (1, 1))
for bandwidth in map(float, sys.argv[1:]):
    network = Level(name="network", count=2, bandwidth_bytes_per_s=bandwidth)
    begin = time.monotonic()
    notes = network_notes(replace(plan, cluster=Cluster(name="t", levels=(network,))), transport, hosts)
    if transport.rank == 0:
        print(json.dumps({"notes": notes, "seconds": time.monotonic() - begin}), flush=True)
transport.close()
