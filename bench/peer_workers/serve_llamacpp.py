"""llama.cpp's server as a process of its own, until SIGTERM. Its argument is the configuration, as JSON."""

from __future__ import annotations

import json
import signal
import sys

import xllamacpp
from llamacpp_params import about, parameters

server = xllamacpp.Server(parameters(json.loads(sys.argv[1])))
print(json.dumps({"address": server.listening_address, **about()}), flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
del server
