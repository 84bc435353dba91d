"""Prints the CMake options to build llama.cpp with on this machine."""

from outstride.bench.peers.build import this_machine

print(" ".join(this_machine()))
