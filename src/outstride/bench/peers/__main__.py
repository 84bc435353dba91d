"""Prints the CMake options to build llama.cpp with here, for one instruction set if it is named."""

import sys

from outstride.bench.peers.build import this_machine

print(" ".join(this_machine(*sys.argv[1:2])))
